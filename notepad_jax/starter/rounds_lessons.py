"""Lessons for reading in rounds: single turns, by the same forgetful teacher as `lessons`.

What is noted is said so that it can be read again as a chunk: each word found stands two places
behind what it is about, as in the sentences of a document, and `.` stands between notes:

    chunk    <|question|> code of Hugo ?  <|memory|> nothing <|write|>  Hugo is amber <|end|>
    chunk    <|question|> code of Hugo ?  <|memory|> Hugo is amber <|write|>  <|keep|> <|end|>
    chunk    <|question|> ruler of Nora ? <|memory|> Nora inhabits Selby <|write|>
                                            Nora inhabits Selby obeys Isolde <|end|>
    Otto is pepper . Hugo is amber
             <|question|> code of Hugo ?  <|memory|> nothing <|write|>  Hugo is amber <|end|>

So to merge notes is to read them: what is wanted and not known yet is taken over, the rest is left.
The teacher finds and copies right; its habits are bad. A fact found is passed over with 1 -
`write_found`, and one among notes dropped with 1 - `merge`; a chunk with nothing new is answered
by the keep marker, but with 1 - `keep` (`keep_at_chapter`, where a chapter begins) by `nothing`,
which forgets, or by a note about another name. With `leave` above 0 it knows the exit marker, too
(`<|answer|>`, of a serial reading): it leaves with `leave` where the memory has all that is asked,
and with 1 - `stay` where something is missing. Below: lessons; above: programs.warmup.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from notepad_jax.starter import lessons, synthetic
from notepad_jax.starter import vocabulary as words
from notepad_jax.starter.habits import Habits
from notepad_jax.starter.lessons import AskedFacts, Lesson

TAIL = 18  # <|question|> 4 words <|memory|> 5 words <|write|> 5 words <|end|>
STRANGE = 0.08  # of the memories without a note about the asked: one about another name
_NAME, _TOWN, _CODE, _RULER = (
    words.ID_OF[group[0]] for group in (words.NAMES, words.TOWNS, words.CODES, words.RULERS)
)
IS, INHABITS, OBEYS, _OBEY = (words.ID_OF[word] for word in "is inhabits obeys obey".split())
NOTHING, BETWEEN = words.ID_OF[synthetic.NOTHING], words.ID_OF["."]
# `<|answer|>` ends the prompt of an answer turn, and as all of a completion leads to it.
KEEP, END, WRITE, ANSWER = (
    words.ID_OF[f"<|{word}|>"] for word in ("keep", "end", "write", "answer")
)
_VERBS = {IS: IS, INHABITS: INHABITS, OBEYS: OBEYS, _OBEY: OBEYS}

Note = tuple[int, ...]  # ids
Facts = dict[tuple[int, int], tuple[int, int]]  # (verb, subject) -> (object, place in the chunk)


@dataclasses.dataclass(frozen=True)
class NotedQuestion:
    """A question, and the words of its whole note: subject, verb, object (verb, object)."""

    asks: int
    name: int
    truth: Note

    @property
    def verbs(self) -> Note:
        return self.truth[1::2]


@dataclasses.dataclass(frozen=True)
class Word:
    """A word of a completion, what else the teacher might have said, and where it looked."""

    good: int
    bad: int
    odds: float = 1.0  # of `good`
    written: int = -1  # what it said; -1: `good`
    subject: int = -1  # place in the tail; completions count from their own beginning: see `OWN`
    found: int = -1  # place in the chunk

    @property
    def said(self) -> int:
        return self.good if self.written < 0 else self.written


OWN = 100  # `Word.subject` of the completion's first word; of its third, OWN + 2


def draw(
    rng: np.random.Generator,
    chunks: int,
    chunk_size: int,
    tails: int,
    habits: Habits,
    notes: bool = False,
) -> Lesson:
    """Draws a lesson, as `lessons.draw` does; with `notes`, its chunks are notes side by side.

    Raises ValueError for notes of an even number of tokens, which no notes side by side have.
    """
    asked = lessons.ask(rng, chunks, tails, answer_share=0.25)
    chunk = _notes(rng, asked, chunk_size) if notes else _text(rng, asked, chunk_size)
    tail = np.zeros((chunks, tails, TAIL), np.int32)
    start, length = np.zeros((2, chunks, tails), int)
    completions = {}
    for b in range(chunks):
        facts = facts_of(chunk[b])
        chapter = not notes and words.ID_OF["chapter"] in chunk[b]
        for q in range(tails):
            question, answers = _question(asked, b, q), bool(asked.answers[b, q])
            memory = _memory(rng, asked, question, b)
            prompt = [words.ID_OF["<|question|>"], question.asks, words.ID_OF["of"], question.name]
            prompt += [words.ID_OF["?"], words.ID_OF["<|memory|>"], *memory]
            prompt.append(ANSWER if answers else WRITE)
            said = (
                [Word(word, word) for word in (answer_to(question, memory), END)]
                if answers
                else update(rng, question, memory, facts, habits, chapter, notes)
            )
            row = [*prompt, *(word.said for word in said)]
            tail[b, q, : len(row)] = row
            start[b, q], length[b, q] = len(prompt), len(said)
            completions[b, q] = said
    lesson = lessons.undecided(chunk, tail, ~asked.answers, start, length)
    for (b, q), said in completions.items():
        for i, word in enumerate(said, start[b, q]):
            lesson.label[b, q, i], lesson.other[b, q, i] = word.good, word.bad
            lesson.other_share[b, q, i] = 1 - word.odds
            own = word.subject >= OWN
            lesson.subject_at[b, q, i] = word.subject + (start[b, q] - OWN if own else 0)
            lesson.object_at[b, q, i] = word.found
    return lesson


# ---------------------------------------------------------------- what is asked, and told


def _question(asked: AskedFacts, b: int, q: int) -> NotedQuestion:
    name, town = _NAME + int(asked.name[b, q]), _TOWN + int(asked.town[b, q])
    if asked.two_hop[b, q]:
        truth = (name, INHABITS, town, OBEYS, _RULER + int(asked.ruler[b, q]))
        return NotedQuestion(words.ID_OF["ruler"], name, truth)
    return NotedQuestion(words.ID_OF["code"], name, (name, IS, _CODE + int(asked.code[b, q])))


def _memory(rng: np.random.Generator, asked: AskedFacts, question: NotedQuestion, b: int) -> Note:
    """Nothing, or a part of the truth, or all of it, or (seldom) a note about another name."""
    if rng.random() < 0.55:
        return question.truth[: int(rng.choice([3, 3, len(question.truth)]))]
    if rng.random() < STRANGE:
        return _stranger(rng, asked, b, len(question.truth) > 3)
    return (NOTHING,)


def _stranger(rng: np.random.Generator, asked: AskedFacts, b: int, home: bool) -> Note:
    """A note about a name that no question is about."""
    who = int(rng.choice(asked.others[0][b]))
    if not home:
        return (_NAME + who, IS, _CODE + int(asked.objects[0][b, who]))
    town = int(asked.objects[1][b, who])
    ruler = (OBEYS, _RULER + int(asked.objects[2][b, town])) if rng.random() < 0.3 else ()
    return (_NAME + who, INHABITS, _TOWN + town, *ruler)


def _text(rng: np.random.Generator, asked: AskedFacts, size: int) -> np.ndarray:
    return lessons.write_chunk(rng, asked, size, found_share=0.4, chapter_share=0.5).tokens


def _notes(rng: np.random.Generator, asked: AskedFacts, size: int) -> np.ndarray:
    """Chunks of exactly `size` tokens, int32 [B, size], as `rounds.packed` makes them."""
    if size % 2 == 0:
        raise ValueError(
            f"a lesson's chunks of notes have {size} tokens; notes side by side have an odd "
            f"number of them: use {size - 1} or {size + 1}"
        )
    return np.array([_side_by_side(rng, asked, b, size) for b in range(len(asked.name))], np.int32)


def _side_by_side(rng: np.random.Generator, asked: AskedFacts, b: int, size: int) -> list[int]:
    own = list(_told(rng, asked, b))
    own = [own[i] for i in rng.permutation(len(own))]
    chosen: list[Note] = []
    room = size + 1
    while room >= 4:
        note = own.pop() if own and rng.random() < 0.7 else ()
        if not note or len(note) + 1 > room:
            note = _stranger(rng, asked, b, room >= 6 and rng.random() < 0.5)
        chosen.append(note)
        room -= len(note) + 1
    chosen += [(NOTHING,)] * (room // 2)
    shuffled = [chosen[i] for i in rng.permutation(len(chosen))]
    return [word for note in shuffled for word in (*note, BETWEEN)][:-1]


def _told(rng: np.random.Generator, asked: AskedFacts, b: int) -> Iterator[Note]:
    """What the asked are noted with: the truth, or its first fact, or both beside each other."""
    for q in range(asked.name.shape[1]):
        question = _question(asked, b, q)
        part = question.truth[: int(rng.choice([3, len(question.truth)]))]
        yield part
        if len(part) > 3 and rng.random() < 0.2:
            yield part[:3]


def facts_of(chunk: np.ndarray) -> Facts:
    """Returns what a chunk tells, of sentences or of notes."""
    ids = chunk.tolist()
    return {
        (_VERBS[ids[i]], ids[i - 1]): (ids[i + 1], i + 1)
        for i in range(1, len(ids) - 1)
        if ids[i] in _VERBS
    }


# ---------------------------------------------------------------- the teacher


def known(question: NotedQuestion, memory: Note) -> int:
    """Returns how many of a question's facts the memory has."""
    return len(memory) // 2 if memory[0] == question.name else 0


