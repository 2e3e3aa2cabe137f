"""Tiny `tokenizers` folders of every kind that models ship, trained in milliseconds.

`folder(tmp_path, kind)` writes tokenizer.json and its neighbours. The byte-level kinds
differ in the pattern that splits text before merging; `prepend` and `metaspace` are how a
sentencepiece BPE looks after its conversion.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")
SPECIAL += ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NOT_MARKED = ("<think>", "</think>", "<tool_call>")  # added tokens with special: false
CORPUS = (
    "the secret code of ann is red , and bob says that it is blue . nothing else\n"
    "user assistant system <|im_start|> <|im_end|> <s> </s> [INST] [/INST] <think> </think>\n"
    "    def read(chunk):\n        return memory + 12 345 # don't we're\n\n"
    "\u65e5\u672c\u8a9e\u306e\u6587\u3002\u4e2d\u6587\uff0c\u4e16\u754c\u3002 "
    "caf\u00e9 \U0001f600\n"
)
GROUPS_OF_DIGITS = {"qwen": r"\p{N}", "llama3": r"\p{N}{1,3}"}
KINDS = ("qwen", "llama3", "camel", "gpt2", "digits", "prepend", "metaspace")
BYTE_LEVEL = KINDS[:5]


def _pattern(digits: str) -> str:
    """Words with what stands before them, digits, punctuation, line breaks, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+"
        r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _camel() -> str:
    """Words cut where a capital follows a small letter; marks belong to words."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{upper}*{lower}+|{first}{upper}+{lower}*"
    return words + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    if kind == "digits":  # GPT-2's pattern after single digits, as SmolLM and StarCoder have it
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind in BYTE_LEVEL:
        pattern = _camel() if kind == "camel" else _pattern(GROUPS_OF_DIGITS[kind])
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    return pre_tokenizers.Metaspace(prepend_scheme="first", split=True)


@functools.cache
def _trained(kind: str) -> str:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = _pre_tokenizer(kind)
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind in BYTE_LEVEL else []
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([CORPUS] * 20, trainer)
    return made.to_str()


def spec(kind: str) -> dict[str, Any]:
    """A tokenizer.json as an object, free to be broken by a test."""
    made = json.loads(_trained(kind))
    model = made["model"]
    if kind == "llama3":
        model["ignore_merges"] = True
    if kind in ("gpt2", "digits"):  # as in GPT-2, where the pattern leaves the last break alone
        add_merges(made, ("\u010a", "\u010a"), ("\u010a\u010a", "\u010a\u010a"))
    made["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                       "use_regex": True}  # fmt: skip
    if kind not in BYTE_LEVEL:
        pieces = [*SPECIAL[:2], "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        pieces += [piece for piece in model["vocab"] if piece not in pieces]
        model["vocab"] = {piece: i for i, piece in enumerate(pieces)}
        model |= {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
        space = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        steps = [space, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
        made["decoder"] = {"type": "Sequence", "decoders": steps}
    if kind == "metaspace":
        made["pre_tokenizer"]["split"] = False
    if kind == "prepend":
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
        steps = [{"type": "Prepend", "prepend": "\u2581"}, space]
        made["normalizer"] = {"type": "Sequence", "normalizers": steps}
        made["pre_tokenizer"] = None
    names = (*SPECIAL, *(() if kind in BYTE_LEVEL else ("<unk>",)), *NOT_MARKED)
    vocab, free = model["vocab"], len(model["vocab"])
    for name in names:
        made["added_tokens"].append(
            {"id": vocab.get(name, free), "content": name, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False, "special": name not in NOT_MARKED}
        )  # fmt: skip
        free += name not in vocab
    return made


def add_merges(made: dict[str, Any], *merges: tuple[str, str]) -> None:
    """Teaches a tokenizer.json more merges, the strongest first, with all pieces they need.

    Added tokens move into the vocabulary: the library numbers those outside of it itself.
    """
    vocab = made["model"]["vocab"]
    vocab.update({token["content"]: token["id"] for token in made["added_tokens"]})
    for left, right in merges:
        for piece in (left, right, left + right):
            vocab.setdefault(piece, len(vocab))
    made["model"]["merges"][:0] = [list(pair) for pair in merges]


def folder(
    path: pathlib.Path,
    kind: str = "qwen",
    changed: dict[str, Any] | None = None,
    chat_template: Any = None,
    eos: str = "<|im_end|>",
) -> pathlib.Path:
    """Writes a model folder without weights and returns it."""
    path.mkdir(parents=True, exist_ok=True)
    made = spec(kind) if changed is None else changed
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    eos_token = {"__type": "AddedToken", "content": eos, **flags}  # one of the two spellings
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": eos_token}
    if chat_template is not None:
        config["chat_template"] = chat_template
    ids = {token.get("content"): token["id"] for token in made.get("added_tokens", ())}
    generation = {"eos_token_id": [ids[name] for name in (eos, "<|endoftext|>") if name in ids]}
    (path / "tokenizer.json").write_text(json.dumps(made), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (path / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return path
