"""The memory agent: a pure state machine, and the coroutine that drives it.

A reading is `MemoryState` -> prompt -> completion -> `MemoryState`, once per chunk (or as often
as its `rounds` say), and then the answer: `AnswerState` -> prompt -> completion ->
`AnswerState`, once or, where an answer may take several contexts, until it stops (`answer`). Every
turn is a context of its own: nothing but the memory, or the end of an answer that goes on, is
carried over, spliced in as token ids, never decoded and encoded again. `start`, `prompt`,
`advance` and `after` are pure; `read` awaits a `Completer` between them, and `rewrite` goes back
to one turn of what was read. The same functions run in training, evaluation and serving. Above:
`loop` and the programs; below: answer, rounds, rules, prompts and chunks.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from notepad_jax import waiting
from notepad_jax.reading import answer, rounds
from notepad_jax.reading.answer import AnswerState
from notepad_jax.reading.rounds import chunk_or_none
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    NO_TOKENS,
    Action,
    Chunks,
    Completer,
    Completion,
    Finish,
    MemoryState,
    Prompt,
    Task,
    Tokens,
    Turn,
    TurnKind,
    tokens,
)

State = MemoryState | AnswerState  # a reading in progress

ABREAST = 256  # turns of a parallel reading that are under way at once


def encode_question(tokenizer: Tokenizer, question: str, max_question: int) -> Tokens:
    """Returns the question's ids; ValueError if there are more than `max_question`."""
    ids = tokenizer.encode(question)
    if len(ids) > max_question:
        raise ValueError(
            f"the question has {len(ids)} tokens and the limit is {max_question}; "
            "ask a shorter one or raise max_question"
        )
    return ids


def question_of(task: Task, tokenizer: Tokenizer, max_question: int) -> Tokens:
    """Returns the ids of a task's question; ValueError naming the task if it is too long."""
    try:
        return encode_question(tokenizer, task.question, max_question)
    except ValueError as error:
        raise ValueError(f"task {task.id!r}: {error}") from error


def start(question_tokens: Tokens, chunks: Chunks) -> MemoryState:
    """Returns the state before the first chunk, with an empty memory."""
    return MemoryState(tokens(question_tokens), chunks, NO_TOKENS, 0)


def prompt(
    rules: Rules, template: Template, state: State, like: Prompt | None = None
) -> tuple[TurnKind, Prompt]:
    """Returns the next turn's kind and prompt: ANSWER once the chunks are exhausted.

    `like` is an update turn's prompt of the same reading and the same memory, if there was one.
    """
    if isinstance(state, AnswerState):
        return TurnKind.ANSWER, answer.prompt(state)
    chunk = chunk_or_none(state.chunks, state.next_chunk)
    if chunk is None:
        asked = template.answer_prompt(state.question_tokens, state.memory_tokens)
        several = rules.answer_chunks > 1
        return TurnKind.ANSWER, answer.own_prefix(asked) if several else asked
    # Made while this one is read; and so it is known, already now, whether this is the last.
    chunk_or_none(state.chunks, state.next_chunk + 1)
    return TurnKind.UPDATE, template.update_prompt(
        state.question_tokens, chunk, state.memory_tokens, keeps=rules.keeps, like=like
    )


def written(completion: Completion) -> Tokens:
    """Returns a completion's tokens without the stop token."""
    if completion.finish is Finish.STOP:
        return tokens(completion.tokens[:-1])
    return tokens(completion.tokens)


def turn_of(
    rules: Rules, template: Template, state: State, asked: Prompt, completion: Completion
) -> Turn:
    """Returns the turn that `state` led to, with its place in the reading and what it did."""
    if isinstance(state, AnswerState):
        return Turn(TurnKind.ANSWER, state.turns, asked, completion)
    now, unit = state.round, state.next_chunk
    if (chunk := chunk_or_none(state.chunks, unit)) is None:
        return Turn(TurnKind.ANSWER, state.turns, asked, completion, round=now.number)
    did = action(rules, template, now.level, written(completion))
    place = (len(chunk), now.level, now.number, unit)
    return Turn(TurnKind.UPDATE, state.turns, asked, completion, *place, did)


