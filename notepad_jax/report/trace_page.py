"""The HTML page of a trace: readings turn by turn, in any browser, also opened from a disk.

A page is one HTML file and a folder of data. A page that lies on a disk may fetch nothing, but it
may run scripts that lie beside it; so the data are scripts of bounded size, each some named
parts, and the page loads a part when it is looked at. The index has a short row of
every reading. A reading's head has a short row of every change of its memory and of every turn
that was kept; what is long lies in blocks: memories, turns, and the text of tokens. So a reading
of thousands of turns opens at once. Data are ASCII JSON without a `<`, and the page's script
(`templates/trace_*.js`) puts them in as text alone.

The caller says where a page's files go (`Put`). Above: programs.traces; below:
reading.trace, scoring.recall (which fact a memory held), reading_tree and render.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from notepad_jax.reading import rounds
from notepad_jax.reading.trace import MemoryChange, Trace, TurnRecord, Whole
from notepad_jax.report import reading_tree, render
from notepad_jax.scoring.recall import Recall
from notepad_jax.types import Evidence

PAGE, DATA = "index.html", "data"  # the folder of the data, unless the caller names another
INDEX, PART = f"{DATA}/index.js", "{}/{}.js"
TEMPLATE = "trace.html"
BLOCK = 1 << 17  # bytes of data from which on another block or file is begun
SHORT = 200  # characters of a question or an answer in the index
OWNERS = 1024  # readings with prompts of their own that later ones may refer to

Put = Callable[[str, bytes], None]  # takes a file of the page: its path there, its content

# What the index has of a reading, in this order; None where its writer did not know it.
COLUMNS = (
    "file", "source", "question", "task", "group", "asked", "step", "sample", "status", "reward",
    "answer", "turns", "length", "version", "staleness", "advantage", "lost", "changes", "kept",
    "gap", "method",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TraceSource:
    """A trace file and its name on the page: "step_100"."""

    label: str
    trace: Trace


@dataclasses.dataclass(frozen=True)
class Made:
    """Counts of a page that was made."""

    readings: int
    turns: int  # of all readings
    files: int
    bytes: int


def make(
    put: Put, title: str, sources: Sequence[TraceSource],
    advance: Callable[[], None] = lambda: None, data: str = DATA,
) -> Made:  # fmt: skip
    """Makes a page of all readings of `sources`, one in memory at a time; calls `advance` at each.

    `data` is the folder of its data, beside it: a server has pages of several ages at a time.
    Raises ValueError for a line that is no reading, naming file and line.
    """
    shards, shared = _Shards(put, data), _Shared()
    rows: list[list[Any]] = []
    groups, asked = _Numbers(), _Numbers()
    turns = 0
    for number, source in enumerate(sources):
        first = len(rows)
        for k in range(len(source.trace)):
            whole = source.trace.whole(k)
            fields = _fields(whole.reading)
            file = _write_reading(shards, len(rows), whole, first, shared)
            group = (number, *(fields[name] for name in ("step", "ordinal", "method", "length")))
            same = (whole.reading.get("task_id"), fields["question"])
            fields |= {
                "file": file,
                "source": number,
                "question": str(fields["question"])[:SHORT],
                "answer": str(fields["answer"])[:SHORT],
                "group": groups[*group, *same],
                "asked": asked[same],
                "changes": len(whole.memories),
                "kept": bool(whole.turns),
                "gap": max((g for g in map(_gap, whole.turns) if g is not None), default=None),
            }
            rows.append([fields[name] for name in COLUMNS])
            turns += fields["turns"] or 0
            advance()
    shards.end()
    index = {
        "title": title,
        "sources": [source.label for source in sources],
        "columns": COLUMNS,
        "rows": rows,
    }
    shards.put(PART.format(data, "index"), _script("index", index))
    page = render.rendered(TEMPLATE, {"title": title, "data": data})
    shards.put(PAGE, page)
    return Made(len(rows), turns, shards.files, shards.bytes)


def _fields(reading: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what rollouts and evaluations call by different names, under one."""
    versions = reading.get("policy_versions") or [None]
    return {
        "question": reading.get("question", ""),
        "answer": reading.get("answer", ""),
        "task": reading.get("source"),
        "step": reading.get("step"),
        "ordinal": reading.get("ordinal"),
        "method": reading.get("method"),
        "sample": reading.get("sample", reading.get("repeat")),
        "status": reading.get("status") or _status(reading),
        "reward": reading.get("reward", reading.get("correct")),
        "turns": reading.get("turns"),
        "length": reading.get("length"),
        "version": min(versions),
        "staleness": reading.get("staleness"),
        "advantage": reading.get("advantage"),
        "lost": reading.get("lost") or None,
    }


