"""Decoding over shared prefixes, and caches of int8: kernel and twin against plain loops.

All layouts have the same array sizes, so each dtype compiles once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Pages, PageTables, paged, reference
from pallas_kernels.paged import runs
from pallas_kernels.pages import quantise, quantised

R, M, B, P, Q, Z, PAGES, LAYERS = 3, 2, 4, 3, 2, 32, 16, 2
N, K, H = 4, 2, 128
LAYER = 1


def sizes(dtype: str) -> paged.PagedSizes:
    """DMA blocks of 3 pages, chunks of 2: prefixes and members are cut by both."""
    page_bytes = 2 * K * Z * H * jnp.dtype(dtype).itemsize
    return paged.PagedSizes(16, 1, 2 * Z, 3 * page_bytes, 2 * Z * K, 3, 1, 2**26)


@st.composite
def tables(draw: st.DrawFn) -> tuple[PageTables, np.ndarray]:
    """Slots in rows, some places unused, prefixes of any whole pages; (tables, kv_lens)."""
    row_of = sorted(draw(st.lists(st.integers(0, R - 1), min_size=B, max_size=B)))
    while max(map(row_of.count, row_of)) > M:
        row_of = sorted({*range(R)}) + [R - 1]
    pages = draw(st.permutations(range(PAGES)))
    members, place, at = np.zeros((R, M), np.int32), np.zeros(B, np.int32), [0] * R
    for slot, row in enumerate(row_of):
        members[row, at[row]], place[slot] = slot, row * M + at[row]
        at[row] += 1
    shared, private = np.zeros((R, P), np.int32), np.zeros((B, Q), np.int32)
    lens, kv_lens = np.zeros(R, np.int32), np.zeros(B, np.int32)
    taken = 0
    for slot in range(B):
        own = draw(st.integers(0, Q * Z))  # 0: an idle slot
        pages_of = -(-own // Z)
        private[slot, :pages_of] = pages[taken : taken + pages_of]
        taken += pages_of
        kv_lens[slot] = own
    for row in range(R):
        whole = draw(st.integers(0, min(P, PAGES - taken)))
        shared[row, :whole] = pages[taken : taken + whole]
        taken += whole
        lens[row] = whole * Z
    kv_lens += np.where(kv_lens > 0, lens[row_of], 0).astype(np.int32)
    return PageTables(shared, lens, members, place, private), kv_lens


@functools.lru_cache
def filled(dtype: str) -> Pages:
    """A cache of random entries."""
    pages = Pages.zeros(LAYERS, PAGES, K, Z, H, dtype)
    kv = np.random.default_rng(0).standard_normal(pages.data.shape, np.float32)
    data, *scales = pages.entries(jnp.asarray(kv))
    return pages.of(data, *(x[..., None, :] for x in scales))


def shared_lens(tables: PageTables) -> np.ndarray:
    return tables.shared_lens_R[tables.place_B // M]


def forget(pages: Pages, tables: PageTables, kv_lens: np.ndarray) -> Pages:
    """NaN wherever no slot's context reaches (the new token's place is not reached yet)."""
    known = np.zeros((LAYERS * PAGES, Z), bool)
    for row in range(R):
        known[LAYER * PAGES + tables.shared_RP[row, : tables.shared_lens_R[row] // Z]] = True
    for slot, kv_len in enumerate(kv_lens):
        for t in range(max(int(kv_len - shared_lens(tables)[slot]) - 1, 0)):
            known[LAYER * PAGES + tables.private_BQ[slot, t // Z], t % Z] = True
    *before, last = pages.arrays  # of int8 it is the scales that are NaN
    seen = known[:, None, None, None, :] if before else known[:, None, None, :, None]
    return pages.of(*before, jnp.asarray(np.where(seen, last, np.asarray(np.nan, last.dtype))))


def loops(q: jax.Array, pages: Pages, tables: PageTables, kv_lens: np.ndarray) -> np.ndarray:
    """Softmax over each slot's context as it lies in a cache that has the new tokens."""
    floats = np.asarray(pages.data, np.float64)
    if pages.scales is not None:
        floats = floats * np.asarray(pages.scales, np.float64).swapaxes(-1, -2)
    out, q = np.zeros(q.shape), np.asarray(q, np.float64)
    for b, kv_len in enumerate(kv_lens):
        row = tables.place_B[b] // M
        whole = tables.shared_lens_R[row] // Z
        found = LAYER * PAGES + np.concatenate(
            [tables.shared_RP[row, :whole], tables.private_BQ[b]]
        )
        context = np.concatenate(floats[found].transpose(0, 3, 1, 2, 4))[:kv_len]  # [S, 2, K, H]
        for n in range(N if kv_len else 0):
            keys, values = context[:, 0, n * K // N], context[:, 1, n * K // N]
            scores = keys @ q[b, n] * H**-0.5
            weights = np.exp(scores - scores.max())
            out[b, n] = weights @ values / weights.sum()
    return out


@functools.lru_cache
def attend(backend: str, dtype: str, races: bool = False):
    if backend == "twin":
        return jax.jit(
            functools.partial(reference.paged_attention, attend=reference.in_blocks(2, Z))
        )
    mode = pltpu.InterpretParams(detect_races=True) if races else True
    return jax.jit(functools.partial(paged.paged_attention, sizes=sizes(dtype), interpret=mode))


write = jax.jit(Pages.write_tokens)


def check(backend: str, dtype: str, case: tuple, seed: int, races: bool = False) -> None:
    where, kv_lens = case
    rng = np.random.default_rng(seed)
    pages = forget(filled(dtype), where, kv_lens)
    float_dtype = "float32" if quantised(dtype) else dtype
    q, k, v = (
        jnp.asarray(rng.standard_normal((B, n, H), np.float32), float_dtype) for n in (N, K, K)
    )
    out, after = attend(backend, dtype, races)(q, k, v, pages, jnp.int32(LAYER), where, kv_lens)
    at = np.maximum(kv_lens - shared_lens(where) - 1, 0)
    flat = where.private_BQ[np.arange(B), at // Z] * Z + at % Z
    flat = np.where(kv_lens > 0, flat, PAGES * Z).astype(np.int32)
    want = write(pages, k[None], v[None], jnp.array([LAYER]), jnp.asarray(flat))
    for got, expected in zip(after.arrays, want.arrays, strict=True):  # NaN included
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()
    expected = loops(q, want, where, kv_lens)
    error = np.linalg.norm(np.asarray(out, np.float64) - expected)
    assert error <= (5e-3 if dtype == "bfloat16" else 2e-6) * np.linalg.norm(expected)
    assert not np.asarray(out)[kv_lens == 0].any()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@settings(max_examples=20, deadline=None)
@given(tables(), st.integers(0, 2**16))
def test_the_twin_is_the_softmax_over_the_whole_context(dtype, case, seed):
    check("twin", dtype, case, seed)


@pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(d, marks=pytest.mark.slow) for d in ("float32", "bfloat16"))]
)
@settings(max_examples=8, deadline=None)
@given(tables(), st.integers(0, 2**16))
def test_the_kernel_is_the_softmax_over_the_whole_context(dtype, case, seed):
    check("kernel", dtype, case, seed)


