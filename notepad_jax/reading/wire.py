"""Chat completions as JSON: the requests to an OpenAI-compatible server, and its responses.

Values and pure functions over bytes and dictionaries; nothing here waits or sends. Servers
differ: in the name of the limit, in whether they take a seed, in where they put the words
of an error, and all of that is here. Above: endpoint and connection.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from notepad_jax.types import SamplingParams

MAX_MESSAGE = 200  # characters of a server's own words in our messages
LENGTH_REASONS = ("length", "max_tokens")  # finish_reason of a completion that was cut

GOES_ON = "continue_final_message"

NO_ANSWER = 0  # in the place of a status: the server was not reached, or fell silent
_RETRIED = (NO_ANSWER, 408, 425, 429)  # and 500 to 599
_REFUSAL = re.compile(
    r"unsupported|not (?:be )?(?:supported|permitted|allowed)|unrecogni[sz]ed|unknown|unexpected"
    r"|extra_forbidden|\binstead\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class WireReply:
    """An HTTP response, or why there is none."""

    path: str
    status: int  # of HTTP, or NO_ANSWER
    body: bytes
    retry_after: str = ""  # the header as it came
    tries: int = 1

    @property
    def worth_another_try(self) -> bool:
        if 200 <= self.status < 300:
            return _cut_short(self.body)
        if b"insufficient_quota" in self.body:  # a 429 that waiting does not mend
            return False
        return self.status in _RETRIED or 500 <= self.status < 600


@dataclasses.dataclass(frozen=True)
class Dialect:
    """The request parameters on which servers differ; begins with the oldest names."""

    limit: str = "max_tokens"  # or max_completion_tokens, where that is refused
    seeded: bool = True

    def request(
        self, model: str, text: str, sampling: SamplingParams, begun: str = ""
    ) -> dict[str, Any]:
        """Returns the request body: `text` is to be answered, in a reply that begins with `begun`.

        That a reply goes on is said as vLLM and SGLang are told; servers that do not know these
        names and take an assistant's message at the end for a beginning do the same.
        """
        seed = {"seed": sampling.seed & 0x7FFFFFFF} if self.seeded else {}
        goes_on = {GOES_ON: True, "add_generation_prompt": False} if begun else {}
        reply = [{"role": "assistant", "content": begun}] if begun else []
        return {
            "model": model,
            "messages": [{"role": "user", "content": text}, *reply],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            self.limit: sampling.max_new_tokens,
            "n": 1,
            "stream": False,
            **seed,
            **goes_on,
        }

    def adapted(self, reply: WireReply) -> Dialect | None:
        """Returns the dialect that a refusal asks for; None if it is about something else."""
        if reply.status not in (400, 422):
            return None
        said = message(reply.body)
        if not _REFUSAL.search(said):
            return None
        if self.limit == "max_tokens" and re.search(r"\bmax_tokens\b", said):
            return dataclasses.replace(self, limit="max_completion_tokens")
        if self.seeded and re.search(r"\bseed\b", said):
            return dataclasses.replace(self, seeded=False)
        return None


def cannot_go_on(reply: WireReply) -> bool:
    """Whether a server refuses to go on with a reply that was begun."""
    said = message(reply.body) if reply.status in (400, 422) else ""
    return bool(re.search(rf"\b{GOES_ON}\b|\badd_generation_prompt\b|\bprefill", said))


def _cut_short(body: bytes) -> bool:
    """Whether a good reply lost its end or its choices on the way, as overloaded gateways do.

    A page of HTML is whole: it comes from an address that is no endpoint.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return not body.lstrip().startswith(b"<")
    return isinstance(answer, dict) and answer.get("choices", True) in (None, [])


def without(secret: str, value: Any) -> Any:
    """Returns a JSON value in which no text, a name included, holds `secret`."""
    if isinstance(value, str):
        return value.replace(secret, "***")
    if isinstance(value, list):
        return [without(secret, item) for item in value]
    if isinstance(value, dict):
        return {without(secret, name): without(secret, item) for name, item in value.items()}
    return value


def choice(answer: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns (content, finish_reason) of the first choice; None where there is no such thing.

    A content of null is "". What a server says under `reasoning_content` is not looked at.
    """
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    said = first.get("message") if isinstance(first, dict) else None
    content = said.get("content", "") if isinstance(said, dict) else 0
    if content is not None and not isinstance(content, str):
        return None
    return content or "", str(first.get("finish_reason"))


def used(usage: object, name: str) -> int:
    """Returns a count of tokens out of a reply's usage; 0 where it is missing or nonsense."""
    n = usage.get(name) if isinstance(usage, dict) else 0
    return n if isinstance(n, int) and 0 <= n < 1 << 40 else 0


def message(body: bytes) -> str:
    """Returns a server's words about an error, by the shapes in which servers put them."""
    text = body[: 20 * MAX_MESSAGE].decode("utf-8", "replace")
    try:
        said = json.loads(body) if len(body) <= 1 << 16 else None
    except (ValueError, RecursionError):
        return text
    if isinstance(said, dict) and isinstance(said.get("error"), dict):
        said = said["error"]
    if isinstance(said, dict):
        for name in ("message", "error", "detail"):
            if isinstance(said.get(name), str):
                return said[name]
    return text
