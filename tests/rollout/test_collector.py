"""Draws become groups: order, noise, shared prompts, failed readings."""

import asyncio
import dataclasses
import gc
import hashlib
import re

import fakes
import numpy as np
import pytest

from notepad_jax import functions
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.rollout import rewards
from notepad_jax.rollout.collector import collect, trajectory_seed
from notepad_jax.scoring.own import RewardFailed
from notepad_jax.text.chunks import Documents
from notepad_jax.types import CompleterFailed, Draw, Status, Task, TextDocument, TurnKind

LONG = TextDocument("the code of ann is red . " * 4)  # 28 tokens, 7 chunks
SHORT = TextDocument("bob says blue .")  # 1 chunk


def task(name: str, document=LONG, question="who ?", answer="ann", metric="em") -> Task:
    return Task(name, question, document, (answer,), "test", metric)


def reader(completer, chunk_size: int = 4) -> Reader:
    tokenizer = fakes.tokenizer()
    sampling = TurnSampling(1.0, 1.0, tuple(tokenizer.stop_ids), 0)
    rules, documents = fakes.rules(chunk_size), Documents(tokenizer, chunk_size)
    return Reader(completer, tokenizer, fakes.template(), rules, sampling, documents)


def draws(*samples: tuple[Task, ...] | Task, first: int = 0) -> list[Draw]:
    whole = [one if isinstance(one, tuple) else (one,) for one in samples]
    return [Draw(first + k, one) for k, one in enumerate(whole)]


def run(drawn, completer, group_size=3, seed=1):
    return asyncio.run(collect(drawn, reader(completer), group_size, seed))


def test_groups_come_back_in_the_order_of_draws_whatever_finishes_first():
    drawn = draws(
        (task("a"), task("b", SHORT, "code of bob ?", "blue")), task("c", answer="bob"), first=5
    )
    completer = fakes.oracle({"who ?": "ann", "code of bob ?": "blue"})
    groups, failed = run(drawn, completer)
    assert failed == [] and [group.task.id for group in groups] == ["a", "b", "c"]
    assert [group.place for group in groups] == [(5, 0), (5, 1), (6, 0)]
    assert [len(group.trajectories[0].turns) for group in groups] == [8, 2, 8]
    assert [group.rewards.tolist() for group in groups] == [[1, 1, 1], [1, 1, 1], [0, 0, 0]]
    assert [t.reading.sample for t in groups[0].trajectories] == [0, 1, 2]
    first = groups[0].trajectories[0]
    assert first.reading.status is Status.ANSWERED and first.reading.answer == "ann"
    assert first.reward_parts["em"] == 1.0 and first.turns[-1].kind is TurnKind.ANSWER


def test_two_draws_of_one_task_are_two_groups_with_noise_of_their_own():
    """ "task id occurs twice" ended a run at an epoch's end: 8 of 20 seeds, 8,000 tasks."""
    completer = fakes.coin("ann", "bob")
    (first, second), _ = run(draws(task("a"), task("a")), completer, group_size=16)
    answers = [[t.reading.answer for t in group.trajectories] for group in (first, second)]
    assert answers[0] != answers[1] and all(set(some) == {"ann", "bob"} for some in answers)
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert len(seeds) == 2 * 16 * 8 == len(set(seeds))


def test_a_draw_read_again_has_the_same_noise_whoever_reads_beside_it():
    def answers(drawn):
        groups, _ = run(drawn, fakes.coin("ann", "bob"), group_size=16)
        return {group.ordinal: [t.reading.answer for t in group.trajectories] for group in groups}

    alone, among = answers(draws(task("a"), first=7)), answers(draws(*[task("a")] * 9))
    assert alone[7] == among[7] and len({tuple(some) for some in among.values()}) == 9


def test_trajectory_seeds_never_collide_and_never_change():
    seeds = {
        trajectory_seed(run, ordinal, question, sample)
        for run in range(3)
        for ordinal in range(20)
        for question in range(4)
        for sample in range(20)
    }
    assert len(seeds) == 3 * 20 * 4 * 20
    assert trajectory_seed(1, 2, 3, 4) == trajectory_seed(np.int64(1), np.int64(2), 3, 4)
    text = b"str:trajectory\0int:0\0int:1\0int:2\0int:3"
    by_hand = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
    assert trajectory_seed(0, 1, 2, 3) == by_hand


def test_members_share_their_prompts():
    """16 readings of a document held 16 copies of it, and 16 more as hints: 1.2 MB of 32 kB."""
    document = TextDocument("the code of ann is red . " * 300)  # 2,100 tokens: 8.4 kB of ids
    completer = fakes.empty()
    groups, _ = asyncio.run(collect(draws(task("a", document)), reader(completer, 64), 16, 1))
    turns = [turn for t in groups[0].trajectories for turn in t.turns]
    arrays = {
        id(part): part.nbytes for turn in turns for part in (turn.prompt.shared, turn.prompt.draft)
    }
    assert len(turns) == 16 * 34 and sum(arrays.values()) < 1.1 * 4 * 2100
    asked = {prompt.shared.tobytes() for prompt, _ in completer.calls}
    assert {turn.prompt.shared.tobytes() for turn in turns} == asked


