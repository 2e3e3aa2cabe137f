"""How a document is put before a policy: by the memory agent, or in one turn.

`notepad` reads all of it in chunks (reading.memory_agent). The others are what it is
compared with, each one turn over at most `context` tokens: `full-context` shows the whole
document and fails where it does not fit, `truncate-middle` its first and last halves,
`recent-only` its end. All are coroutines of the same shape: turns, each with the memory
after it. A document is streamed, and no more of it is held than a method shows. Above:
measure; below: reading.memory_agent and text.prompts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import AsyncIterator, Iterable

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    NO_TOKENS,
    Chunks,
    Completer,
    Document,
    Tokens,
    Turn,
    TurnKind,
    tokens,
)

NOTEPAD = "notepad"
ONE_TURN = ("full-context", "truncate-middle", "recent-only")
METHODS = (NOTEPAD, *ONE_TURN)


def check(names: Iterable[str]) -> None:
    """Raises ValueError for a method that there is not."""
    for name in names:
        if name not in METHODS:
            raise ValueError(f"there is no method {name!r}; use one of {', '.join(METHODS)}")


class DoesNotFit(ValueError):
    """A document is longer than the context that a method may show."""


async def read_with_memory(
    completer: Completer,
    template: Template,
    rules: Rules,
    question: Tokens,
    chunks: Chunks,
    sampling: TurnSampling,
) -> AsyncIterator[tuple[Turn, Tokens]]:
    """The memory agent: yields each turn with the memory after it."""
    state = memory_agent.start(question, chunks)
    async for turn, after in memory_agent.read(completer, template, rules, state, sampling):
        yield turn, after.memory_tokens


async def read_at_once(
    completer: Completer,
    template: Template,
    rules: Rules,
    question: Tokens,
    shown: Tokens,
    sampling: TurnSampling,
) -> AsyncIterator[tuple[Turn, Tokens]]:
    """One answer turn over `shown`, the part of the document that a method shows."""
    prompt = template.direct_prompt(question, shown)
    completion = await completer.complete(prompt, sampling.params(rules, TurnKind.ANSWER, 0))
    yield Turn(TurnKind.ANSWER, 0, prompt, completion), NO_TOKENS


class Excerpts:
    """(document, method) -> what is shown of it, and how many tokens the document has.

    Remembers the ends of the last few documents: questions about one come one after the other.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        if context < 2:
            raise ValueError(f"evaluate.context is {context} tokens; a method must show 2 or more")
        self._context = context
        self._ends = functools.lru_cache(maxsize=4)(
            lambda document: _ends(tokenizer.encode_pieces(document.value.pieces()), context)
        )

    def __call__(self, document: Document, method: str) -> tuple[Tokens, int]:
        """Raises DoesNotFit for `full-context`, ValueError for a method that is no excerpt."""
        first, last, total = self._ends(_ById(document))
        if method == "recent-only" or total <= self._context:
            return last, total
        if method == "truncate-middle":
            half = self._context // 2
            return tokens(np.concatenate([first[:half], last[half - self._context :]])), total
        if method == "full-context":
            raise DoesNotFit(
                f"the document has {total:,} tokens and a prompt may show {self._context:,} of it "
                "(evaluate.context)"
            )
        raise ValueError(f"{method} is no method of one turn; use one of {', '.join(ONE_TURN)}")


@dataclasses.dataclass(frozen=True, eq=False)
class _ById:
    """A document as a dictionary key: the object itself, whatever it says of equality."""

    value: Document

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


def _ends(ids: Iterable[Tokens], limit: int) -> tuple[Tokens, Tokens, int]:
    """Returns the first and the last `limit` tokens of a stream, and how many it has."""
    first: list[Tokens] = []
    last: collections.deque[Tokens] = collections.deque()
    total = held = 0
    for part in ids:
        if total < limit:
            first.append(part)
        last.append(part)
        total, held = total + len(part), held + len(part)
        while held - len(last[0]) >= limit:
            held -= len(last.popleft())
    return _join(first)[:limit], _join(last)[-limit:], total


def _join(parts: Iterable[Tokens]) -> Tokens:
    return tokens(np.concatenate([NO_TOKENS, *parts]))
