"""Rendezvous and failure detection between processes, and the relay to jax's coordinator.

All go through one address, HOST:PORT of the first process. There the first listens (`First`): every
other connects, says its index, and stays connected (`Other`). A process that dies takes its
connections with it, whatever killed it, and of a host that vanishes TCP's keep-alive tells within
`GONE` seconds; so no heartbeats are needed, and a process that only computes is not taken for dead.
The first tells the others. What jax would do of itself: see nothing for 100 s, then abort; that is
left to it, sooner, for a process that is frozen and keeps its connections (`hosts.HEARTBEAT`).

jax's own client and coordinator talk through that address, too, relayed. For if the client sees the
coordinator's connection close, it aborts the process from a C++ thread at once, with a stack and
before anything can be kept; a relay keeps its end open. It is also why a port that is taken is
found at once: what answers there does not know the greeting. Above: `hosts`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from notepad_jax import waiting

GREETING = 5.0  # seconds for what listens at the address to say what it is
GONE = 8  # seconds until a host that vanished is known to be
FAREWELL = 5.0  # seconds for the others to end, too, when one has failed
LATE = 10.0  # seconds after which a process that waits for others says for which
LOOK = 0.1  # seconds between two looks at whether we are to stop
HERE = "127.0.0.1"
WAITS = "still waiting for"

Lost = Callable[[str], object]
Say = Callable[[str], object]


class Meeting:
    """A wait of `seconds` for processes that may begin later; after LATE it says for which."""

    def __init__(self, seconds: float, say: Say) -> None:
        self.seconds, self._say, self._began = seconds, say, time.monotonic()
        self._said = False

    @property
    def left(self) -> float:
        """Seconds; 0 or less once it is over."""
        return self._began + self.seconds - time.monotonic()

    def look(self, whom: str) -> None:
        """To be called while waiting for `whom`; raises what the main thread is to raise."""
        waiting.look()
        if not self._said and time.monotonic() - self._began > LATE:
            self._said = True
            self._say(f"{WAITS} {whom}; a host may be late, so up to {self.seconds:g} s")


class Peers:
    """A process's connections to the others; threads call `lost`, once, with a reason in words."""

    coordinator: str  # where jax's client is to look for its coordinator

    def __init__(self, count: int, index: int, lost: Lost) -> None:
        self.count, self.index = count, index
        self._lost, self._alone = lost, threading.Lock()
        self._over = False  # we are leaving, or have told that a process is gone

    def leave(self, failed: str | None) -> None:
        """Says that this process ends, and why if it failed; no loss is reported from now on."""
        with self._alone:
            self._over = True
        for line in self._lines():
            _send(line, {"bye": failed})

    def _lines(self) -> list[socket.socket]:
        raise NotImplementedError

    def _watch(self, index: int, line: socket.socket) -> None:
        """Reads what a process says until it ends."""
        left = False
        for said in _said(line):
            if "lost" in said:
                self._tell(said["lost"])
            left = left or "bye" in said
            if said.get("bye"):
                why = f"process {index} of {self.count} has ended ({said['bye']})"
                _thread(self._tell, why, FAREWELL)
        if not left:
            self._tell(f"process {index} of {self.count} is gone")

    def _tell(self, why: str, after: float = 0.0) -> None:
        time.sleep(after)
        with self._alone:
            if self._over:
                return
            self._over = True
        for line in self._lines():
            _send(line, {"lost": why})
        self._lost(why)


