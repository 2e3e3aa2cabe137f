"""Who runs when, without a device: the facts that were wrong once, and thousands of schedules."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notepad_jax.engine.pages import PagePool, PrefixCache
from notepad_jax.engine.scheduler import PromptTooLong, Scheduler, Stage
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import Prompt, SamplingParams, tokens

STOP = 2
SMALL = EngineSettings(
    slots=8, page_size=8, pages=20, max_prompt=96, max_new_tokens=12, steps_per_launch=4,
    row_tokens=256,
)  # fmt: skip


def prompt(which: int, shared: int, tail: int, draft: int = 0) -> Prompt:
    """Prompts of the same `which` share their shared part."""
    ids = lambda n, start: tokens(start + np.arange(n) % 40)  # noqa: E731
    return Prompt(ids(shared, 4 + which), ids(tail, 5), ids(draft, 6))


def sampling(length: int = 12) -> SamplingParams:
    return SamplingParams(1.0, 1.0, length, (STOP,), 0)


def run(scheduler: Scheduler, rounds: int = 1000) -> int:
    """Lets every turn make a token a round until all have ended; returns the rounds."""
    for n in range(rounds):
        if scheduler.idle:
            return n
        scheduler.admit()
        for context in list(scheduler.running):
            scheduler.record(context, [7], [-1.0])
    raise AssertionError(f"not done after {rounds} rounds")


# ---------------------------------------------------------------- facts


def test_eight_distinct_prompts_take_turns_where_pages_hold_one():
    """20 pages, 14 for one context: all eight failed with OutOfPages."""
    scheduler = Scheduler(SMALL, 0)
    asked = [scheduler.submit(prompt(i, 80, 16), sampling()) for i in range(8)]
    assert len(scheduler.admit().contexts) == 1
    run(scheduler)
    assert [context.stage for context in asked] == [Stage.ENDED] * 8


def test_a_cached_prefix_survives_two_new_ones_admitted_before_its_user():
    """It was evicted under its user: 'NoneType' object has no attribute 'users'."""
    scheduler = Scheduler(dataclasses.replace(SMALL, pages=30), 0)
    scheduler.submit(prompt(0, 40, 8), sampling(1))
    run(scheduler)
    old = next(iter(scheduler.prefixes))
    two = [scheduler.submit(prompt(i, 40, 8), sampling(8)) for i in (1, 2)]
    again = scheduler.submit(prompt(0, 40, 8), sampling(8))
    admission = scheduler.admit()
    assert admission.contexts == (*two, again)
    assert len(admission.prefixes) == 2 and again.prefix is old and old.users == 1
    run(scheduler)


def test_no_tail_is_started_twice_where_pages_are_few():
    """24 pages: 35,280 tail tokens were prefilled where 960 were needed."""
    scheduler = Scheduler(dataclasses.replace(SMALL, pages=24), 0)
    asked = [scheduler.submit(prompt(i % 5, 16, 24), sampling()) for i in range(40)]
    started = []
    while not scheduler.idle:
        started += scheduler.admit().contexts
        for context in list(scheduler.running):
            scheduler.record(context, [7], [-1.0])
    assert started == asked  # each once, in order
    assert sum(len(context.tail) for context in started) == 960


def test_what_is_admitted_has_all_it_will_ever_need():
    """The ragged end of the prefix, the tail and every new token, the draft among them."""
    scheduler = Scheduler(SMALL, 0)
    context = scheduler.submit(prompt(0, 21, 10, draft=12), sampling())
    scheduler.admit()
    assert context.ragged == 5 and len(context.prefix.pages) == 3
    assert len(context.pages) * 8 >= 5 + 10 + 12
    assert scheduler.pool.free == 20 - 3 - 4


def test_a_prefix_whose_last_page_is_one_too_many_is_read_unshared():
    """14 pages hold 96 + 12 tokens, but not with the page in which the prefix ends twice."""
    scheduler = Scheduler(dataclasses.replace(SMALL, pages=14), 0)
    context = scheduler.submit(prompt(0, 45, 51), sampling())
    assert not len(context.shared) and len(context.tail) == 96
    run(scheduler)
    assert context.stage is Stage.ENDED


def test_what_cannot_fit_alone_is_refused_with_both_numbers_and_the_mend():
    tight = dataclasses.replace(SMALL, pages=14, row_tokens=64)
    with pytest.raises(PromptTooLong, match="96 tokens.*holds 64.*engine.pages to 15"):
        Scheduler(tight, 0).submit(prompt(0, 45, 51), sampling())
    with pytest.raises(PromptTooLong, match="106 tokens exceeds the engine's 96"):
        Scheduler(SMALL, 0).submit(prompt(0, 46, 60), sampling())
    with pytest.raises(ValueError, match="9 stop ids.*at most 8"):
        many = SamplingParams(1.0, 1.0, 1, tuple(range(9)), 0)
        Scheduler(SMALL, 0).submit(prompt(0, 8, 8), many)


def test_unused_prefixes_go_oldest_first():
    scheduler = Scheduler(SMALL, 0)
    for i in (0, 1, 2, 0):  # 0 was used last
        scheduler.submit(prompt(i, 24, 4), sampling(1))
        run(scheduler)
    scheduler.submit(prompt(3, 64, 20), sampling())  # 8 + 4 pages; 9 of 20 hold prefixes
    scheduler.admit()
    kept = {entry.tokens[0] for entry in scheduler.prefixes}
    assert kept == {4 + 2, 4 + 0, 4 + 3}


def test_two_versions_may_be_resident_and_no_third():
    scheduler = Scheduler(SMALL, 0)
    old = scheduler.submit(prompt(0, 16, 4), sampling())
    scheduler.admit()
    scheduler.adopt(1)
    new = scheduler.submit(prompt(0, 16, 4), sampling())
    scheduler.admit()
    assert (old.version, new.version) == (0, 1) and old.prefix is not new.prefix
    assert not scheduler.may_adopt(2)
    scheduler.cancel(old)
    assert scheduler.may_adopt(2) and [p.version for p in scheduler.prefixes] == [1]


# ---------------------------------------------------------------- thousands of schedules


@st.composite
def sizes(draw) -> EngineSettings:
    page = draw(st.sampled_from([1, 4, 8]))
    longest = draw(st.integers(2, 60))
    new = draw(st.integers(1, 10))
    least = -(-(longest + new) // page)
    return EngineSettings(
        slots=draw(st.integers(1, 6)), page_size=page, pages=least + draw(st.integers(0, 20)),
        max_prompt=longest, max_new_tokens=new, steps_per_launch=2, row_tokens=longest + new,
    )  # fmt: skip


@given(data=st.data(), engine=sizes(), share=st.booleans())
@settings(
    max_examples=1500, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
def test_any_schedule(data, engine, share):
    """Submissions, cancellations and adoptions in any order; all that must hold after each."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scheduler = Scheduler(engine, 0, share_prefixes=share)
    asked, started, ended, read = [], [], [], set()

    def one_round() -> None:
        admission = scheduler.admit()
        assert not read & set(map(id, admission.prefixes))  # pages of a round are its own
        for context in admission.contexts:
            assert context.version == scheduler.version == admission.version
        started.extend(admission.contexts)
        check(scheduler)
        for context in list(scheduler.running):
            made = 1 + rng.integers(0, min(2, context.remaining))
            new = [7] * (made - 1) + [STOP if rng.random() < 0.3 else 7]
            prefix = context.prefix
            assert prefix is None or prefix in list(scheduler.prefixes)  # not evicted under it
            scheduler.record(context, new, [-1.0] * made)
            if context.stage is Stage.ENDED:
                ended.append(context)

    for _ in range(12):
        act = rng.integers(0, 6)
        if act <= 2:
            shared = int(rng.integers(0, engine.max_prompt))
            tail = int(rng.integers(1, engine.max_prompt - shared + 1))
            length = int(rng.integers(1, engine.max_new_tokens + 1))
            p = prompt(int(rng.integers(0, 3)), shared, tail, length)
            asked.append(scheduler.submit(p, sampling(length)))
        elif act == 3 and asked:
            scheduler.cancel(asked[rng.integers(0, len(asked))])
        elif act == 4 and scheduler.may_adopt(scheduler.version + 1):
            scheduler.adopt(scheduler.version + 1)
        else:
            one_round()
        check(scheduler)
    rounds = 0
    while not scheduler.idle:  # nobody starves: each round somebody makes a token
        one_round()
        rounds += 1
        assert rounds <= len(asked) * engine.max_new_tokens
    check(scheduler)
    assert all(c.stage in (Stage.ENDED, Stage.CANCELLED) for c in asked)
    assert len(set(map(id, ended))) == len(ended)  # settled once
    assert started == [c for c in asked if c in started]  # once each, in the order of asking
    assert scheduler.pool.free + scheduler.prefixes.unused == engine.pages
    assert {p.version for p in scheduler.prefixes} <= {scheduler.version}


