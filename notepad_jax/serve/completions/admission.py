"""Admission control: a bounded queue in front of the engine, and the numbers of /metrics.

So many choices may run and so many wait; a request beyond them is refused and told when to come
again (429, Retry-After), instead of waiting for ever. Tokens are counted, too: a few long prompts
fill an engine as many short ones do. Above: `app`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from notepad_jax.serve.http.errors import Refusal, bad

LONGEST_WAIT = 60  # seconds that a client is told to wait
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)  # seconds


class RequestQueue:
    """A bounded queue: counts the choices under way, and the tokens that they may come to."""

    def __init__(self, slots: int, waiting: int, tokens: int) -> None:
        """`slots` choices run, `waiting` more may wait; `tokens` of all of them, 0: any number."""
        self.slots, self._most, self._most_tokens = slots, slots + waiting, tokens
        self.choices = self.tokens = 0
        self._seconds = 1.0  # that a choice takes, of late
        self.counts = Counts(self)

    @contextlib.contextmanager
    def admitted(self, choices: int, tokens: int) -> Iterator[None]:
        """Holds a request's places in the queue while it runs; Refusal if there are none."""
        if choices > self._most:
            raise bad("n", f"{choices} completions are asked for; {self._most} is the most here")
        full = self.choices + choices > self._most
        over = self._most_tokens and self.choices and self.tokens + tokens > self._most_tokens
        if full or over:
            wait = math.ceil(self._seconds * self.choices / self.slots)
            raise Refusal(
                429, "the server is busy; come again later", None, "rate_limit_exceeded",
                "rate_limit_error", {"Retry-After": str(min(max(wait, 1), LONGEST_WAIT))},
            )  # fmt: skip
        self.choices += choices
        self.tokens += tokens
        began = time.monotonic()
        try:
            yield
        finally:
            self.choices -= choices
            self.tokens -= tokens
            self._seconds += 0.1 * (time.monotonic() - began - self._seconds)


class Counts:
    """Prometheus metrics: vLLM's names where they mean the same, behind `notepad:`."""

    def __init__(self, queue: RequestQueue) -> None:
        self._registry = CollectorRegistry()

        def named(kind: type, name: str, words: str, **more: object) -> Counter | Histogram | Gauge:
            return kind(f"notepad:{name}", words, registry=self._registry, **more)

        self.prompt_tokens = named(
            Counter, "prompt_tokens", "Prompt tokens: of readings, all turns'."
        )
        self.generation_tokens = named(Counter, "generation_tokens", "Tokens that were sampled.")
        self.ended = named(
            Counter, "request_success", "Completions by how they ended.",
            labelnames=["finished_reason"],
        )  # fmt: skip
        self.refused = named(Counter, "request_refused", "Requests that got a 429.")
        self.gone = named(Counter, "request_aborted", "Requests whose client hung up.")
        self.dropped = named(
            Counter, "connection_dropped",
            "Connections that were ended because they took too long, or others needed the place.",
        )  # fmt: skip
        self.failed = named(Counter, "request_failed", "Requests that got a 5xx.")
        self.first = named(
            Histogram, "time_to_first_token_seconds", "Until a first token.", buckets=BUCKETS
        )
        self.whole = named(
            Histogram, "e2e_request_latency_seconds", "Until the whole reply.", buckets=BUCKETS
        )
        running = named(Gauge, "num_requests_running", "Completions that are being made.")
        running.set_function(lambda: min(queue.choices, queue.slots))
        waiting = named(Gauge, "num_requests_waiting", "Completions that wait for a slot.")
        waiting.set_function(lambda: max(queue.choices - queue.slots, 0))

    def text(self) -> bytes:
        return generate_latest(self._registry)


class Spent:
    """Counts the tokens of one request's choices, as they become known."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._known: dict[int, tuple[int, int]] = {}  # of readings, all turns so far

    def take(self, index: int, made: int, notes: Mapping[str, Any]) -> None:
        """Counts tokens that a choice made; the `notes` of a reading count all of it."""
        if not notes:
            self._counts.generation_tokens.inc(made)
            return
        now = notes["prompt_tokens"], notes["completion_tokens"]
        prompt, made = self._known.get(index, (0, 0))
        self._counts.prompt_tokens.inc(now[0] - prompt)
        self._counts.generation_tokens.inc(now[1] - made)
        self._known[index] = now
