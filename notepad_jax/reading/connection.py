"""The HTTP client of one server, with timeouts and retries.

Failures are told apart. A busy or broken server (429, 5xx, no connection, no answer in
time, half an answer, one without choices) is asked again, ever more slowly; a refusal (400,
401, 403, 404) is an `EndpointProblem` at once, one line that says what to check. The key comes
from the environment and goes into one header: no message and no repr contains it, and a reply
that repeats it is blackened before it is shown. Above: endpoint; below: wire and httpx2.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import email.utils
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import httpx2
import numpy as np

from notepad_jax.reading import wire
from notepad_jax.reading.wire import WireReply

KEY_VARIABLE = "OPENAI_API_KEY"  # where the key is looked for if no other name is given
MAX_REPLY = 1 << 24  # bytes of one reply, reasoning included
CONNECT_SECONDS = 30.0  # to reach the server, within the timeout of a try
SECRET = 8  # characters; a shorter key, such as EMPTY, is a word that replies may have
LONGEST_PAUSE = 60.0  # seconds between two tries, whatever Retry-After asks for

_NOT_AN_ENDPOINT = "check that --endpoint is the base of an OpenAI-compatible API, often .../v1"


class EndpointProblem(ValueError):
    """The endpoint refused, or gave no usable answer; one line that says what to check."""


@dataclasses.dataclass(frozen=True)
class Patience:
    """The retry policy: how long a server is waited for, and how often it is asked."""

    timeout: float  # seconds of each try
    tries: int  # of one request
    first_pause: float  # seconds, about, between the first two tries; doubled each time


class ApiConnection:
    """An HTTP client of the API at `url`, with retries; the caller has to `close` it.

    `key_variable` names the environment variable with the key; without it OPENAI_API_KEY is
    used if set. `kept` connections stay open between requests. `on_retry` is called before
    each try after the first. Raises ValueError for an address or a variable that cannot be
    used.
    """

    def __init__(
        self,
        url: str,
        key_variable: str | None,
        patience: Patience,
        kept: int,
        on_retry: Callable[[], None],
    ) -> None:
        self.url = _checked_url(url)
        self._key_variable = key_variable or KEY_VARIABLE
        self._key = _key(key_variable)
        self._patience = patience
        self._on_retry = on_retry
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=kept)
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)  # a whole try is timed in _once
        self._client = httpx2.AsyncClient(headers=headers, timeout=timeout, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> Mapping[str, Any]:
        """Returns the JSON object under `path`, asked for twice at most; EndpointProblem."""
        return self.read(await self._send("GET", path, b"", 0, min(2, self._patience.tries)))

    async def post(self, path: str, body: bytes, seed: int) -> WireReply:
        """Returns the last reply of all tries, good or bad; `seed` draws the pauses between."""
        return await self._send("POST", path, body, seed, self._patience.tries)

    async def _send(self, method: str, path: str, body: bytes, seed: int, tries: int) -> WireReply:
        """Returns the last reply of up to `tries`, good or bad."""
        for attempt in range(tries):
            reply = await self._once(method, path, body)
            if not reply.worth_another_try or attempt + 1 == tries:
                break
            self._on_retry()
            first = self._patience.first_pause
            await asyncio.sleep(pause(first, attempt, seed, reply.retry_after))
        return dataclasses.replace(reply, tries=attempt + 1)

    async def _once(self, method: str, path: str, body: bytes) -> WireReply:
        timeout = self._patience.timeout
        try:
            async with (
                asyncio.timeout(timeout),
                self._client.stream(method, self.url + path, content=body) as response,
            ):
                heard = await _hear(response)
                if len(heard) > MAX_REPLY:
                    what = f"the reply has more than {MAX_REPLY >> 20} MB"
                    raise self.problem(path, what)
                later = response.headers.get("retry-after", "")
                return WireReply(path, response.status_code, heard, later)
        except TimeoutError:
            return WireReply(path, wire.NO_ANSWER, f"no answer within {timeout:g} s".encode())
        except httpx2.HTTPError as error:
            what = f"{type(error).__name__}: {error}"
            return WireReply(path, wire.NO_ANSWER, what.encode("utf-8", "replace"))

    def read(self, reply: WireReply) -> Mapping[str, Any]:
        """Returns the JSON object of a good reply, the key blackened; EndpointProblem otherwise."""
        again = f" ({reply.tries} tries)" if reply.tries > 1 else ""
        if not 200 <= reply.status < 300:
            what = self.plain(wire.message(reply.body)) or "no reason given"
            status = f"status {reply.status}: " if reply.status else ""
            raise self.problem(reply.path, f"{status}{what}{again}", self._mend(reply.status))
        try:
            answer = json.loads(reply.body)
            if len(self._key) >= SECRET:
                answer = wire.without(self._key, answer)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            begin = self.plain(wire.message(reply.body)) or "(empty)"
            raise self.problem(reply.path, f"the reply is not a JSON object: {begin}{again}")
        if answer.get("error"):  # some gateways put their failures under status 200
            what = self.plain(wire.message(reply.body))
            raise self.problem(reply.path, what, self._mend(400))
        return answer

    def problem(self, path: str, what: str, mend: str = _NOT_AN_ENDPOINT) -> EndpointProblem:
        """Returns the error to raise; `what` may hold a server's own words."""
        return EndpointProblem(f"{self.url}{path}: {what}; {mend}")

    def _mend(self, status: int) -> str:
        if status in (401, 403):
            state = "" if self._key else ", which is not set"
            return f"check the key in the environment variable {self._key_variable}{state}"
        if status in (400, 413, 422):
            return "check --model, and that a turn fits its context (chunk_size, max_memory)"
        if status == 429:
            return "ask for fewer requests at once, or see what the account allows"
        if status == wire.NO_ANSWER or status >= 500:
            return "check --endpoint, and that the server is up and not overloaded"
        return "check --endpoint (it often ends in /v1) and --model"

    def plain(self, text: str) -> str:
        """Returns a server's words on one short line, the key blackened."""
        if self._key:
            text = text.replace(self._key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= wire.MAX_MESSAGE else line[: wire.MAX_MESSAGE - 3] + "..."


async def _hear(response: httpx2.Response) -> bytes:
    """Returns the body, or a little more than MAX_REPLY bytes of a longer one."""
    heard = bytearray()
    async with contextlib.aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            heard += part
            if len(heard) > MAX_REPLY:
                break
    return bytes(heard)


def _checked_url(url: str) -> str:
    if any(mark in url for mark in "@?#"):  # not repeated here, it may be a secret
        raise ValueError(
            "the endpoint's address has a password, a query or a fragment in it; give the plain "
            "base, such as http://host:8000/v1, and the key by an environment variable"
        )
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url!r} is no endpoint's address: {error}") from None
    port_exists = parsed.port is None or 0 < parsed.port < 1 << 16
    if parsed.scheme not in ("http", "https") or not parsed.host or not port_exists:
        raise ValueError(f"{url!r} is no endpoint; give an address like http://host:8000/v1")
    return str(parsed).rstrip("/")


