"""The spec's hand numbers for chunks, and streams that equal lists in constant memory."""

import fakes
import numpy as np
import pytest

from notepad_jax.text.chunks import ChunkList, ChunkStream, DocumentChunks, centre_truncate
from notepad_jax.types import Task, TextDocument, tokens


def task(document, name="t") -> Task:
    return Task(name, "who ?", document, ("ann",), "test", "em")


@pytest.mark.parametrize(("length", "updates"), [(0, 0), (1, 1), (5000, 1), (5001, 2), (40000, 8)])
def test_number_of_chunks_of_5000(length, updates):
    chunks = ChunkList(tokens(range(length)), 5000)
    assert len(chunks) == updates
    with pytest.raises(IndexError):
        chunks[updates]
    joined = [int(i) for k in range(updates) for i in chunks[k]]
    assert joined == list(range(length))


def test_centre_truncation_keeps_the_first_and_the_last_half():
    ids = tokens(range(40001))
    kept = centre_truncate(ids, 40000)
    assert kept.tolist() == [*range(20000), *range(20001, 40001)]
    assert centre_truncate(ids[:40000], 40000).tolist() == list(range(40000))
    assert centre_truncate(tokens([1, 2, 3, 4]), 3).tolist() == [1, 3, 4]
    assert centre_truncate(tokens([1, 2, 3, 4]), 1).tolist() == [4]


def test_negative_and_zero_are_refused():
    with pytest.raises(IndexError):
        ChunkList(tokens([1]), 1)[-1]
    with pytest.raises(IndexError):
        ChunkStream(fakes.tokenizer(), TextDocument("red"), 1)[-1]
    with pytest.raises(ValueError, match="chunk_size is 0"):
        ChunkList(tokens([1]), 0)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 1000])
def test_a_stream_equals_the_list(chunk_size):
    text = "the secret code of ann is red . " * 20
    listed = ChunkList(fakes.tokenizer().encode(text), chunk_size)
    stream = ChunkStream(fakes.tokenizer(), TextDocument(text), chunk_size)
    for k in range(len(listed)):
        assert np.array_equal(stream[k], listed[k])
        assert not stream[k].flags.writeable
    with pytest.raises(IndexError):
        stream[len(listed)]
    assert stream.total_chunks == len(listed)
    assert stream.tokens_read == 160


def test_a_stream_keeps_a_window_and_counts_restarts():
    stream = ChunkStream(fakes.tokenizer(), TextDocument("red green blue " * 10), 3, window=2)
    assert stream[9] is stream[9]
    assert stream[8].tolist() == fakes.tokenizer().encode("red green blue").tolist()
    assert stream.restarts == 0
    assert np.array_equal(stream[0], stream[1])
    assert stream.restarts == 1 and stream.tokens_read == 6


def test_an_empty_document_has_no_chunks():
    stream = ChunkStream(fakes.tokenizer(), TextDocument(""), 3)
    with pytest.raises(IndexError, match="0 chunks"):
        stream[0]
    assert stream.total_chunks == 0


def test_tasks_of_one_document_share_one_chunks_object():
    chunks_of = DocumentChunks(fakes.tokenizer(), chunk_size=4, max_document=6)
    shared, other = TextDocument("red green blue " * 3), TextDocument("red green blue " * 3)
    assert chunks_of(task(shared, "a")) is chunks_of(task(shared, "b"))
    assert chunks_of(task(shared)) is not chunks_of(task(other))
    assert len(chunks_of(task(shared))) == 2
    assert chunks_of.truncated == 2
