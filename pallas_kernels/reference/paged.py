"""Paged attention in plain jnp: decoding, and any mix of query lengths.

`paged_attention`, decoding, reads a shared prefix once for all slots that share it and merges
the two partial softmaxes by their logsumexps; `ragged_paged_attention`, the twin of the package
`paged`, takes any mix of query lengths, one context at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import Pages, PageTables
from pallas_kernels.tiles import HIDDEN

_QUERIES = 32  # of a ragged batch, handled together

# (pages, layer, q_RMNH, table_RP, lens_R[, first_RM]) -> (out_RMNH, lse_RMN), as `_attend_to`
Attends = Callable[..., tuple[Array, Array]]


# ---------------------------------------------------------------- decoding


def paged_attention(
    q_BNH: Float[Array, "B N H"],
    k_BKH: Float[Array, "B K H"],
    v_BKH: Float[Array, "B K H"],
    pages: Pages,
    layer: Int[Array, ""],
    tables: PageTables,
    kv_lens_B: Int[Array, " B"],
    attend: Attends,
    window: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "B N H"], Pages]:
    """The decode step of `pallas_kernels.paged_attention`, reading shared pages once a row.

    `attend` is `in_blocks` or a kernel.
    """
    Z, Q = pages.page_size, tables.private_BQ.shape[1]
    lens_B = jnp.maximum(kv_lens_B - tables.shared_lens_B, 0)  # private tokens, the new one too
    idle_B = kv_lens_B == 0
    last_B = jnp.clip((lens_B - 1) // Z, 0, Q - 1)
    page_B = jnp.take_along_axis(tables.private_BQ, last_B[:, None], axis=1)[:, 0]
    write_B = jnp.where(idle_B, pages.pages_per_layer * Z, page_B * Z + (lens_B - 1) % Z)
    pages = pages.write_tokens(k_BKH[None], v_BKH[None], layer[None], write_B)
    in_private, in_shared = (), ()
    if window is not None:  # the first token of its context that a slot sees
        first_B = jnp.where(window > 0, jnp.maximum(kv_lens_B - window, 0), 0)
        in_private = ((first_B - tables.shared_lens_B)[:, None],)
        in_shared = (first_B[tables.members_RM],)
    with jax.named_scope("paged_attention"):
        some = functools.partial(attend, pages, layer)
        private = some(q_BNH[:, None], tables.private_BQ, lens_B, *in_private)
        shared = some(q_BNH[tables.members_RM], tables.shared_RP, tables.shared_lens_R, *in_shared)
        shared = tuple(x.reshape(-1, *x.shape[2:])[tables.place_B] for x in shared)
        out_BNH = _merge(tuple(x[:, 0] for x in private), shared)
    return jnp.where(idle_B[:, None, None], 0, out_BNH).astype(q_BNH.dtype), pages


def in_blocks(rows: int, block: int, loops: bool = True) -> Attends:
    """Attention to pages in jnp: a step of a loop meets `block` cached tokens of `rows` rows.

    Without `loops` a table that one block covers is met at once, also where it is empty.
    """

    def attend(pages: Pages, layer: Array, *of_rows_R: Array) -> tuple[Array, Array]:
        return _by_rows(functools.partial(_attend_to, pages, layer, block, loops), rows, *of_rows_R)

    return attend


def _by_rows(
    attend: Callable[..., tuple[Array, Array]], size: int, *of_rows_R: Array
) -> tuple[Array, Array]:
    """`attend` of `size` rows after `size` rows, so that each walks as far as its longest reaches.

    A row's numbers do not depend on those beside it, and rows of length 0 cost next to nothing.
    """
    R = of_rows_R[0].shape[0]
    if size >= R:
        return attend(*of_rows_R)

    def cut(x: Array) -> Array:
        padded = jnp.pad(x, [(0, -R % size)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, size, *x.shape[1:])

    done = jax.lax.map(lambda these: attend(*these), tuple(map(cut, of_rows_R)))
    out, lse = (x.reshape(-1, *x.shape[2:])[:R] for x in done)
    return out, lse


def _attend_to(
    pages: Pages,
    layer: Int[Array, ""],
    block: int,
    loops: bool,
    q_RMNH: Float[Array, "R M N H"],
    table_RP: Int[Array, "R P"],
    lens_R: Int[Array, " R"],
    first_RM: Int[Array, "R M"] | None = None,
) -> tuple[Float[Array, "R M N H"], Float[Array, "R M N"]]:
    """M queries a row against its first `lens_R` tokens; (0, -1e30) where there are none.

    With `first_RM` a query sees no token before that one. Walks the table `block` tokens at a
    time, and only from the first token that is seen to the end of the longest row, so the width
    of the table costs nothing.
    """
    (R, M, N, H), (_, P), Z = q_RMNH.shape, table_RP.shape, pages.page_size
    K = pages.data.shape[2]
    size = max(1, min(P, block // Z))  # pages at once
    table_RP = jnp.pad(table_RP, ((0, 0), (0, -P % size if P else size)))
    # All queries of a kv head are one matrix: [R, K, M * G, H].
    q = q_RMNH.reshape(R, M, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(R, K, -1, H)

    def step(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = state
        here = jax.lax.dynamic_slice_in_dim(table_RP, i * size, size, axis=1)
        k, v = pages.read_heads(layer, here, H)
        if pages.scales is not None:
            k, v = k.astype(q.dtype), v.astype(q.dtype)
        scores = jnp.einsum("rkqh,rksh->rkqs", q, k, preferred_element_type=jnp.float32)
        at = i * size * Z + jnp.arange(size * Z)
        written = at < lens_R[:, None]
        visible = written[:, None, None]  # [R, K, M * G, S]
        if first_RM is not None:
            in_window = jnp.repeat(at >= first_RM[:, :, None], N // K, axis=1)
            visible &= in_window[:, None]
        scores = jnp.where(visible, scores * H**-0.5, HIDDEN)
        new_peak = jnp.maximum(peak, scores.max(axis=-1, keepdims=True))
        weights = jnp.where(visible, jnp.exp(scores - new_peak), 0)
        keep = jnp.exp(peak - new_peak)
        # Cached values beyond the length may be anything, NaN included: 0 * NaN must not spread.
        v = jnp.where(written[:, None, :, None], v, 0)
        total = total * keep + weights.sum(axis=-1, keepdims=True)
        out = out * keep + jnp.einsum(
            "rkqs,rksh->rkqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_peak, total, out

    start = (
        jnp.full((*q.shape[:3], 1), HIDDEN, jnp.float32),
        jnp.zeros((*q.shape[:3], 1), jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    blocks_used = -(-jnp.max(lens_R) // (size * Z))
    first_block = 0
    if first_RM is not None:
        seen = jnp.where(first_RM < lens_R[:, None], first_RM, jnp.max(lens_R))
        first_block = jnp.maximum(jnp.min(seen), 0) // (size * Z)
    if P <= size and not loops:
        peak, total, out = step(jnp.int32(0), start) if P else start
    else:
        peak, total, out = jax.lax.fori_loop(first_block, blocks_used, step, start)
    total = jnp.maximum(total, 1e-30)
    lse = jnp.where(lens_R[:, None, None, None] > 0, peak + jnp.log(total), HIDDEN)

    def by_member(x: Array) -> Array:
        return x.reshape(R, K, M, N // K, -1).transpose(0, 2, 1, 3, 4).reshape(R, M, N, -1)

    return by_member(out / total), by_member(lse)[..., 0]


def _merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    """Merges two softmax averages over disjoint keys by their logsumexps."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    peak = jnp.maximum(lse_a, lse_b)
    weight_a, weight_b = jnp.exp(lse_a - peak), jnp.exp(lse_b - peak)
    total = weight_a + weight_b
    return out_a * (weight_a / total)[..., None] + out_b * (weight_b / total)[..., None]


