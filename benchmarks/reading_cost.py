"""What reading costs by document length: CPU seconds and memory from 32K to 3.5M tokens.

    python -m benchmarks.reading_cost [--policy data/starter] [--lengths 32k,...,3.5m] [--json]

Reads synthetic documents through the real loop (agent, service, paged cache), greedily, in
chunks of 1,024 tokens, 4 documents x 16 questions at once, as the quick start's last
evaluation does. Fits seconds = a * length ** b: reading chunk by chunk must give b = 1.00,
and the peak memory must not grow with the length. Short lengths are read several times, so
that every point stands on about a second of work. Expected on one core of a 2-core AMD
EPYC: b = 0.95 to 0.96 and 130,000 document tokens a CPU second, 16 questions a document.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.eval import lengths
from notepad_jax.eval.measure import Item, Result, measure
from notepad_jax.eval.methods import NOTEPAD
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.text import prompts
from notepad_jax.text.chunks import Documents
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from notepad_jax.types import PolicySnapshot

ANSWER = 8  # tokens, the stop token included; the memory has as many


def peak_megabytes() -> float:
    """Returns the most memory that this process ever held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def exponent(measured_lengths: Sequence[int], seconds: Sequence[float]) -> float:
    """Returns b of the least-squares fit log(seconds) = log(a) + b log(length)."""
    return float(np.polyfit(np.log(measured_lengths), np.log(seconds), 1)[0])


def fit(points: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Returns the points, and the exponent of CPU seconds where there are two or more."""
    fitted: dict[str, Any] = {"points": list(points)}
    if len(points) > 1:
        lengths_of, seconds = ([p[name] for p in points] for name in ("length", "cpu_seconds"))
        fitted["exponent"] = exponent(lengths_of, seconds)
    return fitted


class Desk:
    """A policy on an engine, and synthetic documents for it to read."""

    def __init__(self, folder: str, chunk_size: int, documents: int, questions: int):
        self.config, params = huggingface.import_policy(folder)
        self.tokenizer = SentencePieceTokenizer(f"{folder}/{huggingface.TOKENIZER}")
        self.template = prompts.Template.load(prompts.find("question_last"), self.tokenizer)
        self.rules = Rules(
            max_question=8, chunk_size=chunk_size, max_memory=ANSWER, max_answer=ANSWER,
            memory_update="overwrite",
        )  # fmt: skip
        self.documents, self.questions = documents, questions
        context = self.rules.context(self.template)
        slots = documents * questions
        settings = EngineSettings(
            slots=slots, page_size=64, pages=slots * 2 + 3 * documents * (-(-context // 64)),
            max_prompt=context, max_new_tokens=ANSWER, steps_per_launch=4,
            row_tokens=max(512, context),
        )  # fmt: skip
        stops = self.tokenizer.stop_ids
        self.sampling = TurnSampling(0.0, 1.0, stops, 0)
        snapshot = PolicySnapshot(0, jax.tree.map(jnp.asarray, params))
        executor = Executor(settings, Device(self.config, settings))
        self.service = EngineService(executor, snapshot)

    async def read(self, length: int, seed: int) -> list[Result]:
        """Answers all questions about fresh documents of `length` tokens each."""
        tasks = [
            task
            for number in range(self.documents)
            for task in make_tasks(1000 * seed + number, length, self.questions)
        ]
        reader = Reader(
            self.service, self.tokenizer, self.template, self.rules, self.sampling,
            Documents(self.tokenizer, self.rules.chunk_size),
        )  # fmt: skip
        return await measure([Item(task, NOTEPAD, length, 0) for task in tasks], reader)


async def cost(desk: Desk, asked: Sequence[int], least_tokens: int) -> list[dict[str, float]]:
    """Reads documents of every length, short ones often enough for `least_tokens`.

    Returns a point per length; its seconds are medians over the repeats.
    """
    found = []
    async with desk.service:
        for length in sorted(asked):  # compiles
            if length <= least_tokens:
                await desk.read(length, 0)
        for length in sorted(asked):
            repeats = max(1, least_tokens // (length * desk.documents))
            results: list[Result] = []
            walls, cpus = [], []
            desk.service.take_stats()
            for seed in range(1, repeats + 1):
                wall, cpu = time.perf_counter(), time.process_time()
                results += await desk.read(length, seed)
                walls.append(time.perf_counter() - wall)
                cpus.append(time.process_time() - cpu)
            stats = desk.service.take_stats()
            read = sum(result.tokens for result in results) / desk.questions / repeats
            found.append(
                {
                    "length": length,
                    "repeats": repeats,
                    "cpu_seconds": statistics.median(cpus),
                    "wall_seconds": statistics.median(walls),
                    "document_tokens_per_cpu_second": read / statistics.median(cpus),
                    "microseconds_a_token": statistics.median(cpus) / read * 1e6,
                    "prefill_share": stats.prefill_seconds / sum(walls),
                    "decode_share": stats.decode_seconds / sum(walls),
                    "peak_megabytes": peak_megabytes(),
                    "accuracy": float(np.mean([result.correct for result in results])),
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="data/starter", help="a Hugging Face folder")
    parser.add_argument("--lengths", default="32k,128k,512k,3.5m", help="tokens")
    parser.add_argument("--chunk-size", type=int, default=1024, help="tokens")
    parser.add_argument("--documents", type=int, default=4, help="read at the same time")
    parser.add_argument("--questions", type=int, default=16, help="about each document")
    parser.add_argument("--least-tokens", default="2m", help="to read at every length")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    desk = Desk(options.policy, options.chunk_size, options.documents, options.questions)
    asked = [lengths.parse_length(text) for text in options.lengths.split(",")]
    found = asyncio.run(cost(desk, asked, lengths.parse_length(options.least_tokens)))
    fitted = fit(found)
    if options.json:
        print(json.dumps(fitted, indent=2))
        return
    print(f"{options.documents} documents x {options.questions} questions")
    print(f"{'length':>8}{'CPU s':>10}{'wall s':>10}{'tokens/CPU s':>14}{'prefill':>9}{'decode':>8}"
          f"{'peak MB':>9}{'accuracy':>10}")  # fmt: skip
    for p in found:
        print(
            f"{lengths.format_length(p['length']):>8}{p['cpu_seconds']:10.2f}"
            f"{p['wall_seconds']:10.2f}{p['document_tokens_per_cpu_second']:14,.0f}"
            f"{p['prefill_share']:9.0%}{p['decode_share']:8.0%}{p['peak_megabytes']:9.0f}"
            f"{p['accuracy']:10.3f}"
        )
    if "exponent" in fitted:
        print(f"seconds ~ length ** {fitted['exponent']:.3f}")


if __name__ == "__main__":
    main()
