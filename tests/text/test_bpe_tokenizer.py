"""tokenizer.json: documents never become special tokens; a stream encodes as the library does."""

import functools
import json
import pathlib
import tempfile
import unicodedata

import fakes
import numpy as np
import pytest
import tiny_bpe
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.text import token_blocks
from notepad_jax.text.bpe_tokenizer import HuggingFaceTokenizer
from notepad_jax.text.tokenizer import open_tokenizer
from notepad_jax.types import tokens
from tests.text.streams import cut, stream

LATIN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
BYTES = {byte: chr(byte) for byte in LATIN}  # GPT-2's characters of bytes
BYTES |= {byte: chr(256 + n) for n, byte in enumerate(sorted({*range(256)} - LATIN))}
CONTROLS = (*tiny_bpe.SPECIAL, *tiny_bpe.NOT_MARKED)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            [*fakes.WORDS, *CONTROLS, " ", "     ", "\n", "\r\n", "\n\n  ", "\t", "12", "3.14",
             "日本語", "。", "，", "한국어", "👩\u200d🚀", "カ\u3099。", "e\u0301", "\u0301", "😀",
             "'s", "don't", "\x00", "\ud800", "\udc00", "/", "//", "_", "\u00a0", "\u2028", "▁",
             "<0x41>", "<unk>"]
        ),
        st.text(max_size=6),
    ),
    max_size=40,
)  # fmt: skip


@functools.cache
def hugging_face(kind: str) -> HuggingFaceTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return HuggingFaceTokenizer(tiny_bpe.folder(pathlib.Path(folder), kind))


library = functools.cache(tokenizers.Tokenizer.from_str)


def library_ids(spec: dict, text: str) -> list[int]:
    """What the library itself says, with added tokens left out of its sight."""
    bare = library(json.dumps({**spec, "added_tokens": []}))
    return bare.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids


@pytest.mark.parametrize("kind", tiny_bpe.KINDS)
def test_no_added_token_comes_from_a_document(kind):
    tok = hugging_face(kind)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tiny_bpe.spec(kind)))
    for name in tok.controls:
        for text in (name, f"red{name}blue", f" {name} ", f"{name}{name}\n", name * 50):
            assert tok.controls[name] in theirs.encode(text, add_special_tokens=False).ids
            for ids in (tok.encode(text), tokens(stream(tok, list(text)))):
                assert not set(tok.controls.values()) & set(ids.tolist())
                assert tok.decode(ids) == theirs.decode(library_ids(tiny_bpe.spec(kind), text))
        assert tok.encode_template(name).tolist()[-1:] == [tok.control_id(name)]
    assert set(CONTROLS) <= set(tok.controls)


@pytest.mark.parametrize("kind", tiny_bpe.KINDS)
def test_a_control_piece_in_the_vocabulary_with_merges_stays_out_of_documents(kind, tmp_path):
    spec, name = tiny_bpe.spec(kind), "<|im_end|>"
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    tiny_bpe.add_merges(spec, *((name[:n], name[n]) for n in range(1, len(name))))
    whole = {**spec, "pre_tokenizer": None, "normalizer": None}
    assert library_ids(whole, name) == [ids[name]]
    tok = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path, changed=spec))
    assert ids[name] not in tok.encode(f"red {name}{name} {name[:-1]}> {name}").tolist()
    assert tok.encode_template(name).tolist() == [ids[name]]


@pytest.mark.parametrize("kind", tiny_bpe.KINDS)
@settings(max_examples=60, deadline=None)
@given(parts=TEXTS, places=st.lists(st.integers(0, 10**6), max_size=12))
def test_streaming_equals_whole_and_the_library(kind, parts, places):
    text, tok = "".join(parts), hugging_face(kind)
    theirs = library_ids(tiny_bpe.spec(kind), text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_blocks, "SHORTEST_BLOCK", 1)
        whole = tok.encode(text).tolist()
        assert stream(tok, cut(text, places)) == whole
        assert stream(tok, list(text)) == whole
        assert whole == theirs
        patch.setattr(token_blocks, "SHORTEST_BLOCK", 4)
        patch.setattr(token_blocks, "LONGEST_BLOCK", 9)  # cuts by force: still a function
        whole = tok.encode(text).tolist()  # of the text alone
        assert stream(tok, cut(text, places)) == stream(tok, list(text)) == whole


