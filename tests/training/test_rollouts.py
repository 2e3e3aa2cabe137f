"""A step's rollout with local turns: what moves and what does not; from fakes to a packed batch."""

import asyncio
import dataclasses
import json
import types

import numpy as np
import pytest

from notepad_jax.grpo import algorithm
from notepad_jax.parallel import hosts
from notepad_jax.rollout import collector, dynamic_sampling, local, rewards
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import Evidence, Task, TextDocument
from tests import fakes
from tests.grpo.test_algorithm import having, never
from tests.rollout.test_collector import reader

OFF, ON = local.LocalSamples(0, 0.5, 0.5), local.LocalSamples(4, 1.0, 0.5)


def scribe() -> fakes.Scripted:
    """Writes `red` or `blue` by the turn's seed; answers with its memory."""

    def answer(prompt, sampling):
        said = ("red", "blue")[sampling.seed % 2]
        ids = fakes.memory_of(prompt) if fakes.is_answer(prompt) else fakes.tokenizer().encode(said)
        return [*map(int, ids), 2]

    return fakes.Scripted(answer)


def two_questions(ordinal):
    """Two of each draw, one of them with its fact known."""
    document = TextDocument("the code of ann is red . " * (2 + ordinal % 2))
    one = Task(f"{ordinal}", "who ?", document, ("red",), "test", "em")
    return one, dataclasses.replace(one, id=f"{ordinal}b", evidence=(Evidence("red", 0.5),))


STREAM = TaskStream(types.SimpleNamespace(at=two_questions), 2, 0, None)


def equal(ordinal):
    return 0


def uneven(ordinal):
    """None of which is twice the next; the second process, by turns, would have the longest."""
    return (300, 900, 500, 700, 400)[ordinal % 5]


def unknown(ordinal):
    if ordinal % 2:
        raise ValueError("the document is gone, and its reading will say so")
    return uneven(ordinal)


def rollouts(completer, wanted, staleness=0, documents=3, length=equal) -> Rollouts:
    return Rollouts(
        stream=STREAM,
        reader=reader(completer),
        scoring=rewards.PLAIN,
        probe=rewards.PLAIN,
        wanted=dynamic_sampling.Wanted(documents, 2, 2, staleness),
        group_size=4,
        seed=3,
        max_failed_share=0.0,
        local=wanted,
        length=length,
    )


def step(completer, wanted, ledger=None, version=0, **how):
    completer.version = version
    return asyncio.run(rollouts(completer, wanted, **how).step(ledger or Ledger(), version))


def said(group):
    return [turn.completion.tokens.tolist() for t in group.trajectories for turn in t.turns]


def test_on_adds_and_moves_nothing():
    without, with_local = scribe(), scribe()
    (plain, before), (more, after) = step(without, OFF), step(with_local, ON)
    assert not any(name.startswith("local/") for name in before)
    assert {name: after[name] for name in before} == before
    assert [said(group) for group in more.batch] == [said(group) for group in plain.batch]
    assert more.ledger == plain.ledger
    asked = [(p.tokens.tolist(), s) for p, s in with_local.calls]
    assert asked[: len(without.calls)] == [(p.tokens.tolist(), s) for p, s in without.calls]
    assert after["local/groups"] == len(more.batch) > 2 and after["local/failed"] == 0
    # Four memories of each, and an answer to each of those whose fact nobody knows.
    probed = sum(not group.task.evidence for group in more.batch)
    assert len(asked) - len(without.calls) == 4 * (len(more.batch) + probed)


