r"""Published rewards to the letter: an oracle written from their description, and by hand.

`Described` is MemAgent's reward as its description reads, sentence by sentence and by other
means than ours. GoLongRL's are checked where they differ from ours: every row of the table
in docs/evaluation.md is here.
"""

from __future__ import annotations

import random
import re

import pytest

from notepad_jax.scoring import metrics, published
from notepad_jax.scoring.metrics import METRICS, Score

PIECES = [
    r"\boxed{", r"\boxed ", r"\boxed", r"\fbox{", r"\Boxed{", "{", "}", "{}", "$", r"\$", "%",
    r"\%", r"\!", r"\\", r"\tfrac", r"\dfrac", r"\frac", "tfrac", r"\left", r"\right(",
    r"^{\circ}", r"^\circ", " .5", "{.5", ".5", "0.5", "\n", " ", "  ",
    r"\text{Ann}", "Ann", "ANN", "ann", "the Ann",
    "New York", "newyork", "1,234", "é", "İ", "ß", "<think>", "</think>", ", ", "42", "42 ",
    "x" * 120, "so ",
]  # fmt: skip


class Described:
    """MemAgent's training reward, from the words in which it is described."""

    def reward(self, answer: str, golds: list[str]) -> float:
        """Answer and gold in lower case; of the answer the last 300 characters."""
        said = self.boxed("".join(list(answer)[-300:]).lower())
        return 0.0 if said is None else max(float(self.clean(g.lower()) == said) for g in golds)

    def boxed(self, text: str) -> str | None:
        """After the macro and a space up to a dollar sign; else the last, braces balanced."""
        *_, last = text.split("\\boxed ")
        if last != text:
            return self.clean(re.match(r"[^$]*", last)[0])
        macros = [m.end() for m in re.finditer(r"\\boxed", text)]
        if not macros or text[macros[-1] : macros[-1] + 1] != "{":
            return None
        rest, depth = text[macros[-1] + 1 :], 1
        for i, letter in enumerate(rest):
            depth += (letter == "{") - (letter == "}")
            if not depth:
                return self.clean(rest[:i])
        return None

    def clean(self, text: str) -> str:
        """Newlines, inverse spaces, double backslashes, fractions, brackets, degrees, ..."""
        for pattern, by in (
            (r"\n", ""), (r"\\!", ""), (r"\\\\", r"\\"), ("tfrac", "frac"), ("dfrac", "frac"),
            (r"\\left", ""), (r"\\right", ""), (r"\^\{\\circ\}", ""), (r"\^\\circ", ""),
            (r"\\\$", ""), (r"\\%", ""), (r" \.", " 0."), (r"\{\.", "{0."), (" ", ""),
        ):  # fmt: skip
            text = re.sub(pattern, by, text)
        return text


def cases(seed: int, number: int):
    """Answers of pieces that matter, and gold answers that are often the same but for those."""
    rng = random.Random(seed)
    for _ in range(number):
        inside = "".join(rng.choices(PIECES, k=rng.randint(0, 4)))
        sign = rng.choice(
            [r"\boxed{%s}", r"\boxed{%s}", r"\boxed %s$", r"\boxed %s", "%s", r"\fbox{%s}"]
        )
        before, after = ("".join(rng.choices(PIECES, k=rng.randint(0, 3))) for _ in "ab")
        changed = inside.replace(*rng.choice([(" ", ""), ("d", "t"), ("\\", "\\\\"), ("\n", " ")]))
        golds = [rng.choice([inside, changed, inside.upper(), "Ann", "0.5"]) for _ in range(2)]
        yield before + sign.replace("%s", inside) + after, golds[: rng.randint(1, 2)]


def test_the_training_reward_is_the_described_one():
    described, right = Described(), 0
    for answer, golds in cases(0, 3000):
        expected = described.reward(answer, golds)
        assert METRICS["memagent"](answer, golds) == expected, (answer, golds)
        assert metrics.score(answer, golds, "memagent", "boxed").value == expected
        right += expected == 1.0
    assert 600 < right < 2400  # neither verdict is rare, so agreeing says something


