"""What an evaluation costs beside the policy: CPU seconds and memory from 32K to 3.5M tokens.

    python -m benchmarks.evaluation_cost [--lengths 32k,...,3.5m] [--documents 4] [--json]

Writes RULER documents (niah_single_2, prose of Python's standard library), tokenises and
chunks them (5,000 tokens), reads them with an engine that answers at once and rewrites its
memory of up to 1,024 tokens in every turn, scores the answers, and keeps readings and
traces on disk: all that `notepad-jax eval` does but the network. Fits
seconds = a * length ** b; b must be 1.00 and the peak memory must not grow with the length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.reading_cost import fit, peak_megabytes
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.eval.measure import Item, measure
from notepad_jax.eval.methods import NOTEPAD
from notepad_jax.eval.readings import Readings
from notepad_jax.reading import endpoint
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.tasks import suites
from notepad_jax.text import approximate
from notepad_jax.text.chunks import Documents
from notepad_jax.text.prompts import Template
from notepad_jax.types import Completion, Finish, Prompt, SamplingParams, tokens

CHUNK, MEMORY, QUESTION = 5_000, 1_024, 1_024  # tokens, those of the published memory agents
TASK = "niah_single_2"


class Rewriter:
    """A fake engine that says the last 1,023 tokens of `shared`: every memory is new and full."""

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        await asyncio.sleep(0)
        said = np.append(prompt.shared[-(sampling.max_new_tokens - 1) :], sampling.stop_ids[0])
        return Completion(tokens(said), np.zeros(len(said), np.float32), Finish.STOP, 0)


def read(length: int, documents: int, folder: Path) -> dict[str, float]:
    """Reads documents of one length, all at once; returns a point."""
    tokenizer = approximate.ApproximateTokenizer()
    template = Template.load("chunk_first", tokenizer, endpoint.bare_turn(tokenizer))
    reader = Reader(
        Rewriter(), tokenizer, template, Rules(QUESTION, CHUNK, MEMORY, MEMORY, "overwrite"),
        TurnSampling(0.7, 0.95, template.stop_ids, 0), Documents(tokenizer, CHUNK),
    )  # fmt: skip
    sources = suites.SuiteSources(approximate.count)
    list(suites.make("ruler", (TASK,), 4096, [0], 0, sources))  # reads the haystack
    cpu = time.process_time()
    made = suites.make("ruler", (TASK,), length, range(documents), 0, sources)
    items = [Item(task, NOTEPAD, length, 0) for task in made]
    with Readings(folder, {}) as readings:
        results = asyncio.run(
            measure(items, reader, trace_of=readings.trace_of, on_result=readings.add)
        )
    cpu = time.process_time() - cpu
    return {
        "length": length,
        "cpu_seconds": cpu,
        "turns": sum(result.turns for result in results),
        "document_tokens_per_cpu_second": sum(result.tokens for result in results) / cpu,
        "peak_megabytes": peak_megabytes(),
    }


def cost(asked: Sequence[int], documents: int) -> list[dict[str, float]]:
    """Returns a point per length, ascending: the peak memory is that of all before, too."""
    with tempfile.TemporaryDirectory() as folder:
        return [read(n, documents, Path(folder) / str(n)) for n in sorted(asked)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="32k,128k,512k,3.5m", help="tokens")
    parser.add_argument("--documents", type=int, default=4, help="read at the same time")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = [parse_length(text) for text in options.lengths.split(",")]
    found = cost(asked, options.documents)
    fitted = fit(found)
    if options.json:
        print(json.dumps(fitted, indent=2))
        return
    print(f"{options.documents} documents of {TASK}, chunks of {CHUNK:,}, memory {MEMORY:,}")
    print(f"{'length':>8}{'CPU s':>10}{'turns':>8}{'tokens/CPU s':>14}{'peak MB':>9}")
    for p in found:
        print(
            f"{format_length(p['length']):>8}{p['cpu_seconds']:10.2f}{p['turns']:8,}"
            f"{p['document_tokens_per_cpu_second']:14,.0f}{p['peak_megabytes']:9.0f}"
        )
    if "exponent" in fitted:
        print(f"seconds ~ length ** {fitted['exponent']:.3f}")


if __name__ == "__main__":
    main()
