"""Finished readings on disk: the one trace format, of rollouts and of evaluations.

A file has one JSON line per reading: `{"reading": {...}, "memories": [...]}`. The first part says
whose reading it is and what came of it (its fields are the writer's), the second how the
memory changed on the way: one entry a change, so a memory that rests costs nothing. Where a
reading was kept token by token, `"turns": [...]` and `"pieces": {...}` follow (`turns`), and last
of all the line's number and digest (`telemetry.lines`), which a reader of it compares. A line
is written in one piece when its reading has ended, and until then its memories lie in a
`Spool`; so a killed writer leaves at most one cut line at the end, which is dropped when the
file is opened again. Opening also makes the index: where each line begins, and nothing else
of it stays in memory. `Trace` only reads, also while a process writes; `TraceFile` appends.
Above: rollout.archive, eval.readings and report.trace_page; beside: turns.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from notepad_jax.telemetry import lines
from notepad_jax.telemetry.identity import write_all

IN_MEMORY = 1 << 14  # bytes of an unfinished reading's memories before they go to a file
_HEAD, _REST = b'{"reading": ', b', "memories": ['


@dataclasses.dataclass(frozen=True)
class MemoryChange:
    """A change of the memory: after which chunk it became which text."""

    chunk: int
    memory: str
    tokens: int
    seconds: float | None = None  # since the reading began; None where no clock was read
    recall: float | None = None  # share of the evidence in this memory; None where none is known


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One turn, token by token: the exact prompt, and what the policy said to it."""

    chunk: int  # as `types.Turn`
    kind: str  # a value of types.TurnKind
    version: int  # of the policy
    finish: str  # a value of types.Finish
    shared: Sequence[int]  # the prompt's beginning; empty where `shared_of` says where it is
    shared_of: int | None  # the reading, by its number here, whose turn of this chunk has it
    tail: Sequence[int]  # the rest of the prompt
    tokens: Sequence[int]  # of the completion
    logprobs: Sequence[float]  # of the sampler, one a token of the completion
    proximal: Sequence[float] = ()  # of the trainer, the same; empty where it computed none
    level: int = 0  # as `types.Turn`
    round: int = 0
    unit: int = 0
    noted: bool | None = None  # as `sources.Source`
    reads: Sequence[int] = ()


class Spool:
    """A temporary file of the memories or the turns of a reading that has not ended."""

    def __init__(self, changes: Iterable[MemoryChange | TurnRecord] = ()) -> None:
        self.file: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)
        for change in changes:
            self.add(change)

    def add(self, change: MemoryChange | TurnRecord) -> None:
        """Appends a change, or a turn."""
        self.file.write((b", " if self.file.tell() else b"") + _json(dataclasses.asdict(change)))

    def blocks(self) -> Iterator[bytes]:
        """Yields everything that was added, and closes the spool."""
        with self.file as file:
            file.seek(0)
            while block := file.read(1 << 20):
                yield block

    def __getstate__(self) -> bytes:
        """Returns everything that was added, for another process, and closes the spool."""
        return b"".join(self.blocks())

    def __setstate__(self, added: bytes) -> None:
        self.__init__()
        self.file.write(added)


@dataclasses.dataclass(frozen=True)
class Kept:
    """The turns of a reading, and which text each of their tokens is."""

    turns: Spool
    pieces: Mapping[int, str]


@dataclasses.dataclass(frozen=True)
class Whole:
    """One reading of a trace: its result, its memories, and its turns if kept."""

    reading: Mapping[str, Any]
    memories: Sequence[MemoryChange]
    turns: Sequence[TurnRecord]  # empty where they were not kept
    pieces: Mapping[int, str]  # which text each token of the turns is


