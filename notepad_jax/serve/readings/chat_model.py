"""NAME:notepad: a conversation as a document and a question, read by the memory agent.

`dialogue` says what is which. Files are read from disk as the reading comes to them, so a document
may have any length. The agent is that of `ask`, evaluation and training; its answer is told token
by token, and ends where the request says. What is asked afterwards is answered from the memory
that there is, and nothing is read twice. Above: `app` and `jobs`; below: reading.memory_agent,
`evidence` and `choices`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import State
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.serve.completions.choices import REASONS, Delta, choice, completed, told
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.completions.requests import Chat, How
from notepad_jax.serve.documents.store import Files, in_thread
from notepad_jax.serve.http.errors import bad
from notepad_jax.serve.readings import dialogue
from notepad_jax.serve.readings.dialogue import Known, Memories
from notepad_jax.serve.readings.evidence import Origins, evidence
from notepad_jax.serve.readings.read_ahead import Parts, ReadAhead
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Finish,
    Grammar,
    MemoryState,
    Prompt,
    SamplingParams,
    Streamer,
    Tokens,
    Turn,
)

FORM = (
    'send the document and the question as two parts of one message: "content": '
    '[{"type": "text", "text": DOCUMENT}, {"type": "text", "text": QUESTION}]'
)


@dataclasses.dataclass(frozen=True)
class DocumentQuestion:
    """A question about a document, as a choice of a request asks it."""

    text: str
    tokens: Tokens
    reads: Tokens  # the question that the document is read with, if it is not known
    known: Known | None
    remember: Callable[[str, Known], None]  # by what it was answered
    chunks: ReadAhead
    rules: Rules
    sampling: TurnSampling  # its seed is each choice's
    # Of the answer alone:
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    grammar: Grammar | None = None


def asked(
    served: Served, files: Files, memories: Memories, request: Chat
) -> tuple[DocumentQuestion, ...]:  # fmt: skip
    """Returns the question of each choice of a request; Refusal for what a reading cannot do.

    All are of one document, and share its chunks.
    """
    how, rules, several = request.how, lowered(served.rules, request.limits), request.questions
    every = (
        dialogue.several(request.messages, several)
        if several
        else [dialogue.dialogue(request.messages)]
    )
    ids = [_ids(served, request, number, said) for number, said in enumerate(every)]
    grammar = served.grammar_of(how.schema)
    most = _longest(rules, how, grammar)
    found = [
        part if isinstance(part, str) else part.text or files.document(part.id, part.where)
        for part in every[0].document
    ]
    fresh = ReadAhead(served, Parts(tuple(found)), rules)
    rules = rules.within(how.max_tokens or most)
    sampled = sampling(served, how.temperature, how.top_p)
    stops = served.stops(sampled.stop_ids, how.stop_token_ids)

    def question(said: dialogue.Dialogue, reads: Tokens, asks: Tokens) -> DocumentQuestion:
        read = dialogue.digest(served.name, found, said.reads, request.limits)
        known = None if said.answer is None else memories.get(read, said.answer)
        remember = _remember(memories, read, said.answer, known)
        chunks = known.chunks if known else fresh
        about = said.asks, asks, reads, known, remember, chunks
        return DocumentQuestion(*about, rules, sampled, how.stop, stops, how.top_logprobs, grammar)

    made = [question(said, *both) for said, both in zip(every, ids, strict=True)]
    return tuple(made if several else made * how.n)


def _ids(served: Served, request: Chat, number: int, said: dialogue.Dialogue) -> list[Tokens]:
    """Returns what the document is read for and what is asked, of one question."""
    mend = "ask a shorter one" if said.document else FORM
    if request.messages[0].role in dialogue.SYSTEM:
        mend += ", or leave the system message out, which stands before it"
    where = f"questions[{number}]" if request.questions else "messages"
    return [question_tokens(served, one, where, mend) for one in (said.reads, said.asks)]


def _longest(rules: Rules, how: How, grammar: Grammar | None) -> int:
    """Returns how many tokens an answer may have; Refusal where more are asked for."""
    # What a schema wants is written in one context.
    most = rules.longest_answer if grammar is None else rules.max_answer
    if (how.max_tokens or 0) > most:
        raise bad(
            "max_tokens", f"max_tokens is {how.max_tokens} and an answer may have {most} tokens"
            f"{'' if grammar is None else ' by a schema'}",
        )  # fmt: skip
    return most


def _remember(
    memories: Memories, read: str, before: str | None, known: Known | None
) -> Callable[[str, Known], None]:
    """Returns what keeps a reading `read`, under its own answer or the one `before` this."""

    def remember(answer: str, what: Known) -> None:
        if before is None:
            memories.keep(read, answer, what)
        elif known is None:  # it was read again, and what it was asked first stands in the request
            memories.keep(read, before, what)

    return remember


def question_tokens(served: Served, question: str, param: str, mend: str) -> Tokens:
    """Returns a question's ids; Refusal for an empty one, and with the mend for a long one."""
    ids, most = served.tokenizer.encode(question), served.rules.max_question
    if not question.strip() or not len(ids):
        raise bad(param, "the question is empty; ask something")
    if len(ids) > most:
        raise bad(
            param, f"the question has {len(ids):,} tokens and may have {most:,}; {mend}",
            "context_length_exceeded",
        )  # fmt: skip
    return ids


