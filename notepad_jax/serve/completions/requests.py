"""Requests: the JSON of a body, checked, as frozen values.

Which parameters are read stands here, by endpoint, and which others are let through in `bodies`.
Anything out of its range is a 400 that names the parameter. Nothing here knows a tokenizer; `app`
does what needs one. Above: `app`, `control` and readings.routes; below: http.bodies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from notepad_jax.reading.sampling import hashed_seed
from notepad_jax.serve.completions.messages import Message, messages
from notepad_jax.serve.http.bodies import Body, check_names, flag, text, whole
from notepad_jax.serve.http.errors import bad, plain, shown
from notepad_jax.text.token_blocks import well_formed
from notepad_jax.types import MOST_TOP_LOGPROBS, Grammar, SamplingParams

MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 256  # characters
LARGEST_SCHEMA = 1 << 16  # characters
SEEDS = 2**63
LISTED = "/v1/models lists those that are served"

_SHARED = (
    "model", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "stop_token_ids",
    "logprobs", "stream", "stream_options", "return_token_ids", "return_tokens_as_token_ids",
    "response_format",
)  # fmt: skip
CHAT = (*_SHARED, "messages", "max_completion_tokens", "top_logprobs", "notepad", "questions")
COMPLETION = (*_SHARED, "prompt", "prompt_logprobs")
OPTIONS = ("include_usage", "continuous_usage_stats", "include_notepad", "include_obfuscation")
LIMITS = ("chunk_size", "max_memory")  # of a reading, in tokens, that a request may lower
MEMORIES = ("chunks", "reasoning")  # chunks with empty `choices`; delta.reasoning_content


@dataclasses.dataclass(frozen=True)
class How:
    """Sampling and response options of a request; None is the server's own."""

    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    n: int
    seed: int | None
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    logprobs: bool
    top_logprobs: int
    stream: bool
    include_usage: bool  # in a chunk of its own, the last
    continuous_usage: bool  # in every chunk
    token_ids: bool  # beside the text
    tokens_as_ids: bool  # "token_id:17" in the place of a token's text
    memories: str | None = None  # of a reading: how its stream tells of them, one of MEMORIES
    schema: str | None = None  # of JSON, as JSON: what a reply must be
    prompt_logprobs: int | None = None  # the likeliest tokens to tell of beside each of a prompt's

    def seed_of(self, index: int, otherwise: int) -> int:
        """The seed of choice `index`: of the request's seed, or where it has none, `otherwise`."""
        return hashed_seed("choice", otherwise if self.seed is None else self.seed, index)

    def sampling(
        self, limit: int, stops: tuple[int, ...], seed: int, grammar: Grammar | None
    ) -> SamplingParams:
        """Returns how a choice is sampled; what the request leaves open is 1, as OpenAI has it."""
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p, top = 1.0 if self.top_p is None else self.top_p, self.top_logprobs
        return SamplingParams(temperature, top_p, limit, stops, seed, top, grammar=grammar)


@dataclasses.dataclass(frozen=True)
class Chat:
    model: str
    messages: tuple[Message, ...]
    how: How
    limits: Mapping[str, int]  # of a reading, those of LIMITS that it lowers
    questions: tuple[str, ...]  # of a reading, a choice each; (): the messages ask


@dataclasses.dataclass(frozen=True)
class Continue:
    """Prompts to be continued: each a text or token ids."""

    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    how: How


def chat(body: Body) -> Chat:
    """Returns the checked body of a /v1/chat/completions request."""
    check_names(body, CHAT)
    limit = whole(body, "max_completion_tokens", 1)
    other = whole(body, "max_tokens", 1)
    if None not in (limit, other) and limit != other:
        raise bad("max_tokens", "max_tokens and max_completion_tokens differ; give one of them")
    logprobs = flag(body, "logprobs")
    top = whole(body, "top_logprobs", 0, MOST_TOP_LOGPROBS) or 0
    if top and not logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true")
    how = _how(body, limit if other is None else other, logprobs, top)
    limits, told_as = notepad_of(body, how.stream)
    if told_as is not None:
        how = dataclasses.replace(how, memories=told_as)
    return Chat(text(body, "model", LISTED), messages(body), how, limits, _questions(body, how.n))


def _questions(body: Body, n: int) -> tuple[str, ...]:
    """Returns the questions of a reading that has several, () where `questions` is not given."""
    if body.get("questions") is None:
        return ()
    found = questions_of(body)
    if len(found) > MOST_CHOICES:
        raise bad("questions", f"there are {len(found)} questions and may be {MOST_CHOICES}")
    if n > 1:
        raise bad("n", f"n is {n}, and with questions there is one choice for each; leave n out")
    return found


def questions_of(body: Body) -> tuple[str, ...]:
    """Returns a body's questions; Refusal for anything but a list of at least one text."""
    given = body.get("questions")
    good = isinstance(given, list) and given and all(isinstance(one, str) for one in given)
    if not good:
        raise bad("questions", "questions must be a list of at least one text")
    return tuple(map(well_formed, given))


def notepad_of(body: Body, stream: bool) -> tuple[dict[str, int], str | None]:
    """Returns what `notepad` says of a reading: lower limits, and how its stream tells of memories.

    Refusal for a way to tell without a stream.
    """
    given = body.get("notepad")
    if given is None:
        return {}, None
    if not isinstance(given, dict):
        raise bad("notepad", f"notepad is {shown(given)}; it must be an object")
    for name in given:
        if name not in ("as", *LIMITS):
            name = f"notepad.{plain(name)}"
            raise bad(name, f"there is no {name} here; leave it out")
    told_as = given.get("as")
    if told_as is not None and told_as not in MEMORIES:
        raise bad("notepad.as", f"notepad.as is {shown(told_as)}; use {' or '.join(MEMORIES)}")
    if told_as is not None and not stream:
        raise bad("notepad.as", "notepad.as needs stream: true")
    limits = {name: whole(given, name, 1, within="notepad.") for name in LIMITS}
    return {name: value for name, value in limits.items() if value is not None}, told_as


