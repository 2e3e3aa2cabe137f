"""The record of a finished reading, a reward's argument: texts and numbers, of row and outcome.

Public (`nj.ReadingRecord`, `nj.MemoryRecord`): no token ids, nothing of an engine, the same in
training, validation and evaluation, and the same in the process of its own that a function by
name is called in, where it comes as JSON. `Recorder` takes one down turn by turn. Above:
rollout.rewards and eval.measure; beside: own, recall.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from notepad_jax.scoring.recall import Recall
from notepad_jax.types import NO_TOKENS, Finish, Task, Tokens, Turn, TurnKind


@dataclasses.dataclass(frozen=True)
class MemoryRecord:
    """The memory after one chunk, or the note, where notes are merged. Lengths are in tokens."""

    text: str
    tokens: int  # of the memory
    written: int  # by the turn, its stop token included; the memory rule made `text` of it
    cut: bool  # whether the turn was cut at its limit
    chunk_tokens: int  # of the chunk that the turn read
    held: tuple[bool, ...]  # which facts of the reading's `evidence` stand in it
    round: int = 0  # in which the turn was, of a reading in rounds; or pass
    level: int = 0  # 0 reads the document, a higher one what the level below has written
    unit: int = 0  # which of the level's chunks it read


@dataclasses.dataclass(frozen=True)
class ReadingRecord:
    """A finished reading. Its turns are those of its memories, and then the answer."""

    answer: str
    row: Mapping[str, Any]  # id, question, answers, source, metric, and its further columns
    memories: tuple[MemoryRecord, ...]  # after each chunk, in order; () where no chunk was read
    answer_tokens: int  # that the answer wrote, stop token included
    status: str  # "answered", or "truncated": cut at the answer's limit
    evidence: tuple[str, ...]  # the words of each fact that the answer rests on, where known
    sample: int  # which reading of its question, from 0

    @property
    def turns(self) -> int:
        """The number of turns, as many as a reward by turns returns: of memories and the answer."""
        return len(self.memories) + 1

    @property
    def document_tokens(self) -> int:
        """Of all chunks."""
        return sum(memory.chunk_tokens for memory in self.memories)


def told(record: ReadingRecord) -> dict[str, Any]:
    """Returns a record as JSON values."""
    return dataclasses.asdict(record)


def understood(fields: Mapping[str, Any]) -> ReadingRecord:
    """Returns the record that `told` told."""
    memories = tuple(
        MemoryRecord(**{**memory, "held": tuple(memory["held"])}) for memory in fields["memories"]
    )
    evidence = tuple(fields["evidence"])
    return ReadingRecord(**{**fields, "memories": memories, "evidence": evidence})


# (update turn, memory before, memory after) -> what the turn left
Left = Callable[[Turn, Tokens, Tokens], Tokens]


class Recorder:
    """Records one reading of a task. Raises ValueError for evidence without words."""

    def __init__(
        self,
        task: Task,
        decode: Callable[[Tokens], str],
        left: Left = lambda turn, before, after: after,
    ) -> None:
        self._task, self._decode, self._left = task, decode, left
        self._memory = NO_TOKENS
        self._recall = Recall(task.evidence)
        self._memories: list[MemoryRecord] = []
        self._answer_tokens = 0

    def turn(self, turn: Turn, memory: Tokens) -> None:
        """Takes a turn, and the memory after it."""
        written = len(turn.completion.tokens)
        if turn.kind is TurnKind.ANSWER:
            self._answer_tokens += written
            return
        left, self._memory = self._left(turn, self._memory, memory), memory
        text, cut = self._decode(left), turn.completion.finish is Finish.LENGTH
        self._recall.see(text)
        held, place = self._recall.held, (turn.round, turn.level, turn.unit)
        self._memories.append(MemoryRecord(text, len(left), written, cut, 0, held, *place))

    def record(self, sample: int, answer: str, status: str, chunks: Sequence[int]) -> ReadingRecord:
        """Returns the record of a reading that has ended; `chunks` are sizes in tokens."""
        task = self._task
        pairs = zip(self._memories, chunks, strict=True) if self._memories else ()
        return ReadingRecord(
            answer=answer,
            row={
                **task.extra,
                "id": task.id,
                "question": task.question,
                "answers": list(task.answers),
                "source": task.source,
                "metric": task.metric,
            },
            memories=tuple(dataclasses.replace(one, chunk_tokens=size) for one, size in pairs),
            answer_tokens=self._answer_tokens,
            status=status,
            evidence=tuple(fact.text for fact in task.evidence),
            sample=sample,
        )
