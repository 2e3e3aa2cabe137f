"""Free questions: every relation can be asked, and its answer stands in what is told."""

import collections
import functools

from notepad_jax.tasks import comprehension, haystack, stories
from notepad_jax.tasks.memory_tasks import NOT_STATED

PROSE = haystack.Haystack(
    tuple(f"Plain sentence number {n} says nothing of note." for n in range(60)), "plain"
)


def count(text: str) -> int:
    return len(text.split())


def told(seed: int):
    return stories.story((comprehension.NAME, seed), PROSE, count)


@functools.cache
def some():
    return [told(seed) for seed in range(400)]


HELD = haystack.Haystack(
    (
        "The postal service was stopped by the snow of that winter.",
        "When the river rises, the ferry stays on the other side.",
        "Nobody came.",
    ),
    "held",
)


def test_every_relation_has_a_question_that_its_sentences_answer():
    known = comprehension.relations().known
    assert len(known) > 50
    for one in known:
        assert one.pairs, one
        for sentence, question in one.pairs:
            assert question.endswith("?") and sentence.endswith(".")
            assert f"{{{one.answer}}}" in sentence and f"{{{one.answer}}}" not in question


def test_every_slot_is_listed_or_drawn():
    known = comprehension.relations()
    slots = {
        slot for one in known.known for pair in one.pairs for slot in comprehension._slots(pair[0])
    }
    assert slots - set(known.slots) == {"person", "year"}
    assert all(len(set(listed)) == len(listed) for listed in known.slots.values())


def test_the_answer_stands_in_one_fact_and_the_note_is_question_and_answer():
    for story in some():
        (answer,) = story.answers
        evidence = [fact for fact in story.facts if fact.shown]
        if answer == NOT_STATED:
            assert not evidence and story.script()[0].notes == ""
            continue
        (fact,) = evidence
        assert answer.lower() in fact.text.lower() and answer.lower() not in story.question.lower()
        assert [note.notes for note in story.script()] == [f"{story.question} {answer}"]


def test_the_same_relation_about_another_does_not_answer_the_question():
    """What distinguishes the two is in the question, so a question without a subject has none."""
    known = {q for one in comprehension.relations().known for _, q in one.pairs if "{" not in q}
    assert known
    for story in some():
        if story.question in known:
            assert len(story.facts) <= 3


def test_sentences_of_the_haystack_are_asked_about_where_their_form_tells_how():
    postal, river = comprehension.prose(HELD)
    assert len(postal.questions) > 1 and all("the postal service?" in q for q in postal.questions)
    assert postal.answer == "was stopped by the snow of that winter"
    assert river.questions == ("What happens when the river rises?",)
    assert river.answer == "the ferry stays on the other side"
    told = [stories.story((comprehension.NAME, seed), HELD, count) for seed in range(200)]
    prose = [story for story in told if "postal" in story.question or "river" in story.question]
    assert 30 < len(prose) < 100
    for story in prose:
        (fact,) = story.facts
        assert (story.answers[0] in fact.text) == (story.answers != (NOT_STATED,))


def test_one_question_of_eight_has_no_answer():
    found = collections.Counter(story.answers == (NOT_STATED,) for story in some())
    assert 0.07 < found[True] / len(some()) < 0.19


def test_sentences_are_english_enough():
    for story in some():
        for text in (story.question, *(fact.text for fact in story.facts)):
            assert "{" not in text and "  " not in text and text[0].isupper()
            assert not any(f" a {vowel}" in text for vowel in "aeio")
            assert text[-1] in ".?" and ".." not in text


def test_the_same_seed_tells_the_same_and_questions_share_a_document():
    assert told(7) == told(7) != told(8)
    tasks = stories.make_tasks(3, (comprehension.NAME,), 4, 600, PROSE, count)
    assert len({task.question for task in tasks}) == 4
    assert len({id(task.document) for task in tasks}) == 1
