"""The TPU kernels of packed attention, in TPU interpret mode, against plain mathematics.

Long because forward and backward are compared on the same layouts, drawn once.
"""

import concurrent.futures
import dataclasses
import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from dense import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

import pallas_kernels
from pallas_kernels import packed, schedule

BLOCK = 128  # the smallest that the kernels take: 300 tokens are three blocks an axis


@functools.partial(jax.jit, static_argnames=("backend", "blocks"))
def results(q, k, v, kv_end, d_out, d_lse, *, backend, blocks=(BLOCK, BLOCK)):
    """(out, lse, dq, dk, dv) of one backend; "dense" is the oracle."""

    def attend(q, k, v):
        if backend == "dense":
            with jax.default_matmul_precision("highest"):  # a GPU's own is ten bits
                return dense_attention(q, k, v, kv_end)
        entries = schedule.packed_schedule(kv_end, q.shape[1], *blocks)
        with pallas_kernels.using(backend):
            return pallas_kernels.packed_attention(q, k, v, entries)

    found, backward = jax.vjp(attend, q, k, v)
    return *found, *backward((d_out.astype(found[0].dtype), d_lse))


def draw(seed, B, T, S, N, K, H, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    q, k, v, d_out = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    return q, k, v, d_out, jnp.asarray(rng.normal(size=(B, T, N)), jnp.float32)


def assert_kernels_are_dense_attention(
    kv_end, T, N, K, H, dtype=np.float32, tolerance=2e-5, backend="interpret", **how
):
    kv_end = jnp.asarray(kv_end)
    q, k, v, d_out, d_lse = draw(T + N, *kv_end.shape[:1], T, kv_end.shape[1], N, K, H, dtype)
    got = results(q, k, v, kv_end, d_out, d_lse, backend=backend, **how)
    exact = [x.astype(jnp.float32) for x in (q, k, v)]
    want = results(*exact, kv_end, d_out, d_lse, backend="dense")
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b)
        error = np.abs(a - b).max() / np.abs(b).max()
        assert error < tolerance, f"{name}: {error:.2e} of the largest"


@pytest.mark.slow
@pytest.mark.parametrize("N, K, H", [(2, 2, 64), (4, 1, 128), (7, 1, 64), (8, 1, 256)])
def test_every_head_size_and_every_ratio_of_heads(N, K, H):
    kv_end = np.stack([layouts.kv_end(np.random.default_rng(H + i), 300) for i in range(2)])
    assert_kernels_are_dense_attention(kv_end, 300, N, K, H)


@pytest.mark.slow
def test_more_heads_than_a_step_serves():
    """9 query heads of one kv head are 3 steps of 3, which add to the same dk and dv."""
    assert_kernels_are_dense_attention(layouts.bundle(130, [40, 20], 200)[None], 200, 9, 1, 64)


@pytest.mark.slow
@pytest.mark.parametrize("H", [64, 128])
def test_bfloat16_stays_within_its_rounding(H):
    """5e-3 of the largest entry: the inputs are bfloat16, so are the weights."""
    kv_end = layouts.bundle(130, [40, 1, 60], 300)[None]
    assert_kernels_are_dense_attention(kv_end, 300, 4, 2, H, jnp.bfloat16, 5e-3)


EDGES = {
    "no prefix": layouts.bundle(0, [100, 90, 66], 256),
    "prefix one short of a block": layouts.bundle(127, [60, 69], 256),
    "prefix of a block": layouts.bundle(128, [64, 64], 256),
    "prefix one more than a block": layouts.bundle(129, [1, 126], 256),
    "a prefix without tails": layouts.bundle(200, [], 256),
    "a tail of one token": layouts.bundle(255, [1], 256),
    "tails of one token": layouts.bundle(200, [1] * 56, 256),
    "one row, all causal": layouts.bundle(256, [], 256),
    "all padding": layouts.bundle(0, [], 256),
    "two groups": np.r_[layouts.bundle(60, [40, 28], 128), 128 + layouts.bundle(60, [68], 128)],
}


@pytest.mark.slow
@pytest.mark.parametrize("queries", [256, 200])
def test_edges_of_prefixes_tails_and_blocks(queries):
    """All layouts are rows of one batch; with 200 queries the first 56 keys come from a cache."""
    assert_kernels_are_dense_attention(np.stack(list(EDGES.values())), queries, 2, 1, 64)


