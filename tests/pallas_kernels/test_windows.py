"""Sliding windows: what every backend computes, what is listed, what a decode step reads."""

import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from dense import dense_attention

import pallas_kernels
from pallas_kernels import Pages, PageTables, aot, schedule
from pallas_kernels.packed import packed_attention
from tests import tpu_compiler

BLOCK = 128
EVERYTHING = 10**6  # a window that no text here reaches


def positions(kv_end: np.ndarray) -> np.ndarray:
    """Each token's place in its text: how many tokens before it does it see?"""
    at = np.arange(len(kv_end))
    return ((at < at[:, None]) & (at[:, None] < kv_end)).sum(axis=1).astype(np.int32)


def rows(length: int) -> tuple[jnp.ndarray, jnp.ndarray]:
    """(kv_end, positions) of three packed rows: a shared prefix twice, and one at random."""
    drawn = [
        layouts.bundle(140, [40, 1, 60], length),
        layouts.bundle(30, [13] * 16, length),
        layouts.kv_end(np.random.default_rng(1), length),
    ]
    return jnp.asarray(np.stack(drawn)), jnp.asarray(np.stack([positions(row) for row in drawn]))


def test_positions_by_hand():
    """A prefix of three, tails of two and one: the tails both begin behind the prefix."""
    assert positions(layouts.bundle(3, [2, 1], 7)).tolist() == [0, 1, 2, 3, 4, 3, 0]


def results(q, k, v, kv_end, at, d_out, d_lse, *, backend, window):
    """(out, lse, dq, dk, dv) of one backend; "dense" is the oracle."""
    if backend == "dense":
        return dense(q, k, v, kv_end, at, d_out, d_lse, window=window)
    listed = schedule.packed_schedule(
        kv_end, q.shape[1], BLOCK, BLOCK, positions_BS=at, window=window
    )
    return attended(q, k, v, listed, d_out, d_lse, backend=backend)


@functools.partial(jax.jit, static_argnames="window")
def dense(q, k, v, kv_end, at, d_out, d_lse, *, window):
    attend = lambda q, k, v: dense_attention(q, k, v, kv_end, at, window)  # noqa: E731
    found, backward = jax.vjp(attend, q, k, v)
    return *found, *backward((d_out, d_lse))


@functools.partial(jax.jit, static_argnames="backend")
def attended(q, k, v, listed, d_out, d_lse, *, backend):
    """One program whatever the window."""

    def attend(q, k, v):
        with pallas_kernels.using(backend):
            return pallas_kernels.packed_attention(q, k, v, listed)

    found, backward = jax.vjp(attend, q, k, v)
    return *found, *backward((d_out, d_lse))


def draw(kv_end, queries, heads=4, kv_heads=2, size=64):
    rng, (B, S) = np.random.default_rng(queries), kv_end.shape
    shapes = [(B, queries, heads, size), (B, S, kv_heads, size), (B, S, kv_heads, size)]
    q, k, v, d_out = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in (*shapes, shapes[0]))
    return q, k, v, d_out, jnp.asarray(rng.normal(size=(B, queries, heads)), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["interpret", layouts.TRITON, "xla", "reference"])
@pytest.mark.parametrize("window, queries", [(1, 256), (20, 200), (130, 256)])
def test_every_backend_is_the_oracle_forward_and_backward(backend, window, queries):
    """Windows within a block, over its edge and over more; 200 queries follow 56 cached keys."""
    kv_end, at = rows(256)
    q, k, v, *cotangents = draw(kv_end, queries)
    arguments = q, k, v, kv_end, at, *cotangents
    got = results(*arguments, backend=backend, window=window)
    want = results(*arguments, backend="dense", window=window)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
        assert error < 2e-5, f"{name}: {error:.2e} of the largest"


def test_a_window_of_one_token_is_its_own_value():
    kv_end, at = rows(256)
    q, k, v, *cotangents = draw(kv_end, 256)
    out, *_ = results(q, k, v, kv_end, at, *cotangents, backend="reference", window=1)
    np.testing.assert_allclose(out, jnp.repeat(v, 2, axis=2), atol=1e-6)


