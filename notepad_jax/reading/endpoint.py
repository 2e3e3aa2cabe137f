"""A `Completer` over any OpenAI-compatible endpoint: a vLLM server, or a hosted model.

The memory agent is the one of training; only the bridge differs. A prompt is turned back
into text and sent as one user message, and the server puts its chat template around it, so
templates are loaded with `bare_turn`. An answer that goes on in another context is sent as the
beginning of the assistant's own message, which not every server continues (`wire`). Text is
enough: everything in a prompt was text before, and the completions endpoint, which takes ids,
would need the server's tokenizer here. What is lost is that a memory is encoded anew by the
server, and that a chunk of a byte-level tokenizer may begin inside a character; `approximate`
cuts between characters.
Such readings are for measuring: logprobs come back as NaN, and training refuses them.
Above: eval and the programs; below: connection (tries, failures, the key) and wire (JSON).
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from notepad_jax.reading import wire
from notepad_jax.reading.connection import ApiConnection, EndpointProblem, Patience
from notepad_jax.reading.wire import Dialect
from notepad_jax.text.chat import Frame
from notepad_jax.text.token_blocks import well_formed
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Completion, Finish, Prompt, SamplingParams, Tokens, tokens

_CHAT, _MODELS = "/chat/completions", "/models"
_ONE_CONTEXT = (
    "this server does not go on with a reply; measure it with --config.reading.answer_chunks=1 "
    "--config.reading.carry=0"
)


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
        self.model = model
        self.stats = Stats()
        self._tokenizer = tokenizer
        self._gate = asyncio.Semaphore(at_once)
        self._dialect = Dialect()
        self._connection = ApiConnection(
            url,
            key_variable,
            Patience(timeout, tries, first_pause),
            kept=at_once,
            on_retry=lambda: self._count(retries=1),
        )

    async def __aenter__(self) -> EndpointCompleter:
        try:
            self.model = self.model or await self._only_model()
        except BaseException:
            await self._connection.close()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._connection.close()

    async def models(self) -> list[str]:
        """Returns the ids of the models that the server has, in its order."""
        listed = (await self._connection.get(_MODELS)).get("data")
        if not isinstance(listed, list):
            raise self._connection.problem(_MODELS, "the reply lists no models")
        ids = [entry.get("id") for entry in listed if isinstance(entry, dict)]
        return [name for name in ids if isinstance(name, str)]

    async def _only_model(self) -> str:
        found = await self.models()
        if len(found) != 1:
            some = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
            what = self._connection.plain(f"{len(found)} models: {some}" if found else "no model")
            what = f"the server has {what}"
            raise self._connection.problem(_MODELS, what, "choose one with --model")
        return found[0]

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Sends the prompt as one user message and returns the reply as local tokens.

        What of the prompt is a reply that goes on (`begun`) is sent as that reply's beginning.

        A reply that the local tokenizer counts over `sampling.max_new_tokens` (the stop
        token included) is trimmed to them and finishes by LENGTH, so no memory outgrows its
        limit. `behaviour_logprobs` are NaN, `policy_version` is 0. Of the seed the lower
        31 bits are sent; a server may ignore it, and then the same call differs next time.
        Raises EndpointProblem.
        """
        asked, end = prompt.tokens, len(prompt.tokens) - prompt.begun
        text, begun = (
            well_formed(self._tokenizer.decode(ids)) for ids in (asked[:end], asked[end:])
        )
        async with self._gate:
            self._count(requests=1)
            try:
                answer = await self._chat(text, sampling, begun)
                said = wire.choice(answer)
                if said is None:
                    what = "the reply has no choices[0].message.content"
                    raise self._connection.problem(_CHAT, what)
            except EndpointProblem:
                self._count(failed=1)
                raise
        content, reason = said
        usage = answer.get("usage")
        self._count(
            prompt_tokens=wire.used(usage, "prompt_tokens"),
            completion_tokens=wire.used(usage, "completion_tokens"),
            empty=not content,
            filtered=reason == "content_filter",
        )
        return self._completion(content, reason in wire.LENGTH_REASONS, sampling)

    async def _chat(self, text: str, sampling: SamplingParams, begun: str) -> Mapping[str, Any]:
        """Returns the reply; names the limit otherwise or leaves the seed out if it must."""
        dialect = self._dialect
        while True:
            body = json.dumps(dialect.request(self.model, text, sampling, begun)).encode()
            reply = await self._connection.post(_CHAT, body, sampling.seed)
            other = dialect.adapted(reply)
            if other is None:
                break
            dialect = other
        if begun and wire.cannot_go_on(reply):
            said = self._connection.plain(wire.message(reply.body))
            raise self._connection.problem(_CHAT, f"status {reply.status}: {said}", _ONE_CONTEXT)
        answer = self._connection.read(reply)
        if dialect != self._dialect:
            self._dialect = dialect  # the server accepted it
        self._count(unseeded=not dialect.seeded)
        return answer

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

    def _count(self, **more: int) -> None:
        grown = {name: getattr(self.stats, name) + int(n) for name, n in more.items()}
        self.stats = dataclasses.replace(self.stats, **grown)


def _first_tokens(tokenizer: Tokenizer, text: str, n: int) -> Tokens:
    """Returns the first `n` ids of a text, without encoding much more of it than that."""
    parts, held = [tokens()], 0
    for ids in tokenizer.encode_pieces([text]):
        parts.append(ids)
        held += len(ids)
        if held >= n:
            break
    return tokens(np.concatenate(parts)[:n].copy())
