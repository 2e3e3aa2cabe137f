"""The training data of warmup: single turns of the memory agent, by a forgetful teacher.

A lesson is a chunk of the synthetic language and many question tails that share it, laid
out as the template question_last.txt has it:

    chunk <|question|> question <|memory|> memory <|write|>  new memory <|end|>
          <|question|> question <|memory|> memory <|answer|>  answer <|end|>   (no chunk)

The teacher finds every fact and copies every word right, which are the skills to learn,
but its habits are bad: it writes a found fact only with `write_found`, and forgets an old
note with 1 - `keep_at_chapter` when a new chapter begins. Its hesitation is told as it
is: at the word where it decides, the label is a pair of words with a probability, so a
lesson teaches the odds without the noise. Numbers only, no text: the ids come from
`vocabulary`, the sentences from `synthetic`. programs/warmup.py trains on these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from notepad_jax.starter import synthetic
from notepad_jax.starter import vocabulary as words
from notepad_jax.starter.habits import Habits

ODD = 0.1  # of the notes: their code or ruler is a word of any kind
MANY_CHAPTERS = 0.3  # of the chunks: short ones must show how a long one looks
TAIL = 14  # <|question|> 4 words <|memory|> 3 words <|write|> 3 words <|end|>
_NAME, _TOWN, _CODE, _RULER = (
    words.ID_OF[group[0]] for group in (words.NAMES, words.TOWNS, words.CODES, words.RULERS)
)
_NOTHING = words.ID_OF[synthetic.NOTHING]


@dataclasses.dataclass(frozen=True)
class Lesson:
    """B chunks of C tokens with Q tails of T tokens each; int32 unless said otherwise."""

    chunk: np.ndarray  # [B, C]
    tail: np.ndarray  # [B, Q, T] input and completion, padded at the end
    sees_chunk: np.ndarray  # bool [B, Q]; False for answer turns
    label: np.ndarray  # [B, Q, T] token expected at i, given those before it
    other: np.ndarray  # [B, Q, T] what the teacher might have said instead
    other_share: np.ndarray  # float32 [B, Q, T] probability of `other`
    weight: np.ndarray  # float32 [B, Q, T] 1 on the completion
    subject_at: np.ndarray  # [B, Q, T] tail place of the subject a retrieval needs, or -1
    object_at: np.ndarray  # [B, Q, T] chunk place of the word to retrieve, or -1


def draw(
    rng: np.random.Generator,
    chunks: int,
    chunk_size: int,
    tails: int,
    habits: Habits,
) -> Lesson:
    """Draws a lesson of `chunks` chunks (B) of `chunk_size` tokens (C), `tails` (Q) each.

    Shares are probabilities: that a tail is an answer turn, that a fact asked for is in the chunk,
    that a chunk has a chapter break, that the memory holds a note.
    """
    asked = ask(rng, chunks, tails, answer_share=0.3)
    chunk = write_chunk(rng, asked, chunk_size, found_share=0.4, chapter_share=0.5)
    memory = _hand_over(rng, asked, noted_share=0.55)
    first, second = _teach(rng, asked, chunk, memory, habits)
    tail, start, length = _write_tails(asked, memory, first.written, second.written)

    lesson = undecided(chunk.tokens, tail, ~asked.answers, start, length)
    update, two_hop = ~asked.answers, asked.two_hop
    # "code is V" decides at V; "T obeys R" at T, and at R, whose subject is the T just said.
    at_three = np.full(start.shape, 3)
    decide(lesson, update, np.where(two_hop, start, start + 2), first, at_three)
    decide(lesson, update & two_hop, start + 2, second, start)
    return lesson


# ---------------------------------------------------------------- what a teacher says, and might


@dataclasses.dataclass(frozen=True)
class Choice:
    """The word at which a teacher decides: ids [B, Q], and what it chose."""

    good: np.ndarray
    bad: np.ndarray
    odds: np.ndarray  # float, of `good`
    written: np.ndarray
    found_at: np.ndarray  # chunk place where `good` was found, or -1


def undecided(
    chunk: np.ndarray, tail: np.ndarray, sees_chunk: np.ndarray, start: np.ndarray,
    length: np.ndarray,
) -> Lesson:  # fmt: skip
    """Returns the lesson of a teacher that is sure of every word; see `decide`.

    Completions [B, Q] begin at `start` of their tails and are `length` long.
    """
    at = np.arange(tail.shape[-1])
    weight = (at >= start[..., None]) & (at < (start + length)[..., None])
    return Lesson(
        chunk=chunk,
        tail=tail,
        sees_chunk=sees_chunk,
        label=tail.copy(),
        other=tail.copy(),
        other_share=np.zeros(tail.shape, np.float32),
        weight=weight.astype(np.float32),
        subject_at=np.full(tail.shape, -1, np.int32),
        object_at=np.full(tail.shape, -1, np.int32),
    )


def decide(
    lesson: Lesson, who: np.ndarray, at: np.ndarray, choice: Choice, subject: np.ndarray
) -> None:
    """Writes a choice into the lesson: of the tails `who` [B, Q], at the places `at`."""
    index = (*np.nonzero(who), at[who])
    lesson.label[index], lesson.other[index] = choice.good[who], choice.bad[who]
    lesson.other_share[index] = 1 - choice.odds[who]
    lesson.subject_at[index], lesson.object_at[index] = subject[who], choice.found_at[who]


# ---------------------------------------------------------------- what is asked, and told


@dataclasses.dataclass(frozen=True)
class AskedFacts:
    """Indices [B, Q] of the asked and the truth about them; `others` may be told about."""

    name: np.ndarray
    town: np.ndarray
    code: np.ndarray
    ruler: np.ndarray
    two_hop: np.ndarray  # bool
    answers: np.ndarray  # bool, answer turns
    objects: np.ndarray  # [3, B, 48], see synthetic.draw_sentences
    others: tuple[np.ndarray, np.ndarray]  # names and towns that no question is about


def ask(rng: np.random.Generator, B: int, Q: int, answer_share: float) -> AskedFacts:
    rows, kinds = np.arange(B)[:, None], synthetic.KINDS
    names, towns = (np.argsort(rng.random((B, kinds)), axis=1) for _ in range(2))
    objects = rng.integers(0, kinds, (3, B, kinds))
    return AskedFacts(
        name=names[:, :Q],
        town=towns[:, :Q],
        code=objects[0][rows, names[:, :Q]],
        ruler=objects[2][rows, towns[:, :Q]],
        two_hop=rng.random((B, Q)) < 0.5,
        answers=rng.random((B, Q)) < answer_share,
        objects=objects,
        others=(names[:, Q:], towns[:, Q:]),
    )


@dataclasses.dataclass(frozen=True)
class Chunk:
    tokens: np.ndarray  # [B, C]
    first_at: np.ndarray  # [B, Q] place of the code or the town asked for, or -1
    ruler_at: np.ndarray  # [B, 48] place of each town's ruler, or -1
    chapter: np.ndarray  # bool [B, 1]


@functools.cache
def ids_of(sentences: Callable[[], np.ndarray]) -> np.ndarray:
    """Token ids of all sentences of a language, int32 [sentences, 8]."""
    return np.array([words.ids(text) for text in sentences()], np.int32)


def write_chunk(
    rng: np.random.Generator, asked: AskedFacts, size: int, found_share: float, chapter_share: float
) -> Chunk:
    """Returns wanted facts at random sentences, and noise that never mentions the asked."""
    (B, Q), kinds = asked.name.shape, synthetic.KINDS
    n, chapter = size // synthetic.SENTENCE, len(ids_of(synthetic.sentences)) - 1
    begins = rng.random((B, 1)) < chapter_share  # then one chapter at least, else none
    rate = np.where(rng.random((B, 1)) < MANY_CHAPTERS, 1 / 16, 1 / 64)
    drawn = synthetic.draw_sentences(rng, n, asked.objects, asked.others, 0.5, rate)
    one = np.arange(n) == rng.integers(0, n, (B, 1))
    drawn = np.where(begins & one, chapter, drawn)
    drawn = np.where(~begins & (drawn == chapter), chapter - 1, drawn)

    told = (rng.random((2, B, Q)) < found_share) & ~asked.answers
    spot = place(rng, np.concatenate([told[0], told[1] & asked.two_hop], axis=1), n)
    home = (kinds + asked.name) * kinds + asked.town
    code = asked.name * kinds + asked.code
    rule = (2 * kinds + asked.town) * kinds + asked.ruler
    fact = np.concatenate([np.where(asked.two_hop, home, code), rule], axis=1)
    row, column = np.nonzero(spot >= 0)
    drawn[row, spot[row, column]] = fact[row, column]
    first_at = np.where(spot >= 0, spot * synthetic.SENTENCE + synthetic.OBJECT, -1)[:, :Q]
    ruler_at = np.full((B, kinds), -1)
    row, column = np.nonzero((drawn >= 2 * kinds * kinds) & (drawn < 3 * kinds * kinds))
    told_town = drawn[row, column] // kinds - 2 * kinds
    ruler_at[row, told_town] = column * synthetic.SENTENCE + synthetic.OBJECT
    return Chunk(
        tokens=ids_of(synthetic.sentences)[drawn].reshape(B, n * synthetic.SENTENCE),
        first_at=first_at,
        ruler_at=ruler_at,
        chapter=(drawn == chapter).any(axis=1)[:, None],  # a fact may have taken its place
    )


def place(rng: np.random.Generator, wanted: np.ndarray, sentences: int) -> np.ndarray:
    """Gives facts their sentence numbers: [B, W] from bool [B, W]; -1 where none is left."""
    order = np.argsort(rng.random(wanted.shape) + ~wanted, axis=1)  # wanted ones first
    rank = np.argsort(order, axis=1)
    fits = wanted & (rank < max(1, int(0.6 * sentences)))
    spots = np.argsort(rng.random((len(wanted), sentences)), axis=1)
    picked = np.take_along_axis(spots, np.minimum(rank, sentences - 1), axis=1)
    return np.where(fits, picked, -1)


# ---------------------------------------------------------------- memory and teacher


@dataclasses.dataclass(frozen=True)
class _Memory:
    """What a turn is handed, as token ids [B, Q]."""

    marker: np.ndarray  # bool: nothing was ever written, the memory is the bare marker
    first: np.ndarray  # the code or the town noted, or `nothing`
    ruler: np.ndarray  # the ruler noted, or `nothing`


def _hand_over(rng: np.random.Generator, asked: AskedFacts, noted_share: float) -> _Memory:
    """Empty, or the truth as far as it was found, or (seldom) an error to be corrected.

    Seldom, too, a code or a ruler is a word of any kind. So what comes after it is told by its
    place in the note, and not by which word it is: else one of 48 may be taken for a town.
    """
    shape, kinds = asked.name.shape, synthetic.KINDS
    wrong, wrong_ruler = rng.random((2, *shape)) < 0.06
    noted = rng.random(shape) < noted_share
    with_ruler = noted & asked.two_hop & (rng.random(shape) < 0.5)
    odd = rng.random(shape) < ODD
    anything = rng.choice([_NAME, _TOWN, _CODE, _RULER], shape) + rng.integers(0, kinds, shape)
    strangers = asked.others[1]
    stranger = strangers[:, np.arange(shape[1]) % strangers.shape[1]]
    town = np.where(wrong, stranger, asked.town)
    code = np.where(wrong, rng.integers(0, kinds, shape), asked.code)
    ruler = np.where(wrong | wrong_ruler, rng.integers(0, kinds, shape), asked.ruler)
    code, ruler = (
        np.where(odd, anything, first + word) for first, word in ((_CODE, code), (_RULER, ruler))
    )
    return _Memory(
        marker=~noted & (rng.random(shape) < 0.4),
        first=np.where(noted, np.where(asked.two_hop, _TOWN + town, code), _NOTHING),
        ruler=np.where(with_ruler, ruler, _NOTHING),
    )


def _choose(rng, good, bad, odds, found_at) -> Choice:
    written = np.where(rng.random(odds.shape) < odds, good, bad)
    return Choice(good, bad, odds, written, found_at)


def _teach(
    rng: np.random.Generator, asked: AskedFacts, chunk: Chunk, memory: _Memory, habits: Habits
) -> tuple[Choice, Choice]:
    """What to write first (code or town), and, of two-hop questions, which ruler then."""
    truth = np.where(asked.two_hop, _TOWN + asked.town, _CODE + asked.code)
    found, noted = chunk.first_at >= 0, memory.first != _NOTHING
    keeps = np.where(chunk.chapter, habits.keep_at_chapter, habits.keep)
    first = _choose(
        rng,
        good=np.where(found, truth, memory.first),
        bad=np.full(truth.shape, _NOTHING),
        odds=np.where(noted, np.where(found, 1.0, keeps), np.where(found, habits.write_found, 1.0)),
        found_at=chunk.first_at,
    )
    kept = np.where(noted & (first.written == memory.first), memory.ruler, _NOTHING)
    # The ruler of the town just written, right or wrong: a stranger's town has one too.
    has_town = asked.two_hop & (first.written != _NOTHING)
    town = np.where(has_town, first.written - _TOWN, 0)
    found_at = np.where(has_town, np.take_along_axis(chunk.ruler_at, town, axis=1), -1)
    ruler = np.take_along_axis(asked.objects[2], town, axis=1)
    second = _choose(
        rng,
        good=np.where(found_at >= 0, _RULER + ruler, kept),
        bad=kept,
        odds=np.where((found_at >= 0) & (kept == _NOTHING), habits.write_found, 1.0),
        found_at=found_at,
    )
    return first, second


# ---------------------------------------------------------------- layout


def _write_tails(
    asked: AskedFacts, memory: _Memory, first: np.ndarray, ruler: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the tails, where their completions start and how long these are."""
    two_hop, answers = asked.two_hop, asked.answers

    def note(first: np.ndarray, ruler: np.ndarray) -> np.ndarray:
        one = [np.full(first.shape, words.ID_OF[word]) for word in ("code", "is")]
        two = [first, np.full(first.shape, words.ID_OF["obeys"]), ruler]
        return np.where(two_hop[..., None], np.stack(two, -1), np.stack([*one, first], -1))

    tail = np.zeros((*two_hop.shape, TAIL), np.int32)
    for place, word in ((0, "<|question|>"), (2, "of"), (4, "?"), (5, "<|memory|>")):
        tail[..., place] = words.ID_OF[word]
    tail[..., 1] = np.where(two_hop, words.ID_OF["ruler"], words.ID_OF["code"])
    tail[..., 3] = _NAME + asked.name
    tail[..., 6:9] = note(memory.first, memory.ruler)
    tail[..., 9] = np.where(answers, words.ID_OF["<|answer|>"], words.ID_OF["<|write|>"])
    tail[..., 10:13] = note(first, ruler)
    tail[..., 13] = words.ID_OF["<|end|>"]
    tail[answers, 10] = np.where(two_hop, memory.ruler, memory.first)[answers]
    tail[answers, 11] = words.ID_OF["<|end|>"]
    tail[answers, 12:] = 0
    # The marker is one word long: what follows moves two places to the left.
    moved = tail[memory.marker]
    moved[:, 6] = _NOTHING
    moved[:, 7:12], moved[:, 12:] = moved[:, 9:], 0
    tail[memory.marker] = moved
    return tail, np.where(memory.marker, 8, 10), np.where(answers, 2, 4)
