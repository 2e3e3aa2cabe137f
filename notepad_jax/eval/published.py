"""Published accuracies of the memory agent, to be drawn in grey behind what was measured.

They are RULER-QA built on HotpotQA: sub-EM over 128 questions, read once, so each carries
a standard error of 3 to 4 points. That sub-EM is the two-way one (`sub_em_two_way`),
which is kinder than ours, so they are drawn and tabled beside that metric alone. The agents
and Qwen2.5-7B-1M are of the paper's table 2; the others stand in its figure of the ablation
only, read off to the nearest of 128 questions. Read by evaluation_page and accuracy_plot;
imports nothing of ours.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

SUITE = "ruler-qa"  # the suite whose questions are those of the figures
FILES = re.compile(r"eval_\d+\.json")  # and the files they were measured on
METRIC = "sub_em_two_way"
SOURCE = (
    "MemAgent (Yu et al. 2025, arXiv 2507.02259), RULER-QA on HotpotQA, two-way sub-EM of "
    "128 questions read once, standard error 3 to 4 points"
)
SHORTEST = 7 * 1024  # tokens, called 7K; each length after it is the double: 14K ... 3.5M


@dataclasses.dataclass(frozen=True)
class PublishedCurve:
    """The published accuracy of one model, by length."""

    model: str
    shares: tuple[float, ...]  # in [0, 1], at SHORTEST and its doublings

    @property
    def points(self) -> tuple[tuple[int, float], ...]:
        """Returns (length in tokens, share), ascending in length."""
        return tuple((SHORTEST * 2**k, share) for k, share in enumerate(self.shares))


def _published(model: str, *per_cent: float) -> PublishedCurve:
    return PublishedCurve(model, tuple(round(value / 100, 3) for value in per_cent))


# Those that are drawn. "No RL" and "whole" are Qwen2.5-Instruct, with the same prompts and a
# memory, and with the whole document (of more than 120K tokens the first and the last half).
FIGURES = (
    _published("RL-MemAgent-14B", 83.6, 82.0, 84.4, 80.5, 76.6, 81.3, 75.0, 77.3, 76.6, 78.1),
    _published("RL-MemAgent-7B", 82.0, 79.7, 78.9, 77.3, 79.7, 72.7, 74.2, 76.6, 75.8, 71.1),
    _published("7B memory, no RL", 59.4, 52.3, 51.6, 47.7, 35.9, 34.4, 39.1, 37.5),
    _published("Qwen2.5-7B, whole", 52.3, 57.0, 51.6, 44.5, 32.8, 13.3, 6.3, 1.6),
)
TABLE = (
    *FIGURES,
    _published("Qwen2.5-7B-1M, whole", 61.7, 56.3, 53.9, 55.5, 51.6, 33.6, 12.5, 0.0),
    _published("14B memory, no RL", 64.1, 57.0, 55.5, 49.2, 42.2, 38.3, 30.5, 24.2),
    _published("Qwen2.5-14B, whole", 75.0, 67.2, 57.0, 54.7, 44.5, 21.9, 10.9, 2.3),
)


def of_suite(suite: str) -> tuple[PublishedCurve, ...]:
    """Returns the figures that belong to a suite: RULER-QA, or a file or folder of FILES."""
    path = Path(suite)
    names = [file.name for file in path.iterdir()] if path.is_dir() else [path.name]
    of_theirs = bool(names) and all(map(FILES.fullmatch, names))
    return TABLE if suite == SUITE or of_theirs else ()
