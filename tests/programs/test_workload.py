"""How often a step launches what, counted by hand."""

import dataclasses

import pytest

from notepad_jax.engine.settings import EngineSettings
from notepad_jax.programs import configuration, workload
from notepad_jax.programs.sizes import Turn
from notepad_jax.programs.workload import Readings

# 4 groups of 2; a document of 3 chunks; rows of 100 hold a prefix of 40 and two tails of 20.
READINGS = Readings(
    groups=4, members=2, chunks=3, update=Turn(40, 10, 10), answers=(Turn(0, 15, 5),)
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

    no_memory = ()

    def update_prompt(self, question, chunk, memory):
        return type("Prompt", (), dict(shared=[0] * (len(question) + len(chunk)), tail=memory))

    def answer_prompt(self, question, memory):
        return type("Prompt", (), dict(shared=[], tail=[0] * (len(question) + len(memory))))


def test_limits_come_from_the_config():
    config = configuration.load("qwen2_5_7b")
    found = workload.readings(config, Counting())
    assert found == Readings(128, 16, 7, Turn(5256, 1024, 1024), (Turn(0, 1280, 1024),))
    config = configuration.load("quickstart")
    found = workload.readings(config, Counting())
    assert (found.groups, found.members, found.chunks) == (20, 8, 8)
    assert found.completion_tokens == 8 * 8 + 4
