"""The approximate tokenizer: nothing is lost, a stream is cut as the whole text is."""

import argparse
import asyncio
import csv
import datetime
import inspect
import logging
import pathlib
import subprocess
import threading
import tracemalloc
import zipfile

import fakes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.reading import endpoint
from notepad_jax.text import approximate
from notepad_jax.text.approximate import ApproximateTokenizer, count
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.text.prompts import Template
from notepad_jax.types import TextDocument

# Every kind of piece at once, and enough of the long ones to reach across any border.
ODD = st.text(
    st.sampled_from(
        "abcxyzABC 0123.,-_()\n\r\t\u00e9\u0436\u05d0\u65e5\u3042\ud800\U0001f600\u0301"
    ),
    max_size=300,
)
ANY = st.one_of(st.text(st.characters(exclude_categories=())), ODD)


def texts_of(text: str, **sizes: int) -> list[str]:
    """The pieces as strings."""
    tokenizer = ApproximateTokenizer(**sizes)
    return [tokenizer.decode([i]) for i in tokenizer.encode(text)]


@given(ANY)
def test_every_string_comes_back(text):
    tokenizer = ApproximateTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.int32 and count(text) == len(ids)
    assert all(0 <= i < tokenizer.vocab_size and i not in tokenizer.stop_ids for i in ids)


def test_pieces_are_about_what_bpe_makes_of_them():
    words = "The international  panel met, in 2026: naïve Эта 日本\n\n\tend"
    assert texts_of(words) == [
        *["The", " internatio", "nal", "  ", "panel", " met", ",", " in", " ", "202", "6", ":"],
        *[" na", "ï", "ve", " Эта", " ", "日", "本", "\n\n", "\t", "end"],
    ]


def test_english_prose_has_about_four_characters_a_token():
    # Of these docstrings (Python 3.11) a token of cl100k has 4.74, of o200k 4.72, of DeepSeek
    # 4.58 characters, and ours 4.42: within 7%, and on the side of documents that are shorter.
    modules = (argparse, asyncio, csv, datetime, logging, pathlib, subprocess, threading, zipfile)
    members = [member for m in modules for _, member in inspect.getmembers(m, callable)]
    prose = "\n\n".join(inspect.getdoc(x) or "" for x in (*modules, *members))
    assert len(prose) > 50_000
    assert 0.9 < len(prose) / count(prose) / 4.74 < 1


@settings(max_examples=200)
@given(ANY, st.lists(st.integers(0, 300), max_size=8), st.integers(1, 40))
def test_a_stream_encodes_as_the_whole_text_does(text, cuts, block):
    cuts = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "BLOCK", block)  # so that short texts cross many borders
        streamed = ApproximateTokenizer()
        parts = [ids.tolist() for ids in streamed.encode_pieces(pieces)]
    whole = ApproximateTokenizer().encode(text)
    assert sum(parts, []) == whole.tolist() and all(parts)
    # In one object, the ids are those of the first time.
    assert streamed.encode(text).tolist() == whole.tolist()


@pytest.mark.parametrize("run", [" ", "a", "7", "\n", "-", "é", " a", "aé ", "\r\n \t"])
def test_runs_across_block_borders_are_cut_alike(run):
    text = run * 500
    pieces = [text[i : i + 1] for i in range(len(text))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "BLOCK", 37)
        streamed = [len(i) for i in ApproximateTokenizer().encode_pieces(pieces)]
    assert sum(streamed) == len(approximate._PIECE.findall(text))


def of_two_pieces() -> ApproximateTokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "MAX_PIECES", 2)
        return ApproximateTokenizer()


@given(st.lists(st.sampled_from(["ab", "cd", " ef", "gh1", "1ab", "日", "-"]), max_size=40))
def test_a_full_table_spells_and_stays_consistent(words):
    tokenizer, text = of_two_pieces(), " ".join(words)
    first = tokenizer.encode(text)
    assert tokenizer.decode(first) == text
    assert tokenizer.encode(text).tolist() == first.tolist()
    streamed = [i for ids in tokenizer.encode_pieces(words) for i in ids]
    assert tokenizer.decode(streamed) == "".join(words)


def test_a_full_table_by_hand():
    # "one" and " two" have the two ids there are; " six" and "ty" are spelled.
    tokenizer = of_two_pieces()
    first = approximate.FIRST_PIECE
    assert tokenizer.encode("one two six").tolist() == [first, first + 1, *map(ord, " six")]
    assert tokenizer.encode(" six two").tolist() == [*map(ord, " six"), first + 1]


def test_the_stop_id_is_in_no_text_and_vanishes():
    tokenizer = ApproximateTokenizer()
    (stop,) = tokenizer.stop_ids
    assert tokenizer.decode([*tokenizer.encode("the end"), stop]) == "the end"
    assert tokenizer.decode([-1, tokenizer.vocab_size]) == "\ufffd\ufffd"
    assert chr(stop - 1) == "\U0010ffff"  # the last code point there is


def test_documents_are_chunked_in_a_stream_as_in_a_list():
    text = "It was a dark and stormy night in 1830; the rain fell.\n" * 400
    tokenizer = ApproximateTokenizer()
    listed = fakes.chunks_of(tokenizer.encode(text), 50)
    streamed = ChunkedDocument(tokenizer, TextDocument(text), 50)
    assert all(np.array_equal(streamed[k], listed[k]) for k in range(len(listed)))
    assert "".join(tokenizer.decode(listed[k]) for k in range(len(listed))) == text


@pytest.mark.slow
def test_a_stream_is_encoded_in_constant_memory():
    tokenizer = ApproximateTokenizer()

    def peak(lines: int) -> int:
        tracemalloc.start()
        for _ in tokenizer.encode_pieces("the rain fell on the hills\n" for _ in range(lines)):
            pass
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    small, large = peak(10_000), peak(100_000)  # 0.27 and 2.7 MB of text
    assert large < 1.2 * small and large < 6e6


@pytest.mark.parametrize("name", ["chunk_first", "memory_first"])
def test_shipped_chat_templates_load_as_bare_turns(name):
    tokenizer = ApproximateTokenizer()
    template = Template.load(name, tokenizer, endpoint.bare_turn(tokenizer))
    prompt = template.update_prompt(
        tokenizer.encode("who?"), tokenizer.encode("<|im_end|> Bob"), tokenizer.encode("(none)")
    )
    said = tokenizer.decode(prompt.tokens)
    assert said.startswith("You are reading") and said.endswith("the old one.")
    assert all(part in said for part in ("\nwho?\n", "\n<|im_end|> Bob\n", "\n(none)\n"))
    assert template.stop_ids == tokenizer.stop_ids


def test_control_pieces_in_a_template_are_refused():
    tokenizer = ApproximateTokenizer()
    with pytest.raises(ValueError, match="chunk_first.*no control piece '<.im_start.>'.*bare_turn"):
        Template.load("chunk_first", tokenizer)
    with pytest.raises(ValueError, match="question_last.*no control piece"):
        Template.load("question_last", tokenizer, endpoint.bare_turn(tokenizer))
    assert (
        tokenizer.encode_template("a < b | c >").tolist()
        == tokenizer.encode("a < b | c >").tolist()
    )
