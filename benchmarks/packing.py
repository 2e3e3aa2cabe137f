"""What packing a published batch costs the host: every host of a pod packs all of it.

    python -m benchmarks.packing [--groups 128] [--members 16] [--chunks 7]

Groups are random tokens in the published sizes: chunks of 5,000 tokens read by all members, a
private prompt of 600, memories of 100 to 1,024; 16 optimizer steps a batch. No device is used.
Expected: 28 million packed tokens in 1.1 CPU s and 0.5 GB (two busy cores, 2026-11-22).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time

import numpy as np

from notepad_jax.grpo import batch, micro_batches
from notepad_jax.grpo.algorithm import parts_of
from notepad_jax.types import (
    Completion,
    Finish,
    Group,
    Prompt,
    Reading,
    Status,
    Task,
    TextDocument,
    Tokens,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)

CHUNK, PRIVATE, MEMORY, ROW, ROWS = 5000, 600, (100, 1024), 16384, 32
TASK = Task("random", "what ?", TextDocument(""), ("nothing",), "benchmark", "em")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=128, help="of a batch")
    parser.add_argument("--members", type=int, default=16, help="readings of a group")
    parser.add_argument("--chunks", type=int, default=7, help="of a document")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of a batch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    said = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    seconds, packed = [], 0
    for part in parts_of(said.groups, said.steps):
        groups = [group(rng, said.members, said.chunks) for _ in range(part.stop - part.start)]
        advantages = [np.zeros(said.members)] * len(groups)
        began = time.process_time()
        one = batch.pack(
            groups, advantages, row_length=ROW, rows_multiple=ROWS, length_multiple=ROW
        )
        micro_batches.split(one.batch, ROWS, ROWS)
        seconds.append(time.process_time() - began)
        packed += one.stats.packed_tokens
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        "packed_tokens": packed,
        "cpu_seconds": sum(seconds),
        "cpu_seconds_of_a_batch": float(np.median(seconds)),
        "gigabytes": peak / (1e9 if sys.platform == "darwin" else 1e6),
    }
    if said.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:>24}  {value:,.6g}" for name, value in found.items()))


def group(rng: np.random.Generator, members: int, chunks: int) -> Group:
    """A group whose members share each chunk and nothing else."""
    shared = [_tokens(rng, CHUNK) for _ in range(chunks)] + [_tokens(rng, 40)]

    def trajectory(sample: int) -> Trajectory:
        turns = []
        for number, prefix in enumerate(shared):
            length = int(rng.integers(*MEMORY))
            said = Completion(_tokens(rng, length), np.zeros(length, np.float32), Finish.STOP, 0)
            kind = TurnKind.UPDATE if number < chunks else TurnKind.ANSWER
            turns.append(Turn(kind, number, Prompt(prefix, _tokens(rng, PRIVATE)), said))
        return Trajectory(Reading("random", sample, tuple(turns), "", Status.ANSWERED), 0.0, {})

    return Group(TASK, tuple(trajectory(sample) for sample in range(members)))


def _tokens(rng: np.random.Generator, count: int) -> Tokens:
    return tokens(rng.integers(0, 150_000, count).astype(np.int32))


if __name__ == "__main__":
    main()
