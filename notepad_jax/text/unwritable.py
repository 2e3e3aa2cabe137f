"""Bytes for which a byte-level tokenizer has no piece, and what is written in their place."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

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
    if is_byte_level(spec):
        pieces = sorted(byte_alphabet(), key=byte_alphabet().get)
    else:
        pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return [byte for byte, piece in enumerate(pieces) if piece not in spec["model"]["vocab"]]


def unwritable(spec: Mapping[str, Any], path: pathlib.Path) -> np.ndarray:
    """Says of every code point whether the tokenizer has no pieces for it: bool [0x110000].

    Raises ValueError where one of plain ASCII is among them.
    """
    byte_level, vocab = is_byte_level(spec), spec["model"]["vocab"]
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


def replacing(spec: Mapping[str, Any], lost: np.ndarray, instead: str) -> dict[str, Any]:
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


def away_from(lost: np.ndarray, border: re.Pattern[str]) -> re.Pattern[str]:
    """The places of `border` not beside a lost character: what stands there is no letter now."""
    marked = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _ranges(lost))
    return re.compile(f"(?:{border.pattern})(?<![{marked}])(?![{marked}])")


def loss(spec: Mapping[str, Any], instead: str, path: pathlib.Path) -> str:
    """The line that says what is lost."""
    never = {0xC0, 0xC1, *range(0xF5, 0x100)}
    missing = [f"{byte:02x}" for byte in _missing_bytes(spec) if byte not in never]
    named = " ".join(missing[:12]) + (" ..." if missing[12:] else "")
    what = "U+FFFD" if instead == "\ufffd" else "'?', as it cannot write U+FFFD either"
    return (
        f"{path} has no piece for {len(missing)} of the 243 bytes of UTF-8 ({named}): characters "
        f"that need them are read as {what}"
    )


def is_byte_level(spec: Mapping[str, Any]) -> bool:
    return "ByteLevel" in _types(spec.get("pre_tokenizer"))


def _types(part: Any) -> set[str]:
    if part is None:
        return set()
    steps = [*part.get("pretokenizers", ()), *part.get("normalizers", ())]
    return {part["type"]}.union(*map(_types, steps))
