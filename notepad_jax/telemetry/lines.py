"""Lines of JSON that carry a digest of themselves, so that a changed one is known from its bytes.

`{"step": 3, "reward": 0.5, "digest": "1c0f2b9e64a07d35"}`: the digest is a line's last field and
covers what stands before it. A file in which places count names the place there as well
(`"digest": "12:1c0f..."`, line 12 counted from 0), so that a line which is missing is known, too.
Lines of earlier versions have none and are read as they are, up to the first that has one.
Above: metrics, reading.trace, training.record and training.check.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FIELD = "digest"
LONGEST = 80  # bytes of a line's end among which the digest is
_END = re.compile(rb', "digest": "(?:(\d+):)?([0-9a-f]{16})"\}\n$')


class Seal:
    """The digest of a line that is written piece by piece: all of it but the last brace."""

    def __init__(self, place: int | None = None) -> None:
        self._place = "" if place is None else f"{place}:"
        self._hash = hashlib.sha256(self._place.encode())

    def add(self, piece: bytes) -> bytes:
        """Takes in a piece, and returns it."""
        self._hash.update(piece)
        return piece

    def end(self) -> bytes:
        """Returns the end of the line."""
        return f', "{FIELD}": "{self._place}{self._hash.hexdigest()[:16]}"}}\n'.encode()


def sealed(values: Mapping[str, Any]) -> bytes:
    """Returns an object as a line with its digest."""
    seal = Seal()
    return seal.add(json.dumps(values).encode("ascii")[:-1]) + seal.end()


def place_of(line: bytes) -> tuple[bool, int | None]:
    """Returns whether a line has a digest, and the place that it names.

    Raises ValueError for one whose digest is another's.
    """
    end = _END.search(line[-LONGEST:])
    if end is None:
        if _had_one(line[-LONGEST:]):
            raise ValueError("its digest has other bytes than were written")
        return False, None
    seal = Seal(None if end[1] is None else int(end[1]))
    seal.add(line[: len(line) - len(end[0])])
    if seal.end() != end[0]:
        raise ValueError("it has other bytes than were written")
    return True, None if end[1] is None else int(end[1])


def _had_one(end: bytes) -> bool:
    """Whether some of the bytes of a digest are left, with or without a place."""
    pattern = ', "digest": "' + "0" * 16 + '"}\n'
    digits = set(b"0123456789abcdef")
    as_written = [
        byte in digits if known == ord("0") else byte == known
        for byte, known in zip(end[-len(pattern) :], pattern.encode(), strict=False)
    ]
    numbered = len(end) > 19 and end[-20:-19] == b":" and all(as_written[-19:])
    return b"digest" in end or numbered or sum(as_written) > len(pattern) - 4


def lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yields (number, line, its object without the digest) of the finished lines of a file.

    Numbers count from 1. The object is None where a line is damaged: by its digest, no object, or
    without a digest behind one that has one. A missing file has no lines, and a last line without
    its newline was never finished.
    """
    if not path.exists():
        return
    before = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                has, _ = place_of(line)
                found = json.loads(line)
                if not isinstance(found, dict) or (before and not has):
                    raise ValueError("no object, or it has lost its digest")
            except (ValueError, RecursionError):
                yield number, line, None
                continue
            before = before or has
            if has:
                del found[FIELD]
            yield number, line, found