def lowered(rules: Rules, limits: Mapping[str, int]) -> Rules:
    """Returns the rules with limits of a request's own; Refusal for those above the server's."""
    for name, value in limits.items():
        most = getattr(rules, name)
        if value > most:
            raise bad(f"notepad.{name}", f"notepad.{name} is {value} and may be {most} here")
    return dataclasses.replace(rules, **limits)


def sampling(served: Served, temperature: float | None, top_p: float | None) -> TurnSampling:
    """Returns a reading's sampling: the request's values, or where it has none the server's."""
    usual = served.sampling
    return dataclasses.replace(
        usual,
        temperature=usual.temperature if temperature is None else temperature,
        top_p=usual.top_p if top_p is None else top_p,
    )


class MemoryWatch:
    """Watches the memory of a reading for changes."""

    def __init__(
        self, served: Served, chunks: ReadAhead, before: Tokens = NO_TOKENS, seconds: float = 0.0
    ) -> None:
        """A reading that goes on had read for some seconds `before`."""
        self.chunks, self._decode, self._before = chunks, served.tokenizer.decode, before
        self._began = time.monotonic() - seconds

    def seconds(self) -> float:
        """Returns how long the reading has taken so far."""
        return round(time.monotonic() - self._began, 3)

    def change(self, turn: Turn, state: State) -> dict[str, Any] | None:
        """Returns what a turn made of the memory; None where it stayed what it was."""
        memory = state.memory_tokens
        if np.array_equal(memory, self._before):
            return None
        self._before = memory
        return {
            "chunk": turn.chunk, "of": self.chunks.total_chunks, "memory": self._decode(memory),
            "tokens": len(memory), "seconds": self.seconds(),
        }  # fmt: skip


@dataclasses.dataclass
class Counted:
    """Turns and tokens of a reading so far, those under way among them."""

    chunks: ReadAhead | None  # None: nothing is read
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def turn(self, prompt: Prompt, made: int = 0) -> None:
        """Counts a turn, and the tokens that were made of it."""
        self.turns += 1
        self.prompt_tokens += len(prompt.tokens)
        self.completion_tokens += made

    def notes(self) -> dict[str, Any]:
        """Returns the usage."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "notepad": {
                "turns": self.turns,
                "document_tokens": self.chunks.tokens_read if self.chunks else 0,
            },
        }


class AnswerAloud:
    """A `Completer` for the turns of an answer that passes on its deltas while it is made.

    Its contexts are one text, which a stop string may end anywhere.
    """

    def __init__(
        self, streamer: Streamer, question: DocumentQuestion, saying: Saying, index: int,
        counted: Counted, tell: Callable[[Delta], None],
    ) -> None:  # fmt: skip
        self._streamer, self._question, self._saying = streamer, question, saying
        self._index, self._counted, self._tell = index, counted, tell

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Returns the completion of one context; one that a stop string cut ends there."""
        asked = self._question
        sampling = dataclasses.replace(
            sampling, stop_ids=asked.stop_ids, top_logprobs=asked.top_logprobs,
            grammar=asked.grammar,
        )  # fmt: skip
        self._counted.turn(prompt)
        course = choice(self._streamer, prompt, sampling, self._saying, self._index, more=True)
        return await completed(course, self._told)

    def _told(self, delta: Delta) -> None:
        self._counted.completion_tokens += len(delta.tokens)
        if delta.tokens:  # how it ends is told when all of it has ended
            notes = self._counted.notes()
            self._tell(dataclasses.replace(delta, finish=None, notes=notes))


