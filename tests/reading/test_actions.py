"""What a turn can do besides writing: keep, note nothing, leave early, ask for another round."""

import asyncio
import dataclasses

import fakes
import pytest

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.types import Action, TurnKind, tokens
from tests.reading.test_rounds import KEEP, TEMPLATE, began, document, note_taker, places

EXIT, AGAIN, END = tokens([390, 391]), tokens([392]), tokens([393, 394])
ACTIONS = dataclasses.replace(TEMPLATE, between=tokens(), exit=EXIT, again=AGAIN, end=END)
SERIAL = Rules(8, 16, 6, 6, "overwrite_or_keep", exits=True)
CHUNKS = document(6, {1: [401], 3: [402], 5: [403]})


def acting(told=(), ended=()):
    """A note taker that leaves when it holds all of `told`, and, at the end, says `ended`."""
    asks = iter(ended)
    plain = note_taker()

    def said(prompt, sampling):
        memory = fakes.memory_of(prompt).tolist()
        if not fakes.is_answer(prompt) and prompt.shared.tolist()[-2:] == END.tolist():
            return [*next(asks), sampling.stop_ids[0]]
        if not fakes.is_answer(prompt) and told and set(told) <= set(memory):
            return [*EXIT.tolist(), sampling.stop_ids[0]]
        return plain._answer(prompt, sampling)

    return fakes.Scripted(said)


def read(completer, rules, chunks=CHUNKS):
    async def run():
        reading = memory_agent.read(
            completer, ACTIONS, rules, began(chunks), TurnSampling(1.0, 1.0, (2,), 7)
        )
        return [pair async for pair in reading]

    return asyncio.run(run())


def did(pairs):
    return [turn.action for turn, _ in pairs if turn.kind is TurnKind.UPDATE]


def test_the_exit_marker_leads_to_the_answer_and_leaves_the_memory():
    pairs = read(acting(told=[401]), SERIAL)
    assert did(pairs) == [Action.KEEP, Action.WRITE, Action.EXIT]
    assert pairs[-1][0].kind is TurnKind.ANSWER and pairs[-1][0].chunk == 3
    assert pairs[-1][1].memory_tokens.tolist() == [401]


def test_where_a_reading_does_not_exit_the_marker_is_a_memory_like_any_other():
    pairs = read(acting(told=[401]), dataclasses.replace(SERIAL, exits=False))
    assert did(pairs)[2] is Action.WRITE
    assert pairs[2][1].memory_tokens.tolist() == EXIT.tolist()


def test_an_exit_ends_all_passes():
    pairs = read(acting(told=[401, 402]), dataclasses.replace(SERIAL, passes=3))
    assert did(pairs)[-1] is Action.EXIT and len(pairs) == 6


@pytest.mark.parametrize(("still", "read_chunks"), [(1, 3), (2, 6), (0, 6)])
def test_a_memory_that_stood_still_so_long_is_answered_from(still, read_chunks):
    rules = dataclasses.replace(SERIAL, exits=False, exit_after=still)
    pairs = read(acting(), rules)
    assert len(did(pairs)) == read_chunks  # notes come in every other chunk, from the second on


def test_an_empty_memory_never_counts_as_one_that_stands_still():
    rules = dataclasses.replace(SERIAL, exits=False, exit_after=2)
    assert len(did(read(acting(), rules, document(5, {})))) == 5


@pytest.mark.parametrize("order", ["serial", "parallel", "mixed"])
def test_a_further_round_is_made_only_where_the_policy_asks_for_it(order):
    rules = Rules(8, 16, 6, 6, "overwrite_or_keep", order=order, passes=4, again=True)
    once = read(acting(ended=[[KEEP]]), rules)
    assert [turn.round for turn, _ in once][-2:] == [0, 0]
    assert once[-2][0].level == rounds.ENDED and once[-2][0].size == len(END)
    twice = read(acting(ended=[AGAIN.tolist(), [401]]), rules)
    # The second round changes nothing, so nobody is asked again after it.
    assert did(twice).count(Action.AGAIN) == 1
    assert twice[-1][0].round == 1 and twice[-1][1].memory_tokens.tolist() == [401, 402, 403]
    seeds = [turn.chunk for turn, _ in twice]
    assert seeds == list(range(len(twice)))  # no two turns share noise


def test_at_the_end_a_memory_may_still_be_revised():
    rules = Rules(8, 16, 6, 6, "overwrite", passes=2, again=True)
    pairs = read(acting(ended=[[409]]), rules)
    assert pairs[-1][1].memory_tokens.tolist() == [409]


def test_a_mixed_reading_captures_in_parallel_and_revises_one_note_after_the_other():
    chunks = document(9, {k: [401 + k] for k in range(9)})
    rules = Rules(8, 16, 15, 15, "overwrite_or_keep", order="mixed")
    small = dataclasses.replace(rules, chunk_size=16, max_memory=6)
    pairs = read(acting(), small, chunks)
    assert places(pairs)[(0, 0)] == 9 and set(places(pairs)) == {(0, 0), (0, 1)}
    revised = [(turn, state) for turn, state in pairs if turn.level == 1]
    sizes = [len(state.memory_tokens) for _, state in revised]
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes)  # one memory that grows
    assert did(pairs)[:9] == [Action.WRITE] * 9


def test_memories_are_found_again_by_playing_what_was_done():
    for rules, completer in (
        (SERIAL, acting(told=[401, 402])),
        (Rules(8, 16, 6, 6, "overwrite_or_keep", order="mixed", passes=3, again=True),
         acting(ended=[AGAIN.tolist(), [401]])),
    ):  # fmt: skip
        pairs = read(completer, rules)
        found = memory_agent.memories(rules, ACTIONS, [turn for turn, _ in pairs])
        assert [one.tolist() for one in found] == [s.memory_tokens.tolist() for _, s in pairs]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(order="parallel", exits=True), "only a serial reading can end early"),
        (dict(order="mixed", exit_after=2), "only a serial reading can end early"),
        (dict(exit_after=-1), "exit_after is -1; it must be at least 1 turn, or 0"),
        (dict(again=True), "again is true and passes is 1"),
        (dict(order="mixed", memory_update="heads", heads=2), "merged by the policy"),
    ],
)
def test_what_does_not_go_together_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        Rules(**{**dict(max_question=8, chunk_size=16, max_memory=6, max_answer=6,
                        memory_update="overwrite_or_keep"), **change})  # fmt: skip


def test_a_template_must_have_what_the_rules_want():
    with pytest.raises(ValueError, match="reading.exits is true, and template question_last has"):
        SERIAL.check(dataclasses.replace(TEMPLATE, exit=tokens()))
    again = Rules(8, 16, 6, 6, "overwrite_or_keep", passes=2, again=True)
    with pytest.raises(ValueError, match=r"reading.again is true, .* has no \[again\] section"):
        again.check(TEMPLATE)
    with pytest.raises(ValueError, match=r"section \[end\] of .* has 17 tokens"):
        again.check(dataclasses.replace(ACTIONS, end=tokens([300] * 17)))
    shipped = Template.load("document_first_actions", fakes.tokenizer())
    dataclasses.replace(SERIAL, chunk_size=999, max_memory=99).check(shipped)
    dataclasses.replace(again, chunk_size=999, max_memory=99).check(shipped)
