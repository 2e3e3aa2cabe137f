"""A tokenizer is opened by the files of its folder."""

import shutil

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
