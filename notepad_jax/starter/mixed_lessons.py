"""Lessons on questions of four kinds: single turns, by the same forgetful teacher as `lessons`.

The layout is that of `lessons`, with a memory of always three words, which are the things
noted so far, in the order told, and then `nothing`; of a count, the first is a digit:

    chunk <|question|> market of Nora ? <|memory|> honey nothing nothing <|write|>
                                                          honey onions nothing <|end|>

The answer of a list has an item on each line. The teacher's habits are as bad as there: a
found fact is written only with `write_found`, and when a new chapter begins all notes are
forgotten with 1 - `keep_at_chapter`. A chunk tells one fact of a question at most, as in
`mixed`. Below: mixed and lessons; above: programs.warmup.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from notepad_jax.starter import lessons, mixed, synthetic
from notepad_jax.starter import vocabulary as words
from notepad_jax.starter.habits import Habits
from notepad_jax.starter.lessons import Choice, Lesson

TAIL = 16  # <|question|> 4 words <|memory|> 3 words <|answer|> 5 words <|end|>
SLOTS, WRITTEN = 3, 10  # words of a memory, and where the new one begins
LINE = words.ID_OF["<0x0A>"]
DIGITS = np.array([words.ID_OF[n] for n in (synthetic.NOTHING, *(f"<0x3{n}>" for n in "1234"))])
_NOTHING = words.ID_OF[synthetic.NOTHING]
_COUNT = tuple(mixed.OF_NAME).index("count")
_MOST = np.array([1, 3, 4, 3])  # things that a memory notes, of each kind
_OBJECT = np.array([words.ID_OF[things[0]] for things in mixed.OBJECTS])
_ASKS = np.array([words.ID_OF[kind.asks] for kind in mixed.OF_NAME.values()])


def draw(
    rng: np.random.Generator,
    chunks: int,
    chunk_size: int,
    tails: int,
    habits: Habits,
) -> Lesson:
    """Draws a lesson, as `lessons.draw` does."""
    asked = _ask(rng, chunks, tails, answer_share=0.3, noted_share=0.6)
    chunk, found_at, chapter = _write_chunk(
        rng, asked, chunk_size, found_share=0.4, chapter_share=0.4
    )
    turn = _teach(rng, asked, found_at, chapter, habits)
    tail, start, length = _write_tails(asked, turn.written)

    lesson = lessons.undecided(chunk, tail, ~asked.answers, start, length)
    for slot in range(SLOTS):
        word = Choice(*(each[..., slot] for each in vars(turn).values()))
        lessons.decide(lesson, ~asked.answers, start + slot, word, np.full(start.shape, 3))
    return lesson


# ---------------------------------------------------------------- what is asked, and told


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What [B, Q] questions ask, and what is known before the chunk."""

    kind: np.ndarray  # number in mixed.OF_NAME
    name: np.ndarray  # index of a name
    things: np.ndarray  # [B, Q, 3] indices of the things to be noted, in their order
    noted: np.ndarray  # how many of them the memory has
    marker: np.ndarray  # bool: nothing was ever written, the memory is the bare marker
    answers: np.ndarray  # bool, answer turns
    others: np.ndarray  # [B, *] names that no question is about

    @property
    def memory(self) -> np.ndarray:
        """The memory's words, ids [B, Q, 3]."""
        kind, noted = self.kind[..., None], self.noted[..., None]
        things = np.where(np.arange(SLOTS) < noted, _OBJECT[kind] + self.things, _NOTHING)
        count = np.where(np.arange(SLOTS) == 0, DIGITS[noted], _NOTHING)
        return np.where(kind == _COUNT, count, things)


def _ask(
    rng: np.random.Generator, B: int, Q: int, answer_share: float, noted_share: float
) -> _Asked:
    names = np.argsort(rng.random((B, synthetic.KINDS)), axis=1)
    kind = rng.integers(0, len(mixed.OF_NAME), (B, Q))
    size = np.array([len(things) for things in mixed.OBJECTS])[kind][..., None]
    spread = rng.random((B, Q, synthetic.KINDS)) + (np.arange(synthetic.KINDS) >= size)
    noted = np.where(rng.random((B, Q)) < noted_share, rng.integers(1, _MOST[kind] + 1), 0)
    return _Asked(
        kind=kind,
        name=names[:, :Q],
        things=np.argsort(spread, axis=-1)[..., :SLOTS],
        noted=noted,
        marker=(noted == 0) & (rng.random((B, Q)) < 0.4),
        answers=rng.random((B, Q)) < answer_share,
        others=names[:, Q:],
    )


