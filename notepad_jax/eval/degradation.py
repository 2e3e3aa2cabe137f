"""Accuracy lost on documents longer than those of training, with confidence intervals.

The claim to be checked is "trained at 32K, less than 5% lost at 3.5M", and a loss between
two measured shares is only worth as much as its interval: at 128 questions a side it is
about 18 points wide. The questions of two lengths are taken as independent. Where a suite
asks the same questions at every length, paired intervals would be narrower; these are then
on the safe side. Below: summary; above: evaluation_page.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from notepad_jax.eval.summary import Share, Summary

KEPT = 0.85  # share of the short length's accuracy that an effective length keeps


@dataclasses.dataclass(frozen=True)
class Loss:
    """How much smaller a share is than its reference, with its interval; negative: it is larger."""

    mean: float
    low: float  # of the 95% interval
    high: float


@dataclasses.dataclass(frozen=True)
class Degradation:
    """What one method lost between the reference length and a longer one."""

    method: str
    source: str
    reference: int  # tokens: the longest measured length that is not above the training length
    length: int  # tokens; equal to `reference` in the first row of a method, which lost nothing
    absolute: Loss  # in shares: 0.05 is five points
    relative: Loss | None  # as a share of the reference's accuracy; None where that is 0


def by_length(summaries: Sequence[Summary], train_length: int) -> list[Degradation]:
    """Returns the losses from the reference length upwards, per method and source.

    What was measured at no length up to `train_length` has no reference and is left out.
    """
    groups: dict[tuple[str, str], list[Summary]] = defaultdict(list)
    for summary in sorted(summaries, key=lambda s: s.length):
        groups[summary.method, summary.source].append(summary)
    losses: list[Degradation] = []
    for group in groups.values():
        known = [s for s in group if s.length <= train_length]
        if known:
            losses += [_between(known[-1], s) for s in group if s.length >= known[-1].length]
    return losses


def _between(reference: Summary, summary: Summary) -> Degradation:
    none = Loss(0.0, 0.0, 0.0)  # a sample is not compared with itself as with another one
    same = summary is reference
    first, second = reference.accuracy, summary.accuracy
    return Degradation(
        method=summary.method,
        source=summary.source,
        reference=reference.length,
        length=summary.length,
        absolute=none if same else difference(first, second),
        relative=None if first.low <= 0 else none if same else relative_loss(first, second),
    )


def difference(first: Share, second: Share) -> Loss:
    """Returns first - second with the 95% interval of two independent shares.

    The hybrid score interval: Newcombe (1998), Statistics in Medicine 17, 873-890, method
    10, from the Wilson limits that the shares carry. It never leaves [-1, 1].
    """
    mean = first.mean - second.mean
    return Loss(
        mean,
        mean - math.hypot(first.mean - first.low, second.high - second.mean),
        mean + math.hypot(first.high - first.mean, second.mean - second.low),
    )


def relative_loss(first: Share, second: Share) -> Loss:
    """Returns 1 - second / first with the 95% interval of two independent shares.

    The same idea for a ratio R (Donner and Zou 2012, Statistical Methods in Medical
    Research 21, 347-359): the limits are where second - R * first, with the interval that
    the shares' own limits give it, just excludes 0, which is a quadratic equation in R.
    ValueError if `first` is 0.
    """
    if first.mean <= 0 or first.low <= 0:
        raise ValueError("a loss relative to an accuracy of 0 has no meaning")
    p, q = first, second
    product = p.mean * q.mean
    # The smaller root in the form that does not cancel: p.high may exceed 2 * p.mean.
    a, c = p.high * (2 * p.mean - p.high), q.low * (2 * q.mean - q.low)
    below = product + math.sqrt(max(0.0, product**2 - a * c))
    smallest = c / below if below > 0 else 0.0
    a, c = p.low * (2 * p.mean - p.low), q.high * (2 * q.mean - q.high)
    largest = (product + math.sqrt(max(0.0, product**2 - a * c))) / a
    return Loss(1 - q.mean / p.mean, 1 - largest, 1 - smallest)


def effective_length(summaries: Sequence[Summary], kept: float = KEPT) -> int | None:
    """Returns the longest length up to which accuracy stays at least `kept` of the shortest's.

    As NoLiMa has it (Modarressi et al. 2025, arXiv 2502.05167), of one method and source, in
    tokens. What lies beyond the first length that falls short does not count. None where nothing
    was measured, or nothing right at the shortest length.
    """
    ranked = sorted(summaries, key=lambda s: s.length)
    if not ranked or ranked[0].accuracy.mean == 0:
        return None
    least = kept * ranked[0].accuracy.mean
    held = itertools.takewhile(lambda s: s.accuracy.mean >= least, ranked)
    return list(held)[-1].length
