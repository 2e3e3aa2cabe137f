"""Readings that go over their document more than once, or in parallel: what follows a turn.

A serial reading of several passes begins again at the first chunk with the memory that it has.

A parallel reading is made in rounds. In a round every chunk is read with the same memory, that of
the round before, so all of them may be under way at once; each writes a note, the memory as it
would be after this chunk alone, or nothing. Several notes are a short document, and are read as
one: they are packed into chunks, every one of them read with the same memory, level upon level,
until one note is left. It is the memory of the next round. A chunk has room for two notes at least
(`Rules.check`), so each level has at most half as many notes as the one below, every context is
bounded for a document of any length, and n chunks take at most 1 + log2 n turns one after another.

Either ends after `Rules.passes` rounds, or with the first that leaves the memory as it was: under
the same memory the next would read the same.

PI-Mem (2026, arXiv 2608.03048) reads in such rounds and merges all notes in one prompt, whose
length grows with the document's. Pure, as memory_agent, which is above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from notepad_jax.reading.rules import Rules
from notepad_jax.text.prompts import Template
from notepad_jax.types import Chunks, MemoryState, Round, Tokens, tokens


def chunk_or_none(chunks: Chunks, k: int) -> Tokens | None:
    """Returns chunk k, or None past the document's end."""
    try:
        return chunks[k]
    except IndexError:
        return None


class Placed(Protocol):
    """A turn, or the record of one."""

    level: int
    round: int
    unit: int


def place(turn: Placed) -> str:
    """Says where an update turn stands; "" for one of the first pass over the document."""
    round_ = f"round {turn.round + 1}, " if turn.round else ""
    if turn.level:
        return f"{round_}level {turn.level}, notes {turn.unit + 1:,}"
    return f"{round_}chunk {turn.unit + 1:,}" if turn.round else ""


def beside(state: MemoryState) -> MemoryState | None:
    """Returns the state that the level's next chunk is read in, whatever this one's says.

    None: this is its last. As far as the next prompt goes: what was written is not in it.
    """
    if chunk_or_none(state.chunks, state.next_chunk + 1) is None:
        return None
    return dataclasses.replace(state, next_chunk=state.next_chunk + 1)


def passed(rules: Rules, state: MemoryState) -> MemoryState:
    """Returns the state after a turn of a serial reading: of the next pass, if one ends here."""
    if chunk_or_none(state.chunks, state.next_chunk) is not None:
        return state
    return _next_round(rules, state, state.chunks)


def noted(rules: Rules, template: Template, state: MemoryState, note: Tokens | None) -> MemoryState:
    """Returns the state after a turn of a parallel reading that wrote `note`; None is nothing."""
    notes = state.round.notes
    if note is not None and len(note) and not np.array_equal(note, state.memory_tokens):
        notes = (*notes, note)
    round_ = dataclasses.replace(state.round, notes=notes)
    state = dataclasses.replace(state, next_chunk=state.next_chunk + 1, round=round_)
    if chunk_or_none(state.chunks, state.next_chunk) is not None:
        return state
    return _level_ended(rules, template, state)


def _level_ended(rules: Rules, template: Template, state: MemoryState) -> MemoryState:
    now = state.round
    document = now.document if now.level else state.chunks
    notes = list({note.tobytes(): note for note in now.notes}.values())
    # As it stands, the lone slip of one chunk in n would be the end of what earlier rounds found.
    if len(notes) > 1 or (notes and not now.level and len(state.memory_tokens)):
        above = dataclasses.replace(
            now, level=now.level + 1, notes=(), document=document, before=state.turns
        )
        together = packed(notes, rules.chunk_size, template.between)
        return dataclasses.replace(state, chunks=together, next_chunk=0, round=above)
    if notes:
        state = dataclasses.replace(state, memory_tokens=notes[0])
    return _next_round(rules, state, document)


def _next_round(rules: Rules, state: MemoryState, document: Chunks) -> MemoryState:
    """Returns the state in which the document is read again, or no chunk is left."""
    now, memory = state.round, state.memory_tokens
    over = now.number + 1 >= rules.passes or np.array_equal(memory, now.began)
    following = Round(now.number + (not over), before=state.turns, began=memory)
    return dataclasses.replace(
        state, chunks=() if over else document, next_chunk=0, round=following
    )


def packed(notes: Sequence[Tokens], size: int, between: Tokens) -> tuple[Tokens, ...]:
    """Returns chunks of at most `size` tokens that hold all notes, whole and in their order."""
    chunks: list[list[Tokens]] = [[]]
    room = size
    for note in notes:
        more = len(note) + (len(between) if chunks[-1] else 0)
        if more > room and chunks[-1]:
            chunks.append([])
            room, more = size, len(note)
        chunks[-1].append(note)
        room -= more
    return tuple(joined(part, between) for part in chunks)


def joined(parts: Sequence[Tokens], between: Tokens) -> Tokens:
    """Returns the parts one after the other, `between` between them."""
    spread = [piece for part in parts for piece in (between, part)]
    return tokens(np.concatenate(spread[1:])) if spread else tokens()
