"""The three operations in plain jnp: the oracle, and the path of CPUs and GPUs.

`packed_attention` walks a block list (`schedule`), so packed rows with shared prefixes cost
what their mask needs and not what their rectangle holds; its backward walks the same list.
`dense_attention` is the same mathematics without blocks: the oracle of tests, and in slices
(`dense_packed_attention`) the path of GPUs. `paged_attention`, decoding, reads a shared
prefix once for all slots that share it and merges the two partial softmaxes by their
logsumexps; `ragged_paged_attention` takes any mix of query lengths, one context at a time.
`token_logprob` never holds more than one block of logits.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.pages import Pages, PageTables
from pallas_kernels.schedule import Schedule, blocks

_QUERIES = 32  # of a ragged batch, handled together
_NEGATIVE = -1e30  # a finite stand-in for -inf: differences of two of them stay finite


def dense_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    kv_end_BS: Int[Array, "B S"],
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The oracle of `packed_attention`: every score, one mask, one softmax in float32."""
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
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
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`pallas_kernels.packed_attention`, one block after the other: right for a few cores."""
    B, T, N, _ = q_BTNH.shape
    K = k_BSKH.shape[2]
    q = _queries(q_BTNH, K, schedule.q_size)
    k, v = (_blocked(x, schedule.k_size) for x in (k_BSKH, v_BSKH))
    out, lse = _packed(q, k, v, schedule)
    return _unqueries(out, B, N, T), _unqueries(lse[..., None], B, N, T)[..., 0]


def _blocked(x_BTKH: Array, size: int) -> Array:
    """[B, T, K, H] -> [B * blocks, K, size, H], zero padded."""
    B, T, K, H = x_BTKH.shape
    x = jnp.pad(x_BTKH, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    return x.reshape(-1, size, K, H).transpose(0, 2, 1, 3)


def _queries(q_BTNH: Array, kv_heads: int, size: int) -> Array:
    """[B, T, N, H] -> [B * blocks, K, G * size, H]: a kv head's queries in one matrix."""
    x = _blocked(q_BTNH, size)
    return x.reshape(x.shape[0], kv_heads, -1, x.shape[-1])


def _unqueries(x: Array, rows: int, heads: int, length: int) -> Array:
    """[B * blocks, K, G * size, H] -> [B, T, N, H]."""
    H = x.shape[-1]
    x = x.reshape(x.shape[0], heads, -1, H).transpose(0, 2, 1, 3)
    return x.reshape(rows, -1, heads, H)[:, :length]


def _take(x: Array, block: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, block, keepdims=False)


def _put(x: Array, value: Array, block: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, value, block, 0)


def _visible(schedule: Schedule, q_block: Array, k_block: Array, groups: int) -> Array:
    """The mask of one block: [G * q_size, k_size]."""
    i = _take(schedule.q_start, q_block) + jnp.arange(schedule.q_size)[:, None]
    j = k_block * schedule.k_size + jnp.arange(schedule.k_size)[None, :]
    ends = _take(schedule.kv_end.reshape(-1, schedule.k_size), k_block)
    return jnp.tile((j <= i) & (i < ends[None, :]), (groups, 1))


@jax.custom_vjp
def _packed(q: Array, k: Array, v: Array, schedule: Schedule) -> Any:
    return _packed_forward(q, k, v, schedule)[0]


