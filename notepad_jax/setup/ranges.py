"""What numbers and words of a config may be, checked when it is read (`configuration.load`).

Every number must be finite on the device (float32), and every whole number fit int32, unless
its row in `RANGES` says otherwise. A row stands here only for what no value of a lower floor
refuses in time: those that a section alone decides (`OptimizerSettings`, `Rules`, `Lora`,
`SamplingParams`) are built here once, so that their own words refuse the rest. What relates a
key to others or to the policy (pages for a whole context, a row that holds a turn) is found
out by `UpdateSettings`, `EngineSettings` and the programs, before anything is written.

A new number in a config: a row here, or a check in the value that holds it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from notepad_jax.eval import methods
from notepad_jax.eval.lengths import parse_length
from notepad_jax.grpo.optimizer import OptimizerSettings
from notepad_jax.model.lora import Lora
from notepad_jax.reading.memory_agent import MOST_TOKENS
from notepad_jax.rollout import local
from notepad_jax.setup import builders, curriculum
from notepad_jax.starter import mixed
from notepad_jax.text.chunks import CHUNK_ENDS
from notepad_jax.types import SamplingParams

# What is 0 or infinite in float32 is so on the device.
TINY, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `lowest` to `highest`, both included; `words` say it to a user."""

    lowest: float
    highest: float
    words: str
    whole: bool = False

    def problem(self, value: Any) -> str | None:
        """Returns what is wrong with `value`, to be read behind a key's name; None if nothing."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"is {value!r}; it must be a number, {self.words}"
        if not self.lowest <= value <= self.highest:  # true of nan, too
            return f"is {_shown(value)}; it must be {self.words}"
        if self.whole and not isinstance(value, int):
            return f"is {value}; it must be a whole number, {self.words}"
        return None


def _shown(number: float) -> str:
    long = isinstance(number, int) and number.bit_length() > 64
    return f"a number of {number.bit_length()} bits" if long else f"{number}"


def whole(lowest: int, highest: int = INT32) -> Range:
    return Range(lowest, highest, f"at least {lowest} and at most {highest}", whole=True)


SHARE = Range(0, 1, "at least 0 and at most 1")  # probabilities, too
UNSIGNED = Range(0, LARGEST, "0 or more, and finite in float32")
SECONDS = Range(0.1, 86400, "at least 0.1 and at most 86400, a day")
POSITIVE = Range(TINY, LARGEST, "above 0 and finite, in float32")
NATS = Range(0, 100, "at least 0 and at most 100 nats")  # of a token: an entropy, a log ratio
NOT_NEGATIVE = Range(0, LARGEST, "at least 0 and finite, in float32")

# By key; sections in a list (`lessons`) share their rows.
RANGES: dict[str, Range] = {
    "seed": whole(0, 2**32 - 1),
    "steps": whole(1),
    "data.tokens": whole(1),
    "data.unanswerable": SHARE,
    "data.two_hop": SHARE,
    "data.distractor_share": SHARE,
    "data.chapter_rate": SHARE,
    "tasks.max_tokens": whole(0),
    "tasks.retire_at": SHARE,
    "rollout.documents": whole(1),
    "rollout.max_rounds": whole(1),
    "rollout.max_staleness": whole(0),
    "rollout.max_failed_share": SHARE,
    "rollout.archive": whole(0),
    "rollout.archive_turns": whole(0),
    "rollout.local.samples": whole(0),
    "rollout.local.share": SHARE,
    "rollout.local.weight": UNSIGNED,
    "grpo.full_rate_at": SHARE,
    "grpo.ess_at": SHARE,
    "grpo.scale_memory": SHARE,
    "grpo.overlong_window": whole(0),
    "grpo.overlong_weight": UNSIGNED,
    "grpo.kl_weight": UNSIGNED,
    "grpo.entropy_weight": UNSIGNED,
    "grpo.off_policy_at": NATS,
    "grpo.entropy_high": NATS,
    "grpo.entropy_low": NATS,
    "grpo.constant": UNSIGNED,
    "grpo.minibatches": whole(1),
    "grpo.epochs": whole(1),
    "grpo.max_skipped": whole(1),
    "grpo.row_length": whole(0),  # 0: derived (`sizes`)
    "grpo.lora.rank": whole(0),  # 0 is off; `Lora` is only built above it
    "grpo.lora.alpha": POSITIVE,
    "parallel.devices": whole(0),
    "parallel.tensor": whole(1),
    "engine.tensor": whole(1),
    "engine.replicas": whole(0),
    "engine.per_cpu": whole(1),
    "engine.max_prompt": whole(0),
    "engine.pages": whole(0),  # 0: derived, as row_tokens
    "engine.row_tokens": whole(0),
    "serve.max_prompt": whole(0),  # 0: a turn's
    "serve.max_completion": whole(0),
    "serve.queue": whole(0),
    "serve.queue_tokens": whole(0),
    "serve.connections": whole(1),
    "serve.header_seconds": SECONDS,
    "serve.body_seconds": SECONDS,
    "serve.body_bytes": whole(2**23),  # the largest body
    "checkpoint.every": whole(1),
    "checkpoint.keep": whole(1),
    "validation.every": whole(0),
    "validation.samples": whole(1),
    "validation.split": SHARE,
    "validation.repeats": whole(1),
    "validation.patience": whole(0),
    "endpoint.timeout": POSITIVE,
    "evaluate.samples": whole(0),
    "evaluate.usual_samples": whole(1),
    "evaluate.repeats": whole(1),
    "evaluate.chunk_size": whole(1, MOST_TOKENS),
    "evaluate.context": whole(1, MOST_TOKENS),
    "evaluate.at_once": whole(1),
    "evaluate.archive_turns": whole(0),
    "evaluate.questions": whole(1),
    "evaluate.questions_per_document": whole(1),
    "evaluate.questions_longest": whole(1),
    "evaluate.questions_per_longest": whole(1),
    "evaluate.data.unanswerable": SHARE,
    "evaluate.data.two_hop": SHARE,
    "evaluate.data.distractor_share": SHARE,
    "evaluate.data.chapter_rate": SHARE,
    "checkpoint_every": whole(1),
    "drill_steps": whole(0),
    "first_window": whole(0),
    "noise": SHARE,
    "guidance": NOT_NEGATIVE,
    "policy.width": whole(1),
    "policy.layers": whole(1),
    "policy.heads": whole(1),
    "policy.kv_heads": whole(1),
    "policy.head_size": whole(1),
    "policy.feed_forward": whole(1),
    "policy.rope_theta": POSITIVE,
    "policy.rms_eps": POSITIVE,
    "habits.write_found": SHARE,
    "habits.keep": SHARE,
    "habits.keep_at_chapter": SHARE,
    "initial.embed": POSITIVE,
    "initial.branches": POSITIVE,
    "lessons.chunks": whole(1),
    "lessons.chunk_size": whole(1),
    "lessons.tails": whole(1),
    "lessons.share": SHARE,
}
# Of keys that have no row.
FINITE = Range(-LARGEST, LARGEST, "finite, in float32")
FINITE_WHOLE = whole(-INT32 - 1)


# Words that no value of a lower floor refuses before a weight is loaded; of a tuple, each of them.
WORDS: dict[str, tuple[str, ...]] = {
    "checkpoint.handoff": ("storage", "memory"),
    "reading.chunk_ends": CHUNK_ENDS,
    "evaluate.methods": methods.METHODS,
    "evaluate.data.kinds": tuple(mixed.OF_NAME),
}
LENGTHS = (
    "evaluate.lengths", "evaluate.lengths_before", "evaluate.usual_lengths",
    "evaluate.train_length", "validation.lengths",
)  # fmt: skip


def _checkpoint(section: ConfigDict) -> None:
    if section.handoff == "storage" and section.every != 1:
        raise ValueError(
            f"checkpoint.every is {section.every}, but handoff='storage' reads each step's "
            f"checkpoint; use every=1, or handoff='memory'"
        )


def _sampling(section: ConfigDict) -> SamplingParams:
    return SamplingParams(section.temperature, section.top_p, 1, (), 0)


def _adapters(lora: ConfigDict) -> Lora | None:
    return Lora(lora.rank, float(lora.alpha), tuple(lora.targets)) if lora.rank else None


# Sections whose values check themselves, and what makes the value.
VALUES: dict[str, Callable[[ConfigDict], Any]] = {
    "reading": builders.rules,
    "tasks": lambda section: curriculum.parsed(section.curriculum),
    "rollout": _sampling,
    "rollout.local": lambda section: local.Wanted(**section),
    "evaluate": _sampling,
    "validation": _sampling,
    "checkpoint": _checkpoint,
    "optimizer": lambda section: OptimizerSettings(**section),
    "grpo.lora": _adapters,
}


def problems(config: ConfigDict) -> Iterator[str]:
    """Yields one line for every number or word that cannot be, with key, value and what can."""
    sound = True
    for key, value in numbers(config):
        row = RANGES.get(key, FINITE_WHOLE if isinstance(value, int) else FINITE)
        if problem := row.problem(value):
            sound = False
            yield f"{key} {problem}"
    for section, make in VALUES.items() if sound else ():
        try:
            if (found := _value(config, section)) is not None:
                make(found)
        except (ValueError, TypeError, AttributeError) as error:
            yield f"in section {section}: {error}"
    for key, known in WORDS.items():
        for word in _words(config, key):
            if word not in known:
                yield f"{key} has {word!r}; use one of {', '.join(known)}"
    for key in LENGTHS:
        for word in filter(None, _words(config, key)):
            try:
                parse_length(word)
            except (ValueError, TypeError) as error:
                yield f"{key} has {word!r}: {error}"


def numbers(config: Mapping[str, Any] | ConfigDict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields ("rollout.documents", 5), ...: numbers, those in lists, and all that has a row."""
    for key, value in config.items():
        name = prefix + key
        items = value if isinstance(value, list | tuple) else (value,)
        for item in items:
            if isinstance(item, Mapping | ConfigDict):
                yield from numbers(item, f"{name}.")
            elif name in RANGES or (isinstance(item, int | float) and not isinstance(item, bool)):
                yield name, item


def _words(config: ConfigDict, key: str) -> tuple[str, ...]:
    value = _value(config, key)
    return (value,) if isinstance(value, str) else tuple(value or ())


def _value(config: ConfigDict, name: str) -> Any:
    for word in name.split("."):
        config = config.get(word)
        if config is None:
            return None
    return config
