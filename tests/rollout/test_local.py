"""Turns written again: which, with what noise, what they are worth, and what they cost."""

import asyncio
import dataclasses
import json

import numpy as np
import pytest

from notepad_jax import functions
from notepad_jax.reading import memory_agent
from notepad_jax.rollout import local, rewards, serialization
from notepad_jax.rollout.collector import collect
from notepad_jax.rollout.local import LocalSamples
from notepad_jax.types import CompleterFailed, Evidence, Finish, Status, TurnKind
from tests import fakes
from tests.rollout import made
from tests.rollout.test_collector import SHORT, draws, reader, task

FACTS = (Evidence("red", 0.1), Evidence("green", 0.2))
SAID = ("nothing", "red", "red green", "blue")


def known(name="a", facts=FACTS):
    return dataclasses.replace(task(name), evidence=facts)


def scribe() -> fakes.Scripted:
    """Writes one of four memories by the seed of the turn; answers with its memory."""

    def answer(prompt, sampling):
        if fakes.is_answer(prompt):
            return [*map(int, fakes.memory_of(prompt)), 2]
        return [*map(int, fakes.tokenizer().encode(SAID[sampling.seed % 4])), 2]

    return fakes.Scripted(answer)


def read(*tasks, completer=None, seed=1):
    groups, _ = asyncio.run(collect(draws(*tasks), reader(completer or scribe()), 3, seed))
    return groups


def again(chosen, completer, samples=4, seed=1):
    made_again = local.write_again(chosen, reader(completer), samples, seed)
    return asyncio.run(made_again)


def text(tokens) -> str:
    return fakes.tokenizer().decode(tokens)


def written(one) -> str:
    return text(one.turns[0].completion.tokens[:-1])


def test_the_choice_is_a_function_of_seed_and_place_alone():
    groups = [made.group(1.0, 0.0, place=(k, k % 3)) for k in range(400)]
    chosen = local.choose(groups, 0.5, 7)
    places = {one.group.place: (one.trajectory, one.turn) for one in chosen}
    assert 160 < len(places) < 240 and {member for member, _ in places.values()} == {0, 1}
    backwards = local.choose(groups[::-1], 0.5, 7)
    assert {one.group.place: (one.trajectory, one.turn) for one in backwards} == places
    more = {one.group.place for one in local.choose(groups, 0.6, 7)}
    assert places.keys() < more  # and a larger share takes others in addition
    assert {one.group.place for one in local.choose(groups, 0.5, 8)} != places.keys()
    assert len(local.choose(groups, 1.0, 7)) == 400 and not local.choose(groups, 0.0, 7)


def test_every_update_turn_may_be_chosen_and_no_answer():
    (group,) = read(task("a"))
    chosen = local.choose([dataclasses.replace(group, ordinal=k) for k in range(200)], 1.0, 3)
    assert {one.turn for one in chosen} == set(range(7))
    kinds = {one.group.trajectories[one.trajectory].turns[one.turn].kind for one in chosen}
    assert kinds == {TurnKind.UPDATE}
    bare = tuple(
        dataclasses.replace(t, reading=dataclasses.replace(t.reading, turns=t.turns[-1:]))
        for t in group.trajectories
    )
    assert not local.choose([dataclasses.replace(group, trajectories=bare)], 1.0, 3)


