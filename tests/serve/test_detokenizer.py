"""A stream's text: never half a character, never a stop string, and in all what a whole one is."""

import functools
import pathlib
import tempfile

import fakes
import pytest
import tiny_bpe
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.serve.completions.detokenizer import HALF, Saying, token_text
from notepad_jax.text.bpe_tokenizer import HuggingFaceTokenizer


@functools.cache
def bpe():
    with tempfile.TemporaryDirectory() as folder:
        return HuggingFaceTokenizer(tiny_bpe.folder(pathlib.Path(folder) / "m", "qwen"))


TOKENIZERS = {"sentencepiece": fakes.tokenizer, "bpe": bpe}
TEXT = st.text(st.sampled_from("ab the.\n€é😀日  "), max_size=24)


def spoken(tokenizer, ids, stops=()) -> tuple[list[str], bool]:
    saying = Saying(tokenizer.decode, stops)
    pieces = []
    for token in ids:
        pieces.append(saying.add(int(token)))
        if saying.stopped:
            return pieces, True
    return [*pieces, saying.rest()], saying.stopped


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, controls=st.lists(st.integers(0, 24), max_size=3))
def test_the_pieces_are_the_text(name, text, controls):
    """Control pieces that a policy may say in between change nothing."""
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(text).tolist()
    for at in controls:
        ids.insert(min(at, len(ids)), next(iter(tokenizer.controls.values())))
    pieces, _ = spoken(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    # A control piece in the middle of a character's bytes leaves two halves for good.
    assert not any(HALF in piece for piece in pieces) or HALF in tokenizer.decode(ids)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(10, 265), max_size=80))
def test_bytes_that_are_no_text_come_out_and_nobody_waits_for_ever(ids):
    pieces, _ = spoken(fakes.tokenizer(), ids)
    assert len("".join(pieces)) >= len(fakes.tokenizer().decode(ids).strip(HALF))
    if len(ids) <= 30:
        assert "".join(pieces) == fakes.tokenizer().decode(ids)


@settings(max_examples=100, deadline=None)
@given(text=TEXT, stops=st.lists(st.text("ab the", min_size=1, max_size=4), max_size=3))
def test_a_stop_string_ends_the_text_before_it_and_nothing_of_it_is_told(text, stops):
    tokenizer = bpe()
    ids = tokenizer.encode(text).tolist()
    pieces, stopped = spoken(tokenizer, ids, stops)
    whole = tokenizer.decode(ids)
    ends = [n for n in range(len(whole) + 1) if any(stop in whole[:n] for stop in stops)]
    assert stopped == bool(ends)
    if not stopped:
        assert "".join(pieces) == whole
    else:
        told = "".join(pieces)
        assert whole.startswith(told) and not any(stop in told for stop in stops)
        assert any(whole[len(told) :].startswith(stop) for stop in stops)


def test_what_might_be_a_stop_string_is_held_back_by_hand():
    letters = {0: "x", 1: "<", 2: "e", 3: ">"}
    saying = Saying(lambda ids: "".join(letters[i] for i in ids), ["<e>"])
    assert [saying.add(i) for i in (0, 1, 2, 1, 2)] == ["x", "", "", "<e", ""]
    assert saying.add(0) == "<ex" and saying.add(1) == "" and saying.rest() == "<"


def test_a_tokens_text_has_its_space_and_a_control_piece_its_name():
    tokenizer = fakes.tokenizer()
    first, second = tokenizer.encode("the secret").tolist()
    names = {i: name for name, i in tokenizer.controls.items()}
    assert token_text(tokenizer.decode, [first], second, names) == " secret"
    assert token_text(tokenizer.decode, [], second, names) == "secret"
    end = tokenizer.control_id("<|end|>")
    assert token_text(tokenizer.decode, [first], end, names) == "<|end|>"
