"""What answers of several contexts need of an engine, a row and a plan, by hand."""

from notepad_jax import keys
from notepad_jax.engine import shapes
from notepad_jax.planner import workload
from notepad_jax.setup import builders, configuration, sizes
from notepad_jax.setup.sizes import TurnSize
from notepad_jax.text.prompts import Template
from tests import fakes, tiny

WORDS = [f"--config.reading.{word}" for word in
         ("max_question=8", "chunk_size=16", "max_memory=6", "max_answer=40")]  # fmt: skip
LONG = [*WORDS, "--config.reading.answer_chunks=3", "--config.reading.carry=30",
        "--config.engine.pages=0", "--config.engine.row_tokens=0",
        "--config.engine.max_prompt=0"]  # fmt: skip
# The template question_last: a chunk, and around question and memory three marks.
ASKED = 1 + 8 + 1 + 6 + 1


def made(words) -> tuple:
    config = configuration.load("quickstart", words)
    return config, builders.rules(config.reading), fakes.template()


def test_contexts_by_hand():
    config, rules, template = made(LONG)
    turns = sizes.turns(template, rules)
    more = TurnSize(ASKED - 1, 1 + 30, 10, alone=True)
    assert turns.answers == (TurnSize(ASKED - 1, 1, 40, alone=True), more, more)
    assert [turn.whole for turn in turns.answers] == [ASKED + 40] * 3
    # Bundles of four: update turns behind a chunk, or contexts behind question and memory.
    assert sizes.row_length(_free(config), turns) == 256 >= 16 + 4 * (1 + 31 + 10)
    # A context of its own prefix has pages for all of it; the chunk is shared by eight.
    size, slots = config.engine.page_size, config.engine.slots
    together = slots * -(-(size + ASKED + 40) // size) + (slots // 8 + 1) * -(-16 // size)
    settings = builders.engine_settings(config.engine, tiny.CONFIG, rules, template)
    assert settings.pages == together
    # The longest prompt is of an excerpt, as long as a chunk, whose answer goes on.
    assert (settings.max_prompt, settings.max_new_tokens) == (16 + 1 + 8 + 1 + 30, 40)
    # Where less than a page is shared, question and memory lie in the tail.
    tail = ASKED + 30 if size > ASKED - 1 else 31
    assert sizes.row_tokens(_short_rows(config, tail), turns) == tail
    assert shapes.prefix_widths(settings)[-1] >= ASKED - 1


def _free(config):
    return keys.changed(config, {"grpo.row_length": 0})


def _short_rows(config, tokens):
    return keys.changed(config.engine, {"row_tokens": tokens})


def test_one_context_has_the_sizes_that_it_had():
    _, rules, template = made(WORDS)
    # Members of a group share the question, with its mark, too.
    assert sizes.turns(template, rules).answers == (TurnSize(1, ASKED - 1, 40, common=9),)


def test_a_plan_counts_every_context():
    config, rules, template = made(LONG)
    found = workload.readings(config, template)
    assert found.completion_tokens == found.chunks * 6 + 40 + 10 + 10
    settings = builders.engine_settings(config.engine, tiny.CONFIG, rules, template)
    one = workload.rollout(found, settings, 1, drafts=False)
    groups, tails = found.groups, max(1, settings.row_tokens // (ASKED + 6))
    behind_a_chunk = -(-found.members // tails)
    # Whoever has a prefix of his own has a launch of his own.
    assert one.tail_launches == groups * (found.chunks * behind_a_chunk + 3 * found.members)
    packed = workload.update(found, 10**6, rows=1, parts=1, minibatches=1, epochs=1)
    updates = found.chunks * groups * (16 + found.members * (ASKED + 6))
    updates -= found.chunks * groups * (found.members - 1) * 10  # question and marks, once
    assert packed.tokens == updates + groups * found.members * 3 * (ASKED + 40)


def test_templates_of_the_shipped_kinds_keep_question_and_memory_first():
    for name in ("chunk_first", "memory_first", "question_last"):
        template = Template.load(name, fakes.tokenizer())
        _, rules, _ = made(LONG)
        first, more, _ = sizes.turns(template, rules).answers
        assert first.shared == more.shared and first.private == 1
