"""What a shared prefix saves: prefill and update with sharing on and off, in one run.

    python -m benchmarks.sharing            # a table; --json for numbers

G prompts begin with the same prefix, ten times as long as what is private to each turn
(end of the prompt and completion). Both ways run the same code on the same prompts and must
give the same completions, loss and gradient; what differs is the number of tokens and so
the CPU time. The ways alternate, the medians of their CPU seconds (`time.process_time`, all
threads) are compared. The lengths fill the engine's padded shapes both ways. Expected, on
either policy: 5.6x fewer prefill tokens, 4.9x fewer in the update, and at least 2.5x less
CPU time for prefill and for the update.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import ratios, update
from notepad_jax.grpo.batch import PackedBatch, pack
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import (
    Completion,
    Group,
    PolicySnapshot,
    Prompt,
    Reading,
    SamplingParams,
    Status,
    Task,
    TextDocument,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)


def policy_config(width: int, layers: int, heads: int, kv_heads: int, vocab: int) -> PolicyConfig:
    """A Qwen3-style policy; its last id is no token, so it serves as a stop that never comes."""
    return PolicyConfig(
        vocab_size=vocab, width=width, layers=layers, heads=heads, kv_heads=kv_heads,
        head_size=32, feed_forward=width, rope_theta=1e6, rms_eps=1e-6, qk_norm=True,
        attention_bias=False, tied_embeddings=True, valid_vocab=vocab - 1,
    )  # fmt: skip


POLICIES = {
    "starter's size (2 layers, d 128)": policy_config(128, 2, 2, 1, 600),
    "4 layers, d 256": policy_config(256, 4, 8, 2, 1024),
}
UPDATE = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
    entropy_weight=0.0, temperature=1.0, micro_batch_rows=1, remat=False,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of what is measured: tokens, but for counts of groups and members."""

    groups: int = 4
    members: int = 8
    prefix: int = 930
    tail: int = 62  # of the prompt
    completion: int = 31


