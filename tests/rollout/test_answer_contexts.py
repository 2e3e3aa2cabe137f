"""Answers of several contexts in a rollout: collected, spooled, archived, packed, masked."""

import asyncio
import dataclasses
import json

import fakes
import numpy as np

from notepad_jax.grpo.batch import pack
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive, serialization
from notepad_jax.rollout.collector import collect
from notepad_jax.rollout.groups import measure
from notepad_jax.rollout.ledger import Ledger, Outcome, Waiting
from notepad_jax.types import Group, Status, TurnKind
from tests.rollout.test_collector import draws, reader, task

# "bob says" and so on until "ann ." ends it, in contexts of 3 tokens that carry 1 over.
SAYS = fakes.tokenizer().encode("bob says the secret code is of ann").tolist()


def how(completer=None, answer_chunks: int = 5) -> Reader:
    plain = reader(completer)
    rules = dataclasses.replace(plain.rules, max_answer=3, answer_chunks=answer_chunks, carry=1)
    return dataclasses.replace(plain, rules=rules)


def say(prompt, sampling):
    """Half of the readings say two words and stop, the others all of SAYS, which is too long."""
    if not prompt.begun and not fakes.is_answer(prompt):
        return [2]
    if not prompt.begun:
        return [*SAYS[-1:], 2] if sampling.seed % 2 else SAYS
    return [*SAYS[SAYS.index(int(prompt.tail[-1])) + 1 :], 2]


def groups_of(answer_chunks=5, group_size=6) -> list[Group]:
    reads = how(fakes.Scripted(say), answer_chunks)
    groups, failed = asyncio.run(collect(draws(task("a"), first=3), reads, group_size, 1))
    assert not failed
    return groups


def contexts(trajectory):
    return [turn for turn in trajectory.turns if turn.kind is TurnKind.ANSWER]


def test_the_answer_is_what_all_contexts_wrote_and_its_last_one_decides():
    (group,), (short,) = groups_of(), groups_of(answer_chunks=2)
    told = {(t.reading.answer, t.reading.status, len(contexts(t))) for t in group.trajectories}
    whole = "bob says the secret code is of ann"
    assert told == {("ann", Status.ANSWERED, 1), (whole, Status.ANSWERED, 4)}
    assert sorted(set(group.rewards)) == [0.0, 1.0]
    told = {(t.reading.answer, t.reading.status, len(contexts(t))) for t in short.trajectories}
    assert told == {("ann", Status.ANSWERED, 1), ("bob says the secret code", Status.TRUNCATED, 2)}
    begun = [turn.prompt.begun for t in group.trajectories for turn in t.turns]
    assert not any(begun)  # what is learnt from keeps no hints


def test_contexts_and_what_they_wrote_are_counted():
    (group,) = groups_of()
    long = sum(len(contexts(t)) == 4 for t in group.trajectories)
    metrics = measure([group]).metrics()
    assert metrics["rollout/answer_turns"] == (6 + 3 * long) / 6
    assert metrics["rollout/answer_tokens"] == (2 * (6 - long) + 9 * long) / 6
    assert metrics["rollout/truncated_answers"] == 0
    assert metrics["rollout/update_turns"] == 6 * 7


def test_what_waits_comes_back_with_all_its_contexts():
    (group,) = groups_of()
    said = json.loads(
        json.dumps(serialization.encode(Ledger(4, 2, {Outcome.TRAINED: 1}, (Waiting(group, 0.5),))))
    )
    found = serialization.decode(said, lambda place, chunks: (group.task, how()))
    (again,) = (waiting.group for waiting in found.waiting)
    for mine, theirs in zip(group.trajectories, again.trajectories, strict=True):
        assert (mine.reading.answer, mine.reading.status) == (
            theirs.reading.answer, theirs.reading.status)  # fmt: skip
        assert [(t.kind, t.chunk, t.prompt.tokens.tolist()) for t in mine.turns] == [
            (t.kind, t.chunk, t.prompt.tokens.tolist()) for t in theirs.turns]  # fmt: skip


def test_the_archive_says_how_many_contexts_an_answer_took(tmp_path):
    (group,) = groups_of()
    with TraceFile(tmp_path / archive.FILE) as file:
        archive.append(file, [group], how(), 0, (), 0)
        found = [reading for _, reading in file.readings()]
    assert {reading["answer_turns"] for reading in found} == {1, 4}
    assert all(reading["turns"] == 7 + reading["answer_turns"] for reading in found)
    assert {reading["truncated_memories"] for reading in found} == {0}


def test_a_context_that_another_one_goes_on_from_is_not_masked_as_truncated():
    ends, breaks_off = groups_of(), groups_of(answer_chunks=2)
    values = [np.ones(6)]
    whole = pack(ends, values, 384)
    masked = pack(ends, values, 384, mask_truncated=True)
    assert masked.stats.loss_tokens == whole.stats.loss_tokens
    whole = pack(breaks_off, values, 384).stats
    masked = pack(breaks_off, values, 384, mask_truncated=True).stats
    long = sum(len(contexts(t)) == 2 for t in breaks_off[0].trajectories)
    assert 0 < long < 6
    # Contexts write 3 tokens, then 2; only the last ones were cut for good.
    assert whole.loss_tokens - masked.loss_tokens == 2 * long
    assert masked.empty_turns == long


def test_contexts_of_one_answer_share_their_prefix_in_a_row():
    (group,) = groups_of()
    stats, alone = (pack([group], [np.ones(6)], 512, share_prefixes=s).stats for s in (True, False))
    answers = [contexts(t) for t in group.trajectories]
    equal = {turns[0].prompt.shared.tobytes() for turns in answers}
    assert len(equal) == 1  # here nobody wrote a memory, so theirs is one prefix
    prefix = len(answers[0][0].prompt.shared)
    saved = (sum(map(len, answers)) - 1) * prefix + 5 * sum(
        len(turn.prompt.shared) for turn in group.trajectories[0].turns[:7]
    )
    assert stats.prefix_tokens_saved >= saved and alone.prefix_tokens_saved == 0
