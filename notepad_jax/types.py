"""The data types of notepad_jax: read this file first, though it is a long one.

Every value that crosses a bridge between two parts of the system is a frozen
dataclass defined here: a `Task` comes out of a dataset, a `Prompt` goes to a
`Completer` and a `Completion` comes back, `Turn`s make a `Trajectory`, G
trajectories make a `Group`, groups are packed into a `TrainBatch`, and a
`PolicySnapshot` carries new weights to the engine.

This is the floor everything stands on, so it imports numpy and nothing of ours,
and never jax: the word column (text, tasks, reading, rollout, eval) must run on a machine
that has no accelerator library at all. Token sequences are read-only
one-dimensional int32 numpy arrays; `tokens()` makes one. The file is long because it is the one
place where all types stand side by side.

Letters in array names are those of docs/architecture.md: B rows, T tokens, ...
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

Tokens = np.ndarray  # int32 [n], read-only
T = TypeVar("T")


def tokens(ids: Iterable[int] | np.ndarray = ()) -> Tokens:
    """Returns `ids` as a read-only int32 vector [n]; a copy unless it already is one."""
    if isinstance(ids, np.ndarray) and ids.dtype == np.int32 and not ids.flags.writeable:
        return ids
    array = np.array(ids if isinstance(ids, np.ndarray | list) else list(ids), dtype=np.int32)
    if array.ndim != 1:
        raise ValueError(f"token ids must be a flat sequence, got shape {array.shape}")
    array.flags.writeable = False
    return array


NO_TOKENS = tokens()


# ---------------------------------------------------------------- what a dataset yields


@runtime_checkable
class Document(Protocol):
    """Text of any length, read as a stream: `pieces()` starts again from the beginning."""

    def pieces(self) -> Iterator[str]: ...


@dataclasses.dataclass(frozen=True)
class TextDocument:
    """A document that fits in memory as one string."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise ValueError(
                f"a document is a text, and this is of type {type(self.text).__name__}"
            )

    def pieces(self) -> Iterator[str]:
        yield self.text


@dataclasses.dataclass(frozen=True)
class Evidence:
    """A fact that the answer rests on: the words by which a memory that kept it is known."""

    text: str  # found in a memory as whole words, after normalisation
    place: float  # where the fact stands: share of the document's characters before it, [0, 1)


@dataclasses.dataclass(frozen=True)
class TaughtNote:
    """What a good reader's notes say once a sentence has been read: what imitation teaches."""

    sentence: str  # stands in the document, word by word
    notes: str  # all of the notes from here on, until the next one


@dataclasses.dataclass(frozen=True)
class Task:
    """One question about one document. Tasks about the same document share the object."""

    id: str
    question: str
    document: Document = dataclasses.field(repr=False)
    answers: tuple[str, ...]  # never empty; whether one or all are wanted, the metric says
    source: str  # the dataset or generator, e.g. "synthetic/two_hop"
    metric: str  # a name in notepad_jax.scoring.metrics.METRICS
    contract: str = "plain"  # where in the completion the answer stands: scoring.extraction
    evidence: tuple[Evidence, ...] = ()  # where the facts are known, in the document's order
    script: tuple[TaughtNote, ...] = ()  # where good notes are known, in the document's order
    # JSON values that only a reward of the user's looks at (scoring.reading_record).
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False, repr=False)

    def __post_init__(self) -> None:
        if not self.answers:
            raise ValueError(f"task {self.id!r} has no gold answer; every task needs at least one")


@dataclasses.dataclass(frozen=True)
class Draw:
    """One sample of the endless dataset of tasks: a document's questions, drawn once.

    The ordinal is its place in the stream. A task may be drawn again, and is then another draw
    with other noise.
    """

    ordinal: int
    tasks: tuple[Task, ...]
    chunks: int = 0  # that the document has at most, by a curriculum; 0: no limit
    length: int = 0  # tokens of the document, about; 0: unknown


# ---------------------------------------------------------------- reading