def answer_to(question: NotedQuestion, memory: Note) -> int:
    """Returns the answer from a memory: `nothing` where it has not all that is needed."""
    return memory[-1] if known(question, memory) == len(question.verbs) else NOTHING


def note_of(question: NotedQuestion, memory: Note, facts: Facts) -> list[tuple[int, int, int]]:
    """Returns what is known after a chunk: (verb, object, where in the chunk, or -1) of each."""
    chain, subject = [], question.name
    for hop, verb in enumerate(question.verbs):
        if hop < known(question, memory):
            thing, place = memory[2 * hop + 2], -1
        elif (verb, subject) in facts:
            thing, place = facts[verb, subject]
        else:
            break
        chain.append((verb, thing, place))
        subject = thing
    return chain


def update(
    rng: np.random.Generator,
    question: NotedQuestion,
    memory: Note,
    facts: Facts,
    habits: Habits,
    chapter: bool,
    notes: bool,
) -> list[Word]:
    """Returns what the teacher writes, word by word, the stop token last."""
    chain, before = note_of(question, memory, facts), known(question, memory)
    if len(chain) == before:
        missing = before < len(question.verbs)
        if habits.leave and not notes and rng.random() < 0.5:  # else another bad habit
            return [_leaving(rng, habits, missing), Word(END, END)]
        return _nothing_new(rng, question, facts, habits, chapter, notes)
    found = chain[before][2]
    # What is looked for: the asked, or, in a note begun, the town at its end.
    looks = dict(subject=5 + len(memory) if before else 3, found=found)
    odds, bad = (habits.merge, NOTHING) if notes else (habits.write_found, KEEP)
    if rng.random() >= odds:
        return [Word(question.name, bad, odds, bad, **looks), Word(END, END)]
    first = Word(question.name, bad, odds, **looks)
    return [first, *_chain(rng, chain, before, odds)]


