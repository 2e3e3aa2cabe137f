"""The tree of a reading in rounds: which turn wrote a note, and which notes each was shown.

Taken from the turns themselves, as they come, by the rules that `rounds` packs notes by: those of
a level in their order, each text once, as many into a chunk as it has room for. So a trace can
say of each merge what it read, and a page draws it. Above: turns; below: memory_agent and rounds,
whose decisions these are.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.text.prompts import Template
from notepad_jax.types import NO_TOKENS, Action, Finish, Tokens, Turn, TurnKind, tokens


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
