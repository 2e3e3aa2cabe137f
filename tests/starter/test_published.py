"""The starter's tokenizer for other programs: the same ids as ours, and an end to completions."""

import json
import pathlib

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.starter import published, vocabulary
from notepad_jax.text.tokenizer import open_tokenizer

STARTER = pathlib.Path(__file__).parents[2] / "data" / "starter"
FILES = published.files()
THEIRS = tokenizers.Tokenizer.from_str(FILES["tokenizer.json"].decode())
OURS = sentencepiece.SentencePieceProcessor(model_proto=FILES["tokenizer.model"])
TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*vocabulary.WORDS[:60], " ", "  ", "\n", "\t", "é日本", "<0x41>", "<"]),
        st.text(max_size=4),
    ),
    max_size=16,
)  # fmt: skip


def test_the_shipped_files_are_those_we_write():
    for name, content in FILES.items():
        assert (STARTER / name).read_bytes() == content


def test_the_secret_code_in_their_ids():
    code = [vocabulary.ID_OF[word] for word in ("the", "secret", "code")]
    assert THEIRS.encode("the secret code").ids == code == [9, 10, 11]
    assert THEIRS.decode(code) == "the secret code"
    turn = THEIRS.encode("<|chunk|>the code<|end|>")
    assert turn.tokens == ["<|chunk|>", "▁the", "▁code", "<|end|>"]
    assert turn.ids == open_tokenizer(STARTER).encode_template("<|chunk|>the code<|end|>").tolist()


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_ordinary_text_has_the_same_ids_and_comes_back_the_same(parts):
    text = "".join(parts).replace("\u2581", "").encode("utf-8", "replace").decode()
    if any(name in text for name in (*vocabulary.CONTROLS, "<pad>", "<unk>")):
        return  # those are special in their programs
    ids = THEIRS.encode(text).ids
    assert ids == OURS.encode(text)
    assert THEIRS.decode(ids) == OURS.decode(ids)


def test_every_file_says_where_a_completion_ends():
    config = json.loads(FILES["tokenizer_config.json"])
    assert json.loads(FILES["generation_config.json"])["eos_token_id"] == 2
    assert THEIRS.token_to_id(config["eos_token"]) == open_tokenizer(STARTER).stop_ids[0] == 2
    assert THEIRS.get_vocab_size() == len(vocabulary.PIECES)


@pytest.mark.parametrize("name", ["<pad>", *vocabulary.CONTROLS])
def test_what_is_special_there_is_control_here(name):
    assert THEIRS.encode(name).ids == [open_tokenizer(STARTER).control_id(name)]
