"""Control of the engine by RL trainers: pause, resume, update of weights, and `/generate`.

Only with `--rl`. Pausing closes the gate: turns that run end (`wait`) or are given up (`abort`),
those that come wait, also the next turn of a reading. Then weights can be changed with no turn in
between, though a completion has one version in any case. `/pause`, `/resume`, `/is_paused` and
`/update_weights` have vLLM's names and a key of their own; `/generate` is the part of SGLang's
that trainers use. Above: `app`; below: a seat at the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax import waiting
from notepad_jax.serve.completions import requests
from notepad_jax.serve.completions.choices import WholeChoice
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.completions.requests import Body, Continue
from notepad_jax.serve.completions.responses import Completions
from notepad_jax.serve.http import bodies
from notepad_jax.serve.http.errors import Refusal, bad, plain, shown
from notepad_jax.serve.http.web import answer, body_of
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Finish,
    Piece,
    Prompt,
    SamplingParams,
    Streamer,
    tokens,
)

PATHS = ("/pause", "/resume", "/update_weights", "/is_paused", "/weight_info")

Seat = Callable[[], contextlib.AbstractContextManager[Streamer]]
Adopt = Callable[[str, int | None], Awaitable[Mapping[str, Any]]]


class Gate:
    """Holds turns back while it is paused. `adopt` loads a folder's weights as a version."""

    def __init__(self, adopt: Adopt) -> None:
        self.adopt = adopt
        self.running = 0  # turns behind the gate
        self._open, self._abort, self._idle = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    async def pause(self, abort: bool) -> bool:
        """Closes the gate; returns True when no turn runs behind it, False if it was opened
        before."""
        self._open.clear()
        if abort:
            self._abort.set()
        either = [asyncio.ensure_future(event.wait()) for event in (self._idle, self._open)]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._abort.clear()
            for one in either:
                one.cancel()
        return self.paused

    def resume(self) -> None:
        self._abort.clear()  # turns that come from now on are not given up
        self._open.set()

    @contextlib.contextmanager
    def seat(self, seat: Seat) -> Iterator[Streamer]:
        """Yields a streamer at the engine whose turns pass the gate."""
        with seat() as inner:
            yield _Behind(self, inner)

    @contextlib.asynccontextmanager
    async def through(self) -> AsyncGenerator[asyncio.Event]:
        """The context of one turn; yields an event that is set when the turn is to be aborted."""
        while self.paused:  # it may be closed again before we come by
            await self._open.wait()
        self.running += 1
        self._idle.clear()
        try:
            yield self._abort
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()


class _Behind:
    """A `types.Streamer` whose turns pass a gate."""

    def __init__(self, gate: Gate, inner: Streamer) -> None:
        self._gate, self._inner = gate, inner

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        pieces = [piece async for piece in self.stream(prompt, sampling)]
        return Completion(
            tokens(np.concatenate([piece.tokens for piece in pieces])),
            np.concatenate([piece.behaviour_logprobs for piece in pieces]),
            pieces[-1].finish,
            pieces[-1].policy_version,
        )

    async def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncGenerator[Piece]:
        nothing, version = np.zeros(0, np.float32), -1
        async with self._gate.through() as abort:
            given_up = asyncio.ensure_future(abort.wait())
            pieces = self._inner.stream(prompt, sampling)
            try:
                while True:
                    coming = asyncio.ensure_future(anext(pieces))
                    try:
                        both = (coming, given_up)
                        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        if not coming.done():
                            await waiting.end(coming)
                    if coming.cancelled():
                        yield Piece(NO_TOKENS, nothing, Finish.CANCELLED, version)
                        return
                    piece = coming.result()
                    version = piece.policy_version
                    yield piece
                    if piece.finish is not None:
                        return
            finally:
                given_up.cancel()
                await pieces.aclose()


