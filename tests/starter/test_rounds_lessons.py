"""The teacher of readings in rounds: true to chunk and template, and right when read with."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from notepad_jax.reading import memory_agent
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.setup import configuration
from notepad_jax.starter import rounds_lessons, synthetic, vocabulary
from notepad_jax.starter.habits import Habits
from notepad_jax.text.prompts import Template
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from notepad_jax.types import Completion, Finish, tokens

GOOD = Habits(write_found=1.0, keep=1.0, keep_at_chapter=1.0, merge=1.0, leave=0.0, stay=1.0)
BAD = Habits(write_found=0.75, keep=0.9, keep_at_chapter=0.25, merge=0.65, leave=0.0, stay=1.0)
ID = vocabulary.ID_OF
KINDS = pytest.mark.parametrize("size, notes", [(64, False), (256, False), (15, True), (63, True)])


@pytest.fixture(scope="module")
def language(tmp_path_factory):
    path = tmp_path_factory.mktemp("starter") / "tokenizer.model"
    path.write_bytes(vocabulary.sentencepiece_model())
    tokenizer = SentencePieceTokenizer(path)
    return tokenizer, Template.load("question_last", tokenizer)


def draw(size, notes, habits=BAD, seed=0):
    return rounds_lessons.draw(np.random.default_rng(seed), 6, size, 8, habits, notes)


def parts(prompt):
    """The chunk, the question and the memory of a prompt's ids, and whether it asks to write."""
    asked, shown = prompt.index(ID["<|question|>"]), prompt.index(ID["<|memory|>"])
    writes = prompt[-1] == ID["<|write|>"]
    return prompt[:asked], prompt[asked + 1 : shown], tuple(prompt[shown + 1 : -1]), writes


class Teacher:
    """A completer that says what the teacher would."""

    def __init__(self, habits):
        self.habits, self.rng, self.merged = habits, np.random.default_rng(0), 0

    async def complete(self, prompt, params):
        chunk, question, memory, writes = parts(prompt.tokens.tolist())
        truth = [question[2], ID["is"], 0]
        if question[0] == ID["ruler"]:
            truth = [question[2], ID["inhabits"], 0, ID["obeys"], 0]
        asked = rounds_lessons.NotedQuestion(question[0], question[2], tuple(truth))
        if not writes:
            said = [rounds_lessons.answer_to(asked, memory), ID["<|end|>"]]
        else:
            facts, notes = rounds_lessons.facts_of(np.array(chunk)), len(chunk) % 2 == 1
            self.merged += notes
            written = rounds_lessons.update(
                self.rng, asked, memory, facts, self.habits, False, notes
            )
            said = [word.said for word in written]
        return Completion(tokens(said), np.zeros(len(said), np.float32), Finish.STOP, 0)


def answers(language, teacher, tasks, passes=2, order="parallel"):
    """What a reading of each document by `teacher` ends with, in words."""
    tokenizer, template = language
    rules = Rules(8, 64, 6, 4, "overwrite_or_keep", order=order, passes=passes)
    sampling = TurnSampling(1.0, 1.0, tokenizer.stop_ids, 0)

    async def one(task):
        ids = tokenizer.encode("".join(task.document.pieces()))
        chunks = [ids[i : i + 64] for i in range(0, len(ids), 64)]
        state = memory_agent.start(tokenizer.encode(task.question), chunks)
        async for _, after in memory_agent.read(teacher, template, rules, state, sampling):
            state = after
        return tokenizer.decode(memory_agent.answered(state)).strip()

    return [asyncio.run(one(task)) for task in tasks]


def tasks(two_hop=0.5, tokens=2048):
    return [
        task for seed in range(4) for task in synthetic.make_tasks(seed, tokens, 8, two_hop=two_hop)
    ]


@KINDS
def test_tails_are_the_templates_prompts_and_end_with_the_stop_token(language, size, notes):
    lesson = draw(size, notes)
    assert lesson.chunk.shape == (6, size) and lesson.tail.shape == (6, 8, rounds_lessons.TAIL)
    for b, q in np.ndindex(6, 8):
        tail, weight = lesson.tail[b, q], lesson.weight[b, q]
        start, length = int(np.argmax(weight)), int(weight.sum())
        _, question, memory, _ = parts(tail[:start].tolist())
        sees = lesson.sees_chunk[b, q]
        chunk, template = lesson.chunk[b], language[1]
        asked = tokens(question), tokens(memory)
        prompt = (
            template.update_prompt(asked[0], chunk, asked[1])
            if sees
            else template.answer_prompt(*asked)
        )
        before = chunk if sees else chunk[:0]
        np.testing.assert_array_equal(prompt.tokens, np.concatenate([before, tail[:start]]))
        assert tail[start + length - 1] == ID["<|end|>"] and not tail[start + length :].any()


