"""A load test of `serve`: what a crowd of hostile sockets does to clients that want an answer.

    python -m tests.support.hostile [--sockets 1200] [--clients 20] [--minutes 10] [--policy FOLDER]

`notepad-jax serve` runs as a process of its own, with a key. The sockets are of the kinds in
`KINDS`: they say nothing, half a head, half a body, one byte a second; some have the key. Whichever
the server ends comes again at once. Beside them the clients read short documents, one after the
other, and are served or not. Expected: `failed` 0, `log_bytes` below a megabyte; `slowest` is the
longest that a client waited, in seconds of the clock. Run it on a machine whose `ulimit -Hn` allows
two descriptors a socket; with fewer the server takes in fewer, says so, and the result is the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

ROOT = Path(__file__).parents[2]
KEY = "benchmark-key"
AGAIN = 0.1  # seconds until a socket that was ended comes again
DRIP = 1.0  # seconds between the bytes of the slow ones
POST, PUT = "POST /v1/chat/completions", "PUT /v1/files/half"
WITH_KEY = f"Authorization: Bearer {KEY}\r\n"


def _head(line: str, more: str = "", size: int = 4_000_000) -> bytes:
    return f"{line} HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: {size}\r\n\r\n".encode()


# What a socket says first, and then every DRIP seconds.
KINDS: dict[str, tuple[bytes, bytes]] = {
    "idle": (b"", b""),
    "half a head": (b"POST /v1/chat/completions HTTP/1.1\r\nHost: loc", b""),
    "slow head": (b"GET /v1/models HTTP/1.1\r\n", b"X-More: 1\r\n"),
    "no key": (_head(POST) + b'{"model": "', b" "),
    "half a body": (_head(POST, WITH_KEY) + b'{"model": "', b""),
    "slow body": (_head(POST, WITH_KEY) + b"{", b" "),
    "half an upload": (_head(PUT, WITH_KEY, 1_000_000_000) + b"word " * 4000, b""),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20, b""),
}


@dataclasses.dataclass
class Count:
    """Counts of what happened until now."""

    opened: int = 0  # hostile sockets
    open: int = 0
    served: int = 0
    again: int = 0  # 429s and 503s, after which a client came again
    failed: int = 0  # requests that failed otherwise, or a third time
    slowest: float = 0.0  # seconds
    why: str = ""  # the last failure


async def hostile(url: str, kind: str, count: Count) -> None:
    """Opens a socket of a kind, and another as soon as that is ended; until it is cancelled."""
    place = urlsplit(url)
    first, drop = KINDS[kind]
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(place.hostname, place.port)
            count.opened += 1
            count.open += 1
            try:
                writer.write(first)
                ended = asyncio.ensure_future(reader.read())
                while not (await asyncio.wait([ended], timeout=DRIP))[0]:
                    writer.write(drop)
                ended.result()
            finally:
                count.open -= 1
                writer.transport.abort()
        await asyncio.sleep(AGAIN)


async def client(url: str, body: dict[str, Any], count: Count, pause: float) -> None:
    """Asks one question after the other, until it is cancelled."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx2.AsyncClient(timeout=120, headers=headers) as line:
        while True:
            began = time.monotonic()
            why = await answered(line, url, body, count)
            count.slowest = max(count.slowest, time.monotonic() - began)
            if why is None:
                count.served += 1
            else:
                count.failed, count.why = count.failed + 1, why
            await asyncio.sleep(pause)


async def answered(
    line: httpx2.AsyncClient, url: str, body: dict[str, Any], count: Count
) -> str | None:
    """Asks as stock clients do, up to three times; returns why there was no answer, if so."""
    for tries in range(3):
        try:
            reply = await line.post(f"{url}/v1/chat/completions", json=body)
        except httpx2.HTTPError as error:
            return repr(error)
        if reply.status_code not in (429, 503):
            break
        if tries < 2:
            count.again += 1
            await asyncio.sleep(float(reply.headers["Retry-After"]))
    return None if reply.status_code == 200 else reply.text


def reading(model: str, document: str, question: str) -> dict[str, Any]:
    """The body of a reading."""
    parts = [{"type": "text", "text": text} for text in (document, question)]
    return {"model": f"{model}:notepad", "messages": [{"role": "user", "content": parts}]}


async def besieged(
    url: str, body: dict[str, Any], sockets: int, clients: int, seconds: float,
    pause: float = 0.1, tell: Callable[[Count], None] = lambda count: None,
) -> Count:  # fmt: skip
    """Returns what became of clients beside so many hostile sockets, which are there first."""
    count, kinds = Count(), list(KINDS)
    crowd = [
        asyncio.ensure_future(hostile(url, kinds[n % len(kinds)], count)) for n in range(sockets)
    ]
    await asyncio.sleep(min(1.0, seconds / 4))
    asking = [asyncio.ensure_future(client(url, body, count, pause)) for _ in range(clients)]
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        await asyncio.sleep(min(left, 10.0))
        tell(count)
    for task in [*asking, *crowd]:
        task.cancel()
    await asyncio.gather(*asking, *crowd, return_exceptions=True)
    return count


@contextlib.contextmanager
def program(policy: str, log: Path) -> Iterator[str]:
    """`notepad-jax serve` in a process of its own, and its address."""
    words = ["-m", "notepad_jax", "serve", "--policy", policy, "--served-name", "reader",
             "--port", "0"]  # fmt: skip
    environment = os.environ | {"NOTEPAD_API_KEY": KEY, "PYTHONPATH": str(ROOT)}
    with log.open("w") as said:
        server = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment,
                                  stdout=said, stderr=said)  # fmt: skip
        try:
            while not (found := re.search(r"(http://\S+)/v1 \(", log.read_text())):
                if server.poll() is not None:
                    raise ValueError(f"the server did not start: {log.read_text()}")
                time.sleep(0.2)
            yield found[1]
            server.terminate()  # Ctrl-C is ignored below a shell that runs this in the background
            server.wait(60)
        finally:
            server.kill()
            server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--sockets", type=int, default=1200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--policy", default="data/starter")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    body = reading("reader", "the secret code of Ada is amber . " * 20, "code of Ada ?")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with program(given.policy, log) as url:
            count = asyncio.run(
                besieged(
                    url, body, given.sockets, given.clients, given.minutes * 60,
                    tell=lambda count: print(dataclasses.asdict(count), file=sys.stderr),
                )
            )  # fmt: skip
        found = dataclasses.asdict(count) | {"log_bytes": log.stat().st_size}
    if given.json:
        print(json.dumps(found))
    else:
        print("\n".join(f"{name:10} {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
