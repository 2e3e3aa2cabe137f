"""Conversations of many requests: solved from the text alone, of the right length, unbiased."""

import collections
import difflib
import itertools
import re

import pytest

from notepad_jax.scoring import metrics
from notepad_jax.tasks import haystack, mrcr, recipe, suites
from tests import measures

PROSE = haystack.noise()
_PIECE = re.compile(r"\w+|[^\w\s]")
_TURN = re.compile(r"User: (.*)\nAssistant: ?(.*)")


def count(text):
    return len(_PIECE.findall(text))


def make(name, seed, length):
    return mrcr.make_task(name, seed, length, PROSE, count)


def text_of(task):
    return "".join(task.document.pieces())


def turns(text):
    return [(request, said.removesuffix(" ")) for request, said in _TURN.findall(text)]


def solve(question, text):
    """Finds the i-th text of the request that the question names."""
    request = re.search(r"several times: (.*?)\. Prepend", question)[1]
    prefix, ordinal = re.search(r"Prepend (\w+) to the (\d)", question).groups()
    same = [said for asked, said in turns(text) if asked == request]
    return prefix + same[int(ordinal) - 1], len(same)


@pytest.mark.parametrize("name", mrcr.NAMES)
@pytest.mark.parametrize("length", [1536, 8192])
def test_a_reader_of_the_conversation_gives_the_text_back(name, length):
    for seed in range(8):
        task = make(name, seed, length)
        said, same = solve(task.question, text_of(task))
        assert (said,) == task.answers and same == int(name[-1])
        assert metrics.score(said, task.answers, task.metric, task.contract).value == 1.0
        assert metrics.score(said[1:], task.answers, task.metric, task.contract).value == 0.0


@pytest.mark.parametrize("name", mrcr.NAMES)
@pytest.mark.parametrize("length", [1536, 4096, 32_768])
def test_lengths_are_met_from_below(name, length):
    for seed in range(3):
        assert 0.98 * length < count(text_of(make(name, seed, length))) <= length


def test_a_seed_has_the_same_texts_in_the_same_places_at_every_length():
    short, same, long = make("mrcr_4", 5, 4096), make("mrcr_4", 5, 4096), make("mrcr_4", 5, 65_536)
    assert text_of(short) == text_of(same) != text_of(make("mrcr_4", 6, 4096))
    assert (short.question, short.answers) == (long.question, long.answers)
    near = zip(short.evidence, long.evidence, strict=True)
    assert all(a.text == b.text and abs(a.place - b.place) < 0.1 for a, b in near)


def test_evidence_is_the_text_sentence_by_sentence_where_it_stands():
    task = make("mrcr_8", 1, 8192)
    text = text_of(task)
    assert task.answers[0][10:] == " ".join(one.text for one in task.evidence)
    for one in task.evidence[1:]:  # the first stands behind its request
        assert text[round(one.place * (len(text) - 1)) + 1 :].startswith(one.text)


def test_no_two_texts_are_alike_and_other_turns_are_near_misses():
    task = make("mrcr_2", 3, 200_000)
    told = turns(text_of(task))[:-1]
    assert len({said for _, said in told}) == len(told) > 1000
    form, topic = re.search(r"the \d.. (.*) about (\w+) that", task.question).groups()
    near = collections.Counter(
        (f" {form} " in asked, asked.endswith(f" {topic}")) for asked, _ in told
    )
    assert near[True, True] == 2
    assert all(abs(near[one] / len(told) - 0.25) < 0.04 for one in ((True, False), (False, True)))


def test_another_text_of_the_same_request_is_worth_little():
    worth = []
    for seed in range(20):
        task = make("mrcr_2", seed, 1024)
        prefix, request = task.answers[0][:10], re.search(r"times: (.*?)\. P", task.question)[1]
        same = [prefix + said for asked, said in turns(text_of(task)) if asked == request]
        (wrong,) = set(same) - set(task.answers)
        worth.append(metrics.METRICS["mrcr"](wrong, task.answers))
        assert worth[-1] == pytest.approx(
            difflib.SequenceMatcher(None, wrong[10:], task.answers[0][10:]).ratio()
        )
    assert sum(worth) / len(worth) < 0.3


@pytest.mark.slow
def test_every_ordinal_form_and_letter_is_drawn():
    tasks = [make("mrcr_8", seed, 2048) for seed in range(60)]
    ordinals = collections.Counter(re.search(r"the (\d)", t.question)[1] for t in tasks)
    assert set(ordinals) == set("12345678") and max(ordinals.values()) < 20
    assert len({re.search(r"the \d.. (.*) about", t.question)[1] for t in tasks}) == len(mrcr.FORMS)
    assert len({t.answers[0][:10] for t in tasks}) == 60


@pytest.mark.parametrize("name", mrcr.NAMES)
def test_lengths_hold_for_bpe(name):
    tokens = measures.bpe([text_of(make(mrcr.NAMES[0], 0, 8192)), *PROSE.sentences], 900)
    for seed in range(2):
        text = text_of(mrcr.make_task(name, seed, 8192, PROSE, tokens))
        assert 0.98 * 8192 < tokens(text) <= 8192


def test_a_long_document_is_written_in_constant_memory(monkeypatch):
    monkeypatch.setattr(recipe, "BLOCK", 32)  # turns, so that few are many pieces
    task = make(mrcr.NAMES[2], 0, 200_000)
    for_one_piece = max(len(piece) for piece in itertools.islice(task.document.pieces(), 3))
    characters, peak = measures.written(task.document)
    assert characters > 50 * for_one_piece and peak < 20 * for_one_piece


def test_what_cannot_be_made_is_said():
    with pytest.raises(
        recipe.Unreachable, match="mrcr/mrcr_8 cannot be 300 tokens long: its facts"
    ):
        make("mrcr_8", 0, 300)
    with pytest.raises(ValueError, match="MRCR has no task 'mrcr_3'; there are mrcr_2, mrcr_4"):
        make("mrcr_3", 0, 300)
    with pytest.raises(ValueError, match="seed of a sample is -1"):
        make("mrcr_2", -1, 3000)
    with pytest.raises(ValueError, match="suite mrcr has no task 'x'"):
        suites.names("mrcr", ["x"], suites.SuiteSources(count))
