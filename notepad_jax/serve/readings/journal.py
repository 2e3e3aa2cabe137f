"""A reading's journal: an append-only file of its events, a line for every turn.

A line is a list of events, [[name, data], ...], written in one piece when the turn has ended: a
killed server leaves at most one cut line, which is dropped when the file is opened again. A client
that follows says which line it has seen last, so it may come back. Above: `jobs`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from notepad_jax.serve.documents.refusals import disk
from notepad_jax.telemetry.identity import write_all

Happened = tuple[str, dict[str, Any]]  # the name of an event, and its data
DONE = "done"  # the last event of all


class Journal:
    """The journal of one reading; its file is open only while it is read or written.

    Lines are counted from 0. `over`: the last of all events is there.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._closed = path, False
        self._ends = [0]  # of lines, in bytes
        path.touch()
        with path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._ends.append(self._ends[-1] + len(line))
        os.truncate(path, self._ends[-1])
        self._news = asyncio.Condition()
        self.over = any(name == DONE for name, _ in self.last())

    def __len__(self) -> int:
        return len(self._ends) - 1

    def last(self) -> list[Happened]:
        """Returns the last line; [] where there is none."""
        with self._path.open("rb") as file:
            return self._line(file, len(self) - 1) if len(self) else []

    def lines(self, numbers: Iterable[int]) -> Iterator[list[Happened]]:
        """Yields the lines of these numbers."""
        with self._path.open("rb") as file:
            for line in numbers:
                yield self._line(file, line)

    def _line(self, file: BinaryIO, line: int) -> list[Happened]:
        start, end = self._ends[line : line + 2]
        file.seek(start)
        return [(name, data) for name, data in json.loads(file.read(end - start))]

    async def add(self, happened: list[Happened]) -> int:
        """Appends a line, and returns its number; Refusal (507) for a full disk, and then nothing
        is appended."""
        line = json.dumps(happened).encode("ascii") + b"\n"
        try:
            with disk(), self._path.open("ab", buffering=0) as file:
                write_all(file, line)
        except BaseException:
            os.truncate(self._path, self._ends[-1])
            raise
        number = len(self)
        self._ends.append(self._ends[-1] + len(line))
        self.over = happened[-1][0] == DONE
        await self.tell()
        return number

    async def tell(self) -> None:
        """Wakes all followers."""
        async with self._news:
            self._news.notify_all()

    async def follow(self, line: int) -> AsyncGenerator[tuple[int, list[Happened]]]:
        """Yields (number, line) from `line` on, as they are written; ends behind the last."""
        with self._path.open("rb", buffering=0) as file:
            while not self._closed:
                if line < len(self):
                    yield line, self._line(file, line)
                    line += 1
                    continue
                if self.over:
                    return
                async with self._news:
                    if line >= len(self) and not self.over and not self._closed:
                        await self._news.wait()

    async def close(self) -> None:
        """Ends the streams of all followers."""
        self._closed = True
        await self.tell()