def _key(variable: str | None) -> str:
    """Returns the key, empty if there is none where none was asked for."""
    key = os.environ.get(variable or KEY_VARIABLE, "").strip()
    if variable and not key:
        raise ValueError(f"the environment variable {variable} is not set; put the API key there")
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(
            f"the environment variable {variable or KEY_VARIABLE} holds no API key: there are "
            "spaces or unusual characters in it"
        )
    return key


def pause(first: float, attempt: int, seed: int, retry_after: str) -> float:
    """Returns seconds: the first pause doubled each time, shortened by up to half at random.

    Never shorter than what the server asks for, and never over LONGEST_PAUSE.
    """
    backoff = first * 2**attempt * (0.5 + 0.5 * np.random.default_rng([seed, attempt]).random())
    return min(max(backoff, _asked_seconds(retry_after)), LONGEST_PAUSE)


def _asked_seconds(retry_after: str) -> float:
    """Reads a Retry-After header, seconds or a date (RFC 9110, 10.2.3); 0 if unreadable."""
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", retry_after):
        return float(retry_after)
    try:
        then = email.utils.parsedate_to_datetime(retry_after)
        return (then - datetime.datetime.now(datetime.UTC)).total_seconds()
    except (TypeError, ValueError, OverflowError):
        return 0.0