def full() -> tuple[PageTables, np.ndarray]:
    """Two slots behind a prefix of 3 pages, one behind none, and one idle; a place unused."""
    where = PageTables(
        np.array([[9, 4, 7], [0, 0, 0], [0, 0, 0]], np.int32), np.array([3 * Z, 0, 0], np.int32),
        np.array([[0, 1], [2, 0], [3, 0]], np.int32), np.array([0, 1, 2, 4], np.int32),
        np.array([[1, 2], [3, 0], [5, 6], [0, 0]], np.int32),
    )  # fmt: skip
    return where, np.array([3 * Z + 40, 3 * Z + 1, 2 * Z, 0], np.int32)


@pytest.mark.slow
def test_no_races():
    check("kernel", "int8", full(), 0, races=True)
    assert not interpret_pallas_call.races.races_found


def listed(first_row: int, where: PageTables, kv_lens: np.ndarray) -> runs.Runs:
    where, kv_lens = jax.tree.map(jnp.asarray, (where, kv_lens))
    return runs.list_runs(first_row, where, kv_lens, kv_lens > 0, jnp.arange(B), Z)


def test_a_shared_prefix_is_listed_once_for_its_members():
    where, kv_lens = full()
    found = listed(PAGES, where, kv_lens)
    pages = [
        found.table[at : at + -(-tokens // Z)].tolist()
        for at, tokens in zip(found.table_at.tolist(), found.tokens.tolist(), strict=True)
    ]
    want = [[9, 4, 7], [1, 2], [3], [], [5, 6], [], [], [], []]
    assert pages == [[PAGES + page for page in run] for run in want]
    assert found.starts.tolist() == [0, 3, 5, 6, 6, 8, 8, 8, 8, 8]
    assert found.member.tolist() == [-1, 0, 1] * R


def test_a_prefix_whose_members_are_all_idle_is_not_read():
    where, kv_lens = full()
    kv_lens[:2] = 0
    found = listed(0, where, kv_lens)
    assert found.tokens.tolist() == [0, 0, 0, 0, 2 * Z, 0, 0, 0, 0]


# ---------------------------------------------------------------- int8


def test_a_vector_is_rounded_to_integers_times_its_largest_number():
    found, scale = quantise(jnp.array([[1.0, -2.54, 0.031], [0.0, 0.0, 0.0]]))
    assert found.tolist() == [[50, -127, 2], [0, 0, 0]]
    np.testing.assert_allclose(scale, [0.02, 0.0], rtol=1e-6)
    x = jax.random.normal(jax.random.key(0), (64, H))
    found, scale = quantise(x)
    assert np.abs(found * scale[:, None] - x).max() <= scale.max() * 0.5001


@pytest.mark.slow
def test_what_was_written_in_any_way_is_read_back():
    rng = np.random.default_rng(0)
    k, v = jnp.asarray(rng.standard_normal((2, LAYERS, 2 * Z, K, H), np.float32))
    empty = Pages.zeros(LAYERS, PAGES, K, Z, H, "int8")
    table = jnp.array([[5, 3]])
    whole = empty.write_pages(k[:, None], v[:, None], table)
    flat = (table[0, :, None] * Z + np.arange(Z)).reshape(-1)
    single = empty.write_tokens(k, v, jnp.arange(LAYERS), flat)
    moved = empty.write_pages(k[:, None], v[:, None], jnp.array([[9, 3]]))
    for some in (3, Z):  # a part, and then all: what is behind a part stays
        before, moved = moved, moved.copy_page(jnp.int32(9), jnp.int32(5), jnp.int32(some))
        for layer in range(LAYERS):
            old, other, new = (
                one.read(jnp.int32(layer), jnp.array([[page]]), H)[0][0]
                for one, page in ((before, 5), (before, 9), (moved, 5))
            )
            np.testing.assert_array_equal(new[:some], other[:some])
            np.testing.assert_array_equal(new[some:], old[some:])
    for pages in (whole, single, moved):
        for layer in range(LAYERS):
            for got, x in zip(pages.read(jnp.int32(layer), table, H), (k, v), strict=True):
                bound = 0.5001 / 127 * np.abs(x[layer]).max(axis=-1, keepdims=True)
                assert (np.abs(got[0] - x[layer]) <= bound).all()


twin = jax.jit(reference.ragged_paged_attention)


def mixed() -> tuple:
    """A decoding sequence, one of 9 new tokens and an idle one, pages of their own."""
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.standard_normal((16, n, H), np.float32)) for n in (N, K, K))
    rows = PAGES + jnp.array([[3, 7], [8, 2], [5, 0]], jnp.int32)
    lens, cu = jnp.array([40, 37, 0], jnp.int32), jnp.array([0, 1, 10, 12], jnp.int32)
    return q, k, v, filled("int8"), rows, lens, cu, (1, 1, 3)


