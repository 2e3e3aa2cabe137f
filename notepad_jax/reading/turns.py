"""The turns of a reading for its trace, token by token: exact prompts and completions.

A prompt is kept in its two parts. Members of a group share the first, which holds the chunk, so
only one of them has it and the others say which. Which text a token is stands beside the turns,
for the tokens that occur: a trace can be looked at where there is no tokenizer. Above:
rollout.archive, eval.readings and programs.ask; beside: trace, whose lines these become; below:
memory_agent and rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.trace import Kept, Spool, TurnRecord
from notepad_jax.text.pieces import Pieces
from notepad_jax.text.prompts import Template
from notepad_jax.types import NO_TOKENS, Action, Finish, Tokens, Turn, TurnKind, tokens

PLACES = 4  # of a logprob, after the point


class Turns:
    """A recorder of the turns of a reading, as they come, from its first.

    `rules` and `template` are those that it is read by.
    """

    def __init__(self, pieces: Pieces, rules: Rules, template: Template) -> None:
        self._pieces, self._sources = pieces, Sources(rules, template)
        self._spool, self._found = Spool(), set()

    def add(
        self, turn: Turn, proximal: Sequence[float] | np.ndarray = (), shared_of: int | None = None
    ) -> None:
        """Appends a turn, with the trainer's logprobs where they are known.

        `shared_of` is the number of the reading, of the same group, that has the shared part of
        the prompt; None: it is kept here.
        """
        source = self._sources.add(turn)
        record = TurnRecord(
            chunk=turn.chunk,
            kind=turn.kind.value,
            version=turn.completion.policy_version,
            finish=turn.completion.finish.value,
            shared=turn.prompt.shared.tolist() if shared_of is None else (),
            shared_of=shared_of,
            tail=turn.prompt.tail.tolist(),
            tokens=turn.completion.tokens.tolist(),
            logprobs=_rounded(turn.completion.behaviour_logprobs),
            proximal=_rounded(proximal),
            level=turn.level,
            round=turn.round,
            unit=turn.unit,
            noted=source.noted,
            reads=source.reads,
        )
        self._found.update(record.shared, record.tail, record.tokens)
        self._spool.add(record)

    def kept(self) -> Kept:
        """Returns all that was added, for `TraceFile.add`, once."""
        return Kept(self._spool, {token: self._pieces[token] for token in sorted(self._found)})


def _rounded(logprobs: Sequence[float] | np.ndarray) -> list[float]:
    return [round(float(x), PLACES) for x in logprobs]


# ---------------------------------------------------------------- the tree of a reading in rounds

# Taken from the turns themselves, as they come, by the rules that `rounds` packs notes by: those of
# a level in their order, each text once, as many into a chunk as it has room for. So a trace can
# say of each merge what it read, and a page draws it.


@dataclasses.dataclass(frozen=True)
class Source:
    """Where one turn stands in the tree: whether it wrote a note, and which notes it read."""

    noted: bool | None = None  # whether it wrote a note, or a memory where one is revised; None in
    # a serial reading, which has no notes
    reads: tuple[int, ...] = ()  # the turns, by `Turn.chunk`, whose notes are in its prompt


class Sources:
    """Builds the tree of one reading, turn by turn, from its first.

    A turn above the document reads the notes in its chunk. Any other, and the answer, reads the
    note that has become the memory, where there is one.
    """

    def __init__(self, rules: Rules, template: Template) -> None:
        self._rules, self._template = rules, template
        self._place: tuple[int, int] | None = (0, 0)  # round and level; None: the answer
        self._notes: dict[bytes, int] = {}  # the level's, each text once: by which turn
        self._packs: list[tuple[int, ...]] = []  # the turns whose notes are in each of its chunks
        self._memory: Tokens = NO_TOKENS
        self._writer: tuple[int, ...] = ()  # of the memory

    def add(self, turn: Turn) -> Source:
        """Returns what is known of the reading's next turn."""
        if self._rules.order == "serial":
            return Source()
        place = (turn.round, turn.level) if turn.kind is TurnKind.UPDATE else None
        if place != self._place:
            self._level_ended(turn)
            self._place = place
        if place is None:
            return Source(False, self._writer)
        reads = self._reads(turn)
        return Source(self._noted(turn), reads)

    def _level_ended(self, turn: Turn) -> None:
        """Packs the level's notes for the one that `turn` begins, or makes one the memory."""
        notes, self._notes = self._notes, {}
        texts, writers = [np.frombuffer(note, np.int32) for note in notes], [*notes.values()]
        if turn.level > 0 and notes:
            lengths, between = [len(text) for text in texts], len(self._template.between)
            packs = rounds.packing(lengths, self._rules.chunk_size, between)
            self._packs = [tuple(writers[k] for k in pack) for pack in packs]
        elif notes:
            self._memory, self._writer = tokens(texts[-1]), (writers[-1],)

    def _noted(self, turn: Turn) -> bool:
        said = memory_agent.written(turn.completion)
        if turn.action is not Action.WRITE or turn.completion.finish is Finish.CANCELLED:
            return False
        if not rounds.merges(self._rules, turn.level):
            self._memory, self._writer = said, (turn.chunk,) * (len(said) > 0)
            return True
        if not rounds.is_new(self._memory, said):
            return False
        self._notes.setdefault(said.tobytes(), turn.chunk)
        return True

    def _reads(self, turn: Turn) -> tuple[int, ...]:
        if turn.level <= 0:
            return self._writer
        # One merge may be written again alone, without the turns below it.
        return self._packs[turn.unit] if turn.unit < len(self._packs) else ()
