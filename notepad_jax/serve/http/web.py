"""The HTTP layer: bodies with a limit, server-sent events, error responses, the key's middleware.

A client that hangs up ends its request: the task that makes the reply is cancelled and awaited, so
its slot and pages are free when the next request is looked at. Above: `app`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO, TypeVar

import h11
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notepad_jax import waiting
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.http.loopback import is_local
from notepad_jax.serve.http.sessions import Sessions, own
from notepad_jax.types import CompleterFailed

LARGEST_BODY = 8 << 20  # bytes
THREADS = 64  # that may wait for a disk or a bucket
HEARTBEAT = 10.0  # seconds of silence after which a stream says that it lives
GONE = 499  # the status where no client reads it: it hung up
# Ends of lines for clients that use splitlines, though not for events: no JSON need have them.
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
METHODS = ("GET", "POST", "PUT", "DELETE")  # of pages of other sites that the operator names
HEADERS = ("*",)
EXPOSED = ("X-Request-Id", "Location", "Retry-After")  # what these pages may read of a reply's
OPEN = ("/health", "/ready")  # paths that need no key

T = TypeVar("T")
log = logging.getLogger("notepad_jax.serve")


def answer(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response, in UTF-8."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Response(text.encode(), status, headers, "application/json")


def event(body: Any) -> bytes:
    """Returns a server-sent event; JSON has no line breaks, but what some clients take for them."""
    text = body if isinstance(body, str) else answer(body).body.decode().translate(LINE_ENDS)
    return f"data: {text}\n\n".encode()


def refused(error: Exception) -> Refusal:
    """Returns the Refusal for an exception; the words of an unexpected one go to the log alone."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, CompleterFailed):
        return Refusal(500, str(error), None, "engine_failed", "server_error")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "the server made a mistake; its log says which", None, None, "server_error")


def stopping() -> Refusal:
    """Returns the Refusal (503) of a request that is cut off because the server ends."""
    return Refusal(503, "the server is being stopped", None, "stopping", "server_error")


async def body_of(request: Request) -> bytes:
    """Returns a request's body; 413 for one that is too large, as soon as that is known."""
    parts, size = [], 0
    said = request.headers.get("content-length", "")
    if said.isascii() and said.isdigit() and int(said[:20]) > LARGEST_BODY:
        raise _too_large()
    try:
        async with request.app.state.bodies.coming() as add:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BODY:
                    raise _too_large()
                add(len(part))
    except ClientDisconnect:
        raise Refusal(GONE, "the client hung up") from None
    return b"".join(parts)


class Bodies:
    """A limit of the bytes of all request bodies in memory that are not complete.

    Where they come to more, the one that began first is refused: many small ones that never end
    would otherwise fill the memory, and the request that comes then is the least to blame.
    """

    def __init__(self, most: int) -> None:
        self.bytes, self._most = 0, most
        self._coming: dict[asyncio.Timeout, int] = {}  # in the order in which they began

    @contextlib.asynccontextmanager
    async def coming(self) -> AsyncIterator[Callable[[int], None]]:
        """The context of one body; yields the function that counts its bytes. Refusal (503) if
        it has to go."""
        try:
            async with asyncio.timeout(None) as place:
                self._coming[place] = 0
                try:
                    yield functools.partial(self._add, place)
                finally:
                    self.bytes -= self._coming.pop(place)
        except TimeoutError:
            raise Refusal(
                503, "the server has no room for the rest of this body; send it again", None,
                "busy", "server_error", {"Connection": "close", "Retry-After": "1"},
            ) from None  # fmt: skip

    def _add(self, place: asyncio.Timeout, size: int) -> None:
        self._coming[place] += size
        self.bytes += size
        if self.bytes > self._most:
            first = next(iter(self._coming))
            if first.when() is None:  # else its time is over already
                first.reschedule(0)


def _too_large() -> Refusal:
    return Refusal(
        413, f"the body is larger than {LARGEST_BODY >> 20} MB; upload a document of that size "
        f"with the files API (/v1/files) and name it in the message", None, "request_too_large",
        headers={"Connection": "close"},
    )  # fmt: skip


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Returns what `work` returns; None if the client hung up first, and work was cancelled."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await waiting.end(working, gone)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(Response):
    """A response that streams server-sent events, closed when the client hangs up."""

    def __init__(
        self, events: AsyncGenerator[bytes], source: AsyncGenerator[Any], headers: dict[str, str]
    ) -> None:
        """`source` is what `events` are made from: closed, too, if none was asked for."""
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no",
                                     **headers}, "text/event-stream")  # fmt: skip
        del self.headers["content-length"]
        self._events, self._source = events, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coming: asyncio.Future | None = None
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code,
                        "headers": self.raw_headers})  # fmt: skip
            if scope["method"] == "HEAD":
                return await send({"type": "http.response.body"})
            while not gone.done():
                coming = coming or asyncio.ensure_future(anext(self._events, None))
                await asyncio.wait(
                    (coming, gone), timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED
                )
                if not coming.done():
                    said: bytes | None = b": still at it\n\n"
                else:
                    said, coming = coming.result(), None
                more = said is not None
                await send({"type": "http.response.body", "body": said or b"", "more_body": more})
                if not more:
                    return
        except asyncio.CancelledError:
            last = event({"error": stopping().error})
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await waiting.end(gone, *([coming] if coming else []))
            await self._events.aclose()
            await self._source.aclose()