class Trace:
    """A trace file open for reading, by random access; a context manager.

    A reading is known by its number, counted from 0 in the order of writing. Raises ValueError
    naming file and line for a finished line that is no reading, OSError for a missing file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._read = self.path.open("rb")
        self._starts: list[int] = []
        self._end = 0
        for line in self._read:
            if not line.endswith(b"\n"):
                break  # its writer was killed in the middle of it
            self._starts.append(self._end)
            self._end += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._read.close()

    def readings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (number, what is known of the reading) of all."""
        for number in range(len(self)):
            yield number, self._parse(number, head=True)["reading"]

    def memories(self, number: int) -> Iterator[MemoryChange]:
        """Yields how the memory changed in reading `number`."""
        for change in self._parse(number)["memories"]:
            yield MemoryChange(**change)

    def whole(self, number: int) -> Whole:
        """Returns everything that is known of reading `number`."""
        line = self._parse(number)
        try:
            return Whole(
                _mapping(line["reading"]),
                [MemoryChange(**change) for change in line["memories"]],
                [TurnRecord(**turn) for turn in line.get("turns", ())],
                {int(i): str(text) for i, text in line.get("pieces", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self.broken(number) from None

    def _parse(self, number: int, head: bool = False) -> dict[str, Any]:
        self._read.seek(self._starts[number])
        line = self._read.readline()
        try:
            lines.place_of(line)
        except ValueError:
            raise self.damaged(number) from None
        try:
            if not line.startswith(_HEAD):
                raise ValueError("another beginning")
            if head:  # memories may be a thousand times as long
                found, _ = json.JSONDecoder().raw_decode(line.decode("ascii"), len(_HEAD))
                return {"reading": _mapping(found)}
            return json.loads(line)
        except ValueError:
            raise self.broken(number) from None

    def damaged(self, number: int) -> ValueError:
        """Returns the error that names a line which is not what was written."""
        return ValueError(
            f"line {number + 1} of {self.path} is damaged: it has other bytes than were written; "
            f"bring the file back from a copy, or take the line out"
        )

    def broken(self, number: int) -> ValueError:
        """Returns the error that names a line which is no reading."""
        return ValueError(
            f"line {number + 1} of {self.path} is no reading of this version; begin a new run"
        )


class TraceFile(Trace):
    """A trace to append to: made where it is missing, without a line that a kill cut."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a write could not finish is cut off again, and nothing comes after it.
        self._written = Path(path).open("ab", buffering=0)
        super().__init__(path)
        self._written.truncate(self._end)

    def __exit__(self, *_: object) -> None:
        self._written.close()
        super().__exit__()

    def add(self, reading: Mapping[str, Any], spool: Spool, kept: Kept | None = None) -> int:
        """Appends a reading and its memories, and its turns where they are kept; its number.

        A disk that is full raises OSError and leaves the file as it was.
        """
        start, seal = self._end, lines.Seal(len(self._starts))
        blocks = [(_HEAD, _json(reading), _REST), spool.blocks()]
        if kept is not None:
            pieces = (b'], "pieces": ', _json(kept.pieces))
            blocks += [(b'], "turns": [',), kept.turns.blocks(), pieces]
        else:
            blocks.append((b"]",))
        try:
            for block in itertools.chain.from_iterable(blocks):
                self._end += write_all(self._written, seal.add(block))
            self._end += write_all(self._written, seal.end())
        except BaseException:
            self._end = start
            self._written.truncate(start)
            raise
        self._starts.append(start)
        return len(self._starts) - 1

    def drop_from(self, unwanted: Callable[[Mapping[str, Any]], bool]) -> list[ValueError]:
        """Truncates the file where the first unwanted reading begins: a resumed run writes it anew.

        Returns what is damaged before it, and stays. What is damaged right before it goes as well.
        """
        damaged: dict[int, ValueError] = {}
        for number in range(len(self)):
            try:
                reading = self._parse(number, head=True)["reading"]
            except ValueError as problem:
                damaged[number] = problem
                continue
            if unwanted(reading):
                while damaged.pop(number - 1, None):
                    number -= 1
                self._end = self._starts[number]
                del self._starts[number:]
                self._written.truncate(self._end)
                break
        return list(damaged.values())


def check(path: Path) -> None:
    """Raises ValueError if a file that is there begins as no trace does."""
    with path.open("rb") as file:
        start = file.read(len(_HEAD))
    if not _HEAD.startswith(start):
        raise ValueError(f"{path} is no trace: its first line is no reading")


def _mapping(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def _json(value: object) -> bytes:
    # A policy may write lone surrogates; escaped, they are ASCII.
    return json.dumps(value, default=dict).encode("ascii")
