"""The turns of a rollout that was stopped, in a file: one JSON object a line.

The first line says whose turns they are and how many, the last one has the SHA-256 of all before
it; between them each turn has a line, its ids and logprobs bit by bit. The file takes its name
when all of it is on disk, and one that was cut or changed since is refused whole. Lines are made
and read one at a time: a rollout has tens of thousands. Above: training.partial_rollout; below:
`replay`, whose turns they are.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from notepad_jax.engine.replay import Given
from notepad_jax.telemetry.identity import write_blocks

IDS, LOGPROBS = "<i4", "<f4"  # as they are written, on any machine


def write(path: Path, header: Mapping[str, Any], turns: Mapping[int, Given]) -> None:
    """Writes or replaces the file at once; whatever goes wrong, it is what it was."""
    write_blocks(path, _lines(header, turns))


def read(path: Path) -> tuple[dict[str, Any], dict[int, Given]]:
    """Returns (header, turns by seed).

    Raises ValueError in one line for a file that is cut, changed or cannot be read.
    """
    try:
        with path.open("rb") as file:
            return _read(file)
    except OSError as problem:
        raise ValueError(f"{path} cannot be read ({problem.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is cut off, or has other bytes than were saved") from None


def encoded(header: Mapping[str, Any], turns: Mapping[int, Given]) -> bytes:
    """Returns the same as the content of an object."""
    return b"".join(_lines(header, turns))


def decoded(content: bytes) -> tuple[dict[str, Any], dict[int, Given]]:
    """Returns what was `encoded`; ValueError for what is cut or changed."""
    try:
        return _read(iter(content.splitlines(keepends=True)))
    except (KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("it is cut off, or has other bytes than were saved") from None


def _lines(header: Mapping[str, Any], turns: Mapping[int, Given]) -> Iterator[bytes]:
    digest = hashlib.sha256()
    for line in _contents(header, turns):
        digest.update(line)
        yield line
    yield _json({"sha256": digest.hexdigest()})


def _contents(header: Mapping[str, Any], turns: Mapping[int, Given]) -> Iterator[bytes]:
    yield _json({"header": header, "turns": len(turns)})
    for seed, turn in turns.items():
        yield _json(
            {
                "seed": seed,
                "asked": turn.asked,
                "ids": _text(turn.tokens, IDS),
                "logprobs": _text(turn.logprobs, LOGPROBS),
                "pieces": turn.pieces,
            }
        )


def _read(file: Iterator[bytes]) -> tuple[dict[str, Any], dict[int, Given]]:
    digest, turns = hashlib.sha256(), {}
    first = next(file, b"")
    digest.update(first)
    told = json.loads(first)
    for _ in range(told["turns"]):
        line = next(file, b"")
        digest.update(line)
        turn = json.loads(line)
        ids, logprobs = _array(turn["ids"], IDS), _array(turn["logprobs"], LOGPROBS)
        turns[turn["seed"]] = Given(turn["asked"], ids, logprobs, tuple(turn["pieces"]))
    if next(file, b"") != _json({"sha256": digest.hexdigest()}) or next(file, None) is not None:
        raise ValueError("not what was written")
    return told["header"], turns


def _text(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(dtype[1:])


def _json(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode("ascii")
