"""The ways queries meet keys, each an `Attend` for `policy.forward`.

`packed` is training: rows of shared prefixes and tails under one `kv_end` mask.
`packed_after_prefix` is prefill: the same mask, but the first keys of each row come out of
the paged cache. `paged` is decoding: one new token a slot, written into the cache first.
All three go through the one dispatch of `pallas_kernels`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

import pallas_kernels
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.policy import Attend


def _schedule(config: PolicyConfig, kv_end_BS: Int[Array, "B S"], queries: int) -> Any:
    """The block list that all layers of one forward pass walk."""
    return pallas_kernels.packed_schedule(
        kv_end_BS, queries, head_size=config.head_size, dtype=config.dtype
    )


def packed(config: PolicyConfig, kv_end_BT: Int[Array, "B T"]) -> Attend:
    """Attention within packed rows, nothing cached."""
    schedule = _schedule(config, kv_end_BT, kv_end_BT.shape[1])

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        out, _ = pallas_kernels.packed_attention(q, k, v, schedule)
        return out, carry, ()

    return attend


def packed_after_prefix(
    config: PolicyConfig,
    pages: pallas_kernels.Pages,
    prefix_table_BP: Int[Array, "B P"],
    prefix_lens_B: Int[Array, " B"],
    kv_end_BT: Int[Array, "B T"],
) -> Attend:
    """Attention of tails that follow a cached prefix.

    `kv_end_BT` counts within the tails (0 is the row's first tail token); every tail token
    sees the whole prefix. The extra is the tails' own (keys, values), for the cache.
    """
    reach = prefix_table_BP.shape[1] * pages.page_size
    in_prefix_BS = jnp.arange(reach) < prefix_lens_B[:, None]
    tail_end = reach + kv_end_BT.shape[1]
    kv_end_BS = jnp.concatenate(
        [jnp.where(in_prefix_BS, tail_end, 0), reach + kv_end_BT], axis=1
    ).astype(jnp.int32)
    schedule = _schedule(config, kv_end_BS, kv_end_BT.shape[1])

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        # Slots of a page beyond the prefix may hold anything; weight 0 times NaN is NaN.
        kept = [
            jnp.where(in_prefix_BS[..., None, None], x, 0)
            for x in pages.read(layer, prefix_table_BP, config.head_size)
        ]
        k_BS = jnp.concatenate([kept[0].astype(k.dtype), k], axis=1)
        v_BS = jnp.concatenate([kept[1].astype(v.dtype), v], axis=1)
        out, _ = pallas_kernels.packed_attention(q, k_BS, v_BS, schedule)
        return out, carry, (k, v)

    return attend


def packed_after_dense(
    config: PolicyConfig, kv_before: tuple[Array, Array] | None, start: int, length: int
) -> Attend:
    """Causal attention of `length` tokens after the first `start` of a dense [L, B, S, K, H]."""
    kv_end_BS = jnp.full((1, start + length), start + length, jnp.int32)
    schedule = _schedule(config, kv_end_BS, length)

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        if kv_before is not None:
            k_old, v_old = (x[layer, :, :start] for x in kv_before)
            k, v = jnp.concatenate([k_old, k], 1), jnp.concatenate([v_old, v], 1)
        out, _ = pallas_kernels.packed_attention(q, k, v, schedule)
        return out, carry, ()

    return attend


def paged(tables: pallas_kernels.PageTables, kv_lens_B: Int[Array, " B"]) -> Attend:
    """One new token per slot against the paged cache, which is the carry.

    `kv_lens_B` counts the slot's context, this token included; 0 is an idle slot.
    """

    def attend(layer: Array, q: Array, k: Array, v: Array, pages: Any) -> tuple[Array, Any, Any]:
        out_BNH, pages = pallas_kernels.paged_attention(
            q[:, 0], k[:, 0], v[:, 0], pages, layer, tables, kv_lens_B
        )
        return out_BNH[:, None], pages, ()

    return attend
