"""Validation of requests to JetStream's gRPC server, before anything is queued.

JetStream's message has a prompt and a limit. How a completion is sampled has no field there, so
it comes as metadata of the call, under the names that `serve` has for it: temperature, top_p,
seed. Pure; nothing of google-jetstream is needed. Above: `server` and `engine`.
"""

from __future__ import annotations

import dataclasses
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from notepad_jax.types import SamplingParams, Tokens, tokens

NUMBERS = {"temperature": float, "top_p": float, "seed": int}  # of the metadata
SEEDS = 2**63  # seeds go from -SEEDS to SEEDS - 1, as everywhere


class Refused(ValueError):
    """A request that is rejected; its message is for the client."""


class NoKey(Refused):
    """The API key is missing, or another."""


def nobody_leaves() -> bool:
    """Never gone: the `gone` of a prompt that has no client."""
    return False


@dataclasses.dataclass(frozen=True, eq=False)
class JetStreamRequest:
    """A checked request for one completion, in the place of the stock orchestrator's request."""

    ids: Tokens  # the whole prompt
    sampling: SamplingParams
    gone: Callable[[], bool] = nobody_leaves  # whether its client has hung up
    session_cache: str = ""  # a stock request's; sessions are not kept

    @property
    def max_tokens(self) -> int:
        """The completion's token limit, under a stock request's name."""
        return self.sampling.max_new_tokens


@dataclasses.dataclass(frozen=True)
class CompletionLimits:
    """Limits of prompts and completions. `seed_of` is the noise of a client's seed."""

    vocabulary: int  # token ids that there are
    max_prompt: int  # tokens
    max_completion: int  # tokens
    stop_ids: tuple[int, ...]
    seed_of: Callable[[int], int]
    key: str | None = None  # that clients need


def checked(
    request: Any, metadata: Iterable[tuple[str, str | bytes]], encode: Callable[[str], Tokens],
    limits: CompletionLimits,
) -> JetStreamRequest:  # fmt: skip
    """Returns a gRPC `DecodeRequest` as a checked request. Raises Refused, and NoKey."""
    given = {name: value for name, value in metadata if isinstance(value, str)}
    check_key(given, limits.key)
    if request.session_cache:
        raise Refused("session_cache names a session, and none is kept; send the whole prompt")
    if not 1 <= request.max_tokens <= limits.max_completion:
        raise Refused(
            f"max_tokens is {request.max_tokens}; it must be a whole number from 1 to "
            f"{limits.max_completion} (serve.max_completion)"
        )
    sampling = _sampling(given, request.max_tokens, limits)
    return JetStreamRequest(_prompt(request, encode, limits), sampling)


def check_key(given: Mapping[str, str], key: str | None) -> None:
    """Raises NoKey unless the metadata has the key, if there is one."""
    if key is None:
        return
    scheme, _, said = given.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(said.strip().encode(), key.encode()):
        what = "is wrong" if said else "is missing: send it as metadata, authorization: Bearer KEY"
        raise NoKey(f"the API key {what}")


def _prompt(request: Any, encode: Callable[[str], Tokens], limits: CompletionLimits) -> Tokens:
    kind = request.WhichOneof("content")
    if kind is None:
        raise Refused("there is no prompt; set text_content or token_content")
    if kind == "text_content":
        ids = encode(request.text_content.text)
    else:
        ids = tokens(request.token_content.token_ids)
    if not len(ids):
        raise Refused("the prompt is empty; there is nothing to continue")
    if len(ids) > limits.max_prompt:
        raise Refused(
            f"the prompt has {len(ids)} tokens, and the most here is {limits.max_prompt}; "
            f"shorten it, or raise serve.max_prompt"
        )
    unknown = ids[(ids < 0) | (ids >= limits.vocabulary)]
    if len(unknown):
        raise Refused(
            f"there is no token {unknown[0]}; this policy's ids are 0 to {limits.vocabulary - 1}"
        )
    return ids


def _sampling(given: Mapping[str, str], limit: int, limits: CompletionLimits) -> SamplingParams:
    said = {name: _number(name, given[name]) for name in NUMBERS if name in given}
    seed = said.get("seed", secrets.randbits(63))
    if not -SEEDS <= seed < SEEDS:
        raise Refused(f"seed is {seed}; it must be a whole number from {-SEEDS} to {SEEDS - 1}")
    try:
        return SamplingParams(
            said.get("temperature", 1.0), said.get("top_p", 1.0), limit, limits.stop_ids,
            limits.seed_of(seed),
        )  # fmt: skip
    except ValueError as problem:
        raise Refused(str(problem)) from None


def _number(name: str, value: str) -> Any:
    try:
        return NUMBERS[name](value)
    except ValueError:
        kind = "a whole number" if NUMBERS[name] is int else "a number"
        raise Refused(f"{name} is {value[:40]!r}; it must be {kind}") from None
