"""Sizes that follow from template and rules: how long turns get, and what has to hold them.

A turn that does not fit would stop a run in the middle of a rollout, at the first memory that is
long enough. So what a config says of `engine.row_tokens`, `engine.pages` and `grpo.row_length`
is compared here, before anything is loaded, with the longest turn that template and rules allow;
and where it says 0, the size is derived from it. Above: builders and train; below: text.prompts.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from notepad_jax import keys
from notepad_jax.reading import answer
from notepad_jax.reading.rules import Rules
from notepad_jax.setup.config.engine import EngineKeys
from notepad_jax.setup.config.whole import Training
from notepad_jax.text.prompts import Template
from notepad_jax.types import Prompt

# What is derived holds some turns at once: fewer launches and fuller rows, for more memory.
TAILS = 4  # of a row, behind one prefix
MEMBERS = 8  # readings that share a prefix, of those that an engine runs at once


@dataclasses.dataclass(frozen=True)
class TurnSize:
    """Tokens of one kind of turn at its limits."""

    shared: int  # of the prompt, before the memory (or the question)
    private: int  # of the prompt, from there on
    completion: int
    alone: bool = False  # no other reading shares `shared`; other contexts of one answer do
    common: int = 0  # of `private`, what the tails of a group begin with: all before the memory

    @property
    def prompt(self) -> int:
        return self.shared + self.private

    @property
    def whole(self) -> int:
        return self.prompt + self.completion


@dataclasses.dataclass(frozen=True)
class TurnSizes:
    """The turns of a reading at their limits."""

    update: TurnSize
    answers: tuple[TurnSize, ...]  # the contexts of an answer, one or more

    @property
    def all(self) -> tuple[TurnSize, ...]:
        return self.update, *self.answers


def turns(template: Template, rules: Rules) -> TurnSizes:
    """Returns how long the turns of a reading may get."""
    limits = rules.max_question, rules.chunk_size, rules.most_memory(template)
    question, chunk, memory = (np.zeros(n, np.int32) for n in limits)
    memory = max(memory, template.no_memory, key=len)
    other = np.asarray(memory) + 1  # what another member of the group may have written
    updates = [template.update_prompt(question, chunk, own) for own in (memory, other)]
    asked = [template.answer_prompt(question, own) for own in (memory, other)]
    return TurnSizes(_turn(*updates, rules.max_memory), _answers(*asked, rules))


def _answers(asked: Prompt, other: Prompt, rules: Rules) -> tuple[TurnSize, ...]:
    if rules.answer_chunks == 1:
        return (_turn(asked, other, rules.max_answer),)
    own = answer.own_prefix(asked)
    first = dataclasses.replace(_turn(own, own, rules.max_answer), alone=True, common=0)
    more = dataclasses.replace(
        first, private=first.private + rules.carry, completion=rules.max_answer - rules.carry
    )
    return (first, *[more] * (rules.answer_chunks - 1))


def _turn(prompt: Prompt, other: Prompt, completion: int) -> TurnSize:
    tails = zip(prompt.tail[:-1], other.tail[:-1], strict=True)  # the last token is its own
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], tails))
    return TurnSize(len(prompt.shared), len(prompt.tail), completion, common=common)


# ---------------------------------------------------------------- the engine's


def row_tokens(engine: EngineKeys, reading: TurnSizes) -> int:
    """Returns `engine.row_tokens`, derived where it is 0. Raises ValueError if a tail is longer.

    A prefix of less than a page is not shared, so it belongs to the tail.
    """
    page, shares = engine.page_size, engine.share_prefixes
    tail = max(
        turn.private if shares and turn.shared >= page else turn.prompt for turn in reading.all
    )
    longest = max(turn.completion for turn in reading.all)
    if not engine.row_tokens:
        return _up(TAILS * (tail + longest), 128)
    if engine.row_tokens < tail:
        raise ValueError(
            f"engine.row_tokens is {engine.row_tokens:,}, but with this template and these limits "
            f"(reading) a turn's own part has up to {tail:,} tokens; use {tail:,} or more, or 0, "
            f"which derives it"
        )
    return engine.row_tokens


def pages(engine: EngineKeys, reading: TurnSizes, max_prompt: int, max_new: int) -> int:
    """Returns `engine.pages`, derived where it is 0: all slots at once, each group's prefix once.

    `max_prompt` and `max_new` bound every context; one of them always fits.
    """
    if engine.pages:
        return engine.pages
    size = engine.page_size
    private = max(
        size + turn.private + turn.completion + (turn.shared if turn.alone else 0)
        for turn in reading.all
    )
    shared = max(0 if turn.alone else turn.shared for turn in reading.all)
    groups = -(-engine.slots // MEMBERS) + 1
    together = engine.slots * -(-private // size) + groups * -(-shared // size)
    return max(together, -(-(max_prompt + max_new) // size))


# ---------------------------------------------------------------- the trainer's


def row_length(config: Training, reading: TurnSizes) -> int:
    """Returns `grpo.row_length`, derived where it is 0. Raises ValueError if a turn is longer."""
    said, longest = config.grpo.row_length, max(turn.whole for turn in reading.all)
    if said and said < longest:
        raise ValueError(
            f"grpo.row_length is {said:,}, but with this template and these limits (reading) a "
            f"turn has up to {longest:,} tokens; use {longest:,} or more, or 0, which derives it"
        )
    tails = min(config.rollout.group_size, TAILS)
    return said or _up(
        max(turn.shared + tails * (turn.private + turn.completion) for turn in reading.all), 128
    )


def settled(config: Training, template: Template, rules: Rules) -> Training:
    """Returns the config with `grpo.row_length` as `row_length` says."""
    return keys.changed(config, {"grpo.row_length": row_length(config, turns(template, rules))})


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
