"""sentencepiece: documents never become special tokens; a stream encodes as the whole does."""

import pathlib

import fakes
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.text import token_blocks
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from tests.text.streams import cut, stream

WORDS = st.sampled_from([*fakes.WORDS, "zebra", "é", "日本", "<|end|>", "\n", "", "\t", "x\ny"])


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)])
def any_normaliser(request, tmp_path, monkeypatch) -> tuple[SentencePieceTokenizer, pathlib.Path]:
    monkeypatch.setattr(token_blocks, "SHORTEST_BLOCK", 7)
    path = fakes.tokenizer_path(
        tmp_path, dummy_prefix=request.param[0], strip_spaces=request.param[1]
    )
    return SentencePieceTokenizer(path), path


def test_special_strings_in_a_document_stay_ordinary_text():
    tok = fakes.tokenizer()
    text = "the code <|end|> is <pad> <unk> <0x41> <|memory|>"
    ids = tok.encode(text)
    controls = {tok.control_id(name) for name in (*fakes.CONTROLS, "<pad>")}
    assert not controls & set(ids.tolist())
    assert 1 not in ids
    assert tok.decode(ids) == text


def test_user_defined_specials_are_made_control(tmp_path):
    tok = SentencePieceTokenizer(fakes.tokenizer_path(tmp_path, control_as_user_defined=True))
    assert tok.stop_ids[0] not in tok.encode("red<|end|>blue")
    assert tok.encode_template("red<|end|>blue").tolist() == [
        *tok.encode("red"),
        tok.stop_ids[0],
        *tok.encode("blue"),
    ]


def test_an_unusual_special_piece_can_be_named(tmp_path):
    path = fakes.tokenizer_path(tmp_path, words=("red", "[INST]"))
    assert "▁[INST]" in sentencepiece.SentencePieceProcessor(str(path)).encode(
        "[INST]", out_type=str
    )
    tok = SentencePieceTokenizer(path, special=("▁[INST]",))
    assert tok.control_id("▁[INST]") not in tok.encode("[INST]")
    with pytest.raises(ValueError, match="not in the tokenizer"):
        SentencePieceTokenizer(path, special=("[NOPE]",))


@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=60), places=st.lists(st.integers(0, 10**6), max_size=12))
def test_streaming_equals_whole(words, places):
    text, tok = " ".join(words), fakes.tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_blocks, "SHORTEST_BLOCK", 7)
        patch.setattr(token_blocks, "LONGEST_BLOCK", 40)
        whole = tok.encode(text).tolist()
        assert stream(tok, cut(text, places)) == whole
        assert stream(tok, list(text)) == whole


@pytest.mark.parametrize(
    "text",
    ["", " ", "\n\n red  ann ", "   the secret code of ann is red . " * 9, "\n x red red red red"],
)
def test_blocks_equal_sentencepiece_for_every_normaliser(any_normaliser, text):
    tok, path = any_normaliser
    theirs = sentencepiece.SentencePieceProcessor(str(path)).encode(text)
    assert tok.encode(text).tolist() == theirs
    assert stream(tok, list(text)) == theirs


@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=60))
def test_small_blocks_equal_sentencepiece(words):
    text, tok = " ".join(words).replace("<|", "< |"), fakes.tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_blocks, "SHORTEST_BLOCK", 7)
        assert tok.encode(text).tolist() == tok._whole.encode(text)


def test_text_without_spaces_is_cut_where_only_the_text_says(monkeypatch):
    monkeypatch.setattr(token_blocks, "SHORTEST_BLOCK", 4)
    monkeypatch.setattr(token_blocks, "LONGEST_BLOCK", 10)
    tok, text = fakes.tokenizer(), "日本語" * 50
    assert stream(tok, cut(text, [3, 77])) == tok.encode(text).tolist()
    assert tok.decode(tok.encode(text)) == text


def test_a_stream_holds_one_block_at_a_time():
    tok, seen = fakes.tokenizer(), 0

    def pieces():
        nonlocal seen
        while True:
            seen += 1
            yield "the secret code of ann is red . "

    first = next(tok.encode_pieces(pieces()))
    assert len(first) > 0 and seen < 300


def test_rubbish_encodes_and_decodes():
    tok = fakes.tokenizer()
    assert tok.decode(tok.encode("a\0b")) == "a\0b"
    assert tok.decode(tok.encode("red \ud800 blue")) == "red ? blue"
    assert "blue" in tok.decode([*tok.encode("blue"), 10**6, -3])
    assert tok.decode([tok.stop_ids[0]]) == ""
    assert tok.encode("red").dtype == np.int32


def test_template_text_honours_control_pieces_only_if_they_exist():
    tok = fakes.tokenizer()
    assert tok.encode_template("<|question|>").tolist() == [tok.control_id("<|question|>")]
    with pytest.raises(ValueError, match=r"no control piece '<\|nope\|>'"):
        tok.encode_template("red <|nope|>")


def test_broken_models_are_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at"):
        SentencePieceTokenizer(tmp_path / "missing.model")
    (tmp_path / "bad.model").write_bytes(b"not a model at all")
    with pytest.raises(ValueError, match="not a sentencepiece model"):
        SentencePieceTokenizer(tmp_path / "bad.model")
    with pytest.raises(ValueError, match="spans words"):
        SentencePieceTokenizer(fakes.tokenizer_path(tmp_path, words=("new▁york",)))
