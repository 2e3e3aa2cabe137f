r"""Which letter was chosen, as people and models write it."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.scoring.choices import choice
from notepad_jax.scoring.extraction import Malformed


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        (" b.\n", "B"),
        ("(C)", "C"),
        ("**D**", "D"),
        (r"\text{D}", "D"),
        (r"$\mathrm{E}$", "E"),
        ("The correct answer is (A)", "A"),
        ("The answer is B.", "B"),
        ("Answer: C", "C"),
        ("Answer:\nC", "C"),
        ("I choose option (b), since I like it", "B"),
        ("The answer is A. No, wait: the answer is B.", "B"),  # the last statement wins
        ("The answer is B. Options (A) and (C) are wrong.", "B"),
        ("(A) looks right, but I take (D)", "D"),
        ("B) Paris", "B"),
        ("B. It is larger than A.", "B"),
        ("A. Paris\nor rather\nC. Lyon", "C"),
        ("It must be C", "C"),
        ("The answer is not A but B", "B"),
        ("I think it is C", "C"),
        ("A cat chose D", "D"),
        ("I am for A", "A"),
    ],
)
def test_the_letter_chosen(said, letter):
    assert [other for other in string.ascii_uppercase if choice(said, [other])] == [letter]
    assert choice(letter, [said]) == 1.0  # a gold answer may be a statement too


@pytest.mark.parametrize(
    "said", ["", "Paris", "I do", "A cat", "not A", "42", "BBC", "it's B's", "?"]
)
def test_no_letter(said):
    with pytest.raises(Malformed, match="no_letter"):
        choice(said, ["A", "B"])


@given(st.sampled_from(string.ascii_uppercase), st.sampled_from(string.ascii_uppercase))
def test_identity_case_and_any_gold(said, other):
    for written in (
        said,
        said.lower(),
        f"({said})",
        f"The correct answer is ({said})",
        f" {said}. ",
    ):
        assert choice(written, [said]) == choice(written, [other, said]) == 1.0
        assert choice(written, [other]) == float(said == other)


@given(st.text(), st.lists(st.text(), min_size=1, max_size=2))
def test_any_text_chooses_one_letter_or_none(said, golds):
    try:
        assert choice(said, golds) in (0.0, 1.0)
    except Malformed as malformed:
        assert malformed.reason == "no_letter"


@pytest.mark.parametrize(
    "said",
    [
        "The answer is A, because option B is wrong.",
        "**Answer: A**\n\nOption B is wrong because it is too long.",
        "The best choice is A. Option B is too narrow.",
        "A is correct, B is wrong.",
        "A is the correct answer.",
        "C is wrong. A is right.",
    ],
)
def test_what_is_said_of_other_options_does_not_outweigh_the_answer(said):
    assert choice(said, ["A"]) == 1.0


@pytest.mark.parametrize("said", ["The answer is b.", "Answer: b) Paris", "the answer is b"])
def test_a_small_letter_that_is_named_as_the_answer_is_chosen(said):
    assert choice(said, ["B"]) == 1.0
