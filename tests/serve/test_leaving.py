"""Clients that hang up on the real engine, in every phase: its slots and pages come back.

A launch can be held, so that what happens to whom is known and not a matter of time.
"""

import asyncio
import contextlib
import json
import socket
import threading

import httpx2
import pytest

from notepad_jax.engine.executor import Executor
from notepad_jax.programs import serve
from notepad_jax.setup import builders, configuration
from notepad_jax.telemetry.screen import SilentScreen
from tests import chat_models
from tests.serve.fake import running, until
from tests.serve.test_training import CONFIG

CLIENT = httpx2.Client(timeout=120)
DOCUMENT = "ann says the secret code of bob is blue . " * 40
SIZES = ["--config.serve.max_completion=40", "--config.serve.queue=20",
         "--config.engine.steps_per_launch=4"]  # fmt: skip


class Brake:
    """Holds the launches of one kind, of those that are made from `on` to `off`."""

    def __init__(self) -> None:
        self.kind, self.left, self._reached, self._go = None, 0, None, None
        self.launches = 0  # so far

    @contextlib.contextmanager
    def on(self, kind: str, after: int = 0):
        """Holds the next launch of a kind but `after` earlier ones, until the block is left."""
        self._reached, self._go = threading.Event(), threading.Event()
        self.left, self.kind = after, kind
        try:
            yield self
        finally:
            self.kind = None
            self._go.set()

    def reached(self) -> None:
        assert self._reached.wait(15), f"no launch to {self.kind} was made"

    def passes(self, kind: str) -> None:
        self.launches += 1
        if kind == self.kind:
            if self.left:
                self.left -= 1
            else:
                self._reached.set()
                assert self._go.wait(60), "nobody let it go"


@pytest.fixture(scope="module")
def brake():
    return Brake()


@pytest.fixture(scope="module")
def engine(tmp_path_factory, brake):
    """A server's address, and the scheduler of the one engine behind it."""
    folder = chat_models.folder(tmp_path_factory.mktemp("leaving") / "chats")
    config = configuration.load("chat", [*CONFIG, *SIZES, f"--config.policy={folder}"])
    policy = builders.load_policy(folder, config.dtype, builders.to_read(config.engine))
    weights = serve.ServedWeights(config, policy, SilentScreen())
    engines, served = serve.opened(config, policy, "m", weights)
    found, over = [], threading.Event()

    async def scheduler(number, service):
        return service.scheduler

    async def go():
        async with engines:
            schedulers = await engines.each(scheduler)
            with running(served, waiting=20) as url:
                found.append((url, schedulers[0]))
                await asyncio.to_thread(over.wait)

    with pytest.MonkeyPatch.context() as patch:
        for kind in ("read", "start", "decode"):
            patch.setattr(Executor, kind, held(brake, kind, getattr(Executor, kind)))
        thread = threading.Thread(target=lambda: asyncio.run(go()), daemon=True)
        thread.start()
        until(lambda: found, 120)
        yield found[0]
        over.set()
        thread.join(60)


def held(brake: Brake, kind: str, launch):
    def launched(self, params, some):
        if some:
            brake.passes(kind)
        return launch(self, params, some)

    return launched


def free(scheduler) -> bool:
    """No slot is taken, and no page but those of prefixes that nobody reads."""
    left = scheduler.pool.free + scheduler.prefixes.unused
    return scheduler.idle and left == scheduler.settings.pages


def sent(url: str, path: str, body: dict, cut: int | None = None) -> socket.socket:
    """A connection with a request on it, or with its first bytes."""
    host, port = url.removeprefix("http://").split(":")
    wire = socket.create_connection((host, int(port)), timeout=60)
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n\r\n"
    wire.sendall((head.encode() + text)[:cut])
    return wire


def gauge(url: str, name: str) -> float:
    lines = CLIENT.get(f"{url}/metrics").text.splitlines()
    return float(next(x for x in lines if x.startswith(f"notepad:num_requests_{name} "))[-3:])


def ended(url: str) -> list[str]:
    """What /metrics says of completions that were made to their end."""
    return [x for x in CLIENT.get(f"{url}/metrics").text.splitlines() if "success_total{" in x]


def noticed(url: str) -> None:
    """Whoever hung up before was noticed when later requests were answered."""
    for _ in range(5):
        CLIENT.get(f"{url}/version")


CHAT, READINGS = "/v1/chat/completions", "/v1/readings"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "who is ann ? " * 9}], "seed": 2,
         "stream": True}  # fmt: skip
