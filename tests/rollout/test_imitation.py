"""A teacher's readings: which turns a script and a trace write, and what is refused."""

import asyncio
import dataclasses

import fakes
import numpy as np
import pytest

from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.trace import MemoryChange, Spool, Trace, TraceFile
from notepad_jax.rollout import imitation, rewards
from notepad_jax.rollout.dynamic_sampling import Wanted, collect_informative
from notepad_jax.rollout.ledger import Ledger, Outcome
from notepad_jax.text.chunks import Documents
from notepad_jax.types import Draw, Finish, Task, TaughtNote, TextDocument, TurnKind

# 7 tokens a sentence; chunks of 5 tear both facts.
TEXT = "the code of ann is red . the code of bob is blue . bob says the blue ."
SCRIPT = (
    TaughtNote("the code of ann is red .", "red"),
    TaughtNote("the code of bob is blue .", "red, blue"),
)


def task(script=SCRIPT, answers=("blue", "red"), metric="ruler_all", name="t") -> Task:
    return Task(name, "code ?", TextDocument(TEXT), answers, "test", metric, script=script)


def reader(chunk_size=5, update="overwrite") -> Reader:
    tokenizer = fakes.tokenizer()
    sampling = TurnSampling(1.0, 1.0, tuple(tokenizer.stop_ids), 0)
    rules = dataclasses.replace(fakes.rules(chunk_size, update), max_memory=8, max_answer=8)
    documents = Documents(tokenizer, chunk_size)
    return Reader(None, tokenizer, fakes.template(), rules, sampling, documents)


def taught(one: Task, by: Reader, teacher=imitation.of_script, version=3):
    groups, failed = asyncio.run(
        imitation.collect([Draw(7, (one,))], by, teacher, version, rewards.PLAIN)
    )
    assert not failed
    (group,) = groups
    return group


def said(group, by: Reader) -> list[str]:
    turns = group.trajectories[0].turns
    return [by.tokenizer.decode(memory_agent.written(t.completion)) for t in turns]


def test_notes_follow_the_chunk_in_which_a_sentence_ends_and_stay_otherwise():
    by = reader()
    group = taught(task(), by)
    assert said(group, by) == ["nothing", "red", "red, blue", "red, blue", "red, blue"]
    assert group.rewards.tolist() == [1.0] and group.informative and group.place == (7, 0)
    for turn in group.trajectories[0].turns:
        completion = turn.completion
        assert completion.finish is Finish.STOP and completion.policy_version == 3
        assert completion.tokens[-1] == by.template.stop_ids[0]
        assert len(completion.behaviour_logprobs) == len(completion.tokens)


def test_prompts_are_those_of_a_reading_that_writes_the_same():
    by = reader()
    turns = taught(task(), by).trajectories[0].turns
    one = task()
    asked = memory_agent.question_of(one, by.tokenizer, by.rules.max_question)
    state = memory_agent.start(asked, by.chunks_of(one))
    for turn in turns:
        kind, prompt = memory_agent.prompt(by.rules, by.template, state)
        assert kind is turn.kind and np.array_equal(prompt.tokens, turn.prompt.tokens)
        state = memory_agent.after(by.rules, by.template, state, turn)
    assert turns[-1].kind is TurnKind.ANSWER


def test_where_a_marker_keeps_the_memory_it_is_said_instead():
    by = reader(update="overwrite_or_keep")
    turns = taught(task(), by).trajectories[0].turns
    keep = by.template.keep.tolist()
    kept = [memory_agent.written(t.completion).tolist() == keep for t in turns]
    assert kept == [True, False, False, True, False]
    assert by.tokenizer.decode(turns[2].prompt.tail).count("red") == 1  # the memory, not a marker


@pytest.mark.parametrize(
    ("answers", "metric", "expected"),
    [
        (("blue", "red"), "ruler_all", "red, blue"),  # as noted
        (("blue", "red"), "set_f1", "red\nblue"),
        (("blue", "red"), "pairwise", "blue\nred"),  # the order is the answer
        (("blue",), "em", "blue"),
        (("not stated",), "em", "not stated"),
    ],
)
def test_answers_list_what_was_noted_unless_their_order_counts(answers, metric, expected):
    script = (TaughtNote("x", "red"), TaughtNote("y", "red, blue"))
    assert imitation.answer(task(script, answers, metric)) == expected


def test_right_readings_of_a_trace_are_repeated_and_others_are_not(tmp_path):
    def line(name, reward, memories, turns=5, **more):
        spool = Spool(MemoryChange(chunk, text, 1) for chunk, text in memories)
        fields = {"task_id": name, "reward": reward, "answer": "red, blue", "turns": turns}
        file.add({**fields, **more}, spool)

    with TraceFile(tmp_path / "trajectories.jsonl") as file:
        line("t", 1.0, [(0, "the"), (1, "red"), (2, "red, blue")])
        line("t", 1.0, [(1, "red"), (2, "red, blue")])  # the same with less
        line("t", 0.5, [(2, "blue")])
        line("wrong", 0.0, [(2, "blue")])
        line("whole", 1.0, [], method="full-context")
    with Trace(tmp_path / "trajectories.jsonl") as trace:
        teacher, known = imitation.of_readings([trace])
    by = reader()
    assert (
        known == 1 and teacher(task(name="wrong")) is None and teacher(task(name="whole")) is None
    )
    assert said(taught(task(), by, teacher), by) == [
        "nothing", "red", "red, blue", "red, blue", "red, blue",
    ]  # fmt: skip
    groups, failed = asyncio.run(
        imitation.collect([Draw(0, (task(),))], reader(7), teacher, 0, rewards.PLAIN)
    )
    assert not groups and "has 3 chunks here, and its teacher read 4" in str(failed[0])


def test_what_cannot_be_taught_is_said():
    with pytest.raises(ValueError, match="task 't' has no script of good notes"):
        taught(task(script=()), reader())
    long = (TaughtNote("the code of ann is red .", "red " * 9),)
    groups, failed = asyncio.run(
        imitation.collect([Draw(0, (task(long),))], reader(), imitation.of_script, 0, rewards.PLAIN)
    )
    assert not groups and "in a turn of at most 8" in str(failed[0])


def test_what_the_teacher_knows_nothing_of_is_passed_over_under_a_name():
    by, known = reader(), {"0-0", "0-1", "2-1"}

    def teacher(one: Task):
        return imitation._Read({1: "red"}, "red, blue", None) if one.id in known else None

    async def collect(ordinals):
        draws = [Draw(o, tuple(task(name=f"{o}-{q}") for q in range(2))) for o in ordinals]
        return await imitation.collect(draws, by, teacher, 0, rewards.PLAIN)

    rollout = asyncio.run(collect_informative(Ledger(), collect, Wanted(3, 2, 1, 0), 0))
    assert rollout.settled[Outcome.TRAINED] == [(0, 0), (0, 1), (2, 1)]
    assert rollout.settled[Outcome.UNTAUGHT] == [(1, 0), (1, 1), (2, 0)]
    assert rollout.ledger.groups == 6 and rollout.ledger.next == 3
