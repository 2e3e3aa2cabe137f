"""The memory agent: a pure state machine, and the coroutine that drives it.

A reading is `MemoryState` -> prompt -> completion -> `MemoryState`, once per chunk, and
then the answer: `AnswerState` -> prompt -> completion -> `AnswerState`, once or, where an answer
may take several contexts, until it stops (`answer`). Every turn is a context of its own: nothing
but the memory, or the end of an answer that goes on, is carried over, spliced in as token ids,
never decoded and encoded again. `start`, `prompt`, `advance` and `after` are pure; `read` awaits
a `Completer` between them, and `rewrite` goes back to one turn of what was read. The same
functions run in training, evaluation and serving. Above: `loop` and the programs; below:
answer, prompts and chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from notepad_jax.reading import answer
from notepad_jax.reading.answer import AnswerState
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
MOST_TOKENS = 2**24  # of a part of a context: sizes are found out by building the longest one

State = MemoryState | AnswerState  # a reading in progress


@dataclasses.dataclass(frozen=True)
class Rules:
    """The limits of a reading, all in tokens; together they bound every context.

    `memory_update` is `overwrite` (the completion becomes the memory),
    `overwrite_or_keep` (a completion that is just the keep marker changes nothing), or a rule of
    the user's, called with the memory, what was written and `max_memory`. `max_memory` and
    `max_answer` count the stop token too.

    An answer that is cut at `max_answer` goes on in another context, of `answer_chunks` at most,
    which begins with the last `carry` tokens of it and adds `max_answer - carry` at most.
    """

    max_question: int
    chunk_size: int
    max_memory: int
    max_answer: int
    memory_update: str | Callable[[Tokens, Tokens, int], Tokens]
    answer_chunks: int = 1  # contexts
    carry: int = 0
    chunk_ends: str = "tokens"  # of text.chunks.CHUNK_ENDS

    def __post_init__(self) -> None:
        for name in ("max_question", "chunk_size", "max_memory", "max_answer"):
            if not 1 <= getattr(self, name) <= MOST_TOKENS:
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be at least 1 token and at most "
                    f"{MOST_TOKENS}"
                )
        if self.answer_chunks < 1:
            raise ValueError(
                f"answer_chunks is {self.answer_chunks}; an answer takes at least 1 context"
            )
        if self.answer_chunks == 1 and self.carry:
            raise ValueError(
                f"carry is {self.carry}, but an answer has one context (answer_chunks is 1), and "
                f"nothing is carried over; set carry to 0, or answer_chunks to 2 or more"
            )
        if self.answer_chunks > 1 and not 1 <= self.carry < self.max_answer:
            raise ValueError(
                f"carry is {self.carry}, but a context of the answer (max_answer is "
                f"{self.max_answer}) begins with what is carried over and goes on from there; "
                f"with answer_chunks above 1, use at least 1 and less than max_answer"
            )
        if not callable(self.memory_update) and self.memory_update not in MEMORY_UPDATES:
            raise ValueError(
                f"memory_update is {self.memory_update!r}; use one of {', '.join(MEMORY_UPDATES)}, "
                f"or a function of yours, as module:function"
            )

    def context(self, template: Template) -> int:
        """Returns the tokens of the longest turn, prompt and completion together."""
        longest = template.longest_prompt(self.max_question, self.chunk_size, self.max_memory)
        return longest + max(self.max_memory, self.max_answer)

    @property
    def longest_answer(self) -> int:
        """The most tokens that all contexts of an answer write."""
        return self.max_answer + (self.answer_chunks - 1) * (self.max_answer - self.carry)

    def within(self, limit: int) -> Rules:
        """Returns the rules with whole answers of at most `limit` tokens, in whole contexts."""
        if limit <= self.max_answer:
            return dataclasses.replace(self, max_answer=limit, answer_chunks=1, carry=0)
        more = min(
            self.answer_chunks - 1, (limit - self.max_answer) // (self.max_answer - self.carry)
        )
        return dataclasses.replace(self, answer_chunks=1 + more, carry=self.carry if more else 0)


@dataclasses.dataclass(frozen=True)
class TurnSampling:
    """How the turns of one reading are sampled; each turn draws noise of its own."""

    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    seed: int  # of the reading; see `turn_seed`

    def params(
        self, rules: Rules, kind: TurnKind, turn_index: int, begun: int = 0
    ) -> SamplingParams:
        """Returns the sampling of one turn; `begun` tokens of its reply stand in its prompt."""
        limit = rules.max_memory if kind is TurnKind.UPDATE else rules.max_answer - begun
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


def prompt(rules: Rules, template: Template, state: State) -> tuple[TurnKind, Prompt]:
    """Returns the next turn's kind and prompt: ANSWER once the chunks are exhausted."""
    if isinstance(state, AnswerState):
        return TurnKind.ANSWER, answer.prompt(state)
    chunk = _chunk_or_none(state.chunks, state.next_chunk)
    if chunk is None:
        asked = template.answer_prompt(state.question_tokens, state.memory_tokens)
        several = rules.answer_chunks > 1
        return TurnKind.ANSWER, answer.own_prefix(asked) if several else asked
    # Made while this one is read; and so it is known, already now, whether this is the last.
    following = _chunk_or_none(state.chunks, state.next_chunk + 1)
    return TurnKind.UPDATE, template.update_prompt(
        state.question_tokens, chunk, state.memory_tokens,
        ahead=functools.partial(_ahead, rules, template, state.question_tokens, following),
        keeps=rules.memory_update == "overwrite_or_keep",
    )  # fmt: skip


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
    return MemoryState(state.question_tokens, state.chunks, memory, state.next_chunk + 1)


