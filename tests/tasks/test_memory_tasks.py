"""Memory tasks: each is solved from its text alone by a reader who follows the rules."""

from __future__ import annotations

import collections
import hashlib
import itertools
import re

import numpy as np
import pytest
import scipy.stats

from notepad_jax.scoring import metrics
from notepad_jax.tasks import haystack, memory_tasks

_PIECE = re.compile(r"\w+|[^\w\s]")
_CODE = re.compile(
    r"gate code of the (\S+) depot (?:is|has been changed to) (\d{7})\."
)  # told, or told to have changed
_PRICE = re.compile(r"According to the ([a-z ]+), the (\S+) mill was sold for (\d{7}) crowns\.")
_TRUSTED = re.compile(
    r"disagree, the ([a-z ]+) is to be trusted|says otherwise, believe the ([a-z ]+)\."
    r"|forgery, while the ([a-z ]+) is genuine"
)
_VISIT = re.compile(r"On day (\d+) (\w+ \w+) (?:brought (\d+) sacks to|came to) the (\S+) mill\.")


def count(text):
    return len(_PIECE.findall(text))


def make(name, seed, length=4096, straw=None):
    return memory_tasks.make_task(name, seed, length, straw or haystack.stdlib_prose(), count)


def text_of(task):
    return "".join(task.document.pieces())


def last_code(question, text):
    asked = re.search(r"gate code of the (\S+) depot", question)[1]
    codes = [code for name, code in _CODE.findall(text) if name == asked]
    return codes[-1] if codes else memory_tasks.NOT_STATED


def trusted_price(question, text):
    mill = re.search(r"the (\S+) mill", question)[1]
    source = "".join(_TRUSTED.search(text).groups(""))
    return next(
        price for said, name, price in _PRICE.findall(text) if (said, name) == (source, mill)
    )


def total(question, text):
    person, mill = re.search(
        r"did (\w+ \w+) (?:bring to|come to) the (\S+) mill", question
    ).groups()
    sacks = [
        int(n or 1) for _, who, n, where in _VISIT.findall(text) if (who, where) == (person, mill)
    ]
    return str(sum(sacks))


def order(question, text):
    if "bridges" in question:
        opened = re.findall(r"The (\S+) bridge was opened to traffic in the year (\d{4})\.", text)
        asked = re.search(r"opened to traffic: (.*)\?", question)[1].split(", ")
        return "\n".join(sorted(asked, key=lambda name: dict(opened)[name]))
    person = re.match(r"\w+ \w+", question)[0]
    return "\n".join(re.findall(rf"Then {person} came to the (\S+) inn", text))


def members(question, text):
    society = re.search(r"of the (\S+) society", question)[1]
    return "\n".join(
        re.findall(rf"One of the members of the {society} society is (\w+ \w+)\.", text)
    )


SOLVERS = {
    "updates": last_code,
    "conflicts": trusted_price,
    "counting": total,
    "ordering": order,
    "multi_evidence": members,
    "unanswerable": last_code,
    "instruction": last_code,
}


@pytest.mark.parametrize("name", memory_tasks.NAMES)
def test_a_reader_of_the_text_gets_everything_right(name):
    for seed in range(40):
        task = make(name, seed)
        said = SOLVERS[name](task.question, text_of(task))
        if name == "multi_evidence":
            assert sorted(said.split("\n")) == sorted(task.answers)
        else:
            assert said == "\n".join(task.answers)
        assert metrics.score(said, task.answers, task.metric, task.contract).value == 1
        assert metrics.score("no idea", task.answers, task.metric, task.contract).value == 0
        assert (task.source, task.contract) == (f"memory/{name}", "auto")


