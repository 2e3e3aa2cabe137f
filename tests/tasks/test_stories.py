"""Stories mixed in one document: facts, places, scripts, shares of the questions."""

import collections

import pytest

from notepad_jax.tasks import haystack, recipe, stories, suites


def count(text: str) -> int:
    return len(text.split())


def text_of(task) -> str:
    return "".join(task.document.pieces())


PROSE = haystack.Haystack(
    tuple(f"Plain sentence number {n} says nothing of note." for n in range(60)), "plain"
)


def made(seed=3, kinds=stories.NAMES, questions=5, length=600):
    return stories.make_tasks(seed, kinds, questions, length, PROSE, count)


def test_questions_share_the_document_and_each_story_stands_in_it_whole():
    tasks = made()
    assert len({id(task.document) for task in tasks}) == 1
    text = text_of(tasks[0])
    assert 0.98 * 600 < count(text) <= 600
    for task in tasks:
        assert all(note.sentence in text for note in task.script)
        for fact in task.evidence:
            assert fact.text in text[int(fact.place * len(text)) :][:200]


def test_the_same_seed_makes_the_same_document_and_another_seed_another():
    assert text_of(made(1)[0]) == text_of(made(1)[0]) != text_of(made(2)[0])


def test_kinds_come_equally_often():
    kinds = ("niah_single_2", "vt", "updates")
    found = collections.Counter(task.source for seed in range(40) for task in made(seed, kinds, 3))
    assert set(found.values()) == {40}


@pytest.mark.parametrize(
    ("keeping", "expected"),
    [("list", ["a", "a, c"]), ("last", ["a", "c"]), ("count", ["1", "2"])],
)
def test_a_script_is_what_was_noted_so_far_in_the_document_s_order(keeping, expected):
    facts = [
        recipe.Fact(0.9, "C is told.", shown="c"),
        recipe.Fact(0.5, "B is aside."),
        recipe.Fact(0.1, "A is told.", note="a"),
    ]
    script = recipe.Story(facts, "?", ("x",), "em", keeping=keeping).script()
    assert [note.sentence for note in script] == ["A is told.", "C is told."]
    assert [note.notes for note in script] == expected


def test_where_nothing_is_worth_a_note_the_script_says_nothing():
    facts = [recipe.Fact(0.5, "Later."), recipe.Fact(0.1, "Sooner.")]
    (only,) = recipe.Story(facts, "?", ("x",), "em").script()
    assert (only.sentence, only.notes) == ("Sooner.", "")


def test_codes_that_were_changed_are_noted_one_after_the_other():
    (task,) = made(5, ("updates",), 1)
    assert 3 <= len(task.script) <= 8
    assert task.script[-1].notes.endswith(f"depot is {task.answers[0]}")
    assert len({note.notes for note in task.script}) == len(task.script)


def test_samples_tell_the_same_story_at_every_length_in_few_documents():
    names, sources = ("niah_single_2", "vt", "conflicts"), suites.SuiteSources(count)
    found, left_out = suites.by_length(
        "stories", names, (300, 3000), 4, 0, sources, lambda task: None
    )
    assert not left_out
    short, long = found[300], found[3000]
    assert [t.question for t in short] == [t.question for t in long] and len(short) == 12
    assert len({id(t.document) for t in long}) == 1 < len({id(t.document) for t in short})
    assert len({t.id for t in short + long}) == 24


def test_what_does_not_fit_and_what_there_is_not_are_said():
    with pytest.raises(recipe.Unreachable, match="no room for 5 stories"):
        made(length=60)
    with pytest.raises(ValueError, match="there is no story 'niah'; there are niah_single_2"):
        stories.check(["niah"])
