"""How often a step launches what, counted by hand."""

import dataclasses

import pytest

from notepad_jax import types
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import batch
from notepad_jax.planner import workload
from notepad_jax.planner.workload import RolloutWork
from notepad_jax.setup import builders, configuration
from notepad_jax.setup.sizes import TurnSize
from tests import fakes
from tests.grpo.conftest import group, turn

# 4 groups of 2; a document of 3 chunks; rows of 100 hold a prefix of 40 and two tails of 20.
READINGS = RolloutWork(
    groups=4, members=2, chunks=3, update=TurnSize(40, 10, 10), answers=(TurnSize(0, 15, 5),)
)
SETTINGS = EngineSettings(
    slots=4, page_size=8, pages=64, max_prompt=96, max_new_tokens=10, steps_per_launch=5,
    row_tokens=64,
)  # fmt: skip


def test_an_update_is_packed_as_a_run_packs_it():
    found = workload.update(READINGS, row_length=100, rows=2, parts=2, minibatches=2, epochs=3)
    # Two groups a minibatch: 6 bundles of 40 + 2 x 20, and two of 2 x 20; 100 hold an update
    # bundle alone (80) and an answer tail of 20 beside it.
    assert found.optimizer_steps == 6
    assert found.tokens == 6 * 80 + 4 * 20
    assert found.rows == 6 and found.micro_batches == 3
    assert found.most == 25  # two completions of 10, and one of 5 in the room that is left
    assert found.pairs == 40 * 41 // 2 + 2 * (20 * 40 + 20 * 21 // 2) + 20 * 21 // 2
    assert found.computed == 3 * 2 * 100 and found.fill == 560 / 600
    assert found.copies == 1  # nothing is cut


def test_short_rows_repeat_prefixes_and_long_ones_pad():
    short, long = (workload.update(READINGS, n, rows=3, parts=1, minibatches=2, epochs=1)
                   for n in (60, 200))  # fmt: skip
    # A prefix and one tail fill a row of 60: each of the 12 tails has a copy of its own.
    assert (short.copies, short.rows, short.computed) == (2, 14, 15 * 60)
    assert short.tokens == 12 * 60 + 4 * 20
    # Two bundles of 80 and two answers are a row of 200; three rows are one micro-batch.
    assert (long.copies, long.rows, long.computed) == (1, 3, 600)
    assert long.fill == (6 * 80 + 4 * 20) / 600


def test_what_tails_have_in_common_is_written_and_attended_to_once():
    turn = TurnSize(40, 10, 10, common=4)
    one = dataclasses.replace(READINGS, groups=1, members=3, chunks=1, update=turn, answers=())
    found = workload.update(one, row_length=100, rows=1, parts=1, minibatches=1, epochs=1)
    assert found.tokens == 40 + 20 + 16 + 16
    # Tail tokens see 40 of the prefix and their own tail up to themselves.
    seen = [40 + k for k in range(1, 21)]
    assert found.pairs == 40 * 41 // 2 + sum(seen) + 2 * sum(seen[4:])


def test_rows_are_those_that_training_packs():
    """Turns at their limits, made up and packed by `grpo.batch`: rows, tokens and fill agree."""
    config = configuration.load("quickstart", ["--config.data.questions=1"])
    template, rules = fakes.template(), builders.rules(config.reading)
    reading = dataclasses.replace(workload.readings(config, template), groups=1)
    groups, worth = [group_of(template, rules, reading)], [[1.0] * reading.members]
    for length in (2 * reading.update.whole, 3000):
        found = workload.update(reading, length, rows=2, parts=1, minibatches=1, epochs=1)
        packed = batch.pack(groups, worth, length, rows_multiple=2, length_multiple=length).stats
        assert packed.packed_tokens == found.tokens
        assert packed.rows * packed.row_length == found.computed
        assert packed.fill == found.fill
    assert reading.update.common > rules.max_question <= reading.answers[0].common


def group_of(template, rules, reading):
    """A group at its limits, whose members' memories differ from their first token on."""
    question = types.tokens([10] * rules.max_question)

    def turns(member):
        memory = types.tokens([40 + member] * rules.max_memory)
        for k in range(reading.chunks):
            chunk = types.tokens([60 + k] * rules.chunk_size)
            prompt = template.update_prompt(question, chunk, memory)
            yield turn(prompt.shared, prompt.tail, [7] * rules.max_memory)
        prompt = template.answer_prompt(question, memory)
        yield turn(prompt.shared, prompt.tail, [7] * rules.max_answer, kind=types.TurnKind.ANSWER)

    return group([list(turns(m)) for m in range(reading.members)], [1.0] * reading.members)


