"""A served policy: a place at an engine, a tokenizer, templates, and its model ids.

The room is on the word side of the house: it knows no arrays, and tests give it a fake. A policy
is served under two ids: NAME continues prompts and conversations, NAME:notepad is the memory agent
over the same policy (`chat_model`). Several policies on one base are served beside each other,
each under two ids of its own. Above: `app`; below: reading and text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.serve.completions.conversations import Conversations
from notepad_jax.serve.http.errors import Refusal, bad, plain, shown
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Grammar, Streamer, Tokens, tokens

NOTEPAD = ":notepad"


@dataclasses.dataclass(frozen=True)
class Served:
    """A served policy: what `app` needs of it. Sizes are in tokens."""

    name: str
    tokenizer: Tokenizer
    conversations: Conversations | None  # None: the model has no chat template
    template: Template  # of readings
    rules: Rules
    sampling: TurnSampling  # of readings that do not say otherwise
    seat: Callable[[], contextlib.AbstractContextManager[Streamer]]  # a place at an engine
    alive: Callable[[], Awaitable[None]]  # returns when every engine's loop has answered
    missing: Callable[
        [], str
    ]  # what is to be done before requests are answered at once; "": nothing
    grammar: Callable[[str], Grammar] | None  # of a JSON schema; ValueError. None: not installed
    version: Callable[[], int]  # that new turns start on
    fingerprint: Callable[[], str]  # of the weights
    slots: int  # completions that are made at the same time
    max_prompt: int
    max_completion: int
    most_stops: int  # stop ids of a completion
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    beside: tuple[Served, ...] = ()  # the others on the same base, at the same engines

    def named(self, model: str) -> Served:
        """Returns the policy of a model id, this one or one beside it; Refusal if there is none."""
        every = (self, *self.beside)
        for one in every:
            if model in one.ids:
                return one
        known = " and ".join(id for one in every for id in one.ids)
        message = f"there is no model {shown(model)}; this server has {known}"
        raise Refusal(404, message, "model", "model_not_found")

    def resolved(self, model: str) -> bool:
        """Says whether a model id is a memory agent's; Refusal if it is unknown."""
        return model != self.named(model).name

    @property
    def ids(self) -> tuple[str, str]:
        return self.name, self.name + NOTEPAD

    def grammar_of(self, schema: str | None) -> Grammar | None:
        """Returns the grammar of a JSON schema; Refusal for one that cannot be
        followed, and for any where that is not installed."""
        if schema is None:
            return None
        param = "response_format"
        if self.grammar is None:
            raise bad(param, "this server writes no JSON by a schema, since llguidance is not "
                      "installed; its operator can: pip install 'notepad-jax[structured]'",
                      "unsupported_parameter")  # fmt: skip
        try:
            return self.grammar(schema)
        except ValueError as error:
            raise bad(param, f"the schema cannot be followed: {plain(str(error))}") from None

    def known(self, ids: Sequence[int], param: str) -> Tokens:
        """Returns a request's ids; Refusal, which names `param`, for one that no token has."""
        size = self.tokenizer.vocab_size
        if any(i >= size for i in ids):
            raise bad(param, f"{param} has the id {max(ids)}, and ids end at {size - 1}")
        return tokens(ids)

    def stops(self, usual: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
        """Returns the ids that end a completion: the usual ones and `stop_token_ids`; else
        Refusal."""
        found = tuple(dict.fromkeys([*usual, *self.known(more, "stop_token_ids").tolist()]))
        if len(found) > self.most_stops:
            most = self.most_stops - len(usual)
            raise bad("stop_token_ids", f"{len(more)} ids are given; {most} may be")
        return found

    def card(self, model: str) -> dict[str, Any]:
        """Returns the entry of a model id in /v1/models."""
        notepad, rules = self.resolved(model), self.rules
        limits = {
            "max_question": rules.max_question, "chunk_size": rules.chunk_size,
            "max_memory": rules.max_memory, "max_answer": rules.max_answer,
        }  # fmt: skip
        return {
            "id": model,
            "object": "model",
            "created": self.created,
            "owned_by": "notepad_jax",
            "root": self.name,
            "max_model_len": self.max_prompt + self.max_completion,
            "max_completion_tokens": rules.longest_answer if notepad else self.max_completion,
            "policy_version": self.version(),
            "system_fingerprint": self.fingerprint(),
            **({"notepad": limits} if notepad else {}),
        }
