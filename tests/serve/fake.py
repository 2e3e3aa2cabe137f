"""A policy that is arithmetic, and a real server on a free port in front of it.

The n-th token of a completion is the prompt's token number (seed + n), counted round; after as
many as the prompt has comes a stop token. Logprobs are -1/8, -2/8, ...; alternatives are the
tokens 300, 301, ... They come two at a time.
"""

import asyncio
import contextlib
import pathlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence

import fakes
import httpx2
import numpy as np

from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.serve.app import App
from notepad_jax.serve.browser.renderers import Renderers
from notepad_jax.serve.completions.admission import RequestQueue
from notepad_jax.serve.completions.control import Adopt, Gate
from notepad_jax.serve.completions.conversations import Conversations
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.documents.roots import DocumentRoots
from notepad_jax.serve.documents.store import Files
from notepad_jax.serve.http.connections import ConnectionLimits, Server
from notepad_jax.text.chat import ChatTemplate
from notepad_jax.types import Completion, Finish, Piece, tokens
from tests.text.test_chat import CHATML

FINGERPRINT = "np-7"  # of the weights
NAME = "arithmetic"
TOKENIZER = fakes.tokenizer()


class Arithmetic:
    """A `types.Streamer` with so many slots; `pause` seconds lie before each two tokens."""

    def __init__(self, slots: int = 4, pause: float = 0.0) -> None:
        self.slots, self.pause, self.broken = slots, pause, None
        self.waiting = self.running = self.most = self.seats = 0
        self.asked: list = []
        self._free: asyncio.Semaphore | None = None

    @contextlib.contextmanager
    def seat(self):
        self.seats += 1
        try:
            yield self
        finally:
            self.seats -= 1

    @contextlib.asynccontextmanager
    async def _slot(self):
        self._free = self._free or asyncio.Semaphore(self.slots)
        self.waiting += 1
        try:
            async with self._free:
                self.running += 1
                self.most = max(self.most, self.running)
                try:
                    yield
                finally:
                    self.running -= 1
        finally:
            self.waiting -= 1

    async def complete(self, prompt, sampling):
        pieces = [piece async for piece in self.stream(prompt, sampling)]
        ids = np.concatenate([piece.tokens for piece in pieces])
        logprobs = np.concatenate([piece.behaviour_logprobs for piece in pieces])
        return Completion(tokens(ids), logprobs, pieces[-1].finish, 7)

    async def stream(self, prompt, sampling):
        self.asked.append((prompt, sampling))
        cached = 3 + len(self.asked)  # more for those that come later
        async with self._slot():
            if self.broken:
                raise self.broken
            ids = prompt.draft.tolist() if sampling.scored else said(prompt.tokens, sampling)
            for first in range(0, len(ids), 2):
                await asyncio.sleep(self.pause)
                new = ids[first : first + 2]
                ended = first + 2 >= len(ids)
                stopped = ended and new[-1] in sampling.stop_ids
                finish = (Finish.STOP if stopped else Finish.LENGTH) if ended else None
                logprobs = -(1.0 + first + np.arange(len(new), dtype=np.float32)) / 8
                some = tuple((300 + k, -1.0 - k) for k in range(sampling.top_logprobs))
                top = (some,) * len(new) if some else ()
                yield Piece(tokens(new), logprobs.astype(np.float32), finish, 7, top, cached)


def said(prompt, sampling) -> list[int]:
    """The ids of a completion."""
    ids = [int(prompt[(sampling.seed + n) % len(prompt)]) for n in range(len(prompt))]
    ends = [n for n, i in enumerate(ids) if i in sampling.stop_ids]
    ids = ids[: ends[0] + 1] if ends else [*ids, sampling.stop_ids[0]]
    return ids[: sampling.max_new_tokens]


def served(streamer: Arithmetic, chat: bool = True, **changes) -> Served:
    template = fakes.template()

    async def alive():
        if streamer.broken:
            raise streamer.broken

    about = dict(
        name=NAME, tokenizer=TOKENIZER, template=template, rules=fakes.rules(),
        conversations=Conversations(ChatTemplate(pathlib.Path("fake"), CHATML, {}), TOKENIZER)
        if chat else None,
        sampling=TurnSampling(0.0, 1.0, template.stop_ids, 0), seat=streamer.seat, alive=alive,
        missing=lambda: "", grammar=None, version=lambda: 7, fingerprint=lambda: FINGERPRINT,
        slots=streamer.slots, max_prompt=400, max_completion=64, most_stops=8,
    )  # fmt: skip
    return Served(**about | changes)


@contextlib.contextmanager
def running(
    policy: Served, waiting: int = 8, queued_tokens: int = 0, key: str | None = None,
    trainers: Adopt | None = None, control_key: str | None = None,
    folder: pathlib.Path | None = None, views: Renderers | None = None, port: int = 0,
    documents: Sequence[str] = (), limits: ConnectionLimits | None = None,
    origins: Sequence[str] = (),
) -> Iterator[str]:  # fmt: skip
    """Serves in a thread, with files in `folder` and `documents` elsewhere; yields the server's
    address."""
    limits = limits or ConnectionLimits()
    gate = Gate(trainers) if trainers else None
    queue = RequestQueue(policy.slots, waiting, queued_tokens)
    # By the protocol's number asyncio knows that it may send at once, without waiting for more.
    place = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", port))
    named = DocumentRoots(documents)
    with place, Files(folder, named) as files, contextlib.ExitStack() as stack:
        app = App(policy, queue, key, gate, control_key, files, views, limits.body_bytes, origins)
        server = Server(app.asgi, limits, queue.counts.dropped.inc, farewell=1)
        stack.enter_context(listening(server, place))
        yield f"http://127.0.0.1:{place.getsockname()[1]}"


DOCUMENT = "ann says the secret code of bob is blue . " * 6


@contextlib.contextmanager
def library(
    folder: pathlib.Path | None = None, streamer: Arithmetic | None = None,
    text: str | None = DOCUMENT, documents: Sequence[str] = (),
) -> Iterator[tuple[str, Arithmetic]]:  # fmt: skip
    """A server that has a book, and its policy."""
    streamer = streamer or Arithmetic()
    with running(served(streamer), folder=folder, documents=documents) as url:
        if text is not None:
            httpx2.put(f"{url}/v1/files/book", content=text)
        yield url, streamer


@contextlib.contextmanager
def listening(server: Server, place: socket.socket) -> Iterator[None]:
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield
    finally:
        server.should_exit = True
        thread.join(30)


def until(true, seconds: float = 30.0) -> None:
    """Waits; AssertionError if it never comes true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)
