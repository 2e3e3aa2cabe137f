"""The report is one file that needs nothing else, and its pictures are pictures."""

import collections
import re
import xml.etree.ElementTree

import pytest
from markup import Tags

from notepad_jax.eval.measure import Result
from notepad_jax.eval.summary import ALL, Summary, share
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.report import accuracy_plot, examples, numerals, quickstart_page, training_plot
from notepad_jax.report.examples import Example, example
from notepad_jax.report.origin import Next, Origin
from notepad_jax.report.quickstart_page import QuickstartReport
from notepad_jax.types import Finish


def summary(length: int, right: int, n: int, failed: int = 0) -> Summary:
    values = share([1.0] * right + [0.0] * (n - right))
    return Summary(
        method="notepad", source=ALL, length=length, questions=n, n=n, accuracy=values,
        scores={"em": values}, recall=None, lost={}, unanswered=failed, malformed=0, truncated=0,
        turns=n, tokens=n * length, seconds=61.0,
    )  # fmt: skip


def reading(answer: str = "4711", number: int = 0, **changed) -> Result:
    fields = dict(
        task_id=f"a{number}", source="synthetic/one_hop", method="notepad", length=8192, repeat=0,
        question="code of ann <ann@example.org> ?", gold=("4711",), metric="em", answer=answer,
        correct=float(answer == "4711"), problem="", scores={}, finish=Finish.STOP, failed=False,
        turns=9, tokens=8192, recall=None, lost="", began=0.0, seconds=1.0, changes=3,
    )  # fmt: skip
    return Result(**(fields | changed))


def read(changes: int, answer: str = "4711", who: str = "before RL", **changed) -> Example:
    memories = [MemoryChange(i, f"code is {i}", 3, 0.1 * i, None) for i in range(changes)]
    return example(who, reading(answer, **changed), memories)


SVG = "{http://www.w3.org/2000/svg}"
METRICS = [
    {"step": s, "reward": s / 9, "logprob_gap_mean": 1e-7 * s, "logprob_gap_max": float("nan")}
    for s in range(10)
]


def full_report(**changed) -> QuickstartReport:
    parts = dict(
        title="Before & after",
        summary="Short.",
        origin=Origin("2026-11-22 16:05 UTC", "d3ee518", "2 cores of a CPU", [Next("go", "on --")]),
        starter="A tiny network whose habits were spoilt on purpose.",
        train_length=2048,
        before=[summary(2048, 30, 64), summary(8192, 3, 64, failed=2)],
        after=[summary(2048, 64, 64), summary(3670016, 63, 64)],
        warnings=["step 7: no group <has> two rewards; raise <b>"],
        metrics=METRICS,
        examples=[read(3, "<script>alert(1)</script>")],
        config={"model.width": 128, "seed": 0},
        timings={"train": 241.0, "measure": 9.5},
    )
    return QuickstartReport(**(parts | changed))


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    text = quickstart_page.write(tmp_path / "run", full_report()).read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open and not tags.sources
    names = text.replace("http://www.w3.org/2000/svg", "")  # a name, nothing that is fetched
    assert not re.search(r"https?:|url\(|@import|src=", names)


def test_the_page_says_what_was_measured(tmp_path):
    text = quickstart_page.write(tmp_path, full_report()).read_text()
    for words in ("Before &amp; after", "spoilt on purpose", "46.9%", "98.4%", "91.7 to 99.7",
                 "not measured", "3,670,016", "model.width", "4 min 01 s", "1 min 01 s",
                 "before RL, 128 readings: 2 without an answer", "chunk 3", "Expected: 4711",
                 "2026-11-22 16:05 UTC", "d3ee518", "2 cores of a CPU", "<dt>go</dt>",
                 "What looks sick", "step 7: no group &lt;has&gt; two rewards; raise &lt;b&gt;",
                 "&lt;script&gt;", "ann &lt;ann@example.org&gt;"):  # fmt: skip
        assert words in text, words


def test_a_restless_memory_is_shown_in_part(tmp_path):
    text = quickstart_page.write(tmp_path, full_report(examples=[read(500)])).read_text()
    assert "488 more changes" in text and "code is 7<" in text and "code is 8<" not in text
    assert "code is 496<" in text and "code is 499<" in text


def test_parts_without_content_are_left_out(tmp_path):
    bare = full_report(warnings=[], metrics=[], examples=[], config={}, timings={}, before=[])
    text = quickstart_page.write(tmp_path, bare).read_text()
    assert (
        "Training" not in text
        and "looks sick" not in text
        and "How it read" not in text
        and text.count("<figure") == 2
    )
    assert not (tmp_path / quickstart_page.TRAINING).exists()


