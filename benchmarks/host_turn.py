"""What a turn costs the host: readings through agent, service, scheduler and layout, and no device.

    python -m benchmarks.host_turn [--documents 4] [--questions 16] [--chunks 200] [--json]

In the device's place stands one that gives every turn its draft, the memory as it was, so that a
turn is a prompt, a place in a row of tails, and a completion. Prints CPU microseconds a turn, the
least of some passes, since whatever else the machine does only adds to it. Not in it: tokenizer,
launches, traces, rewards. Expected on a 2-core AMD EPYC: 70 us, with 2 x 2 readings 200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from notepad_jax.engine.executor import Executor
from notepad_jax.engine.launches import PrefixArrays, SlotArrays, TailArrays
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.reading import memory_agent
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.types import PolicySnapshot, tokens
from pallas_kernels import PageTables

STOP, CHUNK, WRITTEN = 2, 1024, 8  # an id; tokens of a chunk, and of a memory or an answer
TEMPLATE = Template(
    name="host_turn",
    update=("chunk", tokens([6]), "question", tokens([7]), "memory", tokens([8])),
    answer=(tokens([5, 9]), "question", tokens([7]), "memory", tokens([8])),
    direct=(), no_memory=tokens([10, 11]), keep=tokens([]), between=tokens([]), stop_ids=(STOP,),
)  # fmt: skip
RULES = Rules(8, CHUNK, WRITTEN, WRITTEN, "overwrite")


class Nothing:
    """A fake device that computes nothing: what follows a token is what lies behind it."""

    def rest(self) -> None: ...

    def weights(self, params: Any) -> Any:
        return params

    def read_prefixes(self, params: Any, row: PrefixArrays) -> None: ...

    def start_tails(self, params: Any, row: TailArrays, wanted: int) -> Sequence[np.ndarray]:
        """Drafts stand, and a stop token follows each."""
        at, following = row.sample_at, np.append(row.tokens[0, 1:], STOP)
        drawn = following[at]
        ends = np.flatnonzero(np.diff(at[: int(row.samples)], append=-1) != 1)
        drawn[ends] = STOP
        return drawn, np.zeros(len(at), np.float32)

    def generate(
        self, params: Any, tables: PageTables, slots: SlotArrays, wanted: int
    ) -> Sequence[np.ndarray]:
        """Every slot stops."""
        shape = len(slots.token), 4
        made = np.minimum(slots.remaining, 1)
        return np.full(shape, STOP, np.int32), np.zeros(shape, np.float32), made


def settings_of(readings: int) -> EngineSettings:
    context = RULES.context(TEMPLATE)
    return EngineSettings(
        slots=readings, page_size=64, pages=readings * (2 + context // 64 + 1), max_prompt=context,
        max_new_tokens=WRITTEN, steps_per_launch=4, row_tokens=2048,
    )  # fmt: skip


async def read(documents: int, questions: int, chunks: int) -> tuple[int, float]:
    """Reads each document for each question; returns (turns, CPU seconds)."""
    rng = np.random.default_rng(0)
    ids = rng.integers(20, 600, (documents, chunks, CHUNK), dtype=np.int32)
    asked = rng.integers(20, 600, (questions, 6), dtype=np.int32)
    service = EngineService(
        Executor(settings_of(documents * questions), Nothing()), PolicySnapshot(0, {})
    )

    async def one(document: Sequence[np.ndarray], number: int) -> int:
        state = memory_agent.start(asked[number % questions], document)
        sampling = TurnSampling(0.0, 1.0, (STOP,), number)
        course = memory_agent.read(service, TEMPLATE, RULES, state, sampling)
        return sum([1 async for _ in course])

    shared = [[*map(tokens, document)] for document in ids]
    async with service:
        began = time.process_time()
        readings = (one(shared[k // questions], k) for k in range(documents * questions))
        turns = sum(await asyncio.gather(*readings))
        return turns, time.process_time() - began


def microseconds(documents: int, questions: int, chunks: int, passes: int = 5) -> float:
    """CPU microseconds a turn, the least of some passes."""
    found = [asyncio.run(read(documents, questions, chunks)) for _ in range(passes)]
    return min(1e6 * seconds / turns for turns, seconds in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=4, help="read at the same time")
    parser.add_argument("--questions", type=int, default=16, help="about each document")
    parser.add_argument("--chunks", type=int, default=200, help=f"of {CHUNK:,} tokens")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    took = microseconds(options.documents, options.questions, options.chunks)
    if options.json:
        print(json.dumps({"microseconds_a_turn": took}))
        return
    print(f"{took:.1f} us of CPU a turn")


if __name__ == "__main__":
    main()
