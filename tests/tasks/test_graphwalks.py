"""GraphWalks: answers by a search over the edges that stand in the text, and nothing else."""

from __future__ import annotations

import collections
import hashlib
import re
import tracemalloc

import numpy as np
import pytest
import scipy.stats

from notepad_jax.scoring import long_context, metrics
from notepad_jax.tasks import draws, graphwalks, haystack, recipe, suites
from tests import measures

_EDGE = re.compile(r"^([0-9a-f]{10}) -> ([0-9a-f]{10})$", re.MULTILINE)
_PIECE = re.compile(r"\w+|[^\w\s]")


def count(text):
    return len(_PIECE.findall(text))


def digit_by_digit(text):
    return len(re.findall(r"\d|[^\W\d]{1,3}|[^\w\s]|\n", text))


def make(name, seed, length=1024, counter=count):
    return graphwalks.make_task(name, seed, length, haystack.noise(), counter)


def text_of(task):
    return "".join(task.document.pieces())


def solve(question, text):
    """A breadth-first search, or all parents, over the edges of the text."""
    edges = set(_EDGE.findall(text))
    if asked := re.search(r"parents of node (\w+)", question):
        return {near for near, far in edges if far == asked[1]} - {asked[1]}
    node, depth = re.search(r"from node (\w+) and find the nodes at depth (\d)", question).groups()
    seen = level = {node}
    for _ in range(int(depth)):
        level = {far for near, far in edges if near in level} - seen
        seen = seen | level
    return level


@pytest.mark.slow
@pytest.mark.parametrize("name", graphwalks.NAMES)
@pytest.mark.parametrize("length", [1024, 8192])
def test_a_search_over_the_text_finds_the_answer(name, length):
    for seed in range(80):
        task = make(name, seed, length)
        found = solve(task.question, text_of(task))
        assert found == set(task.answers) - {long_context.EMPTY}
        said = f"I searched.\nFinal Answer: [{', '.join(sorted(found))}]"
        assert metrics.score(said, task.answers, task.metric, task.contract).value == 1
        assert len(set(task.answers)) == len(task.answers)
        assert task.source == f"graphwalks/{name}"


@pytest.mark.parametrize("name", graphwalks.NAMES)
@pytest.mark.parametrize("length", [1024, 1500, 5000, 32768])
@pytest.mark.parametrize("counter", [count, digit_by_digit])
def test_lengths_are_met_from_below(name, length, counter):
    for seed in range(4):
        text = text_of(make(name, seed, length, counter))
        assert 0.98 * length < counter(text) <= length
        *lines, last = text.split("\n")
        edges = [line for line in lines if _EDGE.fullmatch(line)]
        assert len(edges) > 0.9 * len(lines)  # all but what closes the last gap


@pytest.mark.parametrize("name", graphwalks.NAMES)
def test_lengths_hold_for_bpe(name):
    tokens = measures.bpe([text_of(make("bfs", 0, 8192)), *haystack.noise().sentences], 600)
    for seed in range(4):
        text = text_of(make(name, seed, 8192, tokens))
        assert 0.98 * 8192 < tokens(text) <= 8192


@pytest.mark.parametrize("name", graphwalks.NAMES)
def test_one_seed_asks_the_same_of_the_same_edges_at_every_length(name):
    for seed in range(5):
        short, long = make(name, seed), make(name, seed, 16384)
        assert (short.question, short.answers) == (long.question, long.answers)
        assert [e.text for e in short.evidence] == [e.text for e in long.evidence]
        facts = [[text for _, text in task.document.facts] for task in (short, long)]
        assert facts[0] == facts[1]


