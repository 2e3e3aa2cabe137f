"""`notepad-jax eval`: how well a policy reads documents of growing length.

Questions are about synthetic documents that training never draws. The training length is
read exactly as in training; longer documents in larger chunks. The agent, the engine and
the prompts are those of training: what is trained is what is measured. Above: cli and
quickstart; below: eval.lengths and the engine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.agent.chunking import ChunkStream
from notepad_jax.agent.memory_agent import Rules, TurnSampling
from notepad_jax.eval import lengths
from notepad_jax.programs import parts
from notepad_jax.programs.train import TRAINING_DOCUMENTS
from notepad_jax.tasks.synthetic import make_tasks
from notepad_jax.telemetry.progress import Screen
from notepad_jax.types import Chunks, Finish, PolicySnapshot, Task

HELD_OUT = TRAINING_DOCUMENTS.stop  # document seeds from here on are never trained on
LONG = 2**20  # tokens from which on the config asks fewer questions

# Questions of one document read at nearly the same pace; a window this wide never restarts.
WINDOW = 256  # chunks


def tasks_of_length(config: ConfigDict, length: int) -> list[Task]:
    """Makes the questions about documents of `length` tokens; the same for every policy."""
    e = config.evaluate
    long = length >= LONG
    wanted, each = (
        (e.questions_longest, e.questions_per_longest)
        if long
        else (e.questions, e.questions_per_document)
    )
    data = config.data.to_dict() | {"tokens": length, "unanswerable": e.unanswerable}
    # A short document has no room for the facts of many questions among its other sentences.
    each = min(each, wanted, max(1, length // 256))
    tasks: list[Task] = []
    for number in range(-(-wanted // each)):
        questions = min(each, wanted - len(tasks))
        seed = HELD_OUT + (config.seed * 1009 + number) % HELD_OUT
        tasks += make_tasks(seed, **(data | {"questions": questions}))
    return tasks


def measure(
    config: ConfigDict,
    policy: parts.LoadedPolicy,
    names: Sequence[str],
    label: str,
    screen: Screen,
) -> list[lengths.Result]:
    """Reads documents of the lengths `names` ("2k", "3.5m"), one length after the other."""
    results: list[lengths.Result] = []
    for name in names:
        length = lengths.parse_length(name)
        short = length <= config.data.tokens
        size = config.reading.chunk_size if short else config.evaluate.chunk_size
        rules = dataclasses.replace(parts.rules(config.reading), chunk_size=size)
        tasks = tasks_of_length(config, length)
        results += asyncio.run(_read(config, policy, rules, length, tasks, label, screen))
    return results


async def _read(
    config: ConfigDict,
    policy: parts.LoadedPolicy,
    rules: Rules,
    length: int,
    tasks: Sequence[Task],
    label: str,
    screen: Screen,
) -> list[lengths.Result]:
    template = parts.template(config.reading, policy)
    streams: dict[int, ChunkStream] = {}

    def chunks_of(task: Task) -> Chunks:
        key = id(task.document)
        if key not in streams:
            streams[key] = ChunkStream(policy.tokenizer, task.document, rules.chunk_size, WINDOW)
        return streams[key]

    driver = parts.driver(config.engine, policy, rules, template, PolicySnapshot(0, policy.params))
    turns = len(tasks) * (-(-length // rules.chunk_size) + 1)
    bar = screen.bar(f"{label} {lengths.format_length(length)}", turns, "turns")
    before = 0

    def on_progress(progress: lengths.Progress) -> None:
        nonlocal before
        shown = {"right": f"{progress.correct:.0f}/{progress.done}"} if progress.done else {}
        bar.advance(progress.turns - before, **shown)
        before = progress.turns

    sampling = TurnSampling(
        config.evaluate.temperature, config.evaluate.top_p, template.stop_ids, config.seed
    )
    async with driver:
        results = await lengths.measure(
            {length: tasks}, driver, policy.tokenizer, template, rules, sampling, chunks_of,
            on_progress,
        )  # fmt: skip
    bar.finish()
    return results


def save(path: Path, results: Sequence[lengths.Result]) -> None:
    """Writes summaries and every reading as JSON."""
    content: dict[str, Any] = {
        "summary": [dataclasses.asdict(s) for s in lengths.summarise(results)],
        "readings": [dataclasses.asdict(r) | {"finish": r.finish.value} for r in results],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, default=dict) + "\n", encoding="utf-8")


def load(path: Path) -> list[lengths.Result]:
    """Reads back the readings that `save` wrote."""
    readings = json.loads(path.read_text(encoding="utf-8"))["readings"]
    return [
        lengths.Result(
            **{
                **reading,
                "gold": tuple(reading["gold"]),
                "finish": Finish(reading["finish"]),
                "memory_changes": tuple(
                    lengths.MemoryChange(**change) for change in reading["memory_changes"]
                ),
            }
        )
        for reading in readings
    ]


def table(summaries: Sequence[lengths.LengthSummary]) -> str:
    """Returns a plain-text table of accuracies with 95% intervals."""
    lines = [f"{'tokens':>8}  {'n':>4}  {'accuracy':>8}  95% interval    seconds"]
    for s in summaries:
        a = s.accuracy
        lines.append(
            f"{lengths.format_length(s.length):>8}  {s.n:>4}  {100 * a.mean:7.1f}%  "
            f"{100 * a.low:5.1f} - {100 * a.high:5.1f}%  {s.seconds:8.1f}"
        )
    return "\n".join(lines)
