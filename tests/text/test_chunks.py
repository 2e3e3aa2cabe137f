"""Chunks are slices of the whole ids, whoever reads them and in whatever order; each text is
tokenised once; what goes wrong reaches every reading."""

import contextlib
import os
import resource
import tracemalloc
import weakref

import fakes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.text import chunks
from notepad_jax.text.chunks import ChunkedDocument, Documents
from notepad_jax.types import Task, TextDocument, Tokens, tokens


def centre_truncate(ids: Tokens, limit: int) -> Tokens:
    """The oracle: the first half and the last half of a text of more than `limit` tokens."""
    first = limit // 2
    return ids if len(ids) <= limit else tokens([*ids[:first], *ids[len(ids) - limit + first :]])


class Counting:
    """A tokenizer of one token a character, one block a piece; counts what it tokenised."""

    def __init__(self) -> None:
        self.blocks = 0
        self.tokens = 0

    def encode_pieces(self, pieces):
        for piece in pieces:
            self.blocks += 1
            self.tokens += len(piece)
            yield tokens([ord(letter) for letter in piece])


class Pieces:
    """A document of given pieces; after `good` of them it raises `failure`, once per pass."""

    def __init__(self, *pieces: str, failure: BaseException | None = None, good: int = 0) -> None:
        self._pieces, self._failure, self._good = pieces, failure, good
        self.opened = 0

    def pieces(self):
        self.opened += 1
        for number, piece in enumerate(self._pieces):
            if self._failure is not None and number == self._good:
                raise self._failure
            yield piece


def task(document, name="t") -> Task:
    return Task(name, "who ?", document, ("ann",), "test", "em")


def ids_of(*pieces: str) -> Tokens:
    return tokens([ord(letter) for letter in "".join(pieces)])


# ---------------------------------------------------------------- slices


@pytest.mark.parametrize(("length", "updates"), [(0, 0), (1, 1), (5000, 1), (5001, 2), (40000, 8)])
def test_number_of_chunks_of_5000(length, updates):
    found = ChunkedDocument(Counting(), Pieces("x" * length), 5000)
    with pytest.raises(IndexError, match=f"no chunk {updates}; the document has {updates}"):
        found[updates]
    assert found.total_chunks == updates and found.tokens_read == length
    assert sum(len(found[k]) for k in range(updates)) == length


def test_centre_truncation_keeps_the_first_and_the_last_half():
    ids = tokens(range(40001))
    kept = centre_truncate(ids, 40000)
    assert kept.tolist() == [*range(20000), *range(20001, 40001)]
    assert centre_truncate(ids[:40000], 40000).tolist() == list(range(40000))
    assert centre_truncate(tokens([1, 2, 3, 4]), 3).tolist() == [1, 3, 4]
    assert centre_truncate(tokens([1, 2, 3, 4]), 1).tolist() == [4]


def test_negative_and_zero_are_refused():
    with pytest.raises(IndexError, match="counted from 0"):
        ChunkedDocument(Counting(), Pieces("a"), 1)[-1]
    for make in (
        lambda: ChunkedDocument(Counting(), Pieces("a"), 0),
        lambda: Documents(Counting(), 0),
    ):
        with pytest.raises(ValueError, match="chunk_size is 0"):
            make()
    with pytest.raises(ValueError, match="limit of 0 tokens leaves nothing"):
        Documents(Counting(), 1, 0)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abcdefgh", max_size=9), max_size=12),
    st.integers(1, 10),
    st.none() | st.integers(1, 60),
    st.integers(0, 40),
    st.lists(st.integers(0, 30), max_size=30),
)
def test_any_chunk_asked_for_in_any_order_is_a_slice_of_the_whole(
    pieces, chunk_size, limit, in_memory, asked
):
    whole = ids_of(*pieces)
    whole = whole if limit is None else centre_truncate(whole, limit)
    expected = fakes.chunks_of(whole, chunk_size)
    counted = Counting()
    documents = Documents(counted, chunk_size, limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "IN_MEMORY", in_memory)  # most ids go through the file
        found = documents(task(Pieces(*pieces)))
        for k in [*asked, *range(len(expected) + 2)]:
            if k < len(expected):
                assert np.array_equal(found[k], expected[k])
                assert found[k].dtype == np.int32 and not found[k].flags.writeable
            else:
                with pytest.raises(IndexError):
                    found[k]
    assert found.total_chunks == len(expected)
    assert counted.tokens == found.tokens_read == len(ids_of(*pieces))
    lost = len(ids_of(*pieces)) - len(whole)
    assert (documents.truncated_documents, documents.truncated_tokens) == (lost > 0, lost)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 1000])
