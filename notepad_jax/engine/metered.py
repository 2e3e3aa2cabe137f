"""The counts of an engine: what a service adds up, and an executor that tells a display.

`Metered` wraps an executor, as `replay` does, and changes nothing of its arguments or results.
Launches that read prefixes are not waited for, so what they read is told with the next launch that
is: at most once a launch the callback is called, with three numbers that the host has anyway.
Above: service, which keeps `EngineStats`, and the programs, which give a screen's `work`; below:
executor.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from notepad_jax.engine.executor import Executes, Sampled
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.engine.scheduler import Context


@dataclasses.dataclass
class EngineStats:
    """Counts since the last `take_stats`; tokens and seconds."""

    prefix_tokens: int = 0  # prefilled as shared prefixes
    prefix_tokens_saved: int = 0  # shared prompt tokens that were already cached
    tail_tokens: int = 0  # of private tails: prefilled, or one decoded; drafts not counted
    draft_tokens: int = 0  # completion tokens that came from verified drafts
    decode_tokens: int = 0  # completion tokens that were decoded one by one
    pairs: int = 0  # (query, key) pairs of attention, in prefixes and in turns that ended
    turns: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0


# Tokens that were read and written, turns that ended, and the seconds that this took.
Told = Callable[[int, int, float], None]


class Metered:
    """An executor (`executor.Executes`) that calls `told` after each launch it waited for."""

    def __init__(self, executor: Executes, told: Told) -> None:
        self.settings = executor.settings
        self._executor, self._told = executor, told
        self._tokens, self._began = 0, 0.0  # of launches not waited for yet

    def rest(self) -> None:
        """Frees the KV cache until the next launch."""
        self._executor.rest()

    def weights(self, params: Any) -> Any:
        """Returns a policy's parameters as the launches are to be given them."""
        return self._executor.weights(params)

    def read(self, params: Any, prefixes: Sequence[CachedPrefix]) -> None:
        """Prefills shared prefixes into their pages."""
        self._began = self._began or time.perf_counter()
        self._executor.read(params, prefixes)
        self._tokens += sum(prefix.length for prefix in prefixes)

    def start(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]:
        """Prefills the tails of admitted turns."""
        self._tokens += sum(len(context.tail) for context in contexts)
        return self._launched(self._executor.start, params, contexts)

    def decode(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]:
        """Decodes some tokens in every slot."""
        return self._launched(self._executor.decode, params, contexts)

    def _launched(
        self, launch: Callable[..., Sequence[Sampled]], params: Any, contexts: Sequence[Context]
    ) -> Sequence[Sampled]:
        self._began = self._began or time.perf_counter()
        sampled = launch(params, contexts)
        written = sum(len(some.tokens) for some in sampled)
        if written:  # so it was waited for
            tokens, seconds = self._tokens + written, time.perf_counter() - self._began
            self._tokens, self._began = 0, 0.0
            self._told(tokens, sum(map(Sampled.ends, sampled, contexts)), seconds)
        elif not contexts:  # nothing was launched
            self._tokens, self._began = 0, 0.0
        return sampled