@pytest.mark.slow
@pytest.mark.parametrize("length", [127, 129])
def test_rows_that_end_beside_a_block(length):
    kv_end = layouts.bundle(40, [30, length - 70], length)[None]
    assert_kernels_are_dense_attention(kv_end, length, 2, 1, 64)


@pytest.mark.slow
def test_keys_hidden_from_everyone_get_no_gradient_and_give_nothing():
    """Slots of the last page beyond a cached prefix: their kv_end is 0."""
    kv_end = np.full((1, 400), 400, np.int32)
    kv_end[:, :260] = 0  # two whole key blocks and a part of the third
    assert_kernels_are_dense_attention(kv_end, 140, 2, 1, 64)
    kv_end = jnp.asarray(kv_end)
    arguments = draw(0, 1, 140, 400, 2, 1, 64)
    *_, d_k, d_v = results(*arguments[:3], kv_end, *arguments[3:], backend="interpret")
    assert not d_k[:, :260].any() and not d_v[:, :260].any()


@pytest.mark.slow
def test_blocks_of_different_sizes():
    kv_end = np.stack([layouts.kv_end(np.random.default_rng(i), 600) for i in range(2)])
    assert_kernels_are_dense_attention(kv_end, 600, 2, 1, 64, blocks=(128, 384))
    assert_kernels_are_dense_attention(kv_end, 600, 2, 1, 64, blocks=(256, 128))


@pytest.mark.slow
def test_a_shared_prefix_is_the_prompt_repeated():
    """Packed once, or G rows of prompt and tail: the same outputs; the prefix's gradients add."""
    prefix, tails = 140, [70, 40, 50]
    total = prefix + sum(tails)
    q, k, v, d_out, d_lse = map(np.array, draw(3, 1, total, total, 4, 2, 64))
    # A prefix's own outputs exist once here and G times there: only tails get cotangents.
    d_out[:, :prefix], d_lse[:, :prefix] = 0, 0
    kv_end = jnp.asarray(layouts.bundle(prefix, tails, total))[None]
    once = results(q, k, v, kv_end, d_out, d_lse, backend="interpret")

    longest = prefix + max(tails)
    at, ends = np.zeros((3, longest), int), np.zeros((3, longest), np.int32)
    start = prefix
    for row, tail in enumerate(tails):
        at[row] = np.r_[:prefix, start : start + tail, [0] * (longest - prefix - tail)]
        ends[row] = layouts.bundle(prefix + tail, [], longest)
        start += tail
    real = (np.arange(longest) < prefix + np.array(tails)[:, None])[..., None, None]
    rows = [np.where(real, x[0][at], np.float32(0)) for x in (q, k, v, d_out)]
    d_lse_rows = np.where(real[..., 0], d_lse[0][at], np.float32(0))
    repeated = results(*rows[:3], ends, rows[3], d_lse_rows, backend="dense")
    for name, a, b in zip(("out", "lse"), once, repeated, strict=False):
        start = prefix
        for row, tail in enumerate(tails):
            np.testing.assert_allclose(
                a[0, start : start + tail], b[row, prefix : prefix + tail], atol=2e-5, err_msg=name
            )
            start += tail
    for name, a, b in zip(("dq", "dk", "dv"), once[2:], repeated[2:], strict=True):
        summed = np.zeros_like(a[0])
        np.add.at(summed, at, np.where(real, b, 0))
        np.testing.assert_allclose(a[0], summed, atol=5e-5, err_msg=name)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_two_hundred_random_layouts(seed):
    """25 rows a time, so that one compiled program serves all: 8 x 25 layouts."""
    rng = np.random.default_rng(seed)
    kv_end = np.stack([layouts.kv_end(rng, 256) for _ in range(25)])
    assert_kernels_are_dense_attention(kv_end, 256, 1, 1, 64, tolerance=5e-5)


def test_no_races():
    """Key blocks come 0, 0, 1, 0, 1, 2: sums of a block are fetched again right after they left."""
    kv_end = jnp.asarray(layouts.bundle(200, [50, 134], 384)[None])
    q, k, v, d_out, d_lse = draw(0, 1, 384, 384, 2, 1, 64)
    entries = schedule.packed_schedule(kv_end, 384, BLOCK, BLOCK)
    assert entries.k_block.tolist() == [0, 0, 1, 0, 1, 2]
    watch = pltpu.InterpretParams(detect_races=True)
    attend = lambda q, k, v: packed.packed_attention(q, k, v, entries, watch)  # noqa: E731

    @jax.jit
    def both(q, k, v):
        found, backward = jax.vjp(attend, q, k, v)
        return found, backward((d_out, d_lse))

    jax.block_until_ready(both(q, k, v))
    assert not interpret_pallas_call.races.races_found


