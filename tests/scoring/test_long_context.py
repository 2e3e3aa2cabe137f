"""MRCR's, OOLONG's and NoLiMa's scores: numbers by hand, dates in many forms, odd answers."""

import pytest

from notepad_jax.scoring import long_context, metrics
from notepad_jax.scoring.metrics import METRICS

PREFIX = "aB3dE6gH9j"
DAY = ["Mar 04, 2023"]


@pytest.mark.parametrize(
    ("said", "worth"),
    [
        ("abcd", 1),
        ("abce", 0.75),  # 2 * 3 / 8
        ("ab", 2 / 3),  # 2 * 2 / 6
        ("", 0),
        ("abcdabcd", 2 / 3),  # 2 * 4 / 12
        ("dcba", 0.25),  # one character in order
        ("abcd" * 40, 0),  # more than ten times as long
    ],
)
def test_mrcr_is_the_ratio_of_what_follows_the_prefix(said, worth):
    assert METRICS["mrcr"](PREFIX + said, [PREFIX + "abcd"]) == pytest.approx(worth)


@pytest.mark.parametrize(
    "said", ["abcd", PREFIX[1:] + "abcd", PREFIX.lower() + "abcd", "", "Sure!"]
)
def test_mrcr_is_nothing_without_the_prefix(said):
    assert METRICS["mrcr"](said, [PREFIX + "abcd"]) == 0


def test_mrcr_lets_white_space_before_the_prefix_pass_and_takes_the_best_answer():
    assert METRICS["mrcr"](f"\n\n {PREFIX}abcd", [PREFIX + "abcd"]) == 1
    assert METRICS["mrcr"](PREFIX + "abcd", [PREFIX + "xxxx", PREFIX + "abcd"]) == 1
    found = metrics.score(f"<think>so</think>\n\n{PREFIX}abcd", [PREFIX + "abcd"], "mrcr", "auto")
    assert found.value == 1


@pytest.mark.parametrize(
    ("name", "said", "gold", "worth"),
    [
        ("oolong", "Label: food", "food", 1),
        ("oolong", "food", "food", 1),
        ("oolong", "It is food", "food", 0),  # short, and taken as it is
        ("oolong", "I think that it is food", "food", 1),  # its last word
        ("oolong", "Label: Food", "food", 0),
        ("oolong", "Label: **food**", "food", 1),
        ("oolong", "Label: [food]", "food", 1),
        ("oolong", "**Label:** food", "food", 0),  # as published: a space is left of it
        ("oolong", "Label: food\nUser: 12345", "12345", 1),
        ("oolong", " " * 40, "food", 0),
        ("oolong", "Answer: more common", "more common", 1),
        ("oolong", "Answer: food is more common than sport", "more common than", 1),
        ("oolong", "Answer: less common", "more common", 0),
        ("oolong", "Answer: it is of the same frequency", "same frequency as", 1),
        ("oolong_number", "Answer: 12", "12", 1),
        ("oolong_number", "Answer: 11", "12", 0.75),
        ("oolong_number", "Answer: 14", "12", 0.5625),
        ("oolong_number", "**Answer:** 12", "12", 1),
        ("oolong_number", "12 ", "12", 1),
        ("oolong_number", "Answer: 12.", "12", 0),
        ("oolong_number", "Answer: twelve", "12", 0),
        ("oolong_number", "Answer: " + "9" * 5000, "12", 0),
        ("oolong_number", "Answer: " + "9" * 400, "12", 0),
        ("oolong_number", "", "12", 0),
        ("contains", "That was Yuki.", "Yuki", 1),
        ("contains", "That was yuki.", "Yuki", 0),
        ("contains", "Yukiko", "Yuki", 1),
        ("contains", "", "Yuki", 0),
    ],
)  # fmt: skip
def test_oolong_and_nolima(name, said, gold, worth):
    assert METRICS[name](said, [gold]) == pytest.approx(worth)
    assert METRICS[name](said, ["other", gold]) == pytest.approx(worth)


@pytest.mark.parametrize(
    "said",
    [
        "Mar 04, 2023", "March 4, 2023", "March 4th, 2023", "4 March 2023", "04 Mar 2023",
        "2023-03-04", "2023/3/4", "03/04/2023", "Sat, Mar 4, 2023", "4th of March 2023",
        "[2023-03-04]", "20230304",
    ],
)  # fmt: skip
def test_a_date_may_be_written_in_many_ways(said):
    assert METRICS["oolong_date"](f"Date: {said}", DAY) == 1
    assert METRICS["oolong_date"](f"Date: {said}", ["2023-03-04"]) == 1
    assert METRICS["oolong_date"](f"Date: {said}", ["Mar 05, 2023"]) == 0


@pytest.mark.parametrize(
    "said",
    ["", "March", "March 2023", "04", "2023", "Feb 30, 2023", "March April 4", "1 2 3 4", "Mar 4 5",
     "0/0/0", "13/13/2023", "Mar 4, 2023!", "202303041", "It is Mar 4, 2023", "Marble 4, 2023"],
)  # fmt: skip
def test_what_names_no_day_is_none(said):
    assert METRICS["oolong_date"](f"Date: {said}", DAY) == 0


def test_the_day_stands_first_where_there_is_no_such_month():
    assert METRICS["oolong_date"]("Date: 25/12/2023", ["Dec 25, 2023"]) == 1


@pytest.mark.parametrize("name", ["mrcr", "oolong", "oolong_number", "oolong_date", "contains"])
def test_gold_answers_are_worth_1(name):
    gold = {"mrcr": PREFIX + "abcd", "oolong_number": "12", "oolong_date": DAY[0]}
    metrics.check_gold([gold.get(name, "food")], name)


def test_an_answer_of_mrcr_is_as_long_as_its_prefix_says():
    assert len(PREFIX) == long_context.PREFIX