def _packed_forward(q: Array, k: Array, v: Array, schedule: Schedule) -> Any:
    H, groups = q.shape[-1], q.shape[2] // schedule.q_size
    scaled = q * jnp.asarray(H**-0.5, q.dtype)
    entries = schedule.by_query

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peaks, sums, outs = state
        qb, kb = entries.q_block[e], entries.k_block[e]
        scores = jnp.einsum(
            "kqh,ksh->kqs", _take(scaled, qb), _take(k, kb), preferred_element_type=jnp.float32
        )
        visible = _visible(schedule, qb, kb, groups)
        scores = jnp.where(visible, scores, _NEGATIVE)
        peak, total, out = _take(peaks, qb), _take(sums, qb), _take(outs, qb)
        new_peak = jnp.maximum(peak, scores.max(axis=-1))
        # A block may hide everything from some query: its weights must be 0, not exp(0).
        weights = jnp.where(visible, jnp.exp(scores - new_peak[..., None]), 0)
        keep = jnp.exp(peak - new_peak)
        total = total * keep + weights.sum(axis=-1)
        out = out * keep[..., None] + jnp.einsum(
            "kqs,ksh->kqh", weights.astype(v.dtype), _take(v, kb),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return _put(peaks, new_peak, qb), _put(sums, total, qb), _put(outs, out, qb)

    shape = q.shape[:-1]
    start = (
        jnp.full(shape, _NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    with jax.named_scope("packed_attention"):
        peaks, sums, outs = jax.lax.fori_loop(0, entries.count, step, start)
    sums = jnp.maximum(sums, 1e-30)  # queries of the zero padding see nothing
    poison = schedule.poison
    out = (outs / sums[..., None] + poison).astype(q.dtype)
    lse = peaks + jnp.log(sums) + poison
    return (out, lse), (q, k, v, schedule, out, lse)


def _packed_backward(residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    q, k, v, schedule, out, lse = residuals
    d_out, d_lse = cotangents
    H, groups = q.shape[-1], q.shape[2] // schedule.q_size
    scale = H**-0.5
    entries = schedule.by_query
    # Sums over queries are plain matrix products only with the queries' transpose on the left.
    q_T, d_out_T = q.swapaxes(-1, -2), d_out.swapaxes(-1, -2)
    # d score = weight * (d_out . v - d_out . out + d_lse): the last two are one number a query.
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1) - d_lse

    def step(e: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        d_q, d_k_T, d_v_T = state
        qb, kb = entries.q_block[e], entries.k_block[e]
        q_e, k_e, v_e, d_out_e = _take(q, qb), _take(k, kb), _take(v, kb), _take(d_out, qb)
        scores = scale * jnp.einsum("kqh,ksh->kqs", q_e, k_e, preferred_element_type=jnp.float32)
        visible = _visible(schedule, qb, kb, groups)
        weights = jnp.where(visible, jnp.exp(scores - _take(lse, qb)[..., None]), 0)
        d_weights = jnp.einsum("kqh,ksh->kqs", d_out_e, v_e, preferred_element_type=jnp.float32)
        d_scores = (scale * weights * (d_weights - _take(delta, qb)[..., None])).astype(q.dtype)
        d_q_e = jnp.einsum("kqs,ksh->kqh", d_scores, k_e, preferred_element_type=jnp.float32)
        d_k_e = jnp.einsum(
            "khq,kqs->khs", _take(q_T, qb), d_scores, preferred_element_type=jnp.float32
        )
        d_v_e = jnp.einsum(
            "khq,kqs->khs", _take(d_out_T, qb), weights.astype(q.dtype),
            preferred_element_type=jnp.float32,
        )  # fmt: skip
        return (
            _put(d_q, _take(d_q, qb) + d_q_e, qb),
            _put(d_k_T, _take(d_k_T, kb) + d_k_e, kb),
            _put(d_v_T, _take(d_v_T, kb) + d_v_e, kb),
        )

    shapes = q.shape, k.swapaxes(-1, -2).shape, v.swapaxes(-1, -2).shape
    start = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    with jax.named_scope("packed_attention_backward"):
        d_q, d_k_T, d_v_T = jax.lax.fori_loop(0, entries.count, step, start)
    return (
        d_q.astype(q.dtype),
        d_k_T.swapaxes(-1, -2).astype(k.dtype),
        d_v_T.swapaxes(-1, -2).astype(v.dtype),
        jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), schedule),
    )


_packed.defvjp(_packed_forward, _packed_backward)


def dense_packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    schedule: Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """`pallas_kernels.packed_attention` as large dense products: right for GPUs.

    A thousand small steps one after the other would leave a GPU idle, so each block of
    queries meets all keys that causality leaves at once, masked, and is recomputed in the
    backward. Memory holds the scores of one block of queries, [B, N, q_size, S].
    """
    T, S = q_BTNH.shape[1], k_BSKH.shape[1]
    padded = blocks(S, schedule.k_size) * schedule.k_size
    B = q_BTNH.shape[0]
    kv_end_BS = schedule.kv_end.reshape(B, padded)[:, :S] - jnp.arange(B)[:, None] * padded
    attend = jax.checkpoint(dense_attention)
    outs, lses = [], []
    for first in range(0, T, schedule.q_size):
        last = min(first + schedule.q_size, T)
        reach = S - T + last
        out, lse = attend(
            q_BTNH[:, first:last], k_BSKH[:, :reach], v_BSKH[:, :reach], kv_end_BS[:, :reach]
        )
        outs.append(out)
        lses.append(lse)
    return jnp.concatenate(outs, axis=1), jnp.concatenate(lses, axis=1)


# ---------------------------------------------------------------- paged attention


def paged_attention(
    q_BNH: Float[Array, "B N H"],
    k_BKH: Float[Array, "B K H"],
    v_BKH: Float[Array, "B K H"],
    pages: Pages,
    layer: Int[Array, ""],
    tables: PageTables,
    kv_lens_B: Int[Array, " B"],
) -> tuple[Float[Array, "B N H"], Pages]:
    """The decode step of `pallas_kernels.paged_attention`, reading shared pages once a row."""
    Z, Q = pages.page_size, tables.private_BQ.shape[1]
    lens_B = jnp.maximum(kv_lens_B - tables.shared_lens_B, 0)  # private tokens, the new one too
    idle_B = kv_lens_B == 0
    last_B = jnp.clip((lens_B - 1) // Z, 0, Q - 1)
    page_B = jnp.take_along_axis(tables.private_BQ, last_B[:, None], axis=1)[:, 0]
    write_B = jnp.where(idle_B, pages.pages_per_layer * Z, page_B * Z + (lens_B - 1) % Z)
    pages = pages.write_tokens(k_BKH[None], v_BKH[None], layer[None], write_B)
    with jax.named_scope("paged_attention"):
        k, v = pages.read_heads(layer, tables.private_BQ, q_BNH.shape[2])
        private = _attend_to(q_BNH[:, None], k, v, lens_B)
        k, v = pages.read_heads(layer, tables.shared_RP, q_BNH.shape[2])
        shared = _attend_to(q_BNH[tables.members_RM], k, v, tables.shared_lens_R)
        shared = tuple(x.reshape(-1, *x.shape[2:])[tables.place_B] for x in shared)
        out_BNH = _merge(tuple(x[:, 0] for x in private), shared)
    return jnp.where(idle_B[:, None, None], 0, out_BNH).astype(q_BNH.dtype), pages


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


# ---------------------------------------------------------------- ragged paged attention


def ragged_paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    data: Float[Array, "rows 2 K Z C"],
    rows_BP: Int[Array, "B P"],
    kv_lens_B: Int[Array, " B"],
    cu_q_lens_B1: Int[Array, " B+1"],
    distribution_3: Any = None,
    *,
    scale: float | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "rows 2 K Z C"]]:
    """The operation of `paged.ragged_paged_attention`, same arguments and results.

    Of `distribution_3` only the last number, how many sequences count, changes anything.
    """
    (T, N, H), (R, _, K, Z, _) = q_TNH.shape, data.shape
    B, P = rows_BP.shape
    if N % K:
        raise ValueError(f"{N} query heads cannot be split over {K} kv heads")
    count = B if distribution_3 is None else distribution_3[2]
    scale = H**-0.5 if scale is None else scale
    exact = data.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    begin_B, end_B = cu_q_lens_B1[:-1], cu_q_lens_B1[1:]

    with jax.named_scope("ragged_paged_attention"):
        t = jnp.arange(T)
        owner = jnp.sum(end_B[None, :] <= t[:, None], axis=1)  # [T]; B for padding
        seq = jnp.minimum(owner, B - 1)
        position = t - end_B[seq] + kv_lens_B[seq]
        live = (owner < count) & (kv_lens_B[seq] > 0)
        row = jnp.where(live, rows_BP[seq, jnp.clip(position // Z, 0, P - 1)], R)
        new = jnp.stack([k_TKH, v_TKH], 1).astype(data.dtype)  # [T, 2, K, H]
        new = jnp.pad(new, ((0, 0),) * 3 + ((0, data.shape[4] - H),))
        data = data.at[row, :, :, position % Z].set(new, mode="drop")

        def context(b: Array) -> tuple[Array, Array]:
            """[K, S, H] keys and values of a sequence, zeros past its length."""
            kv = data[rows_BP[b]].transpose(1, 2, 0, 3, 4).reshape(2, K, P * Z, -1)[..., :H]
            # Slots past the length may hold NaN, and 0 * NaN would spread.
            kv = jnp.where((jnp.arange(P * Z) < kv_lens_B[b])[:, None], kv, 0)
            return kv[0], kv[1]

        size = min(_QUERIES, T)
        wide = jnp.pad(q_TNH, ((0, -T % size), (0, 0), (0, 0))).astype(data.dtype)
        t_wide = jnp.arange(wide.shape[0])

        def sequence(b: Array, out: Array) -> Array:
            keys, values = context(b)

            def block(i: Array, out: Array) -> Array:
                cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * size, size)  # noqa: E731
                # Heads first: the CPU multiplies bfloat16 only as plain batched products.
                q_KXH = cut(wide).swapaxes(0, 1).reshape(K, N // K * size, H)
                scores = jnp.einsum(
                    "kxh,ksh->kxs", q_KXH, keys,
                    precision=precision, preferred_element_type=jnp.float32,
                )  # fmt: skip
                t = cut(t_wide)
                mine = (t >= begin_B[b]) & (t < end_B[b]) & (b < count) & (kv_lens_B[b] > 0)
                last = t - end_B[b] + kv_lens_B[b]
                visible = mine[:, None] & (jnp.arange(P * Z) <= last[:, None])
                visible = jnp.tile(visible, (N // K, 1))
                weights = jax.nn.softmax(jnp.where(visible, scores * scale, _NEGATIVE), axis=-1)
                new = jnp.einsum(
                    "kxs,ksh->kxh", weights.astype(values.dtype), values,
                    precision=precision, preferred_element_type=jnp.float32,
                )  # fmt: skip
                new = new.reshape(N, size, H).swapaxes(0, 1)
                new = jnp.where(mine[:, None, None], new, cut(out))
                return jax.lax.dynamic_update_slice_in_dim(out, new, i * size, 0)

            blocks = jnp.where(end_B[b] > begin_B[b], (end_B[b] - 1) // size + 1, 0)
            return jax.lax.fori_loop(begin_B[b] // size, blocks, block, out)

        out = jax.lax.fori_loop(0, B, sequence, jnp.zeros(wide.shape, jnp.float32))
    return out[:T].astype(q_TNH.dtype), data


# ---------------------------------------------------------------- token logprobs


def token_logprob(
    x_TD: Float[Array, "T D"],
    w: Float[Array, "M N"],
    labels_T: Int[Array, " T"],
    *,
    temperature: float,
    valid_vocab: int,
    transposed: bool = False,
    axis_name: str | None = None,
    block: int = 1024,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """`pallas_kernels.token_logprob`, one block of tokens after the other.

    Only [block, V] logits exist at a time, forward and (by recomputation) backward.
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    T, D = x_TD.shape
    V, width = w.shape if transposed else w.shape[::-1]
    if width != D:
        raise ValueError(f"hidden states are {D} wide, the output matrix {width}")
    blocks = -(-T // block)
    size = -(-T // blocks)
    x = jnp.pad(x_TD, ((0, blocks * size - T), (0, 0))).reshape(blocks, size, D)
    labels = jnp.pad(labels_T, (0, blocks * size - T)).reshape(blocks, size)
    # Over a mesh axis, every shard holds V consecutive ids; alone, sums are over one shard.
    total = largest = lambda a: a  # noqa: E731
    if axis_name is not None:
        total = functools.partial(jax.lax.psum, axis_name=axis_name)
        largest = functools.partial(jax.lax.pmax, axis_name=axis_name)
    first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * V

    @jax.checkpoint
    def one(x_TD: Array, labels_T: Array) -> tuple[Array, Array, Array]:
        logits = jax.lax.dot_general(
            x_TD, w.astype(x_TD.dtype), (((1,), (int(transposed),)), ((), ())),
            preferred_element_type=jnp.float32,
        ) / temperature  # fmt: skip
        ids = first + jnp.arange(V)
        logits = jnp.where(ids < valid_vocab, logits, _NEGATIVE)
        peak = largest(jax.lax.stop_gradient(logits.max(axis=-1)))
        lse = peak + jnp.log(total(jnp.exp(logits - peak[:, None]).sum(axis=-1)))
        mine = ids == labels_T[:, None]
        label = total(jnp.where(mine, logits, 0).sum(axis=-1))
        probability = jnp.exp(logits - lse[:, None])
        entropy = lse - total(jnp.sum(probability * logits, axis=-1))
        return label - lse, lse, entropy

    with jax.named_scope("token_logprob"):
        results = (
            [one(x[0], labels[0])] if blocks == 1 else jax.lax.map(lambda b: one(*b), (x, labels))
        )
    if blocks == 1:
        return results[0]
    return tuple(r.reshape(-1)[:T] for r in results)
