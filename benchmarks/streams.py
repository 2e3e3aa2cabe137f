"""What many open streams cost the server: its one thread of asyncio, an engine that costs nothing.

    python -m benchmarks.streams [--streams 1000] [--tokens 64] [--pause 0.1] [--json]

The engine is a clock: every `--pause` seconds each stream that is open has `--per-launch` tokens
more, all at once, as from a launch of as many slots. What is measured is the rest: tokens as text,
chunks as JSON, HTTP. The server is a process of its own; its share of a core is of the seconds in
which all streams were open. Times between tokens are those that the client, another process, sees
between the chunks of one stream: the clock's, where the server keeps up. Below: `serve.app`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.serving import NAME, STARTER, listening
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.serve.app import App
from notepad_jax.serve.completions.admission import RequestQueue
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import open_tokenizer
from notepad_jax.types import Completion, Finish, Piece, Prompt, SamplingParams, tokens

PROMPT = "the secret code of Ada is"
MARK = b"data: {"


class Clock:
    """A `types.Streamer` that makes tokens at every tick."""

    def __init__(self, pause: float, per_launch: int, words: Sequence[int]) -> None:
        self._pause, self._per_launch, self._words = pause, per_launch, words
        self._strike: asyncio.Future | None = None

    async def _launch(self) -> None:
        """Returns when the launch under way has ended: at the same moment for all."""
        loop = asyncio.get_running_loop()
        if self._strike is None or self._strike.done():
            self._strike = loop.create_future()
            at = (loop.time() // self._pause + 1) * self._pause
            loop.call_at(at, self._strike.set_result, None)
        await asyncio.shield(self._strike)

    async def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncIterator[Piece]:
        """Yields the prompt's words over and over."""
        made = 0
        while made < sampling.max_new_tokens:
            await self._launch()
            count = min(self._per_launch, sampling.max_new_tokens - made)
            ids = [self._words[(made + n) % len(self._words)] for n in range(count)]
            made += count
            finish = Finish.LENGTH if made == sampling.max_new_tokens else None
            yield Piece(tokens(ids), np.full(count, -1.0, np.float32), finish, 0)

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        raise NotImplementedError("this engine only streams; nothing here asks it otherwise")


def served(streams: int, clock: Clock, limit: int) -> Served:
    """The clock as a policy that is served."""
    tokenizer = open_tokenizer(STARTER)
    template = Template.load("question_last", tokenizer)

    async def alive() -> None:
        pass

    return Served(
        name=NAME, tokenizer=tokenizer, template=template, conversations=None,
        rules=Rules(8, 256, 8, 4, "overwrite"),
        sampling=TurnSampling(0.0, 1.0, template.stop_ids, 0),
        seat=lambda: contextlib.nullcontext(clock), alive=alive, version=lambda: 0,
        fingerprint=lambda: "clock", missing=lambda: "", grammar=None, slots=streams, max_prompt=64,
        max_completion=limit, most_stops=8,
    )  # fmt: skip


def serve(line: Connection, streams: int, limit: int, pause: float, per_launch: int) -> None:
    """The server's process: tells its address, then the seconds of CPU that it has had."""
    words = open_tokenizer(STARTER).encode(PROMPT).tolist()
    policy = served(streams, Clock(pause, per_launch, words), limit)
    with listening(App(policy, RequestQueue(streams, streams, 0), None).asgi) as url:
        line.send(url)
        while line.recv():
            line.send(time.process_time())


@contextlib.contextmanager
def server(*about: float) -> Iterator[tuple[str, Connection]]:
    """The address of a server in a process of its own, and the line to it."""
    spawn = multiprocessing.get_context("spawn")
    line, other = spawn.Pipe()
    process = spawn.Process(target=serve, args=(other, *about), daemon=True)
    process.start()
    try:
        yield line.recv(), line
        line.send(False)
        process.join(30)
    finally:
        process.kill()


@dataclasses.dataclass
class Seen:
    """What a client saw of its stream: seconds between its chunks, and when it was open."""

    gaps: list[float] = dataclasses.field(default_factory=list)
    begin: float = 0.0
    end: float = 0.0


async def follow(place: list[str], request: bytes, seen: Seen) -> None:
    """One client: reads its stream to the end."""
    reader, writer = await asyncio.open_connection(*place)
    writer.write(request)
    before = b""
    try:
        while data := await reader.read(1 << 16):
            now = time.perf_counter()
            found = (before + data).count(MARK)
            before = data[-len(MARK) + 1 :]
            for _ in range(found):
                if seen.end:
                    seen.gaps.append(now - seen.end)
                seen.begin, seen.end = seen.begin or now, now
    finally:
        writer.close()


async def measure(
    url: str, line: Connection, streams: int, limit: int, per_launch: int
) -> dict[str, float]:
    """Opens all streams and follows them; returns what the server made of it."""
    whole = -(-limit // per_launch)  # chunks of a stream
    body = json.dumps({"model": NAME, "prompt": PROMPT, "max_tokens": limit, "stream": True})
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n")  # fmt: skip
    every = [Seen() for _ in range(streams)]
    place = url.removeprefix("http://").split(":")
    asked = time.perf_counter()
    following = asyncio.gather(*(follow(place, (head + body).encode(), seen) for seen in every))
    while not all(seen.begin for seen in every) and not following.done():
        await asyncio.sleep(0.01)
    opened, cpu = time.perf_counter(), _cpu(line)
    while not any(len(seen.gaps) >= whole - 1 for seen in every) and not following.done():
        await asyncio.sleep(0.01)
    closing, cpu = time.perf_counter(), _cpu(line) - cpu
    await following
    chunks = sum(len(seen.gaps) + 1 for seen in every)
    gaps = np.array([gap for seen in every for gap in seen.gaps])
    seconds = max(seen.end for seen in every) - min(seen.begin for seen in every)
    found = {
        "streams": streams, "tokens_per_second": streams * limit / seconds,
        "chunks_per_second": chunks / seconds, "core_share": cpu / (closing - opened),
        "open_seconds": opened - asked, "chunks": chunks,
    }  # fmt: skip
    shares = {f"p{p}_ms": 1000 * float(np.percentile(gaps, p)) for p in (50, 99)}
    return found | shares | {"longest_ms": 1000 * float(gaps.max()), "load": os.getloadavg()[0]}


def _cpu(line: Connection) -> float:
    line.send(True)
    return line.recv()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000, help="open at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of each stream")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds of a launch")
    parser.add_argument("--per-launch", type=int, default=1, help="tokens of a launch, a chunk")
    parser.add_argument("--json", action="store_true")
    said = parser.parse_args(argv)
    with server(said.streams, said.tokens, said.pause, said.per_launch) as (url, line):
        found = asyncio.run(measure(url, line, said.streams, said.tokens, said.per_launch))
    if said.json:
        print(json.dumps(found))
        return
    print(
        f"{said.streams:,} streams, a launch every {1000 * said.pause:g} ms: "
        f"{found['tokens_per_second']:,.0f} tokens/s, {found['chunks_per_second']:,.0f} chunks/s, "
        f"{found['core_share']:.0%} of a core; between chunks p50 {found['p50_ms']:.0f} ms, "
        f"p99 {found['p99_ms']:.0f}, longest {found['longest_ms']:.0f}; "
        f"all were open after {found['open_seconds']:.1f} s (load {found['load']:.1f})"
    )


if __name__ == "__main__":
    main()