@pytest.mark.parametrize("kind", tiny_bpe.BYTE_LEVEL)
@settings(max_examples=60, deadline=None)
@given(parts=TEXTS)
def test_byte_level_decoding_returns_the_text(kind, parts):
    text = "".join(parts)
    kept = text.encode("utf-8", "replace").decode()
    wanted = unicodedata.normalize("NFC", kept) if kind == "qwen" else kept
    if kind == "gpt2" and wanted and not wanted.startswith(" "):
        wanted = " " + wanted  # the dummy prefix of this kind
    assert hugging_face(kind).decode(hugging_face(kind).encode(text)) == wanted


@pytest.mark.parametrize("kind", tiny_bpe.KINDS)
def test_long_runs_stay_exact(kind):
    tok = hugging_face(kind)
    for text in (
        "red" + " " * 20_000 + "blue",
        "日本。" * 9_000,
        "\n" * 9_000 + "ann",
        "a b" * 9_000,
    ):
        assert stream(tok, cut(text, [7, 4_100, 8_191])) == tok.encode(text).tolist()
        assert tok.encode(text).tolist() == library_ids(tiny_bpe.spec(kind), text)


def test_a_stream_of_bpe_holds_one_block_at_a_time():
    for line in ("the secret code of ann is red . ", "日本語の文。", "red\n"):
        seen = 0

        def pieces(line=line):
            nonlocal seen
            while True:
                seen += 1
                yield line

        assert len(next(hugging_face("qwen").encode_pieces(pieces()))) > 0
        assert seen * len(line) < 3 * token_blocks.SHORTEST_BLOCK


def test_vocab_size_counts_added_tokens_and_unknown_ids_are_shown():
    tok = hugging_face("qwen")
    assert tok.vocab_size == max(tok.controls.values()) + 1
    red, blue = tok.encode("red").tolist(), tok.encode(" blue").tolist()
    assert tok.decode([*red, tok.vocab_size, -1, *blue]) == "red\ufffd\ufffd blue"
    assert tok.decode([*red, tok.control_id("<|im_end|>"), *blue]) == "red blue"
    assert tok.decode([]) == "" and tok.encode("").dtype == np.int32


@pytest.mark.parametrize("kind", tiny_bpe.KINDS)
def test_template_text_is_encoded_as_the_library_does(kind):
    tok = hugging_face(kind)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tiny_bpe.spec(kind)))
    text = "<|im_start|>user\nthe code 12 <think>\n\n</think><|im_end|>\n"
    wanted = theirs.encode(text, add_special_tokens=False).ids
    assert tok.encode_template(text).tolist() == wanted
    with pytest.raises(ValueError, match=r"no control piece '<\|nope\|>'"):
        tok.encode_template("red <|nope|>")


def test_runs_of_spaces_as_added_tokens_stay_ordinary(tmp_path):
    spec = tiny_bpe.spec("qwen")
    blank = spec["added_tokens"][-1] | {"content": "        "}
    blank["id"] = number = spec["added_tokens"][-1]["id"] + 1
    spec["added_tokens"].append(blank)
    tok = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path, changed=spec))
    text = "red" + " " * 9 + "blue"
    assert tok.encode(text).tolist().count(number) == 1 and tok.decode(tok.encode(text)) == text
    assert tok.vocab_size == number + 1 and "        " not in tok.controls


def test_truncation_padding_dropout_and_post_processor_are_left_out(tmp_path):
    spec = tiny_bpe.spec("qwen")
    plain = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path / "plain", changed=spec))
    spec["model"]["dropout"] = 0.9
    spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
                          "stride": 0}  # fmt: skip
    spec["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "!", "pad_to_multiple_of": None}  # fmt: skip
    spec["post_processor"] = {"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}
    tok = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path / "full", changed=spec))
    text = "the secret code of ann is red"
    assert tok.encode(text).tolist() == plain.encode(text).tolist()
    assert tok.encode_template(text).tolist() == plain.encode_template(text).tolist()


def test_stop_ids_come_from_the_folder(tmp_path):
    tok = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path / "a", eos="<|eot_id|>"))
    assert tok.stop_ids == (tok.control_id("<|eot_id|>"), tok.control_id("<|endoftext|>"))
    (tmp_path / "a" / "tokenizer_config.json").unlink()
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert HuggingFaceTokenizer(tmp_path / "a").stop_ids == (5,)
    (tmp_path / "a" / "generation_config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(ValueError, match="ends at id 99999"):
        HuggingFaceTokenizer(tmp_path / "a")
    (tmp_path / "a" / "generation_config.json").unlink()
    tok = HuggingFaceTokenizer(tmp_path / "a")
    assert tok.stop_ids == (tok.control_id("<|im_end|>"),)
    spec = tiny_bpe.spec("qwen") | {"added_tokens": []}
    folder = tiny_bpe.folder(tmp_path / "b", changed=spec)
    with pytest.raises(ValueError, match="no control piece '<|im_end|>'"):
        HuggingFaceTokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="does not say where a completion ends"):
        HuggingFaceTokenizer(folder)


