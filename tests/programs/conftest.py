"""What several files of this folder compare with."""

import pytest
import tiny

from notepad_jax.checkpoint.hf import huggingface


@pytest.fixture
def published(tmp_path):
    """A Hugging Face folder in several parts, with everything that travels along."""
    beside = {
        "generation_config.json": b'{"eos_token_id": 3}\n',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
    }
    huggingface.export(
        tiny.CONFIG, tiny.params(), tmp_path / "published", "bfloat16", beside,
        {"eos_token_id": 3, "dtype": "float64"}, part_bytes=10_000,
    )  # fmt: skip
    return tmp_path / "published"