class First(Peers):
    """The process that the others connect to; `coordinator` is where its jax is to listen."""

    def __init__(self, port: int, count: int, lost: Lost, meeting: Meeting) -> None:
        super().__init__(count, 0, lost)
        try:
            self._door = _listening(port)
        except OSError as problem:
            raise ValueError(
                f"port {port} of this host cannot be had ({os.strerror(problem.errno)}), and there "
                f"the others would come; choose another one in --hosts"
            ) from None
        self._others: dict[int, socket.socket] = {}
        with _listening(0, HERE) as free:
            self._service = free.getsockname()[1]
        self.coordinator = f"{HERE}:{self._service}"
        _thread(_accept, self._door, self._admit)
        while missing := sorted({*range(1, count)} - {*self._others}):
            whom = ", ".join(map(str, missing))
            if meeting.left < 0:
                self._door.close()
                raise ValueError(
                    f"of {count} processes {whom} have not come within {meeting.seconds:g} s"
                )
            meeting.look(f"process {whom} of {count}, here at port {port}")
            time.sleep(LOOK)
        for line in self._lines():
            _send(line, {"go": True})

    def _lines(self) -> list[socket.socket]:
        with self._alone:
            return list(self._others.values())

    def _admit(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            line.settimeout(GREETING)
            asked = json.loads(_read_line(line))
            if refused := self._refused(asked, line):
                _send(line, {"no": refused})
                line.close()
                return
            line.settimeout(None)
            if asked["for"] == "jax":
                service = _connected(HERE, self._service, Meeting(GREETING, str))
                _send(line, {"yes": True})
                _splice(line, service)
                return
            _send(line, {"yes": True})
            _keep_alive(line)
            self._watch(asked["index"], line)
            return
        line.close()

    def _refused(self, asked: dict[str, Any], line: socket.socket) -> str:
        """Takes in a process that asks to be watched; says why not, or nothing."""
        index = asked["index"]
        if asked["count"] != self.count:
            return f"this process was told of {asked['count']} processes, the first of {self.count}"
        if asked["for"] == "jax":
            return "" if index in self._others else "it is no process of this run"
        with self._alone:
            if index in self._others:
                return f"process {index} is there already; each needs an index of its own"
            self._others[index] = line
        return ""


class Other(Peers):
    """A process that is not the first; `coordinator` is where its jax finds the coordinator."""

    def __init__(
        self, host: str, port: int, count: int, index: int, lost: Lost, meeting: Meeting
    ) -> None:
        super().__init__(count, index, lost)
        self._host, self._port = host, port
        self._line = self._greeted("watch", meeting)
        self._line.settimeout(LOOK)
        said = b""
        while not said.endswith(b"\n"):
            meeting.look(f"the other processes, with the first at {host}:{port}")
            with contextlib.suppress(TimeoutError):
                if not (more := self._line.recv(1)):
                    raise ValueError("the first process has ended")
                said += more
            if meeting.left < 0:
                raise ValueError(f"not all processes have come within {meeting.seconds:g} s")
        if "go" not in json.loads(said):
            raise ValueError(json.loads(said).get("lost", "the first process has ended"))
        self._line.settimeout(None)
        _keep_alive(self._line)
        door = _listening(0, HERE)
        self.coordinator = f"{HERE}:{door.getsockname()[1]}"
        _thread(_accept, door, self._relay)
        _thread(self._watch, 0, self._line)

    def _lines(self) -> list[socket.socket]:
        return [self._line]

    def _relay(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            _splice(client, self._greeted("jax", Meeting(GREETING, str)), held=True)

    def _greeted(self, what: str, meeting: Meeting) -> socket.socket:
        """Connects to the first process, which may begin later, and says which one this is."""
        where = f"{self._host}:{self._port}"
        try:
            line = _connected(self._host, self._port, meeting)
        except OSError as problem:
            raise ValueError(f"nobody answers at {where} ({problem.strerror or problem})") from None
        line.settimeout(GREETING)
        _send(line, {"for": what, "count": self.count, "index": self.index})
        try:
            answer = json.loads(_read_line(line))
        except (OSError, ValueError):
            answer = None
        if not isinstance(answer, dict) or not {"yes", "no"} & answer.keys():
            line.close()
            raise ValueError(
                f"what answers at {where} is not the first process of a run; if another program "
                f"has that port, choose another one in --hosts"
            )
        if "no" in answer:
            line.close()
            raise ValueError(f"the first process, at {where}, says no: {answer['no']}")
        line.settimeout(None)
        return line


# ---------------------------------------------------------------- sockets


def _listening(port: int, host: str = "") -> socket.socket:
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port))


def _connected(host: str, port: int, meeting: Meeting) -> socket.socket:
    """Connects as soon as a process listens there. Raises OSError once the meeting is over."""
    while True:
        meeting.look(f"the first process, at {host}:{port}")
        try:
            line = socket.create_connection((host, port), timeout=GREETING)
            line.settimeout(None)  # from here on it may be silent for as long as it likes
            return line
        except OSError:
            if meeting.left < 0:
                raise
            time.sleep(LOOK)


def _keep_alive(line: socket.socket) -> None:
    """Has the kernels of both hosts look for one another: a vanished one is known in GONE s."""
    every = GONE // 4
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", every), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 1000 * GONE),
    ):  # fmt: skip
        if hasattr(socket, option):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _accept(door: socket.socket, admit: Callable[[socket.socket], None]) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            _thread(admit, door.accept()[0])


def _splice(one: socket.socket, other: socket.socket, held: bool = False) -> None:
    """Passes on what comes, both ways; `held`: `one` is not told when the other has ended."""
    _thread(_pass_on, one, other, False)
    _pass_on(other, one, held)


def _pass_on(source: socket.socket, target: socket.socket, held: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if not held:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


def _read_line(line: socket.socket) -> bytes:
    """Reads up to a newline and not a byte more. Raises OSError where none comes."""
    said = b""
    while not said.endswith(b"\n"):
        if not (byte := line.recv(1)) or len(said) > 1000:
            raise ConnectionError("it has ended, or talks of something else")
        said += byte
    return said


def _said(line: socket.socket) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError), line.makefile("rb") as file:
        for said in file:
            yield json.loads(said)


def _send(line: socket.socket, said: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # it has ended; the thread that reads from it knows
        line.sendall((json.dumps(said) + "\n").encode())


def _thread(work: Callable[..., object], *given: Any) -> None:
    threading.Thread(target=work, args=given, daemon=True).start()