def test_ours_is_another_reward():
    """`boxed` stays what it is: the two differ where the published clean-up is odd."""
    differ = sum(METRICS["boxed"](a, g) != METRICS["memagent"](a, g) for a, g in cases(1, 1500))
    assert differ > 100


@pytest.mark.parametrize(
    ("answer", "golds", "reward"),
    [
        (r"The answer is \boxed{Paris}.", ["Paris"], 1),
        ("Paris", ["Paris"], 0),
        (r"\boxed{PARIS}", ["paris"], 1),
        (r"\boxed{The Paris}", ["Paris"], 0),
        (r"\boxed{NewYorkCity}", ["New York City"], 1),
        (r"\boxed{Lyon} then \boxed{Paris}", ["Paris"], 1),
        (r"\boxed{Paris} then \boxed{Lyon}", ["Paris"], 0),
        (r"\boxed{b}", ["a", "b"], 1),
        (r"\boxed{Paris", ["Paris"], 0),
        (r"\boxed{Paris}" + "x" * 287, ["Paris"], 1),
        (r"\boxed{Paris}" + "x" * 288, ["Paris"], 0),
        # What `boxed` judges otherwise.
        (r"$\boxed Paris$ it is", ["Paris"], 1),
        (r"\boxed Paris", ["Paris"], 1),
        (r"\boxed {Paris}", ["{Paris}"], 1),  # braces stay behind the space
        (r"\boxed{Lyon} or \boxed Paris$", ["Paris"], 1),
        (r"\boxed Paris$, or \boxed{Lyon}", ["Paris"], 1),  # the form with a space goes first
        (r"\fbox{Paris}", ["Paris"], 0),
        (r"\boxed{\text{Paris}}", ["Paris"], 0),
        (r"\boxed{90^\circ}", ["90"], 1),
        (r"\boxed{50\%}", ["50"], 1),
        (r"\boxed{50%}", ["50"], 0),
        (r"\boxed{ .5}", ["0.5"], 1),
        (r"\boxed{.5}", ["0.5"], 0),
        (r"<think>\boxed{Paris}", ["Paris"], 1),
        (r"\boxed{}", [""], 1),
    ],
)
def test_verdicts_of_the_training_reward(answer, golds, reward):
    assert METRICS["memagent"](answer, golds) == reward


def test_a_published_metric_is_shown_the_whole_completion_and_says_what_was_wrong():
    thought = r"<think>\boxed{Paris} " + "x" * 60_000
    assert metrics.score(thought, ["Paris"], "memagent", "tag") == Score(0.0, "no_box")
    assert (
        metrics.score(thought + r"\boxed{Par", ["Paris"], "memagent", "tag").problem
        == "unclosed_box"
    )
    assert metrics.score(thought + r"\boxed{Paris}", ["Paris"], "memagent", "tag") == Score(1.0, "")
    with pytest.raises(ValueError, match="no contract 'box'"):
        metrics.score("", ["Paris"], "memagent", "box")


# ---------------------------------------------------------------- GoLongRL

LABEL = ["The correct answer is (B)"]
TABLE = ['{"data": [["ann", 1], ["bob", 2]]}']