def check(scheduler: Scheduler) -> None:
    """Pages are conserved and have one owner; users are counted; at most two versions."""
    owned = [page for context in scheduler.running for page in context.pages]
    owned += [page for prefix in scheduler.prefixes for page in prefix.pages]
    assert len(owned) == len(set(owned)) == scheduler.settings.pages - scheduler.pool.free
    for prefix in scheduler.prefixes:
        assert prefix.users == sum(c.prefix is prefix for c in scheduler.running)
    unused = [p for p in scheduler.prefixes if not p.users]
    assert scheduler.prefixes.unused == sum(len(p.pages) for p in unused)
    assert len(scheduler.running) <= scheduler.settings.slots
    assert len(scheduler.resident) <= 2


def test_a_prefix_is_found_by_its_array_by_its_tokens_and_by_nothing_else():
    cache = PrefixCache(PagePool(8), 4)
    asked, same, other = tokens(range(6)), tokens(range(6)), tokens(range(7))
    entry = cache.add(1, 0, asked)
    assert cache.find(1, 0, asked) is cache.find(1, 0, same) is entry
    assert [cache.find(*key) for key in ((2, 0, asked), (1, 1, asked), (1, 0, other))] == [None] * 3
    newer = cache.add(2, 0, asked)
    assert cache.find(1, 0, asked) is entry and cache.find(2, 0, asked) is newer
    cache.leave(entry)
    cache.remove(entry)
    assert cache.find(1, 0, asked) is None and cache.find(2, 0, asked) is newer
    cache.leave(newer)
    cache.remove(newer)
    assert cache.find(2, 0, asked) is None and not [*cache]