def _status(reading: Mapping[str, Any]) -> str | None:
    """What came of a reading of an evaluation, in the words of a rollout."""
    if reading.get("failed"):
        return "failed"
    return {"stop": "answered", "length": "truncated", "cancelled": "no answer"}.get(
        reading.get("finish", "")
    )


# ---------------------------------------------------------------- one reading


def _write_reading(shards: _Shards, number: int, whole: Whole, first: int, shared: _Shared) -> int:
    """Writes reading `number` of the page; returns the file of its head.

    `first` is the number here of the first reading of its trace file.
    """
    texts = _Blocks(shards, f"m{number}")
    recall = Recall([Evidence(fact, 0.0) for fact in _facts(whole.reading)])
    changes = [[*_change(one, recall), *texts.add(one.memory)] for one in whole.memories]
    texts.end()
    details = _Blocks(shards, f"t{number}")
    lengths = shared.lengths(number, first, whole.turns)
    turns = [
        [*_turn(one, first, length), *details.add(_long(one))]
        for one, length in zip(whole.turns, lengths, strict=True)
    ]
    details.end()
    pieces = shards.add(f"p{number}", whole.pieces) if whole.pieces else None
    head = {
        "fields": whole.reading,
        "evidence": _facts(whole.reading),
        "changes": changes,
        "turns": turns,
        "memory_files": texts.files,
        "turn_files": details.files,
        "pieces": pieces,
        "rounds": reading_tree.pictures(whole.turns, _written(whole, recall)),
    }
    return shards.add(f"r{number}", head)


def _facts(reading: Mapping[str, Any]) -> list[str]:
    return [fact for fact in map(str, reading.get("evidence") or ()) if fact.strip()]


def _written(whole: Whole, recall: Recall) -> list[str]:
    """Returns of each turn which facts stand in what it wrote, as "101"; looks if it has notes."""

    def facts(turn: TurnRecord) -> str:
        if not turn.noted:
            return ""
        said = turn.tokens[:-1] if turn.finish == "stop" else turn.tokens
        recall.see("".join(whole.pieces.get(token, "") for token in said))
        return _flags(recall)

    return [facts(turn) for turn in whole.turns]


def _flags(recall: Recall) -> str:
    return "".join(str(int(one)) for one in recall.held)


def _change(change: MemoryChange, recall: Recall) -> list[Any]:
    """[chunk, tokens, seconds, share of the evidence, which facts as "101", the text's sum]."""
    recall.see(change.memory)
    held = _flags(recall)
    share = change.recall if recall.final is None else recall.final
    total = zlib.crc32(change.memory.encode("utf-8", "surrogatepass"))
    seconds = None if change.seconds is None else round(change.seconds, 2)
    return [change.chunk, change.tokens, seconds, share, held, total]


def _turn(turn: TurnRecord, first: int, shared: int) -> list[Any]:
    """[chunk, kind, version, finish, tokens, mean and least logprob, prompt tokens, whose, gap,
    where it stands that is not of the first pass]."""
    said = turn.logprobs
    mean = round(sum(said) / len(said), 4) if said else None
    whose = None if turn.shared_of is None else first + turn.shared_of
    length = shared + len(turn.tail)
    return [
        turn.chunk, turn.kind, turn.version, turn.finish, len(turn.tokens), mean,
        min(said, default=None), length, whose, _gap(turn),
        rounds.place(turn) if turn.kind == "update" else "",
    ]  # fmt: skip


