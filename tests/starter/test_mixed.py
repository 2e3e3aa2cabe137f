"""Questions of four kinds: right by whoever reads the document, as lessons, and worth 1 as gold."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from notepad_jax.scoring import metrics
from notepad_jax.starter import mixed, mixed_lessons, synthetic, vocabulary
from notepad_jax.starter.habits import Habits
from notepad_jax.text.prompts import Template
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

KINDS = tuple(mixed.OF_NAME)
HABITS = Habits(write_found=0.75, keep=0.98, keep_at_chapter=0.25, merge=1.0, leave=0.0, stay=1.0)
WORD = [piece.removeprefix("▁") for piece in vocabulary.PIECES]


def make(seed, tokens=512, questions=4, **more):
    return mixed.make_tasks(seed, tokens, questions, KINDS, two_hop=0.0, **more)


def read(text):
    """What a document says of everybody, by the words of its sentences alone."""
    found = collections.defaultdict(lambda: collections.defaultdict(list))
    for number, sentence in enumerate(text.removesuffix(" .").split(" . ")):
        match sentence.split():
            case ["the", "secret", "code", "of", name, "is", code]:
                found[name]["code"].append((number, code))
            case ["later", "on", "the", "market", name, "sold", thing]:
                found[name]["market"].append((number, thing))
            case ["later", "on", "that", "evening", name, "sang", "songs"]:
                found[name]["songs"].append((number, "songs"))
            case ["for", "many", "years", "now", name, "inhabits", town]:
                found[name]["story"].append((number, town))
    return found


def answer(asks, facts):
    if not facts:
        return ("nothing",)
    things = tuple(thing for _, thing in facts)
    return (str(len(things)),) if asks == "songs" else things


@pytest.mark.parametrize("tokens", [128, 512, 4096])
def test_answers_are_what_a_reader_of_the_document_finds(tokens):
    seen = collections.Counter()
    for seed in range(40):
        tasks = make(seed, tokens)
        text = "".join(tasks[0].document.pieces())
        assert len(vocabulary.ids(text)) == tokens
        said = read(text)
        for task in tasks:
            asks, _, name, _ = task.question.split()
            assert set(said[name]) <= {asks}  # nobody tells anything else of who is asked about
            facts = said[name][asks]
            assert task.answers == answer(asks, facts)
            stretches = [number // mixed.STRETCH for number, _ in facts]
            assert len(set(stretches)) == len(stretches)
            seen[task.source, len(facts)] += 1
    assert {source for source, _ in seen} == {f"synthetic/{kind}" for kind in KINDS}
    most = 2 if tokens == 128 else 4  # a document of two stretches has no more
    assert max(count for _, count in seen) == most and any(not count for _, count in seen)


def test_gold_answers_are_worth_one_and_parts_of_them_less():
    worth = collections.defaultdict(set)
    for task in (task for seed in range(60) for task in make(seed)):
        metrics.check_gold(task.answers, task.metric)
        silence = metrics.score("nothing", task.answers, task.metric, task.contract).value
        assert silence == (task.answers == ("nothing",))
        if len(task.answers) > 1:
            first = metrics.score(task.answers[0], task.answers, task.metric, task.contract)
            worth[task.metric].add(round(first.value, 3))
    assert worth == {"set_f1": {0.667, 0.5}, "pairwise": {0.0}}


def test_a_shorter_document_has_the_same_questions():
    for seed in range(10):
        assert [t.question for t in make(seed, 128)] == [t.question for t in make(seed, 512)]


def test_without_kinds_the_questions_are_the_quick_starts():
    ours = mixed.make_tasks(3, 512, 4, (), 0.2, 0.5)
    assert ours == synthetic.make_tasks(3, 512, 4, 0.2, 0.5)


@pytest.mark.parametrize(
    "kinds, two_hop, questions, problem",
    [
        (("exact", "ordre"), 0.0, 4, "data.kinds has 'ordre'; use some of exact, list, count"),
        (("exact",), 0.5, 4, "data.two_hop is 0.5.*set data.two_hop=0"),
        (("exact",), 0.0, 99, "99 questions about one document"),
        (("list",), 0.0, 30, "do not fit into a document of 16 sentences"),
    ],
)
def test_what_cannot_be_asked_is_refused(kinds, two_hop, questions, problem):
    with pytest.raises(ValueError, match=problem):
        mixed.make_tasks(0, 128, questions, kinds, 0.0, two_hop)


# ---------------------------------------------------------------- lessons


def draw(seed=0, chunks=24, size=64, tails=12):
    return mixed_lessons.draw(np.random.default_rng(seed), chunks, size, tails, HABITS)


def test_tails_are_the_templates_prompts_and_answers_the_lists_of_the_metric(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(vocabulary.sentencepiece_model())
    tokenizer = SentencePieceTokenizer(tmp_path / "tokenizer.model")
    template = Template.load("question_last", tokenizer)
    lesson = draw(chunks=8)
    lists = 0
    for b, q in np.ndindex(lesson.sees_chunk.shape):
        tail, weight = lesson.tail[b, q], lesson.weight[b, q]
        start, length = int(np.argmax(weight)), int(weight.sum())
        question, memory = tail[1:5], tail[6 : start - 1]
        np.testing.assert_array_equal(
            tokenizer.encode(" ".join(WORD[i] for i in question)), question
        )
        whole = np.concatenate([lesson.chunk[b], tail[:start]])
        sees = lesson.sees_chunk[b, q]
        prompt = template.update_prompt if sees else template.answer_prompt
        given = (question, lesson.chunk[b], memory) if sees else (question, memory)
        np.testing.assert_array_equal(prompt(*given).tokens, whole if sees else tail[:start])
        assert tail[start + length - 1] in tokenizer.stop_ids
        assert not tail[start + length :].any()
        if not sees:
            noted = [WORD[i] for i in memory if WORD[i] != "nothing"] or ["nothing"]
            noted = [str(int(word[3:-1], 16) - 0x30) if "<" in word else word for word in noted]
            said = tokenizer.decode(tail[start : start + length])
            assert metrics.METRICS["pairwise"](said, noted) == 1.0
            assert metrics.METRICS["set_f1"](said, noted) == 1.0
            lists += len(noted) > 1
    assert lists > 5


def test_what_the_teacher_writes_is_the_memory_and_what_the_chunk_tells():
    lesson = draw(chunks=100)
    seen = collections.Counter()
    for b, q in zip(*np.nonzero(lesson.sees_chunk), strict=True):
        start = int(np.argmax(lesson.weight[b, q]))
        text = [WORD[i] for i in lesson.tail[b, q]]
        before = [word for word in text[6 : start - 1] if word != "nothing"]
        after = [word for word in text[start : start + 3] if word != "nothing"]
        chunk = " ".join(WORD[i] for i in lesson.chunk[b])
        told = read(chunk)[text[3]]
        assert set(told) <= {text[1]} and sum(map(len, told.values())) <= 1
        new = [thing for _, thing in told[text[1]]]
        if text[1] == "songs":
            digit = int(before[0][3:-1], 16) - 0x30 if before else 0
            right = [f"<0x3{digit + len(new)}>"] if digit + len(new) else []
        else:
            right = before + new
        chapter = "chapter" in chunk
        kind = "right" if after == right else "missed" if after == before else "forgot"
        assert kind != "forgot" or not after
        seen[kind, bool(new), chapter and bool(before)] += 1
        at = lesson.object_at[b, q]
        if kind == "right" and new:
            assert WORD[lesson.chunk[b, at.max()]] == new[0]
            assert WORD[lesson.chunk[b, at.max() - 2]] == text[3]
    found = seen["right", True, False], seen["missed", True, False] + seen["forgot", True, False]
    assert abs(found[0] / sum(found) - 0.75) < 0.08
    kept = seen["right", False, True]
    assert abs(kept / (kept + seen["forgot", False, True]) - 0.25) < 0.12


def test_what_was_written_is_a_label_by_its_odds():
    lesson = draw(chunks=50)
    spoken = lesson.weight > 0
    assert np.all((lesson.tail == lesson.label)[spoken] | (lesson.tail == lesson.other)[spoken])
    sure = spoken & (lesson.other_share == 0)
    assert (lesson.tail == lesson.label)[sure].all()
