"""The report is one file that needs nothing else, and its pictures are pictures."""

import base64
import re

import pytest
from markup import Tags
from PIL import Image

from notepad_jax.eval.measure import Result
from notepad_jax.eval.summary import ALL, Summary, share
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.report import accuracy_plot, canvas, numerals, quickstart_page, training_plot
from notepad_jax.report.examples import Example
from notepad_jax.report.quickstart_page import Report
from notepad_jax.types import Finish


def summary(length: int, right: int, n: int, failed: int = 0) -> Summary:
    values = share([1.0] * right + [0.0] * (n - right))
    return Summary(
        method="notepad", source=ALL, length=length, questions=n, n=n, accuracy=values,
        scores={"em": values}, recall=None, lost={}, unanswered=failed, truncated=0, turns=n,
        tokens=n * length, seconds=61.0,
    )  # fmt: skip


def reading(answer: str = "4711") -> Result:
    return Result(
        task_id="a", source="synthetic/one_hop", method="notepad", length=8192, repeat=0,
        question="code of ann <ann@example.org> ?", gold=("4711",), answer=answer,
        correct=float(answer == "4711"), problem="", scores={}, finish=Finish.STOP, failed=False,
        turns=9, tokens=8192, recall=None, lost="", began=0.0, seconds=1.0, changes=3,
    )  # fmt: skip


def example(changes: int, answer: str = "4711") -> Example:
    memories = [MemoryChange(i, f"code is {i}", 3, 0.1 * i, None) for i in range(changes)]
    return Example("before RL", reading(answer), memories)


METRICS = [
    {"step": s, "reward": s / 9, "logprob_gap_mean": 1e-7 * s, "logprob_gap_max": float("nan")}
    for s in range(10)
]


def full_report(**changed) -> Report:
    parts = dict(
        title="Before & after",
        summary="Short.",
        starter="A tiny network whose habits were spoilt on purpose.",
        train_length=2048,
        before=[summary(2048, 30, 64), summary(8192, 3, 64, failed=2)],
        after=[summary(2048, 64, 64), summary(3670016, 63, 64)],
        metrics=METRICS,
        examples=[example(3, "<script>alert(1)</script>")],
        config={"model.width": 128, "seed": 0},
        timings={"train": 241.0, "measure": 9.5},
    )
    return Report(**(parts | changed))


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    text = quickstart_page.write(tmp_path / "run", full_report()).read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open and "script" not in re.findall(r"<(\w+)", text)
    assert len(tags.sources) == 2
    for source in tags.sources:
        kind, data = source.split(",", 1)
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data).startswith(b"\x89PNG")
    assert not re.search(r"(https?:)?//[a-z]", re.sub(r"base64,[^\"]*", "", text))


def test_the_page_says_what_was_measured(tmp_path):
    text = quickstart_page.write(tmp_path, full_report()).read_text()
    for words in ("Before &amp; after", "spoilt on purpose", "46.9%", "98.4%", "91.7 to 99.7",
                 "not measured", "3,670,016", "model.width", "4 min 01 s", "1 min 01 s",
                 "2 readings before RL failed and count as wrong", "chunk 3", "expected 4711",
                 "&lt;script&gt;", "ann &lt;ann@example.org&gt;"):  # fmt: skip
        assert words in text, words


def test_a_restless_memory_is_shown_in_part(tmp_path):
    text = quickstart_page.write(tmp_path, full_report(examples=[example(500)])).read_text()
    assert "488 more changes" in text and "code is 7<" in text and "code is 8<" not in text
    assert "code is 496<" in text and "code is 499<" in text


def test_parts_without_content_are_left_out(tmp_path):
    bare = full_report(metrics=[], examples=[], config={}, timings={}, before=[])
    text = quickstart_page.write(tmp_path, bare).read_text()
    assert "Training" not in text and "How it read" not in text and text.count("<img") == 1
    assert not (tmp_path / quickstart_page.TRAINING).exists()


def test_the_pictures_are_pictures(tmp_path):
    parts = full_report()
    accuracy = accuracy_plot.before_and_after(tmp_path / "a.png", parts.before, parts.after, 2048)
    training = training_plot.draw(tmp_path / "t.png", METRICS)
    for path, width in ((accuracy, 1280), (training, 2 * 2.9 * canvas.DPI)):
        with Image.open(path) as image:
            assert image.size[0] == int(width) and len(image.convert("RGB").getcolors(10**6)) > 20


def test_one_length_and_one_step_can_be_drawn(tmp_path):
    one = [summary(2048, 1, 2)]
    assert accuracy_plot.before_and_after(tmp_path / "a.png", one, [], 2048).exists()
    assert training_plot.draw(tmp_path / "t.png", METRICS[:1]).exists()
    with pytest.raises(ValueError, match="no accuracy to draw"):
        accuracy_plot.before_and_after(tmp_path / "a.png", [], [], 2048)
    with pytest.raises(ValueError, match="no training metrics"):
        training_plot.draw(tmp_path / "t.png", [{"step": 0, "other": 1.0}])


def test_durations_are_readable():
    told = [numerals.duration(s) for s in (0.84, 12.3, 59.7, 125, 3720)]
    assert told == ["0.8 s", "12 s", "1 min 00 s", "2 min 05 s", "1 h 02 min"]
