"""Ten thousand requests that are wrong in every way: none makes the server fail, or grow.

The server is a process of its own, over the policy that is arithmetic, so that its memory and all
that it says can be looked at; `noise` says what is sent to it.
"""

import collections
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from urllib.parse import quote

import httpx2
import pytest

from tests.serve import noise
from tests.serve.fake import DOCUMENT, Arithmetic, running, served, until

ROOT = Path(__file__).parents[2]
REQUESTS, WARM = 10_000, 2_000
GROWTH = 4  # MB between the two
ANSWER = 30  # seconds

# What uvicorn says to the operator of those who do not speak HTTP.
TOLD = re.compile(r"WARNING: +(Invalid HTTP request received|Unsupported upgrade request)\.?.*"
                  r"|WARNING: +No supported WebSocket library detected.*")  # fmt: skip


@contextlib.contextmanager
def server(folder: Path):
    """(address, process, what it said) of a server that keeps all that it writes in `folder`."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", "TMPDIR": str(folder)}
    with (folder.parent / "said").open("w+") as said:
        pipe = subprocess.PIPE
        running = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe,
                                   stderr=said, env=environment, cwd=ROOT)  # fmt: skip
        patience = threading.Timer(600, running.kill)
        patience.start()
        try:
            url = running.stdout.readline().decode().strip()
            assert url, (folder.parent / "said").read_text()
            yield url, running, folder.parent / "said"
            running.communicate(b"end\n", timeout=60)
            assert running.returncode == 0
        finally:
            patience.cancel()
            running.kill()
            running.wait(60)


def resident(process: subprocess.Popen) -> float:
    """MB of memory that a process has."""
    pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


class Sender:
    """Sends requests one after the other, and tidies up what they leave on purpose."""

    def __init__(self, url: str) -> None:
        self.place = url.removeprefix("http://").split(":")
        self.line = http.client.HTTPConnection(*self.place, timeout=ANSWER)
        self.uploads: list[str] = []

    @property
    def upload(self) -> str:
        return self.uploads[-1] if self.uploads else "none"

    def whole(self, method: str, path: str, headers, body: bytes) -> tuple[int, str, bytes]:
        """(status, location, body) of a reply."""
        path = path.replace("UPLOAD", self.upload)  # the one that was begun last
        try:
            self.line.putrequest(method, path, skip_accept_encoding=True)
            for name, value in headers:
                self.line.putheader(name, value.encode("latin-1", "replace"))
            self.line.putheader("Content-Length", str(len(body)))
            self.line.endheaders(body)
            reply = self.line.getresponse()
            return reply.status, reply.getheader("location", ""), reply.read()
        except (http.client.HTTPException, ConnectionError):
            self.line.close()  # it ended the connection, which it may
            return 0, "", b""

    def send(self, one: noise.Request) -> tuple[int, bytes]:
        """The status of a reply, 0 where there was none, and what it said."""
        if one.wire is not None:
            return self.wire(one.wire.replace(b"UPLOAD", self.upload.encode()))
        status, location, said = self.whole(one.method, one.path, one.headers, one.body)
        self.tidy(one, status, location, said)
        return status, said

    def wire(self, data: bytes) -> tuple[int, bytes]:
        with socket.create_connection(self.place, timeout=ANSWER) as wire:
            said = b""
            with contextlib.suppress(ConnectionError):
                wire.sendall(data)
                wire.shutdown(socket.SHUT_WR)  # nothing more comes
                while more := wire.recv(1 << 16):
                    said += more
        found = re.match(rb"HTTP/1\.1 (\d+)", said.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n"))
        return int(found[1]) if found else 0, said

    def tidy(self, one: noise.Request, status: int, location: str, said: bytes) -> None:
        """Deletes what was made; keeps one upload for those that go into one."""
        if location.startswith("/v1/readings/"):
            self.delete(location)
        elif status == 200 and one.path == "/v1/uploads":
            self.uploads.append(json.loads(said)["id"])
        elif status == 200 and one.path.startswith("/v1/files") and one.method in ("PUT", "POST"):
            self.delete(f"/v1/files/{quote(json.loads(said)['id'])}")

    def delete(self, path: str) -> None:
        """Deletes a file, or a reading, which has to end first."""
        end = lambda: self.whole("DELETE", path, (), b"")[2]  # noqa: E731
        until(lambda: b'"deleted":true' in end())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read in /proc")
def test_ten_thousand_requests_that_are_wrong(tmp_path):
    (tmp_path / "kept").mkdir()
    counts: dict = collections.defaultdict(collections.Counter)
    with server(tmp_path / "kept") as (url, process, said):
        sender, client = Sender(url), httpx2.Client(timeout=ANSWER)
        warm = 0.0
        for number in range(REQUESTS):
            if number % 100 == 0:  # somebody may have put another in its place
                client.put(f"{url}/v1/files/book", content=DOCUMENT)
            if number == WARM:
                warm = resident(process)
            one = noise.request(number)
            status, text = sender.send(one)
            counts[one.path if one.wire is None else "broken HTTP"][status] += 1
            assert status < 500 and b"Traceback" not in text, (number, status, one, text[:500])
        end = resident(process)
        total = sum(counts.values(), collections.Counter())
        print(f"\n{warm:.1f} MB, then {end:.1f} MB; {dict(sorted(total.items()))}")
        for path, found in sorted(counts.items()):
            if path in {one[1] for one in noise.JSONS} | {"/v1/files", "broken HTTP"}:
                print(f"{path:28} {dict(sorted(found.items()))}")
        assert end - warm < GROWTH
        # Both doors were gone through often: what is refused, and what is done.
        assert total[200] > 1000 and total[400] > 4000 and total[401] > 50 and total[404] > 200
        until(lambda: "num_requests_running 0.0" in client.get(f"{url}/metrics").text)
        counted = client.get(f"{url}/metrics").text
        assert "num_requests_waiting 0.0" in counted and "request_failed_total 0.0" in counted
        assert client.get(f"{url}/health").status_code == 200
        for kind in ("files", "readings"):  # of those who had HTTP nearly right
            left = client.get(f"{url}/v1/{kind}").json()["data"]
            assert len(left) < 30
            for one in left:
                sender.delete(f"/v1/{kind}/{quote(one['id'])}")
        for id in sender.uploads:
            client.post(f"{url}/v1/uploads/{id}/cancel")
        files = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
        assert [path.name for path in files] == ["lock"], files
        assert not [line for line in said.read_text().splitlines() if not TOLD.fullmatch(line)]


def main() -> None:
    streamer = Arithmetic(slots=4)
    streamer.asked = collections.deque(maxlen=8)

    async def adopt(folder: str, version: int | None) -> None:
        raise ValueError(f"there is no {folder!r}")

    folder = Path(tempfile.gettempdir())
    with running(served(streamer), trainers=adopt, control_key=noise.CONTROL,
                 folder=folder / "files") as url:  # fmt: skip
        print(url, flush=True)
        sys.stdin.readline()
    assert streamer.seats == streamer.running == streamer.waiting == 0


if __name__ == "__main__":
    main()
