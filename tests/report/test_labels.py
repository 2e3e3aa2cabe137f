"""Labels never cover each other, and move no further than they must."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from notepad_jax.report import labels
from notepad_jax.report.labels import Box, Label

SPOTS = st.lists(st.tuples(st.floats(0, 200), st.floats(5, 30)), min_size=1, max_size=7)


@given(SPOTS)
def test_spread_labels_do_not_overlap_and_keep_their_order(spots):
    wanted, heights = zip(*spots, strict=True)
    found = labels.spread(wanted, heights, 0, 250)
    for (a, h, was), (b, g, will) in itertools.combinations(
        zip(found, heights, wanted, strict=True), 2
    ):
        assert abs(a - b) >= (h + g) / 2 - 1e-6
        assert (a < b) == (was < will) or was == will
    if sum(heights) <= 250:
        assert all(h / 2 - 1e-6 <= y <= 250 - h / 2 + 1e-6
                   for y, h in zip(found, heights, strict=True))  # fmt: skip


@given(st.lists(st.floats(0, 200), min_size=1, max_size=7))
def test_spreading_is_isotonic_regression(wanted):
    # With n labels of height 10 the k-th wants to be at y[k] - 10 k in a row that only rises.
    found = labels.spread(wanted, [10] * len(wanted), -1000, 1000)
    steps = 10 * np.arange(len(wanted))
    assert sorted(found) == pytest.approx(isotonic_regression(np.sort(wanted) - steps).x + steps)


def test_spreading_by_hand():
    assert labels.spread([10, 50], [10, 10], 0, 100) == [10, 50]  # clear of each other: no move
    assert labels.spread([50, 50], [10, 10], 0, 100) == [55, 45]  # each gives way by half
    assert labels.spread([54, 50], [10, 10], 0, 100) == [57, 47]
    assert labels.spread([1, 2, 90], [10, 20, 10], 0, 100) == [5, 20, 90]  # pushed off the floor
    assert labels.spread([5, 5], [10, 10], 0, 10) == [10, 0]  # no room: out at both ends alike
    assert labels.spread([], [], 0, 10) == []


def test_lines_that_end_together_share_a_column_and_others_stay_beside_their_end():
    axes = Box(0, 0, 400, 230)
    ends = [Label("notepad\n80.0%", 10, 380, 100), Label("full-context\n79.0%", 10, 380, 98),
            Label("recent-only\n20.0%", 10, 100, 60)]  # fmt: skip
    boxes = labels.place(ends, np.zeros((0, 2)), [], axes, 240)
    assert boxes[0].left == boxes[1].left == 380 + labels.FAR
    assert boxes[0].bottom == pytest.approx(boxes[1].top)
    assert (boxes[2].left, boxes[2].middle) == (100 + labels.NEAR, 60)


def test_a_label_within_the_picture_gives_way_to_lines_and_words():
    axes = Box(0, 0, 400, 230)
    ends = [Label("notepad", 10, 390, 200), Label("recent-only", 10, 100, 60)]
    line = np.stack([np.arange(0, 400.0), np.full(400, 62.0)], axis=-1)  # right through it
    words = Box(100, 66, 250, 90)  # and above it there is something already
    box = labels.place(ends, line, [words], axes, 240)[1]
    assert box.counts(line) == 0 and not box.covers(words) and box.top < 62
    assert box.distance(100, 60) < 20


def test_boxes_by_hand():
    box = Box(0, 0, 10, 10)
    assert box.covers(Box(9, 9, 20, 20)) and not box.covers(Box(10, 0, 20, 10))
    assert box.distance(5, 5) == 0 and box.distance(13, 14) == 5  # 3, 4, 5
    assert box.counts(np.array([[5, 5], [11, 5], [13, 5]])) == 2  # the second is in the air