class Trainers:
    """Handlers of the endpoints for trainers, over a gate and the served policy."""

    def __init__(self, gate: Gate, served: Served) -> None:
        self._gate, self._served = gate, served

    def routes(self) -> list[Route]:
        """Returns the routes in `PATHS`."""
        posted = (self.pause, self.resume, self.update_weights)
        read = (self.is_paused, self.weight_info)
        return [Route(path, verb, methods=["POST" if verb in posted else "GET"])
                for path, verb in zip(PATHS, (*posted, *read), strict=True)]  # fmt: skip

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise bad("mode", f"mode is {shown(mode)}; use wait or abort")
        if not await self._gate.pause(abort=mode == "abort"):
            raise Refusal(409, "the server was resumed before its turns had ended; pause it again",
                          None, "resumed")  # fmt: skip
        return answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._gate.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return answer({"is_paused": self._gate.paused})

    async def weight_info(self, request: Request) -> Response:
        return answer(self._weights())

    async def update_weights(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("folder", "version"))
        version = body.get("version")
        if not isinstance(body.get("folder"), str):
            raise bad("folder", "folder must be a run, as runs/mine@40, or a folder of weights")
        if version is not None and (type(version) is not int or not 0 <= version < 2**31):
            raise bad("version", f"version is {shown(version)}; it must be a whole number")
        try:
            await self._gate.adopt(body["folder"], version)
        except (ValueError, OSError) as error:
            raise bad("folder", f"these weights are not adopted: {error}") from None
        return answer(self._weights())

    def _weights(self) -> dict[str, Any]:
        return {
            "policy_version": self._served.version(),
            "system_fingerprint": self._served.fingerprint(),
        }


# ---------------------------------------------------------------- /generate

_SAMPLING = {
    "temperature": "temperature", "top_p": "top_p", "max_new_tokens": "max_tokens", "n": "n",
    "stop": "stop", "stop_token_ids": "stop_token_ids", "sampling_seed": "seed",
}  # fmt: skip
_SAMPLING_ONLY = {
    "top_k": (-1, 0, 1 << 30), "min_p": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "min_new_tokens": (0,), "ignore_eos": (False,),
    "skip_special_tokens": (True, False), "spaces_between_special_tokens": (True,),
    "no_stop_trim": (False,),
}  # fmt: skip
_GENERATE = ("input_ids", "text", "sampling_params", "return_logprob", "rid")
_GENERATE_ONLY = {"stream": False, "logprob_start_len": -1, "top_logprobs_num": 0,
                  "return_text_in_logprobs": False}  # fmt: skip


def generation(body: Body, model: str) -> Continue:
    """Returns a checked body of /generate as the completion that it asks for."""
    for name, value in body.items():
        if name in _GENERATE_ONLY and value not in (None, _GENERATE_ONLY[name]):
            raise bad(name, f"{name} is not supported here; leave it out")
        if name not in _GENERATE and name not in _GENERATE_ONLY:
            name = plain(name)
            raise bad(name, f"there is no parameter {name} here; leave it out")
    given = body.get("sampling_params") or {}
    if not isinstance(given, dict):
        raise bad("sampling_params", "sampling_params must be an object")
    for name, value in given.items():
        only = _SAMPLING_ONLY.get(name, ())
        if name not in _SAMPLING and value is not None and value not in only:
            name = f"sampling_params.{plain(name)}"
            raise bad(name, f"{name} is not supported; leave it out")
    if ("text" in body) == ("input_ids" in body):
        raise bad("input_ids", "give one of input_ids and text")
    return requests.completion(
        {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
        | {"model": model, "prompt": body.get("text", body.get("input_ids"))}
        | ({"logprobs": 0} if body.get("return_logprob") else {})
    )


class Generated(Completions):
    """/generate's reply: a choice, or a list of them."""

    def whole(self, choices: list[WholeChoice]) -> Any:
        found = [self._one(index, choice) for index, choice in enumerate(choices)]
        return found[0] if len(found) == 1 else found

    def _one(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        pairs = zip(choice.logprobs, choice.tokens, strict=True)
        return {
            "text": "".join(choice.text),
            "output_ids": choice.tokens,
            "meta_info": {
                "id": f"{self.id}-{index}",
                "finish_reason": {"type": choice.finish, "length": len(choice.tokens)},
                "prompt_tokens": len(self.prompts[index // self.how.n]),
                "completion_tokens": len(choice.tokens),
                "weight_version": str(choice.version),
                **({"output_token_logprobs": [[p, i, None] for p, i in pairs],
                    "logprobs_mode": "temperature"} if self.how.logprobs else {}),
            },
        }  # fmt: skip
