"""Streamed choices: tokens of an engine as deltas of text, several choices concurrently.

A choice is cut at the token that completed a stop string, however many the engine had made by
then: what a request gets depends on its seed and on nothing else. Every choice that is left, by
an error or a client that hung up, frees its slot before its request ends. Above: `app`,
`chat_model` and programs.ask; below: `detokenizer` and a `types.Streamer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from notepad_jax import waiting
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.types import (
    Alternatives,
    Completion,
    Finish,
    Prompt,
    SamplingParams,
    Streamer,
    tokens,
)

REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length", Finish.CANCELLED: "abort"}


@dataclasses.dataclass(frozen=True)
class Delta:
    """One delta of a choice's stream. Tokens and logprobs have one length; a stop token that
    was sampled is among them, and not in the text."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[Alternatives, ...]  # empty if none were asked for
    finish: str | None  # of the last one
    version: int
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of a reading, at its end
    cached: int = 0  # tokens of the prompt that were found in the cache
    memory: Mapping[str, Any] | None = None  # of a reading: how it changed, and nothing else


async def choice(
    streamer: Streamer, prompt: Prompt, sampling: SamplingParams, saying: Saying, index: int,
    more: bool = False,
) -> AsyncGenerator[Delta]:  # fmt: skip
    """Yields the deltas of one completion as it is made; the last has `finish`.

    With `more`, tokens of another may follow, and what might begin a stop string stays held back.
    """
    async with contextlib.aclosing(streamer.stream(prompt, sampling)) as pieces:
        async for piece in pieces:
            ids, texts, taken = piece.tokens.tolist(), [], len(piece.tokens)
            spoken = len(ids) - (piece.finish is Finish.STOP)
            for place, token in enumerate(ids[:spoken]):
                texts.append(saying.add(token))
                if saying.stopped:
                    taken = place + 1
                    break
            finish = "stop" if saying.stopped else REASONS.get(piece.finish)
            if finish and not saying.stopped and not more:
                texts.append(saying.rest())
            logprobs = tuple(map(float, piece.behaviour_logprobs[:taken]))
            yield Delta(
                index, "".join(texts), tuple(ids[:taken]), logprobs, piece.top[:taken], finish,
                piece.policy_version, cached=piece.cached,
            )  # fmt: skip
            if finish:
                return


async def completed(
    course: AsyncGenerator[Delta], tell: Callable[[Delta], None]
) -> Completion:  # fmt: skip
    """Returns the completion of a choice, and passes its deltas to `tell` while it is made."""
    made = WholeChoice()
    async with contextlib.aclosing(course) as deltas:
        async for delta in deltas:
            made.add(delta)
            tell(delta)
    finish = next(finish for finish, reason in REASONS.items() if reason == made.finish)
    logprobs = np.asarray(made.logprobs, np.float32)
    return Completion(tokens(made.tokens), logprobs, finish, made.version)


def together(courses: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Yields the deltas of all choices, merged as they come. One that fails ends all the others."""

    async def every(tell: Callable[[Delta], None]) -> None:
        async def follow(course: AsyncGenerator[Delta]) -> None:
            async with contextlib.aclosing(course):
                async for delta in course:
                    tell(delta)

        await waiting.all_of(map(follow, courses))

    return told(every)


async def told(
    work: Callable[[Callable[[Delta], None]], Awaitable[None]],
) -> AsyncGenerator[Delta]:
    """Yields the deltas that the coroutine `work` passes to its callback, while it runs."""
    ready: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()

    async def follow() -> None:
        try:
            await work(ready.put_nowait)
            ready.put_nowait(None)
        except Exception as failure:
            ready.put_nowait(failure)

    running = asyncio.ensure_future(follow())
    try:
        while (what := await ready.get()) is not None:
            if isinstance(what, Exception):
                raise what
            yield what
    finally:
        await waiting.end(running)


@dataclasses.dataclass
class WholeChoice:
    """A choice joined from its deltas, or what there is of it."""

    text: list[str] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[Alternatives] = dataclasses.field(default_factory=list)
    finish: str | None = None
    version: int = -1
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    cached: int = 0

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.top += delta.top
        self.finish, self.version, self.notes = delta.finish, delta.version, delta.notes
        self.cached = delta.cached
