"""The GPU kernels: on a GPU if there is one, and interpreted on a CPU."""

import functools
import types

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from test_packed import EDGES, assert_kernels_are_dense_attention

import pallas_kernels
from pallas_kernels import Pages, PageTables, dispatch, gpu, reference, schedule
from pallas_kernels.gpu import paged

packed_is_dense = functools.partial(assert_kernels_are_dense_attention, backend=layouts.TRITON)

# ---------------------------------------------------------------- packed


@pytest.mark.slow
@pytest.mark.parametrize("queries", [256, 200])
def test_packed_attention_at_every_edge(queries):
    packed_is_dense(np.stack(list(EDGES.values())), queries, 4, 2, 64, blocks=(128, 64))


@pytest.mark.slow
@pytest.mark.parametrize(
    "N, K, H", [(2, 2, 64), (4, 1, 128), (7, 1, 64), (8, 1, 256), (4, 2, 80), (2, 1, 8)]
)
def test_every_head_size_is_padded_to_a_power_of_two(N, K, H):
    kv_end = np.stack([layouts.kv_end(np.random.default_rng(H + i), 100) for i in range(2)])
    packed_is_dense(kv_end, 100, N, K, H, blocks=(32, 16))


@pytest.mark.parametrize("H", [64, 128])
def test_bfloat16_stays_within_its_rounding(H):
    kv_end = layouts.bundle(130, [40, 1, 60], 300)[None]
    packed_is_dense(kv_end, 300, 4, 2, H, jnp.bfloat16, 6e-3, blocks=(128, 64))


def test_few_queries_after_many_keys():
    kv_end = np.full((1, 300), 300, np.int32)
    kv_end[:, 250:280] = 0  # of a cached prefix's last page
    packed_is_dense(kv_end, 5, 2, 1, 64, blocks=(16, 64))


@pytest.mark.parametrize("seed", range(4))
def test_the_runs_by_key_are_the_list_in_another_order(seed):
    rng = np.random.default_rng(seed)
    kv_end = jnp.asarray(np.stack([layouts.kv_end(rng, 90) for _ in range(2)]))
    made = schedule.packed_schedule(kv_end, 70, 16, 16)
    q_block, k_block = (np.asarray(x)[: made.count] for x in (made.q_block, made.k_block))
    of_queries, of_keys = np.asarray(made.runs.of_queries), np.asarray(made.runs.of_keys)
    for block in range(len(of_queries) - 1):
        assert (q_block[of_queries[block] : of_queries[block + 1]] == block).all()
    assert of_queries[-1] == of_keys[-1] == made.count
    for block in range(len(of_keys) - 1):
        run = np.asarray(made.runs.q_block)[of_keys[block] : of_keys[block + 1]]
        np.testing.assert_array_equal(run, q_block[k_block == block])


# ---------------------------------------------------------------- paged

LAYERS, PAGES = 2, 64


def cached(dtype, K, Z, H, seed=0):
    """A cache of random numbers, NaN where nothing is ever read: page 0."""
    rng = np.random.default_rng(seed)
    pages = Pages.zeros(LAYERS, PAGES, K, Z, H, dtype)
    values = jnp.asarray(rng.normal(size=pages.data.shape), jnp.float32)
    data, *scales = pages.entries(values)
    bad = jnp.arange(LAYERS * PAGES) % PAGES == 0
    if scales:
        scales = [jnp.where(bad[:, None, None, None, None], jnp.nan, scales[0][..., None, :])]
    else:
        data = jnp.where(bad[:, None, None, None, None], jnp.nan, data)
    return pages.of(data, *scales)


twin = jax.jit(functools.partial(reference.paged_attention, attend=reference.in_blocks(6, 64)))
decode = jax.jit(lambda *a, **w: pallas_kernels.paged_attention(*a, **w))


