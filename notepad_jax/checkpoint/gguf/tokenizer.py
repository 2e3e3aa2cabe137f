"""From the metadata of a GGUF file to the tokenizer's files (tokenizer.json and others).

A file of kind `gpt2` (byte-level BPE) has tokens, their types and merges, as a tokenizer.json
has; how text is split before merging, it only names (`tokenizer.ggml.pre`). The splits known
here are the published tokenizers' own; any other name is refused, for ids that are almost right
are worse than none. Beside it come tokenizer_config.json with the chat template, and
generation_config.json with the ids that end a completion. Above: `policy`.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Mapping
from typing import Any

from notepad_jax.checkpoint.hf.fields import Fields, ImportProblem
from notepad_jax.checkpoint.hf.storage import quoted

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # gguf.TokenType
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _words(digits: str) -> dict[str, Any]:
    """The split of Qwen 2 and Llama 3: words with what stands before them, digits, the rest."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    return {"type": "Sequence", "pretokenizers": [split, _BYTES | {"use_regex": False}]}


_DIGITS = {"type": "Digits", "individual_digits": True}
# What differs between them in tokenizer.json: pre_tokenizer, normalizer, and of the model's.
SPLITS: Mapping[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "gpt-2": (_BYTES, None, False),
    "smollm": ({"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]}, None, False),
    "qwen2": (_words(r"\p{N}"), {"type": "NFC"}, False),
    "llama-bpe": (_words(r"\p{N}{1,3}"), None, True),
}


def files(metadata: Fields) -> dict[str, bytes]:
    """Returns tokenizer.json, tokenizer_config.json and generation_config.json.

    Raises ImportProblem where there is no tokenizer, or one of a kind that is not known.
    """
    tokens = _tokens(metadata)
    named = _named(metadata, tokens)
    made = {
        "tokenizer.json": _tokenizer(metadata, tokens, named),
        "tokenizer_config.json": _config(metadata, tokens, named),
        "generation_config.json": _generation(named),
    }
    return {
        name: (json.dumps(text, ensure_ascii=False, indent=1) + "\n").encode()
        for name, text in made.items()
    }


def _tokens(metadata: Fields) -> list[str]:
    kind = metadata.word("tokenizer.ggml.model", "")
    if not kind:
        raise ImportProblem(
            f"{metadata.where} has no tokenizer (tokenizer.ggml.model); take a file of a language "
            f"model that was converted whole"
        )
    if kind != "gpt2":
        raise ImportProblem(
            f"{metadata.where} has a tokenizer of kind {quoted(kind)}; read is 'gpt2' (byte-level "
            f"BPE), so import the model's Hugging Face folder"
        )
    tokens = [*metadata.words("tokenizer.ggml.tokens")]
    if not tokens:
        raise ImportProblem(f"{metadata.where} has no tokens (tokenizer.ggml.tokens)")
    (twice, times), *_ = collections.Counter(tokens).most_common(1)
    if times > 1:
        raise ImportProblem(f"{metadata.where} has the token {quoted(twice)} twice; it is damaged")
    return tokens


def _named(metadata: Fields, tokens: list[str]) -> dict[str, int]:
    """The ids that the metadata name: bos, eos, eot (end of turn), eom, unknown, padding."""
    found = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if metadata.said(key):
            found[name] = metadata.size(key, least=0)
            if found[name] >= len(tokens):
                raise ImportProblem(
                    f"{metadata.where}: {key} is {found[name]}, and there are {len(tokens)} tokens"
                )
    return found


def _tokenizer(metadata: Fields, tokens: list[str], named: Mapping[str, int]) -> dict[str, Any]:
    name = metadata.word("tokenizer.ggml.pre", "")
    if name not in SPLITS:
        raise ImportProblem(
            f"{metadata.where} splits text by {quoted(name)} (tokenizer.ggml.pre), which is not "
            f"known; known are {', '.join(SPLITS)}"
        )
    types = metadata.text.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ImportProblem(
            f"{metadata.where}: tokenizer.ggml.token_type has not one number for each of the "
            f"{len(tokens):,} tokens"
        )
    strange = {*types} - {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED}
    if strange:
        raise ImportProblem(
            f"{metadata.where}: tokenizer.ggml.token_type holds {quoted(min(strange))}, which a "
            f"byte-level tokenizer does not have"
        )
    # What ends a completion is no ordinary text, whatever its type says; llama.cpp's rule, too.
    control = {named[end] for end in ("bos", "eos", "eot", "eom") if end in named}
    added = [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind != USER_DEFINED or number in control}
        for number, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) or number in control
    ]  # fmt: skip
    split, normalizer, whole_words = SPLITS[name]
    kinds = zip(tokens, types, strict=True)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": split,
        "post_processor": _around(metadata, tokens, named),
        "decoder": _BYTES | {"add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": whole_words,
            # Rows of the embedding beyond the tokenizer's have a name here, and no text.
            "vocab": {token: n for n, (token, kind) in enumerate(kinds) if kind != UNUSED},
            "merges": [*metadata.words("tokenizer.ggml.merges")],
        },
    }


def _around(metadata: Fields, tokens: list[str], named: Mapping[str, int]) -> Any:
    """What other programs put around a text; our prompts have their template's."""
    before = metadata.flag("tokenizer.ggml.add_bos_token") and "bos" in named
    after = metadata.flag("tokenizer.ggml.add_eos_token") and "eos" in named
    if not before and not after:
        return None
    ends = [("bos", before), ("eos", after)]
    special = [named[end] for end, asked in ends if asked]
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    single = [{"SpecialToken": {"id": tokens[named["bos"]], "type_id": 0}}] * before + text
    single += [{"SpecialToken": {"id": tokens[named["eos"]], "type_id": 0}}] * after
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            tokens[n]: {"id": tokens[n], "ids": [n], "tokens": [tokens[n]]} for n in special
        },
    }


def _config(metadata: Fields, tokens: list[str], named: Mapping[str, int]) -> dict[str, Any]:
    called = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    written: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{called[name]}_token": tokens[n] for name, n in named.items() if name in called},
        **{
            key: metadata.flag(f"tokenizer.ggml.{key}")
            for key in ("add_bos_token", "add_eos_token")
            if metadata.said(f"tokenizer.ggml.{key}")
        },
    }
    if template := metadata.word("tokenizer.chat_template", ""):
        written["chat_template"] = template
    return written


def _generation(named: Mapping[str, int]) -> dict[str, Any]:
    ends = [*dict.fromkeys(named[name] for name in ("eos", "eot", "eom") if name in named)]
    written: dict[str, Any] = {}
    if "bos" in named:
        written["bos_token_id"] = named["bos"]
    if ends:
        written["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if "padding" in named:
        written["pad_token_id"] = named["padding"]
    return written
