"""RULER's generated tasks: solvable from the text alone, of the right length, unbiased."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
import tracemalloc

import numpy as np
import pytest
import scipy.stats

from notepad_jax.scoring import metrics
from notepad_jax.tasks import draws, haystack, recipe, ruler
from tests import measures

_PIECE = re.compile(r"\w+|[^\w\s]")
_NEEDLE = re.compile(r"An? (?:number|identifier) that belongs to (\S+) is (\S+)\.")
_NEEDLES = [name for name in ruler.NAMES if name.startswith("niah")]


def count(text):
    return len(_PIECE.findall(text))  # additive over words, about as fine as BPE


def digit_by_digit(text):
    return len(re.findall(r"\d|[^\W\d]{1,8}|[^\w\s]", text))


def make(name, seed, length, straw=None):
    return ruler.make_task(name, seed, length, straw or haystack.stdlib_prose(), count)


def text_of(task):
    return "".join(task.document.pieces())


def solve(name, question, text):
    """Answers from the question and the text as a patient reader would."""
    if name.startswith("niah"):
        told = collections.defaultdict(list)
        for key, value in _NEEDLE.findall(text):
            told[key].append(value)
        asked = re.search(r"belongs? to (.*)\? Answer", question)[1]
        return [value for key in re.split(", | and ", asked) for value in told[key]]
    if name == "vt":
        value = re.search(r"the value (\d+)", question)[1]
        given = re.findall(r"Register (\w+) is given the value (?:of register )?(\w+)\.", text)
        holding = {value}
        for register, source in given:  # a chain is told in order
            holding |= {register} if source in holding else set()
        return sorted(holding - {value})
    words = re.findall(r"\d+\. (\S+)", text) if name == "cwe" else text.split()
    counts = collections.Counter(words)
    counts.pop("...", None)
    return [word for word, _ in counts.most_common(10 if name == "cwe" else 3)]


@pytest.mark.parametrize("name", ruler.NAMES)
def test_a_reader_of_the_text_gets_everything_right(name):
    for seed in range(8):
        task = make(name, seed, 4096)
        said = solve(name, task.question, text_of(task))
        assert sorted(said) == sorted(task.answers)
        assert metrics.METRICS[task.metric](", ".join(said), task.answers) == 1.0
        assert metrics.score(", ".join(said), task.answers, task.metric, task.contract).value == 1
        assert metrics.METRICS[task.metric](", ".join(said[1:]), task.answers) < 1.0
        assert (task.source, task.metric, task.contract) == (f"ruler/{name}", "ruler_all", "plain")


@pytest.mark.parametrize("name", ruler.NAMES)
@pytest.mark.parametrize("length", [4096, 8192, 32768])
def test_lengths_are_met_from_below(name, length):
    for seed in (0, 1):
        assert 0.98 * length < count(text_of(make(name, seed, length))) <= length


@pytest.mark.parametrize("name", ruler.NAMES)
def test_lengths_hold_for_bpe(name):
    prose = haystack.stdlib_prose()
    tokens = measures.bpe(prose.sentences[::8], 1200)
    for seed in range(4):
        task = ruler.make_task(name, seed, 8192, prose, tokens)
        assert 0.98 * 8192 < tokens(text_of(task)) <= 8192


@pytest.mark.parametrize("name", ruler.NAMES)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(name):
    one, same, other = (make(name, seed, 4096) for seed in (3, 3, 4))
    assert text_of(one) == text_of(same) == text_of(one)
    assert (one.question, one.answers, one.evidence) == (same.question, same.answers, same.evidence)
    assert text_of(one) != text_of(other)
    assert one.answers != other.answers


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("niah_single_1", "c0318b4a2720de9d"),
        ("niah_multikey_2", "ea6773b80b1090be"),
        ("niah_multikey_3", "9a1b5d8c137db099"),
        ("vt", "24921ef2d7464137"),
        ("cwe", "e9001ff8c2204295"),
        ("fwe", "2fbc7905f737bd05"),
    ],
)
def test_bytes_stay_what_they_are(name, digest):
    # Of tasks without prose, which depends on the version of Python.
    task = make(name, 7, 4096, haystack.noise())
    told = text_of(task) + task.question + "".join(task.answers)
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", ruler.NAMES)
def test_one_seed_is_one_story_at_every_length(name):
    short, long = make(name, 11, 4096), make(name, 11, 16384)
    assert short.answers == long.answers and short.question == long.question
    for here, there in zip(short.evidence, long.evidence, strict=True):
        assert here.text == there.text
        assert abs(here.place - there.place) < 0.1  # both count sentences, which differ in length


@pytest.mark.parametrize("name", _NEEDLES)
def test_values_stand_in_the_text_once_and_only_where_they_are_told(name):
    for seed in range(6):
        task = make(name, seed, 8192)
        text = text_of(task)
        told = _NEEDLE.findall(text)
        keys, values = {key for key, _ in told}, [value for _, value in told]
        assert len(values) == len(set(values))
        expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
        if name not in ("niah_multikey_2", "niah_multikey_3"):
            assert len(told) == expected.get(name, 1)
        assert len(keys) == (1 if name == "niah_multivalue" else len(told))
        for answer in task.answers:
            assert len(re.findall(rf"(?<!\w){answer}(?!\w)", text)) == 1
        # Nothing but the sentences of the task is written in their words.
        assert text.count(" that belongs to ") == len(told)


def test_a_value_that_the_haystack_holds_is_not_drawn():
    free = make("niah_single_2", 5, 4096).answers[0]
    straw = haystack.Haystack((f"The harbour is {free} steps away.", "Nothing else."), "straw")
    task = make("niah_single_2", 5, 4096, straw)
    assert task.answers[0] != free
    assert text_of(task).count(task.answers[0]) == 1


@pytest.mark.parametrize("name", [*_NEEDLES, "vt"])
def test_places_say_where_the_fact_stands(name):
    task = make(name, 2, 4096)
    text = text_of(task)
    places = [found.place for found in task.evidence]
    assert places == sorted(places)
    assert sorted(found.text for found in task.evidence) == sorted(task.answers)
    for found in task.evidence:
        at = round(found.place * len(text))
        # The sentence begins there, and says it.
        assert re.match(r"An? (number|identifier) |Register ", text[at:])
        end = re.search(r"\.( |$)", text[at:]).start()
        assert found.text in text[at : at + end]


def uniform(places):
    return scipy.stats.kstest(places, "uniform").pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [*_NEEDLES, "vt"])
def test_evidence_lies_uniformly_over_the_document(name):
    places = [e.place for seed in range(300) for e in make(name, seed, 8192).evidence]
    assert len(places) >= 300
    assert uniform(places)


def test_the_test_of_uniformity_would_find_a_biased_sampler():
    rng = np.random.default_rng(0)
    assert uniform(rng.random(300))
    # Found are: more and more toward the end; one seed for all samples, which puts their
    # evidence into the same place; and leaving out a fifth at both ends.
    assert not uniform(rng.random(300) ** 0.6)
    assert not uniform(np.full(300, 0.4))
    assert not uniform(0.2 + 0.6 * rng.random(300))


def test_a_bias_in_the_code_itself_would_be_found(monkeypatch):
    place = recipe._place

    def later(facts, filler, closing):
        facts = [dataclasses.replace(fact, depth=fact.depth**0.6) for fact in facts]
        return place(facts, filler, closing)

    monkeypatch.setattr(recipe, "_place", later)
    places = [make("niah_single_2", seed, 8192).evidence[0].place for seed in range(300)]
    assert not uniform(places)


def test_a_chain_has_four_hops_and_one_value():
    task = make("vt", 1, 4096)
    text = text_of(task)
    assert len(re.findall(r"Register \w+ is given the value of register \w+\.", text)) == 4
    assert len(re.findall(r"Register \w+ is given the value \d{5}\.", text)) == 1
    assert len(set(task.answers)) == 5


@pytest.mark.parametrize(
    ("length", "common", "other"),
    [(300, 6, 1), (1024, 6, 1), (4095, 6, 1), (4096, 30, 3), (20_000, 30, 3), (100_000, 30, 3)],
)
def test_common_words_come_as_often_as_rulers_and_are_single_words(length, common, other):
    for seed in range(3 if length < 100_000 else 1):
        task = make("cwe", seed, length)
        items = re.findall(r"(\d+)\. (\S+)", text_of(task))
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
        counts = collections.Counter(word for _, word in items)
        assert {counts[word] for word in task.answers} == {common}
        assert {n for word, n in counts.items() if word not in task.answers} == {other}
        assert len(task.answers) == 10 and set(task.answers) <= set(draws.WORDS)
        assert all(re.fullmatch("[a-z]+", word) for word in counts)
        coined = counts.keys() - set(draws.WORDS)
        assert bool(coined) == (len(counts) > len(draws.WORDS))  # only where the list ends


def test_the_share_of_answers_is_about_rulers():
    # RULER's 8K text by Qwen's tokens, one a digit: 1,422 items, of which 300 are answers.
    task = ruler.make_task("cwe", 0, 8192, haystack.noise(), digit_by_digit)
    assert 0.18 < 300 / task.document.filler.size < 0.24


@pytest.mark.parametrize("length", [300, 4096, 20_000])
def test_frequent_words_follow_zipf_and_do_not_tie(length):
    for seed in range(4):
        task = make("fwe", seed, length)
        counts = collections.Counter(text_of(task).split()).most_common()
        assert counts[0][0] == "..."
        (one, a), (two, b), (three, c), (_, d) = counts[1:5]
        assert (one, two, three) == task.answers
        assert a > b > c > d
    if length == 20_000:
        # n k**-2 / zeta(2), hence 4, 9 and 16 times fewer than dots (those fill the last gap).
        np.testing.assert_allclose([counts[0][1] / a, a / b, b / c], [4, 9 / 4, 16 / 9], rtol=0.02)


def test_items_of_a_list_come_in_any_order():
    # The first item of 300 lists is a common word as often as common words are many.
    first, share = 0, 0.0
    for seed in range(300):
        task = make("cwe", seed, 4096)
        words = re.findall(r"\d+\. (\S+)", next(task.document.pieces()))
        first += words[0] in task.answers
        share = 300 / task.document.filler.size
    assert scipy.stats.binomtest(first, 300, share).pvalue > 1e-3


def test_three_and_a_half_million_tokens_stream_in_constant_memory():
    make("niah_multiquery", 1, 4096)  # haystacks are read and measured once
    tracemalloc.start()
    task = make("niah_multiquery", 1, 3_500_000)
    characters = sum(map(len, task.document.pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters > 14e6
    assert peak < 2e6  # an eighth of a byte for each character


def test_mistakes_are_one_line_that_names_task_and_length():
    for name, length, message in (
        ("niah_multivalue", 30, "ruler/niah_multivalue cannot be 30 tokens long: its facts alone"),
        ("niah_multikey_3", 60, "ruler/niah_multikey_3 cannot be 60 tokens long: its parts come"),
        (
            "cwe",
            150,
            r"ruler/cwe cannot be 150 tokens long: 10 words 6 times each take 182",
        ),
        ("fwe", 40, "ruler/fwe cannot be 40 tokens long: .*tie"),
        ("vt", -5, "ruler/vt cannot be -5 tokens long"),
        ("qa_1", 4096, "no generated task 'qa_1'; there are niah_single_1, .*fwe"),
    ):
        with pytest.raises(ValueError, match=message) as problem:
            make(name, 0, length)
        assert "\n" not in str(problem.value)


def test_more_facts_than_there_are_names_are_refused(monkeypatch):
    monkeypatch.setattr("notepad_jax.tasks.draws.NAME_COUNT", 64 * 96 * 96 // 1000)
    with pytest.raises(ValueError, match="multikey_2 cannot be 32,768 .* only 589 .* fewer tokens"):
        make("niah_multikey_2", 0, 32_768)


def test_answers_have_rulers_limits():
    limits = {name: ruler.answer_tokens(f"ruler/{name}") for name in (*ruler.NAMES, "qa_1", "qa_2")}
    assert {limits.pop(name) for name in _NEEDLES} == {128}
    assert limits == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert ruler.answer_tokens("ruler-qa/hotpotqa") is ruler.answer_tokens("mine") is None
