"""A BPE tokenizer.json whose added tokens never come out of a document.

`tokenizers` looks for added tokens in every text, and its switch `encode_special_tokens`
leaves out those that are not marked special (Qwen's `<think>`); so documents go through a
second tokenizer from which they were removed, vocabulary and merges included. Checks at
load say no to what cannot keep the promises of `tokenizer`. Some published tokenizers have no
piece for a byte that their corpus lacked, and the library drops what needs it without a word:
there a character that cannot be written is read as U+FFFD. A neighbour of
sentencepiece_tokenizer; below: token_blocks, controls, model_folder and tokenizers.
"""

from __future__ import annotations

import json
import pathlib
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers

from notepad_jax.text.controls import CONTROL_LOOK, control_id
from notepad_jax.text.model_folder import read_json, stop_ids
from notepad_jax.text.token_blocks import BYTE_LEVEL_BORDERS, KEEPING_BORDER, blocks, well_formed
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
        lost = _unwritable(ordinary, self.path)
        self.byte_level = _is_byte_level(ordinary)
        borders = BYTE_LEVEL_BORDERS if self.byte_level else (KEEPING_BORDER,)
        if lost.any():
            instead = "?" if lost[0xFFFD] else "\ufffd"
            say(_loss(ordinary, instead, self.path))
            ordinary = _replacing(ordinary, lost, instead)
            self._template = _load(_replacing(_bare(spec), lost, instead), self.path)
            borders = [_away_from(lost, border) for border in borders]
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
        """Returns what each id is called in the vocabulary; "" where there is none."""
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


def _types(part: Any) -> set[str]:
    if part is None:
        return set()
    steps = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {part["type"]}.union(*map(_types, steps))


def _check_is_bpe(spec: Mapping[str, Any], path: pathlib.Path) -> None:
    model = spec.get("model")
    kind = model.get("type", "BPE") if isinstance(model, dict) else "nothing"
    if kind != "BPE":
        raise ValueError(
            f"{path} holds a model of type {kind}, and only BPE is read from tokenizer.json; "
            "if the folder has a tokenizer.model, remove tokenizer.json to use that"
        )


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    return "ByteLevel" in _types(spec.get("pre_tokenizer"))


# ---------------------------------------------------------------- bytes without a piece

MOST_RANGES = 10_000  # in one class of a pattern of Oniguruma, by which tokenizers matches
_NEEDED = "".join(map(chr, range(0x20, 0x7F))) + "\t\n"  # what any text may hold: never replaced


def byte_alphabet() -> dict[str, int]:
    """Returns GPT-2's alphabet: a byte is its own Latin-1 character where that is seen in print,
    and the others are numbered from U+0100 on."""
    alone = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(256)} - {*alone})
    return {chr(b): b for b in alone} | {chr(256 + n): b for n, b in enumerate(others)}


def _missing_bytes(spec: Mapping[str, Any]) -> list[int]:
    """The bytes that no piece of the vocabulary writes; some of them never occur in UTF-8."""
    if _is_byte_level(spec):
        pieces = sorted(byte_alphabet(), key=byte_alphabet().get)
    else:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return [byte for byte, piece in enumerate(pieces) if piece not in spec["model"]["vocab"]]


def _unwritable(spec: Mapping[str, Any], path: pathlib.Path) -> np.ndarray:
    """Says of every code point whether the tokenizer has no pieces for it: bool [0x110000].

    Raises ValueError where one of plain ASCII is among them.
    """
    byte_level, vocab = _is_byte_level(spec), spec["model"]["vocab"]
    if not byte_level and not spec["model"].get("byte_fallback"):
        raise ValueError(
            f"{path} cannot write every text: it is neither byte-level nor does it fall back "
            "to bytes; use another tokenizer"
        )
    lost = _written_with(_missing_bytes(spec))
    if not byte_level:  # bytes are needed only for what is no piece by itself
        alone = [piece for piece in vocab if len(piece) == 1]
        lost[[ord(" " if piece == "\u2581" else piece) for piece in alone]] = False
    needed = [character for character in _NEEDED if lost[ord(character)]]
    if needed:
        raise ValueError(
            f"{path} cannot write plain English: it has no ordinary piece for {needed[0]!r}"
            f"{f' and {len(needed) - 1} more' if needed[1:] else ''} of the {len(_NEEDED)} "
            f"characters of plain text; use another tokenizer"
        )
    return lost


def _written_with(some: Collection[int]) -> np.ndarray:
    """Says of every code point whether its UTF-8 has one of `some` bytes: bool [0x110000]."""
    is_one = np.zeros(256, bool)
    is_one[[*some]] = True
    found = np.zeros(0x110000, bool)
    for start, stop, lead, tails in (
        (0, 0x80, 0, 0), (0x80, 0x800, 0xC0, 1), (0x800, 0xD800, 0xE0, 2),
        (0xE000, 0x10000, 0xE0, 2), (0x10000, 0x110000, 0xF0, 3),
    ):  # fmt: skip
        point = np.arange(start, stop)
        hit = is_one[lead | point >> 6 * tails]
        for tail in range(tails):
            hit |= is_one[0x80 | point >> 6 * tail & 0x3F]
        found[start:stop] = hit
    return found


def _ranges(lost: np.ndarray) -> list[tuple[int, int]]:
    """The code points that are marked, as first and last of each run."""
    edges = np.flatnonzero(np.diff(lost, prepend=False, append=False)).tolist()
    return [(start, stop - 1) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _replacing(spec: Mapping[str, Any], lost: np.ndarray, instead: str) -> dict[str, Any]:
    """The same tokenizer, in which the last step of normalizing writes `instead` for `lost`.

    There it costs nothing that can be measured, and sees what the other steps have made.
    """
    runs = [f"\\x{{{first:x}}}-\\x{{{last:x}}}" for first, last in _ranges(lost)]
    classes = ["".join(runs[n : n + MOST_RANGES]) for n in range(0, len(runs), MOST_RANGES)]
    steps = [
        {"type": "Replace", "pattern": {"Regex": f"[{marked}]"}, "content": instead}
        for marked in classes
    ]
    before = [spec["normalizer"]] if spec.get("normalizer") else []
    return {**spec, "normalizer": {"type": "Sequence", "normalizers": [*before, *steps]}}


def _away_from(lost: np.ndarray, border: re.Pattern[str]) -> re.Pattern[str]:
    """The places of `border` not beside a lost character: what stands there is no letter now."""
    marked = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _ranges(lost))
    return re.compile(f"(?:{border.pattern})(?<![{marked}])(?![{marked}])")


def _loss(spec: Mapping[str, Any], instead: str, path: pathlib.Path) -> str:
    """The line that says what is lost."""
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    missing = [f"{byte:02x}" for byte in _missing_bytes(spec) if byte not in never]
    named = " ".join(missing[:12]) + (" ..." if missing[12:] else "")
    what = "U+FFFD" if instead == "\ufffd" else "'?', as it cannot write U+FFFD either"
    return (
        f"{path} has no piece for {len(missing)} of the 243 bytes of UTF-8 ({named}): characters "
        f"that need them are read as {what}"
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
    borders: Sequence[re.Pattern[str]],
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