def test_the_chunks_of_a_real_tokenizer_are_those_of_the_whole_text(chunk_size):
    text = "the secret code of ann is red . " * 20
    expected = fakes.chunks_of(fakes.tokenizer().encode(text), chunk_size)
    found = ChunkedDocument(fakes.tokenizer(), TextDocument(text), chunk_size)
    assert all(np.array_equal(found[k], chunk) for k, chunk in enumerate(expected))


# ---------------------------------------------------------------- shared, once, as far as asked


def test_readings_of_one_document_share_its_chunks_while_one_is_under_way():
    documents, shared = Documents(Counting(), 4), Pieces("abcdef")
    first = documents(task(shared, "a"))
    assert first is documents(task(shared, "b"))
    assert first is not documents(task(Pieces("abcdef")))
    assert [first[0].tolist(), first[1].tolist()] == [[97, 98, 99, 100], [101, 102]]
    gone = weakref.ref(first)
    del first
    assert gone() is None
    documents(task(shared))[0]
    assert shared.opened == 2


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_document_is_tokenised_once_however_unevenly_it_is_read(data):
    lengths = st.integers(1, 40)
    pieces = ["x" * n for n in data.draw(st.lists(lengths, min_size=1, max_size=40))]
    documents, document = (
        Documents(counted := Counting(), data.draw(st.integers(1, 7))),
        Pieces(*pieces),
    )
    readers = [documents(task(document, str(i))) for i in range(data.draw(st.integers(1, 6)))]
    places = [0] * len(readers)  # each reads chunk k and, ahead, k + 1, at a pace of its own
    while readers:
        who = data.draw(st.integers(0, len(readers) - 1))
        for _ in range(data.draw(st.integers(1, 9))):
            try:
                readers[who][places[who]]
                readers[who][places[who] + 1]
            except IndexError:
                del readers[who], places[who]
                break
            places[who] += 1
    assert document.opened == 1
    assert counted.blocks == len(pieces) and counted.tokens == sum(map(len, pieces))


def test_a_reader_who_begins_when_another_ends_costs_no_second_pass():
    """22 passes over a document of 22 windows, before ids were written down."""
    document = Pieces(*["x" * 1000] * 600)
    documents = Documents(counted := Counting(), 100)
    fast, slow = documents(task(document, "a")), documents(task(document, "b"))
    for k in range(0, 6000, 250):
        assert len(fast[k]) == len(slow[k // 250]) == 100
    assert counted.tokens <= 600_000 and document.opened == 1


def test_the_first_chunk_costs_no_more_than_itself_unless_there_is_a_limit():
    pieces = ["x" * 1000] * 3500
    ChunkedDocument(counted := Counting(), Pieces(*pieces), 5000)[0]
    assert counted.tokens == 5000
    ChunkedDocument(counted := Counting(), Pieces(*pieces), 5000, 4_000_000)[0]
    assert counted.tokens == 3_500_000


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux for open files")
def test_a_document_of_any_length_costs_a_megabyte_and_its_file_goes_with_it():
    def open_files() -> int:
        """Open files without a name."""
        found = 0
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the one that lists them
                found += os.readlink(f"/proc/self/fd/{name}").endswith("(deleted)")
        return found

    before = open_files()
    found = ChunkedDocument(Counting(), Pieces(*["x" * 1000] * 3500), 5000)  # 14 MB of ids
    tracemalloc.start()
    for k in range(700):
        assert len(found[k]) == 5000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert open_files() == before + 1
    del found
    assert open_files() == before


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("limit", [None, 1, 100])
@pytest.mark.parametrize(
    "failure", [ValueError("the file changed"), OSError(5, "broken"), IndexError("a bug")]
)
def test_a_read_error_reaches_every_reading_and_every_chunk_from_there_on(failure, limit):
    """The second reader took it for the document's end, and answered on 8 of 20 chunks."""
    document = Pieces(*["abcde"] * 20, failure=failure, good=8)  # 40 letters, 10 chunks
    documents = Documents(Counting(), 4, limit)
    readers = [documents(task(document, name)) for name in "ab"]
    expected = RuntimeError if isinstance(failure, IndexError) else type(failure)
    for reader in readers:
        for k in (10, 11, 10, 50):
            with pytest.raises(expected, match=str(failure.args[-1])) as caught:
                reader[k]
            assert not isinstance(caught.value, IndexError)
        if limit is None:
            assert [reader[k].tolist() for k in (9, 0)] == [
                [*map(ord, w)] for w in ("bcde", "abcd")
            ]
        else:  # where a document is cut, nobody knows before its end
            with pytest.raises(expected):
                reader[0]
        assert reader.total_chunks is None
    assert document.opened == 1
    later = documents(task(document, "c"))  # begins after it was known, and tries for itself
    assert later is not readers[0]
    with pytest.raises(expected):
        later[10]
    assert document.opened == 2


def test_a_document_that_cannot_be_opened_fails_the_reading_and_not_the_asking():
    class Missing:
        def pieces(self):
            raise ValueError("t.jsonl is missing")

    found = Documents(Counting(), 4)(task(Missing()))
    for _ in range(2):
        with pytest.raises(ValueError, match="is missing"):
            found[0]


def test_an_interrupted_reading_is_not_a_short_document():
    found = ChunkedDocument(Counting(), Pieces("abc", "d", failure=KeyboardInterrupt(), good=1), 2)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            found[1]


def test_a_full_temporary_disk_is_said_in_one_line_to_every_reading():
    found = ChunkedDocument(Counting(), Pieces(*["x" * 1000] * 700), 5000)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, old[1]))  # as a disk with 512 kB left
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="cannot be kept in .*; make room there") as caught:
                found[139]
            assert "\n" not in str(caught.value)
        assert len(found[0]) == len(found[60]) == 5000  # what was written down is still there
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


