"""Generated documents, kept as recipes: a filler of any size, and the facts that stand in it.

A filler is a numbered row of units (sentences, list items) of which any part can be written
from a seed; the document writes it block by block, slips each fact in before its unit, and
parts everything with single spaces, or line breaks. So a document of 3.5M tokens never exists
as one string, and is written again, byte for byte, whenever it is read. `hide` sizes a document
in a haystack, `fitting` one whose filler has to be counted as it goes. Below is haystack.py;
above are ruler, memory_tasks and others, which write the facts and ask for them.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from notepad_jax.tasks import haystack as haystacks
from notepad_jax.tasks.draws import Cast, SampleDraws
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.types import Evidence, TaughtNote

BLOCK = 1024  # units written at a time
COUNTED = 256  # units counted at a time where the filler has to be counted
FIRST_WORD = 2  # tokens kept free: without a space before it, a first word may take more by BPE
LOWEST = 0.98  # share of the length asked for that a document must exceed


class Unreachable(ValueError):
    """The error of a task that cannot have a length; it may have others, and other tasks this."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """The inputs of a task generator: what one sample of a task is made from."""

    task: str  # its name, as errors give it
    seed: tuple[int, ...]  # of the sample and the task together
    length: int  # tokens
    haystack: Haystack
    count: Count

    @property
    def draws(self) -> SampleDraws:
        return SampleDraws(self.seed)

    @property
    def rng(self) -> np.random.Generator:
        """A new generator, always in the same state."""
        return np.random.default_rng(self.seed)

    @property
    def cast(self) -> Cast:
        """Its names, numbers and people, from the first on, and `rng`."""
        return Cast.of(self.rng, self.draws, self.haystack.holds)


def sample(task: str, seed: int, length: int, haystack: Haystack, count: Count) -> Sample:
    """Checks what a sample is made from; two tasks of the same seed have nothing in common.

    Raises ValueError for a negative seed and a `count` that is not additive, and Unreachable
    for a length below 1.
    """
    if length < 1:
        raise too_short(task, length, "a document has at least one token")
    if seed < 0:
        raise ValueError(f"the seed of a sample is {seed}; it must be 0 or more")
    haystacks.check_additive(count)
    return Sample(task, (seed, zlib.crc32(task.encode())), length, haystack, count)


class Filler(Protocol):
    """What surrounds the facts: `size` units, no spaces around any of them."""

    @property
    def size(self) -> int: ...

    def units(self, start: int, stop: int) -> list[str]: ...

    def characters(self, stop: int) -> int:
        """Characters of the first `stop` units, a space before each of them."""
        ...


@dataclasses.dataclass(frozen=True)
class Fact:
    """A sentence that is hidden in a document."""

    depth: float  # where, as a share of the filler's units, [0, 1)
    text: str
    shown: str = ""  # the words by which a memory that kept it is known; "": not evidence
    # What a good reader writes down of it; "": what is `shown`, if anything. It begins with words
    # of the question, as the fact does: a small model then finds what follows by copying on.
    note: str = ""


# How what was written down of facts becomes notes.
KEEPING: Mapping[str, Callable[[Sequence[str]], str]] = {
    "list": ", ".join,
    "last": lambda notes: notes[-1],
    "count": lambda notes: str(len(notes)),
}


@dataclasses.dataclass(frozen=True)
class Story:
    """The facts and the question of a task, before they are hidden in a haystack."""

    facts: Sequence[Fact]
    question: str
    answers: tuple[str, ...]
    metric: str
    contract: str = "plain"
    keeping: str = "list"  # of KEEPING: what good notes are after some of the facts

    def script(self) -> tuple[TaughtNote, ...]:
        """Returns good notes, fact by fact in the document's order; never nothing.

        Where no fact is worth a note, the first one is followed by no notes.
        """
        told = [fact for fact in sorted(self.facts, key=_depth) if fact.note or fact.shown]
        notes = [fact.note or fact.shown for fact in told]
        if not told:
            return (TaughtNote(min(self.facts, key=_depth).text, ""),)
        keep = KEEPING[self.keeping]
        return tuple(TaughtNote(fact.text, keep(notes[: k + 1])) for k, fact in enumerate(told))


@dataclasses.dataclass(frozen=True)
class RecipeDocument:
    """A filler with facts in it, in constant memory: the document of a generated task."""

    filler: Filler
    facts: tuple[tuple[int, str], ...] = ()  # (unit that the fact stands before, text), ascending
    closing: tuple[str, ...] = ()  # the last units: short ones, that end just below the length
    parted: str = " "  # what stands between two units, one character

    def pieces(self) -> Iterator[str]:
        units = self.filler.size + len(self.closing)
        facts = list(self.facts)
        space = ""
        for start in range(0, units + 1, BLOCK):
            stop = min(start + BLOCK, units)
            block = self._units(start, stop)
            # A fact at the very end belongs to the last block, as do all that are left.
            here = [fact for fact in facts if fact[0] < start + BLOCK]
            del facts[: len(here)]
            for shift, (slot, text) in enumerate(here):
                block.insert(slot - start + shift, text)
            if block:
                yield space + self.parted.join(block)
                space = self.parted

    def _units(self, start: int, stop: int) -> list[str]:
        size = self.filler.size
        body = self.filler.units(start, min(stop, size)) if start < size else []
        return [*body, *self.closing[max(0, start - size) : max(0, stop - size)]]

    def characters(self, stop: int) -> int:
        """Characters of the first `stop` units without the facts, a space before each."""
        closing = self.closing[: max(0, stop - self.filler.size)]
        return self.filler.characters(min(stop, self.filler.size)) + sum(map(_width, closing))


@dataclasses.dataclass(frozen=True)
class Rotation:
    """A haystack read from sentence `opening` on, and round again at its end."""

    haystack: Haystack = dataclasses.field(repr=False)
    opening: int
    size: int  # sentences
    widths: np.ndarray = dataclasses.field(repr=False, compare=False)  # Measures.characters

    def units(self, start: int, stop: int) -> list[str]:
        sentences = self.haystack.sentences
        taken: list[str] = []
        while start < stop:
            at = (self.opening + start) % len(sentences)
            part = sentences[at : at + stop - start]
            taken += part
            start += len(part)
        return taken

    def characters(self, stop: int) -> int:
        rounds, rest = divmod(stop, len(self.haystack.sentences))
        once = self.widths[len(self.haystack.sentences)]
        within = self.widths[self.opening + rest] - self.widths[self.opening]
        return int(rounds * once + within)


@dataclasses.dataclass(frozen=True)
class WrittenUnits:
    """Units that a function of (start, stop) writes: facts all over, or items of a list."""

    write: Callable[[int, int], list[str]]
    size: int

    def units(self, start: int, stop: int) -> list[str]:
        return self.write(start, stop)

    def characters(self, stop: int) -> int:
        blocks = ((start, min(start + BLOCK, stop)) for start in range(0, stop, BLOCK))
        return sum(_width(unit) for start, end in blocks for unit in self.write(start, end))


def hide(
    task: str,
    facts: Sequence[Fact],
    haystack: Haystack,
    opening: float,
    length: int,
    count: Count,
) -> tuple[RecipeDocument, tuple[Evidence, ...]]:
    """Hides facts in a haystack, `length` tokens of it together; `task` is named in errors.

    `opening`, in [0, 1), says where in the haystack the document begins. Every fact stands
    between two sentences, at its depth counted in sentences; facts at the same place keep
    the order of their depths. `Evidence.place` is exact, to the character.

    Raises Unreachable if the length cannot be reached from below within 2%.
    """
    room = _room_beside(task, facts, length, count)
    measures = haystacks.measured(haystack, count)
    filler, left = _rotate(haystack, measures, int(opening * len(haystack.sentences)), room)
    end, left = closing(haystack, left, count)
    bland, left = closing(haystacks.noise(), left, count)
    check_length(task, length - FIRST_WORD - left, length)
    return _place(facts, filler, (*end, *bland))


def hide_among(
    task: str,
    facts: Sequence[Fact],
    write: Callable[[int, int], list[str]],
    length: int,
    count: Count,
    parted: str = " ",
    farewell: str = "",
) -> tuple[RecipeDocument, tuple[Evidence, ...]]:
    """As `hide`, in units that `write` writes from their numbers: distractors all over.

    The last gap, shorter than a unit, is closed with bland sentences; with a `farewell`, in one
    unit behind it, which no fact parts. `parted` stands between two units: a space, or a line
    break.
    """
    room = _room_beside(task, facts, length, count, parted)
    room -= count(parted + farewell) if farewell else 0
    size, left = fitting(write, room, count, parted)
    bland, left = closing(haystacks.noise(), left, count, parted)
    if farewell:
        bland = (" ".join((farewell, *bland)),)
    check_length(task, length - FIRST_WORD - left, length)
    return _place(facts, WrittenUnits(write, size), bland, parted)


def fitting(
    write: Callable[[int, int], list[str]], room: int, count: Count, parted: str = " "
) -> tuple[int, int]:
    """Returns how many units fit into `room` tokens, and the tokens then left.

    Counts blocks while whole blocks fit and single units after that, so that it takes one
    pass in constant memory.
    """
    fitted = 0
    while (tokens := count(parted + parted.join(units := write(fitted, fitted + COUNTED)))) <= room:
        fitted, room = fitted + COUNTED, room - tokens
    for unit in units:
        tokens = count(parted + unit)
        if tokens > room:
            break
        fitted, room = fitted + 1, room - tokens
    return fitted, room


def closing(
    haystack: Haystack, room: int, count: Count, parted: str = " "
) -> tuple[tuple[str, ...], int]:
    """The longest sentence that fits into the last gap, again while one fits; tokens left."""
    measures = haystacks.measured(haystack, count, parted)
    chosen = []
    while room >= measures.sorted_tokens[0]:
        at = int(np.searchsorted(measures.sorted_tokens, room, side="right")) - 1
        chosen.append(haystack.sentences[measures.shortest_first[at]])
        room -= int(measures.sorted_tokens[at])
    return tuple(chosen), room


def too_short(task: str, length: int, reason: str) -> Unreachable:
    return Unreachable(f"{task} cannot be {length:,} tokens long: {reason}; ask for more tokens")


def check_length(task: str, tokens: int, length: int) -> None:
    """Raises Unreachable unless a document's `tokens` are in (0.98 length, length]."""
    if not LOWEST * length < tokens <= length:
        raise too_short(
            task, length, f"its parts come to {tokens:,}, and one more would be too many"
        )


