"""Losses against the training length: published numbers, exact coverage, and who is compared."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.eval import degradation
from notepad_jax.eval.summary import ALL, Share, Summary, share


def counted(right: int, n: int) -> Share:
    return share([1.0] * right + [0.0] * (n - right))


def summary(length: int, right: int, n: int, method: str = "notepad") -> Summary:
    accuracy = counted(right, n)
    return Summary(method, ALL, length, n, n, accuracy, {}, None, {}, 0, 0, 0, n, n * length, 1.0)


# Newcombe (1998), table II, method 10; the last row is a difference of 1.
NEWCOMBE = [
    ((56, 70), (48, 80), 0.0524, 0.3339),
    ((9, 10), (3, 10), 0.1705, 0.8090),
    ((5, 56), (0, 29), -0.0381, 0.1926),
    ((10, 10), (0, 20), 0.6791, 1.0),
]


@pytest.mark.parametrize("first, second, low, high", NEWCOMBE)
def test_the_interval_of_a_difference_is_newcombes(first, second, low, high):
    loss = degradation.difference(counted(*first), counted(*second))
    assert loss.mean == pytest.approx(first[0] / first[1] - second[0] / second[1])
    assert (loss.low, loss.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize(
    ("rights", "reached"),
    [
        ((80, 68, 68), 4000),  # .85 of .8 is .68, and is enough
        ((80, 67, 70), 1000),  # what comes after a fall does not count
        ((80, 90, 0), 2000),
        ((0, 90, 90), None),
        ((), None),
    ],
)
def test_the_effective_length_keeps_85_percent_of_the_shortest_length_s_accuracy(rights, reached):
    found = [summary(1000 * 2**k, right, 100) for k, right in enumerate(rights)]
    assert degradation.effective_length(found[::-1]) == reached


def test_a_loss_turned_round_is_a_gain():
    there, back = (degradation.difference(counted(*a), counted(*b))
                   for a, b in itertools.permutations([(56, 70), (48, 80)]))  # fmt: skip
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


def test_a_relative_loss_by_hand():
    # .8 -> .6 is a quarter. Limits of .8: .6920, .8769 (56 of 70); of .6: .4904, .7003 (48 of
    # 80). Where does .6 - .8 R just leave 0? sqrt(.1096^2 + (.0769 R)^2) = .6 - .8 R at
    # R = .6014, and sqrt(.1003^2 + (.1080 R)^2) = .8 R - .6 at R = .9274.
    loss = degradation.relative_loss(counted(56, 70), counted(48, 80))
    assert loss.mean == pytest.approx(0.25)
    assert (1 - loss.high, 1 - loss.low) == (pytest.approx(0.6014, abs=1e-4),
                                             pytest.approx(0.9274, abs=1e-4))  # fmt: skip


@given(st.integers(1, 60), st.integers(0, 60), st.integers(1, 60), st.integers(0, 60))
def test_the_limits_enclose_the_loss_and_stay_in_range(n, right, m, there):
    first, second = counted(min(right, n), n), counted(min(there, m), m)
    loss = degradation.difference(first, second)
    assert -1 - 1e-9 <= loss.low <= loss.mean <= loss.high <= 1 + 1e-9
    if first.mean > 0:
        part = degradation.relative_loss(first, second)
        assert part.low - 1e-9 <= part.mean <= part.high + 1e-9 and part.high <= 1 + 1e-9
        # Both are about the same two shares, so they agree on whether there is a loss at all.
        assert (loss.low > 1e-9) == (part.low > 1e-9) and (loss.high < -1e-9) == (part.high < -1e-9)


@pytest.mark.parametrize("first, second", [(0.9, 0.85), (0.8, 0.5), (0.5, 0.5), (0.95, 0.1)])
def test_about_95_of_100_intervals_hold_the_truth(first, second):
    """Summed over every outcome of two samples of 40, so there is no chance in it."""
    n = 40
    shares = [counted(k, n) for k in range(n + 1)]

    def chances(p: float) -> np.ndarray:
        return np.array([math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)])

    weight = np.outer(chances(first), chances(second))
    held = np.zeros((2, n + 1, n + 1))
    for i, j in itertools.product(range(1, n + 1), range(n + 1)):
        absolute = degradation.difference(shares[i], shares[j])
        relative = degradation.relative_loss(shares[i], shares[j])
        held[0, i, j] = absolute.low <= first - second <= absolute.high
        held[1, i, j] = relative.low <= 1 - second / first <= relative.high
    assert all(0.93 < (weight * h).sum() < 0.985 for h in held)


def test_nothing_is_lost_at_the_training_length():
    rows = degradation.by_length([summary(32768, 80, 100), summary(131072, 60, 100)], 32768)
    assert [(d.length, d.reference) for d in rows] == [(32768, 32768), (131072, 32768)]
    assert rows[0].absolute == rows[0].relative == degradation.Loss(0.0, 0.0, 0.0)
    assert rows[1].absolute.mean == pytest.approx(0.2)
    assert rows[1].relative.mean == pytest.approx(0.25)


def test_the_longest_length_up_to_the_training_length_is_the_reference():
    measured = [summary(length, 50, 100) for length in (57344, 7168, 28672, 14336)]
    rows = degradation.by_length(measured, 32768)
    assert [(d.length, d.reference) for d in rows] == [(28672, 28672), (57344, 28672)]


def test_what_has_no_reference_is_left_out_and_a_reference_of_0_has_no_relative_loss():
    rows = degradation.by_length(
        [summary(65536, 9, 10), summary(8192, 0, 10, "recent-only"),
         summary(65536, 0, 10, "recent-only")], 8192
    )  # fmt: skip
    assert [(d.method, d.length, d.relative) for d in rows] == [
        ("recent-only", 8192, None), ("recent-only", 65536, None)
    ]  # fmt: skip
    # A mean so small that its interval begins with 0.
    tiny = dataclasses.replace(summary(8192, 0, 4), accuracy=Share(1e-48, 0.0, 0.5))
    (_, lost) = degradation.by_length([tiny, summary(65536, 0, 4)], 8192)
    assert lost.relative is None and lost.absolute.mean == 1e-48
    with pytest.raises(ValueError, match="accuracy of 0"):
        degradation.relative_loss(counted(0, 10), counted(1, 10))
