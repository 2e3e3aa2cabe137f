r"""The reward's cases with the reference's verdicts, SQuAD's numbers, hostile answers."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.tasks import scoring
from notepad_jax.tasks.scoring import METRICS, wilson_interval

BOXED = r"\boxed{Paris}"


@pytest.mark.parametrize(
    ("prediction", "answers", "reward"),
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
        (BOXED + "x" * 287, ["Paris"], 1),
        (BOXED + "x" * 288, ["Paris"], 0),
        (r"\boxed{\frac{1}{2}}", [r"\dfrac{1}{2}"], 1),
        (r"\boxed{\text{Paris}}", ["Paris"], 1),
        (r"\boxed{50\%}", ["50%"], 1),
        (r"\boxed{\left( 1, 2 \right)}", ["(1,2)"], 1),
        (r"\boxed{}", ["Paris"], 0),
        (r"\boxed{$}", ["$"], 0),
        (r"\boxed{Paris} then \boxed{Ly", ["Paris"], 0),
        ("", ["Paris"], 0),
    ],
)
def test_boxed(prediction, answers, reward):
    assert scoring.boxed(prediction, answers) == reward


@pytest.mark.parametrize(
    ("name", "prediction", "answers", "score"),
    [
        ("em", " ann \n", ["ann"], 1),
        ("em", "Ann", ["ann"], 0),
        ("normalised_em", "The Nokia!", ["nokia"], 1),
        ("normalised_em", "", ["The The"], 0),
        ("normalised_em", "the the", ["The The"], 1),
        ("token_f1", "the red house", ["a red car"], 0.5),
        ("token_f1", "red red", ["red"], 2 / 3),
        ("token_f1", "blue", ["red", "blue"], 1),
        ("token_f1", "", ["red"], 0),
        ("sub_em", "It was Nokia.", ["no"], 0),
        ("sub_em", "Well, no.", ["No"], 1),
        ("sub_em", "Paris", ["Paris in France"], 0),
        ("sub_em", "The New York City mayor", ["new york"], 1),
        ("sub_em", "anything", ["?!"], 0),
        ("sub_em", "nonono no", ["no"], 1),
        ("sub_em", "答案是东京。", ["东京"], 1),
        ("sub_em_two_way", "Nokia", ["no"], 1),
        ("sub_em_two_way", "", ["Paris"], 1),
    ],
)
def test_evaluation_metrics(name, prediction, answers, score):
    assert METRICS[name](prediction, answers) == pytest.approx(score)


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3))
def test_metrics_stay_in_bounds_and_know_the_right_answer(prediction, answers):
    for name, metric in METRICS.items():
        assert 0.0 <= metric(prediction, answers) <= 1.0, name
    for name in ("em", "normalised_em"):
        assert METRICS[name](answers[0], answers) == 1.0


@pytest.mark.parametrize("bomb", ["a", "{", "\\boxed{", "\\text{", "a b ", "\0", "}{"])
def test_hostile_answers_cost_bounded_time(bomb):
    began = time.process_time()
    for metric in METRICS.values():
        metric(bomb * 1_000_000, ["a" * 1000, bomb * 300])
    assert time.process_time() - began < 2.0


def test_unknown_metric_is_named():
    with pytest.raises(ValueError, match="no metric 'bleu'; use one of em, "):
        scoring.metric("bleu")


def test_wilson_interval_by_hand():
    low, high = wilson_interval(8, 10)  # Wilson (1927), tabulated .4902 and .9433
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(0, 16) == (0.0, pytest.approx(0.1936, abs=1e-4))
    assert wilson_interval(64, 64) == (pytest.approx(0.9434, abs=1e-4), 1.0)
    with pytest.raises(ValueError, match="5 successes of 4"):
        wilson_interval(5, 4)


@given(st.integers(1, 10**6), st.floats(0, 1))
def test_wilson_interval_holds_the_share(n, share):
    successes = round(share * n)
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    mirrored = wilson_interval(n - successes, n)
    assert mirrored == (pytest.approx(1 - high), pytest.approx(1 - low))
