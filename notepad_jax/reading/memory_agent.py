"""The memory agent: a pure state machine, and the coroutine that drives it.

A reading is `MemoryState` -> prompt -> completion -> `MemoryState`, once per chunk, and
then one answer turn. Every turn is a context of its own: nothing but the memory is
carried over, spliced in as token ids, never decoded and encoded again. `start`, `prompt`
and `advance` are pure; `read` awaits a `Completer` between them, and `rewrite` goes back to one
turn of what was read. The same functions run
in training, evaluation and serving. Above: `loop` and the programs; below: prompts and chunks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import (
    NO_TOKENS,
    Chunks,
    Completer,
    Completion,
    Finish,
    MemoryState,
    Prompt,
    SamplingParams,
    Task,
    Tokens,
    Turn,
    TurnKind,
    tokens,
)

MEMORY_UPDATES = ("overwrite", "overwrite_or_keep")


@dataclasses.dataclass(frozen=True)
class Rules:
    """The limits of a reading, all in tokens; together they bound every context.

    `memory_update` is `overwrite` (the completion becomes the memory),
    `overwrite_or_keep` (a completion that is just the keep marker changes nothing), or a rule of
    the user's, called with the memory, what was written and `max_memory`. `max_memory` and
    `max_answer` count the stop token too.
    """

    max_question: int
    chunk_size: int
    max_memory: int
    max_answer: int
    memory_update: str | Callable[[Tokens, Tokens, int], Tokens]

    def __post_init__(self) -> None:
        for name in ("max_question", "chunk_size", "max_memory", "max_answer"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1 token")
        if not callable(self.memory_update) and self.memory_update not in MEMORY_UPDATES:
            raise ValueError(
                f"memory_update is {self.memory_update!r}; use one of {', '.join(MEMORY_UPDATES)}, "
                f"or a function of yours, as module:function"
            )

    def context(self, template: Template) -> int:
        """Returns the tokens of the longest turn, prompt and completion together."""
        longest = template.longest_prompt(self.max_question, self.chunk_size, self.max_memory)
        return longest + max(self.max_memory, self.max_answer)


@dataclasses.dataclass(frozen=True)
class TurnSampling:
    """How the turns of one reading are sampled; each turn draws noise of its own."""

    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    seed: int  # of the reading; see `turn_seed`

    def params(self, rules: Rules, kind: TurnKind, turn_index: int) -> SamplingParams:
        """Returns the sampling of one turn."""
        limit = rules.max_memory if kind is TurnKind.UPDATE else rules.max_answer
        seed = turn_seed(self.seed, turn_index)
        return SamplingParams(self.temperature, self.top_p, limit, self.stop_ids, seed)


def hashed_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2**63) that no other sequence of parts has (blake2b, 63 bits)."""
    text = "\0".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def turn_seed(base_seed: int, turn_index: int) -> int:
    """Returns the seed of one turn of a reading; two turns never share noise."""
    return hashed_seed("turn", int(base_seed), int(turn_index))


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
    """Returns the state before the first chunk: nothing was ever written."""
    return MemoryState(tokens(question_tokens), chunks, NO_TOKENS, 0)


def prompt(template: Template, state: MemoryState) -> tuple[TurnKind, Prompt]:
    """Returns the next turn's kind and prompt: ANSWER once the chunks are exhausted."""
    chunk = _chunk_or_none(state.chunks, state.next_chunk)
    if chunk is None:
        return TurnKind.ANSWER, template.answer_prompt(state.question_tokens, state.memory_tokens)
    return TurnKind.UPDATE, template.update_prompt(
        state.question_tokens, chunk, state.memory_tokens, ahead=_ahead(template, state)
    )


def written(completion: Completion) -> Tokens:
    """Returns what a completion says: its tokens without the stop token."""
    if completion.finish is Finish.STOP:
        return tokens(completion.tokens[:-1])
    return tokens(completion.tokens)


