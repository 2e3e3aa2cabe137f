"""Metrics of list answers: one item a line, judged as a set, a ranking or an order.

The gold answers of a task are the items, all of them wanted, the most relevant (or the
earliest) first. Both sides are folded alike: lower case, white space collapsed, blank
lines dropped, a repeated line kept where it first stood. The library oracles in the tests
are scikit-learn's and scipy's. Used by metrics.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Sequence

from notepad_jax.scoring.extraction import composed

_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z*]{1,20}\}(?:\{[a-z|]{0,20}\})?")
_MARK = re.compile(r"\\\\|^[ \t]*(?:[-\u2022]|\(?\d{1,4}[.)])[ \t]+", re.MULTILINE)
_COMMA = re.compile(r"\s*,\s*(?:and\s+)?")


def lines(text: str) -> list[str]:
    """Returns the folded lines of a text, in order, each once."""
    folded = (" ".join(line.lower().split()) for line in composed(text).split("\n"))
    return list(dict.fromkeys(filter(None, folded)))


def _said(prediction: str, gold: Sequence[str]) -> list[str]:
    r"""Returns what a prediction lists: its lines, or what else it may have meant by a list.

    Lines are the rule. Only where none of them is a gold item are numbers, dashes and
    asterisks taken off, `\\` read as a line break, and a single line that is left is cut at
    its commas, unless gold items have commas themselves.
    """
    plain = lines(prediction)
    if not set(plain).isdisjoint(gold):
        return plain
    bare = lines(_MARK.sub("\n", _ENVIRONMENT.sub("\n", prediction)).replace("*", ""))
    if len(bare) == 1 and not any("," in item for item in gold):
        bare = lines(_COMMA.sub("\n", bare[0]))
    return plain if set(bare).isdisjoint(gold) else bare


def set_f1(prediction: str, answers: Sequence[str]) -> float:
    """F1 of two sets of lines: 2 |P and G| / (|P| + |G|)."""
    gold = set(_items(answers))
    said = set(_said(prediction, gold))
    return 2 * len(said & gold) / ((len(said) + len(gold)) or 1)


def sub_em_lines(prediction: str, answers: Sequence[str]) -> float:
    """The share of gold items that are lines of the prediction, times a precision factor.

    The factor is 1 up to twice as many lines as gold items, then 2 |G| / |P|: a list of
    everything earns little, a line of introduction nothing less.
    """
    gold = _items(answers)
    said = _said(prediction, gold)
    if not said or not gold:
        return 0.0
    found = len(set(said) & set(gold)) / len(gold)
    return found * min(1.0, 2 * len(gold) / len(said))


def ndcg(prediction: str, answers: Sequence[str]) -> float:
    """NDCG@k with k gold items: gold item i (from 0) is worth k - i, rank r 1/log2(r + 1).

    Järvelin and Kekäläinen (2002) with linear gains. Lines after the k-th count nothing,
    and a wrong line above a right one pushes it down.
    """
    gold = _items(answers)
    said = _said(prediction, gold)
    gain = {item: len(gold) - i for i, item in enumerate(gold)}
    ideal = _discounted(list(gain.values()))
    return _discounted([gain.get(line, 0) for line in said[: len(gold)]]) / (ideal or 1.0)


def pairwise(prediction: str, answers: Sequence[str]) -> float:
    """Gold pairs that stand in the right order, divided by all gold pairs.

    A pair with a missing item is not in order, so a short prefix earns little. On a
    permutation it is (1 + Kendall's tau) / 2. A single gold item has no pairs; naming it
    is worth 1. Time: k log k comparisons for k gold items.
    """
    gold = _items(answers)
    place = {line: i for i, line in enumerate(_said(prediction, gold))}
    found = [place[item] for item in gold if item in place]
    if len(gold) < 2:
        return float(len(found))
    earlier: list[int] = []
    in_order = 0
    for here in found:
        before = bisect.bisect(earlier, here)
        in_order += before
        earlier.insert(before, here)
    return in_order / math.comb(len(gold), 2)


def _items(answers: Sequence[str]) -> list[str]:
    return lines("\n".join(answers))


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))