def reading(
    streamer: Streamer, served: Served, question: DocumentQuestion, seed: int, index: int,
    watched: bool = False,
) -> AsyncGenerator[Delta]:  # fmt: skip
    """Yields the answer of one reading as it is made; tokens of all its turns are in `notes`.

    If it is watched, a change of its memory is a delta, too.
    """
    sampling = dataclasses.replace(question.sampling, seed=seed)
    counted = Counted(None if question.known else question.chunks)
    saying = Saying(served.tokenizer.decode, question.stop)
    said: list[str] = []

    async def read(tell: Callable[[Delta], None]) -> None:
        def aloud(delta: Delta) -> None:
            said.append(delta.text)
            tell(delta)

        def turned(turn: Turn, change: Mapping[str, Any] | None) -> None:
            counted.turn(turn.prompt, len(turn.completion.tokens))
            if watched and change:
                version = turn.completion.policy_version
                memory = Delta(index, "", (), (), (), None, version, counted.notes(), memory=change)
                tell(memory)

        known = question.known
        if known is None:
            known, made = await _read(streamer, served, question, sampling, turned)
        if known is not None:
            # With no chunk left, what comes next is the answer.
            state = MemoryState(question.tokens, (), known.memory, known.next_chunk)
            answering = AnswerAloud(streamer, question, saying, index, counted, aloud)
            about = served.template, question.rules, state, sampling, answering
            async for turn, _ in memory_agent.read(streamer, *about):
                made = turn.completion
        rest = saying.rest()
        finish = "stop" if saying.stopped else REASONS[made.finish]
        notes = counted.notes()
        if made.finish is not Finish.CANCELLED:
            answer = "".join([*said, rest])
            question.remember(answer, known)
            about = known.origins, known.chunks, served.tokenizer.decode, question.text, answer
            notes["evidence"] = await in_thread(evidence, *about)
        tell(Delta(index, rest, (), (), (), finish, made.policy_version, notes))

    return told(read)


async def _read(
    streamer: Streamer, served: Served, question: DocumentQuestion, sampling: TurnSampling,
    turned: Callable[[Turn, Mapping[str, Any] | None], None],
) -> tuple[Known | None, Completion | None]:  # fmt: skip
    """Reads all chunks; returns what that came to, or if a turn was cancelled, None and that turn.

    `turned` is told of each turn, and how it changed the memory.
    """
    chunks, origins = question.chunks, Origins()
    watch = MemoryWatch(served, chunks)
    state: State = memory_agent.start(question.reads, chunks)
    about = served.template, question.rules, state, sampling
    made = None
    async with contextlib.aclosing(memory_agent.read(streamer, *about)) as course:
        await chunks.reach(state.turns)
        while state.chunks is chunks and chunks.has(state.turns):  # else it left early
            turn, state = await anext(course)
            made = turn.completion
            change = watch.change(turn, state)
            turned(turn, change)
            if made.finish is Finish.CANCELLED:
                return None, made
            if change:
                origins.update(turn.chunk, change["memory"])
            await chunks.reach(state.turns)
    return Known(state.memory_tokens, state.turns, origins, chunks), made
