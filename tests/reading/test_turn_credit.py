"""What each turn gained of the facts that it was shown, serially and in rounds."""

import dataclasses
import itertools

import fakes
import numpy as np
import pytest

from notepad_jax.reading import turn_credit
from notepad_jax.reading.rules import Rules
from notepad_jax.rollout import rewards
from notepad_jax.scoring.recall import Recall
from notepad_jax.types import Evidence, Reading, Status, Task, TextDocument, TurnKind
from tests.reading.test_rounds import KEEP, PARALLEL, TEMPLATE, began, document, read

STOP = 2


def decode(ids):
    """Word by word, so that a fact is its id."""
    return " ".join(f"w{i}" for i in ids)


def task(*facts, answers=("w0",), metric="em"):
    evidence = tuple(Evidence(f"w{fact}", 0.0) for fact in facts)
    return Task("t", "?", TextDocument("x"), answers, "test", metric, evidence=evidence)


def saying(*notes):
    """Update turns in their order write these; None keeps, and so does whatever comes after."""
    told = itertools.chain(notes, itertools.repeat(None))

    def said(prompt, sampling):
        note = [] if fakes.is_answer(prompt) else next(told)
        return [*([KEEP] if note is None else note), STOP]

    return fakes.Scripted(said)


def gains(notes, of, chunks=4, rules=PARALLEL):
    turns = [turn for turn, _ in read(saying(*notes), began(document(chunks, {})), rules)]
    return turns, turn_credit.gains(rules, TEMPLATE, decode, turns, of)


def test_rounds_by_hand():
    """Two of four chunks note a fact, the merge drops one, and the second round finds it again.

    What it notes is read beside the memory, and taken over.
    """
    first = [[401], None, [300], [402]]
    again = [None, None, None, [401, 402], [401, 402]]
    turns, found = gains([*first, [401], *again], task(401, 402))
    above = [(turn.round, turn.level, turn.unit) for turn in turns if turn.level]
    assert above == [(0, 1, 0), (1, 1, 0)]
    assert found[:5] == (0.5, 0.0, 0.0, 0.5, -0.5)
    assert found[5:9] == (0.0, 0.0, 0.0, 0.5)
    assert not any(found[9:]), "the third round leaves what there is"
    assert len(found) == sum(turn.kind is TurnKind.UPDATE for turn in turns)


def test_a_note_that_drops_what_the_memory_had_loses_it():
    notes = [[401], None, None, None, [402], None, None, None]
    _, found = gains(notes, task(401, 402))
    assert found[:8] == (0.5, 0, 0, 0, 0.0, 0, 0, 0), "one fact for another"
    _, found = gains([[401, 402], None, None, None, [402]], task(401, 402))
    assert found[4] == -0.5


def test_notes_that_are_read_serially_are_shown_with_the_memory_so_far():
    rules = dataclasses.replace(PARALLEL, order="mixed", passes=1, chunk_size=12)
    facts = range(401, 407)
    notes = [[fact, 300, 300, 300, 300] for fact in facts]
    revised = [[401, 402], [401, 403], [401, 405, 406]]
    turns, found = gains([*notes, *revised], task(*facts), 6, rules)
    above = [turn for turn in turns if turn.level == 1]
    assert len(above) == len(found) - 6 and len(above) > 1
    assert found[:6] == pytest.approx([1 / 6] * 6)
    assert found[6] == 0.0, "both notes are in the memory"
    assert found[7] == pytest.approx((2 - 4) / 6), "of two in memory and two in notes two are left"


@pytest.mark.parametrize("update", ["overwrite", "overwrite_or_keep"])
def test_serial_gains_add_up_to_the_recall_of_the_last_memory(update):
    rng, rules = np.random.default_rng(0), Rules(8, 16, 6, 6, update)
    lost = 0
    for _ in range(20):
        notes = [
            None if rng.random() < 0.3 else rng.choice([401, 402, 403, 404, 300], 3).tolist()
            for _ in range(6)
        ]
        pairs = read(saying(*notes), began(document(6, {})), rules)
        of, recall = task(401, 402, 403, 404), None
        found = turn_credit.gains(rules, TEMPLATE, decode, [turn for turn, _ in pairs], of)
        recall = Recall(of.evidence)
        recall.see(decode(pairs[-1][1].memory_tokens))
        assert sum(found) == pytest.approx(recall.final)
        lost += min(found) < 0
    assert lost > 5


def test_where_nobody_wrote_evidence_down_gold_answers_are_the_facts():
    notes = [[401], [401, 402]]
    rules = Rules(8, 16, 6, 6, "overwrite")
    either = task(answers=("w401", "w402"))
    every = task(answers=("w401", "w402"), metric="ruler_all")
    assert gains(notes, either, 2, rules)[1] == (1.0, 0.0)
    assert gains(notes, every, 2, rules)[1] == (0.5, 0.5)
    assert gains(notes, task(answers=("",)), 2, rules)[1] == (0.0, 0.0)
    empty = dataclasses.replace(either, evidence=(Evidence(" ", 0.0),))
    with pytest.raises(ValueError, match="no text to look for"):
        gains(notes, empty, 2, rules)


def test_it_is_a_reward_of_memories_alone_or_by_weight():
    notes, of = [[401], None, None, [402], [401]], task(401, 402)
    turns, found = gains(notes, of)
    reading = Reading("t", 0, tuple(turns), "w0", Status.ANSWERED)
    shown = rewards.Shown(Words(), TEMPLATE, PARALLEL)
    answers = rewards.of("", shown=shown)
    one = rewards.with_memories(answers, turn_credit.GAIN).score(reading, of, rewards.NOTHING)
    assert one.memory_rewards == found and one.judged == 1.0
    assert one.reward_parts["memories"] == pytest.approx(sum(found) / len(found))
    both = rewards.with_memories(answers, f"{turn_credit.GAIN}=3,em=1")
    mixed = both.score(reading, of, rewards.NOTHING)
    assert mixed.memory_rewards == pytest.approx([0.75 * gain for gain in found])


def test_rewards_of_one_s_own_see_the_notes():
    notes, of = [[401], None, None, [402], [401]], task(401, 402)
    turns, _ = gains(notes, of)
    updates = [turn for turn in turns if turn.kind is TurnKind.UPDATE]
    sizes = tuple(turn.size for turn in updates)
    reading = Reading("t", 0, tuple(turns), "w0", Status.ANSWERED, sizes)
    shown = rewards.Shown(Words(), TEMPLATE, PARALLEL)
    found = shown.record(reading, of).memories
    assert [one.text for one in found][:6] == ["w401", "", "", "w402", "w401", "w401"]
    assert [one.text for one in found] == shown.texts(reading)
    assert [one.held for one in found][3:5] == [(False, True), (True, False)]
    places = [(one.round, one.level, one.unit) for one in found]
    assert places == [(turn.round, turn.level, turn.unit) for turn in updates]


class Words:
    decode = staticmethod(decode)


def test_nothing_that_was_noted_is_what_a_turn_was_shown():
    """An empty note leaves the memory in a round, and nothing in a serial reading."""
    _, found = gains([[401], None, None, None, []], task(401))
    assert found[4] == 0.0
    serial = Rules(8, 16, 6, 6, "overwrite")
    assert gains([[401], []], task(401), 2, serial)[1] == (1.0, -1.0)
