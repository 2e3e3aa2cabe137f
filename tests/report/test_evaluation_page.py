"""The evaluation's page says what was measured, safely; its JSON says it without a clock."""

import json
import re

import pytest
from markup import Tags

from notepad_jax.eval import published
from notepad_jax.eval.measure import Result
from notepad_jax.eval.summary import ALL, Summary, share
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.report import accuracy_plot, evaluation_page, examples, numerals, render
from notepad_jax.report.evaluation_page import EvaluationReport
from notepad_jax.report.examples import Example
from notepad_jax.report.labels import LETTER, Box
from notepad_jax.report.origin import Origin
from notepad_jax.types import Finish

HOSTILE = "</q><script>alert(1)</script>"


def summary(method, length, right, n=64, **changed) -> Summary:
    accuracy = share([1.0] * right + [0.0] * (n - right))
    fields = dict(
        method=method, source=ALL, length=length, questions=n, n=n, accuracy=accuracy,
        scores={"em": accuracy}, recall=None, lost={}, unanswered=0, malformed=0, truncated=0,
        turns=9 * n, tokens=n * length, seconds=123.456,
    )  # fmt: skip
    return Summary(**(fields | changed))


def reading(**changed) -> Result:
    fields = dict(
        task_id="a", source="ruler-qa/hotpotqa", method="notepad", length=8192, repeat=0,
        question="Where?", gold=("Paris",), metric="em", answer="Paris", correct=1.0,
        problem="", scores={}, finish=Finish.STOP, failed=False, turns=3,
        tokens=8192, recall=1.0, lost="", began=654.321, seconds=123.456, changes=1,
    )  # fmt: skip
    return Result(**(fields | changed))


def example(**changed) -> Example:
    changes = [MemoryChange(0, "Paris.", 2, 123.456, 0.5)]
    return examples.example("notepad", reading(**changed), changes)


BY_LENGTH = [
    summary("notepad", 32768, 56, 70, recall=share([1.0, 0.5]), lost={"overwritten": 5}),
    summary("notepad", 131072, 48, 80, unanswered=2, truncated=3),
    summary("full-context", 32768, 40),
    summary("full-context", 131072, 0, unanswered=64),
]


def full(**changed) -> EvaluationReport:
    parts = dict(
        title="RULER & more",
        summary="Short.",
        origin=Origin("2026-11-22 16:05 UTC", "d3ee518", "1 x TPU v5p"),
        suite="ruler-qa",
        policy="runs/one/hf",
        train_length=32768,
        by_length=BY_LENGTH,
        by_task=[
            summary("notepad", length, 32, source=f"ruler/{task}")
            for task in ("vt", "cwe")
            for length in (32768, 131072)
        ],
        examples=[example()],
        settings={"reading.max_memory": 1024, "evaluate.lengths": ("32k", "128k")},
        published=True,
    )
    return EvaluationReport(**(parts | changed))


def written(folder, **changed) -> str:
    """Returns the page as a browser reads it: white space of any length is one blank."""
    return " ".join(evaluation_page.write(folder, full(**changed)).read_text().split())


# ---------------------------------------------------------------- the page


def test_the_page_is_whole_and_needs_no_other_file(tmp_path):
    text = written(tmp_path / "new")
    tags = Tags()
    tags.feed(text)
    assert not tags.open and not tags.sources
    names = text.replace("http://www.w3.org/2000/svg", "")  # a name, nothing that is fetched
    assert not re.search(r"https?:|url\(|@import|src=", names)


