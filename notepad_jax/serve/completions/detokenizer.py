"""Incremental detokenization: text as its tokens come, without half a character or a stop string.

A token may be a part of a character, and whether a space stands before a word depends on what
stands before that. So a window of some tokens is decoded again with each, and what is new in it
is told once it cannot change. What might become a stop string is held back until it is one or
cannot be. Pure; above: `choices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

HALF = "\ufffd"  # what decoders write for bytes that are no character, or not yet
PATIENCE = 32  # tokens that may be waited for; no character has so many

Decode = Callable[[Iterable[int]], str]


class Saying:
    """The incremental text of a completion. `stopped`: a stop string was found, and ends it."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._before: list[int] = []  # a window's tokens whose text is told
        self._new: list[int] = []  # and those after them
        self._given = 0  # characters of the window that were told
        self._held = ""  # might begin a stop string
        self.stopped = False

    def add(self, token: int) -> str:
        """Returns the text that is certain with one token more; "" after a stop string."""
        self._new.append(token)
        text = self._decode([*self._before, *self._new])
        certain = text if len(self._new) > PATIENCE else text.rstrip(HALF)
        said = certain[self._given :]
        self._given = max(self._given, len(certain))
        if len(certain) == len(text) and said:
            self._before, self._new = self._new, []
            self._given = len(self._decode(self._before))
        return self._released(said)

    def rest(self) -> str:
        """Returns what was held back, when no token follows."""
        said = self._released(self._decode([*self._before, *self._new])[self._given :])
        return said if self.stopped else said + self._held

    def _released(self, said: str) -> str:
        if self.stopped:
            return ""
        text = self._held + said
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        longest = max(map(len, self._stops), default=1) - 1
        held = next(
            (n for n in range(min(longest, len(text)), 0, -1)
             if any(stop.startswith(text[-n:]) for stop in self._stops)), 0,
        )  # fmt: skip
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def token_text(decode: Decode, before: Sequence[int], token: int, controls: dict[int, str]) -> str:
    """Returns one token's text after some others; a control piece's is its name."""
    if token in controls:
        return controls[token]
    left = decode(before)
    both = decode([*before, token])
    return both[len(left) :] if left and both.startswith(left) else decode([token])