def advance(
    rules: Rules, template: Template, state: MemoryState, completion: Completion
) -> MemoryState:
    """Returns the state after an update turn.

    The completion becomes the memory as it is, also when it was cut at the limit; an
    empty one leaves no memory, which the next prompt shows by the no-memory marker.
    """
    memory = written(completion)
    if callable(rules.memory_update):
        memory = rules.memory_update(state.memory_tokens, memory, rules.max_memory)
    elif rules.memory_update == "overwrite_or_keep":
        if not len(template.keep):
            raise ValueError(
                f"template {template.name} has an empty [keep] section; "
                "give it a marker or use memory_update = overwrite"
            )
        if np.array_equal(memory, template.keep):
            memory = state.memory_tokens
    return dataclasses.replace(state, memory_tokens=memory, next_chunk=state.next_chunk + 1)


def memories(rules: Rules, template: Template, turns: Sequence[Turn]) -> list[Tokens]:
    """Returns the memory after each turn of a whole reading, by playing it again."""
    state = start(NO_TOKENS, ())
    found: list[Tokens] = []
    for turn in turns:
        cancelled = turn.completion.finish is Finish.CANCELLED
        if turn.kind is TurnKind.UPDATE and not cancelled:
            state = advance(rules, template, state, turn.completion)
        found.append(state.memory_tokens)
    return found


async def read(
    completer: Completer,
    template: Template,
    rules: Rules,
    state: MemoryState,
    sampling: TurnSampling,
) -> AsyncIterator[tuple[Turn, MemoryState]]:
    """Reads to the end: yields each turn with the state after it, the answer turn last.

    Starts at `state`, so a reading that was interrupted goes on where it stood. Turn
    seeds count from the document's first chunk. A cancelled completion ends the reading.
    """
    while True:
        kind, turn_prompt = prompt(template, state)
        params = sampling.params(rules, kind, state.next_chunk)
        completion = await completer.complete(turn_prompt, params)
        turn = Turn(kind, state.next_chunk, turn_prompt, completion)
        cancelled = completion.finish is Finish.CANCELLED
        if kind is TurnKind.UPDATE and not cancelled:
            state = advance(rules, template, state, completion)
        yield turn, state
        if kind is TurnKind.ANSWER or cancelled:
            return


async def rewrite(
    completer: Completer,
    template: Template,
    rules: Rules,
    state: MemoryState,
    turn: Turn,
    sampling: TurnSampling,
    probed: bool,
) -> AsyncIterator[tuple[Turn, MemoryState]]:
    """Writes an update turn that somebody has written again: the same prompt, other noise.

    `state` is the one that `turn` began in, and needs no chunks. Yields as `read` does: the
    turn, and if `probed` an answer from the memory that it leaves, as if the document ended
    there. That answer is greedy: equal memories are worth the same.
    """
    # What was written then is a likely completion now.
    asked = dataclasses.replace(turn.prompt, draft=turn.completion.tokens)
    params = sampling.params(rules, turn.kind, state.next_chunk)
    made = dataclasses.replace(turn, completion=await completer.complete(asked, params))
    cancelled = made.completion.finish is Finish.CANCELLED
    if not cancelled:
        state = advance(rules, template, state, made.completion)
    yield made, state
    if cancelled or not probed:
        return
    ended = dataclasses.replace(state, chunks=())
    greedy = dataclasses.replace(sampling, temperature=0.0)
    async for answer, after in read(completer, template, rules, ended, greedy):
        yield answer, after


def _chunk_or_none(chunks: Chunks, k: int) -> Tokens | None:
    try:
        return chunks[k]
    except IndexError:
        return None


def _ahead(template: Template, state: MemoryState) -> Tokens:
    """The shared part of the prompt after this one: an engine may prefill it early."""
    following = _chunk_or_none(state.chunks, state.next_chunk + 1)
    if following is None:
        return template.answer_shared()
    return template.update_shared(state.question_tokens, following)