# ---------------------------------------------------------------- any mix of query lengths


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pages: Pages,
    rows_BP: Int[Array, "B P"],
    kv_lens_B: Int[Array, " B"],
    cu_q_lens_B1: Int[Array, " B+1"],
    distribution_3: Any = None,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "T N H"], Pages]:
    """`paged.ragged_paged_attention` in plain jnp, same arguments and results.

    Of `distribution_3` only the last number, how many sequences count, changes anything.
    """
    (T, N, H), K = q_TNH.shape, pages.data.shape[2]
    B = rows_BP.shape[0]
    if N % K:
        raise ValueError(f"{N} query heads cannot be split over {K} kv heads")
    count = B if distribution_3 is None else distribution_3[2]
    scale = H**-0.5 if scale is None else scale
    size = min(_QUERIES, T)
    begin_B, end_B = cu_q_lens_B1[:-1], cu_q_lens_B1[1:]
    live_B = (jnp.arange(B) < count) & (kv_lens_B > 0)
    with jax.named_scope("ragged_paged_attention"):
        pages = _write_new(k_TKH, v_TKH, pages, rows_BP, kv_lens_B, end_B, live_B)
        q_padded = jnp.pad(q_TNH, ((0, -T % size), (0, 0), (0, 0)))
        if pages.scales is None:
            q_padded = q_padded.astype(pages.data.dtype)

        def sequence(b: Array, out: Array) -> Array:
            keys, values = _context(pages, rows_BP[b], kv_lens_B[b], q_padded)

            def block(i: Array, out: Array) -> Array:
                cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)  # noqa: E731
                t = i * size + jnp.arange(size)
                mine = (t >= begin_B[b]) & (t < end_B[b]) & live_B[b]
                last = jnp.where(mine, t - end_B[b] + kv_lens_B[b], -1)
                new = _attend_block(cut(q_padded), keys, values, last, scale)
                new = jnp.where(mine[:, None, None], new, cut(out))
                return jax.lax.dynamic_update_slice_in_dim(out, new, i * size, 0)

            stop = jnp.where(end_B[b] > begin_B[b], (end_B[b] - 1) // size + 1, 0)
            return jax.lax.fori_loop(begin_B[b] // size, stop, block, out)

        out = jax.lax.fori_loop(0, B, sequence, jnp.zeros(q_padded.shape, jnp.float32))
    return out[:T].astype(q_TNH.dtype), pages


def _write_new(
    k_TKH: Array, v_TKH: Array, pages: Pages, rows_BP: Array, kv_lens_B: Array, end_B: Array,
    live_B: Array,
) -> Pages:  # fmt: skip
    """Writes the new tokens of the live sequences; those of others go past the array's end."""
    T, (B, P), R, Z = k_TKH.shape[0], rows_BP.shape, pages.data.shape[0], pages.page_size
    t = jnp.arange(T)
    owner = jnp.sum(end_B[None, :] <= t[:, None], axis=1)  # [T]; B for padding
    seq = jnp.minimum(owner, B - 1)
    position = t - end_B[seq] + kv_lens_B[seq]
    page = rows_BP[seq, jnp.clip(position // Z, 0, P - 1)]
    row = jnp.where((owner < B) & live_B[seq], page, R)
    data, *scales = pages.entries(jnp.stack([k_TKH, v_TKH], 1))  # [T, 2, K, C]
    return pages.of(
        pages.data.at[row, :, :, position % Z].set(data, mode="drop"),
        *(pages.scales.at[row, :, :, 0, position % Z].set(x, mode="drop") for x in scales),
    )


def _context(pages: Pages, rows_P: Array, kv_len: Array, q: Array) -> tuple[Array, Array]:
    """[K, S, H] keys and values of a sequence for queries q, zeros past its length."""
    keys, values = (x[0] for x in pages.read_rows(rows_P[None], q.shape[-1]))
    seen = (jnp.arange(keys.shape[1]) < kv_len)[:, None]
    # Slots past the length may hold NaN, and 0 * NaN would spread.
    return tuple(jnp.where(seen, x, 0).astype(q.dtype) for x in (keys, values))


def _attend_block(
    q_XNH: Array, keys_KSH: Array, values_KSH: Array, last_X: Array, scale: float
) -> Array:
    """Queries against one context, of which query x sees the keys up to `last_X[x]`."""
    (X, N, H), (K, S, _) = q_XNH.shape, keys_KSH.shape
    exact = keys_KSH.dtype == jnp.float32
    product = functools.partial(
        jnp.einsum,
        precision=jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    # Heads first: the CPU multiplies bfloat16 only as plain batched products.
    q = q_XNH.swapaxes(0, 1).reshape(K, N // K * X, H)
    scores = product("kxh,ksh->kxs", q, keys_KSH)
    visible = jnp.tile(jnp.arange(S) <= last_X[:, None], (N // K, 1))
    weights = jax.nn.softmax(jnp.where(visible, scores * scale, HIDDEN), axis=-1)
    out = product("kxs,ksh->kxh", weights.astype(values_KSH.dtype), values_KSH)
    return out.reshape(N, X, H).swapaxes(0, 1)
