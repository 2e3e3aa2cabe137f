"""Single turns of the memory agent, written by a forgetful teacher: what warmup learns from.

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

import numpy as np

from notepad_jax.tasks import synthetic
from notepad_jax.tasks import vocabulary as words

TAIL = 14  # <|question|> 4 words <|memory|> 3 words <|write|> 3 words <|end|>
_NAME, _TOWN, _CODE, _RULER = (
    words.ID_OF[group[0]] for group in (words.NAMES, words.TOWNS, words.CODES, words.RULERS)
)
_NOTHING = words.ID_OF[synthetic.NOTHING]


@dataclasses.dataclass(frozen=True)
class Habits:
    """The teacher's odds; each is the probability of doing the right thing."""

    write_found: float  # a fact is found in the chunk and the memory has none yet
    keep: float  # the memory holds a note and the chunk says nothing about it
    keep_at_chapter: float  # the same, and the chunk begins a new chapter


@dataclasses.dataclass(frozen=True)
class Lesson:
    """B chunks of C tokens with Q tails each; int32 unless said otherwise."""

    chunk: np.ndarray  # [B, C]
    tail: np.ndarray  # [B, Q, 14] input and completion, padded at the end
    sees_chunk: np.ndarray  # bool [B, Q]; False for answer turns
    label: np.ndarray  # [B, Q, 14] token expected at i, given those before it
    other: np.ndarray  # [B, Q, 14] what the teacher might have said instead
    other_share: np.ndarray  # float32 [B, Q, 14] probability of `other`
    weight: np.ndarray  # float32 [B, Q, 14] 1 on the completion
    subject_at: np.ndarray  # [B, Q, 14] tail place of the subject a retrieval needs, or -1
    object_at: np.ndarray  # [B, Q, 14] chunk place of the word to retrieve, or -1


@functools.cache
def _sentence_ids() -> np.ndarray:
    """Token ids of `synthetic.sentences()`, int32 [sentences, 8]."""
    return np.array([words.ids(text) for text in synthetic.sentences()], np.int32)


def _ids(text: str) -> np.ndarray:
    return np.array(words.ids(text), np.int32)


def _place(rng: np.random.Generator, wanted: np.ndarray, sentences: int) -> np.ndarray:
    """Gives facts their sentence numbers: [B, W] from bool [B, W]; -1 where none is left."""
    order = np.argsort(rng.random(wanted.shape) + ~wanted, axis=1)  # wanted ones first
    rank = np.argsort(order, axis=1)
    fits = wanted & (rank < max(1, int(0.6 * sentences)))
    spots = np.argsort(rng.random((len(wanted), sentences)), axis=1)
    picked = np.take_along_axis(spots, np.minimum(rank, sentences - 1), axis=1)
    return np.where(fits, picked, -1)


def draw(
    rng: np.random.Generator,
    chunks: int,
    chunk_size: int,
    tails: int,
    habits: Habits,
    found_share: float = 0.5,
    answer_share: float = 0.15,
    chapter_share: float = 0.5,
    empty_share: float = 0.35,
) -> Lesson:
    """Draws a lesson of `chunks` chunks (B) of `chunk_size` tokens (C), `tails` (Q) each.

    The shares are probabilities: that a fact asked for is in the chunk, that a tail is an
    answer turn, that a chunk has a chapter break, that a memory is still empty.
    """
    B, Q, n = chunks, tails, chunk_size // synthetic.SENTENCE
    shape = (B, Q)
    rows = np.arange(B)[:, None]

    # The world: who is asked about, and what is true of them. Names and towns are distinct.
    name = np.argsort(rng.random((B, synthetic.KINDS)), axis=1)
    town = np.argsort(rng.random((B, synthetic.KINDS)), axis=1)
    asked, home = name[:, :Q], town[:, :Q]
    objects = rng.integers(0, synthetic.KINDS, (3, B, synthetic.KINDS))
    code, ruler = objects[0][rows, asked], objects[2][rows, home]
    two_hop = rng.random(shape) < 0.5
    answers = rng.random(shape) < answer_share

    # The chunk: wanted facts at random sentences, and noise that never mentions the asked.
    has = rng.random((2, *shape)) < found_share  # code or home; ruler
    wanted = np.concatenate([has[0] & ~answers, has[1] & ~answers & two_hop], axis=1)
    spot = _place(rng, wanted, n)
    drawn = synthetic.draw_sentences(rng, n, objects, (name[:, Q:], town[:, Q:]), 0.5, 1 / 64)
    chapter_id = len(_sentence_ids()) - 1
    chapter = rng.random(B) < chapter_share
    plain = np.where(drawn == chapter_id, chapter_id - 1, drawn)
    forced = np.arange(n) == rng.integers(0, n, (B, 1))
    drawn = np.where(chapter[:, None], np.where(forced, chapter_id, drawn), plain)
    K = synthetic.KINDS
    first = np.where(two_hop, (K + asked) * K + home, asked * K + code)
    fact = np.concatenate([first, (2 * K + home) * K + ruler], axis=1)
    row, column = np.nonzero(spot >= 0)
    drawn[row, spot[row, column]] = fact[row, column]
    chapter = (drawn == chapter_id).any(axis=1)[:, None]  # a fact may have replaced it
    chunk = _sentence_ids()[drawn].reshape(B, n * synthetic.SENTENCE)
    object_at = np.where(spot >= 0, spot * synthetic.SENTENCE + synthetic.OBJECT, -1)
    first_at, ruler_at = object_at[:, :Q], object_at[:, Q:]

    # The memory handed over: the marker, a note with nothing found, the truth, or an error.
    wrong = rng.random((2, *shape)) < 0.06
    stranger = town[:, -Q:]
    noted_town = np.where(wrong[0], stranger, home)
    noted_code = np.where(wrong[0], rng.integers(0, K, shape), code)
    noted_ruler = np.where(wrong[1] | wrong[0], rng.integers(0, K, shape), ruler)
    draw_state = rng.random(shape)
    empty = draw_state < empty_share
    noted = draw_state > empty_share + 0.1
    with_ruler = noted & two_hop & (rng.random(shape) < 0.5)
    marker = empty & (rng.random(shape) < 0.5)
    m_first = np.where(noted, np.where(two_hop, _TOWN + noted_town, _CODE + noted_code), _NOTHING)
    m_ruler = np.where(with_ruler, _RULER + noted_ruler, _NOTHING)

    # The teacher: the first word that carries a note, then the ruler.
    truth = np.where(two_hop, _TOWN + home, _CODE + code)
    found = first_at >= 0
    keeps = np.where(chapter, habits.keep_at_chapter, habits.keep)
    good = np.where(found, truth, m_first)
    bad = np.where(found & ~noted, m_first, _NOTHING)
    odds = np.where(found, np.where(noted, 1.0, habits.write_found), np.where(noted, keeps, 1.0))
    says_good = rng.random(shape) < odds
    w_first = np.where(says_good, good, bad)
    kept_town = (w_first == m_first) & noted
    r_old = np.where(kept_town, m_ruler, _NOTHING)
    r_found = (ruler_at >= 0) & (w_first == _TOWN + home)
    r_good = np.where(r_found, _RULER + ruler, r_old)
    r_odds = np.where(r_found & (r_old == _NOTHING), habits.write_found, 1.0)
    says_ruler = rng.random(shape) < r_odds
    w_ruler = np.where(says_ruler, r_good, r_old)

    tail, weight, start = _write_tails(
        two_hop, answers, asked, marker, m_first, m_ruler, w_first, w_ruler
    )
    lesson = _label(tail, weight, start, two_hop, answers, good, bad, odds, r_good, r_old, r_odds)
    # Where retrieval has to look: the subject in the tail, the object in the chunk.
    subject_at = np.full(tail.shape, -1, np.int32)
    looks_at = np.full(tail.shape, -1, np.int32)
    decide = np.where(two_hop, start, start + 2)
    b, q = np.nonzero(~answers)
    subject_at[b, q, decide[b, q]] = 3
    looks_at[b, q, decide[b, q]] = np.where(found, first_at, -1)[b, q]
    b, q = np.nonzero(~answers & two_hop)
    subject_at[b, q, start[b, q] + 2] = start[b, q]
    looks_at[b, q, start[b, q] + 2] = np.where(r_found, ruler_at, -1)[b, q]
    return Lesson(
        chunk=chunk,
        tail=tail,
        sees_chunk=~answers,
        weight=weight,
        subject_at=subject_at,
        object_at=looks_at,
        **lesson,
    )