READ = PLAIN | {"model": "m:notepad", "messages": [{"role": "user", "content": [
    {"type": "text", "text": text} for text in (DOCUMENT, "code of bob ?")
]}]}  # fmt: skip
SCORED = {
    "model": "m",
    "prompt": "the secret code of bob " * 9,
    "prompt_logprobs": 1,
    "seed": 2,
    "max_tokens": 40,
}
LAUNCHES = [
    (CHAT, PLAIN, "start", 0), (CHAT, PLAIN, "decode", 0), (CHAT, PLAIN, "decode", 3),
    (CHAT, PLAIN | {"stream": False, "n": 3}, "decode", 1),
    ("/v1/completions", SCORED, "start", 1), (CHAT, READ, "read", 0), (CHAT, READ, "start", 2),
    (CHAT, READ, "decode", 4),
    (READINGS, {"file_id": "book", "questions": ["who ?", "code ?"], "samples": 3}, "decode", 3),
]  # fmt: skip


@pytest.mark.slow
def test_whoever_hangs_up_in_any_phase_gives_slots_and_pages_back(engine, brake):
    url, scheduler = engine
    assert CLIENT.put(f"{url}/v1/files/book", content=DOCUMENT).status_code == 200
    whole = PLAIN | {"stream": False, "return_token_ids": True}
    before = CLIENT.post(url + CHAT, json=whole).json()["choices"]
    assert before[0]["finish_reason"] == "length"  # there are as many launches as are held below
    for cut in (20, 60, 200):  # half a head, a head, half a body
        sent(url, CHAT, READ, cut).close()
    made = ended(url)
    for path, body, kind, after in LAUNCHES:
        with brake.on(kind, after):
            wire = sent(url, path, body)
            brake.reached()
            assert not free(scheduler), (kind, after)
            wire.close()
            noticed(url)
            launches = brake.launches
        until(lambda: free(scheduler) and gauge(url, "running") == 0, 60)
        assert brake.launches <= launches + 2, (kind, after)  # the rest of a round
        assert ended(url) == made, (path, kind, after)
    assert [one["status"] for one in CLIENT.get(url + READINGS).json()["data"]] == ["cancelled"]
    assert CLIENT.post(url + CHAT, json=whole).json()["choices"] == before


@pytest.mark.slow
def test_whoever_hangs_up_while_he_waits_or_listens_gives_everything_back(engine, brake):
    url, scheduler = engine
    slots = scheduler.settings.slots
    with brake.on("decode"):
        full = sent(url, CHAT, PLAIN | {"n": slots})
        brake.reached()
        waiting = [sent(url, CHAT, READ | {"seed": k}) for k in range(3)]
        until(lambda: gauge(url, "waiting") == 3)
        made = ended(url)
        for wire in (*waiting, full):
            wire.close()
        noticed(url)
        launches = brake.launches
    until(lambda: free(scheduler) and gauge(url, "running") == 0, 60)
    assert brake.launches == launches, "those who waited were read"
    with brake.on("decode", 2):  # in the middle of what is told
        stream = sent(url, CHAT, PLAIN)
        until(lambda: b"policy_version" in stream.recv(1 << 12))
        brake.reached()
        stream.close()
        noticed(url)
    until(lambda: free(scheduler) and gauge(url, "running") == 0, 60)
    assert ended(url) == made


@pytest.mark.slow
def test_an_upload_and_a_stream_of_events_that_are_left(engine, brake):
    url, scheduler = engine
    CLIENT.put(f"{url}/v1/files/book", content=DOCUMENT)
    kept = CLIENT.get(f"{url}/v1/files").json()["data"]
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as wire:
        wire.sendall(f"PUT /v1/files/half HTTP/1.1\r\nHost: {host}\r\n".encode())
        wire.sendall(b"Content-Length: 9999999\r\n\r\n" + b"half " * 9999)
    asked = {"file_id": "book", "questions": ["code of bob ?"], "seed": 2, "detach": True}
    with brake.on("start", 2):
        there = url + CLIENT.post(url + READINGS, json=asked).headers["location"]
        brake.reached()
        path = there.removeprefix(url)
        with socket.create_connection((host, int(port)), timeout=60) as wire:
            wire.sendall(f"GET {path}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            until(lambda: b"event: turn" in wire.recv(1 << 12))
        assert CLIENT.get(there).json()["status"] == "in_progress"  # it is detached
        assert not free(scheduler)
    until(lambda: CLIENT.get(there).json()["status"] == "completed", 120)
    until(lambda: free(scheduler) and gauge(url, "running") == 0, 60)
    assert CLIENT.get(f"{url}/v1/files").json()["data"] == kept