def test_more_minibatches_than_groups_are_as_many_as_groups():
    found = workload.update(READINGS, row_length=100, rows=1, parts=1, minibatches=9, epochs=1)
    assert found.optimizer_steps == 4


def test_a_turn_that_fits_no_row_is_refused():
    with pytest.raises(ValueError, match="60 tokens that must lie in one row"):
        workload.update(READINGS, row_length=59, rows=1, parts=1, minibatches=1, epochs=1)


def test_a_rollout_is_shared_by_the_engines():
    one, two = (workload.rollout(READINGS, SETTINGS, n, drafts=False) for n in (1, 2))
    # Rows of 96 tokens hold two prefixes of 40; tails of 10, six to a row of 64.
    assert (one.prefix_launches, two.prefix_launches) == (4 * 3 / 2, 2 * 3 / 2)
    assert one.prefix_pairs == 2 * (40 * 41 // 2)
    assert (one.tail_launches, two.tail_launches) == (4 * 4, 2 * 4)
    assert one.tail_pairs == 6 * (10 * 40 + 10 * 11 // 2)
    # 8 readings write 35 tokens each; 4 at once, 5 a launch.
    assert (one.decode_launches, two.decode_launches) == (8 * 35 / 4 / 5, 4 * 35 / 4 / 5)
    assert (one.decode_shape.slots, one.decode_shape.rows) == (4, 4)
    assert (one.shared, one.private) == (40, 10 + 10 / 2)


def test_turns_that_are_written_again_are_counted():
    """Of 2 of the 4 groups one turn three times more, answered from; 10 and 5 tokens each."""
    more = dataclasses.replace(READINGS, local_groups=2, local_samples=3)
    one = workload.rollout(more, SETTINGS, 1, drafts=False)
    assert one.prefix_launches == (4 * 3 + 2) / 2
    assert one.tail_launches == 4 * 4 + 2 * 2
    assert one.decode_launches == (8 * 35 + 2 * 3 * 15) / 4 / 5
    found = workload.update(more, row_length=100, rows=2, parts=2, minibatches=2, epochs=3)
    # In each minibatch one bundle has five tails: a row of three, and 40 + 2 x 20 in another.
    assert found.tokens == 6 * 80 + 4 * 20 + (40 + 3 * 20)
    config = configuration.load("quickstart", ["--config.rollout.local.samples=4"])
    reading = workload.readings(config, Counting())
    assert (reading.local_groups, reading.local_samples) == (5, 4)  # a quarter of 20


def test_drafts_lengthen_tails():
    drafted = workload.rollout(READINGS, SETTINGS, 1, drafts=True)
    assert drafted.tail_pairs == 3 * (20 * 40 + 20 * 21 // 2)


class Counting:
    """A template whose prompts are as long as what they show."""

    no_memory = between = ()

    def update_prompt(self, question, chunk, memory):
        return type("Prompt", (), dict(shared=[*question, *chunk], tail=[*memory]))

    def answer_prompt(self, question, memory):
        return type("Prompt", (), dict(shared=[], tail=[*question, *memory]))


def test_limits_come_from_the_config():
    config = configuration.load("qwen2_5_7b")
    found = workload.readings(config, Counting())
    # A group's members share the question, too, which their answers' prompts begin with.
    answer = TurnSize(0, 1280, 1024, common=256)
    assert found == RolloutWork(128, 16, 7, TurnSize(5256, 1024, 1024), (answer,))
    config = configuration.load("quickstart")
    found = workload.readings(config, Counting())
    assert (found.groups, found.members, found.chunks) == (20, 8, 8)
    assert found.completion_tokens == 8 * 8 + 4
    several = configuration.load("quickstart", ["--config.reading.passes=3"])
    assert workload.readings(several, Counting()).chunks == 3 * 8
    words = ["--config.reading.order=parallel", "--config.reading.passes=2"]
    rounds = configuration.load("quickstart", words)
    assert workload.readings(rounds, Counting()).chunks == 2 * (8 + 7)
