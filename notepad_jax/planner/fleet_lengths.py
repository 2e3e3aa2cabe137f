"""Distributions of document lengths: equal, random, or those of a file.

Seeded, so that modes are compared over the same documents, and a plan said twice is the same plan.
Above: `fleet_modes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from notepad_jax.eval.lengths import format_length, parse_length

FORMS = "write 2K-128K, pareto:1.3:1M, or a file with a number of tokens a line"
Draw = Callable[[np.random.Generator, int], np.ndarray]  # so many lengths, in tokens


def lengths(form: str | None, usual: int) -> Draw:
    """Returns the sampler of lengths of a form as `--lengths` says it.

    None: all of the `usual` length. A-B: log-uniform. pareto:SHAPE:MOST: Pareto with that tail,
    cut at MOST tokens, scaled so that the mean is the `usual` length. Else a file: its numbers,
    drawn with replacement. Raises ValueError for what is none of these.
    """
    if form is None:
        return lambda rng, n: np.full(n, usual)
    if form.startswith("pareto:"):
        return _pareto(form, usual)
    if Path(form).is_file():
        return _of_file(Path(form))
    low, dash, high = form.partition("-")
    if not dash:
        raise ValueError(f"--lengths {form!r} is no form of lengths and no file; {FORMS}")
    return _log_uniform(form, _length(form, low), _length(form, high))


def _length(form: str, text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as problem:
        raise ValueError(f"--lengths {form!r}: {problem}; {FORMS}") from problem


def _log_uniform(form: str, low: int, high: int) -> Draw:
    if low > high:
        raise ValueError(f"--lengths {form!r}: its shortest is longer than its longest; turn it")
    return lambda rng, n: np.exp(rng.uniform(math.log(low), math.log(high), n)).round()


def _pareto(form: str, usual: int) -> Draw:
    _, shape_text, most_text = (*form.split(":"), "", "")[:3]
    most = _length(form, most_text)
    try:
        shape = float(shape_text)
    except ValueError:
        shape = math.nan
    if not 0 < shape < math.inf or form.count(":") != 2:
        raise ValueError(f"--lengths {form!r}: {shape_text!r} is no shape above 0; {FORMS}")
    if most <= usual:
        raise ValueError(
            f"--lengths {form!r}: its longest, {most}, is not above {usual}, the mean that the "
            "config's documents give; raise one or lower the other"
        )
    least = _least(shape, most, usual)
    return lambda rng, n: np.minimum(most, least * (1 + rng.pareto(shape, n))).round()


def _least(shape: float, most: int, mean: float) -> float:
    """Returns the least value of a Pareto that is cut at `most` and has this mean (bisection)."""
    low, high = 0.0, float(most)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(shape, most, middle) < mean else (low, middle)
    return high


def _mean(shape: float, most: int, least: float) -> float:
    """E[min(most, X)]: the integral over x of P(X > x)."""
    if shape == 1:
        return least * (1 + math.log(most / least)) if least else 0.0
    tail = (most / least) ** (1 - shape) - 1 if least else 0.0
    return least * (1 + tail / (1 - shape))


def _of_file(path: Path) -> Draw:
    found = [_line(path, number, line) for number, line in _lines(path)]
    if not found:
        raise ValueError(f"--lengths {path} has no line with a number of tokens")
    return lambda rng, n: rng.choice(np.array(found), n)


def _lines(path: Path) -> list[tuple[int, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as problem:
        raise ValueError(f"--lengths {path} is no text ({problem.reason}); {FORMS}") from problem
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _line(path: Path, number: int, line: str) -> int:
    try:
        return parse_length(line)
    except ValueError as problem:
        raise ValueError(f"--lengths {path}, line {number}: {problem}") from problem


def words(form: str | None, usual: int) -> str:
    """Returns a form in the words of a table."""
    return f"all of {format_length(usual)} tokens" if form is None else f"of {form}"