def _write_chunk(
    rng: np.random.Generator, asked: _Asked, size: int, found_share: float, chapter_share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the chunk [B, C], where it tells of each asked [B, Q] or -1, and breaks [B, 1]."""
    B, n, last = len(asked.name), size // synthetic.SENTENCE, len(mixed.sentences()) - 1
    drawn = mixed.draw_sentences(rng, (B, n), asked.others, 0.5, 0.0)
    begins = rng.random((B, 1)) < chapter_share
    drawn = np.where(begins & (np.arange(n) == rng.integers(0, n, (B, 1))), last, drawn)
    told = (rng.random(asked.name.shape) < found_share) & ~asked.answers
    told &= asked.noted < _MOST[asked.kind]
    spot = lessons.place(rng, told, n)
    following = np.minimum(asked.noted, SLOTS - 1)[..., None]
    thing = np.take_along_axis(asked.things, following, axis=-1)[..., 0]
    thing = np.where(asked.kind == _COUNT, 0, thing)
    row, column = np.nonzero(spot >= 0)
    drawn[row, spot[row, column]] = mixed.fact(asked.kind, asked.name, thing)[row, column]
    ids = lessons.ids_of(mixed.sentences)[drawn].reshape(B, n * synthetic.SENTENCE)
    found_at = np.where(spot >= 0, spot * synthetic.SENTENCE + synthetic.OBJECT, -1)
    return ids, found_at, (drawn == last).any(axis=1)[:, None]


# ---------------------------------------------------------------- the teacher


def _teach(
    rng: np.random.Generator,
    asked: _Asked,
    found_at: np.ndarray,
    chapter: np.ndarray,
    habits: Habits,
) -> Choice:
    """Returns what is decided at each word of the new memory, [B, Q, 3] each."""
    memory, noted = asked.memory, asked.noted
    found, count = found_at >= 0, asked.kind == _COUNT
    # A count is written over; everything else has its new thing behind the others.
    slot = np.where(count, 0, noted)
    following = np.take_along_axis(asked.things, np.minimum(noted, SLOTS - 1)[..., None], -1)
    new = _OBJECT[asked.kind] + following[..., 0]
    new = np.where(count, DIGITS[np.minimum(noted + 1, len(DIGITS) - 1)], new)

    here = found[..., None] & (np.arange(SLOTS) == slot[..., None])
    good = np.where(here, new[..., None], memory)
    bad = np.where(here, memory, good)
    odds = np.where(here, habits.write_found, 1.0)
    # At the first word all old notes are kept, or none.
    keeps = np.where(chapter, habits.keep_at_chapter, habits.keep)
    counted = count & found & ~chapter  # then it is the new song that may be missed
    old = (noted > 0) & ~counted
    bad[..., 0] = np.where(old, _NOTHING, bad[..., 0])
    odds[..., 0] = np.where(old, keeps, odds[..., 0])

    written = np.where(rng.random(good.shape) < odds, good, bad)
    dropped = ((noted > 0) & (written[..., 0] == _NOTHING))[..., None] & (np.arange(SLOTS) > 0)
    good, bad, written = (np.where(dropped, _NOTHING, x) for x in (good, bad, written))
    return Choice(
        good=good,
        bad=bad,
        odds=np.where(dropped, 1.0, odds),
        written=written,
        found_at=np.where(here & ~dropped, found_at[..., None], -1),
    )


def _write_tails(asked: _Asked, written: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tails, where their completions start and how long these are."""
    answers, marker, memory = asked.answers, asked.marker, asked.memory
    tail = np.zeros((*asked.name.shape, TAIL), np.int32)
    for place, word in ((0, "<|question|>"), (2, "of"), (4, "?"), (5, "<|memory|>")):
        tail[..., place] = words.ID_OF[word]
    tail[..., 1] = _ASKS[asked.kind]
    tail[..., 3] = words.ID_OF[words.NAMES[0]] + asked.name
    tail[..., 6:9] = memory
    tail[..., 9] = np.where(answers, words.ID_OF["<|answer|>"], words.ID_OF["<|write|>"])
    tail[..., WRITTEN : WRITTEN + SLOTS] = written
    tail[..., WRITTEN + SLOTS] = words.ID_OF["<|end|>"]
    items = np.maximum((memory != _NOTHING).sum(axis=-1), 1)  # `nothing` is an answer, too
    said = np.full((*items.shape, 2 * SLOTS), LINE)
    said[..., ::2] = memory
    place = np.arange(2 * SLOTS)
    end = (2 * items - 1)[..., None]
    said = np.where(place < end, said, np.where(place == end, words.ID_OF["<|end|>"], 0))
    tail[..., WRITTEN:] = np.where(answers[..., None], said, tail[..., WRITTEN:])
    # The marker is one word long: what follows moves two places to the left.
    moved = tail[marker]
    moved[:, 7:-2], moved[:, -2:] = moved[:, 9:], 0
    tail[marker] = moved
    return tail, np.where(marker, WRITTEN - 2, WRITTEN), np.where(answers, 2 * items, SLOTS + 1)
