"""The record of a reading on disk: its request, how far it is, and the journal that says so.

Everything but what was asked follows from the journal's events, also after a restart. Above:
`jobs`, which runs it, and `routes`, which shows it; below: `journal`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from notepad_jax.serve.documents.refusals import disk
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.readings.journal import DONE, Happened, Journal
from notepad_jax.telemetry.identity import write_whole
from notepad_jax.types import TurnKind

ASKED = "asked.json"
JOURNAL = "journal.jsonl"
USAGE = ("turns", "prompt_tokens", "completion_tokens")


@dataclasses.dataclass(frozen=True)
class ReadingRequest:
    """A client's request for a reading; `identity` is the policy and the file, as they were."""

    file_id: str
    questions: tuple[str, ...]
    samples: int
    seed: int
    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    limits: Mapping[str, int]
    detach: bool  # goes on when its client has hung up
    created_at: int
    identity: Mapping[str, str]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads what was asked from the folder of a reading."""
        fields = json.loads((folder / ASKED).read_text("utf-8"))
        return cls(**{**fields, "questions": tuple(fields["questions"])})

    def write(self, folder: Path) -> None:
        """Writes what was asked to the folder of a reading, which it makes; Refusal (507)."""
        with disk():
            folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(folder / ASKED, json.dumps(dataclasses.asdict(self)).encode())

    def is_of(self, ours: Mapping[str, str]) -> bool:
        """Says whether its identity is this one, weights aside; an old one may lack names."""
        return {**ours, **self.identity, "weights": ours["weights"]} == ours

    def of(self, number: int) -> tuple[str, int]:
        """Returns the question and the sample of one of its readings."""
        return self.questions[number // self.samples], number % self.samples

    def __len__(self) -> int:
        return len(self.questions) * self.samples


@dataclasses.dataclass
class Course:
    """The progress of one of the readings."""

    turns: int = 0
    chunk: int = 0  # chunks that were read
    of: int | None = None
    memory: str = ""
    answer: str | None = None
    finish_reason: str | None = None
    evidence: Mapping[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    lines: list[int] = dataclasses.field(default_factory=list)  # of the journal, one a turn

    def take(self, line: int, name: str, data: Mapping[str, Any]) -> None:
        """Updates the progress with an event of a line."""
        if name == "memory":
            self.memory = data["memory"]
        elif name == "answer":
            self.answer, self.finish_reason = data["answer"], data["finish_reason"]
            self.evidence = data.get("evidence")
        elif name == "turn":
            self.turns, self.of, self.seconds = data["turn"] + 1, data["of"], data["seconds"]
            self.chunk = data["chunk"] + (data["kind"] == TurnKind.UPDATE.value)
            self.prompt_tokens += data["prompt_tokens"]
            self.completion_tokens += len(data["token_ids"])
            self.lines.append(line)


class ReadingOnDisk:
    """One request's readings, under way or ended; owns its journal."""

    def __init__(self, folder: Path, asked: ReadingRequest) -> None:
        self.id, self.folder, self.asked = folder.name, folder, asked
        self.journal = Journal(folder / JOURNAL)
        self.status, self.error = "in_progress", None
        self.stopping = False
        self.unwritten: list[Happened] = []  # how it ended, where the journal does not say so
        self.task: asyncio.Future | None = None
        self._one = threading.Lock()
        self._settle(self.journal.last())

    @property
    def courses(self) -> list[Course]:
        """How far each reading is: read from the journal when it is first asked for."""
        with self._one:  # a thread that came second would undo what was taken in since
            return self._courses

    @functools.cached_property
    def _courses(self) -> list[Course]:
        found = [Course() for _ in range(len(self.asked))]
        for line, happened in enumerate(self.journal.lines(range(len(self.journal)))):
            for name, data in happened:
                if name != DONE:
                    found[data["reading"]].take(line, name, data)
        return found

    async def tell(self, happened: list[Happened]) -> None:
        """Writes what happened, and takes it in."""
        courses = self.courses
        line = await self.journal.add(happened)
        for name, data in happened:
            if name != DONE:
                courses[data["reading"]].take(line, name, data)
        self._settle(happened)

    def _settle(self, happened: list[Happened]) -> None:
        for name, data in happened:
            if name == DONE:
                self.status, self.error = data["status"], data["error"]

    def usage(self) -> dict[str, int]:
        """Returns turns and tokens of all readings."""
        return {name: sum(getattr(one, name) for one in self.courses) for name in USAGE}

    def begun_by(self, weights: str) -> bool:
        """Says whether its turns are of these weights; without a turn, they become its weights."""
        theirs = self.asked.identity.get("weights")
        if any(one.turns for one in self.courses):
            return theirs in (None, weights)
        if theirs != weights:
            identity = {**self.asked.identity, "weights": weights}
            self.asked = dataclasses.replace(self.asked, identity=identity)
            self.asked.write(self.folder)
        return True

    async def end(
        self, status: str, error: Mapping[str, Any] | None = None, for_good: bool = True
    ) -> None:
        """Writes the last line. Where the disk is full, or it ends for this server alone, it is
        remembered, and the next server goes on."""
        done = [(DONE, {"status": status, "error": error, "usage": self.usage()})]
        with contextlib.suppress(Refusal):
            if for_good:
                return await self.tell(done)
        self.unwritten, self.journal.over = done, True
        self._settle(done)
        await self.journal.tell()

    def card(self) -> dict[str, Any]:
        """Returns the reading's JSON object, in short."""
        asked = self.asked
        return {
            "id": self.id, "object": "reading", "status": self.status, "error": self.error,
            "created_at": asked.created_at, "file_id": asked.file_id, "samples": asked.samples,
            "questions": asked.questions, "seed": asked.seed, "detach": asked.detach,
            "stopping": self.stopping,
        }  # fmt: skip

    def whole(self) -> dict[str, Any]:
        """Returns the reading's JSON object, with how far it is."""
        asked, found = self.asked, []
        for number, one in enumerate(self.courses):
            question, sample = asked.of(number)
            found.append({
                "question": question, "sample": sample, "chunk": one.chunk, "of": one.of,
                "memory": one.memory, "answer": one.answer, "finish_reason": one.finish_reason,
                "evidence": one.evidence,
                "usage": {name: getattr(one, name) for name in USAGE},
            })  # fmt: skip
        return self.card() | {"readings": found, "usage": self.usage()}
