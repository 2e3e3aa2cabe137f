"""Lists against scikit-learn and scipy, the numbers of the reward's page, its known mistakes."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.scoring import lists
from notepad_jax.scoring.lists import ndcg, pairwise, set_f1, sub_em_lines

ABC = ("a", "b", "c")
ITEMS = st.lists(st.text("abcdé ", min_size=1).filter(str.strip), min_size=1, max_size=6)
ALL = (lists.set_f1, lists.sub_em_lines, lists.ndcg, lists.pairwise)


def test_lines_are_folded_and_kept_once():
    assert lists.lines("B  b\r\n\n a\tb \n\u2003\nb B\nA b") == ["b b", "a b"]
    assert lists.lines(" \n\n") == []


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "score"),
    [
        (lists.set_f1, "a\nb\nx", ABC, 2 / 3),  # 2 of 3 said, 2 of 3 wanted
        (lists.set_f1, "a", ABC, 2 * 1 / (1 + 3)),
        (lists.set_f1, "", ABC, 0),
        (lists.sub_em_lines, "a\nb", ABC, 2 / 3),
        (lists.sub_em_lines, "a\nb\nc\nx\ny\nz", ABC, 1),  # 6 lines = 2 x 3: not yet too many
        (lists.sub_em_lines, "a\nb\nc\n" + "\n".join("uvwxyz123"), ABC, 6 / 12),  # 12 lines
        (lists.sub_em_lines, "a b c", ABC, 0),  # whole lines only
        (lists.ndcg, "b\na\nc", ABC, 0.922495),
        (lists.ndcg, "a\nb", ABC, 0.894999),
        (lists.ndcg, "x\na\nb\nc", ABC, 0.607492),
        (lists.ndcg, "a\na\nb\nB\nc", ABC, 1),  # repeated lines stand where they first stood
        (lists.pairwise, "c\nb\na", ABC, 0),
        (lists.pairwise, "b\na\nc", ABC, 2 / 3),
        (lists.pairwise, "x\na\ny\nb\nc", ABC, 1),
        (lists.pairwise, "a\nb\na\nc", ABC, 1),
        (lists.pairwise, "a", ["a"], 1),
        (lists.pairwise, "b", ["a"], 0),
    ],
)
def test_by_hand(metric, prediction, answers, score):
    assert metric(prediction, answers) == pytest.approx(score, abs=5e-7)


def test_mistakes_made_elsewhere():
    # Pairs divided by the predicted ones would give this prefix 1: ours is 1 pair of 6.
    assert lists.pairwise("a\nb", ("a", "b", "c", "d")) == pytest.approx(1 / 6)
    # Recall alone would pay for listing everything.
    everything = "\n".join(map(str, range(1000)))
    assert lists.sub_em_lines(everything, ("7", "8")) == pytest.approx(4 / 1000)
    # Blank lines are no items, on neither side.
    for metric in ALL:
        assert metric("a\n\n \nb\n", ("a", "", "b")) == metric("a\nb", ("a", "b")) == 1.0


def test_ndcg_is_scikit_learns_on_every_permutation():
    gold = ("a", "b", "c", "d")
    relevance = [[4, 3, 2, 1]]
    for order in itertools.permutations(range(4)):
        place = [[-order.index(i) for i in range(4)]]  # scores: the first is the highest
        oracle = sklearn.metrics.ndcg_score(relevance, place, k=4)
        assert lists.ndcg("\n".join(gold[i] for i in order), gold) == pytest.approx(oracle)


def test_pairwise_is_kendalls_tau_on_every_permutation():
    gold = ("a", "b", "c", "d", "e")
    for order in itertools.permutations(range(5)):
        said = "\n".join(gold[i] for i in order)
        tau = scipy.stats.kendalltau(range(5), order).statistic
        assert 2 * lists.pairwise(said, gold) - 1 == pytest.approx(tau)


@settings(deadline=None, max_examples=50)
@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.sets(st.sampled_from("abcdefgh")))
def test_set_f1_is_scikit_learns(gold, said):
    truth, guess = ([item in items for item in "abcdefgh"] for items in (gold, said))
    oracle = sklearn.metrics.f1_score(truth, guess, zero_division=0)
    assert lists.set_f1("\n".join(sorted(said)), sorted(gold)) == pytest.approx(oracle)


@given(ITEMS, st.text("abcdé \n"))
def test_bounds_identity_and_folding(gold, said):
    for metric in ALL:
        worth = metric(said, gold)
        assert 0.0 <= worth <= 1.0
        assert metric("\n".join(gold), gold) == pytest.approx(1.0)
        assert metric(said.upper().replace(" ", "\t  "), gold) == worth
        assert metric(said, [f" {item.upper()} " for item in gold]) == worth


@given(st.sets(st.text("abc", min_size=1), min_size=2, max_size=6).map(sorted), st.randoms())
def test_order_matters_exactly_where_it_should(gold, random):
    shuffled = random.sample(gold, len(gold))
    said, mixed = "\n".join(gold), "\n".join(shuffled)
    for metric in (lists.set_f1, lists.sub_em_lines):
        assert metric(mixed, gold) == metric(said, gold) == metric(said, shuffled) == 1.0
    for metric in (lists.ndcg, lists.pairwise):
        assert (metric(mixed, gold) < 1.0 - 1e-12) == (shuffled != gold)
    assert lists.pairwise("\n".join(reversed(gold)), gold) == 0.0


@given(st.lists(st.sampled_from("abcdefxyz"), unique=True))
def test_pairwise_counts_the_pairs(said):
    gold = "abcdef"
    pairs = [(p, q) for p, q in itertools.combinations(gold, 2) if p in said and q in said]
    right = sum(said.index(p) < said.index(q) for p, q in pairs)
    assert lists.pairwise("\n".join(said), tuple(gold)) == pytest.approx(right / math.comb(6, 2))


def test_many_items_take_little_time():
    gold = [str(i) for i in np.random.default_rng(0).permutation(8000)]
    for metric in ALL:  # quadratic counting would take 32 million comparisons
        assert metric("\n".join(gold), gold) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "said",
    [
        "ann\nbob\ncleo",
        "ann, bob, cleo",
        "Ann, bob, and cleo",
        r"ann \\ bob \\ cleo",
        "1. ann\n2. bob\n3. cleo",
        "- ann\n- bob\n- cleo",
        "**ann**\n**bob**\n**cleo**",
        r"\begin{array}{l} ann \\ bob \\ cleo \end{array}",
    ],
)
def test_a_list_is_a_list_however_a_model_writes_it_in_a_box(said):
    for metric in (set_f1, sub_em_lines, ndcg, pairwise):
        assert metric(said, ["ann", "bob", "cleo"]) == 1.0


def test_commas_cut_nothing_where_gold_items_have_them_or_lines_are_right():
    assert set_f1("Oslo, Norway", ["Oslo, Norway", "Rome, Italy"]) == pytest.approx(2 / 3)
    assert set_f1("oslo, rome", ["Oslo, Norway"]) == 0.0
    assert set_f1("ann\nbob, cleo", ["ann", "bob", "cleo"]) == pytest.approx(2 / 5)