def _room_beside(
    task: str, facts: Sequence[Fact], length: int, count: Count, parted: str = " "
) -> int:
    needed = FIRST_WORD + sum(count(parted + fact.text) for fact in facts)
    if needed > length:
        raise too_short(task, length, f"its facts alone take {needed:,}")
    return length - needed


def _rotate(
    haystack: Haystack, measures: haystacks.Measures, opening: int, room: int
) -> tuple[Rotation, int]:
    """As many sentences from `opening` on as fit into `room` tokens, and the tokens left."""
    sentences = len(haystack.sentences)
    rounds, rest = divmod(room, int(measures.tokens[sentences]))
    reached = int(np.searchsorted(measures.tokens, measures.tokens[opening] + rest, side="right"))
    size = reached - 1 - opening
    left = rest - int(measures.tokens[opening + size] - measures.tokens[opening])
    return Rotation(haystack, opening, rounds * sentences + size, measures.characters), left


def _place(
    facts: Sequence[Fact], filler: Filler, closing: tuple[str, ...], parted: str = " "
) -> tuple[RecipeDocument, tuple[Evidence, ...]]:
    """Gives each fact its slot, and each that is evidence its place in characters."""
    facts = sorted(facts, key=_depth)
    slots = filler.size + len(closing) + 1
    placed = tuple((int(fact.depth * slots), fact.text) for fact in facts)
    document = RecipeDocument(filler, placed, closing, parted)
    whole = document.characters(slots - 1) + sum(_width(fact.text) for fact in facts) - 1
    evidence, before = [], 0
    characters = functools.cache(document.characters)  # facts may stand at one place
    for (slot, text), fact in zip(placed, facts, strict=True):
        if fact.shown:
            evidence.append(Evidence(fact.shown, (characters(slot) + before) / whole))
        before += _width(text)
    return document, tuple(evidence)


def _depth(fact: Fact) -> float:
    return fact.depth


def _width(unit: str) -> int:
    return 1 + len(unit)
