"""Groups that wait, written down and made again."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from notepad_jax.rollout import rewards, serialization
from notepad_jax.rollout.collector import collect
from notepad_jax.rollout.ledger import Ledger, Outcome, Waiting
from notepad_jax.types import TextDocument
from tests import fakes
from tests.rollout.test_collector import SHORT, draws, reader, task


def ledger_of(document=None):
    tasks = (task("a"), task("b", SHORT, "code of bob ?")) if document is None else (
        task("a", document), task("b", SHORT, "code of bob ?"))  # fmt: skip
    drawn = draws(tasks, first=3)
    completer = fakes.Scripted(
        lambda prompt, sampling: [sampling.seed % 7 + 270, 2][: 1 + sampling.seed % 2]
    )
    groups, _ = asyncio.run(collect(drawn, reader(completer), 3, 1))
    waiting = tuple(Waiting(group, 0.25 + k) for k, group in enumerate(groups))
    return Ledger(4, 9, {Outcome.TRAINED: 6, Outcome.STALE: 1}, waiting), tasks


def again(said, tasks):
    said = json.loads(json.dumps(said))
    task_at = lambda place, chunks: ({3: tasks}[place[0]][place[1]], reader(fakes.empty()))  # noqa: E731
    return serialization.decode(said, task_at)


def test_what_waits_keeps_what_it_was_worth_and_nobody_is_asked_again():
    ledger, tasks = ledger_of()
    (first, *others) = ledger.waiting
    worth = {"judged": 1 / 3, "shaping": -0.1, "memory_rewards": (0.7, 1 / 7)}
    members = tuple(
        dataclasses.replace(one, reward_parts={"reward/mine": 1 / 3}, **worth)
        for one in first.group.trajectories
    )
    group = dataclasses.replace(first.group, trajectories=members)
    said = serialization.encode(dataclasses.replace(ledger, waiting=(Waiting(group, 0.5), *others)))
    found = again(said, tasks).waiting[0].group.trajectories
    for one in found:
        assert (one.judged, one.shaping, one.memory_rewards) == tuple(worth.values())
        assert one.reward_parts == {"reward/mine": 1 / 3}
    del said["waiting"][0]["readings"][1]["worth"]
    with pytest.raises(ValueError, match="task 'a' waits in the checkpoint without what it was"):
        again(said, tasks)


def test_what_waits_comes_back_bit_by_bit():
    ledger, tasks = ledger_of()
    found = again(serialization.encode(ledger), tasks)
    assert dataclasses.replace(found, waiting=(), groups=7) == dataclasses.replace(
        ledger, waiting=(), groups=7
    )
    for one, other in zip(ledger.waiting, found.waiting, strict=True):
        assert one.share == other.share and one.group.place == other.group.place
        for mine, theirs in zip(one.group.trajectories, other.group.trajectories, strict=True):
            assert (mine.reward, mine.reward_parts) == (theirs.reward, theirs.reward_parts)
            assert (
                dataclasses.replace(mine.reading, turns=()).__dict__
                == dataclasses.replace(theirs.reading, turns=()).__dict__
            )
            for a, b in zip(mine.turns, theirs.turns, strict=True):
                assert (a.kind, a.chunk) == (b.kind, b.chunk)
                assert np.array_equal(a.prompt.shared, b.prompt.shared)
                assert np.array_equal(a.prompt.tail, b.prompt.tail)
                assert np.array_equal(a.completion.tokens, b.completion.tokens)
                mine_bits, their_bits = (x.completion.behaviour_logprobs for x in (a, b))
                assert mine_bits.tobytes() == their_bits.tobytes() and mine_bits.dtype == np.float32
                assert a.completion.finish is b.completion.finish
                assert a.completion.policy_version == b.completion.policy_version


def test_turns_of_rounds_come_back_with_their_places_and_what_they_are_worth():
    """Bit for bit, of readings that were rewarded turn by turn."""
    one = task("a", TextDocument("ann bob the code of red is blue . " * 6))
    plain = reader(fakes.first_of_chunk(), 16)
    rules = dataclasses.replace(plain.rules, order="parallel", passes=2)
    rounds = dataclasses.replace(plain, rules=rules)
    shown = rewards.Shown(rounds.tokenizer, rounds.template, rules)
    how = rewards.with_memories(rewards.of("", shown=shown), "recall_gain")
    (group,), _ = asyncio.run(collect(draws(one, first=3), rounds, 2, 1, how))
    assert {turn.level for turn in group.trajectories[0].updates} == {0, 1}
    assert any(group.trajectories[0].memory_rewards)
    said = json.loads(json.dumps(serialization.encode(Ledger(4, 1, {}, (Waiting(group, 1.0),)))))
    (found,) = serialization.decode(said, lambda place, chunks: (one, rounds)).waiting
    for mine, theirs in zip(group.trajectories, found.group.trajectories, strict=True):
        assert [turn.place for turn in mine.updates] == [turn.place for turn in theirs.updates]
        assert mine.memory_rewards == theirs.memory_rewards


def test_prompts_are_not_written():
    ledger, _ = ledger_of(TextDocument("the code of ann is red . " * 400))
    said = serialization.encode(ledger)
    turns = [t.turns for one in ledger.waiting for t in one.group.trajectories]
    tokens = sum(len(turn.completion.tokens) for some in turns for turn in some)
    written = len(json.dumps(said))  # 8 bytes a token in base64, and three words a turn
    assert written < tokens * 8 * 4 / 3 + sum(map(len, turns)) * 20 + 1000


def test_another_document_is_refused():
    ledger, tasks = ledger_of()
    changed = (
        dataclasses.replace(tasks[0], document=TextDocument("the code of bob is red . " * 4)),
    )
    with pytest.raises(ValueError, match="'a' waits in the checkpoint, and its prompts come out"):
        again(serialization.encode(ledger), changed + tasks[1:])