def _gap(turn: TurnRecord) -> float | None:
    """How far the trainer's logprobs are from the sampler's, at most; None where it has none."""
    pairs = zip(turn.proximal, turn.logprobs, strict=False)
    return max((round(abs(ours - theirs), 4) for ours, theirs in pairs), default=None)


def _long(turn: TurnRecord) -> list[Any]:
    return [turn.shared, turn.tail, turn.tokens, turn.logprobs, turn.proximal]


# ---------------------------------------------------------------- data


class _Numbers(dict):
    """A number for everything that is asked for, from 0, the same for the same."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


class _Shared:
    """How long the shared parts of prompts are, of the last readings that had their own.

    Members of a group come one after the other and share those of its first, turn by turn; some
    turns may have their own, as the contexts of an answer have.
    """

    def __init__(self) -> None:
        self._lengths: dict[int, dict[int, int]] = {}  # of a reading, by chunk

    def lengths(self, number: int, first: int, turns: Sequence[TurnRecord]) -> list[int]:
        """Returns the length of each turn's shared part, in tokens."""
        if own := {
            turn.chunk: len(turn.shared) for turn in reversed(turns) if turn.shared_of is None
        }:  # of a chunk the first one
            self._lengths[number] = own
        if len(self._lengths) > OWNERS:
            del self._lengths[next(iter(self._lengths))]
        found = []
        for turn in turns:
            if turn.shared_of is None:
                found.append(len(turn.shared))
                continue
            whose = first + turn.shared_of
            length = self._lengths.get(whose, {}).get(turn.chunk)
            if length is None:
                raise ValueError(
                    f"reading {number} says that its prompts begin as those of reading {whose}, "
                    "which is none before it that has prompts; make the trace anew"
                )
            found.append(length)
        return found


class _Shards:
    """Named parts into files of bounded size; a part is never cut."""

    def __init__(self, put: Put, folder: str) -> None:
        self._put, self._folder = put, folder
        self._parts: list[bytes] = []
        self._held = self._next = 0
        self.files = self.bytes = 0

    def add(self, name: str, value: Any) -> int:
        """Adds a part; returns the number of its file."""
        part = _script(name, value)
        if self._parts and self._held + len(part) > BLOCK:
            self.end()
        self._parts.append(part)
        self._held += len(part)
        return self._next

    def end(self) -> None:
        """Writes what is held."""
        if self._parts:
            self.put(PART.format(self._folder, self._next), b"".join(self._parts))
            self._parts, self._held, self._next = [], 0, self._next + 1

    def put(self, path: str, content: bytes) -> None:
        """Writes a file."""
        self._put(path, content)
        self.files, self.bytes = self.files + 1, self.bytes + len(content)


class _Blocks:
    """A reading's long values of one kind, in blocks of bounded size, each a part."""

    def __init__(self, shards: _Shards, name: str) -> None:
        self._shards, self._name = shards, name
        self._values: list[Any] = []
        self._held = 0
        self.files: list[int] = []  # of each block

    def add(self, value: Any) -> tuple[int, int]:
        """Adds a value; returns its block and its place there."""
        size = len(json.dumps(value))
        if self._values and self._held + size > BLOCK:
            self.end()
        self._values.append(value)
        self._held += size
        return len(self.files), len(self._values) - 1

    def end(self) -> None:
        """Writes the values that are held as a block."""
        if self._values:
            self.files.append(self._shards.add(f"{self._name}.{len(self.files)}", self._values))
            self._values, self._held = [], 0


def _script(name: str, value: Any) -> bytes:
    """Returns the script that hands the page a part: ASCII, and nothing in it ends a script."""
    told = json.dumps(value, separators=(",", ":"), default=_plain).replace("<", "\\u003c")
    return f"trace.part({json.dumps(name)},{told});\n".encode("ascii")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Iterable) else str(value)