# ---------------------------------------------------------------- the schedule


def listed(entries: schedule.Schedule) -> set:
    n = int(entries.count)
    return set(zip(entries.q_block[:n].tolist(), entries.k_block[:n].tolist(), strict=True))


def test_the_schedule_counts_by_hand():
    padding = jnp.arange(1, 513)[None]
    count = lambda ends, T: int(schedule.packed_schedule(ends, T, 128, 128).count)  # noqa: E731
    assert count(padding, 512) == 4  # the diagonal of 4 x 4
    causal = jnp.full((1, 512), 512)
    assert count(causal, 512) == 4 + 3 + 2 + 1
    assert count(causal, 128) == 4  # the last queries, all keys


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([(512, 512), (512, 200), (450, 450), (450, 33)]))
def test_a_block_is_listed_exactly_if_something_in_it_is_seen(seed, lengths):
    S, T = lengths
    rng = np.random.default_rng(seed)
    kv_end = np.stack([layouts.kv_end(rng, S) for _ in range(2)])
    found = schedule.packed_schedule(jnp.asarray(kv_end), T, 64, 128)
    nq, nk = -(-T // 64), -(-S // 128)
    i, j = np.arange(S - T, S)[:, None], np.arange(S)
    needed, full = set(), set()
    for row in range(2):
        seen = (j <= i) & (i < kv_end[row])
        for q in range(nq):
            for k in range(nk):
                part = seen[q * 64 : (q + 1) * 64, k * 128 : (k + 1) * 128]
                if part.any():
                    needed.add((row * nq + q, row * nk + k))
                if part.all() and (k + 1) * 128 <= S:
                    full.add((row * nq + q, row * nk + k))
    assert listed(found) == needed
    n = int(found.count)
    runs, flags = np.asarray(found.q_block)[:n], np.asarray(found.flags)[:n]
    assert (np.diff(runs) >= 0).all()
    starts = np.r_[True, runs[1:] != runs[:-1]]
    assert ((flags & schedule.FIRST > 0) == starts).all()
    assert ((flags & schedule.LAST > 0) == np.r_[starts[1:], True]).all()
    assert (np.diff(np.asarray(found.k_block)[:n])[~starts[1:]] > 0).all()
    blocks = zip(found.q_block[:n].tolist(), found.k_block[:n].tolist(), strict=True)
    assert [b not in full for b in blocks] == (flags & schedule.PARTIAL > 0).tolist()


def test_a_long_shared_prefix_schedules_what_its_mask_needs():
    """Prefix 5,120, 16 tails of 2,048, blocks of the kernels: every listed block is needed."""
    tails, prefix = [2048] * 16, 5120
    kv_end = layouts.bundle(prefix, tails, prefix + sum(tails))
    for sizes in ((512, 1024), (1024, 1024)):
        found = schedule.packed_schedule(jnp.asarray(kv_end)[None], len(kv_end), *sizes)
        i = np.arange(len(kv_end))
        needed = 0
        for first in range(0, len(kv_end), sizes[0]):
            end = first + sizes[0]  # some row of the block lies in [key, kv_end)
            seen = np.maximum(i, first) < np.minimum(kv_end, end)
            needed += len(set(i[seen] // sizes[1]))
        assert int(found.count) <= 1.05 * needed


# ---------------------------------------------------------------- dispatch and refusals


@pytest.mark.slow
def test_every_backend_gives_the_same_numbers():
    kv_end = jnp.asarray(np.stack([layouts.kv_end(np.random.default_rng(i), 300) for i in (1, 2)]))
    q, k, v, d_out, d_lse = draw(1, 2, 200, 300, 4, 2, 64)
    want = results(q, k, v, kv_end, d_out, d_lse, backend="dense")
    for backend in ("xla", "reference", "interpret", layouts.TRITON):
        got = results(q, k, v, kv_end, d_out, d_lse, backend=backend)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-5, err_msg=backend)


@pytest.mark.parametrize("queries", [256, 200])
def test_slices_are_dense_attention_at_every_edge(queries):
    """What GPUs run, in slices of 128: several a row, the last one short."""
    kv_end = np.stack(list(EDGES.values()))
    assert_kernels_are_dense_attention(kv_end, queries, 4, 2, 64, backend="xla")


def test_slices_stay_within_the_rounding_of_bfloat16():
    kv_end = layouts.bundle(130, [40, 1, 60], 300)[None]
    assert_kernels_are_dense_attention(kv_end, 300, 4, 2, 64, jnp.bfloat16, 5e-3, backend="xla")


def test_no_product_of_slices_meets_float32_when_the_inputs_are_bfloat16():
    """A float32 operand takes twice the memory and leaves the fast path of a matrix unit."""
    kv_end = jnp.asarray(layouts.bundle(130, [40, 1, 60], 300))[None]
    q, k, v, d_out, d_lse = draw(0, 1, 300, 300, 4, 2, 64, jnp.bfloat16)
    program = results.lower(q, k, v, kv_end, d_out, d_lse, backend="xla").as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert len(products) == 3 * (2 + 5)  # slices; forward, backward
    operands = [line.split(" : (")[1].split(") -> ")[0] for line in products]
    assert all(types.count("bf16") == 2 for types in operands), operands


def test_the_backend_follows_the_machine_unless_forced():
    assert pallas_kernels.backend() == "reference"  # tests run on the CPU
    with pallas_kernels.using("interpret"):
        assert pallas_kernels.backend() == "interpret"
        sizes = pallas_kernels.packed_schedule(
            jnp.full((1, 9000), 9000), 9000, head_size=128, dtype="bfloat16"
        )
        assert sizes.q_size % 128 == 0 and sizes.k_size >= 512
    assert pallas_kernels.backend() == "reference"
    with pytest.raises(ValueError, match="no kernel backend 'cuda'; there are auto, pallas"):
        pallas_kernels.use("cuda")


def test_what_was_traced_for_one_backend_is_not_taken_for_another():
    seen = []

    def body(total, x):
        seen.append(pallas_kernels.backend())
        return total + x, None

    inner = jax.jit(lambda x: jax.lax.scan(jax.checkpoint(body), 0.0, x)[0])
    outer = jax.jit(jax.value_and_grad(lambda x: inner(x)))
    x = jnp.ones(3)
    with pallas_kernels.using("reference"):
        outer(x)
    with pallas_kernels.using("interpret"):
        outer(x)
    assert set(seen) == {"reference", "interpret"}
    traces = len(seen)
    for name in ("reference", "interpret"):
        with pallas_kernels.using(name):
            outer(x)
    assert len(seen) == traces  # both are kept


def test_a_forced_backend_holds_in_every_thread():
    with pallas_kernels.using("interpret"), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(pallas_kernels.backend).result(timeout=60) == "interpret"


def entries(S, T, sizes=(BLOCK, BLOCK)):
    return schedule.packed_schedule(jnp.full((1, S), S), T, *sizes)


def test_wrong_shapes_are_refused_by_name():
    q, k, v, *_ = draw(0, 1, 256, 256, 3, 2, 64)
    attend = pallas_kernels.packed_attention
    with pytest.raises(ValueError, match="3 query heads .* 2 kv heads"):
        attend(q, k, v, entries(256, 256))
    q = q[:, :, :2]
    with pytest.raises(ValueError, match="1 query and 2 key blocks; 1 rows of 256 .* have 2 and 2"):
        attend(q, k, v, entries(256, 100))
    with pytest.raises(ValueError, match="300 queries .* rows of 256"):
        entries(256, 300)
    with pallas_kernels.using("interpret"), pytest.raises(ValueError, match="k_size is 64.* 128"):
        attend(q, k, v, entries(256, 256, (128, 64)))


def test_a_list_that_scalar_memory_cannot_hold_is_refused():
    q, k, v, *_ = draw(0, 1, 128, 128, 2, 1, 64)
    ends = jnp.arange(1, 129)[None]
    many = schedule.packed_schedule(ends, 128, 128, 128)
    many = dataclasses.replace(many, flags=jnp.zeros(100_000, jnp.int32))
    with pallas_kernels.using("interpret"), pytest.raises(ValueError, match="fewer rows at a time"):
        pallas_kernels.packed_attention(q, k, v, many)