def completion(body: Body) -> Continue:
    """Returns the checked body of a /v1/completions request."""
    check_names(body, COMPLETION)
    limit = whole(body, "max_tokens", 1)
    top = whole(body, "logprobs", 0, MOST_TOP_LOGPROBS)
    how = _how(body, limit, top is not None, top or 0)
    scores = whole(body, "prompt_logprobs", 0, MOST_TOP_LOGPROBS)
    if scores is not None and how.stream:
        raise bad("prompt_logprobs", "prompt_logprobs come with a whole reply; leave stream out")
    how = dataclasses.replace(how, prompt_logprobs=scores)
    return Continue(text(body, "model", LISTED), _prompts(body), how)


def _how(body: Body, limit: int | None, logprobs: bool, top: int) -> How:
    stream = flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not stream):
        raise bad("stream_options", "stream_options is an object, and needs stream: true")
    for name in options or {}:
        if name not in OPTIONS:
            name = f"stream_options.{plain(name)}"
            raise bad(name, f"there is no {name} here; leave it out")
    ids = body.get("stop_token_ids")
    # Obfuscation pads chunks with noise; asked for or not, we send none.
    include, always, memories = (
        flag(options or {}, name, "stream_options.") for name in OPTIONS[:3]
    )
    return How(
        max_tokens=limit,
        temperature=sampled(body, "temperature"),
        top_p=sampled(body, "top_p"),
        n=whole(body, "n", 1, MOST_CHOICES) or 1,
        seed=whole(body, "seed", -SEEDS, SEEDS - 1),
        stop=_stops(body),
        stop_token_ids=() if ids is None else token_ids(ids, "stop_token_ids"),
        logprobs=logprobs,
        top_logprobs=top,
        stream=stream,
        include_usage=include,
        continuous_usage=always,
        token_ids=flag(body, "return_token_ids"),
        tokens_as_ids=flag(body, "return_tokens_as_token_ids"),
        memories=MEMORIES[0] if memories else None,
        schema=_schema(body),
    )


# ---------------------------------------------------------------- values


def sampled(body: Body, name: str) -> float | None:
    """Returns a number in the range that the sampler has for it, or None; else Refusal."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(name, f"{name} is {shown(value)}; it must be a number")
    try:
        usual = SamplingParams(0.0, 1.0, 1, (), 0)
        return float(getattr(dataclasses.replace(usual, **{name: float(value)}), name))
    except (ValueError, OverflowError) as error:
        raise bad(name, str(error)) from None


def _schema(body: Body) -> str | None:
    """Returns the schema of `response_format`; None where it asks for a text."""
    given, where = body.get("response_format"), "response_format"
    if given is None:
        return None
    kinds = {"text": (), "json_object": (), "json_schema": ("json_schema",)}
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        raise bad(where, f"{where} is {shown(given)}; its type must be one of {', '.join(kinds)}")
    for name in given:
        if name != "type" and name not in kinds[kind]:
            name = f"{where}.{plain(name)}"
            raise bad(name, f"there is no {name} here; leave it out")
    if kind != "json_schema":
        return None if kind == "text" else json.dumps({"type": "object"})
    where = f"{where}.json_schema"
    about = given.get("json_schema")
    if not isinstance(about, dict) or not isinstance(about.get("schema"), dict):
        raise bad(
            where, f'{where} is {shown(about)}; it must be {{"name": NAME, "schema": SCHEMA}}'
        )
    for name in about:
        if name not in ("name", "description", "schema", "strict"):
            name = f"{where}.{plain(name)}"
            raise bad(name, f"there is no {name} here; leave it out")
    schema = json.dumps(about["schema"])
    if len(schema) > LARGEST_SCHEMA:
        raise bad(f"{where}.schema", f"the schema has {len(schema):,} characters and may have "
                  f"{LARGEST_SCHEMA:,}")  # fmt: skip
    return schema


def _stops(body: Body) -> tuple[str, ...]:
    value = body.get("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    good = isinstance(stops, list) and len(stops) <= MOST_STOPS
    if not good or not all(isinstance(s, str) and 0 < len(s) <= LONGEST_STOP for s in stops):
        raise bad(
            "stop", f"stop is {shown(value)}; it must be a text or a list of at most {MOST_STOPS}, "
            f"of 1 to {LONGEST_STOP} characters each"
        )  # fmt: skip
    return tuple(dict.fromkeys(map(well_formed, stops)))


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """Returns a list of ids; Refusal for anything else."""
    good = isinstance(value, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**31 for i in value
    )
    if not good:
        raise bad(name, f"{name} is {shown(value)}; it must be a list of token ids")
    return tuple(value)


def _prompts(body: Body) -> tuple[str | tuple[int, ...], ...]:
    value = body.get("prompt")
    if isinstance(value, str):
        return (well_formed(value),)
    if isinstance(value, list) and value:
        if not isinstance(value[0], str | list):
            return (token_ids(value, "prompt"),)
        if len(value) > MOST_CHOICES:
            raise bad("prompt", f"there are {len(value)} prompts and may be {MOST_CHOICES}")
        if all(isinstance(one, str) for one in value):
            return tuple(map(well_formed, value))
        return tuple(token_ids(one, "prompt") for one in value)
    raise bad("prompt", "prompt must be a text, a list of token ids, or a list of either")
