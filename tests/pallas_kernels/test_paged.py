"""Ragged paged attention: the kernels against the jnp twin, and the twin against loops.

All layouts of one head shape have the same array sizes, so each shape compiles once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import Pages, paged, tuning
from pallas_kernels.reference import ragged_paged_attention

Z, P, B, T, ROWS = 16, 6, 6, 48, 42


@dataclasses.dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    size: int
    dtype: str
    lanes: int = 0  # head size of the cache, where it is not `size`
    split: int = 1

    @property
    def sizes(self) -> paged.PagedSizes:
        """Tiny blocks: 16 or 32 queries, 2 pages of keys; decode blocks of 4 pages, chunks of 2."""
        page_bytes = 2 * self.kv // self.split * Z * (self.lanes or self.size)
        page_bytes *= jnp.dtype(self.dtype).itemsize
        rows = 2 * Z * self.kv // self.split
        parts = 1 if self.dtype == "float32" else 2
        return paged.PagedSizes(
            16 * parts, parts, 2 * Z, 4 * page_bytes, rows, 3, self.split, 2**26
        )


FLOAT32 = Heads(8, 2, 128, "float32")
BFLOAT16 = Heads(8, 2, 128, "bfloat16")


@dataclasses.dataclass(frozen=True)
class Layout:
    """B sequences; the first `shared` pages of every context that is long enough are the same."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    decode: int = 0
    end: int = B
    shared: int = 0

    @property
    def distribution(self) -> np.ndarray:
        return np.asarray([self.decode, self.decode, self.end], np.int32)


LAYOUTS = {
    "decode at page edges": Layout((1,) * 6, (1, 15, 16, 17, 33, 96), decode=6),
    "decode with idle and empty slots": Layout((1, 0, 1, 1, 0, 1), (0, 40, 31, 0, 0, 65), decode=6),
    "decode over shared pages": Layout((1,) * 6, (49, 50, 33, 34, 64, 5), decode=6, shared=2),
    "prefill from nothing": Layout((16, 1, 0, 15, 0, 16), (16, 1, 0, 15, 0, 16)),
    "one tail, all tokens": Layout((0, 0, 48, 0, 0, 0), (0, 0, 96, 0, 0, 0)),
    "tails over shared pages": Layout((17, 1, 5, 2, 15, 3), (49, 33, 95, 34, 47, 3), shared=2),
    "mixed with an idle slot": Layout((3, 9, 0, 7, 12, 4), (0, 40, 17, 7, 96, 32)),
    "nothing but a long idle slot": Layout((0, 20, 0, 0, 17, 2), (9, 0, 0, 4, 0, 0)),
    "decode and mixed": Layout((1, 0, 1, 20, 1, 9), (18, 3, 0, 36, 32, 57), 3, shared=1),
    "sequences past the end": Layout((1, 1, 6, 9, 7, 2), (5, 17, 38, 9, 40, 90), 2, end=4),
    "nothing at all": Layout((0,) * 6, (0, 3, 0, 17, 0, 0), decode=3),
}


