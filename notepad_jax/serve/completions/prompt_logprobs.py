"""Prompt logprobs: how likely the policy finds each token of a prompt, which it did not write.

A stretch of the prompt is given to the engine as the completion of what stands before it, and is
not drawn but scored; what stands before it lies in the cache, as any prompt does. So these are the
logprobs that the sampler would have reported for these tokens. Above: `app`; below: a
`types.Streamer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable

from notepad_jax.serve.completions.choices import Delta
from notepad_jax.types import Alternatives, Finish, Piece, Prompt, SamplingParams, Streamer, Tokens


@dataclasses.dataclass(frozen=True)
class TokenScore:
    """One token of a prompt, given those before it."""

    token: int
    logprob: float
    top: Alternatives  # empty if none were asked for


async def course(
    streamer: Streamer, ids: Tokens, temperature: float, top: int, longest: int,
    tell: Callable[[list[TokenScore] | None], None],
) -> AsyncGenerator[Delta]:  # fmt: skip
    """Passes the scores of all tokens but the first to `tell`, beside the choices of a request;
    yields none. None where a trainer's pause gave it up. `longest`: tokens of a stretch."""
    scores: list[TokenScore] | None = []
    version: int | None = None
    while scores is not None and len(scores) + 1 < len(ids):
        pieces = await _stretch(streamer, ids, len(scores) + 1, temperature, top, longest)
        if pieces[-1].finish is Finish.CANCELLED:
            scores = None
        elif version not in (None, pieces[-1].policy_version):
            scores, version = [], None  # other weights have come: all are of one policy
        else:
            version = pieces[-1].policy_version
            scores += [score for piece in pieces for score in _scores(piece)]
    tell(scores)
    return
    yield  # a generator, as the choices are


async def _stretch(
    streamer: Streamer, ids: Tokens, first: int, temperature: float, top: int, longest: int
) -> list[Piece]:
    """The pieces of tokens `first` and on, which there are."""
    given = ids[first : first + longest]
    prompt = Prompt(ids[: first - 1], ids[first - 1 : first], given)
    sampling = SamplingParams(temperature, 1.0, len(given), (), 0, top, scored=True)
    async with contextlib.aclosing(streamer.stream(prompt, sampling)) as pieces:
        return [piece async for piece in pieces]


def _scores(piece: Piece) -> list[TokenScore]:
    tops = piece.top or ((),) * len(piece.tokens)
    every = zip(piece.tokens.tolist(), piece.behaviour_logprobs, tops, strict=True)
    return [TokenScore(token, float(logprob), top) for token, logprob, top in every]
