"""A `Completer` over any OpenAI-compatible endpoint: a vLLM server, or a hosted model.

The agent is the one of training; only the bridge differs. A prompt is turned back into
text and sent as one user message, and the server puts its chat template around it, so
templates are loaded with `bare_turn`. Text is enough: everything in a prompt was text
before, and the completions endpoint, which takes ids, would need the server's tokenizer
here. What is lost is that a memory is encoded anew by the server, and that a chunk of a
byte-level tokenizer may begin inside a character; `approximate` cuts between characters.
Such readings are for measuring: logprobs come back as NaN, and training refuses them.

Failures are told apart. A busy or broken server (429, 5xx, no connection, no answer in
time) is asked again, ever more slowly; a refusal (400, 401, 403, 404) is an
`EndpointProblem` at once. The key comes from the environment and goes into one header:
no message and no repr contains it. Above: eval and the programs; below: httpx2.
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
from collections.abc import Mapping
from typing import Any

import httpx2
import numpy as np

from notepad_jax.text.chat import Frame
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Completion, Finish, Prompt, SamplingParams, Tokens, tokens

KEY_VARIABLE = "OPENAI_API_KEY"  # where the key is looked for if no other name is given
MAX_REPLY = 1 << 24  # bytes of one reply, reasoning included
MAX_MESSAGE = 200  # characters of a server's own words in our messages
CONNECT_SECONDS = 30.0  # to reach the server, within the timeout of a try
LONGEST_PAUSE = 60.0  # seconds between two tries, whatever Retry-After asks for
LENGTH_REASONS = ("length", "max_tokens")  # finish_reason of a completion that was cut

_NO_ANSWER = 0  # in the place of a status: the server was not reached, or fell silent
_RETRIED = (_NO_ANSWER, 408, 425, 429)  # and 500 to 599
_REFUSAL = re.compile(
    r"unsupported|not (?:be )?(?:supported|permitted|allowed)|unrecogni[sz]ed|unknown|unexpected"
    r"|extra_forbidden|\binstead\b",
    re.IGNORECASE,
)


class EndpointProblem(ValueError):
    """The endpoint refused, or gave no usable answer; one line that says what to check."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What an EndpointCompleter has done so far; tokens are those the server counted."""

    requests: int = 0  # completions asked for
    retries: int = 0  # tries after the first
    failed: int = 0  # completions that ended in an EndpointProblem
    prompt_tokens: int = 0
    completion_tokens: int = 0
    empty: int = 0  # replies without text, such as reasoning that used up the limit
    filtered: int = 0  # replies that the server's content filter ended
    trimmed: int = 0  # replies longer than the limit by the local tokenizer, cut there
    unseeded: int = 0  # replies sampled without our seed, because the server refuses one


def bare_turn(tokenizer: Tokenizer) -> Frame:
    """Returns the frame without markers: for templates whose turns an endpoint wraps."""
    return Frame("", "", tokenizer.stop_ids)


