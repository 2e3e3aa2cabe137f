"""Launches have few shapes, known ahead and filled; what runs in company is what runs alone."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
import tiny

import pallas_kernels
from notepad_jax.engine import executor, shapes
from notepad_jax.engine.scheduler import Scheduler
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.parallel import mesh as meshes
from notepad_jax.types import CompleterFailed, Finish, PolicySnapshot, Prompt, tokens

RULER = EngineSettings(  # the sizes of configs/ruler.py
    slots=32, page_size=128, pages=2304, max_prompt=7300, max_new_tokens=1024,
    steps_per_launch=16, row_tokens=8192,
)  # fmt: skip
LITTLE = EngineSettings(
    slots=4, page_size=8, pages=16, max_prompt=96, max_new_tokens=12, steps_per_launch=1,
    row_tokens=128,
)  # fmt: skip


# ---------------------------------------------------------------- shapes


def sizes_of(arguments) -> list:
    return [(x.shape, np.dtype(x.dtype)) for x in jax.tree.leaves(arguments)]


class Sizes:
    """A device that notes the sizes of what it is handed, and draws from nobody."""

    def __init__(self):
        self.noted, self._rng = {}, np.random.default_rng(0)

    def read_prefixes(self, params, row):
        self._note("read_prefixes", row)

    def start_tails(self, params, row, wanted):
        self._note("start_tails", row)
        X = len(row.sample_at)
        return self._rng.integers(2, 60, X), np.zeros(X, np.float32)

    def generate(self, params, tables, slots, wanted):
        self._note("generate", tables, slots)
        B, steps = len(slots.token), RULER.steps_per_launch
        made = np.minimum(np.asarray(slots.remaining), steps)
        return self._rng.integers(4, 60, (B, steps)), np.zeros((B, steps), np.float32), made

    def _note(self, name, *arguments):
        sizes = sizes_of(arguments)
        self.noted.setdefault((name, str(sizes)), sizes)


def test_a_chunk_and_the_questions_about_it_fill_a_row_each():
    """As the quick start measures: 32 tails of 13 behind a chunk of 1,024, prompts of 1,088."""
    settings = dataclasses.replace(LITTLE, max_prompt=1088, row_tokens=416, page_size=64, pages=64)
    assert shapes.cover([1024], shapes.prefix_widths(settings)) == [(1024, [0])]
    assert shapes.cover([13] * 32, shapes.tail_widths(settings)) == [(416, list(range(32)))]


def test_a_thousand_rounds_at_real_sizes_have_few_shapes():
    """There were 105 of prefill_tails alone, and more with every round."""
    rng = np.random.default_rng(1)
    scheduler = Scheduler(RULER, 0)
    runner = executor.Executor(RULER, device := Sizes())
    for number in range(1000):
        for _ in range(rng.integers(0, 4)):
            group = np.random.default_rng(rng.integers(0, 40))
            shared = tokens(group.integers(4, 60, group.choice([100, 700, 5100, 5000])))
            tail = tokens(rng.integers(4, 60, rng.integers(10, 1100)))
            draft = tokens(rng.integers(4, 60, rng.integers(0, 1024)))
            turn = tiny.sampling(number, length=1024)
            scheduler.submit(Prompt(shared, tail, draft), turn)
        admission = scheduler.admit()
        runner.read((), admission.prefixes)
        both = admission.contexts, runner.start((), admission.contexts)
        for context, sampled in zip(*both, strict=True):
            scheduler.record(context, *sampled)
        running = list(scheduler.running)
        for context, sampled in zip(running, runner.decode((), running), strict=True):
            scheduler.record(context, *sampled)
    known = shapes.shapes(RULER)
    assert set(runner.seen) <= set(known) and len(device.noted) == len(runner.seen)
    assert len(known) == len(set(known)) <= 32
    params = tiny.params()
    ahead = [
        executor.arguments_of(tiny.CONFIG, RULER, params, shape, meshes.one())[1][3:5]
        for shape in runner.seen
    ]
    launched = sorted(map(str, device.noted.values()))
    assert sorted(str(sizes_of(arguments)) for arguments in ahead) == launched


def test_a_batch_is_as_large_as_what_runs():
    """One reader was padded to 8 slots and 16 places, two times eight to 32 slots, 8 rows."""
    assert shapes.decode_shape(RULER, (1,)) == shapes.Decode(1, 1, 1)
    assert shapes.decode_shape(RULER, (8, 8)) == shapes.Decode(16, 2, 8)
    assert shapes.decode_shape(RULER, (1,) * 8) == shapes.Decode(16, 16, 1)
    assert shapes.decode_shape(RULER, (4,) * 8) == shapes.Decode(32, 8, 4)


def test_gpus_have_fewer_decode_batches():
    """Each takes ten seconds to compile, and idle slots next to nothing."""
    made = [dataclasses.replace(RULER, slots=slots) for slots in (1, 8, 500)]
    with pallas_kernels.using("triton"):
        found = [[(s.slots, s.members) for s in shapes.decode_shapes(one)] for one in made]
        alone = shapes.decode_shape(made[2], (1,) * 40)
    few = [(2, 1), (32, 1), (32, 8), (512, 1), (512, 8)]
    assert found == [[(1, 1)], [(8, 1), (8, 8)], few]
    assert alone == shapes.Decode(512, 64, 8)
    assert len(shapes.decode_shapes(made[2])) == 15  # elsewhere


@pytest.mark.parametrize("seed", range(20))
def test_rows_hold_every_piece_once_and_are_filled(seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 1025, rng.integers(8, 64)).tolist()
    rows = shapes.cover(lengths, shapes.tail_widths(RULER))
    assert sorted(i for _, chosen in rows for i in chosen) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in chosen) <= width for width, chosen in rows)
    assert sum(lengths) > 0.85 * sum(width for width, _ in rows)


def test_one_row_for_all_that_is_left_where_more_would_have_as_many_tokens():
    """16 tails of 13 tokens: the densest rows first would be three launches of 280 tokens."""
    widths = (72, 136, 264, 528)
    assert shapes.cover([13] * 16, widths) == [(264, list(range(16)))]
    assert [width for width, _ in shapes.cover([13] * 21, widths)] == [264, 72]


@pytest.mark.slow
@pytest.mark.parametrize("words", [0, 2], ids=["plain", "masks"])
def test_an_engine_that_was_compiled_ahead_compiles_nothing(words):
    """Abstract parameters are enough; what comes back names every shape."""
    # Of other sizes each: what is compiled for one must not be found by the other.
    least = dataclasses.replace(LITTLE, slots=1, row_tokens=32, pages=15 + words, mask_words=words)
    params, compiled = tiny.params(), []
    runner = tiny.executor(least)

    def note(event, seconds, **more):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )

    async def go():
        async with EngineService(runner, PolicySnapshot(0, params)) as service:
            for number, prompt in enumerate(tiny.prompts(per_prefix=1)[:3]):
                await service.complete(Prompt(prompt.shared, prompt.tail), tiny.sampling(number))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        for shape in shapes.shapes(least):
            executor.lowered(tiny.CONFIG, least, abstract, shape).compile()
        ahead = len(compiled)
        asyncio.run(go())
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(shapes.shapes(least)) == 6
    assert ahead >= 6 and len(compiled) == ahead and sum(runner.seen.values()) > 6


# ---------------------------------------------------------------- launches


@pytest.mark.slow
def test_150_launches_in_company_give_what_each_gives_alone():
    """Few slots and pages, shared prefixes, drafts right and wrong, calls that are cancelled."""
    params, rng = tiny.params(), np.random.default_rng(0)
    shared = [tokens(rng.integers(4, 60, n)) for n in (16, 21, 40, 3)]
    asked = []
    for number in range(90):
        prefix = shared[rng.integers(0, 4)]
        tail = tokens(rng.integers(4, 60, rng.integers(1, 30)))
        turn = tiny.sampling(number, (1.0, 0.7, 0.0)[number % 3], int(rng.integers(1, 13)))
        asked.append((Prompt(prefix, tail), turn))

    async def alone():
        one = dataclasses.replace(LITTLE, slots=1)
        service = EngineService(
            tiny.executor(one), PolicySnapshot(0, params), share_prefixes=False, use_drafts=False
        )
        async with service:
            return [await service.complete(*ask) for ask in asked]

    async def in_company(exact):
        runner = tiny.executor(LITTLE)
        async with EngineService(runner, PolicySnapshot(0, params)) as service:

            async def reader(first):
                for number in range(first, 90, 9):
                    (prompt, turn), known = asked[number], exact[number].tokens
                    cut = int(rng.integers(0, len(known) + 1))
                    wrong = tokens(rng.integers(4, 60, 3))
                    draft = tokens(np.concatenate([known[:cut], wrong]))
                    ask = Prompt(prompt.shared, prompt.tail, draft)
                    if rng.random() < 0.2:
                        doomed = asyncio.ensure_future(service.complete(ask, turn))
                        for _ in range(rng.integers(1, 9)):
                            await asyncio.sleep(0)
                        doomed.cancel()
                    done[number] = await service.complete(ask, turn)

            done = {}
            await asyncio.gather(*map(reader, range(9)))
        return runner, [done[number] for number in range(90)]

    exact = asyncio.run(alone())
    runner, done = asyncio.run(in_company(exact))
    assert sum(runner.seen.values()) >= 150 and len(runner.seen) <= len(shapes.shapes(LITTLE))
    for a, b in zip(done, exact, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish is b.finish
        np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=1e-5)


@pytest.mark.slow
def test_a_tail_of_one_token_is_decoded_and_has_no_launch_of_its_own():
    """32 clients of a server, whose prompts end in a token each, were 32 launches before that."""
    rng = np.random.default_rng(2)
    wholes = [tokens(rng.integers(4, 60, n)) for n in (10, 17, 23, 34)]  # pages of 8 tokens

    def run(last: int):
        runner = tiny.executor(LITTLE)

        async def go():
            async with EngineService(runner, PolicySnapshot(0, tiny.params())) as service:
                asked = [
                    service.complete(
                        Prompt(tokens(whole[:-last]), tokens(whole[-last:])),
                        tiny.sampling(number, 1.0, 1 + 4 * (number % 3)),
                    )
                    for number, whole in enumerate(wholes * 2)  # the second time from the cache
                ]
                return await asyncio.gather(*asked)

        return asyncio.run(go()), {type(shape) for shape in runner.seen}

    decoded, launched = run(1)
    prefilled, launched_too = run(2)
    assert shapes.TailRow not in launched and shapes.TailRow in launched_too
    for a, b in zip(decoded, prefilled, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish is b.finish
        np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=1e-5)


def test_weights_that_are_not_finite_end_the_engine_with_a_word():
    broken = tiny.params() | {"final_norm": np.full(32, np.nan, np.float32)}
    broken = jax.tree.map(jax.numpy.asarray, broken)

    async def go():
        service = EngineService(tiny.executor(LITTLE), PolicySnapshot(0, broken))
        async with service:
            await service.complete(tiny.prompts()[0], tiny.sampling(0))

    with pytest.raises(CompleterFailed, match="logprob is not finite") as failed:
        asyncio.run(go())
    assert isinstance(failed.value.__cause__, FloatingPointError)


@pytest.mark.slow
def test_a_stream_of_real_tokens_is_the_completion():
    prompt, turn = tiny.prompts()[5], tiny.sampling(3)

    async def go():
        snapshot = PolicySnapshot(0, tiny.params())
        async with EngineService(tiny.executor(LITTLE), snapshot) as service:
            whole = await service.complete(prompt, turn)
            return whole, [piece async for piece in service.stream(prompt, turn)]

    whole, pieces = asyncio.run(go())
    assert np.concatenate([p.tokens for p in pieces]).tolist() == whole.tokens.tolist()
    assert pieces[-1].finish is whole.finish and whole.finish in (Finish.STOP, Finish.LENGTH)
