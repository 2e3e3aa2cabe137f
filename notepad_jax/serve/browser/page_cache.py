"""A cache of rendered trace pages, in a temporary folder that is removed with the server.

A page is rendered in a thread when it is first requested, one at a time, and again when its trace
files have grown. Every version has data of its own name, so an open page stays usable while a newer
one is rendered. The least recently requested is dropped. Above: `routes`; below: `renderers`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Hashable
from pathlib import Path

from notepad_jax.serve.browser.renderers import Put
from notepad_jax.serve.documents.refusals import disk

PATIENCE = 2.0  # seconds after which a browser is told that its page is being made
FRESH = 10.0  # seconds in which a page is not made again
MOST = 12  # that are kept
INDEX = "index.html"

Advance = Callable[[int, int], None]
Write = Callable[[Put, Advance, str], None]  # makes a page, with its data in a folder of that name


@dataclasses.dataclass(frozen=True)
class Page:
    """One rendered version of a page; `data` is its name, and that of the folder of its data."""

    state: Hashable  # of what it was made of
    folder: Path
    data: str
    files: frozenset[str]
    when: float

    def file(self, path: str) -> bytes | None:
        """Returns one of its files; None where there is none of that name."""
        if path not in self.files:
            return None
        with contextlib.suppress(FileNotFoundError):  # thrown away in the meantime
            return (self.folder / path).read_bytes()
        return None


@dataclasses.dataclass
class Making:
    """A page that is being made."""

    state: Hashable
    task: asyncio.Future[Page] | None = None
    done: int = 0  # readings
    of: int | None = None  # None: it waits for others to be made


class ServerEnds(Exception):
    """The server ends, and with it what is being made."""


class PageCache:
    """An LRU cache of pages; owns their folder; to be closed."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory | None = None
        self._pages: dict[str, list[Page]] = {}  # by name; the one looked at last is the last
        self._making: dict[str, Making] = {}
        self._one = asyncio.Semaphore(1)
        self._ended = False

    async def newest(self, name: str, state: Hashable, write: Write) -> Page | Making:
        """Returns the page `name` of sources in this state; its `Making` if that takes long.

        Raises what `write` raises, and Refusal (507) for a full disk.
        """
        if pages := self._pages.pop(name, None):
            self._pages[name] = pages
            if pages[-1].state == state or time.monotonic() - pages[-1].when < FRESH:
                return pages[-1]
        making = self._making.get(name)
        if making is None or (making.task.done() and making.state != state):
            making = self._making[name] = Making(state)
            making.task = asyncio.ensure_future(self._made(name, making, write))
        await asyncio.wait([making.task], timeout=PATIENCE)
        if not making.task.done():
            return making
        if self._making.get(name) is making:
            del self._making[name]
        return making.task.result()

    def part(self, name: str, data: str) -> Page | None:
        """Returns the version of a page whose data have this name, if it is still there."""
        return next((page for page in self._pages.get(name, ()) if page.data == data), None)

    async def close(self) -> None:
        """Ends what is being made, and removes everything."""
        self._ended = True
        running = [making.task for making in self._making.values()]
        await asyncio.gather(*running, return_exceptions=True)
        if self._folder is not None:
            await asyncio.to_thread(self._folder.cleanup)

    async def _made(self, name: str, making: Making, write: Write) -> Page:
        async with self._one:
            page = await asyncio.to_thread(self._write, making, write)
        pages = self._pages.pop(name, [])
        self._pages[name] = [*pages[-1:], page]  # the one before may still be looked at
        old = pages[:-1]
        while len(self._pages) > MOST:
            old += self._pages.pop(next(iter(self._pages)))
        for one in old:
            await asyncio.to_thread(shutil.rmtree, one.folder, ignore_errors=True)
        return page

    def _write(self, making: Making, write: Write) -> Page:
        data, files = f"data-{secrets.token_hex(6)}", set()

        def advance(done: int, of: int) -> None:
            making.done, making.of = done, of
            if self._ended:
                raise ServerEnds

        with disk():
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="notepad_traces_")
            folder = Path(self._folder.name) / data
            (folder / data).mkdir(parents=True)

        def put(path: str, content: bytes) -> None:
            with disk():
                (folder / path).write_bytes(content)
            files.add(path)

        try:
            advance(0, 0)
            write(put, advance, data)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Page(making.state, folder, data, frozenset(files), time.monotonic())
