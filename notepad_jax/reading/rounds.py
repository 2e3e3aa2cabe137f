"""State transitions of readings in several passes over their document, or in parallel.

A serial reading of several passes begins again at the first chunk with the memory that it has.
It may also end early: by the policy's exit marker, or when its memory has long stood still.

A parallel reading is made in rounds. In a round every chunk is read with the same memory, that of
the round before, so all of them may be under way at once; each writes a note, the memory as it
would be after this chunk alone, or nothing. Several notes are a short document, and are read as
one: they are packed into chunks, every one of them read with the same memory, level upon level,
until one note is left. It is the memory of the next round. A chunk has room for two notes at least
(`Rules.check`), so each level has at most half as many notes as the one below, every context is
bounded for a document of any length, and n chunks take at most 1 + log2 n turns one after another.

A mixed reading is made in rounds, too: its chunks are read as those of a parallel one, and what
they noted is read serially. Either ends after `Rules.passes` rounds, or with the first that leaves
the memory as it was: under the same memory the next would read the same. With `Rules.again` there
is one more turn before a further round, at level ENDED: it reads the template's [end] in the place
of a chunk, and the round is made if it asks for it.

PI-Mem (2026, arXiv 2608.03048) reads in such rounds and merges all notes in one prompt, whose
length grows with the document's. Pure, as memory_agent, which is above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeGuard

import numpy as np

from notepad_jax.reading.rules import Rules
from notepad_jax.text.prompts import Template
from notepad_jax.types import Action, Chunks, MemoryState, Round, Tokens, tokens

ENDED = -1  # the level of a turn after a round, which may ask for another


def chunk_or_none(chunks: Chunks, k: int) -> Tokens | None:
    """Returns chunk k, or None past the document's end."""
    try:
        return chunks[k]
    except IndexError:
        return None


class PlacedTurn(Protocol):
    """A turn, or the record of one."""

    level: int
    round: int
    unit: int


def place(turn: PlacedTurn) -> str:
    """Says in which round and level an update turn is; "" for the first pass over the document."""
    round_ = f"round {turn.round + 1}, " if turn.round else ""
    if turn.level == ENDED:
        return f"{round_}end of the document"
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


def merges(rules: Rules, level: int) -> bool:
    """Whether what the turns of a level write are notes, and its chunks are read at once."""
    return rules.order == "parallel" and level >= 0 or rules.order == "mixed" and level == 0


def passed(rules: Rules, template: Template, state: MemoryState, did: Action) -> MemoryState:
    """Returns the state after a turn that made the memory: of the next pass, if one ends here.

    `did` is what the turn did.
    """
    now = state.round
    if now.level == ENDED:
        return _begun(state, now.document) if did is Action.AGAIN else ended(state)
    if chunk_or_none(state.chunks, state.next_chunk) is not None:
        return state
    return _next_round(rules, template, state, now.document if now.level else state.chunks)


def ended(state: MemoryState) -> MemoryState:
    """Returns the state in which no chunk is left, whatever the document still has."""
    round_ = Round(state.round.number, before=state.turns, began=state.memory_tokens)
    return dataclasses.replace(state, chunks=(), next_chunk=0, round=round_)


def noted(rules: Rules, template: Template, state: MemoryState, note: Tokens | None) -> MemoryState:
    """Returns the state after a turn of a parallel reading that wrote `note`; None is nothing."""
    notes = state.round.notes
    if is_new(state.memory_tokens, note):
        notes = (*notes, note)
    round_ = dataclasses.replace(state.round, notes=notes)
    state = dataclasses.replace(state, next_chunk=state.next_chunk + 1, round=round_)
    if chunk_or_none(state.chunks, state.next_chunk) is not None:
        return state
    return _level_ended(rules, template, state)


def is_new(memory: Tokens, note: Tokens | None) -> TypeGuard[Tokens]:
    """Says whether a turn that was shown `memory` has written a note; None is nothing."""
    return note is not None and len(note) > 0 and not np.array_equal(note, memory)


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
    return _next_round(rules, template, state, document)


def _next_round(
    rules: Rules, template: Template, state: MemoryState, document: Chunks
) -> MemoryState:
    """Returns the state in which the document is read again, or may be, or no chunk is left."""
    now = state.round
    if now.number + 1 >= rules.passes or np.array_equal(state.memory_tokens, now.began):
        return ended(state)
    if not rules.again:
        return _begun(state, document)
    asks = dataclasses.replace(now, level=ENDED, notes=(), document=document, before=state.turns)
    return dataclasses.replace(state, chunks=(template.end,), next_chunk=0, round=asks)


def _begun(state: MemoryState, document: Chunks) -> MemoryState:
    """Returns the state in which the next round begins."""
    following = Round(state.round.number + 1, before=state.turns, began=state.memory_tokens)
    return dataclasses.replace(state, chunks=document, next_chunk=0, round=following)


def packed(notes: Sequence[Tokens], size: int, between: Tokens) -> tuple[Tokens, ...]:
    """Returns chunks of at most `size` tokens that hold all notes, whole and in their order."""
    packs = packing([len(note) for note in notes], size, len(between))
    return tuple(joined([notes[k] for k in pack], between) for pack in packs)


def packing(lengths: Sequence[int], size: int, between: int) -> list[range]:
    """Returns of each chunk which notes it holds, by their lengths; the last has the rest."""
    packs, first, room = [], 0, size
    for k, length in enumerate(lengths):
        more = length + (between if k > first else 0)
        if more > room and k > first:
            packs.append(range(first, k))
            first, room, more = k, size, length
        room -= more
    return [*packs, range(first, len(lengths))]


def joined(parts: Sequence[Tokens], between: Tokens) -> Tokens:
    """Returns the parts one after the other, `between` between them."""
    spread = [piece for part in parts for piece in (between, part)]
    return tokens(np.concatenate(spread[1:])) if spread else tokens()