@pytest.mark.parametrize(
    "dtype, Z, N, K, H",
    [("float32", 16, 4, 2, 64), ("bfloat16", 32, 14, 2, 64), ("int8", 16, 6, 1, 128)],
)
@pytest.mark.parametrize("window", [None, 0, 40, 300])
def test_decoding_is_that_of_plain_jnp(dtype, Z, N, K, H, window):
    """Two rows that share, a slot alone, one that is idle; contexts of one token to many parts."""
    rng = np.random.default_rng(1)
    computed = jnp.float32 if dtype == "int8" else jnp.dtype(dtype)
    q, k, v = (jnp.asarray(rng.normal(size=(6, n, H)), computed) for n in (N, K, K))
    numbers = iter(rng.permutation(np.arange(1, PAGES)))
    take = lambda *shape: np.array([next(numbers) for _ in range(np.prod(shape))]).reshape(shape)  # noqa: E731
    shared = np.zeros((3, 10), np.int32)
    shared[0], shared[1, :1] = take(10), take(1)
    private = np.zeros((6, 18 // (Z // 16)), np.int32)
    lens = np.array([1, 3, Z, Z + 1, 18 * 16 - 3, 0], np.int32)  # private tokens, the new one too
    for b, length in enumerate(lens):
        private[b, : -(-length // Z)] = take(-(-length // Z))
    tables = PageTables(
        shared, np.array([10 * Z, Z, 0], np.int32),
        np.array([[0, 1], [2, 3], [4, 5]], np.int32), np.arange(6, dtype=np.int32), private,
    )  # fmt: skip
    tables = jax.tree.map(jnp.asarray, tables)
    kv_lens = jnp.where(lens > 0, tables.shared_lens_B + lens, 0)
    arguments = q, k, v, cached(dtype, K, Z, H), jnp.int32(1), tables, kv_lens
    how = {} if window is None else {"window": jnp.int32(window)}
    with jax.default_matmul_precision("highest"):
        want, written = twin(*arguments, **how)
    with pallas_kernels.using(layouts.TRITON):
        got, pages = decode(*arguments, **how)
    near = 2e-2 if dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), atol=near)
    assert not got[5].any()
    for new, old in zip(pages.arrays, written.arrays, strict=True):
        assert np.asarray(new).tobytes() == np.asarray(old).tobytes()


@functools.partial(jax.jit, static_argnums=0)
def in_parts(programs, *arguments):
    """Traced while `_PROGRAMS` is `programs`, which decide the parts."""
    assert paged._PROGRAMS == programs
    return gpu.attend_to_pages(*arguments, interpret=layouts.TRITON != "triton")


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 500])
def test_a_context_in_parts_is_the_context(length, monkeypatch):
    """One part, or several, of which some have no tokens: the same average, the same logsumexp."""
    pages = cached("float32", 2, 16, 64)
    q = jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, 4, 64)), jnp.float32)
    table = jnp.arange(1, 33, dtype=jnp.int32)[None]
    found = []
    for programs in (1, 8, 512):
        monkeypatch.setattr(paged, "_PROGRAMS", programs)
        found.append(in_parts(programs, pages, jnp.int32(0), q, table, jnp.array([length])))
    for out, lse in found[1:]:
        np.testing.assert_allclose(out, found[0][0], atol=1e-5)
        np.testing.assert_allclose(lse, found[0][1], atol=1e-5)
    if not length:
        assert not found[0][0].any() and (found[0][1] == -1e30).all()


def test_a_cache_for_gpus_has_heads_of_a_power_of_two():
    with pallas_kernels.using("triton"):
        assert [pallas_kernels.cache_head_size(n) for n in (8, 64, 80, 128)] == [16, 64, 128, 128]


@pytest.mark.parametrize(
    "capability, chosen", [("7.5", "xla"), ("8.0", "triton"), ("9.0", "triton"), ("gfx90a", "xla")]
)
def test_gpus_for_which_triton_does_not_compile_have_dense_products(
    monkeypatch, capability, chosen
):
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    dispatch._ampere.cache_clear()
    try:
        assert pallas_kernels.backend() == chosen and pallas_kernels.on_gpu()
    finally:
        dispatch._ampere.cache_clear()