def test_the_prompt_is_the_turn_s_to_the_token_and_the_noise_is_nobody_else_s():
    completer = scribe()
    groups = read(known("a"), known("b"), completer=completer)
    before, asked = len(completer.calls), local.choose(groups, 1.0, 1)
    sets = again(asked, completer)
    old, new = completer.calls[:before], completer.calls[before:]
    assert len(new) == 8 and [len(one) for one in sets] == [4, 4]
    turns = [one.group.trajectories[one.trajectory].turns[one.turn] for one in asked]
    for k, (prompt, sampling) in enumerate(new):
        assert np.array_equal(prompt.tokens, turns[k // 4].prompt.tokens)
        assert prompt.shared is turns[k // 4].prompt.shared  # an engine finds what it has read
        assert sampling.temperature == 1.0 and sampling.max_new_tokens == 6
    seeds = [sampling.seed for _, sampling in old + new]
    assert len(set(seeds)) == len(seeds)
    for one, turn in zip(sets, turns, strict=True):
        assert all(made.turns[0].prompt is turn.prompt for made in one)
        assert all(made.turns[0].chunk == turn.chunk for made in one)


def test_a_memory_is_worth_the_share_of_the_facts_that_it_holds():
    groups = read(known())
    (one,) = again(local.choose(groups, 1.0, 1), scribe(), samples=16)
    worth = {"nothing": 0.0, "blue": 0.0, "red": 0.5, "red green": 1.0}
    assert {written(sample) for sample in one} == set(worth)
    assert [sample.reward for sample in one] == [worth[written(sample)] for sample in one]
    assert all(len(sample.turns) == 1 for sample in one)


def test_without_facts_a_greedy_answer_from_the_memory_is_judged():
    completer = scribe()
    groups = read(task("a", answer="red"), completer=completer)
    before = len(completer.calls)
    (one,) = again(local.choose(groups, 1.0, 1), completer, samples=16)
    assert [sample.reward for sample in one] == [written(s) == "red" for s in one]
    assert {sample.reward for sample in one} == {0.0, 1.0}
    probes = [call for call in completer.calls[before:] if fakes.is_answer(call[0])]
    assert len(probes) == 16 and all(sampling.temperature == 0 for _, sampling in probes)
    assert {text(fakes.memory_of(prompt)) for prompt, _ in probes} == set(SAID)
    # What is learnt from is the memory alone; the answer was a measurement.
    assert all([turn.kind for turn in s.turns] == [TurnKind.UPDATE] for s in one)
    assert all(s.reading.answer == written(s) for s in one)
    assert all(s.reading.status is Status.ANSWERED for s in one)


def test_a_memory_that_is_kept_is_the_one_that_the_turn_began_with():
    """`overwrite_or_keep`: what the keep marker leaves is judged, not the marker."""
    keep = fakes.tokenizer().control_id("<|keep|>")
    how = dataclasses.replace(
        reader(fakes.Scripted(lambda prompt, sampling: [keep, 2])),
        rules=fakes.rules(memory_update="overwrite_or_keep"),
    )
    group = read(known())[0]
    trajectory, red = group.trajectories[0], fakes.tokenizer().encode("red")
    first = dataclasses.replace(
        trajectory.turns[0].completion, tokens=fakes.tokens([*red, 2]), finish=Finish.STOP
    )
    turns = (dataclasses.replace(trajectory.turns[0], completion=first), *trajectory.turns[1:])
    member = dataclasses.replace(
        trajectory, reading=dataclasses.replace(trajectory.reading, turns=turns)
    )
    group = dataclasses.replace(group, trajectories=(member,))
    chosen = [local.ChosenTurn(group, 0, turn) for turn in (0, 1)]
    sets = asyncio.run(local.write_again(chosen, how, 2, 1))
    assert [[sample.reward for sample in one] for one in sets] == [[0, 0], [0.5, 0.5]]


def test_who_else_is_written_again_changes_nothing():
    groups = read(known("a"), task("b", SHORT, answer="red"), known("c"))
    chosen = local.choose(groups, 1.0, 1)
    together = again(chosen, scribe())
    for one, beside in zip(chosen, together, strict=True):
        (alone,) = again([one], scribe())
        assert [written(s) for s in alone] == [written(s) for s in beside]
        assert [s.reward for s in alone] == [s.reward for s in beside]
    assert [[written(s) for s in one] for one in again(chosen, scribe(), seed=2)] != [
        [written(s) for s in one] for one in together
    ]


class Failing(fakes.Scripted):
    """Raises at the calls of these numbers."""

    def __init__(self, *numbers):
        super().__init__(scribe()._answer)
        self.numbers = numbers

    async def complete(self, prompt, sampling):
        if len(self.calls) in self.numbers:
            self.calls.append((prompt, sampling))
            raise OSError("no room")
        return await super().complete(prompt, sampling)


def test_a_sample_that_fails_costs_itself():
    groups = read(known("a"), known("b"))
    chosen = local.choose(groups, 1.0, 1)
    whole, less = again(chosen, scribe()), again(chosen, Failing(1, 4, 5, 6))
    assert [s is None for s in less[0]] == [False, True, False, False]
    kept = [0, 2, 3]
    assert [written(less[0][k]) for k in kept] == [written(whole[0][k]) for k in kept]
    found, stats = local.joined(groups, {(0, 0): less[0], (1, 0): less[1]})
    assert len(found[0].local) == 3 and found[1].local == ()  # of one alone there is no baseline
    assert (stats.sets, stats.samples, stats.failed) == (2, 4, 4)
    assert [one.trajectories for one in found] == [one.trajectories for one in groups]


def test_an_engine_that_died_ends_the_rollout():
    class Dead(fakes.Scripted):
        async def complete(self, prompt, sampling):
            raise CompleterFailed("the engine failed")

    with pytest.raises(CompleterFailed):
        again(local.choose(read(known()), 1.0, 1), Dead(lambda prompt, sampling: [2]))


def test_numbers_by_hand():
    """Scores 1, 0.5, 0.5, 0 spread by sqrt(1/8); 0.5, 0.5 teach nothing and are left out."""
    groups = [made.group(1.0, 0.0, place=(k, 0)) for k in range(3)]
    sets = [
        [dataclasses.replace(made.trajectory(1.0), judged=score) for score in scores]
        for scores in ((1.0, 0.5, 0.5, 0.0), (0.5, 0.5))
    ]
    found, stats = local.joined(groups, {(0, 0): sets[0], (1, 0): sets[1]})
    assert [len(one.local) for one in found] == [4, 0, 0]
    tokens = len(fakes.tokenizer().encode("the code")) + 1
    assert stats.metrics() == {
        "local/groups": 2,
        "local/informative_share": 0.5,
        "local/samples": 6,
        "local/failed": 0,
        "local/score": 0.5,
        "local/spread": pytest.approx(0.125**0.5 / 2),
        "local/tokens": 6 * tokens,
    }
    assert local.LocalStats().metrics()["local/score"] == 0


def test_another_process_makes_the_same_of_what_it_is_told():
    groups = read(known("a"), task("b", SHORT, answer="red"), known("c"))
    chosen = local.choose(groups, 1.0, 1)
    sets = again(chosen, Failing(3))
    told = serialization.told_local(json.loads(json.dumps(serialization.tell_local(sets))), chosen)
    assert any(sample is None for one in sets for sample in one)
    for mine, theirs in zip(sets, told, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is None:
                continue
            assert (a.reward, a.reward_parts) == (b.reward, b.reward_parts)
            assert (
                dataclasses.replace(a.reading, turns=()).__dict__
                == dataclasses.replace(b.reading, turns=()).__dict__
            )
            (one,), (other,) = a.turns, b.turns
            assert one.prompt is other.prompt and one.kind is other.kind
            assert np.array_equal(one.completion.tokens, other.completion.tokens)
            bits = [x.completion.behaviour_logprobs for x in (one, other)]
            assert bits[0].tobytes() == bits[1].tobytes() and bits[1].dtype == np.float32
            assert one.completion.finish is other.completion.finish
            assert one.completion.policy_version == other.completion.policy_version


def test_evidence_without_words_is_named_with_its_task():
    groups = read(known(facts=(Evidence(" ", 0.5),)))
    with pytest.raises(ValueError, match="task 'a': the evidence at place 0.5 has no text"):
        again(local.choose(groups, 1.0, 1), scribe())


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ((1, 0.5, 0.5), "at least 2, or 0 for none"),
        ((4, 0.0, 0.5), "share is 0, so nothing is learnt from samples = 4"),
        ((4, 0.5, 0.0), "weight is 0, so nothing is learnt"),
        ((0, 0.0, 0.0), None),
    ],
)
def test_what_teaches_nothing_is_refused(numbers, says):
    if says is None:
        LocalSamples(*numbers)
        return
    with pytest.raises(ValueError, match=says):
        LocalSamples(*numbers)


def test_a_reward_sees_the_reading_up_to_the_turn_that_was_written_again():
    """Its memories are those before, the new one, and no later one; then the answer from it."""
    (group,) = read(task("a"))
    chosen = [local.ChosenTurn(group, 1, 2)]
    before = memories(group.trajectories[1])[:2]
    seen = []

    def reward(reading):
        seen.append([memory.text for memory in reading.memories])
        assert [memory.chunk_tokens for memory in reading.memories] == [4, 4, 4]
        return len(reading.memories[-1].text) / 100

    how = reader(scribe())
    with functions.lending([reward]) as (name,):
        shown = rewards.Shown(how.tokenizer, how.template, how.rules)
        scoring = rewards.of(name, shown=shown)
    (made_again,) = asyncio.run(local.write_again(chosen, how, 4, 1, scoring))
    texts = [written(one) for one in made_again]
    assert sorted(seen) == sorted([*before, text] for text in texts)
    assert [one.reward for one in made_again] == [len(text) / 100 for text in texts]


def memories(trajectory) -> list[str]:
    after = memory_agent.memories(fakes.rules(), fakes.template(), trajectory.turns)
    return [text(memory) for memory in after]
