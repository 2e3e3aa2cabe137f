"""A BPE tokenizer.json whose added tokens never come out of a document.

`tokenizers` looks for added tokens in every text, and its switch `encode_special_tokens`
leaves out those that are not marked special (Qwen's `<think>`); so documents go through a
second tokenizer from which they were removed, vocabulary and merges included. Checks at
load say no to what cannot keep the promises of `tokenizer`. Some published tokenizers have no
piece for a byte that their corpus lacked, and the library drops what needs it without a word:
there a character that cannot be written is read as U+FFFD (`unwritable`). A neighbour of
sentencepiece_tokenizer; below: token_blocks, controls, model_folder and tokenizers.
"""

from __future__ import annotations

import json
import pathlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers

from notepad_jax.text.controls import CONTROL_LOOK, control_id
from notepad_jax.text.model_folder import read_json, stop_ids
from notepad_jax.text.token_blocks import BYTE_LEVEL_BORDERS, KEEPING_BORDER, blocks, well_formed
from notepad_jax.text.unwritable import away_from, is_byte_level, loss, replacing, unwritable
from notepad_jax.types import Tokens, tokens


class HuggingFaceTokenizer:
    """A BPE tokenizer.json, by bytes, that keeps added tokens out of ordinary text.

    Every added token is a control piece, whether it is marked special or not, except those
    of white space alone, which some models use for runs of spaces. `stop_ids` are the
    `eos_token` of tokenizer_config.json and the `eos_token_id` of generation_config.json,
    in this order. Characters that it cannot write are read as U+FFFD, which `say` is told in a
    line. Raises ValueError for missing or broken files, for a model that is not BPE or cannot
    write plain ASCII, and for one that cannot be streamed.
    """

    def __init__(
        self, folder: str | pathlib.Path, say: Callable[[str], None] = warnings.warn
    ) -> None:
        folder = pathlib.Path(folder)
        self.path = folder / "tokenizer.json"
        spec = read_json(self.path)
        _check_is_bpe(spec, self.path)
        self._template = _load(_bare(spec), self.path)
        _check_added_ids(spec, self._template, self.path)
        self.controls: Mapping[str, int] = {
            token["content"]: token["id"] for token in _added(spec, blank=False)
        }
        ordinary = _without(spec, self.controls)
        lost = unwritable(ordinary, self.path)
        self.byte_level = is_byte_level(ordinary)
        borders = BYTE_LEVEL_BORDERS if self.byte_level else (KEEPING_BORDER,)
        if lost.any():
            instead = "?" if lost[0xFFFD] else "\ufffd"
            say(loss(ordinary, instead, self.path))
            ordinary = replacing(ordinary, lost, instead)
            self._template = _load(replacing(_bare(spec), lost, instead), self.path)
            borders = (away_from(lost, border) for border in borders)  # they compile for long
        self._start = _load(ordinary, self.path)
        middle = _without_prefix(ordinary)
        same = middle == ordinary
        self._middle = self._start if same else _load(middle, self.path)
        self._border = _border(self._start, self._middle, borders, self.path)
        self._known = frozenset(self._template.get_vocab(with_added_tokens=True).values())
        self.vocab_size: int = max(self._known) + 1
        self.stop_ids: tuple[int, ...] = stop_ids(folder, self.controls, self._known)

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a control piece."""
        return tokens(np.concatenate([tokens(), *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        at most `LONGEST_BLOCK` characters and one piece are held at a time.
        """
        encoder = self._start
        for block, _ in blocks(pieces, self._border):
            ids = encoder.encode(well_formed(block), add_special_tokens=False).ids
            encoder = self._middle
            if ids:
                yield tokens(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens vanish, unknown ids become U+FFFD."""
        runs: list[list[int]] = [[]]
        for i in map(int, ids):
            runs[-1].append(i) if i in self._known else runs.append([])
        return "\ufffd".join(self._template.decode(run, skip_special_tokens=True) for run in runs)

    def pieces(self) -> list[str]:
        """Returns the vocabulary: the piece of each id, "" where there is none."""
        found = [""] * self.vocab_size
        for piece, i in self._template.get_vocab(with_added_tokens=True).items():
            found[i] = piece
        return found

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""
        return control_id(self.controls, name, self.path)

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we or the model's makers wrote: control pieces are honoured.

        The ids are the library's own for this text, without what its post-processor adds.
        Raises ValueError where `<|name|>` is not a control piece of this tokenizer.
        """
        for name in CONTROL_LOOK.findall(text):
            self.control_id(name)
        return tokens(self._template.encode(well_formed(text), add_special_tokens=False).ids)


def added_to_unigram(path: pathlib.Path) -> dict[str, int] | None:
    """Returns the added tokens, text -> id, of a tokenizer.json of type Unigram; else None."""
    spec = read_json(path)
    model = spec.get("model")
    if not isinstance(model, dict) or model.get("type") != "Unigram":
        return None
    _load(spec, path)
    return {token["content"]: token["id"] for token in spec.get("added_tokens") or []}


def _added(spec: Mapping[str, Any], blank: bool) -> list[dict[str, Any]]:
    """The added tokens of white space alone, or the others."""
    added = spec.get("added_tokens") or []
    return [token for token in added if blank is not bool(token["content"].strip(_BLANKS))]


_BLANKS = " \t\r\n\u2581"


def _check_added_ids(
    spec: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, path: pathlib.Path
) -> None:
    """The library numbers added tokens itself and only warns if the file says otherwise."""
    for token in spec.get("added_tokens") or []:
        found = tokenizer.token_to_id(token["content"])
        if found != token["id"]:
            raise ValueError(
                f"{path} gives {token['content']!r} the id {token['id']}, and tokenizers reads "
                f"it as {found}; the file was edited by hand or is damaged, copy it again"
            )


def _load(spec: Mapping[str, Any], path: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the Rust library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json that tokenizers reads: {error}") from None


def _bare(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer without what adds, cuts, pads or draws tokens at random."""
    model = {**spec["model"], "dropout": None}
    return {**spec, "model": model, "post_processor": None, "truncation": None, "padding": None}


def _without(spec: Mapping[str, Any], controls: Mapping[str, int]) -> dict[str, Any]:
    """The same tokenizer, unable to produce a control piece.

    They leave the vocabulary and the merges too: `ignore_merges` looks whole words up
    there. Models that write every byte need no unknown token, so that leaves as well.
    """
    model, blanks = _bare(spec)["model"], _added(spec, blank=True)
    banned = {name for name in controls if name in model["vocab"]}
    vocab = {piece: i for piece, i in model["vocab"].items() if piece not in banned}
    vocab |= {token["content"]: token["id"] for token in blanks}  # or they would be renumbered
    merges = model["merges"]
    if banned:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
        merges = [[a, b] for a, b in pairs if not {a, b, a + b} & banned]
    model |= {"vocab": vocab, "merges": merges, "unk_token": None}
    return {**_bare(spec), "added_tokens": blanks, "model": model}


def _without_prefix(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer in the middle of a text: no space is put in front."""
    changed = dict(spec)
    for name in ("normalizer", "pre_tokenizer"):
        changed[name] = _no_prefix(spec.get(name))
    return changed


def _no_prefix(part: Any) -> Any:
    if part is None or part["type"] == "Prepend":
        return None
    changed = dict(part)
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            kept = [_no_prefix(step) for step in part[steps]]
            changed[steps] = [step for step in kept if step is not None]
    if part["type"] == "ByteLevel" and part.get("add_prefix_space"):
        changed["add_prefix_space"] = False
    if part["type"] == "Metaspace":
        changed.pop("add_prefix_space", None)  # the older spelling of prepend_scheme
        changed["prepend_scheme"] = "never"
    return changed


def _check_is_bpe(spec: Mapping[str, Any], path: pathlib.Path) -> None:
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else "nothing"
    if kind != "BPE":
        raise ValueError(
            f"{path} holds a model of type {kind}, and only BPE is read from tokenizer.json; "
            "if the folder has a tokenizer.model, remove tokenizer.json to use that"
        )


# ---------------------------------------------------------------- borders

_BYTE_LEVEL = tokenizers.decoders.ByteLevel()
_PROBE = (
    "It's a test: 3.14 + 2,718 = x_1! (no) \u201cquotes\u201d don't stop\n"
    "Line two  has   runs    of spaces \t and tabs\n\n\nThird\r\nFourth a/b //c http://x.y z? \n"
    "def f(x):\n    return x ** 2 # ok\n\u65e5\u672c\u8a9e\u3001\u4e2d\u6587\u3002\u4e16\u754c "
    "caf\u00e9 na\u00efve e\u0301 \U0001f600\u200d\U0001f525 \u0645\u0631\u062d\u0628\u0627 "
    "12 345 6789 end.\nLast one 's 're A B\n"
    + "".join(f"a{' ' * (n % 2)}{breaks * n}" for breaks in ("\n", "\r\n") for n in range(1, 9))
    + "b"
)


def _border(
    start: tokenizers.Tokenizer,
    middle: tokenizers.Tokenizer,
    borders: Iterable[re.Pattern[str]],
    path: pathlib.Path,
) -> re.Pattern[str]:
    """Returns the first pattern at whose places texts may be cut; ValueError if none is."""
    problems = []
    for border in borders:
        problem = _across(start, middle, border)
        if problem is None:
            return border
        problems.append(problem)
    raise ValueError(
        f"{path} {problems[-1]}; such tokenizers cannot be streamed, and documents are read as "
        f"streams: take a model with another tokenizer"
    )


def _across(
    start: tokenizers.Tokenizer, middle: tokenizers.Tokenizer, border: re.Pattern[str]
) -> str | None:
    """Says which piece reaches across a border; they are found one by one and by a probe."""
    whole = start.encode(_PROBE, add_special_tokens=False).ids
    for match in border.finditer(_PROBE):
        first, second = _PROBE[: match.start()], _PROBE[match.start() :]
        ids = start.encode(first, add_special_tokens=False).ids
        if ids + middle.encode(second, add_special_tokens=False).ids != whole:
            return (
                f"encodes {first[-8:] + second[:8]!r} otherwise when it is cut between "
                f"{first[-1]!r} and {second[0]!r}"
            )
    for piece in start.get_vocab(with_added_tokens=False):
        text = _spelled(piece, border)
        spans = any(1 < found.start() <= len(text) for found in border.finditer(f"a{text}a"))
        if spans and _is_one_word(start, text):
            return f"has the piece {piece!r} that spans words"
    return None


def _spelled(piece: str, border: re.Pattern[str]) -> str:
    """The text that a piece of the vocabulary stands for."""
    if border is KEEPING_BORDER:
        return piece.replace("\u2581", " ")
    if piece.isascii():
        return piece
    return _BYTE_LEVEL.decode([piece])


def _is_one_word(tokenizer: tokenizers.Tokenizer, text: str) -> bool:
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return True
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) < 2
