"""Who may hold a place at the server's door, and for how long.

A crowd of hostile sockets beside clients is `tests.support.hostile`; here it is small, and the
server a process that may open few files.
"""

import asyncio
import json
import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest
import uvicorn
from uvicorn.protocols.websockets import auto

from notepad_jax.serve.http.connections import (
    OTHERS,
    ConnectionLimits,
    Server,
    within_descriptors,
)
from notepad_jax.serve.http.log import FEW, RateLimit
from notepad_jax.serve.http.web import Bodies
from tests.serve.fake import DOCUMENT, NAME, Arithmetic, running, served, until
from tests.support.hostile import KEY, besieged, reading

ROOT = Path(__file__).parents[2]
SHORT = ConnectionLimits(connections=8, header_seconds=0.5, body_seconds=0.5)
PATIENT = ConnectionLimits(connections=4, header_seconds=15, body_seconds=15)
YOUNG = PATIENT.header_seconds / 10
KNOWN = f"Authorization: Bearer {KEY}\r\n"
QUIET = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
LATE = 20  # seconds: more than any limit here, if the machine is busy


def half(line: str = "POST /v1/chat/completions", more: str = KNOWN, size: int = 100_000) -> str:
    return f"{line} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {size}\r\n\r\nword "


def line_to(url: str, said: str = "") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)), timeout=LATE)
    line.sendall(said.encode())
    return line


def until_its_end(line: socket.socket) -> bytes:
    """All that comes until the server ends a connection; TimeoutError if it does not."""
    said = b""
    try:
        while more := line.recv(1 << 16):
            said += more
    except ConnectionError:
        pass
    return said


def heard(line: socket.socket, status: bytes) -> bool:
    """Says whether a reply of a status comes, on a connection that may stay."""
    with line.makefile("rb") as reply:
        first = reply.readline()
        head = b"".join(iter(reply.readline, b"\r\n")).lower()
        if size := re.search(rb"content-length: (\d+)", head):
            reply.read(int(size[1]))
    return first.startswith(b"HTTP/1.1 " + status)


# What it says, and what it is told.
SLOW = {
    "nothing": ("", b""),
    "half a head": (QUIET, b"408"),
    "half a body": (half(), b"408"),
    "half an upload": (half("PUT /v1/files/half"), b"408"),
    "an answer before its body": (half("POST /v1/nowhere"), b"404"),
}


@pytest.mark.parametrize("said, status", SLOW.values(), ids=SLOW)
def test_what_does_not_end_is_ended(said, status, tmp_path):
    with running(served(Arithmetic()), key=KEY, limits=SHORT, folder=tmp_path) as url:
        told = until_its_end(line_to(url, said))
        assert told.startswith(b"HTTP/1.1 " + status if status else b"") and bool(told) == bool(
            status
        )
        if status == b"408":
            assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        until(lambda: not list(tmp_path.rglob("*.part")))  # its handler ends after its reply


def test_a_head_and_a_body_that_drip_are_ended():
    """Bytes that come do not help: a head has its time, and a body its pace."""
    with running(served(Arithmetic()), key=KEY, limits=SHORT) as url:
        for said, drop in ((QUIET, b"X: 1\r\n"), (half(), b"x")):
            line, ended = line_to(url, said), []
            threading.Thread(target=lambda one=line, e=ended: e.append(until_its_end(one))).start()
            while not ended:
                try:
                    line.sendall(drop)
                except ConnectionError:
                    break
                time.sleep(0.05)
            until(lambda e=ended: e)
            assert b"408" in ended[0][:20]


def test_a_body_that_keeps_its_pace_may_take_longer():
    limits = ConnectionLimits(
        header_seconds=2, body_seconds=2
    )  # a busy machine may hold us up for one
    with running(served(Arithmetic()), key=KEY, limits=limits) as url:
        line = line_to(url, half("PUT /v1/files/long", size=5 + 20 * 4096))
        for _ in range(20):  # 3 s, at 27 KB a second
            time.sleep(0.15)
            line.sendall(b"x" * 4096)
        assert heard(line, b"200")


@pytest.mark.parametrize("more", ["", "Authorization: Bearer wrong\r\n"], ids=["none", "wrong"])
def test_who_has_no_key_may_not_wait(more):
    """It is told before its body is read, and the connection is over; /health keeps none, too."""
    with running(served(Arithmetic()), key=KEY, limits=PATIENT) as url:
        assert until_its_end(line_to(url, half(more=more))).startswith(b"HTTP/1.1 401")
        asked = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert until_its_end(line_to(url, asked)).startswith(b"HTTP/1.1 200")
        line = line_to(url)
        for _ in range(2):  # and who has it keeps his
            line.sendall(f"{QUIET}{KNOWN}\r\n".encode())
            assert heard(line, b"200")


def test_an_upgrade_is_a_request_as_any_other(monkeypatch):
    """Also where a library for websockets is installed: its connections have no deadlines."""
    made = []
    monkeypatch.setattr(auto, "AutoWebSocketsProtocol", lambda *_, **__: made.append(_))
    with running(served(Arithmetic()), limits=PATIENT) as url:
        line = line_to(url, f"{QUIET}Upgrade: websocket\r\nConnection: Upgrade, close\r\n\r\n")
        assert until_its_end(line).startswith(b"HTTP/1.1 200") and made == []


