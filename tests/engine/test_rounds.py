"""A parallel reading by the engine: a chunk is prefilled once for a group and all its rounds."""

import asyncio
import dataclasses

import numpy as np
import pytest
import tiny

from notepad_jax.engine.service import EngineService
from notepad_jax.reading import memory_agent
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.prompts import Template
from notepad_jax.types import PolicySnapshot, TurnKind, tokens

TEMPLATE = Template(
    name="rounds",
    update=("chunk", tokens([5]), "question", tokens([6]), "memory", tokens([7])),
    answer=(tokens([5]), "question", tokens([6]), "memory", tokens([8])),
    direct=(), no_memory=tokens([9]), keep=tokens([10]), between=tokens([11]),
    stop_ids=tiny.STOPS,
)  # fmt: skip
RULES = Rules(4, 16, 6, 6, "overwrite_or_keep", order="parallel", passes=2)
DOCUMENT = [tokens(np.arange(16) * 3 % 40 + 12 + k) for k in range(6)]
PAGE = tiny.SETTINGS.page_size


def group(members, settings=tiny.SETTINGS, **options):
    """The turns of a group's readings, each in its order, and what the engine counted."""

    async def one(service, seed):
        state = memory_agent.start(tokens([20, 21]), DOCUMENT)
        sampling = TurnSampling(1.0, 1.0, tiny.STOPS, seed)
        course = memory_agent.read(service, TEMPLATE, RULES, state, sampling)
        return [turn async for turn, _ in course]

    async def run():
        snapshot = PolicySnapshot(0, tiny.params())
        async with EngineService(tiny.executor(settings), snapshot, **options) as service:
            made = await asyncio.gather(*(one(service, seed) for seed in range(members)))
            return made, service.stats

    return asyncio.run(run())


@pytest.fixture(scope="module")
def whole():
    return group(3)


def said(readings):
    return [[turn.completion.tokens.tolist() for turn in turns] for turns in readings]


def test_a_chunk_is_prefilled_once_for_all_members_and_rounds(whole):
    readings, stats = whole
    turns = [turn for turns in readings for turn in turns if turn.kind is TurnKind.UPDATE]
    assert {turn.round for turn in turns} == {0, 1}
    assert sum(turn.level == 0 for turn in turns) == 3 * 2 * len(DOCUMENT)
    merged = {turn.prompt.shared.tobytes() for turn in turns if turn.level}
    merged = sum(len(one) // tokens([0]).itemsize for one in merged if len(one) >= 4 * PAGE)
    assert stats.prefix_tokens == sum(map(len, DOCUMENT)) + merged


def test_attentions_pairs_are_counted_a_shared_prefix_once(whole):
    readings, stats = whole
    turns = [turn for turns in readings for turn in turns]
    ends = [len(turn.prompt.tokens) + len(turn.completion.tokens) - 1 for turn in turns]
    cached = {turn.prompt.shared.tobytes(): len(turn.prompt.shared) for turn in turns}
    cached = {ids: length for ids, length in cached.items() if length >= PAGE}
    starts = [cached.get(turn.prompt.shared.tobytes(), 0) for turn in turns]
    seen = sum(sum(range(start + 1, end + 1)) for start, end in zip(starts, ends, strict=True))
    assert stats.pairs == seen + sum(sum(range(n + 1)) for n in cached.values())
    assert sum(cached.values()) == stats.prefix_tokens


@pytest.mark.slow
def test_neither_company_nor_few_slots_change_what_is_written(whole):
    readings, _ = whole
    few = dataclasses.replace(tiny.SETTINGS, slots=2)
    assert said(group(3, few)[0]) == said(readings)
    assert said(group(1)[0]) == said(readings)[:1]
