"""One GRPO step of a toy policy, ours and a peer's: CPU seconds of rollout and update.

    python -m benchmarks.grpo_step [--peer] [--sizes small] [--json]

float32, AdamW, every length the same (the stop id is never sampled), in three SIZES:

- `small`: 2 layers, width 64, 256 ids; 4 prompts x 8 samples, 64 prompt + 64 completion tokens.
- `large`: 4 layers, width 256, 4,096 ids; 2 x 8, 256 + 128.
- `turns`: the small policy reads as a memory agent does: 4 chunks x 8 readings, 480 tokens of a
  prompt in common and 32 of each reading's own (its memory), 32 to write.

A step is one rollout through the engine, packing, one update and the adoption of the new policy.
All ways run in one process and take turns step by step, so that what else the machine does falls
on all alike; the table has medians, the first step (which compiles), and the spread of the ratio
between neighbouring steps.

`--peer` needs google-tunix==0.1.7 beside this project's packages: `make peers`, then

    .venv-peers/bin/python -m benchmarks.grpo_step --peer

What flatters which side: every completion is as long as the longest (a peer's padding costs it
nothing); in `small` and `large` prompts are not shared between turns (our prefixes save little),
in `turns` they are, and the peer, which has no groups of different prompts, reads prompts of the
same length that are alike. A policy of the small size is mostly dispatch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import json
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sharing import make_groups
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import ratios, update
from notepad_jax.grpo.batch import pack
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import start
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, tokens

PEER = "google-tunix 0.1.7"
KEYS = ("rollout", "update", "step")  # parts of a step, and all of it


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A policy (as many kv heads as heads), and what is sampled of it in a step."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    head_size: int = 16
    feed_forward: int = 128
    vocab: int = 256
    prompts: int = 4
    samples: int = 8  # of each prompt
    prompt: int = 64  # tokens
    own: int = 1  # of them, a sample's own: the last ones
    completion: int = 64

    @property
    def stop(self) -> int:
        """An id outside the valid ones, so it is never sampled."""
        return self.vocab - 1


SIZES = {
    "small": Sizes(),
    "large": Sizes(
        layers=4, width=256, head_size=64, feed_forward=768, vocab=4096, prompts=2, prompt=256,
        completion=128,
    ),
    "turns": Sizes(prompt=512, own=32, completion=32),
}  # fmt: skip


def policy(sizes: Sizes) -> PolicyConfig:
    return PolicyConfig(
        vocab_size=sizes.vocab, width=sizes.width, layers=sizes.layers, heads=sizes.heads,
        kv_heads=sizes.heads, head_size=sizes.head_size, feed_forward=sizes.feed_forward,
        rope_theta=1e4, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
        valid_vocab=sizes.stop,
    )  # fmt: skip


def engine(sizes: Sizes) -> EngineSettings:
    slots, context = sizes.prompts * sizes.samples, sizes.prompt + sizes.completion
    return EngineSettings(
        slots=slots, page_size=16, pages=slots * (context // 16 + 1), max_prompt=sizes.prompt,
        max_new_tokens=sizes.completion, steps_per_launch=sizes.completion,
        row_tokens=sizes.prompt,
    )  # fmt: skip


def learning(sizes: Sizes) -> UpdateSettings:
    return UpdateSettings(
        ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
        entropy_weight=0.0, temperature=1.0, micro_batch_rows=sizes.prompts, remat=False,
    )  # fmt: skip


OPTIMIZER = OptimizerSettings(
    kind="adamw", learning_rate=1e-4, adam_learning_rate=1e-4, warmup_steps=0
)

Step = dict[str, float]  # CPU seconds of "rollout" and of the whole "step"; ours: "gap"


async def steps_of_ours(sizes: Sizes, share_prefixes: bool) -> AsyncIterator[Step]:
    """Yields what each step cost, for as long as it is asked for more."""
    config, settings, learnt = policy(sizes), engine(sizes), learning(sizes)
    optimizer = make_optimizer(OPTIMIZER)
    state = start(parameters.init_params(config, jax.random.key(0)), optimizer)
    service = EngineService(
        Executor(settings, Device(config, settings)),
        PolicySnapshot(0, jax.tree.map(jnp.copy, state.masters)), share_prefixes=share_prefixes,
    )  # fmt: skip
    rng, step = np.random.default_rng(0), 0
    # A whole group, or as many of its turns as take the same room where nothing is shared.
    row = sizes.prompt - sizes.own + sizes.samples * (sizes.own + sizes.completion)
    if not share_prefixes:
        row -= row % (sizes.prompt + sizes.completion)
    async with service:
        while True:
            begin = time.process_time()
            prompts = drawn(sizes, rng)
            completions = await asyncio.gather(
                *(
                    service.complete(
                        prompt,
                        SamplingParams(1.0, 1.0, sizes.completion, (sizes.stop,), 1000 * step + i),
                    )
                    for i, prompt in enumerate(p for members in prompts for p in members)
                )
            )
            assert all(len(completion.tokens) == sizes.completion for completion in completions)
            rolled_out = time.process_time()
            packed = pack(
                *make_groups(prompts, completions, step), row_length=row,
                share_prefixes=share_prefixes, rows_multiple=learnt.micro_batch_rows,
            )  # fmt: skip
            state, metrics = update.learn(config, optimizer, learnt, state, {}, [packed.batch])
            step += 1
            copied = PolicySnapshot(step, jax.tree.map(jnp.copy, state.masters))
            await service.adopt(copied, drain=True)
            # The gap says that what was learnt from is what was sampled.
            yield {
                "rollout": rolled_out - begin,
                "step": time.process_time() - begin,
                "gap": metrics["logprob_gap_max"],
            }


def drawn(sizes: Sizes, rng: np.random.Generator) -> list[list[Prompt]]:
    """Returns random prompts, [prompts][samples]; with one token of its own none has any."""
    made = []
    for _ in range(sizes.prompts):
        ids = rng.integers(0, sizes.stop, sizes.prompt)
        shared, last = tokens(ids[: -sizes.own]), tokens(ids[-sizes.own :])
        members = sizes.samples if sizes.own > 1 else 0
        own = [tokens(rng.integers(0, sizes.stop, sizes.own)) for _ in range(members)]
        made.append([Prompt(shared, tail) for tail in own or [last] * sizes.samples])
    return made


@contextlib.contextmanager
def ours(sizes: Sizes, share_prefixes: bool) -> Iterator[Callable[[], Step]]:
    """Gives a function that takes one step."""
    loop, steps = asyncio.new_event_loop(), steps_of_ours(sizes, share_prefixes)
    try:
        yield lambda: loop.run_until_complete(anext(steps))
    finally:
        loop.run_until_complete(steps.aclose())
        loop.close()


def measure(steps: int, peer: bool, sizes: Sizes = SIZES["small"]) -> dict[str, list[Step]]:
    """Takes `steps` steps of every way, in turns."""
    with ours(sizes, True) as shared, ours(sizes, False) as unshared:
        ways = {"ours": shared, "ours, sharing off": unshared}
        measured: dict[str, list[Step]] = {name: [] for name in ways}

        def everybody_else() -> None:
            for name, way in ways.items():
                measured[name].append(way())

        if peer:
            # Only its user has it: by name, so that this file can be imported without it.
            tunix = importlib.import_module("benchmarks.peer_grpo_step")
            measured[PEER] = tunix.run(sizes, steps, everybody_else)
        else:
            for _ in range(steps):
                everybody_else()
    return measured


def summary(steps: list[Step], against: list[Step] | None) -> dict[str, float]:
    """Medians after the first two steps, the first step, and quartiles of ratios by step."""
    later = [_with_update(step) for step in steps[2:]]
    found = {key: statistics.median(step[key] for step in later) for key in KEYS}
    found["first"] = steps[0]["step"]
    for key in KEYS if against else ():
        theirs = (_with_update(step)[key] for step in against[2:])
        ratios = [a[key] / b for a, b in zip(later, theirs, strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {f"{key} ratio": middle, f"{key} ratio low": low, f"{key} ratio high": high}
    return found


def _with_update(step: Step) -> Step:
    return step | {"update": step["step"] - step["rollout"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="google-tunix==0.1.7 is installed here")
    parser.add_argument("--sizes", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=40, help="of each way")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure(options.steps, options.peer, SIZES[options.sizes])
    against = measured.get(PEER)
    found = {name: summary(steps, against) for name, steps in measured.items()}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    columns = (*KEYS, "first")
    print(f"{'CPU seconds a step':22}" + "".join(f"{name:>10}" for name in columns))
    for name, m in found.items():
        print(f"{name:22}" + "".join(f"{m[column]:10.3f}" for column in columns))
    for name, m in found.items() if against else ():
        for key in KEYS if name != PEER else ():
            middle, low, high = (m[f"{key} ratio{end}"] for end in ("", " low", " high"))
            print(f"{name}, {key} over {PEER}'s: {middle:.3f} (quartiles {low:.3f}-{high:.3f})")


if __name__ == "__main__":
    main()
