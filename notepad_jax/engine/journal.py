"""The journal of a rollout under way: its finished turns in a file, JSON lines in segments.

The first segment says whose turns they are; each later one has some turns a line, their ids and
logprobs bit by bit (2 us a turn of the quick start; a line each took 6 us). A segment ends in a
line that has the SHA-256 of the one before it and of all in between, so each vouches for everything
above, and appending reads no more than the end. What is appended is synced, and counts when its
last line is whole: a kill loses the segment that was being written, and nothing else. A file of
which a whole segment was changed since is refused. Lines are made and read one at a time: a rollout
has tens of thousands of turns. Above: training.partial_rollout; below: `replay`, whose turns they
are.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from notepad_jax.engine.replay import Given
from notepad_jax.telemetry.identity import write_blocks

TOGETHER = 512  # turns a line, at most
IDS, LOGPROBS = "<i4", "<f4"  # as they are written, on any machine
SEAL = b'{"sha256": '  # how the last line of a segment begins
LONGEST_SEAL = 128  # bytes

Turns = Mapping[int, Given]  # by seed


def begin(path: Path, header: Mapping[str, Any], turns: Turns | None = None) -> None:
    """Writes or replaces the file atomically; whatever goes wrong, it is what it was."""
    write_blocks(path, _lines(header, turns or {}))


def append(path: Path, turns: Turns) -> None:
    """Adds a segment to a file that was begun, and waits until it is on its disk.

    Raises ValueError where the file does not end with a whole segment. Whatever goes wrong, the
    segments that were there are.
    """
    with path.open("r+b", buffering=0) as file:  # nothing is left to be written when it is closed
        seal, size = _last_seal(file), file.seek(0, os.SEEK_END)
        if seal is None:
            raise ValueError(f"{path} does not end with a whole segment")
        left = memoryview(b"".join(_sealed(_told(turns), seal)))
        try:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
        except OSError:  # a full disk
            file.truncate(size)
            raise


def read(path: Path) -> tuple[dict[str, Any], dict[int, Given]]:
    """Returns (header, turns by seed) of the segments that are whole.

    Raises ValueError in one line for a file that was changed, has no whole segment or cannot be
    read.
    """
    try:
        with path.open("rb") as file:
            return _read(file, torn=True)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read ({problem.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is cut off, or has other bytes than were saved") from None


def is_torn(path: Path) -> bool:
    """Returns whether a file that can be read ends in a segment that a kill cut."""
    with path.open("rb") as file:
        return _last_seal(file) is None


def encoded(header: Mapping[str, Any], turns: Turns) -> bytes:
    """Returns what `begin` writes, as the content of an object."""
    return b"".join(_lines(header, turns))


def decoded(content: bytes) -> tuple[dict[str, Any], dict[int, Given]]:
    """Returns (header, turns by seed); raises ValueError for what is not whole."""
    try:
        return _read(io.BytesIO(content), torn=False)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("the turns are cut off, or have other bytes than were saved") from None


def _last_seal(file: BinaryIO) -> bytes | None:
    """Returns the last line, if a segment ends with it."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_SEAL))
    last = (file.read().splitlines(keepends=True) or [b""])[-1]
    return last if last.startswith(SEAL) and last.endswith(b"\n") else None


def _lines(header: Mapping[str, Any], turns: Turns) -> Iterator[bytes]:
    *first, seal = _sealed([_json({"header": header})], b"")
    yield from (*first, seal)
    if turns:
        yield from _sealed(_told(turns), seal)


def _sealed(lines: Iterable[bytes], before: bytes) -> Iterator[bytes]:
    """Yields a segment, behind one that ended with the line `before`."""
    digest = hashlib.sha256(before)
    for line in lines:
        digest.update(line)
        yield line
    yield _json({"sha256": digest.hexdigest()})


def _told(turns: Turns) -> Iterator[bytes]:
    left = iter(turns.items())
    while some := dict(itertools.islice(left, TOGETHER)):
        yield _json(
            {
                "seeds": list(some),
                "asked": [turn.asked for turn in some.values()],
                "pieces": [turn.pieces for turn in some.values()],
                "ids": text_of([turn.tokens for turn in some.values()], IDS),
                "logprobs": text_of([turn.logprobs for turn in some.values()], LOGPROBS),
            }
        )


def _read(file: Iterable[bytes], torn: bool) -> tuple[dict[str, Any], dict[int, Given]]:
    """Reads all segments; a last one that a kill cut is passed over where it may be `torn`."""
    first, *others = _segments(file, torn)
    (header,) = first
    every = (line for segment in others for line in segment)
    return header["header"], {seed: turn for line in every for seed, turn in line.items()}


def _segments(file: Iterable[bytes], torn: bool) -> Iterator[list[dict[Any, Any]]]:
    """Yields the lines of each segment: the header's, or turns by seed."""
    digest, lines, cut = hashlib.sha256(), [], False
    for line in file:
        cut = not line.endswith(b"\n")
        if cut:
            break
        if line.startswith(SEAL):
            if line != _json({"sha256": digest.hexdigest()}):
                raise ValueError("not what was written")
            yield lines
            digest, lines = hashlib.sha256(line), []
        else:
            digest.update(line)
            lines.append(_understood(json.loads(line)))
    if (cut or lines) and not torn:
        raise ValueError("not whole")


def _understood(told: dict[str, Any]) -> dict[Any, Any]:
    if "header" in told:
        return told
    ids, logprobs = array_of(told["ids"], IDS), array_of(told["logprobs"], LOGPROBS)
    ends = list(itertools.accumulate(map(sum, told["pieces"])))
    if not ends[-1] == len(ids) == len(logprobs):
        raise ValueError("not what was written")
    turns = {}
    for seed, asked, pieces, end in zip(
        told["seeds"], told["asked"], told["pieces"], ends, strict=True
    ):
        here = slice(end - sum(pieces), end)
        turns[seed] = Given(asked, ids[here], logprobs[here], tuple(pieces))
    return turns


def text_of(arrays: Sequence[np.ndarray], dtype: str) -> str:
    """Returns arrays, one behind another, as text, bit by bit; `dtype` is IDS or LOGPROBS."""
    return base64.b64encode(np.concatenate(arrays).astype(dtype).tobytes()).decode("ascii")


def array_of(text: str, dtype: str) -> np.ndarray:
    """Returns the array that is in a text."""
    return np.frombuffer(base64.b64decode(text), dtype).astype(dtype[1:])


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode("ascii")