class EndpointCompleter:
    """Completions by `POST {url}/chat/completions`; use it as `async with`.

    `url` is the endpoint's base, such as http://localhost:8000/v1. An empty `model` stands
    for the only one the server has; entering the context fills in `model`. `key_variable`
    names the environment variable with the key; without it OPENAI_API_KEY is used if set.
    At most `at_once` requests run at a time, and one that waits for its next try counts.
    A request is tried `tries` times; `timeout` seconds bound each try, and `first_pause`
    seconds are about the first pause between two, doubled each time.

    Raises ValueError for an address or a variable that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Tokenizer,
        key_variable: str | None = None,
        at_once: int = 32,
        timeout: float = 600.0,
        tries: int = 6,
        first_pause: float = 1.0,
    ) -> None:
        for name, value in (("at_once", at_once), ("tries", tries)):
            if value < 1:
                raise ValueError(f"{name} is {value}; an endpoint needs at least 1")
        self.url = _checked_url(url)
        self.model = model
        self.stats = Stats()
        self._key_variable = key_variable or KEY_VARIABLE
        self._key = _key(key_variable)
        self._tokenizer = tokenizer
        self._gate = asyncio.Semaphore(at_once)
        self._timeout, self._tries, self._first_pause = timeout, tries, first_pause
        self._dialect = _Dialect("max_tokens", seeded=True)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=at_once)
        patience = httpx2.Timeout(None, connect=CONNECT_SECONDS)  # a whole try is timed in _once
        self._client = httpx2.AsyncClient(headers=headers, timeout=patience, limits=limits)

    async def __aenter__(self) -> EndpointCompleter:
        try:
            self.model = self.model or await self._only_model()
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._client.aclose()

    async def models(self) -> list[str]:
        """Returns the ids of the models that the server has, in its order."""
        reply = await self._send("GET", "/models", b"", seed=0, tries=min(2, self._tries))
        listed = self._read(reply).get("data")
        if not isinstance(listed, list):
            raise self._problem("/models", "the reply lists no models", _NOT_AN_ENDPOINT)
        ids = [entry.get("id") for entry in listed if isinstance(entry, dict)]
        return [name for name in ids if isinstance(name, str)]

    async def _only_model(self) -> str:
        found = await self.models()
        if len(found) != 1:
            some = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
            what = self._plain(f"{len(found)} models: {some}" if found else "no model")
            raise self._problem("/models", f"the server has {what}", "choose one with --model")
        return found[0]

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sends the prompt as one user message and returns the reply as local tokens.

        A reply that the local tokenizer counts over `sampling.max_new_tokens` (the stop
        token included) is trimmed to them and finishes by LENGTH, so no memory outgrows its
        limit. `behaviour_logprobs` are NaN, `policy_version` is 0. Of the seed the lower
        31 bits are sent; a server may ignore it, and then the same call differs next time.
        Raises EndpointProblem.
        """
        text = _well_formed(self._tokenizer.decode(prompt.tokens))
        async with self._gate:
            self._count(requests=1)
            try:
                reply = await self._chat(text, sampling)
                content, reason = self._choice(reply)
            except EndpointProblem:
                self._count(failed=1)
                raise
        usage = reply.get("usage")
        self._count(
            prompt_tokens=_used(usage, "prompt_tokens"),
            completion_tokens=_used(usage, "completion_tokens"),
            empty=not content,
            filtered=reason == "content_filter",
        )
        return self._completion(content, reason in LENGTH_REASONS, sampling)

    def _completion(self, content: str, cut: bool, sampling: SamplingParams) -> Completion:
        limit = sampling.max_new_tokens
        ids = _first_tokens(self._tokenizer, content, limit + 1)
        if not cut:
            stop = (sampling.stop_ids or self._tokenizer.stop_ids)[0]
            ids = tokens(np.append(ids, stop))
        if len(ids) > limit:
            ids, cut = tokens(ids[:limit].copy()), True
            self._count(trimmed=1)
        unknown = np.full(len(ids), np.nan, np.float32)
        return Completion(ids, unknown, Finish.LENGTH if cut else Finish.STOP, policy_version=0)

    # ------------------------------------------------------------- what is said and heard

    async def _chat(self, text: str, sampling: SamplingParams) -> Mapping[str, Any]:
        """Returns the reply; names the limit otherwise or leaves the seed out if it must."""
        path, dialect = "/chat/completions", self._dialect
        while True:
            body = json.dumps(dialect.request(self.model, text, sampling)).encode()
            reply = await self._send("POST", path, body, sampling.seed, self._tries)
            other = dialect.adapted(reply)
            if other is None:
                break
            dialect = other
        answer = self._read(reply)
        if dialect != self._dialect:
            self._dialect = dialect  # the server accepted it
        self._count(unseeded=not dialect.seeded)
        return answer

    def _choice(self, reply: Mapping[str, Any]) -> tuple[str, str]:
        """Returns (content, finish_reason); reasoning_content is none of our business."""
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = choice.get("message") if isinstance(choice, dict) else None
        content = message.get("content", "") if isinstance(message, dict) else 0
        if content is not None and not isinstance(content, str):
            what = "the reply has no choices[0].message.content"
            raise self._problem("/chat/completions", what, _NOT_AN_ENDPOINT)
        return content or "", str(choice.get("finish_reason"))

    async def _send(self, method: str, path: str, body: bytes, seed: int, tries: int) -> _Reply:
        """Returns the last reply of up to `tries`, good or bad."""
        for attempt in range(tries):
            reply = await self._once(method, path, body)
            if not reply.worth_another_try or attempt + 1 == tries:
                break
            self._count(retries=1)
            await asyncio.sleep(_pause(self._first_pause, attempt, seed, reply.retry_after))
        return dataclasses.replace(reply, tries=attempt + 1)

    async def _once(self, method: str, path: str, body: bytes) -> _Reply:
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream(method, self.url + path, content=body) as response,
            ):
                heard = await _hear(response)
                if len(heard) > MAX_REPLY:
                    what = f"the reply has more than {MAX_REPLY >> 20} MB"
                    raise self._problem(path, what, _NOT_AN_ENDPOINT)
                later = response.headers.get("retry-after", "")
                return _Reply(path, response.status_code, heard, later)
        except TimeoutError:
            return _Reply(path, _NO_ANSWER, f"no answer within {self._timeout:g} s".encode())
        except httpx2.HTTPError as error:
            what = f"{type(error).__name__}: {error}"
            return _Reply(path, _NO_ANSWER, what.encode("utf-8", "replace"))

    def _read(self, reply: _Reply) -> Mapping[str, Any]:
        """Returns the JSON object of a good reply; EndpointProblem for any other."""
        if not 200 <= reply.status < 300:
            what = self._plain(_message(reply.body)) or "no reason given"
            status = f"status {reply.status}: " if reply.status else ""
            again = f" ({reply.tries} tries)" if reply.tries > 1 else ""
            raise self._problem(reply.path, f"{status}{what}{again}", self._mend(reply.status))
        try:
            answer = json.loads(reply.body)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            begin = self._plain(_message(reply.body))
            what = f"the reply is not a JSON object: {begin or '(empty)'}"
            raise self._problem(reply.path, what, _NOT_AN_ENDPOINT)
        if answer.get("error"):  # some gateways put their failures under status 200
            raise self._problem(reply.path, self._plain(_message(reply.body)), self._mend(400))
        return answer

    def _problem(self, path: str, what: str, mend: str) -> EndpointProblem:
        return EndpointProblem(f"{self.url}{path}: {what}; {mend}")

    def _mend(self, status: int) -> str:
        if status in (401, 403):
            state = "" if self._key else ", which is not set"
            return f"check the key in the environment variable {self._key_variable}{state}"
        if status in (400, 413, 422):
            return "check --model, and that a turn fits its context (chunk_size, max_memory)"
        if status == 429:
            return "ask for fewer requests at once, or see what the account allows"
        if status == _NO_ANSWER or status >= 500:
            return "check --endpoint, and that the server is up and not overloaded"
        return "check --endpoint (it often ends in /v1) and --model"

    def _plain(self, text: str) -> str:
        """A server's words on one short line, the key blackened."""
        if self._key:
            text = text.replace(self._key, "***")
        line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."

    def _count(self, **more: int) -> None:
        grown = {name: getattr(self.stats, name) + int(n) for name, n in more.items()}
        self.stats = dataclasses.replace(self.stats, **grown)