class Failing(fakes.Scripted):
    """Raises at one call."""

    async def complete(self, prompt, sampling):
        if len(self.calls) == 7:
            self.calls.append((prompt, sampling))
            raise OSError("the engine is gone")
        return await super().complete(prompt, sampling)


def test_a_failed_reading_costs_its_group_and_says_which():
    completer = Failing(lambda prompt, sampling: [2], pauses=3)
    groups, failed = run(draws(task("a"), task("b")), completer)
    assert [group.task.id for group in groups] == ["b"]
    assert str(failed[0]) == "task 'a', sample 1: OSError: the engine is gone"
    assert [one.place for one in failed] == [(0, 0)]


def test_an_engine_that_died_is_not_one_readings_failure():
    """The command line knows it, and ends in one line."""

    class Dead(fakes.Scripted):
        async def complete(self, prompt, sampling):
            raise CompleterFailed("the engine failed: FloatingPointError: not finite")

    with pytest.raises(CompleterFailed, match="FloatingPointError"):
        run(draws(task("a")), Dead(lambda prompt, sampling: [2]))


def test_a_metric_that_there_is_not_is_named_with_its_task():
    with pytest.raises(ValueError, match="task 'a': there is no metric 'bleu'"):
        run(draws(task("a", metric="bleu")), fakes.empty())


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
        run(draws((task("a", document), task("b", document))), completer)
        assert document.opened == opened


def test_what_is_truncated_is_counted_and_nothing_is_without_a_limit():
    for limit, turns, counts in ((None, 8, (0, 0)), (10, 4, (1, 18)), (28, 8, (0, 0))):
        documents = Documents(fakes.tokenizer(), 4, limit)
        how = dataclasses.replace(reader(fakes.empty()), chunks_of=documents)
        drawn = draws((task("a"), task("b")), task("short", SHORT))
        groups, _ = asyncio.run(collect(drawn, how, 1, 2))
        assert [len(group.trajectories[0].turns) for group in groups] == [turns, turns, 2]
        assert (documents.truncated_documents, documents.truncated_tokens) == counts


def test_no_draws_no_groups():
    assert run([], fakes.empty()) == ([], [])


# ---------------------------------------------------------------- rewards of a user's own


def judged(drawn, reward, completer=None):
    """Groups of three, by a reward that is lent."""
    how = reader(completer or fakes.coin("ann", "bob"))
    with functions.lending([reward]) as (name,):
        shown = rewards.Shown(how.tokenizer, how.template, how.rules)
        scoring = rewards.of(name, shown=shown)
    return asyncio.run(collect(drawn, how, 3, 1, scoring))


def worth(reading):
    return [memory.chunk_tokens / 4 for memory in reading.memories] + [
        (reading.answer == "ann") / (1 + reading.sample)
    ]


def test_all_readings_are_judged_at_once_and_who_answers_first_changes_nothing():
    """Nobody answers before all are asked; then the last that was asked is the first to answer."""
    drawn = draws(task("a"), task("b", SHORT), task("c"))
    waiting = []

    async def slow(reading):
        answered = asyncio.Event()
        waiting.append(answered)
        if len(waiting) == 9:
            waiting[-1].set()
        await answered.wait()
        waiting.remove(answered)
        if waiting:
            waiting[-1].set()
        return worth(reading)

    for one, other in zip(judged(drawn, slow)[0], judged(drawn, worth)[0], strict=True):
        assert one.place == other.place
        for mine, theirs in zip(one.trajectories, other.trajectories, strict=True):
            assert (mine.judged, mine.memory_rewards) == (theirs.judged, theirs.memory_rewards)
            assert mine.reading.answer == theirs.reading.answer
            assert mine.judged == (mine.reading.answer == "ann") / (1 + mine.reading.sample)
            assert len(mine.memory_rewards) == len(mine.turns) - 1 == len(mine.reading.chunks)


def test_others_read_on_while_a_group_is_judged():
    """The short document's readings end long before the others; their judge waits for those."""
    completer = fakes.oracle({"who ?": "ann"})
    held = asyncio.Event()

    async def slow(reading):
        if reading.row["id"] == "short":
            await held.wait()
        held.set()
        return 1.0

    groups, failed = judged(draws(task("short", SHORT), task("long")), slow, completer)
    assert [group.task.id for group in groups] == ["short", "long"] and not failed


def test_a_group_of_which_a_reading_failed_is_not_judged():
    seen = []

    def reward(reading):
        seen.append(reading.row["id"])
        return 1.0

    completer = Failing(lambda prompt, sampling: [2], pauses=3)
    groups, failed = judged(draws(task("a"), task("b")), reward, completer)
    assert seen == ["b"] * 3 and len(groups) == len(failed) == 1


def test_a_reward_that_fails_is_one_line_and_nothing_is_said_of_exceptions(caplog):
    """A reward that failed printed 30 lines of "Task exception was never retrieved", too."""

    async def fails(reading):
        raise KeyError("mine")

    with pytest.raises(RewardFailed) as said:
        judged(draws(task("a"), task("b"), task("c")), fails)
    words = r"the reward .*fails raised KeyError: 'mine' \(row '[abc]', reading [012]\)"
    assert re.fullmatch(words, str(said.value))
    gc.collect()
    assert caplog.text == ""
