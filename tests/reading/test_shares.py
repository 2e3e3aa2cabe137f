"""Shares by length: each once, near the best, by turns where all are equal, documents whole."""

import itertools

import numpy as np
import pytest

from notepad_jax.reading.shares import deal, whole_documents
from notepad_jax.types import Task, TextDocument


def best(lengths, parts):
    """The fullest part of the best of all ways to share."""
    return min(
        max(np.bincount(where, weights=lengths, minlength=parts))
        for where in itertools.product(range(parts), repeat=len(lengths))
    )


def test_each_once_and_at_most_a_third_above_the_best_of_all_ways():
    rng = np.random.default_rng(0)
    for _ in range(150):
        parts, count = int(rng.integers(1, 4)), int(rng.integers(1, 7))
        lengths = np.exp(rng.uniform(0, 5, count)).astype(int).tolist()
        dealt = deal(lengths, parts)
        assert sorted(itertools.chain(*dealt)) == list(range(count)) and len(dealt) == parts
        for part in dealt:
            own = [lengths[index] for index in part]
            assert own == sorted(own, reverse=True)
        fullest = max(sum(lengths[index] for index in part) for part in dealt)
        assert fullest <= (4 / 3 - 1 / (3 * parts)) * best(lengths, parts) + 1e-9
        assert deal(lengths, parts) == dealt


@pytest.mark.parametrize("length", [0, 1, 512])
def test_of_one_length_it_is_by_turns(length):
    for parts in (1, 2, 3):
        assert deal([length] * 7, parts) == [list(range(7))[k::parts] for k in range(parts)]


def test_by_hand():
    # 7 | 6; 5 to the 6 (11); 4 to the 7 (11); a tie goes to the first (13).
    assert deal([4, 5, 2, 6, 7], 2) == [[4, 0, 2], [3, 1]]
    assert deal([3, 3], 2, loads=[4, 0]) == [[], [0, 1]]
    assert deal([], 2) == [[], []]
    with pytest.raises(ValueError, match="0 parts"):
        deal([1], 0)


def tasks_about(*documents):
    return [Task("t", "who ?", document, ("a",), "test", "em") for document in documents]


def test_documents_are_dealt_whole():
    """Three questions of one document, then documents of two, one and one."""
    documents = [TextDocument("same words") for _ in range(4)]
    tasks = tasks_about(*(documents[k] for k in (0, 0, 0, 1, 1, 2, 3)))
    assert whole_documents(tasks, [1] * 7, 1) == [[0, 1, 2, 3, 4, 5, 6]]
    assert whole_documents(tasks, [1] * 7, 2) == [[0, 1, 2, 6], [3, 4, 5]]
    assert whole_documents(tasks[:3], [1] * 3, 2) == [[0, 1, 2], []]
    # The last is longer than all others together.
    assert whole_documents(tasks, [*[1] * 6, 9], 2) == [[6], [0, 1, 2, 3, 4, 5]]


def test_who_comes_back_to_a_document_comes_where_it_was_read():
    first, second, third = tasks_about(*(TextDocument(text) for text in ("ann", "bob", "ann")))
    homes = {}
    assert whole_documents([first, second], [1, 1], 2, homes) == [[0], [1]]
    assert whole_documents([second, second, third], [1] * 3, 2, homes) == [[2], [0, 1]]
    assert whole_documents([third, second], [1, 1], 2, homes) == [[0], [1]]
    assert {part for _, part in homes.values()} == {0, 1} and len(homes) == 3
    # A document that is new goes to whom those who came back have left idle.
    homes = {}
    assert whole_documents([first], [1], 2, homes) == [[0], []]
    assert whole_documents([second, first], [1, 1], 2, homes) == [[1], [0]]