def action(rules: Rules, template: Template, level: int, said: Tokens) -> Action:
    """Returns what an update turn at a level did by writing `said`."""
    if rules.keeps and _same(said, template.keep):
        return Action.NOTHING if rounds.merges(rules, level) else Action.KEEP
    if rules.exits and _same(said, template.exit):
        return Action.EXIT
    if level == rounds.ENDED and _same(said, template.again):
        return Action.AGAIN
    return Action.WRITE


def _same(one: Tokens, other: Tokens) -> bool:
    return one.tobytes() == other.tobytes()  # of one dtype; `np.array_equal` takes 2 us


def advance(rules: Rules, template: Template, state: MemoryState, turn: Turn) -> MemoryState:
    """Returns the state after an update turn, which says what it did (`turn_of`).

    The completion becomes the memory as it is, also when it was cut at the limit; an
    empty one leaves no memory, which the next prompt shows by the no-memory marker.
    """
    said, did = written(turn.completion), turn.action
    if rounds.merges(rules, state.round.level):
        return rounds.noted(rules, template, state, said if did is Action.WRITE else None)
    memory, heads = state.memory_tokens, state.heads
    if did is Action.WRITE:
        if callable(rules.memory_update):
            memory = rules.memory_update(memory, said, rules.max_memory)
        elif rules.heads > 1:
            heads = (said, *heads[: rules.heads - 1])
            memory = rounds.joined(heads, template.between)
        else:
            memory = said
    if _same(memory, state.memory_tokens):
        memory = state.memory_tokens  # the same array: what is made of it is found by it
    same = _stood_still(rules, state, memory)
    state = MemoryState(
        state.question_tokens, state.chunks, memory, state.next_chunk + 1, heads, state.round, same
    )
    if did is Action.EXIT or same and same == rules.exit_after:
        return rounds.ended(state)
    return rounds.passed(rules, template, state, did) if rules.goes_over else state


def _stood_still(rules: Rules, state: MemoryState, memory: Tokens) -> int:
    """Returns for how many turns the memory has been what it is now; 0 where it is not counted."""
    counts = rules.exit_after and len(memory) and memory is state.memory_tokens
    return state.same + 1 if counts else 0


def after(rules: Rules, template: Template, state: State, turn: Turn) -> State:
    """Returns the state after any turn that `state` led to; the same if it was cancelled."""
    if turn.completion.finish is Finish.CANCELLED:
        return state
    if turn.kind is TurnKind.UPDATE:
        return advance(rules, template, state, turn)
    if isinstance(state, MemoryState):
        state = answer.start(turn.prompt, state.memory_tokens, state.turns)
    return answer.advance(state, written(turn.completion), rules.carry)


def answered(state: State) -> Tokens:
    """Returns the tokens of the answer so far: everything that its contexts wrote, joined."""
    return state.written if isinstance(state, AnswerState) else NO_TOKENS


def played(
    rules: Rules, template: Template, turns: Sequence[Turn]
) -> Iterator[tuple[Turn, State, State]]:
    """Yields each turn of a whole reading with the states before and after it."""
    # What they say stands in the turns; how many there are decides when a pass ends.
    chunks = sum(turn.first_read for turn in turns)
    state: State = start(NO_TOKENS, (NO_TOKENS,) * chunks)
    for turn in turns:
        before, state = state, after(rules, template, state, turn)
        yield turn, before, state


def memories(rules: Rules, template: Template, turns: Sequence[Turn]) -> list[Tokens]:
    """Returns the memory after each turn of a whole reading, by playing it again."""
    return [state.memory_tokens for _, _, state in played(rules, template, turns)]