# ---------------------------------------------------------------- chunks that end with sentences


def sentences(text: str, chunk_size: int) -> list[str]:
    tokenizer = fakes.tokenizer()
    pieces = chunks.sentence_pieces(tokenizer, "sentence")
    found = ChunkedDocument(tokenizer, TextDocument(text), chunk_size, pieces=pieces)
    return [tokenizer.decode(chunk) for chunk in _all(found)]


def _all(found: ChunkedDocument) -> list:
    made = []
    with contextlib.suppress(IndexError):
        while True:
            made.append(found[len(made)])
    return made


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ann is red . bob is blue . cleo", ["ann is red .", "bob is blue . cleo"]),  # the rest
        ("ann is red . bob is blue .", ["ann is red .", "bob is blue ."]),
        ("the the the the the the the .", ["the the the the the the", "the ."]),  # none ends
        (". the the the the the . the", [". the the the the the", ". the"]),  # too early
    ],
)
def test_a_chunk_ends_with_the_last_sentence_that_ends_in_its_second_half(text, expected):
    assert sentences(text, 6) == expected


@given(st.lists(st.sampled_from("ann is red . blue".split()), max_size=60), st.integers(1, 9))
def test_chunks_that_end_with_sentences_are_the_document_in_any_order_of_asking(words, size):
    tokenizer, text = fakes.tokenizer(), " ".join(words)
    whole = tokenizer.encode(text).tolist()
    pieces = chunks.sentence_pieces(tokenizer, "sentence")
    found = ChunkedDocument(tokenizer, TextDocument(text), size, pieces=pieces)
    again = ChunkedDocument(tokenizer, TextDocument(text), size, pieces=pieces)
    made = [chunk.tolist() for chunk in _all(found)]
    assert sum(made, []) == whole and all(0 < len(chunk) <= size for chunk in made)
    assert found.total_chunks == len(made)
    assert [again[k].tolist() for k in reversed(range(len(made)))] == made[::-1]


def test_a_document_that_loses_its_middle_keeps_whole_chunks_of_what_is_left():
    tokenizer = fakes.tokenizer()
    pieces = chunks.sentence_pieces(tokenizer, "sentence")
    text = "ann is red . " * 5
    found = ChunkedDocument(tokenizer, TextDocument(text), 6, 8, pieces=pieces)
    assert [tokenizer.decode(chunk) for chunk in _all(found)] == ["ann is red ."] * 2


def test_an_end_of_chunks_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="chunk_ends is 'page'; use one of tokens, sentence"):
        Documents(Counting(), 4, chunk_ends="page")