@runtime_checkable
class Chunks(Protocol):
    """A document cut into token chunks; `chunks[k]` raises IndexError past the end."""

    def __getitem__(self, k: int) -> Tokens: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Round:
    """The place of a reading that goes over its document again, or in parallel (`rounds`)."""

    number: int = 0  # of the pass, or the round
    level: int = 0  # 0: the document; higher: what the level below wrote; -1: after a round
    notes: tuple[Tokens, ...] = ()  # what this level has written so far, in its order
    document: Chunks = ()  # where `chunks` are not its own
    before: int = 0  # update turns of the levels and rounds that have ended
    began: Tokens = dataclasses.field(default_factory=tokens)  # the round's first memory


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryState:
    """The whole state of a reading in progress: tiny, replayable, chunks shared."""

    question_tokens: Tokens
    chunks: Chunks
    memory_tokens: Tokens  # empty: nothing was ever written
    next_chunk: int  # index of the chunk that the next update turn reads
    heads: tuple[Tokens, ...] = ()  # what the memory is joined of, where it is; newest first
    round: Round = Round()
    same: int = 0  # turns in a row that left the memory as it was, where the rules count them

    @property
    def turns(self) -> int:
        """How many update turns were made."""
        return self.round.before + self.next_chunk


class TurnKind(enum.Enum):
    UPDATE = "update"
    ANSWER = "answer"


class Action(enum.Enum):
    """The action of an update turn: what it did, or where it leads."""

    WRITE = "write"
    KEEP = "keep"  # the memory as it was
    NOTHING = "nothing"  # to note: as KEEP, where notes are merged
    EXIT = "exit"  # to the answer, whatever is left to read
    AGAIN = "again"  # the document, from its beginning


class Finish(enum.Enum):
    STOP = "stop"  # a stop token was sampled; it is the last of `tokens`
    LENGTH = "length"  # max_new_tokens reached; used as it is
    CANCELLED = "cancelled"


MOST_TOP_LOGPROBS = 20  # alternatives of a token that a request may ask for
COLDEST, HOTTEST = 1e-4, 1e4  # logits divided by these stay finite in float32, and apart
LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # below, it is 0 on a device and keeps no token


class Matcher(Protocol):
    """A grammar's state in one completion: which tokens may follow."""

    def allowed(self) -> np.ndarray:
        """Returns a bit for every id, int32 [words], the lowest first; one of them at least."""

    def take(self, token: int) -> None:
        """Advances by a token that was allowed."""


@runtime_checkable
class Grammar(Protocol):
    """A constraint on completions, as a JSON schema: hashable; equal ones allow the same."""

    def matcher(self, stop_ids: tuple[int, ...]) -> Matcher:
        """Returns the matcher of one completion, which ends with one of `stop_ids`."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. Two calls with the same seed share their noise.

    Raises ValueError for a number out of its range; nan and inf are out of all.
    """

    temperature: float  # 0 is greedy; else COLDEST to HOTTEST
    top_p: float  # (0, 1]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int  # 0 <= seed < 2**63
    top_logprobs: int = 0  # likeliest tokens to tell of beside each sampled one, to `stream`
    # Nothing is drawn: the completion is the prompt's draft, and `stream` tells its logprobs.
    scored: bool = False
    # What may be drawn. Logprobs stay those of all tokens, as with top_p: what a trainer computes.
    grammar: Grammar | None = None
    adapters: int = 0  # of an engine with those of several policies: 1 is the first; 0: the base

    def __post_init__(self) -> None:
        if self.temperature != 0 and not COLDEST <= self.temperature <= HOTTEST:
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy), or at least {COLDEST} "
                f"and at most {HOTTEST:g}"
            )
        if not LEAST_TOP_P <= self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")
        if not 1 <= self.max_new_tokens < 2**31:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 1 and below 2**31"
            )
        _check_seed(self.seed)
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(
                f"top_logprobs is {self.top_logprobs}; it must be at least 0 and at most "
                f"{MOST_TOP_LOGPROBS}"
            )
        if self.scored and self.stop_ids:
            raise ValueError("a completion that is scored is given whole; leave stop_ids out")
        if self.grammar is not None and (self.scored or not self.stop_ids):
            raise ValueError("a grammar needs stop_ids, and tokens to draw; leave scored out")

    def seeded(self, seed: int) -> SamplingParams:
        """Returns the same with another seed, which alone is checked: there is one a turn."""
        _check_seed(seed)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, seed=seed)
        return other


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below 2**63")


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens that the policy is asked to continue: `shared` then `tail`.

    `shared` is what other prompts of the same group (or document) begin with too;
    an engine prefills equal `shared` parts once. `draft` is a hint that changes the speed of an
    engine and never its answer: a likely completion (the old memory and the stop token).
    """

    shared: Tokens
    tail: Tokens  # never empty
    draft: Tokens = dataclasses.field(default_factory=lambda: NO_TOKENS)
    begun: int = 0  # of the tail, the last ones that the policy wrote: its reply goes on from them

    def __post_init__(self) -> None:
        if not len(self.tail):
            raise ValueError("a prompt's tail is empty; the last prompt token must not be shared")

    @property
    def tokens(self) -> Tokens:
        return tokens(np.concatenate([self.shared, self.tail]))


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """The tokens sampled for a prompt. The stop token, if one was sampled, is part of `tokens`."""

    tokens: Tokens  # [n]
    behaviour_logprobs: np.ndarray  # float32 [n], of the sampler, at its temperature
    finish: Finish
    policy_version: int  # exactly one for the whole completion


Alternatives = tuple[tuple[int, float], ...]  # (token, logprob), the likeliest first


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Some tokens of a completion under way, as `Streamer.stream` gives them."""

    tokens: Tokens
    behaviour_logprobs: np.ndarray  # float32 [n]
    finish: Finish | None  # of the last piece; None before
    policy_version: int
    top: tuple[Alternatives, ...] = ()  # of each token, where `top_logprobs` asked for some
    cached: int = 0  # tokens of the prompt that were in the cache already