@pytest.mark.parametrize(
    ("name", "digest"), [("bfs", "74d7044cf66b4d1d"), ("parents", "6ae7092f89b04f14")]
)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(name, digest):
    one, same, other = (make(name, seed) for seed in (7, 7, 8))
    assert text_of(one) == text_of(same) == text_of(one) != text_of(other)
    told = text_of(one) + one.question + "".join(one.answers)
    assert hashlib.sha256(told.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("name", graphwalks.NAMES)
def test_evidence_stands_where_it_is_said_to_stand(name):
    for seed in range(20):
        task = make(name, seed, 4096)
        text = text_of(task)
        for found in task.evidence:
            near, far = _EDGE.match(text, round(found.place * len(text))).groups()
            assert found.text == (near if name == "parents" else far)
        assert set(task.answers) - {long_context.EMPTY} <= {found.text for found in task.evidence}


@pytest.mark.slow
def test_searches_have_all_depths_and_some_find_nothing():
    depths, empty = collections.Counter(), 0
    for seed in range(400):
        task = make("bfs", seed, 600)
        depths[re.search(r"at depth (\d)", task.question)[1]] += 1
        empty += task.answers == (long_context.EMPTY,)
    assert scipy.stats.chisquare([depths[d] for d in "1234"]).pvalue > 1e-3
    assert scipy.stats.binomtest(empty, 400, graphwalks.NOTHING_THERE).pvalue > 1e-3


def test_shallow_answers_are_wrong():
    """Nodes on the way are no answer, and those one step further are there to be left out."""
    further = 0
    for seed in range(80):
        task = make("bfs", seed)
        text = text_of(task)
        depth = int(re.search(r"at depth (\d)", task.question)[1])
        levels = [solve(re.sub(r"depth \d", f"depth {d}", task.question), text) for d in range(6)]
        answer = set(task.answers) - {long_context.EMPTY}
        assert not answer & set().union(*levels[:depth])
        further += bool(levels[depth + 1])
    assert further > 55


def test_names_are_never_used_twice_and_edges_reach_into_the_small_graph():
    around = graphwalks.Around(draws.SampleDraws((3, 4)))
    names = around.named(range(200_000))
    assert len(set(names)) == 200_000 and all(re.fullmatch("[0-9a-f]{10}", n) for n in names)
    edges = [tuple(line.split(" -> ")) for line in around.written(0, 20_000)]
    own = set(names[: graphwalks._OWN])
    into = sum(far in own for _, far in edges)
    assert scipy.stats.binomtest(into, 20_000, graphwalks._INTO).pvalue > 1e-3
    assert not any(near in own or far == names[0] for near, far in edges)
    assert around.written(5000, 5100) == around.written(4990, 5200)[10:110]


def test_an_edge_is_as_likely_between_any_two_nodes_so_far():
    around = graphwalks.Around(draws.SampleDraws((3, 5)))
    edges = np.arange(40_000, 80_000)
    near, far = around.ends(edges)
    so_far = edges // 4 + 16
    outside = far >= graphwalks._OWN
    for ends, of in ((near, so_far), (far[outside], so_far[outside])):
        shares = (ends - graphwalks._OWN + 0.5) / of
        assert scipy.stats.kstest(shares, "uniform").pvalue > 1e-3


@pytest.mark.slow
def test_a_document_is_sized_and_written_in_constant_memory():
    tracemalloc.start()
    task = make("bfs", 1, 120_000)
    characters = sum(map(len, task.document.pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert characters > 700_000 and peak < characters / 2


def test_bad_input_is_one_line():
    with pytest.raises(ValueError, match="no task 'dfs' of GraphWalks; there are bfs, parents"):
        make("dfs", 0)
    with pytest.raises(recipe.Unreachable, match=r"graphwalks/parents cannot be 8 tokens long"):
        make("parents", 0, 8)


def test_the_suite_makes_and_leaves_out():
    sources = suites.SuiteSources(count, "noise")
    made, left_out = suites.by_length(
        "graphwalks", graphwalks.NAMES, (10, 1000), 2, 0, sources, lambda task: None
    )
    assert [task.source for task in made[1000]] == ["graphwalks/bfs"] * 2 + [
        "graphwalks/parents"
    ] * 2
    assert len(left_out) == 2 and list(made) == [1000]
