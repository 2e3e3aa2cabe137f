"""One GRPO step of a toy policy, ours and a peer's: CPU seconds of rollout and update.

    python -m benchmarks.grpo_step [--peer] [--json]

2 layers, width 64, 4 heads of 16 (as many kv heads), feed-forward 128, 256 ids, float32,
AdamW; 4 prompts x 8 samples, 64 prompt + 64 completion tokens, every length the same (the
stop id is never sampled). A step is one rollout through the engine, packing, one update and
the adoption of the new policy. All ways run in one process and take turns step by step, so
that what else the machine does falls on all alike; the table has medians, the first step
(which compiles), and the spread of the ratio between neighbouring steps.

`--peer` needs google-tunix==0.1.7 beside this project's packages: `make peers`, then

    .venv-peers/bin/python -m benchmarks.grpo_step --peer

What flatters which side: every completion is as long as the longest (a peer's padding costs it
nothing), prompts are not shared between turns (our prefixes save little), and one policy of
this size is mostly dispatch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

VOCAB, PROMPTS, SAMPLES, PROMPT, COMPLETION = 256, 4, 8, 64, 64
STOP = VOCAB - 1  # outside valid_vocab, so it is never sampled
PEER = "google-tunix 0.1.7"

POLICY = PolicyConfig(
    vocab_size=VOCAB, width=64, layers=2, heads=4, kv_heads=4, head_size=16, feed_forward=128,
    rope_theta=1e4, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=STOP,
)  # fmt: skip
ENGINE = EngineSettings(
    slots=PROMPTS * SAMPLES, page_size=16, pages=PROMPTS * SAMPLES * 9, max_prompt=PROMPT,
    max_new_tokens=COMPLETION, steps_per_launch=COMPLETION, row_tokens=PROMPT,
)  # fmt: skip
UPDATE = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
    entropy_weight=0.0, temperature=1.0, micro_batch_rows=PROMPTS, remat=False,
)  # fmt: skip
OPTIMIZER = OptimizerSettings(
    kind="adamw", learning_rate=1e-4, adam_learning_rate=1e-4, warmup_steps=0
)

Step = dict[str, float]  # CPU seconds of "rollout" and of the whole "step"; ours: "gap"


async def steps_of_ours(share_prefixes: bool) -> AsyncIterator[Step]:
    """Yields what each step cost, for as long as it is asked for more."""
    optimizer = make_optimizer(OPTIMIZER)
    state = start(parameters.init_params(POLICY, jax.random.key(0)), optimizer)
    service = EngineService(
        Executor(ENGINE, Device(POLICY, ENGINE)),
        PolicySnapshot(0, jax.tree.map(jnp.copy, state.masters)), share_prefixes=share_prefixes,
    )  # fmt: skip
    rng, step = np.random.default_rng(0), 0
    row = PROMPT + SAMPLES * (1 + COMPLETION)  # a whole group; 4 turns where nothing is shared
    async with service:
        while True:
            begin = time.process_time()
            drawn = [tokens(ids) for ids in rng.integers(0, STOP, (PROMPTS, PROMPT))]
            prompts = [[Prompt(tokens(p[:-1]), tokens(p[-1:]))] * SAMPLES for p in drawn]
            completions = await asyncio.gather(
                *(
                    service.complete(
                        prompt, SamplingParams(1.0, 1.0, COMPLETION, (STOP,), 1000 * step + i)
                    )
                    for i, prompt in enumerate(p for members in prompts for p in members)
                )
            )
            assert all(len(completion.tokens) == COMPLETION for completion in completions)
            rolled_out = time.process_time()
            packed = pack(
                *make_groups(prompts, completions, step), row_length=row,
                share_prefixes=share_prefixes, rows_multiple=UPDATE.micro_batch_rows,
            )  # fmt: skip
            state, metrics = update.learn(POLICY, optimizer, UPDATE, state, {}, [packed.batch])
            step += 1
            copied = PolicySnapshot(step, jax.tree.map(jnp.copy, state.masters))
            await service.adopt(copied, drain=True)
            # The gap says that what was learnt from is what was sampled.
            yield {
                "rollout": rolled_out - begin,
                "step": time.process_time() - begin,
                "gap": metrics["logprob_gap_max"],
            }


@contextlib.contextmanager
def ours(share_prefixes: bool) -> Iterator[Callable[[], Step]]:
    """Gives a function that takes one step."""
    loop, steps = asyncio.new_event_loop(), steps_of_ours(share_prefixes)
    try:
        yield lambda: loop.run_until_complete(anext(steps))
    finally:
        loop.run_until_complete(steps.aclose())
        loop.close()


def measure(steps: int, peer: bool) -> dict[str, list[Step]]:
    """Takes `steps` steps of every way, in turns."""
    with ours(True) as shared, ours(False) as unshared:
        ways = {"ours": shared, "ours, sharing off": unshared}
        measured: dict[str, list[Step]] = {name: [] for name in ways}

        def everybody_else() -> None:
            for name, way in ways.items():
                measured[name].append(way())

        if peer:
            # Only its user has it: by name, so that this file can be imported without it.
            tunix = importlib.import_module("benchmarks.peer_grpo_step")
            measured[PEER] = tunix.run(steps, everybody_else)
        else:
            for _ in range(steps):
                everybody_else()
    return measured


def summary(steps: list[Step], against: list[Step] | None) -> dict[str, float]:
    """Medians after the first two steps, the first step, and quartiles of ratios by step."""
    later = steps[2:]
    found = {key: statistics.median(step[key] for step in later) for key in ("rollout", "step")}
    found |= {"update": found["step"] - found["rollout"], "first": steps[0]["step"]}
    for key in ("rollout", "step") if against else ():
        ratios = [a[key] / b[key] for a, b in zip(later, against[2:], strict=False)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found |= {f"{key} ratio": middle, f"{key} ratio low": low, f"{key} ratio high": high}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", action="store_true", help="google-tunix==0.1.7 is installed here")
    parser.add_argument("--steps", type=int, default=40, help="of each way")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    measured = measure(options.steps, options.peer)
    against = measured.get(PEER)
    found = {name: summary(steps, against) for name, steps in measured.items()}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    columns = ("rollout", "update", "step", "first")
    print(f"{'CPU seconds a step':22}" + "".join(f"{name:>10}" for name in columns))
    for name, m in found.items():
        print(f"{name:22}" + "".join(f"{m[column]:10.3f}" for column in columns))
    for name, m in found.items() if against else ():
        for key in ("rollout", "step") if name != PEER else ():
            middle, low, high = (m[f"{key} ratio{end}"] for end in ("", " low", " high"))
            print(f"{name}, {key} over {PEER}'s: {middle:.3f} (quartiles {low:.3f}-{high:.3f})")


if __name__ == "__main__":
    main()