def arguments(heads: Heads, layout: Layout, seed: int = 0) -> tuple:
    """Random arrays; every slot that no context reaches is NaN, unused table entries too large."""
    rng = np.random.default_rng(seed)
    free = list(rng.permutation(ROWS))
    rows = np.full((B, P), 10**6, np.int32)
    common = [free.pop() for _ in range(layout.shared)]
    known = np.zeros((ROWS, Z), bool)
    for b, (q_len, kv_len) in enumerate(zip(layout.q_lens, layout.kv_lens, strict=True)):
        old, pages = max(kv_len - q_len, 0), -(-kv_len // Z)
        shares = old >= layout.shared * Z
        mine = (common if shares else []) + [free.pop() for _ in range(P)]
        rows[b, :pages] = mine[:pages]
        free.extend(mine[max(pages, layout.shared if shares else 0) :])
        for s in range(old):
            known[rows[b, s // Z], s % Z] = True
    lanes = heads.lanes or heads.size
    data = rng.standard_normal((ROWS, 2, heads.kv, Z, lanes), np.float32)
    data[..., heads.size :] = 0
    data[~np.broadcast_to(known[:, None, None, :, None], data.shape)] = np.nan
    q = rng.standard_normal((T, heads.query, heads.size), np.float32)
    k, v = rng.standard_normal((2, T, heads.kv, heads.size), np.float32)
    cu = np.concatenate([[0], np.cumsum(layout.q_lens)]).astype(np.int32)
    floats = (jnp.asarray(x, heads.dtype) for x in (q, k, v, data))
    return *floats, rows, np.asarray(layout.kv_lens, np.int32), cu, layout.distribution


def bits(x: jax.Array) -> np.ndarray:
    """The bytes of an array as integers, so that NaN equals NaN."""
    x = np.asarray(x)
    return x.view(np.uint16 if x.dtype.itemsize == 2 else np.uint32)


def loops(q, k, v, data, rows, kv_lens, cu, distribution) -> tuple[np.ndarray, np.ndarray]:
    """The operation as its docstring says it, one query and one head at a time, in float64."""
    data = np.array(data)
    k, v = (np.asarray(x).astype(data.dtype) for x in (k, v))
    out = np.zeros(q.shape)
    q = np.asarray(q, np.float64)
    N, H = q.shape[1:]
    groups = N // data.shape[2]
    for b in range(distribution[2]):
        if kv_lens[b] == 0:
            continue
        for t in range(cu[b], cu[b + 1]):
            s = kv_lens[b] - cu[b + 1] + t
            row, slot = rows[b, s // Z], s % Z
            data[row, :, :, slot] = 0
            data[row, 0, :, slot, :H], data[row, 1, :, slot, :H] = k[t], v[t]
            context = data[rows[b, : s // Z + 1]].astype(np.float64)
            for n in range(N):
                head = context[:, :, n // groups].swapaxes(0, 1)
                keys, values = head.reshape(2, -1, data.shape[4])[:, : s + 1, :H]
                scores = keys @ q[t, n] * H**-0.5
                weights = np.exp(scores - scores.max())
                out[t, n] = weights @ values / weights.sum()
    return out, data


def on_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which takes and returns a cache, of and to its array."""

    def call(q: Any, k: Any, v: Any, data: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        out, pages = function(q, k, v, Pages(data, data.shape[0]), *args, **options)
        return out, pages.data

    return call


ragged_kernels = on_data(paged.ragged_paged_attention)


@functools.lru_cache
def kernel(sizes: paged.PagedSizes, races: bool = False):
    """The kernels under the interpreter, both compiled, whatever the layout."""
    mode = pltpu.InterpretParams(detect_races=True) if races else True
    return jax.jit(functools.partial(ragged_kernels, sizes=sizes, interpret=mode))


reference = jax.jit(on_data(ragged_paged_attention))


def check(got: tuple, want: tuple, dtype: str) -> None:
    out, expected = (np.asarray(x[0], np.float64) for x in (got, want))
    error = np.linalg.norm(out - expected)
    assert error <= (1e-6 if dtype == "float32" else 5e-3) * np.linalg.norm(expected)
    np.testing.assert_array_equal(bits(got[1]), bits(want[1]))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [FLOAT32, BFLOAT16], ids=lambda h: h.dtype)
def test_the_twin_agrees_with_loops(name: str, heads: Heads):
    args = arguments(heads, LAYOUTS[name])
    check(reference(*args), loops(*args), heads.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("heads", [FLOAT32, BFLOAT16], ids=lambda h: h.dtype)
def test_the_kernels_agree_with_the_twin(name: str, heads: Heads):
    args = arguments(heads, LAYOUTS[name])
    check(kernel(heads.sizes)(*args), reference(*args), heads.dtype)


OTHERS = {  # heads, layout, distribution
    "ratio 1, two cores": (Heads(2, 2, 128, "bfloat16", split=2), "decode and mixed", "array"),
    "ratio 7, size 64": (Heads(7, 1, 64, "float32"), "decode and mixed", (3, 3, 6)),
    "ratio 7, size 64 in 128 lanes": (
        Heads(7, 1, 64, "bfloat16", lanes=128), "tails over shared pages", None,
    ),
    "ratio 8, size 256": (Heads(8, 1, 256, "float32"), "decode and mixed", (3, 5, 6)),
    "ratio 8, decode only": (Heads(8, 1, 128, "bfloat16"), "decode over shared pages", (6, 6, 6)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "name", "distribution"), OTHERS.values(), ids=OTHERS.keys())
def test_other_heads_and_static_distributions(heads: Heads, name: str, distribution):
    args = arguments(heads, LAYOUTS[name])
    want = reference(*args)
    check(want, loops(*args), heads.dtype)
    if distribution == "array":
        return check(kernel(heads.sizes)(*args), want, heads.dtype)
    call = functools.partial(
        ragged_kernels,
        distribution_3=distribution,
        sizes=dataclasses.replace(heads.sizes, decode_chunk_rows=Z * heads.kv),
        interpret=True,
    )
    traced = jax.jit(call).trace(*args[:-1])
    decode, _, end = distribution or (0, 0, B)
    assert ("paged_decode" in str(traced.jaxpr)) == (decode > 0)
    assert ("paged_mixed" in str(traced.jaxpr)) == (decode < end)
    check(traced.lower().compile()(*args[:-1]), want, heads.dtype)


@pytest.mark.slow
def test_no_races():
    """Two decode sequences and three mixed ones, pages shared, every DMA on record."""
    heads = dataclasses.replace(FLOAT32, query=1, kv=1)
    args = arguments(heads, LAYOUTS["decode and mixed"])
    out = jax.block_until_ready(kernel(heads.sizes, races=True)(*args))
    assert not interpret_pallas_call.races.races_found
    check(out, reference(*args), heads.dtype)


def test_the_pages_of_other_sequences_do_not_matter():
    """Invariance: the same tokens through other rows, shared or not, give the same bits."""
    layout = LAYOUTS["decode over shared pages"]
    q, k, v, data, rows, *rest = arguments(FLOAT32, layout)
    call = kernel(FLOAT32.sizes)
    order = np.random.default_rng(1).permutation(ROWS)
    moved = np.where(rows < ROWS, np.argsort(order)[np.minimum(rows, ROWS - 1)], rows)
    out, after = call(q, k, v, data, rows, *rest)
    out_moved, after_moved = call(q, k, v, data[order], moved.astype(np.int32), *rest)
    np.testing.assert_array_equal(bits(out), bits(out_moved))
    np.testing.assert_array_equal(bits(after[order]), bits(after_moved))


@st.composite
def layouts(draw) -> Layout:
    decode = draw(st.integers(0, B))
    end = draw(st.integers(decode, B))
    shared, left, q_lens, kv_lens = draw(st.integers(0, 3)), T, [], []
    for b in range(B):
        q_len = draw(st.integers(0, min(1 if b < decode else 24, left)))
        idle = q_len > 0 and draw(st.integers(0, 5)) == 0
        kv_lens.append(0 if idle else draw(st.integers(q_len, P * Z)))
        q_lens.append(q_len)
        left -= q_len
    return Layout(tuple(q_lens), tuple(kv_lens), decode, end, shared)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(layouts(), st.integers(0, 2**16))
def test_any_layout(layout: Layout, seed: int):
    args = arguments(FLOAT32, layout, seed)
    check(kernel(FLOAT32.sizes)(*args), reference(*args), FLOAT32.dtype)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(0, 2**16))
def test_any_layout_of_the_twin(layout: Layout, seed: int):
    args = arguments(dataclasses.replace(FLOAT32, query=2, kv=1, size=8), layout, seed)
    check(reference(*args), loops(*args), FLOAT32.dtype)


# ---------------------------------------------------------------- sizes and errors


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("heads", [(28, 4), (32, 4), (7, 1), (32, 32), (16, 1)])
def test_default_sizes_fit(chip: str, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "chip", lambda: chip)
    sizes = paged.default_sizes(*heads, 128, jnp.bfloat16)
    data = jax.ShapeDtypeStruct((10, 2, heads[1], 64, 128), jnp.bfloat16)
    paged.check_sizes(sizes, data, 128 * 512)
    rows = heads[0] // sizes.head_split * sizes.q_tokens
    key_block = 2 * heads[1] // sizes.head_split * sizes.kv_tokens * 128 * 2
    assert rows <= 8192 and key_block <= 2**22


def shapes(**changes: tuple) -> dict:
    floats = dict(q_TNH=(8, 8, 128), k_TKH=(8, 2, 128), v_TKH=(8, 2, 128), data=(9, 2, 2, 16, 128))
    ints = dict(rows_BP=(3, 4), kv_lens_B=(3,), cu_q_lens_B1=(4,))
    made = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in floats.items()}
    made |= {n: jax.ShapeDtypeStruct(s, jnp.int32) for n, s in ints.items()}
    kinds = {n: made[n].dtype for n in made}
    made |= {n: jax.ShapeDtypeStruct(s, kinds[n]) for n, s in changes.items()}
    return made | dict(pages=Pages(made.pop("data"), 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(q_TNH=(8, 7, 128)), "7 query heads cannot be split over 2 kv heads"),
        (dict(q_TNH=(8, 8, 64), k_TKH=(8, 2, 32)), "k has shape .8, 2, 32.; .*make it .8, 2, 64."),
        (dict(q_TNH=(8, 8, 256)), "head size 256, the cache has 128"),
        (dict(v_TKH=(7, 2, 128)), "v has shape .7, 2, 128.; .* .8, 2, 128."),
        (dict(data=(9, 3, 2, 16, 128)), "axis 1 of the cache has size 3; .* make it 2"),
        (dict(data=(9, 2, 16, 128)), "the cache 4 .* 5 .rows, 2, K, Z, H."),
        (dict(kv_lens_B=(4,)), "kv_lens has shape .4,.; the page table has 3 rows"),
        (dict(cu_q_lens_B1=(3,)), "cu_q_lens has shape .3,.; a page table of 3 rows needs .4,."),
    ],
)
def test_arguments_that_do_not_fit(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        paged.check_arguments(**shapes(**changes))


def test_dtypes_that_do_not_fit():
    made = shapes()
    for dtype, message in (
        (jnp.float16, "the cache is float16; it must be one of float32, bfloat16, int8"),
        (jnp.int8, r"a cache of int8 .9, 2, 2, 16, 128. has scales None; make it .9, 2, 2, 1, 16."),
    ):
        cache = Pages(jax.ShapeDtypeStruct(made["pages"].data.shape, dtype), 3)
        with pytest.raises(ValueError, match=message):
            paged.check_arguments(**made | dict(pages=cache))
    lens = jax.ShapeDtypeStruct((3,), jnp.int16)
    with pytest.raises(ValueError, match="kv_lens is int16; .* int32"):
        paged.check_arguments(**made | dict(kv_lens_B=lens))


@pytest.mark.parametrize(
    ("changes", "cache", "table", "message"),
    [
        (dict(), (9, 2, 2, 12, 128), 12, "pages of 12 tokens .* multiple of 16"),
        (dict(), (9, 2, 2, 144, 128), 12, "pages of 144 tokens are above 128"),
        (dict(), (9, 2, 2, 16, 192), 12, "head size 192 is above 128"),
        (dict(), (9, 2, 2, 16, 128), 2**18, "262144 entries take 1048576 bytes"),
        (dict(q_tokens=24), (9, 2, 2, 16, 128), 12, "q_tokens is 24; .* at least 16"),
        (dict(q_parts=4), (9, 2, 2, 16, 128), 12, "32 queries cannot be cut into 4 parts"),
        (dict(head_split=2), (9, 2, 3, 16, 128), 12, "3 kv heads cannot be split over 2"),
        (dict(decode_buffers=1), (9, 2, 2, 16, 128), 12, "1 decode buffers .* at least 2"),
    ],
)
def test_sizes_that_do_not_fit(changes: dict, cache: tuple, table: int, message: str):
    sizes = dataclasses.replace(BFLOAT16.sizes, **changes)
    with pytest.raises(ValueError, match=message):
        paged.check_sizes(
            sizes,
            jax.ShapeDtypeStruct(cache, jnp.bfloat16),
            table,
        )


def test_a_distribution_that_does_not_fit():
    args = [jnp.asarray(x) for x in arguments(FLOAT32, LAYOUTS["decode and mixed"])[:-1]]
    with pytest.raises(ValueError, match="4 decode sequences of 9 in all .* table of 6"):
        ragged_kernels(*args, (4, 4, 9), sizes=FLOAT32.sizes, interpret=True)