async def read(
    completer: Completer,
    template: Template,
    rules: Rules,
    state: State,
    sampling: TurnSampling,
    answering: Completer | None = None,
) -> AsyncIterator[tuple[Turn, State]]:
    """Runs a reading to its end: yields each turn with the state after it, the answer's last.

    Starts at `state`, so a reading that was interrupted goes on where it stood, within its answer,
    too. Turn seeds count from the document's first chunk. A cancelled completion ends the reading.
    The turns of a parallel reading come in the order of its chunks, and are under way together.
    `answering` completes the turns of the answer, for a caller that streams it; None: `completer`
    does.
    """

    memory, like = NO_TOKENS, None  # that the last update turn showed, and its prompt

    async def make(state: State) -> Turn:
        nonlocal memory, like
        kind, asked = prompt(
            rules, template, state, like if state.memory_tokens is memory else None
        )
        if kind is TurnKind.UPDATE:
            memory, like = state.memory_tokens, asked
        params = sampling.params(rules, kind, _number(state), asked.begun)
        aloud = kind is TurnKind.ANSWER and answering is not None
        completion = await (answering if aloud else completer).complete(asked, params)
        return turn_of(rules, template, state, asked, completion)

    abreast, over = _Abreast(make), False
    try:
        while not over:
            alone = isinstance(state, AnswerState) or not rounds.merges(rules, state.round.level)
            turn = await (make(state) if alone else abreast.turn(state))
            state = after(rules, template, state, turn)
            yield turn, state
            over = is_over(rules, state, turn.completion)
    finally:
        await abreast.end()


class _Abreast:
    """The turns of a parallel reading, level by level, each begun before it is asked for."""

    def __init__(self, make: Callable[[MemoryState], Coroutine[Any, Any, Turn]]) -> None:
        self._make = make
        self._under_way: collections.deque[asyncio.Task[Turn]] = collections.deque()
        self._next: MemoryState | None = None

    async def turn(self, state: MemoryState) -> Turn:
        """Returns the turn that `state` leads to."""
        if not self._under_way:
            self._next = state
        while self._next is not None and len(self._under_way) < ABREAST:
            self._under_way.append(asyncio.ensure_future(self._make(self._next)))
            self._next = rounds.beside(self._next)
        turn = await self._under_way[0]
        self._under_way.popleft()
        return turn

    async def end(self) -> None:
        """Cancels what is under way, and waits for it."""
        await waiting.end(*self._under_way)


def _number(state: State) -> int:
    """Of the turn that comes next: no two turns of a reading have the same."""
    return state.turns + (state.contexts if isinstance(state, AnswerState) else 0)


def is_over(rules: Rules, state: State, completion: Completion) -> bool:
    """Says whether a reading ends with the completion that led to `state`."""
    if completion.finish is Finish.CANCELLED or isinstance(state, MemoryState):
        return completion.finish is Finish.CANCELLED
    return completion.finish is Finish.STOP or state.contexts >= rules.answer_chunks


async def rewrite(
    completer: Completer,
    template: Template,
    rules: Rules,
    state: MemoryState,
    turn: Turn,
    sampling: TurnSampling,
    probed: bool,
) -> AsyncIterator[tuple[Turn, State]]:
    """Samples an update turn of an earlier reading again: the same prompt, other noise.

    `state` is the one that `turn` began in, and needs no chunks. Yields as `read` does: the
    turn, and if `probed` an answer from the memory that it leaves, as if the document ended
    there. That answer is greedy: equal memories are worth the same.
    """
    # What was written then is a likely completion now.
    asked = dataclasses.replace(turn.prompt, draft=turn.completion.tokens)
    params = sampling.params(rules, turn.kind, state.turns)
    completion = await completer.complete(asked, params)
    did = action(rules, template, turn.level, written(completion))
    made = dataclasses.replace(turn, completion=completion, action=did)
    state = after(rules, template, state, made)
    yield made, state
    if made.completion.finish is Finish.CANCELLED or not probed:
        return
    ended = dataclasses.replace(state, chunks=())
    greedy = dataclasses.replace(sampling, temperature=0.0)
    async for probe, then in read(completer, template, rules, ended, greedy):
        yield probe, then