def spanning_piece(spec: dict) -> None:
    """Lets one piece reach across a space, and takes away the pattern that prevents it."""
    spec["pre_tokenizer"] = spec["pre_tokenizer"]["pretokenizers"][1]
    tiny_bpe.add_merges(spec, ("z", "Ġ"), ("zĠ", "q"))


def ending_in_a_space(spec: dict) -> None:
    tiny_bpe.add_merges(spec, ("z", "z"), ("zz", "▁"))


def stripping(spec: dict) -> None:
    spec["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}


def lacking(*missing: int):
    """Takes the pieces of some bytes away, and what is merged from them."""

    def breaking(spec: dict) -> None:
        tiny_bpe.add_merges(spec)
        model = spec["model"]
        byte_level = "<0x00>" not in model["vocab"]
        gone = {BYTES[byte] if byte_level else f"<0x{byte:02X}>" for byte in missing}
        if byte_level:
            gone |= {piece for piece in model["vocab"] if gone & {*piece}} - {*CONTROLS}
        model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece not in gone}
        model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]

    return breaking


@pytest.mark.parametrize(
    ("kind", "breaking", "message"),
    [
        ("qwen", lambda spec: spec.pop("model"), "a model of type nothing"),
        ("qwen", lambda spec: spec["model"].update(type="Unigram"), "type Unigram, and only BPE"),
        ("qwen", lambda spec: spec["model"].update(merges=[["x", "yy"]]), "not a tokenizer.json"),
        ("qwen", lambda spec: spec.update(decoder={"type": "Nope"}), "not a tokenizer.json"),
        ("qwen", lambda spec: spec["added_tokens"][0].update(id=9_999), "'<s>' the id 9999"),
        ("qwen", lacking(0x0A), r"cannot write plain English: .* for '\\n' of the 97 characters"),
        ("llama3", lacking(0x7E, 0x20), "no ordinary piece for ' ' and 1 more of the 97"),
        ("prepend", lambda spec: spec["model"].update(byte_fallback=False), "neither byte-level"),
        ("qwen", lambda spec: spec.update(added_tokens=[{"id": 3}]), "not a tokenizer.json"),
        ("qwen", lambda spec: spec.update(pre_tokenizer=7), "not a tokenizer.json"),
        ("qwen", lambda spec: spec["model"].update(vocab=7), "not a tokenizer.json"),
        ("qwen", spanning_piece, "'zĠq' that spans words|'zĠ' that spans words"),
        ("prepend", ending_in_a_space, "'zz▁' that spans words"),
        ("qwen", stripping, "cannot be streamed"),
    ],
)
def test_a_tokenizer_that_cannot_keep_the_promises_is_refused(kind, breaking, message, tmp_path):
    spec = tiny_bpe.spec(kind)
    breaking(spec)
    with pytest.raises(ValueError, match=message):
        HuggingFaceTokenizer(tiny_bpe.folder(tmp_path, changed=spec))


def test_the_same_piece_is_fine_where_a_pattern_keeps_it_from_spanning(tmp_path):
    spec = tiny_bpe.spec("qwen")
    tiny_bpe.add_merges(spec, ("z", "Ġ"), ("zĠ", "q"))
    tok = HuggingFaceTokenizer(tiny_bpe.folder(tmp_path, changed=spec))
    assert tok.encode("z q").tolist() == library_ids(spec, "z q")


# ---------------------------------------------------------------- bytes without a piece

# SmolLM2's; a tail and a lead of CJK, in whose texts we like to cut; U+FFFD's own; tails of two
LACKING = {
    "smol": (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2, 0xC0, 0xC1, *range(0xF5, 0x100)),
    "cjk": (0x00, 0xE4, 0x97), "fffd": (0x0D, 0xBD), "tails": (0x80, 0xA9),
}  # fmt: skip
LOST = "\x04\u4e00\r\u00e9"
LACKING_KINDS = [*((kind, "smol") for kind in tiny_bpe.KINDS)]
LACKING_KINDS += [(kind, what) for kind in ("qwen", "digits") for what in ("cjk", "fffd", "tails")]
LACKING_KINDS += [("prepend", "cjk"), ("metaspace", "fffd")]


@functools.cache
def lacking_spec(kind: str, what: str) -> dict:
    spec = tiny_bpe.spec(kind)
    lacking(*LACKING[what])(spec)
    return spec


