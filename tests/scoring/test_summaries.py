"""ROUGE-L against rouge-score on ASCII, against the textbook table, and in other scripts."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from notepad_jax.scoring import summaries
from notepad_jax.scoring.summaries import common_subsequence, rouge_l, words

ORACLE = RougeScorer(["rougeL"], use_stemmer=False)
ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
WORDY = st.lists(st.sampled_from(["the", "The", "cat", "sat", "on", "mat.", "9", "it's"])).map(
    " ".join
)


@pytest.mark.parametrize(
    ("said", "golds", "score"),
    [
        ("the cat sat", ["the cat sat on the mat"], 2 * 3 / (3 + 6)),
        ("police kill the gunman", ["police killed the gunman"], 3 / 4),  # Lin (2004), S2
        ("the gunman kill police", ["police killed the gunman"], 2 / 4),  # Lin (2004), S3
        ("a b c", ["c b a"], 1 / 3),
        ("A, b! C?", ["a b c"], 1),
        ("x", ["a", "x y", "x"], 1),
        ("", ["a"], 0),
        ("a", ["!"], 0),
        ("Ünïcode wörks", ["ünïcode WÖRKS"], 1),
        ("caf\u00e9", ["cafe\u0301"], 1),  # composed or not
        ("हिन्दी में", ["हिन्दी में"], 1),
        ("東京都", ["東京"], 2 * 2 / (3 + 2)),  # by the character
        ("東京は晴れ", ["晴れは東京"], 2 * 2 / (5 + 5)),
        ("日本 2024 年", ["2024"], 2 / 5),
    ],
)
def test_by_hand(said, golds, score):
    assert rouge_l(said, golds) == pytest.approx(score)


def test_words_of_scripts():
    assert words("don't stop_now, 3.5!") == ["don", "t", "stop", "now", "3", "5"]
    assert words("हिन्दी में Ça") == ["हिन्दी", "में", "ça"]
    assert words("東京tower") == ["東", "京", "tower"]


@settings(deadline=None)
@given(ASCII | WORDY, ASCII | WORDY)
def test_ascii_is_rouge_score(said, gold):
    assert rouge_l(said, [gold]) == pytest.approx(ORACLE.score(gold, said)["rougeL"].fmeasure)


@given(st.text("abc", max_size=25), st.text("abcd", max_size=25))
def test_bits_count_what_the_table_counts(a, b):
    above = [0] * (len(b) + 1)
    for x in a:
        row = [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(row[j], above[j + 1]))
        above = row
    assert common_subsequence(a, b) == common_subsequence(b, a) == above[-1]


@given(st.text(max_size=40), st.lists(st.text(max_size=40), min_size=1, max_size=3))
def test_bounds_identity_and_the_best_reference(said, golds):
    worth = rouge_l(said, golds)
    assert 0.0 <= worth <= 1.0
    assert worth == max(rouge_l(said, [gold]) for gold in golds)
    assert rouge_l(golds[0], golds[:1]) == float(bool(words(golds[0])))


def test_order_matters():
    assert rouge_l("b a", ["a b"]) == pytest.approx(1 / 2)


@pytest.mark.parametrize("word", ["a ", "a b ", "字", "é\u0301"])
def test_long_summaries_cost_bounded_time(word):
    long = (word * 50_000)[:50_000]
    began = time.process_time()
    assert 0.0 <= rouge_l(long, [long[:20_000], summaries.__doc__]) <= 1.0
    assert time.process_time() - began < 2.0
