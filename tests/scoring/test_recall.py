"""Evidence recall: what counts as kept, shares by hand, and the fate of a lost answer."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.scoring.metrics import sub_em
from notepad_jax.scoring.recall import FATES, Recall
from notepad_jax.types import Evidence


def facts(*texts: str) -> tuple[Evidence, ...]:
    return tuple(Evidence(text, i / len(texts)) for i, text in enumerate(texts))


def after(evidence, *memories: str) -> Recall:
    recall = Recall(evidence)
    for memory in memories:
        recall.see(memory)
    return recall


@pytest.mark.parametrize(
    ("memory", "share"),
    [
        ("The code is RED.", 0.25),
        ("red; Bob lives by the Lake (Ohrid)", 0.75),
        ("", 0.0),
        ("Bob: 7,391", 0.5),  # the comma is punctuation
    ],
)
def test_the_share_is_that_of_the_last_memory(memory, share):
    evidence = facts("red", "Bob", "7391", "Lake Ohrid")
    assert after(evidence, memory).final == after(evidence, "red 7391", memory).final == share


@pytest.mark.parametrize(
    ("fact", "memory", "kept"),
    [
        ("no", "Nokia", False),
        ("no", "no. Nokia", True),
        ("739", "7391", False),
        ("739", "7391 739", True),
        ("The Hague", "in hague", True),  # articles do not count
        ("lake ohrid", "Lake\n Ohrid", True),
        ("lake ohrid", "Ohrid Lake", False),
        ("北京", "他住在北京市", True),  # no spaces between the words of such a script
        ("?", "what?", False),  # a fact of punctuation alone is compared as it is
    ],
)
def test_a_fact_is_kept_as_whole_words_after_normalisation(fact, memory, kept):
    assert after(facts(fact), memory).final == float(kept)


@given(st.text("ab1 .é", min_size=1, max_size=4), st.text("ab1 .é", max_size=20))
def test_one_fact_is_judged_as_sub_em_judges_an_answer(fact, memory):
    if fact.strip():
        assert after(facts(fact), memory).final == sub_em(memory, [fact])


@pytest.mark.parametrize(
    ("memories", "fate"),
    [
        ((), "never written"),
        (("red",), "never written"),  # blue never was
        (("red", "nothing"), "never written"),  # red was overwritten too, but blue comes first
        (("red", "blue"), "overwritten"),
        (("red and blue", ""), "overwritten"),
        (("red", "blue", "red blue"), "not used"),
        (("red blue",), "not used"),
    ],
)
def test_the_fate_of_a_wrong_answer(memories, fate):
    recall = after(facts("red", "blue"), *memories)
    assert recall.fate(correct=False) == fate and fate in FATES
    assert recall.fate(correct=True) == ""


def test_without_evidence_nothing_is_known():
    recall = after((), "red", "blue")
    assert (recall.final, recall.fate(False)) == (None, "")


def test_a_memory_that_never_changed_holds_nothing():
    recall = Recall(facts("red"))
    assert recall.final == 0.0


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from("abcd")), max_size=8))
def test_the_last_memory_decides_what_is_held_and_the_past_what_was_seen(memories):
    wanted = {"b", "c", "d"}  # "a" is an article and would vanish
    recall = after(facts(*sorted(wanted)), *(" ".join(memory) for memory in memories))
    last = set(memories[-1]) if memories else set()
    assert recall.final == len(wanted & last) / 3
    ever = set().union(*map(set, memories))
    expected = FATES[0] if wanted - ever else FATES[1] if wanted - last else FATES[2]
    assert recall.fate(False) == expected


def test_evidence_without_text_is_refused():
    with pytest.raises(ValueError, match="place 0.5 has no text"):
        Recall((Evidence("red", 0.0), Evidence(" \n", 0.5)))


def test_thousands_of_changes_cost_little():
    # 2,000 memories of 5,000 characters and 20 facts: 10 MB of text, about half a second.
    recall = Recall(facts(*(f"fact number {i}" for i in range(20))))
    memory = "fact number 3 and many more words " * 147
    start = time.process_time()
    for _ in range(2_000):
        recall.see(memory)
    assert time.process_time() - start < 10
    assert recall.final == 1 / 20


def test_a_memory_full_of_near_misses_stays_cheap():
    recall = Recall(facts("x" * 50))
    start = time.process_time()
    recall.see("x" * 100_000)
    assert recall.final == 0.0 and time.process_time() - start < 5


def test_what_was_ever_written_is_captured_and_notes_of_a_parallel_reading_are():
    evidence = facts("red", "Bob", "7391", "Ohrid")
    recall = after(evidence, "red and Bob", "Bob alone")
    assert (recall.captured, recall.final) == (0.5, 0.25)
    recall.note("7391 by the Ohrid")  # no memory: nothing is held of it
    assert (recall.captured, recall.final) == (1.0, 0.25)
    assert recall.fate(correct=False) == "overwritten"
    assert Recall(()).captured is None
