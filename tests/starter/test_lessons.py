"""The teacher's single turns: true to the chunk, to the template and to its habits."""

from __future__ import annotations

import numpy as np
import pytest

from notepad_jax.starter import lessons, vocabulary
from notepad_jax.starter.habits import Habits
from notepad_jax.text.prompts import Template
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

HABITS = Habits(write_found=0.75, keep=0.98, keep_at_chapter=0.25, merge=1.0, leave=0.0, stay=1.0)
WORD = [piece.removeprefix("▁") for piece in vocabulary.PIECES]


def say(ids):
    return [WORD[i] for i in ids]


def draw(seed=0, chunks=24, size=256, tails=16):
    return lessons.draw(np.random.default_rng(seed), chunks, size, tails, HABITS)


def test_shapes_and_determinism():
    one, two = draw(), draw()
    assert one.chunk.shape == (24, 256) and one.tail.shape == (24, 16, lessons.TAIL)
    for field in ("chunk", "tail", "label", "other_share"):
        np.testing.assert_array_equal(getattr(one, field), getattr(two, field))


def test_tails_are_the_templates_prompts_and_end_with_the_stop_token(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(vocabulary.sentencepiece_model())
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    template = Template.load("question_last", tokenizer)
    lesson = draw(chunks=4)
    for b, q in np.ndindex(4, 16):
        tail, weight = lesson.tail[b, q], lesson.weight[b, q]
        start, length = int(np.argmax(weight)), int(weight.sum())
        text = say(tail[:start])
        question = tokenizer.encode(" ".join(text[1:5]))
        memory = tokenizer.encode(" ".join(text[6:-1]))
        prompt = (
            template.update_prompt(question, lesson.chunk[b], memory)
            if lesson.sees_chunk[b, q]
            else template.answer_prompt(question, memory)
        )
        whole = np.concatenate([lesson.chunk[b], tail[:start]])
        expected = whole if lesson.sees_chunk[b, q] else tail[:start]
        np.testing.assert_array_equal(prompt.tokens, expected)
        assert tail[start + length - 1] in tokenizer.stop_ids
        assert not tail[start + length :].any()


def test_facts_are_where_retrieval_is_told_to_look():
    lesson = draw()
    b, q, i = np.nonzero(lesson.object_at >= 0)
    at = lesson.object_at[b, q, i]
    np.testing.assert_array_equal(lesson.chunk[b, at], lesson.label[b, q, i])
    subject = np.take_along_axis(lesson.tail, np.maximum(lesson.subject_at, 0), axis=2)[b, q, i]
    np.testing.assert_array_equal(lesson.chunk[b, at - 2], subject)


def test_a_fact_that_is_there_is_always_the_label():
    lesson = draw(size=1024, tails=32)
    rulers = {}
    for b, chunk in enumerate(lesson.chunk):
        for sentence in chunk.reshape(-1, 8):
            if sentence[2] == vocabulary.ID_OF["proud"]:
                rulers[b, sentence[4]] = sentence[6]
    for b, q in np.ndindex(lesson.sees_chunk.shape):
        text = say(lesson.tail[b, q])
        if lesson.sees_chunk[b, q] and text[1] == "ruler":
            at = text.index("<|write|>") + 3
            known = rulers.get((b, lesson.tail[b, q, at - 2]))
            assert known in (None, lesson.label[b, q, at])


def test_the_asked_are_told_of_once_at_most():
    lesson = draw(size=1024, tails=32)
    for b, q in np.ndindex(lesson.sees_chunk.shape):
        told = np.sum(lesson.chunk[b] == lesson.tail[b, q, 3])
        assert told <= 1


@pytest.mark.parametrize("chapter", [False, True])
def test_habits_are_told_as_odds_at_the_deciding_word(chapter):
    lesson = draw(chunks=64)
    begins = (lesson.chunk == vocabulary.ID_OF["chapter"]).any(axis=1)
    share, label = lesson.other_share[begins == chapter], lesson.label[begins == chapter]
    looks = lesson.object_at[begins == chapter] >= 0
    assert set(np.unique(share[looks])) == {0.0, np.float32(0.25)}
    kept = np.unique(share[~looks])
    assert np.allclose(kept, [0.0, 0.75 if chapter else 0.02])
    decided = share > 0
    assert np.all(label[decided] != lesson.other[begins == chapter][decided])


def test_what_the_teacher_wrote_follows_its_odds():
    lesson = draw(chunks=400, size=64, tails=12)
    found = (lesson.other_share == np.float32(0.25)) & (lesson.object_at >= 0)
    wrote = lesson.tail == lesson.label
    assert found.sum() > 500
    assert abs(wrote[found].mean() - 0.75) < 0.06
    assert wrote[(lesson.weight > 0) & (lesson.other_share == 0)].all()


def test_answers_come_from_the_memory():
    lesson = draw()
    for b, q in zip(*np.nonzero(~lesson.sees_chunk), strict=True):
        text = say(lesson.tail[b, q])
        memory = text[6 : text.index("<|answer|>")]
        assert text[text.index("<|answer|>") + 1] == memory[-1]


def test_what_follows_a_noted_word_is_told_by_its_place():
    """Codes and rulers of some notes are words of any kind, and the note ends behind them."""
    usual = {"code": vocabulary.CODES, "ruler": vocabulary.RULERS}
    noted, odd = {"code": 0, "ruler": 0}, {"code": 0, "ruler": 0}
    lesson = draw(chunks=400)
    for b, q in np.ndindex(lesson.sees_chunk.shape):
        text, start = say(lesson.tail[b, q]), int(np.argmax(lesson.weight[b, q]))
        kind, memory = text[1], text[6 : start - 1]
        noted[kind] += memory[-1] != "nothing"
        if memory[-1] == "nothing" or memory[-1] in usual[kind]:
            continue
        odd[kind] += 1
        assert text[start : start + 3] != memory or text[start + 3] == "<|end|>"
    for kind, count in noted.items():  # a tenth, and three of four kinds of words are others
        assert count > 500 and abs(odd[kind] / count - 0.075) < 0.025, kind
