"""The rollouts of a training run: what a step draws, reads and counts.

Where a run has several processes, each has an engine and reads its share of a round's draws,
every so-many-th ordinal; then all tell all what came of them. So every process goes on from the
same groups, in the same order, and the account is the same everywhere. Only what was said
travels: prompts are made again from the task (`spool`).

Above: train, which learns from it; below: task_stream and rollout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.parallel import hosts
from notepad_jax.programs.task_stream import TaskStream
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.rollout import collector, dynamic_sampling, rewards, spool
from notepad_jax.rollout.dynamic_sampling import Rollout, Wanted
from notepad_jax.rollout.groups import ages
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Chunks, Completer, Draw, Group, Task


class ReadingsFailed(ValueError):
    """More readings of a step failed than the config lets pass."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Draws and reads; what it remembers is in the ledgers that it is given and returns."""

    stream: TaskStream
    reader: Reader
    score: rewards.Score
    wanted: Wanted
    group_size: int
    seed: int
    max_failed_share: float

    async def step(self, ledger: Ledger, version: int) -> tuple[Rollout, dict[str, float]]:
        """Returns what policy `version` has to learn from, and metrics of how it came about.

        Raises ReadingsFailed where more of the groups failed than `max_failed_share`.
        """
        documents = self.stream.documents(self.reader.tokenizer, self.reader.rules.chunk_size)
        reader = dataclasses.replace(self.reader, chunks_of=_held(documents))
        rollout = await dynamic_sampling.collect_informative(
            ledger, lambda ordinals: self._read(reader, ordinals), self.wanted, version
        )
        self._check(rollout)
        return rollout, rollout.stats.metrics() | ages(rollout.batch, version) | {
            "data/draws": rollout.ledger.next,
            "data/questions_left_out": self.stream.left_out,
            "data/truncated_documents": documents.truncated_documents,
            "data/truncated_tokens": documents.truncated_tokens,
        }

    async def _read(
        self, reader: Reader, ordinals: Sequence[int]
    ) -> tuple[list[Group], list[collector.Failed]]:
        own = ordinals[hosts.index() :: hosts.count()]
        draws = [Draw(ordinal, self.stream.records.at(ordinal)) for ordinal in own]
        read = await collector.collect(draws, reader, self.group_size, self.seed, self.score)
        return read if hosts.count() == 1 else self._shared(reader, *read)

    def _shared(
        self, reader: Reader, groups: list[Group], failed: list[collector.Failed]
    ) -> tuple[list[Group], list[collector.Failed]]:
        """Tells the other processes what was read here, and returns what all have read."""
        every = hosts.gather(json.dumps(spool.tell(groups, failed)).encode())
        records = self.stream.records
        draws = functools.cache(lambda ordinal: records.at(ordinal))
        for number, said in enumerate(every):
            if number != hosts.index():
                others = spool.told(
                    json.loads(said), lambda o, question: draws(o)[question], reader, self.score
                )
                groups, failed = groups + others[0], failed + others[1]
        return tuple(sorted(found, key=lambda one: one.place) for found in (groups, failed))

    def _check(self, rollout: Rollout) -> None:
        failed, sampled = rollout.failed, rollout.stats.groups_sampled
        if failed and len(failed) > self.max_failed_share * sampled:
            raise ReadingsFailed(
                f"readings failed in {len(failed)} of the {sampled} groups of a step "
                f"(rollout.max_failed_share is {self.max_failed_share}); the first: {failed[0]}"
            ) from failed[0].failure

    def saved(self, ledger: Ledger) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the ledger, and which stream's it is."""
        return {"stream": dict(self.stream.records.identity), "ledger": spool.encode(ledger)}

    def restored(self, saved: Mapping[str, Any]) -> Ledger:
        """Returns the ledger that was saved; ValueError if it is another stream's."""
        records = self.stream.records
        records.check(saved["stream"])
        return spool.decode(
            saved["ledger"],
            lambda ordinal, question: records.at(ordinal)[question],
            self.reader,
            self.score,
        )


def rollouts(
    config: ConfigDict, stream: TaskStream, completer: Completer, tokenizer: Tokenizer,
    template: Template, rules: Rules,
) -> Rollouts:  # fmt: skip
    """Returns how a run samples. Raises ValueError for a config that cannot work."""
    r = config.rollout
    return Rollouts(
        stream=stream,
        reader=Reader(
            completer, tokenizer, template, rules,
            TurnSampling(r.temperature, r.top_p, template.stop_ids, 0),
            stream.documents(tokenizer, rules.chunk_size),
        ),
        score=rewards.of(config.tasks.reward),
        wanted=Wanted(r.documents, stream.questions, r.max_rounds, r.max_staleness),
        group_size=r.group_size,
        seed=config.seed,
        max_failed_share=r.max_failed_share,
    )  # fmt: skip


def account(before: Ledger, rollout: Rollout) -> dict[str, Any]:
    """Returns a step's line of ledger.jsonl: what was drawn, and what became of what."""
    return {
        "drawn": [before.next, rollout.ledger.next],  # the second is the next step's first
        **{outcome.value: places for outcome, places in rollout.settled.items()},
        "waiting": [one.group.place for one in rollout.ledger.waiting],
    }


def _held(documents: Callable[[Task], Chunks]) -> Callable[[Task], Chunks]:
    """Holds on to all chunks: a document drawn again in a step is not tokenised again."""
    held: list[Chunks] = []

    def chunks_of(task: Task) -> Chunks:
        held.append(documents(task))
        return held[-1]

    return chunks_of