@pytest.mark.parametrize(
    ("name", "completion", "answers", "ours", "theirs"),
    [
        # Pairs of predicted lines are divided by: a prefix is perfect, a remark costs.
        ("pairwise", "a\nb", ["a", "b", "c", "d"], 1 / 6, 1),
        ("pairwise", "first:\na\nb\nc", ["a", "b", "c"], 1, 3 / 6),
        ("pairwise", "a", ["a"], 1, 0),
        ("pairwise", "a\nb\na", ["a", "b"], 1, 0),  # the last place counts: a after b
        ("pairwise", "a\nb", ["a", "b", "a", "b"], 1, 0),  # 3 pairs of 1: more than 1 is 0
        ("pairwise", "a, b", ["a", "b"], 1, 0),  # lines only
        # A repeated line stands where it last stood; the cut is after so many lines all the same.
        ("ndcg", "a\na\nb\nB\nc", ["a", "b", "c"], 1, 1),
        ("ndcg", "a\nb\nc\na", ["a", "b", "c"], 1, 0.867503),  # b, c, a
        ("ndcg", "a\n\nb", ["a", "b"], 1, 0.760188),  # a blank line takes a rank
        # Blank lines are items; a bulleted or boxed list is not one.
        ("set_f1", "a\n\nb", ["a", "b"], 1, 4 / 5),
        ("set_f1", "- a\n- b", ["a", "b"], 1, 0),
        # Recall alone.
        ("sub_em_lines", "a\n" + "\n".join("uvwxyz123"), ["a"], 2 / 10, 1),
        # Cells are Python's str; the object with `data` is asked for, and case counts.
        ("row_iou", '{"data": [["ann", 1.0], ["bob", 2]]}', TABLE, 1, 1 / 3),
        ("row_iou", '{"data": [["Ann", 1], ["bob", "2"]]}', TABLE, 1, 1 / 3),
        ("row_iou", '[["ann", 1], ["bob", 2]]', TABLE, 1, 0),
        ("row_iou", '```json\n{"data": [["ann", 1], ["bob", 2]]}\n```', TABLE, 1, 0),
        ("row_iou", '{"data": []}', ['{"data": []}'], 1, 0),
        # These very words, and their first statement.
        ("choice", "The correct answer is (B).", LABEL, 1, 1),
        ("choice", "**The correct answer is B**", LABEL, 1, 1),
        ("choice", "B", LABEL, 1, 0),
        ("choice", "The correct answer is (A). No: the correct answer is (B).", LABEL, 1, 0),
        ("choice", "The correct answer is (E)", ["E"], 1, 0),
        # All that stands behind the thinking, boxes and tags included.
        ("em", "<think>x</think> Ann \n", ["Ann"], 1, 1),
        ("em", r"\boxed{Ann}", ["Ann"], 1, 0),
    ],
)  # fmt: skip
def test_what_golongrl_judges_otherwise(name, completion, answers, ours, theirs):
    assert metrics.score(completion, answers, name, "auto").value == pytest.approx(ours)
    published_score = metrics.score(completion, answers, published.TWINS[name], "auto").value
    assert published_score == pytest.approx(theirs, abs=5e-7)
    assert METRICS[published.TWINS[name]](completion, answers) == published_score


@pytest.mark.parametrize("name", ["set_f1", "sub_em_lines", "ndcg", "pairwise"])
def test_lists_stand_behind_the_last_sign_and_thinking_counts_without_one(name):
    twin = METRICS[f"published_{name}"]
    assert twin("<think>x</think>[Answer] no\n[Answer]\nA  a\nb", ["a a", "b"]) == 1.0
    assert twin("x[答案]\na\nb", ["a", "b"]) == 1.0
    assert twin("<think>\na\nb\n</think>\nc", ["a", "b"]) > 0.0
    assert twin("", ["a", "b"]) == 0.0


def test_accuracy_looks_at_the_first_line_and_the_first_answer():
    assert METRICS["published_accuracy"]("[Answer]\nNew  york\nmore", ["new York", "x"]) == 1.0
    assert METRICS["published_accuracy"]("[Answer]\nx\nnew york", ["new York", "x"]) == 0.0


def test_every_twin_is_a_metric_and_answers_for_a_whole_gold_list():
    assert set(published.TWINS) | set(published.TWINS.values()) <= set(METRICS)
    for ours, theirs in published.TWINS.items():
        assert (ours in metrics.ALL_WANTED) == (theirs in metrics.ALL_WANTED)
        golds = {"choice": ["B"], "row_iou": TABLE}.get(ours, ["ann lee", "bob"])
        metrics.check_gold(golds, theirs)