def test_the_page_says_what_was_measured(tmp_path):
    text = written(tmp_path)
    for words in (
        "RULER &amp; more", "runs/one/hf on the suite ruler-qa", "80.0%", "n = 70",
        "reference", "\N{MINUS SIGN}20.0 points", "\N{MINUS SIGN}33.4 to \N{MINUS SIGN}5.2",
        "relative \N{MINUS SIGN}25.0%", "ruler/cwe", "Evidence in the last memory", "Overwritten",
        "notepad, 150 readings: 2 without an answer", "3 with an answer cut at its limit",
        "full-context, 128 readings: 64 without an answer", "2 min 03 s", "576 turns",
        "RL-MemAgent-14B", "arXiv 2507.02259", "chunk 1<small>50% of evidence", "2 settings",
        "1 x TPU v5p",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize(
    ("turns", "answer_turns", "says"), [(3, 1, "2 chunks"), (6, 4, "2 chunks"), (2, 1, "1 chunk ")]
)
def test_turns_of_an_answer_are_no_chunks(tmp_path, turns, answer_turns, says):
    text = written(tmp_path, examples=[example(turns=turns, answer_turns=answer_turns)])
    assert f"<small>{says}" in text.replace("</small>", " </small>")


def test_what_a_policy_wrote_is_escaped_and_bounded(tmp_path):
    hostile = example(question=HOSTILE, answer=HOSTILE + "x" * 10**7, gold=(HOSTILE,),
                      problem=HOSTILE, correct=0.0)  # fmt: skip
    memories = [MemoryChange(0, "half a pair \ud800, a bell \x07" + HOSTILE, 9, 0.0, None)]
    text = written(
        tmp_path,
        title=HOSTILE, summary=HOSTILE, policy=HOSTILE, suite=HOSTILE, settings={HOSTILE: HOSTILE},
        examples=[examples.example(HOSTILE, hostile.result, memories)],
        by_length=[summary(HOSTILE, 8192, 3, lost={"overwritten": 1}, scores={HOSTILE: share([])})],
        by_task=[summary(HOSTILE, 8192, 3, source=HOSTILE)],
    )  # fmt: skip
    assert text.count("<script") == 1 and text.count("&lt;script&gt;") > 12
    assert "half a pair ?, a bell \ufffd" in text and "more characters" in text
    assert len(text) < 100_000
    tags = Tags()
    tags.feed(text)
    assert not tags.open


def test_capture_and_retention_are_drawn_where_they_are_known(tmp_path):
    known = dict(recall=share([0.5]), captured=share([1.0, 0.5]), retained=share([0.5, 0.5]))
    some = [summary("notepad", 2**k, 40, **known) for k in (12, 15)]
    page = written(tmp_path, by_length=some)
    assert "Evidence by document length" in page and "kept to the end" in page
    others = [summary("recent-only", 4096, 40)]
    assert "kept to the end" not in written(tmp_path, by_length=others)


def test_parts_without_content_are_left_out(tmp_path):
    bare = [summary("notepad", 32768, 32), summary("notepad", 131072, 30)]
    text = written(tmp_path, by_length=bare, by_task=[], examples=[], settings={},
                   train_length=None, published=False)  # fmt: skip
    headings = re.findall(r"<h2>(.*?)</h2>", text)
    assert headings == ["Accuracy by length", "Against the training length", "What it cost"]
    assert "say it with --train-length" in text
    assert (
        "Every reading gave an answer of the form asked for, and none was cut" in text
        and "Trained" not in text
    )


def test_published_figures_are_those_of_their_suite_only(tmp_path):
    assert "MemAgent" not in written(tmp_path, suite="memory")
    assert "MemAgent" not in written(tmp_path, published=False)
    assert evaluation_page.report_json(full(suite="memory"))["published"] == []


def test_published_lines_stand_behind_what_was_measured_by_their_metric_and_nothing_else(
    tmp_path, monkeypatch
):
    drawn = []
    by_method = accuracy_plot.by_method

    def watched(summaries, train_length, published=()):
        drawn.append(([s.accuracy for s in summaries], tuple(published)))
        return by_method(summaries, train_length, published)

    monkeypatch.setattr(accuracy_plot, "by_method", watched)
    two_way = share([1.0] * 9 + [0.0])
    rows = [summary("notepad", n, 32, scores={"sub_em_two_way": two_way}) for n in (7168, 28672)]
    text = written(tmp_path, by_length=rows)
    own, beside = drawn
    assert own == ([rows[0].accuracy, rows[1].accuracy], ())
    assert beside == ([two_way, two_way], published.FIGURES)
    section = text.partition("Beside published figures")[2]
    assert (
        "90.0%" in section and "Grey: MemAgent" in section and "Grey" not in text[: -len(section)]
    )
    drawn.clear()
    written(tmp_path, by_length=rows, suite="ruler")
    written(tmp_path)  # was not scored by that metric
    assert [figures for _, figures in drawn] == [(), ()]


@pytest.mark.parametrize(
    ("suite", "belong"),
    [("ruler-qa", True), ("data/eval_200.json", True), ("eval_6400.json", True),
     ("ruler", False), ("my_eval_200.json", False), ("eval_200.jsonl", False)],
)  # fmt: skip
def test_figures_belong_to_the_suite_and_the_files_they_were_measured_on(suite, belong):
    assert bool(published.of_suite(suite)) == belong


def test_figures_belong_to_a_folder_of_those_files_and_nothing_else(tmp_path):
    assert published.of_suite(str(tmp_path)) == ()
    for name, belong in (("eval_50.json", True), ("eval_6400.json", True), ("mine.jsonl", False)):
        (tmp_path / name).touch()
        assert bool(published.of_suite(str(tmp_path))) == belong


def test_a_stand_in_for_the_training_length_is_named(tmp_path):
    text = written(tmp_path, train_length=40000)
    assert "the longest length below it (32K) stands in" in text
    text = written(tmp_path, train_length=8192)
    assert "nothing to compare the longer documents with" in text
    assert "relative \N{MINUS SIGN}" not in text


def test_repeats_are_told_apart_from_questions(tmp_path):
    one = [summary("notepad", 32768, 32, n=64, questions=16)]
    assert "n = 16, read 4 times each" in written(tmp_path, by_length=one)


def test_silence_is_not_called_an_answer(tmp_path):
    text = written(tmp_path, by_length=[summary("notepad", 32768, 0, malformed=64)])
    assert "64 with an answer that was empty or not of the form asked for" in text
    assert "Every reading gave" not in text


def test_grey_is_mentioned_where_it_is_drawn_and_nowhere_else(tmp_path):
    scores = {"sub_em_two_way": share([1.0, 0.0])}
    both = [summary("notepad", length, 32, scores=scores) for length in (512, 32768, 131072)]
    assert "Grey:" in written(tmp_path, by_length=both)
    for one in both[:2]:  # shorter than any published length; or one, which is no line
        text = written(tmp_path, by_length=[one], train_length=None)
        assert "Grey:" not in text and "tone-grey" not in re.sub("<style>.*?</style>", "", text)


def test_shades_are_as_strong_as_the_share_is_high(tmp_path):
    rows = [summary("notepad", 2**k, k, n=10, source="t") for k in range(11)]
    text = written(tmp_path, by_task=rows)
    assert [float(share) for share in re.findall(r"--share:([\d.]+)", text)] == [
        k / 10 for k in range(11)
    ]


# ---------------------------------------------------------------- the JSON


def test_the_json_has_everything_but_the_clock():
    told = evaluation_page.report_json(full())
    text = json.dumps(told, allow_nan=False)
    assert "seconds" not in text and "began" not in text and "123.456" not in text
    assert told == json.loads(text)  # nothing but what JSON can say
    first = told["by_length"][0]
    assert (first["method"], first["length"], first["accuracy"]["mean"]) == ("notepad", 32768, 0.8)
    loss = told["degradation"][1]
    assert loss["absolute"]["mean"] == pytest.approx(0.2)
    assert loss["absolute"]["low"] == pytest.approx(0.0524, abs=5e-5)
    assert told["examples"][0]["result"]["finish"] == "stop"
    assert told["examples"][0]["first"][0]["memory"] == "Paris."
    assert told["settings"]["evaluate.lengths"] == ["32k", "128k"]
    best = told["published"][0]
    assert best["accuracy"][0] == {"length": 7168, "mean": 0.836}
    assert best["accuracy"][-1] == {"length": 3670016, "mean": 0.781}
    assert "2507.02259" in best["source"] and best["metric"] == "sub_em_two_way"


def test_effective_lengths_are_said_of_nolima_alone(tmp_path):
    kept = [summary("notepad", length, right, 80) for length, right in ((1024, 80), (8192, 68),
            (32768, 67))] + [summary("full-context", 1024, 0, 80)]  # fmt: skip
    told = evaluation_page.report_json(full(suite="nolima", by_length=kept))
    assert told["effective_length"] == {"notepad": 8192, "full-context": None}
    text = written(tmp_path, suite="nolima", by_length=kept)
    assert "at least 85.0% of that at the shortest one here: notepad 8K, full-context none." in text
    assert evaluation_page.report_json(full())["effective_length"] == {}
    assert "Effective length" not in written(tmp_path)


def test_the_json_does_not_depend_on_who_ended_first():
    slower = [summary(s.method, s.length, 0, accuracy=s.accuracy, scores=s.scores, n=s.n,
                      questions=s.questions, recall=s.recall, lost=s.lost, unanswered=s.unanswered,
                      truncated=s.truncated, turns=s.turns, tokens=s.tokens, seconds=9.9)
              for s in reversed(BY_LENGTH)]  # fmt: skip
    late = example(began=1.0, seconds=2.0)
    one, two = full(), full(by_length=slower, by_task=full().by_task[::-1], examples=[late])
    assert json.dumps(evaluation_page.report_json(one)) == json.dumps(
        evaluation_page.report_json(two)
    )


def test_published_lengths_double_from_7k_to_3_5m():
    points = published.FIGURES[0].points
    assert [x for x, _ in points] == [7 * 1024 * 2**k for k in range(10)]
    whole = {figures.model: figures.points for figures in published.TABLE}
    assert whole["Qwen2.5-14B, whole"][-1] == (896 * 1024, 0.023)
    # 128 questions: every figure is a count of them, to the rounding of what was printed.
    for share_ in (share_ for points in whole.values() for _, share_ in points):
        assert abs(share_ * 128 - round(share_ * 128)) <= 0.0005 * 128 + 1e-9


# ---------------------------------------------------------------- the picture


METHODS = ("notepad", "full-context", "truncate-middle", "recent-only", "another")
LENGTHS = (8192, 32768, 131072, 524288, 1048576, 3670016)
CASES = {
    "one method": {("notepad", k): 56 - k for k in range(6)},
    "nearly equal": {(m, k): 55 - i for i, m in enumerate(METHODS[:3]) for k in range(6)},
    "all at the floor": {(m, k): i == 0 for i, m in enumerate(METHODS) for k in range(6)},
    "all at the ceiling": {(m, k): 64 - i for i, m in enumerate(METHODS) for k in range(6)},
    "ending early": {(m, k): 50 - 9 * k for i, m in enumerate(METHODS) for k in range(6 - i)},
    "one length": {(m, 2): 40 + i for i, m in enumerate(METHODS)},
    "two lengths": {(m, k): 40 + i for i, m in enumerate(METHODS) for k in (0, 1)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("train_length", [None, 32768, 3670016])
@pytest.mark.parametrize("size", ["wide", "phone"])
def test_no_two_words_of_a_picture_overlap(case, train_length, size):
    rows = [summary(m, LENGTHS[k], int(right)) for (m, k), right in CASES[case].items()]
    picture = accuracy_plot.by_method(rows, train_length, published.FIGURES)
    chart = getattr(picture, size)
    boxes = words_of(chart)
    for i, (words, box) in enumerate(boxes):
        assert [other for other, there in boxes[:i] if box.covers(there)] == [], words
        assert 0 <= box.left and box.right <= chart.width, words
        assert 0 <= box.bottom and box.top <= chart.height, words


def words_of(chart) -> list[tuple[str, Box]]:
    """All words of a chart with their boxes, in pixels from above left."""
    found = []
    for words in chart.words:
        for line, x, y in chart.lines_of(words):
            wide = LETTER * words.size * len(line)
            left = x if words.anchor == "start" else x - wide
            found.append((line, Box(left, y - 0.8 * words.size, left + wide, y + 0.2 * words.size)))
    ticks = [(words, x, chart.bottom + 17) for x, words in chart.across_ticks()]
    ticks.append((chart.across.title, chart.left + chart.axes_width / 2, chart.bottom + 36))
    for words, x, y in ticks:
        wide = LETTER * 11 * len(words)
        found.append((words, Box(x - wide / 2, y - 9, x + wide / 2, y + 2)))
    return found


def test_the_pointer_is_told_what_the_table_says():
    chart = accuracy_plot.by_method(BY_LENGTH, 32768, published.FIGURES).wide
    stops = {heading: rows for _, heading, rows in chart.stops()}
    assert [heading for _, heading, _ in chart.stops()] == sorted(stops, key=len) != []
    told = {label: words for label, _, words, _ in stops["32K tokens"]}
    assert told == {"notepad": "80.0% (69.2 to 87.7), n = 70",
                    "full-context": "62.5% (50.3 to 73.3), n = 64"}  # fmt: skip
    with pytest.raises(ValueError, match="no accuracy to draw"):
        accuracy_plot.by_method([], 32768)


def test_numbers_are_written_as_people_do():
    assert numerals.counted(1, "turn", "turns") == "1 turn"
    assert numerals.counted(1200, "turn", "turns") == "1,200 turns"
    assert render.shortened("a" * (render.LONGEST_TEXT + 5)).endswith("... (5 more characters)")
