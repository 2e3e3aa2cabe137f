"""A real HTTP server in the loop of a test, and a completer that talks to it."""

import asyncio
import contextlib
import dataclasses
import json
import re

import pytest

from notepad_jax.reading.connection import EndpointProblem
from notepad_jax.reading.endpoint import EndpointCompleter
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.types import Prompt, SamplingParams, tokens

TOKENIZER = ApproximateTokenizer()
SAMPLING = SamplingParams(0.7, 0.95, 20, TOKENIZER.stop_ids, seed=2**40 + 5)


@dataclasses.dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict


def good(content="red", finish="stop", **message):
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def error(status, message="no", **more):
    return status, {"error": {"message": message, **more}}


@contextlib.contextmanager
def closing(writer):
    try:
        yield
    finally:
        writer.close()


class Server:
    """Answers each request by a function of it: (status, JSON or bytes[, header lines])."""

    def __init__(self, answer):
        self._answer = answer
        self.requests: list[Request] = []
        self.running = self.most = 0
        self.url = ""

    async def __aenter__(self):
        self._connections: set[asyncio.Task] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *failure):
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports say goodbye in the next round of the loop

    def _accept(self, reader, writer):
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            while not reader.at_eof():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                headers = dict(re.findall(r"^([\w-]+): (.*)\r$", head.lower(), re.MULTILINE))
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                headers |= dict(re.findall(r"^(Authorization): (.*)\r$", head, re.MULTILINE))
                await self._reply(writer, Request(path, headers, json.loads(raw or "{}")))

    async def _reply(self, writer, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            said = self._answer(request)
            status, body, *lines = await said if asyncio.iscoroutine(said) else said
        finally:
            self.running -= 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = "".join(f"{line}\r\n" for line in lines)
        head = f"HTTP/1.1 {status} Any\r\nContent-Length: {len(data)}\r\n{more}\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


def in_turn(*answers):
    """Gives the answers one after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def prompt(text="who?"):
    return Prompt(shared=tokens(), tail=TOKENIZER.encode(text))


def run(answer, use=None, sampling=SAMPLING, **options):
    """Starts a server and a completer; returns (what `use` returns, server, completer).

    Without `use`, one prompt is completed. Fails if a task of theirs outlives them.
    """

    async def main():
        before = asyncio.all_tasks()
        async with Server(answer) as server:
            options.setdefault("first_pause", 0.001)
            options.setdefault("model", "m")
            options.setdefault("tokenizer", TOKENIZER)
            async with EndpointCompleter(server.url, **options) as completer:
                one = completer.complete(prompt(), sampling) if use is None else use(completer)
                result = await one
        return result, server, completer, asyncio.all_tasks() - before

    result, server, completer, left = asyncio.run(main())
    assert not left and completer._connection._client.is_closed
    return result, server, completer


def problem(answer, asked=None, **options):
    """Runs one completion (of `asked`) that has to fail; returns (message, server, stats)."""

    async def use(completer):
        with pytest.raises(EndpointProblem) as caught:
            await completer.complete(asked or prompt(), SAMPLING)
        return str(caught.value)

    message, server, completer = run(answer, use, **options)
    assert message.isprintable() and completer.stats.failed == 1
    return message, server, completer.stats