_NOT_AN_ENDPOINT = "check that --endpoint is the base of an OpenAI-compatible API, often .../v1"


@dataclasses.dataclass(frozen=True)
class _Reply:
    """What came back for one request, or why nothing did."""

    path: str
    status: int  # of HTTP, or _NO_ANSWER
    body: bytes
    retry_after: str = ""  # the header as it came
    tries: int = 1

    @property
    def worth_another_try(self) -> bool:
        if b"insufficient_quota" in self.body:  # a 429 that waiting does not mend
            return False
        return self.status in _RETRIED or 500 <= self.status < 600


@dataclasses.dataclass(frozen=True)
class _Dialect:
    """The parameters on which servers differ; begins with the oldest names."""

    limit: str  # max_tokens, or max_completion_tokens where that is refused
    seeded: bool

    def request(self, model: str, text: str, sampling: SamplingParams) -> dict[str, Any]:
        seed = {"seed": sampling.seed & 0x7FFFFFFF} if self.seeded else {}
        return {
            "model": model,
            "messages": [{"role": "user", "content": text}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.limit: sampling.max_new_tokens,
            "n": 1,
            "stream": False,
            **seed,
        }

    def adapted(self, reply: _Reply) -> _Dialect | None:
        """Returns the dialect that a refusal asks for; None if it is about something else."""
        if reply.status not in (400, 422):
            return None
        said = _message(reply.body)
        if not _REFUSAL.search(said):
            return None
        if self.limit == "max_tokens" and re.search(r"\bmax_tokens\b", said):
            return dataclasses.replace(self, limit="max_completion_tokens")
        if self.seeded and re.search(r"\bseed\b", said):
            return dataclasses.replace(self, seeded=False)
        return None


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


def _pause(first: float, attempt: int, seed: int, retry_after: str) -> float:
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


def _message(body: bytes) -> str:
    """Returns a server's words about an error, by the shapes in which servers put them."""
    text = body[: 20 * MAX_MESSAGE].decode("utf-8", "replace")
    try:
        said = json.loads(body) if len(body) <= 1 << 16 else None
    except (ValueError, RecursionError):
        return text
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        said = said["error"]
    if isinstance(said, dict):
        for name in ("message", "error", "detail"):
            if isinstance(said.get(name), str):
                return said[name]
    return text


def _used(usage: object, name: str) -> int:
    n = usage.get(name) if isinstance(usage, dict) else 0
    return n if isinstance(n, int) and 0 <= n < 1 << 40 else 0


def _first_tokens(tokenizer: Tokenizer, text: str, n: int) -> Tokens:
    """Returns the first `n` ids of a text, without encoding much more of it than that."""
    parts, held = [tokens()], 0
    for ids in tokenizer.encode_pieces([text]):
        parts.append(ids)
        held += len(ids)
        if held >= n:
            break
    return tokens(np.concatenate(parts)[:n].copy())


def _well_formed(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")  # lone surrogates become '?'
