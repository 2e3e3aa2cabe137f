"""The endpoints of readings: begin, look, follow, cancel, and the trace.

A reading that is not to be detached is the stream of its own events, and ends with it. Above:
`app`; below: `jobs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax.reading.trace import MemoryChange, Spool, TraceFile
from notepad_jax.reading.turns import Turns
from notepad_jax.serve.completions import requests
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.documents.refusals import disk
from notepad_jax.serve.documents.store import Files
from notepad_jax.serve.http import bodies
from notepad_jax.serve.http.errors import Refusal, bad, shown
from notepad_jax.serve.http.web import Events, OpenFile, answer, body_of
from notepad_jax.serve.readings import chat_model
from notepad_jax.serve.readings.jobs import ReadingJobs
from notepad_jax.serve.readings.journal import Happened
from notepad_jax.serve.readings.record import ReadingOnDisk, ReadingRequest
from notepad_jax.text.pieces import Pieces

NAMES = ("model", "file_id", "questions", "samples", "seed", "temperature", "top_p", "max_tokens",
         "detach", "notepad")  # fmt: skip
MOST_SHOWN = 2_000_000  # tokens of all prompts of a reading whose page has them

Handler = Callable[..., Awaitable[Response]]


class ReadingRoutes:
    """Handlers of the endpoints of readings."""

    def __init__(self, served: Served, files: Files, readings: ReadingJobs) -> None:
        self._served, self._files, self._readings = served, files, readings

    def routes(self) -> list[Route]:
        """Returns the routes of these endpoints."""

        def route(path: str, method: str, handler: Handler) -> Route:
            return Route(f"/v1/readings{path}", handler, methods=[method])

        return [
            route("", "POST", self.begin),
            route("", "GET", self.list),
            route("/{id}", "GET", self.look),
            route("/{id}", "DELETE", self.delete),
            route("/{id}/cancel", "POST", self.cancel),
            route("/{id}/events", "GET", self.events),
            route("/{id}/trace", "GET", self.trace),
        ]

    async def begin(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        asked = await asyncio.to_thread(self._asked, body)  # questions may be long
        reading = await self._readings.begin(asked)
        headers = {"Location": f"/v1/readings/{reading.id}"}
        if asked.detach:
            return answer(reading.whole(), 202, headers)
        events = self._followed(reading)
        await anext(events)  # from here on closing it ends the reading
        return Events(events, events, headers)

    async def list(self, request: Request) -> Response:
        return answer({"object": "list", "data": [one.card() for one in self._readings.all()]})

    async def look(self, request: Request) -> Response:
        reading = self._of(request)
        await asyncio.to_thread(lambda: reading.courses)  # its journal may be long
        return answer(reading.whole())

    async def delete(self, request: Request) -> Response:
        reading = self._of(request)
        if reading.journal.over:
            await self._readings.forget(reading)
            return answer({"id": reading.id, "object": "reading", "deleted": True})
        await self._readings.stop(reading, now=False)
        return answer(reading.whole())

    async def cancel(self, request: Request) -> Response:
        """As DELETE, but what has ended meanwhile stays."""
        reading = self._of(request)
        await self._readings.stop(reading, now=False)
        return answer(reading.whole())

    async def events(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id", "")
        if seen and not (seen.isascii() and seen.isdigit() and len(seen) < 16):
            raise bad("Last-Event-ID", f"Last-Event-ID is {shown(seen)}; it must be the id of an "
                      f"event")  # fmt: skip
        events = _told(self._of(request), int(seen) + 1 if seen else 0)
        return Events(events, events, {})

    async def trace(self, request: Request) -> Response:
        reading, whole = self._of(request), request.query_params.get("turns", "false")
        if whole not in ("true", "false"):
            raise bad("turns", f"turns is {shown(whole)}; use true or false")
        file = await asyncio.to_thread(self._trace_file, reading, whole == "true")
        return OpenFile(file, "application/jsonl")

    def _trace_file(self, reading: ReadingOnDisk, whole: bool) -> BinaryIO:
        """A trace as an open file without a name: it need not be removed."""
        with tempfile.TemporaryDirectory(prefix="notepad_trace_") as folder:
            path = Path(folder) / f"{reading.id}.jsonl"
            self._write_trace(reading, path, whole)
            return path.open("rb")

    def write_page_trace(self, reading: ReadingOnDisk, path: Path) -> None:
        """Writes what a page shows of a reading, also of what was stopped before its answer.

        Its turns, too, where they are few, and file and model are still those that it was read by.
        """
        if reading.usage()["prompt_tokens"] <= MOST_SHOWN:
            with contextlib.suppress(Refusal):
                return self._write_trace(reading, path, whole=True, stopped=True)
            path.unlink(missing_ok=True)
        self._write_trace(reading, path, whole=False, stopped=True)

    # ------------------------------------------------------------ parts

    def _of(self, request: Request) -> ReadingOnDisk:
        return self._readings.get(request.path_params["id"])

    async def _followed(self, reading: ReadingOnDisk) -> AsyncGenerator[bytes]:
        try:
            yield b""
            async for event in _told(reading, 0):
                yield event
        finally:
            await self._readings.stop(reading, now=True)

    def _asked(self, body: bodies.Body) -> ReadingRequest:
        bodies.check_names(body, NAMES)
        model = body.get("model", self._served.ids[1])
        if isinstance(model, str):
            self._served.named(model)  # or it is refused as unknown
        if model != self._served.ids[1]:
            raise bad("model", f"readings are of the model {self._served.ids[1]}; leave it out")
        file_id = bodies.text(body, "file_id", "send a document to /v1/files first")
        self._files.document(file_id, "file_id")
        questions = requests.questions_of(body)
        for number, question in enumerate(questions):
            where = f"questions[{number}]"
            chat_model.question_tokens(self._served, question, where, "ask a shorter one")
        samples = bodies.whole(body, "samples", 1, requests.MOST_CHOICES) or 1
        if len(questions) * samples > requests.MOST_CHOICES:
            raise bad("questions", f"{len(questions)} questions with {samples} samples each are "
                      f"more than {requests.MOST_CHOICES} readings")  # fmt: skip
        limits, told_as = requests.notepad_of(body, stream=True)
        if told_as is not None:
            raise bad("notepad.as", "a reading's events tell of every memory; leave notepad.as out")
        sampled = [requests.sampled(body, name) for name in ("temperature", "top_p")]
        usual = chat_model.sampling(self._served, *sampled)  # the next server may have another
        longest = chat_model.lowered(self._served.rules, limits).longest_answer
        seed = bodies.whole(body, "seed", -requests.SEEDS, requests.SEEDS - 1)
        return ReadingRequest(
            file_id=file_id,
            questions=questions,
            samples=samples,
            seed=secrets.randbits(62) if seed is None else seed,
            temperature=usual.temperature,
            top_p=usual.top_p,
            max_tokens=bodies.whole(body, "max_tokens", 1, longest),
            limits=limits,
            detach=bodies.flag(body, "detach"),
            created_at=int(time.time()),
            identity=self._readings.identity(file_id),
        )

    @disk()
    def _write_trace(
        self, reading: ReadingOnDisk, path: Path, whole: bool, stopped: bool = False
    ) -> None:
        """Writes the readings that have ended, as `notepad-jax trace` reads them.

        `whole`: with their turns; `stopped`: those, too, that have no answer and had a turn.
        """
        asked = reading.asked
        chunks = self._readings.chunks(asked) if whole else None
        pieces = Pieces(self._served.tokenizer)
        with TraceFile(path) as file:
            for number, course in enumerate(reading.courses):
                if course.answer is None and not (stopped and course.turns):
                    continue
                turns = Turns(pieces, self._readings.rules_of(asked), self._served.template)
                if chunks is not None:
                    for turn, _ in self._readings.again(reading, number, chunks):
                        turns.add(turn)
                question, sample = asked.of(number)
                status = "answered" if course.finish_reason == "stop" else "truncated"
                told = {
                    "question": question, "task_id": asked.file_id, "source": self._served.ids[1],
                    "sample": sample, "answer": course.answer or "",
                    # The answer that never came has a place: what was read before is no answer.
                    "turns": course.turns + (course.answer is None),
                    "status": "no answer" if course.answer is None else status,
                }  # fmt: skip
                memories = Spool(
                    MemoryChange(data["chunk"], data["memory"], data["tokens"], data["seconds"])
                    for happened in reading.journal.lines(course.lines)
                    for name, data in happened
                    if name == "memory"
                )
                file.add(told, memories, turns.kept() if whole else None)


async def _told(reading: ReadingOnDisk, line: int) -> AsyncGenerator[bytes]:
    """Yields the events of a reading from a line on; the last of each line has its number."""
    async with contextlib.aclosing(reading.journal.follow(line)) as lines:
        async for number, happened in lines:
            yield b"".join(
                _event(one, number if place == len(happened) else None)
                for place, one in enumerate(happened, 1)
            )
    for one in reading.unwritten:
        yield _event(one, None)


def _event(happened: Happened, number: int | None) -> bytes:
    name, data = happened
    id = "" if number is None else f"id: {number}\n"
    return f"{id}event: {name}\ndata: {json.dumps(data)}\n\n".encode()
