"""Summaries: Wilson's interval by hand, repeats that are no new questions, what adds up."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.eval import summary
from notepad_jax.eval.summary import wilson_interval
from notepad_jax.types import Evidence, Finish
from tests import fakes
from tests.eval.reading import items, read, task


def test_a_share_has_wilsons_interval():
    # Wilson 1927 for 8 of 10, by hand: z2 = 3.8414588, centre (.8 + z2/20) / (1 + z2/10)
    # = .99207294 / 1.38414588 = .71674, half = sqrt(.016 z2 + z2**2/400) / 1.38414588
    # = sqrt(.06146334 + .03689202) / 1.38414588 = .22658.
    found = summary.share([1.0] * 8 + [0.0] * 2)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94332), abs=1e-5)
    assert summary.share([1.0] * 64).low == pytest.approx(64 / (64 + 3.8414588))
    assert summary.share([]) == summary.Share(0.0, 0.0, 1.0)


def test_questions_about_one_document_count_as_what_they_are_worth():
    # 4 documents of 4 questions, by hand: mean .75, and all wrong ones in one document.
    # e = 4 x .25 = 1 three times, and -3: spread 12; .75 x .25 x 16^2 x 3 / (4 x 12) = 3.
    together = [1.0] * 12 + [0.0] * 4
    documents = [i // 4 for i in range(16)]
    assert summary.worth(together, documents) == pytest.approx(3.0)
    # In 4 documents that each have one wrong answer they are as good as independent, not better.
    spread = [1.0, 1.0, 1.0, 0.0] * 4
    assert summary.worth(spread, documents) == 16
    assert summary.share(spread, documents) == summary.share(spread)
    wide, narrow = summary.share(together, documents), summary.share(together)
    assert wide.mean == narrow.mean and wide.low < narrow.low and wide.high > narrow.high
    low, high = wilson_interval(2.25, 3)
    assert (wide.low, wide.high) == pytest.approx((low, high))


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(0, 4)), min_size=1))
def test_documents_make_an_interval_no_narrower(drawn):
    values, documents = zip(*drawn, strict=True)
    wide, narrow = summary.share(values, documents), summary.share(values)
    assert 0 <= wide.low <= narrow.low + 1e-12 and narrow.high - 1e-12 <= wide.high <= 1
    alone = summary.share(values, range(len(values)))
    assert alone == narrow


def test_a_summary_adds_up():
    planned = items(task("a", "red is"), task("b", "blue is"), length=2)
    planned += items(task("c", "red is ann of red"), length=5)
    times = [(100.0, 3.0), (102.0, 4.0), (200.0, 1.0)]  # began, and took: the first two overlap
    results = [
        dataclasses.replace(result, began=began, seconds=took)
        for result, (began, took) in zip(read(planned, fakes.first_of_chunk()), times, strict=True)
    ]
    two, five = summary.by_length(results)
    assert (two.length, two.n, two.accuracy.mean, two.turns, two.tokens) == (2, 2, 0.5, 4, 4)
    assert (five.length, five.n, five.turns, five.tokens) == (5, 1, 4, 5)
    assert (two.seconds, five.seconds) == (6, 1) and two.scores["em"].mean == 0.5
    assert (two.method, two.source, two.recall, two.lost) == ("notepad", "all", None, {})


def test_an_answer_without_a_word_or_of_another_form_is_counted():
    planned = items(task("a", "red is"), task("b", "blue is"))
    one, two = read(planned, fakes.first_of_chunk())
    silent = dataclasses.replace(one, answer=" \n")
    formless = dataclasses.replace(one, problem="no_box")
    cut_off = dataclasses.replace(one, answer="", finish=Finish.CANCELLED)
    (found,) = summary.by_length([silent, formless, cut_off, two])
    assert (found.malformed, found.unanswered, found.n) == (2, 1, 4)


def test_capture_and_retention_are_apart():
    # The memory is the last chunk's first token: one reading writes both facts and keeps one, one
    # keeps the one that it wrote, and one writes nothing, which says nothing of retention.
    fact = lambda *words: tuple(Evidence(word, 0.5) for word in words)  # noqa: E731
    planned = items(
        task("a", "red is blue is", evidence=fact("red", "blue")),
        task("b", "is is blue is", evidence=fact("red", "blue")),
        task("c", "is is is is", evidence=fact("red")),
        task("d", "red is"),
    )
    (found,) = summary.by_length(read(planned, fakes.first_of_chunk()))
    assert found.captured.mean == pytest.approx((1 + 0.5 + 0) / 3)
    assert found.retained.mean == pytest.approx((0.5 + 1) / 2)
    assert found.recall.mean == pytest.approx((0.5 + 0.5 + 0) / 3)


def test_repeats_sharpen_a_question_and_are_no_questions_of_their_own():
    # One question always right, one always wrong, each read eight times: 1 of 2, not 8 of 16.
    planned = items(task("a", "red is"), task("b", "blue is"), repeats=8)
    (found,) = summary.by_length(read(planned, fakes.first_of_chunk()))
    assert (found.questions, found.n) == (2, 16)
    assert found.accuracy == summary.share([1.0, 0.0])


def test_methods_and_tasks_are_kept_apart():
    planned = items(task("a", "red is")) + items(task("a", "red is"), method="recent-only")
    results = read(planned, fakes.first_of_chunk())
    assert [(s.method, s.source) for s in summary.by_task(results)] == [
        ("notepad", "test"),
        ("recent-only", "test"),
    ]


def test_time_is_what_was_spent_reading_and_no_pause():
    one, two, three = read(items(task("a", "red"), task("b", "is"), task("c", "of")), fakes.empty())
    spans = [(one, 100.0, 5.0), (two, 103.0, 4.0), (three, 9000.0, 2.0)]  # 100 to 107, and 2
    moved = [dataclasses.replace(r, began=began, seconds=s) for r, began, s in spans]
    assert summary.by_length(moved)[0].seconds == pytest.approx(9.0)


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
