"""Tables: rows counted as a multiset, numbers as numbers, JSON of any quality."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notepad_jax.scoring.extraction import Malformed
from notepad_jax.scoring.tables import row_iou

CELLS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)
)
ROWS = st.one_of(
    st.lists(st.lists(CELLS, max_size=3), max_size=4),
    st.lists(st.dictionaries(st.text(max_size=3), CELLS, max_size=3), max_size=4),
)


@pytest.mark.parametrize(
    ("said", "gold", "score"),
    [
        ('[["a", 1], ["b", 2]]', '[["b", 2], ["a", 1]]', 1),
        ('[["a", 1]]', '[["a", 1], ["b", 2]]', 1 / 2),
        ('[["a"], ["a"], ["b"]]', '[["a"], ["b"], ["b"]]', 2 / 4),  # a b common; a a b b all
        ('[["a", 1]]', '[[1, "a"]]', 0),  # the order of columns counts
        ("[[1]]", '[["1"]]', 1),
        ("[[1.0]]", "[[1]]", 1),
        ('[["1,000"], ["1e3"]]', "[[1000], [1000.0]]", 1),
        ('[["50%"]]', "[[50]]", 0),  # a share is not a number of things
        ('[[" New  York "]]', '[["new york"]]', 1),
        ("[[true, null]]", '[["True", ""]]', 1),
        ('["a", 2]', '[["a"], [2]]', 1),  # a bare cell is a row of one
        ("[]", "[]", 1),
        ("[]", "[[1]]", 0),
        ("[[]]", "[]", 0),
        ('{"data": [["a"]], "columns": ["x"]}', '[["a"]]', 1),
        ('```json\n[["a"]]\n```', '[["a"]]', 1),
        ('[{"n": 1, "m": "a"}]', '[{"M": "A", "n": 1.0}]', 1),  # keys, in any order
        ('[{"n": 1, "m": "a"}]', '[{"n": 1, "k": "a"}]', 0),
        ('[{"n": 1, "m": "a"}]', '[[1, "a"]]', 1),  # values, as written
        ("[[9007199254740993]]", "[[9007199254740992]]", 0),  # equal as floats
        ("[[[1, 2]]]", "[[[1, 3]]]", 0),
    ],
)
def test_by_hand(said, gold, score):
    assert row_iou(said, [gold]) == pytest.approx(score)
    assert row_iou(gold, [said]) == pytest.approx(score)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("", "bad_json"),
        ("[[1, 2]", "bad_json"),
        ("a | b\n1 | 2", "bad_json"),
        ("[" * 50_000, "bad_json"),
        ("[" * 900 + "]" * 50_000, "bad_json"),
        ("[[1]] and so on", "bad_json"),
        ("5", "no_table"),
        ('{"rows": [[1]]}', "no_table"),
        ('{"data": 5}', "no_table"),
        ('"[[1]]"', "no_table"),
    ],
)
def test_what_is_no_table(said, reason):
    with pytest.raises(Malformed, match=reason):
        row_iou(said, ["[[1]]"])


def test_the_best_gold_table_counts_and_a_broken_one_pays_nobody():
    assert row_iou("[[1]]", ["[[2]]", "[[1], [2]]", "oops"]) == 1 / 2
    assert row_iou("[[1]]", ["oops"]) == 0.0
    # Numbers beyond every float, and of more digits than Python turns into an integer.
    assert row_iou("[[1e400]]", ["[[1e401]]"]) == 0.0
    assert row_iou(f"[[{'9' * 9000}]]", [f"[[{'9' * 9000}]]"]) == 1.0


@given(ROWS, ROWS, st.randoms())
def test_bounds_identity_symmetry_and_the_order_of_rows(said, gold, random):
    ours, theirs = json.dumps(said), json.dumps(gold)
    worth = row_iou(ours, [theirs])
    assert 0.0 <= worth <= 1.0
    assert row_iou(theirs, [theirs]) == 1.0
    assert row_iou(theirs, [ours]) == worth
    assert row_iou(json.dumps(random.sample(said, len(said))), [theirs]) == worth
    assert row_iou(json.dumps(said, indent=2, ensure_ascii=False), [theirs]) == worth


@given(st.lists(st.sampled_from("abc")), st.lists(st.sampled_from("abc")))
def test_jaccard_of_multisets_by_counting(said, gold):
    common = sum(min(said.count(x), gold.count(x)) for x in "abc")
    union = sum(max(said.count(x), gold.count(x)) for x in "abc")
    expected = common / union if union else 1.0
    assert row_iou(json.dumps(said), [json.dumps(gold)]) == pytest.approx(expected)


def test_prose_around_a_fenced_table_does_not_hide_it():
    said = 'First ```x = 1``` then:\n```json\n[["a", 1]]\n```\nThat is all.'
    assert row_iou(said, ['[["a", 1]]']) == 1.0
