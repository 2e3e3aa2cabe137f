"""A rate limit of the log, which no client can fill: of one line of code a few records a minute.

What clients do wrong is said where the operator looks, by uvicorn, asyncio and ourselves; and a
client may do it ten thousand times a second. Above: programs.serve.
"""

from __future__ import annotations

import logging
import secrets
import time

from starlette.requests import Request

FEW = 5  # records of one line of code
WHILE = 60.0  # seconds
NAMES = ("uvicorn.error", "asyncio", "notepad_jax.serve")


class RateLimit(logging.Filter):
    """A filter that passes FEW records of each line of code in WHILE, and then one that says how
    many were left out: the first of the next while."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[str, int], list[float]] = {}  # begin of its while, records in it

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        while_of = self._known.setdefault((record.pathname, record.lineno), [now, 0])
        if now - while_of[0] >= WHILE:
            left_out = int(while_of[1]) - FEW
            if left_out > 0:
                record.msg = f"{record.getMessage()} (and {left_out:,} times more before)"
                record.args = ()
            while_of[:] = now, 0
        while_of[1] += 1
        return while_of[1] <= FEW


def limit_rate() -> None:
    """Adds the filter to the logs that a server's clients can write to."""
    limit = RateLimit()
    for name in NAMES:
        logging.getLogger(name).addFilter(limit)


def request_id(request: Request) -> str:
    """Returns the request id of the client's, if it is fit for a header, or a new one."""
    said = request.headers.get("x-request-id", "")
    plain = said.isascii() and said.isprintable() and 0 < len(said) <= 128
    return said if plain else secrets.token_hex(8)
