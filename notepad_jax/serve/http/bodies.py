"""Request bodies: JSON objects with parameters known by name, and values checked one by one.

Every parameter that OpenAI or vLLM know stands in one of three tables: those that an endpoint reads
(its own list), those that are accepted because they change nothing, and those that may only have
their default. Anything else is a 400 that names the parameter: no client shall believe that a
penalty was applied. Above: the addresses of every room of `serve`; below: `errors`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from notepad_jax.serve.http.errors import Refusal, bad, plain, shown

Body = Mapping[str, Any]

# They name a user or what may be cached, and change no answer.
ACCEPTED = ("user", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")

# What we do not do, with the values that ask for nothing. None does so everywhere.
ONLY: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "top_k": (0, -1), "min_p": (0,), "min_tokens": (0,),
    "ignore_eos": (False,), "best_of": (1,), "echo": (False,), "suffix": ("",),
    "use_beam_search": (False,), "length_penalty": (1,), "bad_words": ([],),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "add_special_tokens": (True, False),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "chat_template": (),
    "chat_template_kwargs": ({},), "tools": ([],),
    "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "prediction": (), "store": (False,),
    "metadata": ({},), "service_tier": ("auto", "default"), "reasoning_effort": (),
    "verbosity": (), "web_search_options": (), "guided_json": (), "guided_regex": (),
    "guided_choice": (), "guided_grammar": (), "structured_outputs": (), "prompt_logprobs": (),
    "documents": ([],), "priority": (0,),
}  # fmt: skip


def parsed(raw: bytes) -> Body:
    """Returns the JSON object of a request body; Refusal for anything else."""
    try:
        body = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        said = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise Refusal(400, f"the body is not JSON: {plain(said)}") from None
    if not isinstance(body, dict):
        raise Refusal(400, f"the body is JSON, but no object: {shown(body)}")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def check_names(body: Body, known: tuple[str, ...]) -> None:
    """Refuses parameters that are not supported, unless they ask for nothing."""
    for name, value in body.items():
        if name in known or name in ACCEPTED or (value is None and name in ONLY):
            continue
        if name not in ONLY:
            name = plain(name)
            raise bad(name, f"there is no parameter {name} here; leave it out")
        if not any(value == one and type(value) in _like(one) for one in ONLY[name]):
            mend = f"the only value it may have is {ONLY[name][0]!r}; " if ONLY[name] else ""
            raise bad(name, f"{name} is not supported; {mend}leave it out", "unsupported_parameter")


def _like(value: Any) -> tuple[type, ...]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (int, float) if number else (type(value),)


def text(body: Body, name: str, mend: str) -> str:
    """Returns a text that a body has to hold; Refusal, with the mend, for anything else."""
    value = body.get(name)
    if not isinstance(value, str):
        what = "is missing" if value is None else f"is {shown(value)} and has to be a text"
        raise bad(name, f"{name} {what}; {mend}")
    return value


def whole(
    body: Body, name: str, lowest: int, highest: int = 2**31 - 1, within: str = ""
) -> int | None:
    """Returns a whole number in a range, or None; Refusal for anything else."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        name = within + name
        raise bad(
            name, f"{name} is {shown(value)}; it must be a whole number from {lowest} to {highest}"
        )
    return value


def flag(body: Body, name: str, within: str = "") -> bool:
    """Returns true or false, which None is, too; Refusal for anything else."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise bad(within + name, f"{within}{name} is {shown(value)}; it must be true or false")
    return bool(value)
