"""Error responses: OpenAI's error object, its status, and the parameter it is about.

Everything in this room that finds something wrong raises `Refusal`; `app` turns it into a reply.
"""

from __future__ import annotations

from typing import Any

LONGEST = 80  # characters of a value that an error repeats


class Refusal(Exception):
    """An error response, raised; `status` is HTTP's, `param` names what of the body is wrong."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error", headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.error = {"message": message, "type": kind, "param": param, "code": code}


def bad(param: str, message: str, code: str | None = None) -> Refusal:
    """Returns the Refusal (400) about one parameter."""
    return Refusal(400, message, param, code)


def shown(value: Any) -> str:
    """Returns a value of a request as a message repeats it: in one line, and short."""
    return _short(repr(value))


def plain(text: str) -> str:
    """As `shown`, without quotes: a parameter's name, or what a library says."""
    return _short(repr(text)[1:-1])


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