@KINDS
def test_heads_are_told_of_a_subject_and_of_the_word_two_places_behind_it(size, notes):
    lesson = draw(size, notes)
    b, q, i = np.nonzero(lesson.object_at >= 0)
    subject = lesson.tail[b, q, lesson.subject_at[b, q, i]]
    np.testing.assert_array_equal(lesson.chunk[b, lesson.object_at[b, q, i] - 2], subject)
    assert (lesson.subject_at[b, q, i] < i).all()


@KINDS
def test_a_word_is_the_teachers_or_what_it_might_have_said(size, notes):
    lesson = draw(size, notes)
    spoken = lesson.weight > 0
    said, sure = lesson.tail[spoken], lesson.other_share[spoken] == 0
    label, other = lesson.label[spoken], lesson.other[spoken]
    assert ((said == label) | (said == other)).all() and (said == label)[sure].all()
    assert (said == other)[~sure].any() and (said == label)[~sure].any()


def test_habits_are_as_often_bad_as_they_say():
    drawn = [draw(63, True, dataclasses.replace(BAD, merge=0.5), seed) for seed in range(8)]
    first = [(x.other_share == 0.5) & (x.weight > 0) for x in drawn]
    written = [x.tail[at] == x.label[at] for x, at in zip(drawn, first, strict=True)]
    assert 0.35 < np.concatenate(written).mean() < 0.65


def test_a_good_teacher_answers_everything_in_two_rounds(language):
    asked = tasks()
    assert answers(language, Teacher(GOOD), asked) == [task.answers[0] for task in asked]


def test_a_question_of_two_facts_needs_the_second_round(language):
    asked = [task for task in tasks(two_hop=1.0) if task.answers[0] != "nothing"]
    said = answers(language, Teacher(GOOD), asked, passes=1)
    right = [a == task.answers[0] for a, task in zip(said, asked, strict=True)]
    assert np.mean(right) < 0.5  # only where both stand in one chunk


def test_a_serial_reading_in_the_same_language_needs_one_pass(language):
    asked = tasks()
    said = answers(language, Teacher(GOOD), asked, passes=1, order="serial")
    assert said == [task.answers[0] for task in asked]


def test_who_notes_everything_and_merges_well_is_right(language):
    asked = [task for task in tasks(two_hop=0.0, tokens=8192) if task.answers[0] != "nothing"]
    teacher = Teacher(dataclasses.replace(GOOD, keep=0.3))
    # Of 128 chunks most are noted, and a chunk of 64 tokens holds 16 notes.
    said = answers(language, teacher, asked, passes=1)
    assert said == [task.answers[0] for task in asked] and teacher.merged > 2 * len(asked)


def test_who_drops_notes_is_wrong(language):
    asked = [task for task in tasks(two_hop=0.0) if task.answers[0] != "nothing"]
    teacher = Teacher(dataclasses.replace(GOOD, keep=0.3, merge=0.0))
    said = answers(language, teacher, asked, passes=1)
    assert np.mean([a == task.answers[0] for a, task in zip(said, asked, strict=True)]) < 0.2


def test_notes_side_by_side_have_an_odd_number_of_tokens():
    with pytest.raises(ValueError, match="have 64 tokens; .* use 63 or 65"):
        draw(64, True)


def test_the_configs_read_what_the_lessons_teach(language):
    config, starter = configuration.load("rounds"), configuration.load("starter_rounds")
    assert starter.rounds and any(lesson.notes for lesson in starter.lessons)
    assert config.policy == starter.folder and config.reading.order == "parallel"
    longest = rounds_lessons.TAIL - len("<|question|> code of Ada ? <|memory|> <|write|>".split())
    assert 2 * config.reading.max_memory - 1 == longest  # a memory and a note, one stop token


def test_it_leaves_early_in_the_two_ways_and_as_often_as_its_habits_say():
    habits = dataclasses.replace(GOOD, leave=0.4, stay=0.8)
    whole = (ID["Hugo"], ID["is"], ID["amber"])
    asked = rounds_lessons.NotedQuestion(ID["code"], ID["Hugo"], whole)
    rng, said = np.random.default_rng(0), {}
    for memory in (whole, (rounds_lessons.NOTHING,)):
        words = [
            rounds_lessons.update(rng, asked, memory, {}, habits, False, False) for _ in range(4000)
        ]
        assert all(one[-1].said == rounds_lessons.END and len(one) == 2 for one in words)
        said[memory] = np.mean([one[0].said == rounds_lessons.ANSWER for one in words])
    assert said[whole] == pytest.approx(0.5 * 0.4, abs=0.02)
    assert said[rounds_lessons.NOTHING,] == pytest.approx(0.5 * 0.2, abs=0.02)
    notes = [rounds_lessons.update(rng, asked, whole, {}, habits, False, True) for _ in range(99)]
    assert all(one[0].said != rounds_lessons.ANSWER for one in notes)  # none is left while merging


def test_the_marker_that_it_leaves_by_is_the_templates(language):
    _, template = language
    assert template.exit.tolist() == [rounds_lessons.ANSWER]
    assert not configuration.load("starter", []).habits.leave
    config = configuration.load("exits", [])
    config.reading.rules().check(template)