def make_prompts(sizes: Sizes, vocab: int, seed: int) -> list[list[Prompt]]:
    """Returns random prompts, [groups][members]; a group's share their prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [tokens(rng.integers(0, vocab - 1, sizes.prefix)) for _ in range(sizes.groups)]
    return [
        [Prompt(shared, tokens(rng.integers(0, vocab - 1, sizes.tail))) for _ in range(members)]
        for shared, members in zip(prefixes, [sizes.members] * sizes.groups, strict=True)
    ]


def make_groups(
    prompts: Sequence[Sequence[Prompt]], completions: Sequence[Completion], seed: int
) -> tuple[list[Group], list[np.ndarray]]:
    """Returns groups of one-turn trajectories with random rewards, and their advantages."""
    rng, coming = np.random.default_rng(seed), iter(completions)
    groups = []
    for g, members in enumerate(prompts):
        readings = [
            Reading(str(g), m, (Turn(TurnKind.UPDATE, 0, prompt, next(coming)),), "",
                    Status.ANSWERED)
            for m, prompt in enumerate(members)
        ]  # fmt: skip
        task = Task(str(g), "", TextDocument(""), ("",), "benchmark", "em")
        rewarded = [Trajectory(reading, float(rng.random()), {}) for reading in readings]
        groups.append(Group(task, tuple(rewarded)))
    return groups, [group.rewards - group.rewards.mean() for group in groups]


def complete(
    service: EngineService, prompts: Sequence[Sequence[Prompt]], length: int, stop: int
) -> list[Completion]:
    """Completes all prompts at once, `length` tokens each, at temperature 1."""

    async def go() -> list[Completion]:
        async with service:
            flat = [prompt for members in prompts for prompt in members]
            return await asyncio.gather(
                *(
                    service.complete(prompt, SamplingParams(1.0, 1.0, length, (stop,), seed))
                    for seed, prompt in enumerate(flat)
                )
            )

    return asyncio.run(go())


def cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - begin


def compare(config: PolicyConfig, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Measures prefill and update both ways; AssertionError where they are not the same."""
    context = sizes.prefix + sizes.tail
    settings = EngineSettings(
        slots=sizes.groups * sizes.members, page_size=32, max_prompt=context,
        pages=sizes.groups * (sizes.members + 1) * -(-(context + sizes.completion + 32) // 32),
        max_new_tokens=sizes.completion, steps_per_launch=sizes.completion,
        row_tokens=max(context, sizes.members * sizes.tail),
    )  # fmt: skip
    stop = config.valid_vocab
    params = parameters.init_params(config, jax.random.key(0))
    snapshot = PolicySnapshot(0, params)
    first = make_prompts(sizes, config.vocab_size, 0)

    completions: dict[bool, list[Completion]] = {}
    batches: dict[bool, PackedBatch] = {}
    totals: dict[bool, tuple] = {}
    prefilled: dict[bool, int] = {}
    for share in (True, False):
        executor = Executor(settings, Device(config, settings))
        service = EngineService(executor, snapshot, share_prefixes=share)
        completions[share] = complete(service, first, sizes.completion, stop)
        prefilled[share] = service.stats.prefix_tokens + service.stats.tail_tokens
        row = sizes.prefix + sizes.members * (sizes.tail + sizes.completion)
        batches[share] = pack(
            *make_groups(first, completions[True], 0), row_length=row, share_prefixes=share
        )
        totals[share] = update.loss_and_gradient(config, UPDATE, params, {}, batches[share].batch)
    for on, off in zip(completions[True], completions[False], strict=True):
        assert on.tokens.tolist() == off.tokens.tolist(), "sharing changed a completion"
        np.testing.assert_allclose(on.behaviour_logprobs, off.behaviour_logprobs, atol=2e-5)
    on, off = jax.tree.leaves(totals[True]), jax.tree.leaves(totals[False])
    largest = max(float(jnp.abs(x).max()) for x in on)
    gap = max(float(jnp.abs(x - y).max()) for x, y in zip(on, off, strict=True))
    assert gap < 2e-5 * max(largest, 1), f"sharing moved loss or gradient by {gap}"

    seconds: dict[tuple[str, bool], list[float]] = {}
    for repeat in range(1, repeats + 1):
        prompts = make_prompts(sizes, config.vocab_size, repeat)  # none is cached yet
        for share in (True, False):
            executor = Executor(settings, Device(config, settings))
            service = EngineService(executor, snapshot, share_prefixes=share)
            batch = batches[share].batch
            for name, work in (
                ("prefill", lambda d=service, p=prompts: len(complete(d, p, 1, stop))),
                ("update", lambda b=batch: update.loss_and_gradient(config, UPDATE, params, {}, b)),
            ):
                seconds.setdefault((name, share), []).append(cpu_seconds(work))
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    return {
        "prefill_tokens_on": prefilled[True],
        "prefill_tokens_off": prefilled[False],
        "prefill_tokens_ratio": prefilled[False] / prefilled[True],
        "prefill_cpu_seconds_on": median["prefill", True],
        "prefill_cpu_seconds_off": median["prefill", False],
        "prefill_cpu_ratio": median["prefill", False] / median["prefill", True],
        "update_tokens_on": batches[True].stats.packed_tokens,
        "update_tokens_off": batches[False].stats.packed_tokens,
        "update_cpu_seconds_on": median["update", True],
        "update_cpu_seconds_off": median["update", False],
        "update_cpu_ratio": median["update", False] / median["update", True],
        "gradient_gap": gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8, help="the first warms up")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = Sizes()
    found = {name: compare(config, sizes, options.repeats) for name, config in POLICIES.items()}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(
        f"{sizes.groups} groups x {sizes.members}: prefix {sizes.prefix}, private prompt "
        f"{sizes.tail}, completion {sizes.completion} tokens"
    )
    print(f"{'policy':34}{'':16}{'off':>10}{'on':>10}{'ratio':>8}")
    for name, r in found.items():
        for what, unit, form in (
            ("prefill tokens", "prefill_tokens", "{:10.0f}"),
            ("prefill CPU s", "prefill_cpu_seconds", "{:10.3f}"),
            ("update tokens", "update_tokens", "{:10.0f}"),
            ("update CPU s", "update_cpu_seconds", "{:10.3f}"),
        ):
            off, on = r[f"{unit}_off"], r[f"{unit}_on"]
            print(f"{name:34}{what:16}{form.format(off)}{form.format(on)}{off / on:8.2f}")


if __name__ == "__main__":
    main()