@pytest.mark.slow
def test_a_mixed_call_of_an_int8_cache_agrees_with_its_twin():
    *args, distribution = mixed()
    want, expected = twin(*args)
    call = functools.partial(
        paged.ragged_paged_attention, distribution_3=distribution, sizes=sizes("int8"),
        interpret=True,
    )  # fmt: skip
    out, pages = jax.jit(call)(*args)
    np.testing.assert_allclose(out, want, atol=2e-6)
    for a, b in zip(pages.arrays, expected.arrays, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_the_mixed_twin_of_an_int8_cache_is_that_of_its_floats():
    q, k, v, pages, rows, lens, cu, _ = mixed()
    out, after = twin(q, k, v, pages, rows, lens, cu)
    floats = Pages(after.data * after.scales.swapaxes(-1, -2), PAGES)
    new = [floats.data[rows[0, 39 // Z], :, :, 39 % Z]]
    new += [floats.data[rows[1, t // Z], :, :, t % Z] for t in range(28, 37)]
    kv = jnp.pad(jnp.stack(new), ((0, 6), (0, 0), (0, 0), (0, 0)))
    want, _ = twin(q, kv[:, 0], kv[:, 1], floats, rows, lens, cu)
    np.testing.assert_allclose(out, want, atol=2e-6)