def test_the_readings_of_a_question_stand_side_by_side(tmp_path):
    shown = [
        read(1, "0815", number=1),
        read(1, "4711", number=2),
        read(1, who="after RL", number=1),
    ]
    text = quickstart_page.write(tmp_path, full_report(examples=shown)).read_text()
    asked = re.findall(r"<details class=\"reading\"(.*?)>(.*?)</details>", text, re.DOTALL)
    assert [body.count("<article>") for _, body in asked] == [2, 1]
    assert 'data-outcome-0="wrong" data-outcome-1="right"' in asked[0][0]
    assert 'data-length="8192"' in asked[0][0] and "before RL: right" in text


def test_a_question_that_wants_all_answers_says_so(tmp_path):
    def told(metric, *gold):
        shown = [read(1, gold=gold, metric=metric)]
        return quickstart_page.write(tmp_path, full_report(examples=shown)).read_text()

    assert "Expected: 1 or 2 or 3</p>" in told("em", "1", "2", "3")
    assert "Expected: 1, 2 and 3, all of them</p>" in told("ruler_all", "1", "2", "3")
    assert "Expected: 1</p>" in told("ruler_all", "1")


def test_what_comes_of_nothing_said_is_no_answer():
    assert [examples.outcome(reading(answer)) for answer in ("4711", "0815", " ")] == [
        "right", "wrong", "no answer",
    ]  # fmt: skip
    assert examples.outcome(reading(finish=Finish.CANCELLED)) == "no answer"
    assert examples.outcome(reading(correct=0.5)) == "partly right"
    assert examples.outcome(reading("", correct=1.0)) == "right"  # nothing was asked for


def test_the_chosen_questions_are_of_every_kind_and_paired():
    def results(lengths, right):
        return [reading("4711" if right(k) else "", k, length=n, task_id=f"{n}-{k}")
                for n in lengths for k in range(20)]  # fmt: skip

    before, after = results((512, 2048), lambda k: k == 7), results((512, 2048, 8192), bool)
    chosen = examples.spread({"before": before, "after": after}, most=12)
    assert len(chosen) == 12
    pairs = {tuple(outcome_of(side) for side in sides) for sides in chosen}
    assert {("no answer", "right"), ("right", "right"), ("no answer", "no answer")} <= pairs
    assert {sides[0][1].length for sides in chosen} == {512, 2048, 8192}
    assert all(len({r.task_id for _, r in sides}) == 1 for sides in chosen)
    assert len({sides[0][1].key for sides in chosen}) == 12
    again = examples.spread({"before": before, "after": after}, most=12)
    assert again == chosen


def test_few_questions_of_very_many_kinds_are_of_all_lengths_and_tasks():
    lengths, tasks = [2**k for k in range(9, 15)], [f"task {k}" for k in range(13)]
    results = [
        reading(("4711", "no")[n % 2], length=length, source=task, task_id=f"{length}-{task}-{n}")
        for length in lengths for task in tasks for n in range(3)
    ]  # fmt: skip
    (chosen,) = zip(*examples.spread({"notepad": results}, most=26), strict=True)
    found = [result for _, result in chosen]
    for part in ("length", "source"):
        counts = collections.Counter(getattr(result, part) for result in found).values()
        assert max(counts) - min(counts) <= 2, part
        assert len(counts) == {"length": 6, "source": 13}[part]
    assert 12 <= sum(examples.outcome(result) == "right" for result in found) <= 14
    assert len(examples.spread({"notepad": results}, most=10**6)) == len(results)


def outcome_of(side):
    return examples.outcome(side[1])


def test_the_pictures_are_pictures(tmp_path):
    quickstart_page.write(tmp_path, full_report())
    for name, charts in (("accuracy.svg", 1), ("training.svg", 2)):
        drawn = xml.etree.ElementTree.parse(tmp_path / name).getroot()
        assert len(drawn.findall(f"{SVG}svg")) == charts
        strokes = [
            path.get("d") for path in drawn.iter(f"{SVG}path") if "stroke" in path.get("class")
        ]
        assert strokes and all(len(stroke) > 10 and "nan" not in stroke for stroke in strokes)


def test_one_length_and_one_step_can_be_drawn():
    one = [summary(2048, 1, 2)]
    assert len(accuracy_plot.before_and_after(one, [], 2048).wide.lines) == 1
    (reward,) = training_plot.charts(METRICS[:1])
    assert reward.title == "Reward" and reward.lines[0].mark
    with pytest.raises(ValueError, match="no accuracy to draw"):
        accuracy_plot.before_and_after([], [], 2048)
    assert training_plot.charts([{"step": 0, "other": 1.0}]) == []


def test_durations_are_readable():
    told = [numerals.duration(s) for s in (0.84, 12.3, 59.7, 125, 3720)]
    assert told == ["0.8 s", "12 s", "1 min 00 s", "2 min 05 s", "1 h 02 min"]
