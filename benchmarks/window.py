"""Windows and readers apart: what they save, and what they do to learning, on mixed lengths.

    python -m benchmarks.window --out runs/window                    (counts: 5 CPU minutes)
    python -m benchmarks.window --out runs/window --learn 0-2        (and trains, every seed)

The starter reads documents of the quick start's language, of lengths log-uniform between two ends,
one question each, out of a task file, as training reads: in chunks of 256 tokens. Without
`--learn` nothing is learnt: every W reads the same documents, in another order, and what is counted
are the rounds of the engine until each step's rollout has ended, summed over the steps. With it,
each of WAYS trains from each seed for equally many steps, `notepad-jax train` as a user starts it,
and reads held-out documents before and after; what is finished is not done again. Prints tables.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.ablation import child, parsed
from notepad_jax.data import files
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import builders, configuration, process, task_stream
from notepad_jax.setup.config.whole import Training
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import rollout_settings, validation
from notepad_jax.types import PolicySnapshot, Task

CONFIG, WINDOWS = "quickstart", (1, 4, 8)
ABOVE = 2**28  # document seeds: neither training's first ones nor an evaluation's
ROOT = Path(__file__).parents[1]
ENDED, AGE = "window.seconds", "rollout/age_max"  # a run's file when it is done; of a metric
HELD_OUT = ("2k", "8k")  # lengths that are read before and after learning
LEARNING = (
    "validation.suite=synthetic", "validation.samples=64",
    f"validation.lengths={','.join(HELD_OUT)}", "checkpoint.handoff=memory",
)  # fmt: skip
LIVE = ("fleet.readers=1", "fleet.live=true", "fleet.slack=1")
WAYS = {
    "as it is": (),
    "window of 4": ("rollout.window=4",),
    "window of 8": ("rollout.window=8",),
    "live, lead 1, slack 1": LIVE,
    "both, window of 4": ("rollout.window=4", *LIVE),
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """What the rollouts of some steps took, summed."""

    rounds: int  # of the engine
    turns: int
    cpu_seconds: float  # of all threads, the first window's steps left out: they compile


def main(argv: Sequence[str] | None = None) -> None:
    said = options().parse_args(argv)
    out, windows = said.out.resolve(), [int(w) for w in said.windows.split(",")]
    write_tasks(out, said)
    if said.learn:
        for seed in parsed(said.learn):
            for way in WAYS:
                learn(out, way, seed, said)
        print("\n".join(learnt(out, parsed(said.learn))))
        return
    found = {}
    for window in windows:
        config = configuration.load(CONFIG, keys_of(out, said, f"rollout.window={window}"))
        found[window] = count(config, max(windows))
    print("\n".join(counted(found)))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/window"))
    parser.add_argument("--windows", default=",".join(map(str, WINDOWS)), help="steps of each")
    parser.add_argument("--lengths", default="512,16k", help="shortest and longest document")
    parser.add_argument("--steps", type=int, default=24, help="rollouts")
    parser.add_argument("--documents", type=int, default=8, help="a step")
    parser.add_argument("--readings", type=int, default=8, help="of each question")
    parser.add_argument("--learn", default="", help="seeds to train from, such as 0-2")
    return parser


def write_tasks(out: Path, said: argparse.Namespace) -> None:
    """Writes one task for each draw of a run, if they are not there."""
    path = out / "tasks.jsonl"
    if path.is_file():
        return
    out.mkdir(parents=True, exist_ok=True)
    ends = [np.log(parse_length(end)) for end in said.lengths.split(",")]
    drawn = np.exp(np.random.default_rng(0).uniform(*ends, said.steps * said.documents))
    sizes = [int(size) // 8 * 8 for size in drawn]
    files.write(path, [_task(number, size) for number, size in enumerate(sizes)], iter(sizes))


def _task(number: int, tokens: int) -> Task:
    made = make_tasks(ABOVE + number, tokens, 1, distractor_share=0.8, chapter_rate=1 / 32)
    return made[0]


def keys_of(out: Path, said: argparse.Namespace, *words: str) -> list[str]:
    """What config `quickstart` has for the tasks; without replacement, so steps are windows."""
    keys = (
        f"tasks.files={out / 'tasks.jsonl'}", f"steps={said.steps}", "rollout.max_rounds=1",
        f"rollout.documents={said.documents}",
        f"rollout.group_size={said.readings}", f"optimizer.decay_steps={said.steps}",
        f"optimizer.decay_from={said.steps // 4}",
        "engine.per_cpu=1", *words,
    )  # fmt: skip
    return [configuration.FLAG + word for word in keys]


# ---------------------------------------------------------------- counts


def count(config: Training, warm: int) -> Counted:
    """Rolls out all steps with the policy as it is; the first `warm` are in no seconds."""
    process.prepared(config)
    words = builders.words(config.policy, config.dtype)
    stream = task_stream.opened(config, words.tokenizer, SilentScreen())
    policy = builders.load_policy(config.policy, config.dtype, builders.to_read(config.engine))
    template = builders.template(config.reading, policy)
    rules = builders.rules(config.reading, policy.tokenizer)
    snapshot = PolicySnapshot(0, policy.params)
    engine = builders.service(config.engine, policy, rules, template, snapshot)
    rollouts = rollout_settings.rollouts(config, stream, engine, policy.tokenizer, template, rules)

    async def roll() -> Counted:
        ledger, began, rounds, turns = Ledger(), time.process_time(), 0, 0
        async with engine:
            for step in range(config.steps):
                if step == warm:
                    began = time.process_time()
                rollout, _ = await rollouts.step(ledger, 0)
                ledger = rollout.ledger
                stats = engine.take_stats()
                rounds, turns = rounds + stats.rounds, turns + stats.turns
                engine.rest()
        return Counted(rounds, turns, time.process_time() - began)

    return asyncio.run(roll())


def counted(found: dict[int, Counted]) -> Iterator[str]:
    first = next(iter(found.values()))
    yield "| `rollout.window` | rounds of the engine | of those at 1 | turns | CPU s of rollouts |"
    yield "|---|---|---|---|---|"
    for window, one in found.items():
        share = one.rounds / first.rounds
        yield (
            f"| {window} | {one.rounds:,} | {share:.2f} | {one.turns:,} | {one.cpu_seconds:.1f} |"
        )


# ---------------------------------------------------------------- learning


def learn(out: Path, way: str, seed: int, said: argparse.Namespace) -> None:
    """Trains one way from one seed; one that was stopped goes on."""
    words = (*LEARNING, *WAYS[way], f"seed={seed}", f"policy={ROOT / 'data' / 'starter'}")
    folder, keys = run_of(out, way, seed), keys_of(out, said, *words)
    if (folder / ENDED).exists():
        return
    begun = ["--resume"] if folder.is_dir() else ["--config", CONFIG]
    keys.append(f"{configuration.FLAG}validation.every={said.steps}")
    began = time.monotonic()
    child(["notepad_jax", "train", "--name", folder.name, *begun, *keys], out / "said.log", out)
    seconds = time.monotonic() - began
    (folder / ENDED).write_text(f"{seconds:.1f}" if "--config" in begun else "nan")
    print(f"{way}, seed {seed}: {seconds:.0f} s", file=sys.stderr, flush=True)


def run_of(out: Path, way: str, seed: int) -> Path:
    return out / "runs" / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}"


def learnt(out: Path, seeds: Sequence[int]) -> Iterator[str]:
    """Yields a table: rewards of the last third, what is held out, ages, seconds of the run."""
    lengths = [format_length(parse_length(length)) for length in HELD_OUT]
    held_out = " | ".join(f"held out, {length}: before, after" for length in lengths)
    yield f"| way | seed | reward, last third | {held_out} | oldest turn, mean (most) | wall s |"
    yield "|---" * (5 + len(lengths)) + "|"
    for way in WAYS:
        for seed in seeds:
            folder = run_of(out, way, seed)
            lines = read_metrics(folder)
            rewards = [line["reward"] for line in lines if "reward" in line]
            last = rewards[-(len(rewards) // 3) :]
            ages = [line[AGE] for line in lines if AGE in line]
            shares = []
            for length in lengths:
                name = f"{validation.SCORE}_{length}"
                before, *_, after = [line[name] for line in lines if name in line]
                shares.append(f"{100 * before:.1f}%, {100 * after:.1f}%")
            yield (
                f"| {way} | {seed} | {np.mean(last):.2f} | {' | '.join(shares)} | "
                f"{np.mean(ages):.2f} ({max(ages):.0f}) | {(folder / ENDED).read_text()} |"
            )


if __name__ == "__main__":
    main()