def after(rules: Rules, template: Template, state: State, turn: Turn) -> State:
    """Returns the state after any turn that `state` led to; the same if it was cancelled."""
    if turn.completion.finish is Finish.CANCELLED:
        return state
    if turn.kind is TurnKind.UPDATE:
        return advance(rules, template, state, turn.completion)
    if isinstance(state, MemoryState):
        state = answer.start(turn.prompt, state.memory_tokens, state.next_chunk)
    return answer.advance(state, written(turn.completion), rules.carry)


def answered(state: State) -> Tokens:
    """Returns what the answer says so far: everything that its contexts wrote, joined."""
    return state.written if isinstance(state, AnswerState) else NO_TOKENS


def memories(rules: Rules, template: Template, turns: Sequence[Turn]) -> list[Tokens]:
    """Returns the memory after each turn of a whole reading, by playing it again."""
    state: State = start(NO_TOKENS, ())
    found: list[Tokens] = []
    for turn in turns:
        state = after(rules, template, state, turn)
        found.append(state.memory_tokens)
    return found


async def read(
    completer: Completer,
    template: Template,
    rules: Rules,
    state: State,
    sampling: TurnSampling,
    answering: Completer | None = None,
) -> AsyncIterator[tuple[Turn, State]]:
    """Reads to the end: yields each turn with the state after it, those of the answer last.

    Starts at `state`, so a reading that was interrupted goes on where it stood, within its answer,
    too. Turn seeds count from the document's first chunk. A cancelled completion ends the reading.
    `answering` completes the turns of the answer, for who wants to hear it while it is made; None:
    `completer` does.
    """
    over = False
    while not over:
        kind, turn_prompt = prompt(rules, template, state)
        params = sampling.params(rules, kind, _number(state), turn_prompt.begun)
        aloud = kind is TurnKind.ANSWER and answering is not None
        completion = await (answering if aloud else completer).complete(turn_prompt, params)
        turn = Turn(kind, state.next_chunk, turn_prompt, completion)
        state = after(rules, template, state, turn)
        yield turn, state
        over = is_over(rules, state, completion)


def _number(state: State) -> int:
    """Of the turn that comes next: no two turns of a reading have the same."""
    return state.next_chunk + (state.contexts if isinstance(state, AnswerState) else 0)


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
    """Writes an update turn that somebody has written again: the same prompt, other noise.

    `state` is the one that `turn` began in, and needs no chunks. Yields as `read` does: the
    turn, and if `probed` an answer from the memory that it leaves, as if the document ended
    there. That answer is greedy: equal memories are worth the same.
    """
    # What was written then is a likely completion now.
    asked = dataclasses.replace(turn.prompt, draft=turn.completion.tokens)
    params = sampling.params(rules, turn.kind, state.next_chunk)
    made = dataclasses.replace(turn, completion=await completer.complete(asked, params))
    state = after(rules, template, state, made)
    yield made, state
    if made.completion.finish is Finish.CANCELLED or not probed:
        return
    ended = dataclasses.replace(state, chunks=())
    greedy = dataclasses.replace(sampling, temperature=0.0)
    async for probe, then in read(completer, template, rules, ended, greedy):
        yield probe, then


def _chunk_or_none(chunks: Chunks, k: int) -> Tokens | None:
    try:
        return chunks[k]
    except IndexError:
        return None


def _ahead(
    rules: Rules, template: Template, question_tokens: Tokens, following: Tokens | None
) -> Tokens:
    """The shared part of the prompt after this one, for engines that prefill it early.

    What several contexts of an answer share holds the memory, which is not known yet.
    """
    if following is None:
        return template.answer_shared() if rules.answer_chunks == 1 else NO_TOKENS
    return template.update_shared(question_tokens, following)