def test_at_the_limit_who_has_been_sending_for_longest_gives_way():
    with running(served(Arithmetic()), key=KEY, limits=PATIENT) as url:
        keeper = line_to(url, f"{QUIET}{KNOWN}\r\n")
        assert heard(keeper, b"200")
        first, second = line_to(url, QUIET), line_to(url, half())
        time.sleep(YOUNG + 0.2)
        crowd = [line_to(url) for _ in range(3)]  # two too many
        assert until_its_end(first).startswith(b"HTTP/1.1 503")
        assert until_its_end(second).startswith(b"HTTP/1.1 503")
        keeper.sendall(f"{QUIET}{KNOWN}\r\n".encode())  # who was served before stays
        assert heard(keeper, b"200")
        counted = httpx2.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        assert "connection_dropped_total 3.0" in counted  # and one for this question
        assert len(crowd) == 3


def test_where_all_wait_for_replies_who_comes_waits_quietly():
    streamer = Arithmetic(slots=4, pause=0.1)
    with running(served(streamer), limits=PATIENT) as url:
        body = json.dumps(reading(NAME, DOCUMENT, "who ?") | {"stream": True})
        said = half(more="", size=len(body)).removesuffix("word ") + body
        lines = [line_to(url, said) for _ in range(4)]
        assert all(heard(line, b"200") for line in lines)
        fifth = line_to(url, f"{QUIET}\r\n")
        fifth.settimeout(0.3)
        with pytest.raises(TimeoutError):
            fifth.recv(1)
        lines[0].close()
        fifth.settimeout(LATE)
        assert heard(fifth, b"200")


def test_a_reply_that_nobody_reads_is_ended():
    with running(served(Arithmetic()), limits=SHORT) as url:
        httpx2.put(f"{url}/v1/files/book", content=b"word " * (8 << 20))
        line = line_to(url, "GET /v1/files/book/content HTTP/1.1\r\nHost: localhost\r\n\r\n")
        counted = "connection_dropped_total 1.0"
        until(lambda: counted in httpx2.get(f"{url}/metrics").text)
        assert len(until_its_end(line)) < 40 << 20


def test_the_bytes_of_unfinished_bodies_are_bounded():
    """The one that began first is refused, and the newest is read."""
    limits = ConnectionLimits(body_bytes=1 << 20)
    with running(served(Arithmetic()), limits=limits) as url:
        lines = []
        for _ in range(3):
            lines.append(line_to(url, half(more="", size=600_000) + " " * 400_000))
            time.sleep(0.2)
        assert heard(lines[0], b"503")
        lines[2].sendall(b" " * (600_000 - 400_005))
        assert heard(lines[2], b"400")  # all of it is there, and is no JSON


def test_a_body_is_taken_while_the_first_one_is_on_its_way_out():
    async def go():
        bodies = Bodies(10)

        async def first():
            async with bodies.coming():
                await asyncio.sleep(60)

        leaving = asyncio.ensure_future(first())
        await asyncio.sleep(0)
        async with bodies.coming() as add:
            for size in (11, 1):
                add(size)
                await asyncio.sleep(0)
        (problem,) = await asyncio.gather(leaving, return_exceptions=True)
        return problem.status, bodies.bytes

    assert asyncio.run(go()) == (503, 0)


def test_so_many_connections_as_there_are_descriptors():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from notepad_jax.serve.http.connections import *\n"
        "print(within_descriptors(ConnectionLimits(connections=100)).connections,"
        "resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def found(soft: int, hard: int) -> str:
        words = [sys.executable, "-c", code.format(soft=soft, hard=hard)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout.strip() or done.stderr.splitlines()[-1]

    assert found(64, 4096) == f"100 {OTHERS + 200}"  # raised as far as they need
    assert found(64, OTHERS + 100) == f"50 {OTHERS + 100}"
    assert "may open 100 files" in found(64, 100)
    assert within_descriptors(ConnectionLimits(connections=1)).connections == 1


def test_a_server_that_has_started_listens(monkeypatch):
    """Whoever waits for `started` connects at once."""
    met = []

    async def started(server, sockets):
        with socket.create_connection(place.getsockname(), timeout=LATE):
            met.append(server)

    async def begin():
        await server.startup([place])
        for task in server._tasks:
            task.cancel()

    monkeypatch.setattr(uvicorn.Server, "startup", started)
    server = Server(None, SHORT, lambda: None, farewell=1)
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        asyncio.run(begin())
    assert met == [server]


def test_a_line_of_code_writes_few_records(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit, passed = RateLimit(), []

    def say(line: int, text: str) -> None:
        record = logging.LogRecord("a", logging.WARNING, "b.py", line, text, (), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for _ in range(1000):
        say(1, "Invalid HTTP")
    say(2, "another")
    assert passed == ["Invalid HTTP"] * FEW + ["another"]
    now[0] += 61
    say(1, "Invalid HTTP")
    assert passed[-1] == "Invalid HTTP (and 995 times more before)"


@pytest.mark.slow
def test_two_hundred_hostile_sockets_beside_clients(tmp_path):
    """Where a server may open few files all clients are served, and it has little to say."""
    said = tmp_path / "said"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    with said.open("w") as log:
        server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, stderr=log,
                                  env=environment, cwd=ROOT)  # fmt: skip
    try:
        url = server.stdout.readline().decode().strip()
        assert url, said.read_text()
        body = reading(NAME, DOCUMENT, "who ?")
        count = asyncio.run(besieged(url, body, sockets=200, clients=10, seconds=6, pause=0.02))
        server.communicate(b"end\n", timeout=60)
    finally:
        server.kill()
        server.wait()
    assert count.failed == 0 and count.served > 10 * count.again, count
    assert count.opened > 300, count  # they came again and again
    assert server.returncode == 0 and "Traceback" not in said.read_text()
    assert said.stat().st_size < 10_000


def main() -> None:
    files = OTHERS + 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    limits = within_descriptors(ConnectionLimits(header_seconds=4, body_seconds=4))
    with running(served(Arithmetic(slots=8)), waiting=40, key=KEY, limits=limits) as url:
        print(url, flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main()
