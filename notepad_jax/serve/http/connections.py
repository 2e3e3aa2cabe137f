"""Connection limits: how many there may be, and how long each may take to send a request.

uvicorn speaks HTTP, and accepts every connection: one that sends nothing, half a head, half a body
stays for ever, and when no descriptor is left asyncio writes a traceback for every client that
connects. `Server` is uvicorn's, and accepts them itself. A connection that has something to send
has deadlines; where all places are taken, the one that has been sending for longest gives way to a
new one. Where none can (all wait for our replies, or came a moment ago) new ones stay in the
kernel's backlog, quietly.
Above: programs.serve; beside: `web`, whose Door asks for the key when the head is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import resource
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from notepad_jax.serve.http.errors import Refusal

# Seconds that a connection without a request is kept: longer than clients keep theirs (OpenAI's and
# httpx 5, aiohttp 15). The client must close it first, or its next request meets a closed one.
KEPT = 75
PACE = 1024  # bytes of a body that earn it one second more
FULL = 0.05  # seconds until a full server looks again whether a connection has closed
OTHERS = 256  # descriptors for all else: the policy's files, documents, pages
EACH = 2  # descriptors of a connection: its socket, and the file that it sends or is sent

log = logging.getLogger("notepad_jax.serve")


@dataclasses.dataclass(frozen=True)
class ConnectionLimits:
    """Limits of all connections together, with a key or without."""

    connections: int = 1024
    header_seconds: float = 10.0  # from the first byte of a request (of a socket: from its
    # beginning) to the end of its head
    body_seconds: float = 30.0  # that a body may fall behind PACE, and a reply wait to be read
    body_bytes: int = 256 << 20  # of all bodies in memory that are not complete


def within_descriptors(limits: ConnectionLimits) -> ConnectionLimits:
    """Returns the limits with as many connections as this process may have, whose own limit of open
    files is raised as far as that takes. Raises ValueError where none is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = EACH * limits.connections + OTHERS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    most = (wanted - OTHERS) // EACH
    if most < 1:
        raise ValueError(
            f"this process may open {hard} files, and a server needs at least {OTHERS + EACH}; "
            f"raise its hard limit (ulimit -Hn)"
        )
    return dataclasses.replace(limits, connections=min(limits.connections, most))


class Connection(H11Protocol):
    """One client's connection. `phase` says what it has still to send: a `head`, a `body`, nothing
    (``""``: what takes time is our reply), or the next request, if it likes (`kept`)."""

    def __init__(self, config: uvicorn.Config, state: Any) -> None:
        super().__init__(config, state, {})
        # When the phase began. A body's comes nearer with its bytes, a reply's when some are read.
        self.phase, self.since = "head", time.monotonic()
        self._unread = 0  # bytes of our reply, at the last check

    def data_received(self, data: bytes) -> None:
        if self.phase == "body":
            self.since = min(time.monotonic(), self.since + len(data) / PACE)
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        theirs, phase = self.conn.their_state, ""
        if theirs is h11.SEND_BODY:
            phase = "body"
        elif theirs is h11.IDLE:
            begun = self.cycle is None or self.conn.trailing_data[0]
            phase = "head" if begun else "kept"
        if phase != self.phase:
            self.phase, self.since = phase, time.monotonic()

    def check(self, now: float, limits: ConnectionLimits) -> bool:
        """Closes the connection if its deadline is over; says whether it was."""
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread or self.flow.read_paused:  # it reads, or we do not
            self._unread, self.since = unread, now
        late = now - self.since
        if unread and late > limits.body_seconds:
            self.transport.abort()
        elif self.phase == "head" and late > limits.header_seconds:
            self.give_up(f"the head of a request did not come in {limits.header_seconds:g} s")
        elif self.phase == "body" and late > limits.body_seconds:
            self.give_up(
                f"the rest of the body did not come: it may fall {limits.body_seconds:g} s behind "
                f"{PACE} bytes a second"
            )
        else:
            return False
        return True

    def give_up(self, why: str, status: int = 408) -> None:
        """Closes the connection; a client that has begun a request and got no reply is told why."""
        silent = self.phase == "kept" or (self.phase == "head" and not self.conn.trailing_data[0])
        answered = self.cycle is not None and self.cycle.response_started and self.phase == "body"
        if silent or answered or self.transport.is_closing():
            self.transport.abort()
            return
        refusal = Refusal(status, why, None, "timeout" if status == 408 else "full")
        body = json.dumps({"error": refusal.error}).encode()
        headers = [("content-type", "application/json"), ("connection", "close"),
                   ("retry-after", "1"), ("content-length", str(len(body)))]  # fmt: skip
        for event in (
            h11.Response(status_code=status, headers=headers, reason=STATUS_PHRASES[status]),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """uvicorn's server, which takes in as many connections as `limits` say, and no longer than
    these. `dropped` is told of each that is ended before its request was complete."""

    def __init__(
        self, asgi: Any, limits: ConnectionLimits, dropped: Callable[[], None], farewell: int
    ) -> None:
        """`farewell`: seconds that replies have to end when the server does."""
        super().__init__(
            uvicorn.Config(
                asgi, http="h11",  # whose errors `web` knows, also where httptools is installed
                lifespan="on", log_level="warning", timeout_graceful_shutdown=farewell,
                timeout_keep_alive=KEPT, server_header=False, access_log=False,
                ws="none",  # else an upgrade makes a connection of a class that has no deadlines
            )
        )  # fmt: skip
        self.limits, self._dropped = limits, dropped
        self._tasks: tuple[asyncio.Task, ...] = ()

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self.server_state.connections)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        (place,) = sockets
        place.setblocking(False)
        place.listen(self.config.backlog)  # before others are told that it has started
        await super().startup(sockets=[])
        self._tasks = (
            asyncio.create_task(self._accept(place)), asyncio.create_task(self._watch()),
        )  # fmt: skip

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        accepting, watching = self._tasks
        accepting.cancel()
        await asyncio.wait([accepting])
        await super().shutdown(sockets)
        watching.cancel()

    async def _accept(self, place: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self.open >= self.limits.connections and self._longest() is None:
                await asyncio.sleep(FULL)
            try:
                one, _ = await loop.sock_accept(place)
            except ConnectionError:  # the client has left
                continue
            except OSError as error:
                log.warning("no connection can be taken in for a second: %s", error.strerror)
                await asyncio.sleep(1)
                continue
            if self.open >= self.limits.connections:
                self._make_room()
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(self._connection, one)

    def _connection(self) -> Connection:
        return Connection(self.config, self.server_state)

    def _longest(self) -> Connection | None:
        """The connection that has been sending for longest, if a tenth of the time is over that a
        head may take: clients that come again and again push none out before it could send.
        Those that were answered and may ask again give way where none sends."""
        there = [
            one for one in self.server_state.connections
            if one.phase and not one.flow.read_paused and not one.transport.is_closing()
        ]  # fmt: skip
        sending = [one for one in there if one.phase != "kept"]
        one = min(sending or there, key=lambda one: one.since, default=None)
        young = one is None or time.monotonic() - one.since < self.limits.header_seconds / 10
        return None if young else one

    def _make_room(self) -> None:
        one = self._longest()
        if one is not None:
            one.give_up("the server is full, and this request was the longest on its way", 503)
            self._dropped()

    async def _watch(self) -> None:
        """Checks all deadlines, four times in the shortest of them."""
        limits = self.limits
        pause = min(1.0, limits.header_seconds / 4, limits.body_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            for one in list(self.server_state.connections):
                if one.check(now, limits):
                    self._dropped()
