"""A user's rule of what becomes the memory: a pure function of the memory and what was written.

    def rule(memory: Note, written: Note) -> Note | str | Sequence[int]: ...

Either side may be looked at as text or as token ids. A `Note` that is returned as it came is
spliced into the next prompt as the ids that it has, never decoded and encoded again; a text is
encoded, and can hold no special token. The rule is applied wherever a reading goes on: in
training, when it is resumed or shown again, in evaluation and in `ask`. So it must give the same
for the same. Above: setup.builders, which finds the function; below: the tokenizer. Used by
memory_agent through `Rules`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from notepad_jax import functions
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Tokens, tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Note:
    """A memory, or what the policy wrote, as text and as ids, without the stop token."""

    tokens: Tokens
    _tokenizer: Tokenizer = dataclasses.field(repr=False)

    @functools.cached_property
    def text(self) -> str:
        return self._tokenizer.decode(self.tokens)

    def __str__(self) -> str:
        return self.text


Returned = Note | str | Sequence[int]


class RuleFailed(ValueError):
    """A rule that raised, or returned what cannot be a memory."""


@dataclasses.dataclass(frozen=True)
class OwnRule:
    """A user's function, as `Rules.memory_update` holds it."""

    name: str  # module:function
    function: Callable[[Note, Note], Returned] = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)

    def __post_init__(self) -> None:
        if not functions.takes(self.function, None, None):  # before a step of readings is lost
            raise ValueError(f"the memory rule {self.name} takes no two arguments, memory and note")

    def __call__(self, memory: Tokens, written: Tokens, limit: int) -> Tokens:
        """Returns the new memory, of at most `limit` tokens; RuleFailed, naming the function."""
        notes = Note(memory, self.tokenizer), Note(written, self.tokenizer)
        try:
            found = self.function(*notes)
        except Exception as problem:
            raise RuleFailed(
                f"the memory rule {self.name} raised {type(problem).__name__}: {problem}"
            ) from problem
        ids = self._ids(found, notes)
        if len(ids) > limit:
            raise RuleFailed(
                f"the memory rule {self.name} returned {len(ids)} tokens, and a memory has at most "
                f"{limit} (reading.max_memory); cut them in the rule"
            )
        return ids

    def _ids(self, found: Returned, notes: Sequence[Note]) -> Tokens:
        if any(found is note for note in notes):
            return found.tokens
        if isinstance(found, str):
            return tokens(self.tokenizer.encode(found))
        try:
            ids = np.array(found.tokens if isinstance(found, Note) else found)
            if ids.ndim == 1 and (not ids.size or np.issubdtype(ids.dtype, np.integer)):
                if not ids.size or 0 <= ids.min() <= ids.max() < self.tokenizer.vocab_size:
                    return tokens(ids.astype(np.int32))
        except (TypeError, ValueError):
            pass
        raise RuleFailed(
            f"the memory rule {self.name} returned {found!r:.80}; return a note, a text, or "
            f"token ids from 0 to {self.tokenizer.vocab_size - 1}"
        )
