"""Every token is shown its own context, whatever runs beside it: an engine whose keys are hashes.

Schedules are random: prompts over shared prefixes, drafts right and wrong, few pages, streams,
calls that are cancelled, policies that come in the middle, caches that are given back. Each
completion is compared with what its policy says of the bare prompt.
"""

import asyncio
import collections
import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import NO_TOKENS, Prompt, SamplingParams, tokens
from tests import slots

STOPS = (2, 3)
SAYS = (*STOPS, 10, 11, 12, 10, 11, 10)
TEMPERATURES = (1.0, 0.7, 0.0)


def go(coroutine):
    async def limited():
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(limited())


# ---------------------------------------------------------------- any schedule


@st.composite
def sizes(draw) -> EngineSettings:
    longest, new = draw(st.integers(8, 40)), draw(st.integers(1, 7))
    page = draw(st.sampled_from([1, 2, 4, 8]))
    least = -(-(longest + new) // page)
    return EngineSettings(
        slots=draw(st.integers(1, 6)), page_size=page, pages=least + draw(st.integers(0, 12)),
        max_prompt=longest, max_new_tokens=new, steps_per_launch=draw(st.integers(1, 4)),
        row_tokens=longest + draw(st.integers(0, 20)), top_logprobs=draw(st.sampled_from([0, 3])),
    )  # fmt: skip


class Course:
    """Who asks for what, and how often what happened."""

    def __init__(self, engine: EngineSettings, seed: int) -> None:
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.seen = collections.Counter()
        longest = self.rng.integers(10, 30, 50)
        # Some begin as others do; lengths meet the ends of pages, and miss them.
        half = 1 + engine.max_prompt // 2
        self.prefixes = [tokens(longest[: self.pick(half)]) for _ in range(3)]
        self.prefixes.append(tokens(self.rng.integers(10, 30, self.pick(engine.max_prompt))))
        self.asked: list[Prompt] = []
        self.open = self._seed = 0

    def pick(self, end: int) -> int:
        return int(self.rng.integers(0, end))

    def ask(self, policy: slots.HashPolicy) -> tuple[Prompt, SamplingParams]:
        """A turn that nobody else asks for, with a draft that `policy` makes true to a point."""
        e, bare = self.engine, self._bare()
        shared, tail = bare.shared, len(bare.tail)
        self._seed += 1
        sampling = SamplingParams(
            TEMPERATURES[self.pick(3)], 1.0, 1 + self.pick(e.max_new_tokens),
            STOPS[: self.pick(3)], self._seed << 20, self.pick(e.top_logprobs + 1),
        )  # fmt: skip
        draft, whole = NO_TOKENS, len(shared) + tail + sampling.max_new_tokens
        if e.top_logprobs and whole <= e.row_tokens and self.pick(4) == 0:
            given = tokens(self.rng.integers(10, 30, sampling.max_new_tokens))
            self.seen["scored"] += 1
            return (
                Prompt(shared, bare.tail, given),
                dataclasses.replace(sampling, stop_ids=(), scored=True),
            )
        if self.pick(2):
            said = policy.completion(bare, sampling).tokens
            wrong = self.rng.integers(10, 13, self.pick(4)).tolist()
            draft = tokens([*said[: self.pick(len(said) + 1)], *wrong, STOPS[0]])
        return Prompt(shared, bare.tail, draft), sampling

    def _bare(self) -> Prompt:
        """A prompt of its own, or one that ends otherwise than another or, as in a group, as it."""
        if self.asked and self.pick(5):
            other = self.asked[-1 - self.pick(min(3, len(self.asked)))]
            kept = other.tail[: max(0, len(other.tail) - self.pick(5))]
            shared, own = other.shared, self.rng.integers(10, 30, len(other.tail) - len(kept))
        else:
            shared, kept = self.prefixes[self.pick(4)], NO_TOKENS
            length = 1 if self.pick(3) == 0 else 1 + self.pick(self.engine.max_prompt - len(shared))
            own = self.rng.integers(10, 30, length)
        self.asked.append(Prompt(shared, tokens(np.concatenate([kept, own]))))
        return self.asked[-1]

    def look(self, service: EngineService) -> None:
        """Counts what is worth trying; before every launch."""
        running, e = service.scheduler.running, self.engine
        assert len(service.scheduler.resident) <= 2
        self.seen["waits for pages"] += len(running) < min(e.slots, self.open)
        self.seen["two policies"] += len({context.version for context in running}) > 1
        for context in (one for one in running if not one.made):
            whole = len(context.tail) + (context.prefix.length if context.prefix else 0)
            if len(context.tail) == 1:
                full = ", and the page is full" * (whole % e.page_size == 0)
                self.seen["one token" + full] += 1
            self.seen["a copied page"] += bool(context.ragged)


async def reader(service: EngineService, course: Course, policies: dict) -> None:
    """Asks for some turns one after the other; some it does not wait for."""
    for _ in range(1 + course.pick(4)):
        prompt, sampling = course.ask(policies[service.version])
        course.open += 1
        if course.pick(5) == 0:
            doomed = asyncio.ensure_future(service.complete(prompt, sampling))
            for _ in range(course.pick(12)):
                await asyncio.sleep(0)
            doomed.cancel()
            await asyncio.wait([doomed])
            course.seen["cancelled"] += doomed.cancelled()
        if course.pick(3) == 0:
            pieces = [piece async for piece in service.stream(prompt, sampling)]
            completion = slots.together(pieces, policies, prompt, sampling)
        else:
            completion = await service.complete(prompt, sampling)
        course.open -= 1
        policy = policies[completion.policy_version]
        assert slots.is_right(completion, policy, prompt, sampling), (prompt, sampling, completion)


TRIED = collections.Counter()


@given(engine=sizes(), seed=st.integers(0, 2**32), share=st.booleans(), drafts=st.booleans())
@settings(max_examples=160, deadline=None, derandomize=True)
def any_schedule(engine, seed, share, drafts):
    course = Course(engine, seed)
    snapshots = [slots.snapshot(version, SAYS) for version in range(4)]
    policies = {one.version: one.params for one in snapshots}

    async def adopts(service, launches):
        for one in snapshots[1:]:
            await asyncio.sleep(0)
            after = len(launches) + course.pick(8)
            while len(launches) < after and course.open:
                await asyncio.sleep(0)
            await service.adopt(one, drain=bool(course.pick(2)))

    async def run():
        executor = slots.executor(engine)
        watched = slots.Watched(executor, lambda number: course.look(service))
        service = EngineService(watched, snapshots[0], share_prefixes=share, use_drafts=drafts)
        async with service:
            for _ in range(2):
                calls = [reader(service, course, policies) for _ in range(1 + course.pick(6))]
                if not service.version:
                    calls.append(adopts(service, watched.launches))
                await asyncio.gather(*calls)
                scheduler = service.scheduler
                assert scheduler.idle and len(scheduler.resident) == 1
                assert scheduler.pool.free + scheduler.prefixes.unused == engine.pages
                service.rest()
            stats = service.take_stats()
        course.seen["accepted drafts"] = stats.draft_tokens
        course.seen["shared tokens"] = stats.prefix_tokens_saved
        course.seen["pages of a tail that began alike"] = executor.device.shares
        assert share or not executor.device.shares

    go(run())
    TRIED.update(course.seen)


def test_any_schedule():
    """And that it tried what it is for."""
    TRIED.clear()
    any_schedule()
    assert min(TRIED.values()) > 20 and len(TRIED) == 10
