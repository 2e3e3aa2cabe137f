"""The three operations in plain jnp: the oracle, and the path of CPUs and GPUs.

`packed_attention` walks a block list (`schedule`), so packed rows with shared prefixes cost
what their mask needs and not what their rectangle holds; its backward walks the same list.
`dense_attention` is the same mathematics without blocks, for tests. `paged_attention` reads
a shared prefix once for all slots that share it and merges the two partial softmaxes by
their logsumexps. `token_logprob` never holds more than one block of logits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import Pages, PageTables
from pallas_kernels.schedule import Schedule

_NEGATIVE = -1e30  # a finite stand-in for -inf: differences of two of them stay finite


def _check_heads(q_heads: int, kv_heads: int) -> None:
    if q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot be split over {kv_heads} kv heads")


def dense_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    kv_end_BS: Int[Array, "B S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The oracle of `packed_attention`: every score, one mask, one softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    _check_heads(N, K)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    i, j = S - T + jnp.arange(T)[:, None], jnp.arange(S)[None, :]
    visible = (j <= i) & (i < kv_end_BS[:, None, None, None, :])
    scores = jnp.where(visible, scores * H**-0.5, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v_BSKH.astype(jnp.float32))
    return out.reshape(B, T, N, H).astype(q_BTNH.dtype), lse.transpose(0, 3, 1, 2).reshape(B, T, N)


# ---------------------------------------------------------------- packed attention


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    kv_end_BS: Int[Array, "B S"],
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attention of packed rows: query i sees key j iff j <= i < kv_end[j].

    The T queries are the last T of the row's S packed positions (S - T keys come from a
    cache; S == T in training). Differentiable in q, k and v.

    Returns:
      (out, lse): out in q's dtype, lse the float32 logsumexp of each query's scores.
    Raises:
      ValueError: query heads are not a multiple of kv heads.
    """
    _check_heads(q_BTNH.shape[2], k_BSKH.shape[2])
    return _packed(q_BTNH, k_BSKH, v_BSKH, kv_end_BS, schedule)


@jax.custom_vjp
def _packed(q: Array, k: Array, v: Array, kv_end: Array, schedule: Schedule) -> Any:
    return _packed_forward(q, k, v, kv_end, schedule)[0]


