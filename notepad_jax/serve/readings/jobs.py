"""Reading jobs, longer than a request: many questions about a file, journalled turn by turn.

A reading of ours is a folder: what was asked, and a journal. Every question is read `samples`
times, all over the same chunks. A turn that has ended is in the journal before anything follows
from it, and turns have seeds of their own; so a server that was killed in the middle goes on at
the turn that it had not written, and comes to the same answer. Above: `routes`, its addresses;
below: `journal`, `store`, and reading.memory_agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from notepad_jax import waiting
from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import State
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling, hashed_seed
from notepad_jax.serve.completions.admission import RequestQueue
from notepad_jax.serve.completions.choices import REASONS
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.documents.store import Files, in_thread
from notepad_jax.serve.http.errors import Refusal, shown
from notepad_jax.serve.http.web import refused
from notepad_jax.serve.readings import chat_model
from notepad_jax.serve.readings.evidence import Origins, evidence
from notepad_jax.serve.readings.journal import Happened
from notepad_jax.serve.readings.read_ahead import Parts, ReadAhead
from notepad_jax.serve.readings.record import ReadingOnDisk, ReadingRequest
from notepad_jax.types import CompleterFailed, Completion, Finish, Streamer, Turn, tokens

_MADE = re.compile(r"reading_[0-9a-f]{24}")  # names that we give
AGAIN = 0.2  # seconds until a turn that was given up is tried again, and a full queue

log = logging.getLogger("notepad_jax.serve")

Seat = Callable[[], contextlib.AbstractContextManager[Streamer]]
CHANGED = (409, "this reading was begun over another file, or by another model, weights or limits; "
           "begin it again", None, "reading_changed")  # fmt: skip


class ReadingJobs:
    """The reading jobs of a server: begins, resumes and ends them."""

    def __init__(self, served: Served, files: Files, queue: RequestQueue, seat: Seat) -> None:
        self._served, self._files, self._queue, self._seat = served, files, queue, seat
        self._folder = files.folder / "readings"
        self._known: dict[str, ReadingOnDisk] = {}

    # ------------------------------------------------------------ a server's life

    async def open(self) -> None:
        """Loads the readings in the folder, and goes on with those that had not ended."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        for folder in sorted(self._folder.iterdir()):
            if not _MADE.fullmatch(folder.name):
                continue  # no folder of ours
            try:
                asked = ReadingRequest.load(folder)
                reading = self._known[folder.name] = ReadingOnDisk(folder, asked)
            except FileNotFoundError:
                shutil.rmtree(folder, ignore_errors=True)  # no client was told of it
                continue
            except (OSError, ValueError, TypeError, KeyError) as error:
                log.error(
                    "a reading cannot be taken up and stays where it is: %s: %s", folder, error
                )
                continue
            if reading.journal.over:
                continue
            if asked.detach:
                self._start(reading, None)
            else:
                await reading.end("cancelled")

    async def close(self) -> None:
        """Stops everything where it stands, so that `open` can go on."""
        await waiting.end(*(one.task for one in self._known.values() if one.task))
        for one in self._known.values():
            await one.journal.close()

    # ------------------------------------------------------------ what clients do

    def all(self) -> list[ReadingOnDisk]:
        """Returns every reading, the newest first."""
        return sorted(self._known.values(), key=lambda one: (-one.asked.created_at, one.id))

    def get(self, id: str) -> ReadingOnDisk:
        """Returns a reading; Refusal (404) if there is none."""
        try:
            return self._known[id]
        except KeyError:
            message = f"there is no reading {shown(id)}; /v1/readings lists those that are here"
            raise Refusal(404, message, "id", "reading_not_found") from None

    async def begin(self, asked: ReadingRequest) -> ReadingOnDisk:
        """Begins a reading; Refusal if the server is busy (429), or its disk full (507)."""
        self.rules_of(asked)
        place = contextlib.ExitStack()
        place.enter_context(self._admitted(asked))
        folder = self._folder / f"reading_{secrets.token_hex(12)}"
        try:
            await in_thread(asked.write, folder)
            reading = self._known[folder.name] = ReadingOnDisk(folder, asked)
        except BaseException:
            place.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._start(reading, place)
        return reading

    async def stop(self, reading: ReadingOnDisk, now: bool) -> None:
        """Cancels a reading: when its turns under way have ended, or at once."""
        if reading.journal.over:
            if reading.unwritten:  # the next server is not to go on with it
                reading.unwritten = []
                await reading.end("cancelled")
            return
        reading.stopping = True
        if now and reading.task is not None:
            await waiting.end(reading.task)

    async def forget(self, reading: ReadingOnDisk) -> None:
        """Removes a reading that has ended."""
        del self._known[reading.id]
        await reading.journal.close()
        shutil.rmtree(reading.folder, ignore_errors=True)

    def identity(self, file_id: str) -> dict[str, str]:
        """Returns what an answer depends on, beside the request: model, weights, rules, file."""
        served = self._served
        return {
            "model": served.ids[1], "weights": served.fingerprint(),
            "template": served.template.name, "template_digest": served.template.digest,
            "rules": repr(served.rules),
            "file": self._files.document(file_id, "file_id").digest,
        }  # fmt: skip

    def filename(self, file_id: str) -> str:
        """Returns the filename of a reading's file; the id where it is gone."""
        try:
            return self._files.get(file_id).filename
        except Refusal:
            return file_id

    # ------------------------------------------------------------ running

    def rules_of(self, asked: ReadingRequest) -> Rules:
        """Returns the rules that it is read by."""
        rules = chat_model.lowered(self._served.rules, asked.limits)
        return rules.within(asked.max_tokens or rules.longest_answer)

    def _width(self, asked: ReadingRequest) -> int:
        return min(len(asked), self._queue.slots)

    def _admitted(self, asked: ReadingRequest) -> contextlib.AbstractContextManager[None]:
        width, served = self._width(asked), self._served
        return self._queue.admitted(width, width * (served.max_prompt + served.max_completion))

    def _start(self, reading: ReadingOnDisk, place: contextlib.ExitStack | None) -> None:
        reading.task = asyncio.ensure_future(self._run(reading, place))
        if place is not None:  # also if it never begins to run
            reading.task.add_done_callback(lambda _: place.close())

    async def _run(self, reading: ReadingOnDisk, place: contextlib.ExitStack | None) -> None:
        with contextlib.ExitStack() as own:
            try:
                if place is None:
                    await self._admission(reading, own)
                await self._read_all(reading)
                await reading.end("cancelled" if reading.stopping else "completed")
            except asyncio.CancelledError:
                if reading.stopping:
                    await reading.end("cancelled")
                raise
            except Exception as error:
                # An engine that failed is this server's, and a disk or a bucket comes back: the
                # next one goes on.
                refusal = refused(error)
                passes = isinstance(error, CompleterFailed) or refusal.status in (502, 507)
                for_good = reading.stopping or not (passes and reading.asked.detach)
                await reading.end("failed", refusal.error, for_good)

    async def _admission(self, reading: ReadingOnDisk, place: contextlib.ExitStack) -> None:
        """Waits until the server is less busy: this reading was admitted before."""
        while not reading.stopping:
            try:
                place.enter_context(self._admitted(reading.asked))
                return
            except Refusal:
                await asyncio.sleep(AGAIN)

    async def _read_all(self, reading: ReadingOnDisk) -> None:
        asked = reading.asked
        # In threads, what may wait for a disk or a bucket.
        chunks = await asyncio.to_thread(self.chunks, asked)
        # And a long journal takes a while to read.
        if not await in_thread(reading.begun_by, self._served.fingerprint()):
            raise Refusal(*CHANGED)
        left = [k for k, course in enumerate(reading.courses) if course.answer is None]
        # In one thread, and before any of them reads on: chunks are made by one at a time.
        states = await asyncio.to_thread(
            lambda: [self._so_far(reading, number, chunks) for number in left]
        )
        free = asyncio.Semaphore(self._width(asked))
        with self._seat() as seat:

            async def one(number: int, so_far: tuple[State, Origins]) -> None:
                async with free:
                    await self._read(reading, number, seat, *so_far, chunks)

            await waiting.all_of(map(one, left, states))

    def chunks(self, asked: ReadingRequest) -> ReadAhead:
        """Returns the chunks that all questions share.

        Refusal if the file is gone (404), or file, policy or limits are not what they were (409).
        """
        if not asked.is_of(self.identity(asked.file_id)):
            raise Refusal(*CHANGED)
        text = self._files.document(asked.file_id, "file_id")
        return ReadAhead(self._served, Parts((text,)), self.rules_of(asked))

    async def _read(
        self, reading: ReadingOnDisk, number: int, seat: Streamer, state: State, origins: Origins,
        chunks: ReadAhead,
    ) -> None:  # fmt: skip
        asked, served, course = reading.asked, self._served, reading.courses[number]
        rules, sampling = self.rules_of(asked), self._sampling(asked, number)
        watch = chat_model.MemoryWatch(served, chunks, state.memory_tokens, course.seconds)
        while course.answer is None and not reading.stopping:
            await chunks.reach(state.turns)
            course_of = memory_agent.read(seat, served.template, rules, state, sampling)
            async with contextlib.aclosing(course_of) as turns:
                async for turn, after in turns:
                    if turn.completion.finish is Finish.CANCELLED:
                        await asyncio.sleep(AGAIN)  # the same turn once more, by the same seed
                        break
                    state, made = after, turn.completion
                    over = memory_agent.is_over(rules, state, made)
                    self._count(turn, over)
                    about = reading, number, state, made, origins, chunks
                    happened = self._told(reading, number, turn, state, watch, origins)
                    if over:
                        happened.append(await self._answer(*about))
                    await reading.tell(happened)
                    if reading.stopping:
                        break
                    await chunks.reach(state.turns)

    def _count(self, turn: Turn, over: bool) -> None:
        counts = self._queue.counts
        counts.prompt_tokens.inc(len(turn.prompt.tokens))
        counts.generation_tokens.inc(len(turn.completion.tokens))
        if over:
            counts.ended.labels(REASONS[turn.completion.finish]).inc()

    def _told(
        self, reading: ReadingOnDisk, number: int, turn: Turn, state: State,
        watch: chat_model.MemoryWatch, origins: Origins,
    ) -> list[Happened]:  # fmt: skip
        made = turn.completion
        about: dict[str, Any] = {
            "reading": number, "turn": reading.courses[number].turns, "kind": turn.kind.value,
            "chunk": turn.chunk, "of": watch.chunks.total_chunks, "finish": made.finish.value,
            "policy_version": made.policy_version, "prompt_tokens": len(turn.prompt.tokens),
            "token_ids": made.tokens.tolist(),
            "logprobs": [float(logprob) for logprob in made.behaviour_logprobs],
            "seconds": watch.seconds(),
        }  # fmt: skip
        happened: list[Happened] = [("turn", about)]
        if change := watch.change(turn, state):
            origins.update(turn.chunk, change["memory"])
            happened.append(("memory", {"reading": number, **change}))
        return happened

    async def _answer(
        self, reading: ReadingOnDisk, number: int, state: State, made: Completion, origins: Origins,
        chunks: ReadAhead,
    ) -> Happened:  # fmt: skip
        decode, (question, sample) = self._served.tokenizer.decode, reading.asked.of(number)
        text = decode(memory_agent.answered(state))
        found = await in_thread(evidence, origins, chunks, decode, question, text)
        return "answer", {
            "reading": number, "question": question, "sample": sample, "answer": text,
            "finish_reason": REASONS[made.finish], "evidence": found,
        }  # fmt: skip

    def _sampling(self, asked: ReadingRequest, number: int) -> TurnSampling:
        usual = chat_model.sampling(self._served, asked.temperature, asked.top_p)
        seed = hashed_seed("reading", asked.seed, *divmod(number, asked.samples))
        return dataclasses.replace(usual, seed=seed)

    # ------------------------------------------------------------ again

    def _so_far(
        self, reading: ReadingOnDisk, number: int, chunks: ReadAhead
    ) -> tuple[State, Origins]:
        state, origins = self._first(reading, number, chunks), Origins()
        for turn, state in self.again(reading, number, chunks):
            origins.update(turn.chunk, self._served.tokenizer.decode(state.memory_tokens))
        return state, origins

    def _first(self, reading: ReadingOnDisk, number: int, chunks: ReadAhead) -> State:
        question, _ = reading.asked.of(number)
        return memory_agent.start(self._served.tokenizer.encode(question), chunks)

    def again(
        self, reading: ReadingOnDisk, number: int, chunks: ReadAhead
    ) -> Iterator[tuple[Turn, State]]:
        """Yields the turns of one reading as they were, from the journal, and the states after."""
        template, rules = self._served.template, self.rules_of(reading.asked)
        state = self._first(reading, number, chunks)
        for (_, data), *_ in reading.journal.lines(reading.courses[number].lines):
            kind, prompt = memory_agent.prompt(rules, template, state)
            made = Completion(
                tokens(data["token_ids"]), np.array(data["logprobs"], np.float32),
                Finish(data["finish"]), data["policy_version"],
            )  # fmt: skip
            turn = memory_agent.turn_of(rules, template, state, prompt, made)
            state = memory_agent.after(rules, template, state, turn)
            yield turn, state
