"""A conversation parsed for a reading: a document, its first question, and what is asked now.

The first message of the user's brings the document and a question; what follows are questions
about the same document, which the memory of that reading answers again. HTTP keeps nothing, so a
client sends all of it every time, and `Memories` has what was read; without it, or where it is too
long ago, the document is read again as it was. Above: `chat_model`; below: `messages` and
`read_ahead`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

from notepad_jax.serve.completions.messages import FilePart, Message
from notepad_jax.serve.http.decoding import FileText
from notepad_jax.serve.http.errors import bad
from notepad_jax.serve.readings.evidence import Origins
from notepad_jax.serve.readings.read_ahead import ReadAhead
from notepad_jax.types import Tokens

SYSTEM = ("system", "developer")
TURNS = ("user", "assistant")
KEPT = 128  # readings whose memories may answer again
KEPT_TOKENS = 1 << 26  # of their documents, whose ids lie on the temporary disk: 256 MB


@dataclasses.dataclass(frozen=True)
class Dialogue:
    """A parsed conversation; what its system messages say stands before every question."""

    document: tuple[str | FilePart, ...]
    reads: str  # the question that the document was, or is to be, read with
    answer: str | None  # that was given to it; None: nothing was asked before
    asks: str


def dialogue(messages: Sequence[Message]) -> Dialogue:
    """Returns a conversation parsed; Refusal for one that no reading answers."""
    start = next((k for k, one in enumerate(messages) if one.role not in SYSTEM), len(messages))
    system, turns = messages[:start], messages[start:]
    wanted = [TURNS[k % 2] for k in range(len(turns))]
    if not len(turns) % 2 or [one.role for one in turns] != wanted:
        raise bad(
            "messages", "a reading takes system messages, and then those of user and assistant by "
            "turns, the last of the user's; leave the others out"
        )  # fmt: skip
    document, reads = _first(turns[0], f"messages[{start}].content")
    before = [one.text for one in system]
    asks = reads
    for number, one in enumerate(turns[2::2], start + 2):
        asks = _following(one, f"messages[{number}].content")
    reads, asks = ("\n".join([*before, question]) for question in (reads, asks))
    answer = turns[1].text if len(turns) > 1 else None
    return Dialogue(document, reads, answer, asks)


def several(messages: Sequence[Message], questions: Sequence[str]) -> list[Dialogue]:
    """Returns a dialogue for each question beside one document; Refusal for a conversation.

    All of the one message is the document: no part of it is a question.
    """
    start = next((k for k, one in enumerate(messages) if one.role not in SYSTEM), len(messages))
    if [one.role for one in messages[start:]] != ["user"]:
        raise bad(
            "messages", "with questions there is one message of the user's, the document; leave "
            "the others out, or ask in messages and leave questions out"
        )  # fmt: skip
    before = [one.text for one in messages[:start]]
    asked = ["\n".join([*before, question]) for question in questions]
    return [Dialogue(messages[start].parts, one, None, one) for one in asked]


def _first(message: Message, where: str) -> tuple[tuple[str | FilePart, ...], str]:
    """The document and the question: the last text, or of a single text its last line."""
    parts = message.parts
    if len(parts) == 1 and isinstance(parts[0], str):
        above, _, last = parts[0].rstrip().rpartition("\n")
        return ((above,), last) if above.strip() else ((), parts[0])
    texts = [number for number, part in enumerate(parts) if isinstance(part, str)]
    if not texts:
        raise bad(where, f"{where} has no text; ask something about the file")
    return parts[: texts[-1]] + parts[texts[-1] + 1 :], parts[texts[-1]]


def _following(message: Message, where: str) -> str:
    if len(message.parts) > 1 or isinstance(message.parts[0], FilePart):
        raise bad(
            where, f"{where} must be one text, a question about the document of the first "
            "message; begin another conversation for another document"
        )  # fmt: skip
    return message.parts[0]


@dataclasses.dataclass(frozen=True, eq=False)
class Known:
    """The last state of a reading, from which it may answer again."""

    memory: Tokens
    next_chunk: int
    origins: Origins
    chunks: ReadAhead


class Memories:
    """An LRU cache of the last states of readings, by document, question and answer.

    Bounded by their number, and by the tokens of their documents, of which the last one stays.
    """

    def __init__(self, most: int = KEPT, tokens: int = KEPT_TOKENS) -> None:
        self._most, self._tokens = most, tokens
        self._known: collections.OrderedDict[tuple[str, str], Known] = collections.OrderedDict()

    def get(self, read: str, answer: str) -> Known | None:
        """Returns the state that the reading `read` came to when it answered so."""
        key = read, answer.strip()
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key)

    def keep(self, read: str, answer: str, what: Known) -> None:
        """Stores a state, and drops the least recently used."""
        self._known[read, answer.strip()] = what
        self._known.move_to_end((read, answer.strip()))
        while len(self._known) > self._most or self._full():
            self._known.popitem(last=False)

    def _full(self) -> bool:
        documents = {one.chunks for one in self._known.values()}  # choices share theirs
        return len(documents) > 1 and sum(one.tokens_read for one in documents) > self._tokens


def digest(
    who: str, document: Sequence[str | FileText], reads: str, limits: Mapping[str, int]
) -> str:
    """Returns a reading's cache key: digest of model, document's bytes, question, limits."""
    parts = [
        hashlib.blake2b(part.encode("utf-8", "replace"), digest_size=16).hexdigest()
        if isinstance(part, str) else [part.id, part.digest]
        for part in document
    ]  # fmt: skip
    about = json.dumps([who, parts, reads, sorted(limits.items())])
    return hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