def have_threads() -> None:
    """Gives the running event loop a larger pool of threads for waits on a disk or a bucket.

    As many as asyncio has are soon all waiting, and the texts of all requests are encoded by them.
    """
    pool = ThreadPoolExecutor(THREADS, "asyncio")
    asyncio.get_running_loop().set_default_executor(pool)


class OpenFile(FileResponse):
    """A response of a file that is open, so it is sent to its end if its name is gone meanwhile."""

    def __init__(
        self, file: BinaryIO, media_type: str, headers: dict[str, str] | None = None,
        filename: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(
            f"/dev/fd/{file.fileno()}", 200, headers, media_type, None, filename,
            os.fstat(file.fileno()),
        )  # fmt: skip
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            await super().__call__(scope, receive, send)


# ---------------------------------------------------------------- the door


def _at_once(send: Send) -> Send:
    """Closes the connection behind a reply: without the key it is not kept for a next request."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return sent


class Door:
    """ASGI middleware that admits requests with the key; without one, those to the loopback."""

    def __init__(
        self, app: ASGIApp, key: str | None, other: str | None, others: Sequence[str],
        sessions: Sessions | None = None, origins: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`other` is the key of the paths in `others`; `sessions` says what browsers may see;
        web pages of `origins` may ask, too."""
        self._app, self._keys = app, dict.fromkeys(others, other)
        self._key, self._sessions = key, sessions
        self._origins = tuple(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            request = Request(scope)
            problem = None if scope["path"] in OPEN else self._problem(request)
            if problem is not None:
                app = self._refusal(request, problem)
            if problem is not None or not self._known(request):
                send = _at_once(send)
            if self._origins:  # also around a refusal: the page shall read what it says
                app = CORSMiddleware(app, self._origins, METHODS, HEADERS, expose_headers=EXPOSED)
        try:
            await app(scope, receive, send)
        except h11.LocalProtocolError:
            # The rest of the request was no HTTP, or did not come in time: that was said, and
            # no client waits for a reply.
            await _gone(receive)

    def _refusal(self, request: Request, problem: Refusal) -> ASGIApp:
        page = self._sessions and self._sessions.asks(request, problem)
        return page or answer({"error": problem.error}, problem.status, problem.headers)

    def _key_of(self, request: Request) -> str | None:
        return self._keys.get(request.scope["path"], self._key)  # what routes are chosen by

    def _known(self, request: Request) -> bool:
        """Says whether a request has the key, if there is one, and may keep its connection."""
        if self._key_of(request) is None or self._shows_key(request):
            return True
        return self._sessions is not None and self._sessions.knows(request)

    def _shows_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._key_of(request).encode())
        return scheme.lower() == "bearer" and same

    def _welcome(self, request: Request) -> bool:
        """Says whether a request comes from a page of one of the origins."""
        origin = request.headers.get("origin")
        return origin in self._origins or (origin is not None and "*" in self._origins)

    def _problem(self, request: Request) -> Refusal | None:
        if request.method == "OPTIONS" and self._welcome(request):
            return None  # a browser asks what it may send, and has no key to send with that
        if self._key_of(request) is None:
            # A web page may send its visitor's browser here, which names that page and the host.
            host = request.headers.get("host", "")
            page = own(request) or self._welcome(request)
            if page and (not host or is_local(host)):
                return None
            message = ("a server without a key answers this machine alone, by the name localhost, "
                       "and of web pages its own")  # fmt: skip
            return Refusal(403, message, None, "not_local", "permission_error")
        given = request.headers.get("authorization", "").partition(" ")[2]
        if self._shows_key(request):
            return None
        if self._sessions is not None and not given and self._sessions.admits(request):
            return None
        what = "is wrong" if given else "is missing: send it as Authorization: Bearer KEY"
        return Refusal(401, f"the API key {what}", None, "invalid_api_key", "authentication_error",
                       {"WWW-Authenticate": "Bearer"})  # fmt: skip


def told(
    count: Callable[[int], None],
) -> Callable[[Callable[..., Awaitable[Response]]], Callable[..., Awaitable[Response]]]:
    """Returns a decorator: a handler's exceptions become error responses; `count` sees statuses."""

    def around(handler: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def handled(request: Request) -> Response:
            try:
                reply = await handler(request)
            except (Exception, asyncio.CancelledError) as error:
                # Only a web server that ends cancels a handler.
                stopped = isinstance(error, asyncio.CancelledError)
                refusal = stopping() if stopped else refused(error)
                reply = answer({"error": refusal.error}, refusal.status, refusal.headers)
            count(reply.status_code)
            return reply

        return handled

    return around
