"""Conversations of any shape as token ids, in the turn markers of the model's own template.

The template, a program of the model's, never sees what a message says: it is run once for every
sequence of roles, over marks, and what it writes around them is kept. Messages are spliced in
as ids of ordinary text, so no message can become a special token, as in `text.chat`, which does
the same for the one turn of a reading. Above: `app`; below: text.chat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from notepad_jax.serve.completions.messages import Message
from notepad_jax.serve.http.errors import bad
from notepad_jax.text import chat
from notepad_jax.text.chat import ChatTemplate
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Tokens, tokens

KEPT = 512  # sequences of roles
MOST = 512  # messages of a conversation
_MARK = "NotepadPart{}Of{}End"


class Conversations:
    """The chat template as token ids; caches what it writes for each sequence of roles.

    Raises ValueError for a template that cannot frame even one turn (`chat.frame`).
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self.stop_ids = chat.frame(template, tokenizer).stop_ids
        self._template, self._tokenizer = template, tokenizer
        self._known: dict[tuple[str, ...], tuple[Tokens, ...]] = {}
        self._rendering = asyncio.Semaphore(2)  # each is a process

    async def tokens(self, messages: Sequence[Message]) -> Tokens:
        """Returns a conversation's ids, with the generation prompt. Refusal for one that the
        template does not take: a role it does not know, an order it refuses."""
        if len(messages) > MOST:
            raise bad("messages", f"there are {len(messages)} messages; {MOST} is the most")
        roles = tuple(message.role for message in messages)
        literals = self._known.get(roles)
        if literals is None:
            async with self._rendering:
                literals = await asyncio.to_thread(self._literals, roles)
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[roles] = literals
        texts = [message.text for message in messages]
        return await asyncio.to_thread(self._spliced, texts, literals)  # texts may be long

    def _spliced(self, texts: Sequence[str], literals: Sequence[Tokens]) -> Tokens:
        parts = [literals[0]]
        for text, literal in zip(texts, literals[1:], strict=True):
            parts += [self._tokenizer.encode(text), literal]
        return tokens(np.concatenate(parts))

    def _literals(self, roles: tuple[str, ...]) -> tuple[Tokens, ...]:
        """What stands before, between and behind the messages; twice, to see that it stays."""
        both = [[_MARK.format(k, which) for k in range(len(roles))] for which in ("A7", "B41")]
        asked = [
            ([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)], True)
            for marks in both
        ]
        try:
            texts = self._template.render_all(asked)
            found = [_between(text, marks) for text, marks in zip(texts, both, strict=True)]
            if found[0] != found[1]:
                raise ValueError("what the template writes depends on what the messages say")
            return tuple(self._tokenizer.encode_template(part) for part in found[0])
        except ValueError as error:
            raise bad("messages", f"the model does not take these messages: {error}") from None


def _between(text: str, marks: Sequence[str]) -> list[str]:
    parts = []
    for number, mark in enumerate(marks):
        if text.count(mark) != 1:
            raise ValueError(f"its chat template leaves out messages[{number}], or moves it")
        before, _, text = text.partition(mark)
        parts.append(before)
    return [*parts, text]
