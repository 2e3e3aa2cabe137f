"""The routes for browsers: a page to read with, and the traces of readings and runs.

A name in a URL is looked up among what there is, and never becomes a path. Cross-site requests are
refused, by the headers that browsers send: data of a trace are scripts, and those any page might
run. Above: `app`; below: `page_cache` (rendered pages), `renderers` (what renders them),
`sessions` (which browsers may look).
"""

from __future__ import annotations

import asyncio
import datetime
import tempfile
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax.serve.browser.page_cache import INDEX, Advance, Making, PageCache, Write
from notepad_jax.serve.browser.renderers import Files, Put, Renderers
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.http.sessions import HEADERS, HOME, TRACES, Sessions, foreign, shown
from notepad_jax.serve.readings.jobs import ReadingJobs
from notepad_jax.serve.readings.record import ReadingOnDisk

LONGEST_TITLE = 200  # characters

Handler = Callable[..., Awaitable[Response]]


class PageRoutes:
    """Handlers of the pages. `write_trace` writes what is kept of a reading to a file."""

    def __init__(
        self, views: Renderers, readings: ReadingJobs,
        write_trace: Callable[[ReadingOnDisk, Path], None], sessions: Sessions | None,
    ) -> None:  # fmt: skip
        self._views, self._readings, self._write_trace = views, readings, write_trace
        self._sessions, self._cache = sessions, PageCache()

    def routes(self) -> list[Route]:
        """Returns the routes of these pages."""

        def route(path: str, handler: Handler, method: str = "GET") -> Route:
            return Route(path, self._said(handler), methods=[method])

        name = f"{TRACES}/{{name}}"
        found = [
            route(HOME, self.home),
            route(TRACES, self.list),
            route(name, self.redirect),
            route(f"{name}/", self.trace),
            route(f"{name}/{{data}}/{{file}}", self.data),
        ]
        if self._sessions is not None:
            found += [
                route(path, self._sessions.enter, "POST") for path in (TRACES, name, f"{name}/")
            ]
        return found

    async def close(self) -> None:
        """Cancels the pages that are being made."""
        await self._cache.close()

    # ------------------------------------------------------------ pages

    async def home(self, request: Request) -> Response:
        return shown(self._views.reading)

    async def list(self, request: Request) -> Response:
        rows = [self._row(one) for one in self._readings.all()]
        rows += await asyncio.to_thread(self._runs)
        return shown(self._views.listing(rows, self._views.runs is not None))

    async def redirect(self, request: Request) -> Response:
        name = request.path_params["name"]
        return shown(b"", 307, {"Location": _address(name) if name else TRACES})

    async def trace(self, request: Request) -> Response:
        name = request.path_params["name"]
        state, write = await self._found(name)
        page = await self._cache.newest(name, state, write)
        if isinstance(page, Making):
            words = (
                f"{page.done:,} of {page.of:,} readings are done" if page.of else "It begins soon"
            )
            title = "This page is being made"
            return shown(self._views.notice(title, f"{words}; it opens by itself.", True), 202)
        index = await asyncio.to_thread(page.file, INDEX)
        if index is None:
            raise _nothing(name)
        return shown(index)

    async def data(self, request: Request) -> Response:
        name, data, file = (request.path_params[part] for part in ("name", "data", "file"))
        page = self._cache.part(name, data)
        if page and page.state == name:
            self._readings.get(name)  # one that was removed is gone
        content = page and await asyncio.to_thread(page.file, f"{data}/{file}")
        if content is None:
            raise Refusal(404, "this page was made again since; load it again")
        return Response(content, 200, HEADERS, "text/javascript")

    def _said(self, handler: Handler) -> Handler:
        """Answers a browser with a page also where something is wrong."""

        async def said(request: Request) -> Response:
            try:
                if foreign(request):
                    raise Refusal(403, "another site's page asked for this; open it by itself",
                                  None, "not_local", "permission_error")  # fmt: skip
                return await handler(request)
            except Refusal as refusal:
                title = "There is nothing here" if refusal.status == 404 else "This cannot be shown"
                page = self._views.notice(title, refusal.error["message"], False)
                return shown(page, refusal.status, refusal.headers)

        return said

    # ------------------------------------------------------------ what there is

    async def _found(self, name: str) -> tuple[Hashable, Write]:
        """Returns the state of what has this name, and what makes its page; else Refusal (404)."""
        try:
            reading = self._readings.get(name)
        except Refusal:
            return await asyncio.to_thread(self._run, name)
        if not reading.journal.over:
            raise Refusal(404, "this reading has not ended yet; its page is made then")
        return reading.id, lambda *about: self._write_reading(reading, *about)

    def _run(self, name: str) -> tuple[Hashable, Write]:
        try:
            files = self._views.files(name)
            stats = {path: path.stat() for path in files}
        except (ValueError, OSError) as error:
            raise Refusal(404, f"{name}: {error}") from None
        if not files:
            raise _nothing(name)
        state = tuple((path, one.st_size, one.st_mtime_ns) for path, one in stats.items())
        return state, lambda *about: self._write_page(name, files, *about)

    def _write_reading(self, reading: ReadingOnDisk, put: Put, advance: Advance, data: str) -> None:
        with tempfile.TemporaryDirectory(prefix="notepad_trace_") as folder:
            path = Path(folder) / "reading.jsonl"
            self._write_trace(reading, path)
            title = " ".join(reading.asked.questions)[:LONGEST_TITLE]
            self._write_page(title, {path: reading.id}, put, advance, data)

    def _write_page(self, title: str, files: Files, put: Put, advance: Advance, data: str) -> None:
        try:
            self._views.trace(put, title, files, advance, data)
        except ValueError as error:
            raise Refusal(500, f"this trace cannot be read: {error}") from error

    def _row(self, reading: ReadingOnDisk) -> dict[str, Any]:
        """What the list says of a reading; one that is under way is watched where it was begun."""
        asked, over = reading.asked, reading.journal.over
        return {
            "address": _address(reading.id) if over else f"{HOME}#reading={reading.id}",
            "title": " ".join(asked.questions)[:LONGEST_TITLE],
            "kind": f"reading, {reading.status if over else 'under way'}",
            "told": f"{self._readings.filename(asked.file_id)} · {_date(asked.created_at)}",
        }

    def _runs(self) -> list[dict[str, Any]]:
        """What it says of runs, those first that were written to last: a folder's own date stays
        where a file in it grows."""
        rows: list[tuple[float, dict[str, Any]]] = []
        try:
            names = () if self._views.runs is None else self._views.runs()
        except OSError as error:
            raise Refusal(500, f"the folder of runs cannot be read: {error}") from error
        for name in names:
            try:
                files = self._views.files(name)
                newest = max((path.stat().st_mtime for path in files), default=None)
            except (ValueError, OSError):
                continue  # its page says why
            if newest is not None:
                told = f"{', '.join(files.values())} · {_date(newest)}"
                row = {"address": _address(name), "title": name, "kind": "run", "told": told}
                rows.append((newest, row))
        return [row for _, row in sorted(rows, key=lambda dated: dated[0], reverse=True)]


def _address(name: str) -> str:
    return f"{TRACES}/{quote(name, safe='')}/"


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _nothing(name: str) -> Refusal:
    return Refusal(404, f"nothing of the name {name[:80]!r} can be looked at")
