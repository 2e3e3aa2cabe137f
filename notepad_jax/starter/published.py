"""The starter's tokenizer as other programs read it: the files beside tokenizer.model.

transformers and the servers that stand on it know a sentencepiece model of this kind by no
class of theirs (they took the starter's for Qwen's, and "the secret code" became nothing), but
they read a tokenizer.json without converting it. So here the same vocabulary is written as
one, with what tells a program where a completion ends. Our own reader goes on with
tokenizer.model (`text.tokenizer`). Below: `vocabulary`; above: `programs.warmup`, which writes
the folder. Source of the form: tokenizers 0.23, transformers 5.23.
"""

from __future__ import annotations

import json
from typing import Any

from notepad_jax.starter.vocabulary import CONTROLS, ID_OF, PIECES, sentencepiece_model

STOP, PAD, UNKNOWN = "<|end|>", "<pad>", "<unk>"
POSITIONS = 32768  # tokens of context that the starter's config.json promises


def files() -> dict[str, bytes]:
    """Returns every file of the starter's folder that says something of its tokenizer."""
    return {
        "tokenizer.model": sentencepiece_model(),
        "tokenizer.json": _written(_tokenizer()),
        "tokenizer_config.json": _written(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": STOP,
                "pad_token": PAD,
                "unk_token": UNKNOWN,
                "clean_up_tokenization_spaces": False,
                "model_max_length": POSITIONS,
            }
        ),
        "generation_config.json": _written(
            {"eos_token_id": ID_OF[STOP], "pad_token_id": ID_OF[PAD], "do_sample": True}
        ),
    }


def _written(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _tokenizer() -> dict[str, Any]:
    """sentencepiece's steps, one by one: spaces, the dummy prefix, words, bytes."""
    spaces, ends = {"Regex": " {2,}"}, {"Regex": r"\A | \z"}
    steps = [
        {"type": "Replace", "pattern": spaces, "content": " "},
        {"type": "Replace", "pattern": ends, "content": ""},
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    back = [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": ID_OF[name], "content": name, **flags, "special": True}
        for name in (PAD, UNKNOWN, *CONTROLS)
    ]
    # Alone, a "<" begins no piece: the text "<0x41>" is no byte, as in sentencepiece.
    alone = {"type": "Split", "pattern": {"String": "<"}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": alone,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": back},
        "model": {
            "type": "Unigram",
            "unk_id": ID_OF[UNKNOWN],
            "vocab": [[piece, 0.0 if piece.startswith("<") else -1.0] for piece in PIECES],
            "byte_fallback": True,
        },
    }
