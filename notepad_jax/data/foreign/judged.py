"""Published benchmarks whose answers a model judges, and here a metric: said when they are read.

A model that judges is a reward of the user's (`evaluate.reward`), which sees the question, the gold
answers and `Task.extra`. Above: setup.eval_jobs; imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

BY_A_MODEL = {  # what a source begins with: the benchmark
    "longmemeval/": "LongMemEval",
    "beam/": "BEAM",
    "memory_agent_bench/longmemeval": "MemoryAgentBench's LongMemEval",
    "memory_agent_bench/infbench_sum": "MemoryAgentBench's InfBench-sum",
}


def notes(found: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each benchmark that (source, metric) of tasks belong to."""
    used: dict[str, set[str]] = {}
    for source, metric in found:
        for beginning, benchmark in BY_A_MODEL.items():
            if source.startswith(beginning):
                used.setdefault(benchmark, set()).add(metric)
    return [
        f"{benchmark} is judged by a model as published, and here by {' and '.join(sorted(own))}: "
        f"not comparable with its figures; --config.evaluate.reward names a judge of yours"
        for benchmark, own in used.items()
    ]