@pytest.mark.parametrize("name", memory_tasks.NAMES)
@pytest.mark.parametrize("length", [4096, 8192, 32768])
def test_lengths_are_met_from_below(name, length):
    for seed in range(5):
        assert 0.98 * length < count(text_of(make(name, seed, length))) <= length


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("updates", "ae75034830e8f176"),
        ("conflicts", "10e3b2b17511ba66"),
        ("counting", "749052af97a6c6a6"),
        ("ordering", "9c423184cfa1b5dd"),
        ("multi_evidence", "880c147ac9508347"),
        ("unanswerable", "f7bc5d4af908f03b"),
        ("instruction", "d4623ce980f48ad8"),
    ],
)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(name, digest):
    one, same, other = (make(name, seed, 4096, haystack.noise()) for seed in (7, 7, 8))
    assert text_of(one) == text_of(same) == text_of(one)
    assert (one.question, one.answers, one.evidence) == (same.question, same.answers, same.evidence)
    assert text_of(one) != text_of(other) and one.question != other.question
    told = text_of(one) + one.question + "".join(one.answers)
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", memory_tasks.NAMES)
def test_one_seed_is_one_story_at_every_length(name):
    short, long = make(name, 11, 4096), make(name, 11, 16384)
    assert (short.question, short.answers) == (long.question, long.answers)
    assert [found.text for found in short.evidence] == [found.text for found in long.evidence]


@pytest.mark.parametrize("name", memory_tasks.NAMES)
def test_evidence_stands_where_it_is_said_to_stand(name):
    for seed in range(10):
        task = make(name, seed)
        text = text_of(task)
        places = [found.place for found in task.evidence]
        assert places == sorted(places)
        for found in task.evidence:
            sentence = text[round(found.place * len(text)) :].split(". ")[0] + "."
            assert re.match(r"[A-Z]", sentence)
            if name == "counting":  # the total is told nowhere, it is known after this sentence
                assert _VISIT.fullmatch(sentence)
            else:
                assert re.search(rf"(?<!\w){found.text}(?!\w)", sentence)


