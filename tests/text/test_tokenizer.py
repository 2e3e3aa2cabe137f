"""A tokenizer is opened by the files of its folder."""

import json
import os
import shutil
import threading

import fakes
import pytest
import tiny_bpe

from notepad_jax.text.bpe_tokenizer import HuggingFaceTokenizer
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from notepad_jax.text.tokenizer import FILES, open_tokenizer


def test_open_tokenizer_goes_by_the_files(tmp_path):
    with pytest.raises(ValueError, match=r"neither a tokenizer\.json .* nor a tokenizer\.model"):
        open_tokenizer(tmp_path)
    shutil.copyfile(fakes.tokenizer_path(tmp_path), tmp_path / "tokenizer.model")
    assert isinstance(open_tokenizer(tmp_path), SentencePieceTokenizer)
    tiny_bpe.folder(tmp_path)
    assert isinstance(open_tokenizer(tmp_path), HuggingFaceTokenizer)
    names = [name for name in FILES if (tmp_path / name).is_file()]
    assert names == ["tokenizer.json", "tokenizer.model", "tokenizer_config.json"]


def test_a_unigram_tokenizer_json_leaves_the_text_to_the_model_beside_it(tmp_path):
    model, other = tmp_path / "tokenizer.model", tmp_path / "tokenizer.json"
    shutil.copyfile(fakes.tokenizer_path(tmp_path), model)
    plain = SentencePieceTokenizer(model)
    word, number = "red", int(plain.encode("red")[0])
    piece = plain._whole.id_to_piece(number)
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = {"id": number, "content": piece, **flags}
    made = {"version": "1.0", "model": unigram, "added_tokens": [added]}
    other.write_text(json.dumps(made))
    opened = open_tokenizer(tmp_path)
    assert opened.path == model and opened.controls[piece] == number
    assert number in plain.encode(word) and number not in opened.encode(word)
    other.write_text(json.dumps(made | {"added_tokens": [added | {"id": 1}]}))
    with pytest.raises(ValueError, match="the id 1, and .* they belong to two models"):
        open_tokenizer(tmp_path)
    other.write_text(json.dumps(made | {"added_tokens": [added | {"content": "<|new|>"}]}))
    with pytest.raises(ValueError, match="'<|new|>' is not in the tokenizer's vocabulary"):
        open_tokenizer(tmp_path)
    other.write_text(json.dumps(made | {"added_tokens": 7}))
    with pytest.raises(ValueError, match="not a tokenizer.json that tokenizers reads"):
        open_tokenizer(tmp_path)
    model.unlink()
    with pytest.raises(ValueError, match="a model of type Unigram, and only BPE is read"):
        open_tokenizer(tmp_path)


def test_vocabulary_and_merges_alone_are_refused_with_what_to_do(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(ValueError, match=r"save_pretrained\(folder\) of transformers writes a"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.json", "tokenizer.model", "tokenizer_config.json", "generation_config.json"],
)
def test_a_pipe_in_the_place_of_a_file_is_refused(name, tmp_path):
    """Its other end is closed after a while: a reader that forgot to look fails, and ends."""
    tiny_bpe.folder(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    held = os.open(tmp_path / name, os.O_RDWR | os.O_NONBLOCK)
    closing = threading.Timer(10.0, os.close, [held])
    closing.start()
    try:
        with pytest.raises(ValueError, match=f"{name} is a pipe or a device, not a file; put"):
            open_tokenizer(tmp_path)
    finally:
        closing.cancel()