@pytest.mark.parametrize("backend", ["interpret", layouts.TRITON, "xla", "reference"])
def test_a_window_that_reaches_everything_is_none(backend):
    kv_end, at = rows(256)
    q, k, v, *_ = draw(kv_end, 256)
    lists = [
        schedule.packed_schedule(kv_end, 256, BLOCK, BLOCK, *how)
        for how in ((), (at, 0), (at, EVERYTHING))
    ]
    plain, without, reached = (packed(q, k, v, blocks, backend) for blocks in lists)
    np.testing.assert_array_equal(without, plain)
    np.testing.assert_array_equal(reached, plain)
    for blocks in lists[1:]:  # and does the same work
        for name in ("q_block", "k_block", "flags", "count"):
            np.testing.assert_array_equal(getattr(blocks, name), getattr(lists[0], name))


@functools.partial(jax.jit, static_argnames="backend")
def packed(q, k, v, blocks, backend):
    with pallas_kernels.using(backend):
        return pallas_kernels.packed_attention(q, k, v, blocks)[0]


@pytest.mark.slow
def test_the_schedule_counts_by_hand():
    """8 blocks: each sees itself and, 32 tokens back, its neighbour; tails the prefix's end."""

    @functools.cache
    def told(prefix, tails, length):
        kv_end = layouts.bundle(prefix, tails, length)
        return jnp.asarray(kv_end)[None], jnp.asarray(positions(kv_end))[None]

    def count(bundle, queries, window):
        kv_end, at = told(*bundle)
        listed = schedule.packed_schedule(kv_end, queries, 128, 128, positions_BS=at, window=window)
        return int(listed.count)

    causal = 1024, (), 1024
    assert count(causal, 1024, 0) == 36
    assert count(causal, 1024, 1) == 8
    assert count(causal, 1024, 2) == count(causal, 1024, 32) == 8 + 7
    assert count(causal, 1024, 129) == 8 + 7
    assert count(causal, 1024, 130) == 8 + 7 + 6  # the block's first query sees 129 back
    tails = 1024, (16,) * 8, 1152  # a block of tails behind eight of a prefix
    assert count(tails, 128, 0) == 9
    assert count(tails, 128, 32) == 2


def test_lists_of_several_windows_can_be_stacked():
    kv_end, at = rows(256)
    lists = [
        schedule.packed_schedule(kv_end, 256, BLOCK, BLOCK, positions_BS=at, window=window)
        for window in (0, 20)
    ]
    q, k, v, *_ = draw(kv_end, 256)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lists)
    for n, one in enumerate(lists):
        again = jax.tree.map(lambda x: x[n], stacked)  # noqa: B023
        outs = (packed(q, k, v, blocks, "reference") for blocks in (again, one))
        np.testing.assert_array_equal(*outs)


def test_a_window_is_counted_in_positions():
    with pytest.raises(ValueError, match="a window of 8 tokens is counted in positions"):
        pallas_kernels.packed_schedule(
            jnp.full((1, 8), 8), 8, head_size=8, dtype=jnp.float32, window=8
        )


@tpu_compiler.needed
@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
def test_windows_compile_for_every_tpu(chip):
    """Forward and backward at the heads of Qwen2.5-7B."""
    S = 2048

    def loss(q, k, v, kv_end, at):
        blocks = schedule.packed_schedule(kv_end, S, 512, 512, positions_BS=at, window=256)
        return packed_attention(q, k, v, blocks)[0].astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((1, S, n, 128), jnp.bfloat16) for n in (28, 4, 4)]
    ints = [jax.ShapeDtypeStruct((1, S), jnp.int32)] * 2
    compiled = aot.compile_for(chip, jax.grad(loss, argnums=(0, 1, 2)), *heads, *ints)
    for kernel in ("packed_attention_forward", "packed_attention_backward"):
        assert kernel in compiled.as_text()


# ---------------------------------------------------------------- decoding

Z, K, N, H = 8, 2, 6, 8


@functools.lru_cache
def decode(rows: int, block: int):
    """The twin, compiled once whatever the window."""
    return jax.jit(
        functools.partial(
            pallas_kernels.reference.paged_attention,
            attend=pallas_kernels.reference.in_blocks(rows, block),
        )
    )


