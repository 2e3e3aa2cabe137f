"""Methods of showing a document to a policy: the memory agent, or baselines of one turn.

`notepad` reads all of it in chunks (reading.memory_agent). The others are what it is
compared with, each one turn over at most `context` tokens: `full-context` shows the whole
document and fails where it does not fit, `truncate-middle` its first and last halves,
`recent-only` its end (`Excerpts`). A document is streamed, and no more of it is held than a
method shows. Above: measure, which hands both to `reading.loop`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import NO_TOKENS, Document, Tokens, tokens

NOTEPAD = "notepad"
ONE_TURN = ("full-context", "truncate-middle", "recent-only")
METHODS = (NOTEPAD, *ONE_TURN)


class TooLong(ValueError):
    """A document is longer than the context that a method may show."""


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
        """Raises TooLong for `full-context`, ValueError for a method that is no excerpt."""
        first, last, total = self._ends(_ById(document))
        if method == "recent-only" or total <= self._context:
            return last, total
        if method == "truncate-middle":
            half = self._context // 2
            return tokens(np.concatenate([first[:half], last[half - self._context :]])), total
        if method == "full-context":
            raise TooLong(
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