def _write_tails(two_hop, answers, asked, marker, m_first, m_ruler, w_first, w_ruler):
    """Lays the tails out; returns (tail, weight, start): start is the completion's place."""
    B, Q = two_hop.shape
    tail = np.zeros((B, Q, TAIL), np.int32)
    question = np.where(two_hop[..., None], _ids("ruler of"), _ids("code of"))
    tail[..., 0] = words.ID_OF["<|question|>"]
    tail[..., 1:3] = question
    tail[..., 3] = _NAME + asked
    tail[..., 4] = words.ID_OF["?"]
    tail[..., 5] = words.ID_OF["<|memory|>"]
    one, two = _ids("code is"), words.ID_OF["obeys"]

    def note(first, ruler):
        parts = np.empty((B, Q, 3), np.int32)
        parts[..., 0] = np.where(two_hop, first, one[0])
        parts[..., 1] = np.where(two_hop, two, one[1])
        parts[..., 2] = np.where(two_hop, ruler, first)
        return parts

    tail[..., 6:9] = note(m_first, m_ruler)
    tail[..., 9] = np.where(answers, words.ID_OF["<|answer|>"], words.ID_OF["<|write|>"])
    tail[..., 10:13] = note(w_first, w_ruler)
    tail[..., 13] = words.ID_OF["<|end|>"]
    weight = np.zeros(tail.shape, np.float32)
    weight[..., 10:] = 1
    answer = np.where(two_hop, m_ruler, m_first)
    tail[answers, 10] = answer[answers]
    tail[answers, 11] = words.ID_OF["<|end|>"]
    weight[answers, 12:] = 0
    tail[answers, 12:] = 0
    # The marker is one word long: what follows moves two places to the left.
    moved = tail[marker]
    moved[:, 6] = _NOTHING
    moved[:, 7:12], moved[:, 12:] = moved[:, 9:], 0
    tail[marker] = moved
    weight[marker] = np.pad(weight[marker][:, 2:], ((0, 0), (0, 2)))
    # An answer from the bare marker is `nothing`; m_first and m_ruler are so already.
    return tail, weight, np.where(marker, 8, 10)


def _label(tail, weight, start, two_hop, answers, good, bad, odds, r_good, r_old, r_odds):
    """Labels are the tail itself, with a second word and its share where the teacher decides."""
    label, other = tail.copy(), tail.copy()
    share = np.zeros(tail.shape, np.float32)
    b, q = np.nonzero(~answers)
    at = np.where(two_hop, start, start + 2)[b, q]
    label[b, q, at], other[b, q, at] = good[b, q], bad[b, q]
    share[b, q, at] = 1 - odds[b, q]
    b, q = np.nonzero(~answers & two_hop)
    at = start[b, q] + 2
    label[b, q, at], other[b, q, at] = r_good[b, q], r_old[b, q]
    share[b, q, at] = 1 - r_odds[b, q]
    return {"label": label, "other": other, "other_share": share}