@pytest.mark.parametrize("window", [0, 1, 4, 9, 17, EVERYTHING])
@pytest.mark.parametrize("rows_at_once, block", [(8, 128), (2, Z)])
def test_a_decode_step_sees_its_window(window, rows_at_once, block):
    """Slots with a shared prefix of 16, of 24 and of none; what lies before a window is NaN-free.

    Against the same contexts laid out in a row each, by numpy.
    """
    rng = np.random.default_rng(0)
    own = np.array([1, 4, 8, 10, 20])  # private tokens, the new one included
    shared_lens = np.array([2 * Z, 3 * Z, 0], np.int32)
    shared = np.array([[1, 2, 0], [3, 4, 5], [0, 0, 0]], np.int32)
    members = np.array([[0, 1, 2], [3, 3, 3], [4, 4, 4]], np.int32)
    place = np.array([0, 1, 2, 3, 6], np.int32)
    private = np.array([[6, 0, 0], [7, 0, 0], [8, 0, 0], [9, 10, 0], [11, 12, 13]], np.int32)
    data = rng.normal(size=(14, 2, K, Z, H)).astype(np.float32)
    q, k, v = (rng.normal(size=(5, n, H)).astype(np.float32) for n in (N, K, K))
    row_of = np.array([0, 0, 0, 1, 2])
    lens = (shared_lens[row_of] + own).astype(np.int32)
    tables = PageTables(shared, shared_lens, members, place, private)
    out, _ = decode(rows_at_once, block)(
        q, k, v, Pages(jnp.asarray(data), 14), jnp.int32(0), tables, lens, window=jnp.int32(window)
    )
    for b in range(5):
        pages = [*shared[row_of[b]][: shared_lens[row_of[b]] // Z], *private[b]]
        keys, values = np.concatenate([data[page] for page in pages], axis=2)[:, :, : lens[b]]
        keys[:, -1], values[:, -1] = k[b], v[b]
        first = max(0, lens[b] - window) if window else 0
        for n in range(N):
            scores = keys[n * K // N, first:] @ q[b, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            want = weights @ values[n * K // N, first:] / weights.sum()
            np.testing.assert_allclose(out[b, n], want, atol=1e-5)


@pytest.mark.parametrize("backend", ["interpret", layouts.TRITON, "xla", "reference"])
def test_every_backend_decodes_with_a_window(backend):
    """On TPUs through XLA; all slots of a launch, and of those one that is idle."""
    rng = np.random.default_rng(1)
    pages = Pages(jnp.asarray(rng.normal(size=(4, 2, K, Z, 128)), jnp.float32), 4)
    pages = pages.of(pages.data.at[..., H:].set(0))
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, H)), jnp.float32) for n in (N, K, K))
    tables = PageTables.apart(jnp.array([[0, 1], [2, 3]], jnp.int32))
    lens = jnp.array([13, 0], jnp.int32)
    with pallas_kernels.using(backend):
        out, written = jax.jit(lambda *args, **how: pallas_kernels.paged_attention(*args, **how))(
            q, k, v, pages, jnp.int32(0), tables, lens, window=jnp.int32(5)
        )
    keys, values = np.concatenate(written.data[:2], axis=2)[..., :13, :H]
    np.testing.assert_array_equal(keys[:, -1], k[0])
    for n in range(N):
        weights = np.exp(keys[n * K // N, 8:] @ q[0, n] / np.sqrt(H))
        np.testing.assert_allclose(
            out[0, n], weights @ values[n * K // N, 8:] / weights.sum(), atol=1e-5
        )
    assert not out[1].any()


def test_a_window_is_for_decoding():
    pages = Pages.zeros(1, 4, K, Z, H, "float32")
    q, k = jnp.zeros((3, N, H)), jnp.zeros((3, K, H))
    tables = PageTables.apart(jnp.zeros((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="a window is for decoding"):
        pallas_kernels.paged_attention(
            q, k, k, pages, jnp.int32(0), tables, jnp.array([3]), jnp.array([0, 3]),
            window=jnp.int32(2),
        )  # fmt: skip