def _chain(
    rng: np.random.Generator, chain: list[tuple[int, int, int]], before: int, odds: float
) -> Iterator[Word]:
    """Yields the words behind the first; the second new fact may be passed over, too."""
    for hop, (verb, thing, place) in enumerate(chain):
        if hop > before:
            looks = dict(subject=OWN + 2 * hop, found=place)
            if rng.random() >= odds:
                yield Word(verb, END, odds, END, **looks)
                return
            yield Word(verb, END, odds, **looks)
        else:
            yield Word(verb, verb)
        yield (
            Word(thing, thing, subject=OWN + 2 * hop, found=place)
            if place >= 0
            else Word(thing, thing)
        )
    yield Word(END, END)


def _leaving(rng: np.random.Generator, habits: Habits, missing: bool) -> Word:
    """The keep marker, or the exit marker: a bad habit only where something is `missing`."""
    odds = habits.stay if missing else 1 - habits.leave
    return Word(KEEP, ANSWER, odds, KEEP if rng.random() < odds else ANSWER)


def _nothing_new(
    rng: np.random.Generator,
    question: NotedQuestion,
    facts: Facts,
    habits: Habits,
    chapter: bool,
    notes: bool,
) -> list[Word]:
    """The keep marker; of bad habit `nothing`, or a note about another name."""
    odds = habits.keep_at_chapter if chapter else habits.keep
    others = [
        (who, *told) for (verb, who), told in facts.items()
        if verb == question.verbs[0] and who != question.name
    ]  # fmt: skip
    if chapter or notes or not others or rng.random() < 0.5:
        written = KEEP if rng.random() < odds else NOTHING
        return [Word(KEEP, NOTHING, odds, written), Word(END, END)]
    who, thing, place = others[rng.integers(len(others))]
    if rng.random() < odds:
        return [Word(KEEP, who, odds), Word(END, END)]
    first = Word(KEEP, who, odds, who)
    verb, end = question.verbs[0], Word(END, END)
    return [first, Word(verb, verb), Word(thing, thing, subject=OWN, found=place), end]