def uniform(places):
    return scipy.stats.kstest(places, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("name", sorted({*memory_tasks.NAMES} - {"counting"}))
def test_evidence_lies_uniformly_over_the_document(name):
    # Of one fact for each sample: several of them would not be independent of one another.
    places = []
    for seed in range(400):
        evidence = make(name, seed).evidence
        places += [evidence[seed % len(evidence)].place] if evidence else []
    assert len(places) >= 170
    assert uniform(places)


def test_the_last_visit_is_the_last_of_n_uniform_ones():
    # The largest of n uniform numbers, to the power of n, is uniform.
    places = []
    for seed in range(400):
        task = make("counting", seed)
        person, mill = re.search(r"did (\w+ \w+) \w+ to the (\S+) mill", task.question).groups()
        visits = re.findall(rf"{person} [a-z0-9 ]+ the {mill} mill", text_of(task))
        places.append(task.evidence[0].place ** len(visits))
    assert uniform(places)


def test_the_test_of_uniformity_would_find_a_biased_sampler():
    rng = np.random.default_rng(0)
    assert uniform(rng.random(170))
    assert not uniform(rng.random(170) ** 0.6)
    assert not uniform(rng.random((170, 3)).max(1))  # the last of several, as a careless `updates`


def test_updates_change_a_code_several_times_and_the_last_one_counts():
    changes = collections.Counter()
    for seed in range(60):
        task = make("updates", seed)
        text = text_of(task)
        asked = re.search(r"of the (\S+) depot", task.question)[1]
        told = _CODE.findall(text)
        codes = [code for name, code in told if name == asked]
        assert len(codes) == len(set(codes)) and codes[-1] == task.answers[0]
        assert text.count(f"The gate code of the {asked} depot is {codes[0]}.") == 1
        others = collections.Counter(name for name, _ in told if name != asked)
        assert len(others) == 3 and set(others.values()) <= {2, 3, 4}
        changes[len(codes) - 1] += 1
        early = metrics.score(codes[0], task.answers, task.metric, task.contract).value
        assert early == 0
        listed = metrics.score(", ".join(codes), task.answers, task.metric, task.contract).value
        assert listed == 0  # to list all of them is no answer
    assert set(changes) == set(range(2, 8))


def test_conflicts_are_decided_by_the_text_in_either_direction():
    first = 0
    for seed in range(60):
        task = make("conflicts", seed)
        text = text_of(task)
        mill = re.search(r"the (\S+) mill", task.question)[1]
        prices = [price for _, name, price in _PRICE.findall(text) if name == mill]
        assert len(prices) == 2 and task.answers[0] in prices
        first += prices[0] == task.answers[0]
        assert len(_TRUSTED.findall(text)) == 1
    assert scipy.stats.binomtest(first, 60).pvalue > 1e-3


def test_counting_has_as_much_that_must_not_be_counted():
    kinds = collections.Counter()
    for seed in range(60):
        task = make("counting", seed)
        told = _VISIT.findall(text_of(task))
        days = [day for day, *_ in told]
        assert len(set(days)) == len(days)
        who, where = re.search(r"did (\w+ \w+) \w+ to the (\S+) mill", task.question).groups()
        counted = [v for v in told if v[1] == who and v[3] == where]
        near = [v for v in told if (v[1] == who) != (v[3] == where)]
        assert len(counted) == len(near) == len(told) / 2
        assert 6 <= len(counted) <= 15
        kinds["sacks" if "sacks" in task.question else "days"] += 1
    assert min(kinds.values()) > 15


def test_orders_are_asked_for_in_both_ways_and_not_given_away():
    kinds = collections.Counter()
    for seed in range(60):
        task = make("ordering", seed)
        listed = re.search(r": (\S+(?:, \S+)*?)[.?] ", task.question)[1].split(", ")
        assert listed == sorted(task.answers) and 4 <= len(listed) <= 7
        dated = "bridges" in task.question
        kinds[dated] += 1
        if dated:  # the order of the text is not the order asked for
            text = text_of(task)
            kinds["as told"] += sorted(task.answers, key=text.index) == list(task.answers)
    assert min(kinds[True], kinds[False]) > 15
    assert kinds["as told"] < 5


def test_half_of_the_unanswerable_samples_have_no_answer_and_nothing_gives_it_away():
    missing, counts = 0, set()
    for seed in range(200):
        task = make("unanswerable", seed, 2048)
        text = text_of(task)
        assert memory_tasks.NOT_STATED not in text.lower()
        assert memory_tasks.NOT_STATED in task.question
        counts.add((len(re.findall(r"gate code", text)), len(re.findall(r"\b\d{7}\b", text))))
        asked = re.search(r"of the (\S+) depot", task.question)[1]
        absent = task.answers == (memory_tasks.NOT_STATED,)
        assert (f"gate code of the {asked} depot" not in text) == absent == (not task.evidence)
        assert f"gate code of the {asked} tower" in text  # something near is told either way
        missing += absent
    assert counts == {(4, 5)}
    assert scipy.stats.binomtest(missing, 200).pvalue > 1e-3


def test_an_order_in_the_text_asks_for_something_else():
    kinds = set()
    for seed in range(60):
        task = make("instruction", seed)
        text = text_of(task)
        orders = [
            (kind, re.search(re.escape(order).replace(r"\{code\}", r"(\d{7})"), text))
            for kind, order in enumerate(memory_tasks._ORDERS)
        ]
        [(kind, found)] = [(kind, found) for kind, found in orders if found]
        kinds.add(kind)
        assert found[1] not in task.answers
        assert text.count(found[1]) == 1
        obeyed = metrics.score(found[1], task.answers, task.metric, task.contract)
        assert obeyed.value == 0
    assert kinds == set(range(5))


def test_answers_stand_in_the_text_exactly_once():
    for name, seed in itertools.product(("updates", "conflicts", "instruction"), range(10)):
        task = make(name, seed)
        assert len(re.findall(rf"(?<!\w){task.answers[0]}(?!\w)", text_of(task))) == 1
    for seed in range(10):
        text = text_of(task := make("multi_evidence", seed))
        assert all(text.count(member) == 1 for member in task.answers)
        assert 6 <= len(task.answers) <= 12


def test_names_that_the_haystack_holds_are_not_drawn():
    task = make("multi_evidence", 3)
    straw = haystack.Haystack((f"Once {task.answers[0]} went to sea.", "Nothing else."), "straw")
    other = make("multi_evidence", 3, 4096, straw)
    assert task.answers[0] not in other.answers
    assert set(task.answers[1:]) <= set(other.answers)


def test_mistakes_are_one_line_that_names_task_and_length():
    with pytest.raises(ValueError, match="memory/updates cannot be 100 tokens long: its facts"):
        make("updates", 0, 100)
    with pytest.raises(ValueError, match="no memory task 'update'; there are updates, conflicts"):
        make("update", 0)
    with pytest.raises(ValueError, match="seed of a sample is -3"):
        make("updates", -3)