@runtime_checkable
class Completer(Protocol):
    """An engine or endpoint that completes prompts: one coroutine, between words and numbers."""

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion: ...


@runtime_checkable
class Streamer(Completer, Protocol):
    """A completer that also streams a completion while it is made."""

    def stream(self, prompt: Prompt, sampling: SamplingParams) -> AsyncIterator[Piece]:
        """Yields a completion's tokens as they are made; together they are `complete`'s."""


@runtime_checkable
class Completers(Protocol):
    """Several completers side by side, each in a thread and an event loop of its own.

    A reading stays with one of them, in its thread: none ever waits for another.
    """

    count: int

    async def each(self, work: Callable[[int, Completer], Coroutine[Any, Any, T]]) -> list[T]:
        """Awaits `work` of every completer and its number, in its thread; returns all results.

        If one fails, or the caller is cancelled, the others are cancelled and awaited first.
        """


class CompleterFailed(RuntimeError):
    """The completer itself is broken: no later call will be answered, of this reading or another.

    A reading that fails costs itself; this ends whatever reads.
    """


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One independent context: a prompt and its completion."""

    kind: TurnKind
    chunk: int  # update turns before it: of one serial pass, the chunk read
    prompt: Prompt
    completion: Completion
    size: int = 0  # tokens of the chunk read
    level: int = 0  # as `Round` has them
    round: int = 0
    unit: int = 0  # which of its level's chunks was read
    action: Action = Action.WRITE  # of an update turn

    @property
    def first_read(self) -> bool:
        """Whether it reads a chunk of the document that was not read before."""
        return self.kind is TurnKind.UPDATE and self.level == self.round == 0

    @property
    def place(self) -> tuple[int, int, int]:
        """(round, level, unit): no two update turns of a reading have the same."""
        return self.round, self.level, self.unit


class Status(enum.Enum):
    ANSWERED = "answered"
    TRUNCATED = "truncated"  # the answer's last context was cut at its limit; scored as it is


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """A finished reading of one document by one agent, before it is scored."""

    task_id: str
    sample: int  # which of the group's G readings, 0-based
    turns: tuple[Turn, ...] = dataclasses.field(repr=False)  # asyncio.run repr()s its result
    answer: str  # all that its answer turns wrote, joined
    status: Status
    chunks: tuple[int, ...] = ()  # tokens of each that was read; (): no reward looks at them

    @property
    def cut(self) -> tuple[bool, ...]:
        """Which turns were cut at their limit; not an answer that another context goes on from."""
        ends = [turn.kind is TurnKind.UPDATE for turn in self.turns[:-1]] + [True]
        return tuple(
            end and turn.completion.finish is Finish.LENGTH
            for end, turn in zip(ends, self.turns, strict=False)
        )


# ---------------------------------------------------------------- learning


@dataclasses.dataclass(frozen=True, eq=False)
class Trajectory:
    """A scored reading."""

    reading: Reading
    judged: float  # what the answer is worth
    reward_parts: Mapping[str, float]
    shaping: float = 0.0  # what is added to it for learning alone: lengths, a KL
    memory_rewards: tuple[float, ...] = ()  # what each memory on the way is worth; (): unknown

    @property
    def reward(self) -> float:
        """The reward of reinforcement learning: `judged` and `shaping`."""
        return self.judged + self.shaping

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.reading.turns

    @property
    def updates(self) -> tuple[Turn, ...]:
        """Its update turns, in the order of `memory_rewards`."""
        return tuple(turn for turn in self.turns if turn.kind is TurnKind.UPDATE)

    @property
    def oldest_version(self) -> int:
        """The policy version of its oldest turn, from which staleness is counted."""
        return min(turn.completion.policy_version for turn in self.turns)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """G trajectories of one task; it carries no signal when all were judged alike.

    A group of one is a teacher's: it is imitated if it was worth anything.
    """

    task: Task
    trajectories: tuple[Trajectory, ...]
    ordinal: int = -1  # of the draw that the task came with; -1: of none
    question: int = 0  # which of the draw's tasks
    chunks: int = 0  # that the document had at most, by a curriculum; 0: no limit
    # One update turn of one of them, written again several times, each by itself (rollout.local):
    # readings of that turn alone, by the policy that learns, with scores as rewards.
    local: tuple[Trajectory, ...] = ()

    @property
    def place(self) -> tuple[int, int]:
        """(ordinal, question): no two groups of a run have the same."""
        return self.ordinal, self.question

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among all turns of all members."""
        return min(trajectory.oldest_version for trajectory in self.trajectories)

    @property
    def rewards(self) -> np.ndarray:
        return np.array([t.reward for t in self.trajectories], np.float64)

    def teaches(self, imitated: bool) -> bool:
        """Whether it is learnt from: what is `imitated` needs no contrast, but some worth."""
        return self.informative or (imitated and max(t.judged for t in self.trajectories) > 0)

    @property
    def informative(self) -> bool:
        """Whether its members, or their memories of the same place, were judged differently.

        Shaping alone does not make it so, nor do members that made other turns.
        """
        judged = [t.judged for t in self.trajectories]
        if max(judged) > (min(judged) if len(judged) > 1 else 0):
            return True
        worth: dict[tuple[int, int, int], float] = {}
        return any(
            worth.setdefault(turn.place, own) != own
            for one in self.trajectories
            for turn, own in zip(one.updates, one.memory_rewards, strict=False)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class TrainBatch:
    """Packed rows; what the update consumes. Every array is of shape [B, T].

    Token i of a row sees token j of the same row iff j <= i < kv_end[j] (and, in a layer
    with a window, positions are near enough): one vector expresses packing, shared
    prefixes and prefix trees. `positions` are RoPE's: each tail continues at its prefix's
    length. What follows them belongs to the token itself (the label): the hidden state that
    predicts token i is that of token i - 1, and a completion never begins a tail, so i - 1 is
    its context.

    The loss is sum(weights * loss of a token) / denominator: every normaliser is a choice of
    these two. One token one vote is weights of 1 and their count.
    """

    tokens: np.ndarray  # int32
    positions: np.ndarray  # int32
    kv_end: np.ndarray  # int32, in 1..T; a padding token's is its own index + 1
    weights: np.ndarray  # float32; 0 is not trained: prompts and padding
    advantages: np.ndarray  # float32
    behaviour_logprobs: np.ndarray  # float32, what the sampler reported
    proximal_logprobs: np.ndarray  # float32, the ratio's denominator: the trainer's before the
    # first of several updates on the batch; behaviour's where there is only one
    reference_logprobs: np.ndarray  # float32; behaviour's where no KL is asked for
    turn: np.ndarray  # int32: which turn, trajectory, prompt (group) of the batch; -1: none
    trajectory: np.ndarray  # int32
    prompt: np.ndarray  # int32
    age: np.ndarray  # int32: versions between the policy that wrote the turn and the learning one
    update_turn: np.ndarray  # float32, 1 on completion tokens of update turns
    denominator: float  # what the sum of one optimizer step is divided by, once


@dataclasses.dataclass(frozen=True)
class PolicySnapshot:
    """A version of the weights: the only thing that crosses from trainer to engine."""

    version: int
    params: Any  # a plain tree of arrays
