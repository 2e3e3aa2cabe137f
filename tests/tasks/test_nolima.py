"""Needles that share no word with their questions: checked word by word, solved by association."""

import collections
import itertools
import re

import pytest

from notepad_jax.scoring import metrics
from notepad_jax.starter import vocabulary
from notepad_jax.tasks import haystack, nolima, recipe, suites

_PIECE = re.compile(r"\w+|[^\w\s]")
PROSE = haystack.Haystack(
    (*(f"Plain sentence number {n} says nothing of note." for n in range(60)),
     "They had been to Paris.", "Some cheese was left.", "A person spoke and was gone."),
    "plain",
)  # fmt: skip


def count(text):
    return len(_PIECE.findall(text))


def make(name, seed, length, straw=PROSE):
    return nolima.make_task(name, seed, length, straw, count)


def text_of(task):
    return "".join(task.document.pieces())


def stems(text):
    """Lower-case words without their usual endings."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    return {re.sub(r"(?<=\w{3})(?:ing|ed|es|s|e)$", "", word) for word in words}


def solve(question, text):
    """Goes through what is told of people, and picks whoever the question is true of."""
    (asked,) = {
        one
        for one in nolima.ASSOCIATIONS
        if question in (one.question("one_hop"), one.question("two_hop"))
    }
    told = [
        re.search(re.escape(one.needle("@", order)).replace("@", r"(\w+)"), text)
        for one in [asked]
        for order in (False, True)
    ]
    (found,) = filter(None, told)
    return found[1]


def test_there_are_forty_associations_and_no_needle_shares_a_word_with_a_question():
    assert len(nolima.ASSOCIATIONS) >= 40
    assert len({one.link for one in nolima.ASSOCIATIONS}) == len(nolima.ASSOCIATIONS)
    for one, other in itertools.product(nolima.ASSOCIATIONS, repeat=2):
        needles = stems(one.needle("", False)) | stems(one.needle("", True))
        for hops in ("one_hop", "two_hop"):
            assert not needles & stems(other.question(hops)), (one.link, other.link)


def test_no_name_stands_in_another_one():
    for name, other in itertools.permutations(vocabulary.NAMES, 2):
        assert name not in other  # the metric is "contains"


def test_every_question_belongs_to_one_association():
    asked = [one.question(hops) for one in nolima.ASSOCIATIONS for hops in ("one_hop", "two_hop")]
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("name", nolima.NAMES)
def test_who_knows_what_belongs_together_finds_the_name(name):
    for seed in range(20):
        task = make(name, seed, 2000)
        text = text_of(task)
        assert solve(task.question, text) == task.answers[0]
        assert len(re.findall(rf"\b{task.answers[0]}\b", text)) == 1
        assert metrics.score(f"It is {task.answers[0]}.", task.answers, task.metric, task.contract)
        (known,) = task.evidence
        assert known.text == task.answers[0] in text[int(known.place * len(text)) :][:80]


@pytest.mark.parametrize("name", nolima.NAMES)
def test_the_name_stands_before_the_link_or_behind_it(name):
    for seed in range(8):
        task = make(name, seed, 1000)
        (needle,) = [
            found[0]
            for one in nolima.ASSOCIATIONS
            for order in (False, True)
            if (found := re.search(re.escape(one.needle(task.answers[0], order)), text_of(task)))
        ]
        (link,) = [one.link for one in nolima.ASSOCIATIONS if one.link in needle]
        behind = needle.index(task.answers[0]) > needle.index(link)
        assert behind == name.endswith("_inverted")


def test_the_prose_has_no_word_that_would_distract():
    text = text_of(make("one_hop", 1, 3000))
    assert "Plain sentence" in text and "A person spoke" in text  # small words say nothing
    assert "They had been" not in text and "Some cheese" not in text
    only = haystack.Haystack(("They had been to Paris.",), "small")
    with pytest.raises(ValueError, match="every sentence of the haystack 'small' has a word"):
        make("one_hop", 1, 3000, only)


def test_names_of_which_the_prose_knows_too_many_are_said():
    names = " ".join(name for name in vocabulary.NAMES[:38] if name not in ("Anna", "Hugo"))
    with pytest.raises(ValueError, match="holds all names but"):
        make("one_hop", 1, 3000, haystack.Haystack((names,), "names"))


@pytest.mark.parametrize("length", [500, 4096, 100_000])
def test_lengths_are_met_from_below_with_the_same_needle_at_the_same_depth(length):
    for name in nolima.NAMES:
        task, short = make(name, 3, length), make(name, 3, 1000)
        assert 0.98 * length < count(text_of(task)) <= length
        assert (task.question, task.answers) == (short.question, short.answers)
        assert abs(task.evidence[0].place - short.evidence[0].place) < 0.2
    assert text_of(task) == text_of(make(name, 3, length)) != text_of(make(name, 4, length))


def test_associations_and_names_come_equally_often():
    tasks = [make("one_hop", seed, 500) for seed in range(300)]
    asked = collections.Counter(task.question for task in tasks)
    named = collections.Counter(task.answers[0] for task in tasks)
    assert len(asked) > 0.95 * len(nolima.ASSOCIATIONS) and max(asked.values()) < 20
    assert len(named) > 40 and max(named.values()) < 20


def test_a_question_is_true_of_one_alone():
    for seed in range(60):
        task = make("two_hop", seed, 600)
        diets = re.findall(r"follows the (\S+) rules", text_of(task))
        assert len(diets) == 1 or "must refuse" not in task.question


def test_what_cannot_be_made_is_said():
    with pytest.raises(recipe.Unreachable, match="nolima/two_hop cannot be 40 tokens long"):
        make("two_hop", 0, 40)
    with pytest.raises(ValueError, match="NoLiMa has no task 'x'; there are one_hop, one_hop_inv"):
        make("x", 0, 2000)
    with pytest.raises(ValueError, match="suite nolima has no task 'x'"):
        suites.names("nolima", ["x"], suites.SuiteSources(count))
