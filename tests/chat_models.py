"""A chat model as people download it, with random weights, and a file of questions for it."""

import dataclasses
import json
from pathlib import Path

from notepad_jax.checkpoint.hf import huggingface
from tests import tiny, tiny_bpe
from tests.text.test_chat import CHATML

QWEN2 = dataclasses.replace(
    tiny.CONFIG, vocab_size=640, valid_vocab=640, layers=2, qk_norm=False, attention_bias=True,
    tied_embeddings=True,
)  # fmt: skip
COLOURS = "red blue green white black".split()


def folder(path: Path, seed: int = 0) -> Path:
    """A Qwen2 of two layers, with tokenizer and chat template; `seed` is of its weights."""
    words = tiny_bpe.folder(path.with_name(f"{path.name}-words"), "qwen", chat_template=CHATML)
    beside = {file.name: file.read_bytes() for file in words.iterdir()}
    return huggingface.export_params(QWEN2, tiny.params(seed, QWEN2), path, beside)


def questions(path: Path, count: int = 20) -> Path:
    """Rows as somebody writes them by hand, a document of some hundred tokens each."""
    with path.open("w") as file:
        for number in range(count):
            colour, name = COLOURS[number % 5], "abcdefghijklmnopqrstuvwxyz"[number]
            document = f"bob reads . the secret code of {name} is {colour} . nothing else . " * 9
            row = {"question": f"the code of {name} ?", "answers": [colour], "document": document}
            file.write(json.dumps(row) + "\n")
    return path