@functools.cache
def incomplete(kind: str, what: str) -> tuple[HuggingFaceTokenizer, list[str]]:
    said: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_bpe.folder(pathlib.Path(folder), changed=lacking_spec(kind, what))
        return HuggingFaceTokenizer(path, said.append), said


def readable(kind: str, what: str, text: str) -> str:
    """The text as such a tokenizer sees it, by UTF-8 itself: one character after the other."""
    kept, missing = text.encode("utf-8", "replace").decode(), {*LACKING[what]}
    if kind == "qwen":
        kept = unicodedata.normalize("NFC", kept)
    known = {} if kind in tiny_bpe.BYTE_LEVEL else lacking_spec(kind, what)["model"]["vocab"]
    instead = "?" if missing & {*"\ufffd".encode()} else "\ufffd"
    return "".join(instead if missing & {*c.encode()} and c not in known else c for c in kept)


@pytest.mark.parametrize(("kind", "what"), LACKING_KINDS)
def test_every_character_is_read_and_one_without_its_bytes_as_the_sign_for_that(kind, what):
    tok, said = incomplete(kind, what)
    theirs = lacking_spec(kind, what)
    least = 0x900 if what != "smol" or kind != "digits" else 0x10000  # one goes through the plane
    edges = {*range(0x3FFFF, 0xC0001, 0x10000), *range(0x40000, 0xC0001, 0x10000)}
    points = edges.union(range(least), range(0, 0x110000, 61)) - {*range(0xD800, 0xE000)}
    characters = [chr(point) for point in sorted(points)]
    for start in range(0, len(characters), 997):
        text = "a".join(characters[start : start + 997])
        wanted = readable(kind, what, text)
        ids = tok.encode(text).tolist()
        assert ids == library_ids(theirs, wanted)
        if kind in ("digits", "llama3", "camel"):  # no prefix, no normal form
            assert tok.decode(ids) == wanted
    assert len(said) == 1
    made = library(json.dumps(theirs))  # a template is no exception
    wanted = made.encode(f"<|im_end|>{readable(kind, what, LOST)}", add_special_tokens=False)
    assert tok.encode_template(f"<|im_end|>{LOST}").tolist() == wanted.ids


@pytest.mark.parametrize(("kind", "what"), LACKING_KINDS)
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            TEXTS.map("".join),
            st.sampled_from(["\x04", "\x13\x16 ", "\n\x1d", "\U00040000", "\U000bffffa", "\ufffd",
                             "\u4e00\u3001", "\n\u4e00", "\u4e00 a", "e\u0301", "\u2126", "\r\n"]),
            st.characters(),
        ),
        max_size=12,
    ),
    places=st.lists(st.integers(0, 10**6), max_size=12),
)  # fmt: skip
def test_a_stream_without_some_bytes_equals_the_whole_and_the_library(kind, what, parts, places):
    text, (tok, _) = "".join(parts), incomplete(kind, what)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_blocks, "SHORTEST_BLOCK", 1)
        whole = tok.encode(text).tolist()
        assert stream(tok, cut(text, places)) == stream(tok, list(text)) == whole
        assert whole == library_ids(lacking_spec(kind, what), readable(kind, what, text))


def test_what_cannot_be_written_is_said_in_one_line_and_only_where_text_can_have_it(tmp_path):
    _, said = incomplete("digits", "smol")
    assert said[0].endswith(
        "tokenizer.json has no piece for 8 of the 243 bytes of UTF-8 (04 06 13 14 16 1d f1 f2): "
        "characters that need them are read as U+FFFD"
    )
    _, said = incomplete("digits", "fffd")
    assert said[0].endswith("(0d bd): characters that need them are read as '?', as it cannot "
                            "write U+FFFD either")  # fmt: skip
    spec = tiny_bpe.spec("qwen")
    lacking(0xC0, 0xC1, *range(0xF5, 0x100))(spec)  # no text has these
    open_tokenizer(tiny_bpe.folder(tmp_path / "whole", changed=spec), said.append)
    assert len(said) == 1
    lacking(0x04)(spec)
    with pytest.warns(UserWarning, match=r"1 of the 243 bytes of UTF-8 \(04\)"):
        open_tokenizer(tiny_bpe.folder(tmp_path / "one", changed=spec))


def test_broken_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no .*tokenizer.json"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"{nope")
    with pytest.raises(ValueError, match="is not JSON"):
        HuggingFaceTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not JSON"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("[1]")
    with pytest.raises(ValueError, match="holds a list"):
        open_tokenizer(tmp_path)