def _blocked(x_BTKH: Array, size: int) -> Array:
    """[B, T, K, H] -> [B, blocks, K, size, H], zero padded."""
    B, T, K, H = x_BTKH.shape
    blocks = -(-T // size)
    x = jnp.pad(x_BTKH, ((0, 0), (0, blocks * size - T), (0, 0), (0, 0)))
    return x.reshape(B, blocks, size, K, H).transpose(0, 1, 3, 2, 4)


def _unblocked(x: Array, length: int) -> Array:
    """[B, blocks, K, size, H] -> [B, length, K, H]."""
    B, blocks, K, size, H = x.shape
    return x.transpose(0, 1, 3, 2, 4).reshape(B, blocks * size, K, H)[:, :length]


def _queries(q_BTNH: Array, kv_heads: int, size: int) -> Array:
    """[B, T, N, H] -> [B, blocks, K, G * size, H]: a kv head's queries in one matrix."""
    x = _blocked(q_BTNH, size)
    B, blocks, N, _, H = x.shape
    return x.reshape(B, blocks, kv_heads, N // kv_heads * size, H)


def _unqueries(x: Array, heads: int, length: int) -> Array:
    B, blocks, _, _, H = x.shape
    return _unblocked(x.reshape(B, blocks, heads, -1, H), length)


def _take(x: Array, row: Array, block: Array) -> Array:
    """x[row, block] of a blocked array."""
    start = (row, block) + (0,) * (x.ndim - 2)
    return jax.lax.dynamic_slice(x, start, (1, 1, *x.shape[2:]))[0, 0]


def _put(x: Array, value: Array, row: Array, block: Array) -> Array:
    return jax.lax.dynamic_update_slice(x, value[None, None], (row, block) + (0,) * (x.ndim - 2))


def _visible(
    ends: Array, schedule: Schedule, entry: tuple[Array, Array, Array], offset: int, groups: int
) -> Array:
    """The mask of one block: [G * q_size, k_size]."""
    row, q_block, k_block = entry
    i = offset + q_block * schedule.q_size + jnp.arange(schedule.q_size)[:, None]
    j = k_block * schedule.k_size + jnp.arange(schedule.k_size)[None, :]
    visible = (j <= i) & (i < _take(ends, row, k_block)[None, :])
    return jnp.tile(visible, (groups, 1))


def _ends(kv_end_BS: Array, size: int) -> Array:
    B, S = kv_end_BS.shape
    blocks = -(-S // size)
    return jnp.pad(kv_end_BS, ((0, 0), (0, blocks * size - S))).reshape(B, blocks, size)


def _packed_forward(q: Array, k: Array, v: Array, kv_end: Array, schedule: Schedule) -> Any:
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    qs = _queries(q, K, schedule.q_size) * jnp.asarray(H**-0.5, q.dtype)
    ks, vs = _blocked(k, schedule.k_size), _blocked(v, schedule.k_size)
    ends = _ends(kv_end, schedule.k_size)

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peaks, sums, outs = state
        entry = row, qb, kb = schedule.row[e], schedule.q_block[e], schedule.k_block[e]
        scores = jnp.einsum(
            "kqh,ksh->kqs", _take(qs, row, qb), _take(ks, row, kb),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        visible = _visible(ends, schedule, entry, S - T, G)
        scores = jnp.where(visible, scores, _NEGATIVE)
        peak, total, out = _take(peaks, row, qb), _take(sums, row, qb), _take(outs, row, qb)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        # A block may hide everything from some query: its weights must be 0, not exp(0).
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(axis=-1)
        out = out * keep[..., None] + jnp.einsum(
            "kqs,ksh->kqh", weights.astype(v.dtype), _take(vs, row, kb),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (
            _put(peaks, new_peak, row, qb),
            _put(sums, total, row, qb),
            _put(outs, out, row, qb),
        )

    shape = qs.shape[:-1]
    start = (
        jnp.full(shape, _NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(qs.shape, jnp.float32),
    )
    with jax.named_scope("packed_attention"):
        peaks, sums, outs = jax.lax.fori_loop(0, schedule.count, step, start)
    sums = jnp.maximum(sums, 1e-30)  # queries of the zero padding see nothing
    out = _unqueries(outs / sums[..., None], N, T).astype(q.dtype)
    lse_blocks = peaks + jnp.log(sums)
    lse = _unqueries(lse_blocks[..., None], N, T)[..., 0]
    return (out, lse), (q, k, v, kv_end, schedule, out, lse)


def _packed_backward(residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, kv_end, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    G = N // K
    scale = H**-0.5
    qs = _queries(q, K, schedule.q_size)
    ks, vs = _blocked(k, schedule.k_size), _blocked(v, schedule.k_size)
    ends = _ends(kv_end, schedule.k_size)
    d_outs = _queries(d_out, K, schedule.q_size)
    # Sums over queries are plain matrix products only with the queries' transpose on the left.
    qs_T, d_outs_T = qs.swapaxes(-1, -2), d_outs.swapaxes(-1, -2)
    lses = _queries(lse[..., None], K, schedule.q_size)[..., 0]
    # d score = weight * (d_out . v - d_out . out + d_lse): the last two are one number a query.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_lse
    deltas = _queries(delta[..., None], K, schedule.q_size)[..., 0]

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dqs, dks_T, dvs_T = state
        entry = row, qb, kb = schedule.row[e], schedule.q_block[e], schedule.k_block[e]
        q_e, k_e, v_e = _take(qs, row, qb), _take(ks, row, kb), _take(vs, row, kb)
        d_out_e = _take(d_outs, row, qb)
        scores = scale * jnp.einsum("kqh,ksh->kqs", q_e, k_e, preferred_element_type=jnp.float32)
        visible = _visible(ends, schedule, entry, S - T, G)
        weights = jnp.where(visible, jnp.exp(scores - _take(lses, row, qb)[..., None]), 0)
        d_weights = jnp.einsum("kqh,ksh->kqs", d_out_e, v_e, preferred_element_type=jnp.float32)
        d_scores = (scale * weights * (d_weights - _take(deltas, row, qb)[..., None])).astype(
            q.dtype
        )
        dq = jnp.einsum("kqs,ksh->kqh", d_scores, k_e, preferred_element_type=jnp.float32)
        dk_T = jnp.einsum(
            "khq,kqs->khs", _take(qs_T, row, qb), d_scores, preferred_element_type=jnp.float32
        )
        dv_T = jnp.einsum(
            "khq,kqs->khs", _take(d_outs_T, row, qb), weights.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (
            _put(dqs, _take(dqs, row, qb) + dq, row, qb),
            _put(dks_T, _take(dks_T, row, kb) + dk_T, row, kb),
            _put(dvs_T, _take(dvs_T, row, kb) + dv_T, row, kb),
        )

    shapes = qs.shape, ks.swapaxes(-1, -2).shape, vs.swapaxes(-1, -2).shape
    start = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    with jax.named_scope("packed_attention_backward"):
        dqs, dks_T, dvs_T = jax.lax.fori_loop(0, schedule.count, step, start)
    no_gradient = functools.partial(jax.tree.map, lambda x: np.zeros(x.shape, jax.dtypes.float0))
    return (
        _unqueries(dqs, N, T).astype(q.dtype),
        _unblocked(dks_T.swapaxes(-1, -2), S).astype(k.dtype),
        _unblocked(dvs_T.swapaxes(-1, -2), S).astype(v.dtype),
        no_gradient(kv_end),
        no_gradient(schedule),
    )


_packed.defvjp(_packed_forward, _packed_backward)


# ---------------------------------------------------------------- paged attention


def paged_attention(
    q_BNH: Float[Array, "B N H"],
    k_BKH: Float[Array, "B K H"],
    v_BKH: Float[Array, "B K H"],
    pages: Pages,
    layer: Int[Array, ""],
    tables: PageTables,
    lens_B: Int[Array, " B"],
    write_B: Int[Array, " B"],
) -> tuple[Float[Array, "B N H"], Pages]:
    """One decode step of B slots: writes the new keys and values, then attends.

    Args:
      lens_B: private tokens already cached; the new one makes it lens_B + 1.
      write_B: flat index (page * Z + offset) of the new token; past the end writes nothing.
    Returns:
      (out, pages): slot b sees its row's shared prefix, its private tokens and itself.
    """
    _check_heads(q_BNH.shape[1], k_BKH.shape[1])
    pages = pages.write_tokens(k_BKH[None], v_BKH[None], layer[None], write_B)
    with jax.named_scope("paged_attention"):
        k, v = pages.read_heads(layer, tables.private_BQ)
        private = _attend_to(q_BNH[:, None], k, v, lens_B + 1)
        k, v = pages.read_heads(layer, tables.shared_RP)
        shared = _attend_to(q_BNH[tables.members_RM], k, v, tables.shared_lens_R)
        shared = tuple(x.reshape(-1, *x.shape[2:])[tables.place_B] for x in shared)
        out_BNH = _merge(tuple(x[:, 0] for x in private), shared)
    return out_BNH.astype(q_BNH.dtype), pages


def _attend_to(
    q_RMNH: Float[Array, "R M N H"],
    k_RKSH: Float[Array, "R K S H"],
    v_RKSH: Float[Array, "R K S H"],
    lens_R: Int[Array, " R"],
) -> tuple[Float[Array, "R M N H"], Float[Array, "R M N"]]:
    """M queries a row against the row's first `lens_R` keys; (0, -1e30) where there are none."""
    R, M, N, H = q_RMNH.shape
    K, S = k_RKSH.shape[1:3]
    # All queries of a kv head are one matrix: [R, K, M * G, H].
    q = q_RMNH.reshape(R, M, K, N // K, H).transpose(0, 2, 1, 3, 4).reshape(R, K, -1, H)
    scores = jnp.einsum("rkqh,rksh->rkqs", q, k_RKSH, preferred_element_type=jnp.float32)
    visible = (jnp.arange(S) < lens_R[:, None])[:, None, None, :]
    scores = jnp.where(visible, scores * H**-0.5, _NEGATIVE)
    peak = scores.max(axis=-1, initial=_NEGATIVE, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - peak), 0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    # Cached values beyond the length may be anything, NaN included: 0 * NaN must not spread.
    v = jnp.where(visible[:, :, 0, :, None], v_RKSH, 0)
    out = jnp.einsum("rkqs,rksh->rkqh", weights.astype(v.dtype), v,
                     preferred_element_type=jnp.float32)  # fmt: skip
    lse = jnp.where(lens_R[:, None, None, None] > 0, peak + jnp.log(total), _NEGATIVE)

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


# ---------------------------------------------------------------- token logprobs


def token_logprob(
    x_TD: Float[Array, "T D"],
    w_DV: Float[Array, "D V"],
    labels_T: Int[Array, " T"],
    *,
    temperature: float,
    valid_vocab: int,
    block: int = 1024,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """Logprob of each label, logsumexp and entropy of softmax(x w / temperature), in float32.

    Ids at or above `valid_vocab` get no probability. Only [block, V] logits exist at a time,
    forward and (by recomputation) backward.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    T, D = x_TD.shape
    V = w_DV.shape[1]
    blocks = -(-T // block)
    size = -(-T // blocks)
    x = jnp.pad(x_TD, ((0, blocks * size - T), (0, 0))).reshape(blocks, size, D)
    labels = jnp.pad(labels_T, (0, blocks * size - T)).reshape(blocks, size)

    @jax.checkpoint
    def one(x_TD: Array, labels_T: Array) -> tuple[Array, Array, Array]:
        logits = jnp.matmul(x_TD, w_DV.astype(x_TD.dtype), preferred_element_type=jnp.float32)
        logits = logits / temperature
        if valid_vocab < V:
            logits = jnp.where(jnp.arange(V) < valid_vocab, logits, _NEGATIVE)
        lse = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, labels_T[:, None], axis=-1)[:, 0]
        probability = jnp.exp(logits - lse[:, None])
        entropy = lse - jnp.sum(probability * logits, axis=-1)
        return label - lse, lse, entropy

    with jax.named_scope("token_logprob"):
        results = (
            [one(x[0], labels[0])] if blocks == 1 else jax.lax.map(lambda b: one(*b), (x, labels))
        )
    if blocks == 1:
        return results[0]
    return tuple(r.reshape(-1)[:T] for r in results)
