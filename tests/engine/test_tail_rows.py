"""Rows of tails that are planned once are those that a new plan gives, wherever their pages lie."""

import dataclasses

import jax
import numpy as np
import pytest

from notepad_jax.engine import tail_rows
from notepad_jax.engine.scheduler import Scheduler
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import NO_TOKENS, Prompt, SamplingParams, tokens

STOP = 2
SETTINGS = EngineSettings(
    slots=16, page_size=8, pages=128, max_prompt=96, max_new_tokens=12, steps_per_launch=1,
    row_tokens=64,
)  # fmt: skip


def prompts(rng: np.random.Generator, shared: int, count: int) -> list[Prompt]:
    """Prompts behind one prefix; every second tail begins as the one before it."""
    prefix = tokens(rng.integers(4, 60, shared))
    tails = [rng.integers(4, 60, rng.integers(9, 20)) for _ in range(count)]
    for one, other in zip(tails[::2], tails[1::2], strict=False):
        other[:8] = one[:8]
    drafts = [tokens([*rng.integers(4, 60, rng.integers(0, 6)), STOP]) for _ in range(count)]
    return [Prompt(prefix, tokens(x), draft) for x, draft in zip(tails, drafts, strict=True)]


def admitted(scheduler: Scheduler, asked: list[Prompt], seed: int):
    for number, prompt in enumerate(asked):
        scheduler.submit(prompt, SamplingParams(1.0, 0.9, 12, (STOP,), seed + number))
    return scheduler.admit().contexts


@pytest.mark.parametrize("shared", [0, 16, 21])
def test_a_plan_that_is_used_again_gives_the_rows_of_a_new_one(shared):
    rng = np.random.default_rng(shared)
    asked = prompts(rng, shared, 6)
    if not shared:  # what is private is joined anew for each turn, unless there is nothing to join
        asked = [dataclasses.replace(prompt, shared=NO_TOKENS) for prompt in asked]
    scheduler, plans = Scheduler(SETTINGS, 0), tail_rows.RowPlans(SETTINGS)
    first = admitted(scheduler, asked, seed=1)
    planned = plans.of(first)
    for context in rng.permutation(np.array(first, object)):  # so that pages come back in disorder
        scheduler.cancel(context)
    others = prompts(rng, 13, 3)
    again = admitted(scheduler, asked, seed=2**40)
    assert [c.pages for c in first] != [c.pages for c in again]
    for contexts in (again, admitted(scheduler, others, seed=3)):
        found, fresh = plans.of(contexts), tail_rows.RowPlans(SETTINGS).of(contexts)
        assert (found is planned) == (contexts is again and shared > 0)
        assert [one.members for one in found] == [one.members for one in fresh]
        for one, other in zip(found, fresh, strict=True):
            theirs = [contexts[i] for i in one.members]
            rows = [tail_rows.tail_row(SETTINGS, plan, theirs) for plan in (one, other)]
            for mine, new in zip(*map(jax.tree.leaves, rows), strict=True):
                np.testing.assert_array_equal(mine, new)


def test_every_token_is_written_into_its_own_page_and_sampled_with_its_own_noise():
    rng = np.random.default_rng(7)
    contexts = admitted(Scheduler(SETTINGS, 0), prompts(rng, 21, 6), seed=2**33 + 5)
    flat = {}
    for plan in tail_rows.RowPlans(SETTINGS).of(contexts):
        theirs = [contexts[i] for i in plan.members]
        row = tail_rows.tail_row(SETTINGS, plan, theirs)
        cache = {}
        for at, target in enumerate(row.target.tolist()):
            if target < SETTINGS.pages * SETTINGS.page_size:
                assert target not in cache
                cache[target] = int(row.tokens[0, at])
        copies = zip(row.copies.source, row.copies.target, row.copies.tokens, strict=True)
        for source, target, count in list(copies)[: row.copies.count]:
            for offset in range(count):  # of the prefix's last page nothing stands in this cache
                place = int(source) * 8 + offset
                cache[int(target) * 8 + offset] = cache.get(place, -1)
        for context, span in zip(theirs, plan.spans, strict=True):
            ids = [*context.tail, *context.draft[:-1]]
            places = [
                context.pages[k // 8] * 8 + k % 8
                for k in range(context.ragged, context.ragged + len(ids))
            ]
            assert [cache[place] for place in places] == ids
            seeds = row.draws.seed[span].astype(np.uint64)
            assert set((seeds[:, 0] << np.uint64(32) | seeds[:, 1]).tolist()) == {
                context.sampling.seed
            }
            assert row.draws.index[span].tolist() == list(range(len(context.draft)))
            flat[context] = [int(row.tokens[0, at]) for at in row.sample_at[span]]
    assert len(flat) == 6
    for context, after in flat.items():
        assert after == [*context.tail[-1:], *context.draft[:-1]]


def test_plans_that_are_kept_are_few():
    rng = np.random.default_rng(0)
    scheduler, plans = Scheduler(SETTINGS, 0), tail_rows.RowPlans(SETTINGS)
    for _ in range(2 * plans.KEPT):
        contexts = admitted(scheduler, prompts(rng, 8, 1), seed=0)
        plans.of(contexts)
        scheduler.cancel(contexts[0])
    assert len(plans._found) == plans.KEPT