def test_a_rollout_with_local_turns_is_packed():
    rollout, metrics = step(scribe(), ON)
    informative = [group for group in rollout.batch if group.local]
    assert len(informative) == metrics["local/informative_share"] * metrics["local/groups"] > 1
    (one,), _ = algorithm.batches(*having(), rollout.batch, never, never)
    count = sum(len(group.trajectories) for group in rollout.batch)
    for number, group in enumerate(informative):
        scores = np.array([member.reward for member in group.local])
        assert set(scores) == {0.0, 1.0}  # red is the fact, and the answer
        for k, (member, score) in enumerate(zip(group.local, scores, strict=True)):
            here = one.trajectory == count + 4 * number + k
            assert one.tokens[here].tolist() == member.turns[0].completion.tokens.tolist()
            assert set(one.prompt[here]) == {len(rollout.batch) + number}
            np.testing.assert_allclose(one.advantages[here], 0.5 * (score - scores.mean()))
            assert member.turns[0].completion.tokens[0] == fakes.tokenizer().encode(
                "red" if score else "blue"
            )[0]  # fmt: skip


def test_a_group_that_waits_gets_its_local_turns_from_the_policy_that_learns():
    # One batch of two groups a step; what a draw of more finds waits.
    ledger = Ledger()
    for _ in range(9):
        if not ledger.waiting:
            rollout, _ = step(scribe(), ON, ledger, staleness=1, documents=1)
            ledger = rollout.ledger
    waiting = [one.group for one in rollout.ledger.waiting]
    assert not any(group.local for group in waiting)
    later, metrics = step(scribe(), ON, rollout.ledger, version=1, staleness=1, documents=1)
    assert later.batch[0].place == waiting[0].place and later.batch[0].oldest_version == 0
    assert metrics["local/groups"] == len(later.batch)
    versions = {m.turns[0].completion.policy_version for g in later.batch for m in g.local}
    assert versions <= {1}


@pytest.mark.parametrize("length", [equal, uneven, unknown])
def test_every_process_comes_to_the_same_whatever_its_share(monkeypatch, length):
    """Played one after another: what each says of its share is kept for the others."""
    count, (alone, numbers) = 3, step(scribe(), ON)
    shares = {}
    spoken: dict[int, list[bytes]] = {k: [] for k in range(count)}

    class Silent(Exception):
        """Somebody has not said yet what is asked for here."""

    def play(index):
        asked = iter(range(10**6))

        def gather(ours):
            turn = next(asked)
            if len(spoken[index]) == turn:
                spoken[index].append(ours)
            if any(len(some) <= turn for some in spoken.values()):
                raise Silent
            return [some[turn] for some in spoken.values()]

        monkeypatch.setattr(hosts, "index", lambda: index)
        monkeypatch.setattr(hosts, "count", lambda: count)
        monkeypatch.setattr(hosts, "gather", gather)
        monkeypatch.setattr(collector, "collect", collect)
        return step(scribe(), ON, length=length)

    collect_here = collector.collect

    async def collect(draws, *how):
        shares.setdefault(hosts.index(), [draw.ordinal for draw in draws])
        return await collect_here(draws, *how)

    done = {}
    for _ in range(10):
        for index in range(count):
            try:
                done[index] = play(index)
            except Silent:
                continue
    assert len(done) == count
    longest_first = {equal: [0, 1, 2], uneven: [1, 2, 0], unknown: [2, 0, 1]}[length]
    assert [shares[k] for k in range(count)] == [[ordinal] for ordinal in longest_first]
    # Each had turns of its own.
    assert all(json.loads(some[-1])["value"] for some in spoken.values())
    for rollout, metrics in done.values():
        assert metrics == numbers
        for mine, theirs in zip(alone.batch, rollout.batch, strict=True):
            assert mine.place == theirs.place and said(mine) == said(theirs)
            assert [(m.reward, m.reading.answer) for m in mine.local] == [
                (m.reward, m.reading.answer) for m in theirs.local
            ]
            pairs = zip(mine.local, theirs.local, strict=True)
            for (a,), (b,) in ((m.turns, t.turns) for m, t in pairs):
                assert np.array_equal(a.completion.tokens, b.completion.tokens)
                assert np.array_equal(a.prompt.tokens, b.prompt.tokens)
