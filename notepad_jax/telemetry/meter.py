"""The throughput that is shown during a run: engines' tokens a second, and turns ended.

An engine says after each round of launches how many tokens it read and wrote, how many turns ended,
and how long that took; several engines do so from threads of their own. What is shown is the rate
of the last few seconds, or of the last round where that took longer. Above: `line_screen` and
`terminal_screen`; `engine.metered` reports to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

WINDOW = 5.0  # seconds that a rate is taken over


class _Round(NamedTuple):
    tokens: int
    began: float
    ended: float


class Meter:
    """A meter of throughput: adds up what is reported; its `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turns = 0  # that ended, so far
        self._clock, self._lock = clock, threading.Lock()
        self._rounds: deque[_Round] = deque()

    def work(self, tokens: int, turns: int, seconds: float) -> None:
        """A round of an engine has ended, `seconds` after it began."""
        now = self._clock()
        with self._lock:
            self.turns += turns
            self._rounds.append(_Round(tokens, now - seconds, now))
            self._forget(now)

    def rate(self) -> float:
        """Returns tokens a second, by now; 0 where no engine has reported for long."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            if not self._rounds:
                return 0.0
            tokens = sum(one.tokens for one in self._rounds)
            return tokens / max(now - min(one.began for one in self._rounds), 1e-3)

    def __call__(self) -> str:
        """Returns the rate in words, or "" where there is none."""
        rate = self.rate()
        if not rate:
            return ""
        return f"{rate:,.0f} tokens/s" if rate >= 10 else f"{rate:.1f} tokens/s"

    def _forget(self, now: float) -> None:
        """Lets rounds go that ended long ago; a long one stays for as long again as it took."""
        while self._rounds:
            first = self._rounds[0]
            if now - first.ended <= max(WINDOW, first.ended - first.began):
                return
            self._rounds.popleft()
