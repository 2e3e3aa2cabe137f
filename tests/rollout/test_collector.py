"""Many readings at once: order, seeds, sharing, failure, cancellation, no turn barrier."""

import asyncio
import dataclasses
import hashlib

import fakes
import numpy as np
import pytest

from notepad_jax.rollout.collector import Reader, ReadingFailed, collect, trajectory_seed
from notepad_jax.types import CompleterFailed, Status, Task, TextDocument, TurnKind

LONG = TextDocument("the code of ann is red . " * 4)  # 28 tokens, 7 chunks
SHORT = TextDocument("bob says blue .")  # 1 chunk


def task(name: str, document=LONG, question="who ?", answer="ann", metric="em") -> Task:
    return Task(name, question, document, (answer,), "test", metric)


def reader(group_size=3, template="question_last") -> Reader:
    return Reader(
        fakes.tokenizer(),
        fakes.template(template),
        fakes.rules(),
        temperature=1.0,
        top_p=1.0,
        group_size=group_size,
        max_document=1000,
    )


def run(tasks, completer, group_size=3, **more):
    return asyncio.run(collect(tasks, completer, reader(group_size), run_seed=1, step=2, **more))


def test_groups_come_back_in_task_order_whatever_finishes_first():
    tasks = [task("a"), task("b", SHORT, "code of bob ?", "blue"), task("c", answer="bob")]
    completer = fakes.oracle({"who ?": "ann", "code of bob ?": "blue"})
    groups = run(tasks, completer)
    assert [group.task.id for group in groups] == ["a", "b", "c"]
    assert [len(group.trajectories[0].turns) for group in groups] == [8, 2, 8]
    assert [group.rewards.tolist() for group in groups] == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert [t.reading.sample for t in groups[0].trajectories] == [0, 1, 2]
    first = groups[0].trajectories[0]
    assert first.reading.status is Status.ANSWERED and first.reading.answer == "ann"
    assert first.reward_parts["em"] == 1.0 and first.turns[-1].kind is TurnKind.ANSWER


def test_a_short_reading_does_not_wait_for_a_long_one():
    seen = []
    run(
        [task("long"), task("short", SHORT)],
        fakes.empty(),
        1,
        on_turn=lambda task, sample, turn, state: seen.append((task.id, turn.kind)),
    )
    assert seen.index(("short", TurnKind.ANSWER)) < 5
    assert seen[-1] == ("long", TurnKind.ANSWER)


def test_members_share_prefixes_and_questions_share_chunks():
    completer = fakes.empty()
    groups = run([task("a"), task("b", question="code of bob ?")], completer)
    for k in range(8):
        turns = [t.turns[k].prompt.shared for g in groups for t in g.trajectories]
        assert all(np.array_equal(turns[0], shared) for shared in turns)


def test_all_turns_of_all_readings_draw_their_own_noise():
    completer = fakes.empty()
    run([task("a"), task("b"), task("c", SHORT)], completer)
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert len(seeds) == 3 * (8 + 8 + 2) == len(set(seeds))


def test_trajectory_seeds_never_collide_and_never_change():
    seeds = {
        trajectory_seed(run, step, name, sample)
        for run in range(3)
        for step in range(20)
        for name in ("a", "a/0", "b", "1")
        for sample in range(20)
    }
    assert len(seeds) == 3 * 20 * 4 * 20
    assert trajectory_seed(1, 2, "a", 3) == trajectory_seed(np.int64(1), 2, "a", 3)
    text = b"str:trajectory\0int:0\0int:0\0str:a\0int:0"
    by_hand = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    assert trajectory_seed(0, 0, "a", 0) == by_hand == 728338011835900330


def test_the_same_seed_gives_the_same_rollout():
    def answers(step):
        groups = asyncio.run(
            collect([task("a"), task("b")], fakes.coin("ann", "bob"), reader(8), 0, step)
        )
        return [t.reading.answer for group in groups for t in group.trajectories]

    assert answers(1) == answers(1) != answers(2)


def test_a_failure_names_the_task_and_leaves_nothing_running():
    class Failing(fakes.Scripted):
        async def complete(self, prompt, sampling):
            if len(self.calls) == 7:
                self.calls.append((prompt, sampling))
                raise OSError("the engine is gone")
            return await super().complete(prompt, sampling)

    completer = Failing(lambda prompt, sampling: [2], pauses=3)

    async def attempt():
        with pytest.raises(ReadingFailed, match="task 'a', sample 1: OSError: the engine"):
            await collect([task("a")], completer, reader(3), 1, 2)
        assert completer.running == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(attempt())


def test_an_engine_that_died_is_not_one_readings_failure():
    """The command line knows it, and ends in one line."""

    class Dead(fakes.Scripted):
        async def complete(self, prompt, sampling):
            raise CompleterFailed("the engine failed: FloatingPointError: not finite")

    dead = Dead(lambda prompt, sampling: [2])
    with pytest.raises(CompleterFailed, match="FloatingPointError"):
        asyncio.run(collect([task("a")], dead, reader(3), 1, 2))


def test_cancelling_leaves_nothing_running():
    completer = fakes.Scripted(lambda prompt, sampling: [2], pauses=1000)

    async def attempt():
        rollout = asyncio.create_task(collect([task("a"), task("b")], completer, reader(4), 1, 2))
        await asyncio.sleep(0.01)
        assert completer.running == 8
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert completer.running == 0
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(attempt())


def test_user_mistakes_are_value_errors_that_name_the_task():
    with pytest.raises(ValueError, match="task 'b': the question has 9 tokens"):
        run([task("a"), task("b", question="who " * 9)], fakes.empty())
    with pytest.raises(ValueError, match="task id 'a' occurs twice"):
        run([task("a"), task("a", SHORT)], fakes.empty())
    with pytest.raises(ValueError, match="task 'a', sample 0: there is no metric 'bleu'"):
        run([task("a", metric="bleu")], fakes.empty())


def test_a_documents_text_is_tokenised_once_for_all_its_questions_and_samples():
    class Counted:
        opened = 0

        def pieces(self):
            self.opened += 1
            return iter([LONG.text])

    class AtOnce:
        """Never yields to the loop, so that each reading ends before the next begins."""

        async def complete(self, prompt, sampling):
            return fakes.completion([2], sampling)

    document = Counted()
    for opened, completer in enumerate((AtOnce(), fakes.empty()), 1):
        run([task("a", document), task("b", document)], completer)
        assert document.opened == opened


def test_what_is_truncated_is_counted_and_nothing_is_without_a_limit():
    for limit, turns, counts in ((None, 8, (0, 0)), (10, 4, (1, 18)), (28, 8, (0, 0))):
        how = dataclasses.replace(reader(), max_document=limit)
        documents = how.documents()
        tasks = [task("a"), task("b"), task("short", SHORT)]
        groups = asyncio.run(collect(tasks, fakes.empty(), how, 1, 2, documents=documents))
        assert [len(group.trajectories[0].turns) for group in groups] == [turns, turns, 2]
        assert (documents.truncated_documents, documents.truncated_tokens) == counts


def test_no_tasks_no_groups():
    assert run([], fakes.empty()) == []
