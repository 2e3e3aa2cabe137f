"""Charts: axes by hand, long lines in few points, and colours that can be read in both schemes."""

import re
from pathlib import Path

import numpy as np
import pytest

from notepad_jax.report import chart, training_plot
from notepad_jax.report.chart import Axis, Line

TEMPLATES = Path(chart.__file__).parent / "templates"


def test_axes_by_hand():
    assert chart.linear([0.13, 0.02]).ticks == [(0, "0"), (0.05, "0.05"), (0.1, "0.1"),
                                                (pytest.approx(0.15), "0.15")]  # fmt: skip
    assert [words for _, words in chart.linear([-3, 5]).ticks] == ["-4", "-2", "0", "2", "4", "6"]
    assert chart.linear([0.0, 0.0]).high == 1.0  # nothing to see has room all the same
    assert [at for at, _ in chart.steps(0, 99).ticks] == [0, 20, 40, 60, 80]
    assert [at for at, _ in chart.steps(3, 5).ticks] == [3, 4, 5]
    assert chart.steps(7, 7).share([7])[0] == 0.5
    assert [words for _, words in chart.powers([2e-7, 3e-5]).ticks] == [
        "1e-7",
        "1e-6",
        "1e-5",
        "1e-4",
    ]
    assert len(chart.powers([1e-12, 1e5]).ticks) <= 5
    assert Axis(1, 100, [], log=True).share([1, 10, 100]) == pytest.approx([0, 0.5, 1])


def small(metrics) -> chart.Chart:
    (one,) = training_plot.charts(metrics, [training_plot.Panel("Loss", {"loss": "loss"})])
    return one


def test_places_by_hand():
    drawn = small([{"step": 1, "loss": 0.0}, {"step": 3, "loss": 4.0}])
    left, right, low, high = 52, 268, 164, 46  # of the axes, in pixels from above left
    assert drawn.path(drawn.lines[0]) == f"M{left:.1f},{low:.1f}L{right:.1f},{high:.1f}"
    assert drawn.stops() == [
        (left, "step 1", [("loss", chart.OURS, "0", low)]),
        (right, "step 3", [("loss", chart.OURS, "4", high)]),
    ]
    assert drawn.band(drawn.lines[0]) == ""


def test_a_long_run_is_drawn_in_few_points_that_hide_nothing():
    metrics = [{"step": k, "loss": float(k % 7 == 0)} for k in range(10_000)]
    (line,) = (drawn := small(metrics)).lines
    assert len(line.x) <= training_plot.MOST and line.x[-1] == 9_999
    assert np.mean(line.y) == pytest.approx(1 / 7, abs=0.01)
    assert set(line.low) == {0.0} and set(line.high) == {1.0}
    assert drawn.band(line) and line.told[0].endswith("(0 to 1)")


def test_names_of_many_lines_stay_on_the_chart_and_off_its_title():
    names = {f"validation/{k}": f"{k}M tokens" for k in range(8)}
    panel = training_plot.Panel("Held-out tasks", names, "share")
    (drawn,) = training_plot.charts([{"step": 0} | dict.fromkeys(names, 0.5)], [panel])
    places = [place for words in drawn.words for place in drawn.lines_of(words)]
    assert [words for words, _, _ in places if "7" in words] == ["7M tokens"] and len(places) == 8
    for words, x, y in places:
        assert x + 0.62 * 11 * len(words) <= drawn.width
        assert 15 < y - 0.8 * 11 and y < drawn.bottom - drawn.axes_height
    assert len({words.tone for words in drawn.words}) == 8


def test_what_is_no_number_is_left_out():
    metrics = [{"step": k, "loss": value} for k, value in enumerate([1.0, float("nan"), 2.0])]
    assert small(metrics).lines[0].x == [0, 2]
    panel = training_plot.Panel("Gap", {"gap": "gap"}, "log")
    assert training_plot.charts([{"step": 0, "gap": 0.0}], [panel]) == []  # a log shows no 0


def test_lines_have_as_many_of_everything():
    with pytest.raises(ValueError, match="'a' has parts of .1, 2. points"):
        Line("a", chart.OURS, [1, 2], [1, 2], [1, 2], [1, 2], ["one"])


# ---------------------------------------------------------------- colours


def schemes() -> list[dict[str, str]]:
    """The values of the light and of the dark scheme."""
    css = (TEMPLATES / "colours.css").read_text()
    told = [dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{3,6})", part))
            for part in css.split("@media")]  # fmt: skip
    assert len(told) == 2 and told[0].keys() == told[1].keys()
    return told


def contrast(one: str, two: str) -> float:
    """WCAG 2.2's contrast ratio."""
    a, b = sorted(map(luminance, (one, two)))
    return (b + 0.05) / (a + 0.05)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_by_hand():
    assert contrast("#fff", "#000000") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)  # the known threshold


@pytest.mark.parametrize("scheme", [0, 1])
def test_words_and_lines_can_be_read_in_both_schemes(scheme):
    c = schemes()[scheme]
    tones = [f"tone-{k}" for k in range(8)]
    for words in ("ink", "dim", "link", *tones):
        assert contrast(c[words], c["paper"]) >= 4.5, words
    for words, paper in (("right", "right-paper"), ("wrong", "wrong-paper"), ("ink", "soft"),
                         ("ink", "heat-low"), ("ink", "heat-high")):  # fmt: skip
        assert contrast(c[words], c[paper]) >= 4.5, words
    for line in (*tones, "tone-grey"):
        assert contrast(c[line], c["paper"]) >= 3, line
