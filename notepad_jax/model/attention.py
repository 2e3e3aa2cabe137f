"""Attention in training, prefill and decode, each an `Attend` for `policy.forward`.

`packed` is training: rows of shared prefixes and tails under one `kv_end` mask.
`packed_after_prefix` is prefill: the same mask, but the first keys of each row come out of
the paged cache. `paged` is decoding: one new token a slot, written into the cache first.
All three go through the one dispatch of `pallas_kernels`, and on a mesh each device calls it
on the rows and heads that it holds (`shards.shard_map`): rows of a batch are cut over "fsdp", heads
and the cache's kv heads over "tensor". An engine's mesh has one row of devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

import pallas_kernels
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.policy import Attend
from notepad_jax.parallel import shards
from notepad_jax.parallel.shards import HEADS, PAGES, ROWS, STACKED, WHOLE


def _schedules(
    config: PolicyConfig, kv_end_BS: Int[Array, "B S"], positions_BS: Array | None, queries: int
) -> Any:
    """The block list that all layers of one forward pass walk; one for each size of window."""
    build = functools.partial(
        pallas_kernels.packed_schedule,
        kv_end_BS, queries, head_size=config.head_size, dtype=config.dtype,
    )  # fmt: skip
    if not config.windows:
        return build()
    lists = [build(positions_BS=positions_BS, window=size) for size in _sizes(config)]
    return jax.tree.map(lambda *x: jnp.stack(x), *lists)


def _sizes(config: PolicyConfig) -> list[int]:
    return sorted(set(config.windows))


def _of_layer(config: PolicyConfig, layer: Array, schedules: Any) -> Any:
    """The layer's own of `_schedules`: all layers are one program, so it is looked up there."""
    if not config.windows:
        return schedules
    which = jnp.array([_sizes(config).index(size) for size in config.windows])[layer]
    return jax.tree.map(lambda x: x[which], schedules)


def packed(
    config: PolicyConfig,
    kv_end_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"] | None = None,
) -> Attend:
    """Attention within packed rows, nothing cached; positions are needed if a layer has a window.

    A block list counts through the rows of its shard, so every shard has one of its own, under
    a leading axis that is cut as the rows are.
    """

    def listed(kv_end_BT: Array, positions_BT: Array | None) -> Any:
        lists = _schedules(config, kv_end_BT, positions_BT, kv_end_BT.shape[1])
        return jax.tree.map(lambda x: x[None], lists)

    def local(layer: Array, q: Array, k: Array, v: Array, schedules: Any) -> Array:
        own = _of_layer(config, layer, jax.tree.map(lambda x: x[0], schedules))
        return pallas_kernels.packed_attention(q, k, v, own)[0]

    schedules = shards.shard_map(listed, (ROWS, ROWS), ROWS)(kv_end_BT, positions_BT)
    call = shards.shard_map(local, (WHOLE, HEADS, HEADS, HEADS, ROWS), HEADS)

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        return call(layer, q, k, v, schedules), carry, ()

    return attend


def packed_after_prefix(
    config: PolicyConfig,
    pages: pallas_kernels.Pages,
    prefix_table_BP: Int[Array, "B P"],
    prefix_lens_B: Int[Array, " B"],
    kv_end_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Attend:
    """Prefill attention of packed tails that follow a cached prefix.

    `kv_end_BT` counts within the tails (0 is the row's first tail token); every tail token
    sees the whole prefix. The extra is the tails' own (keys, values), for the cache.
    """
    reach = prefix_table_BP.shape[1] * pages.page_size
    in_prefix_BS = jnp.arange(reach) < prefix_lens_B[:, None]
    tail_end = reach + kv_end_BT.shape[1]
    kv_end_BS = jnp.concatenate(
        [jnp.where(in_prefix_BS, tail_end, 0), reach + kv_end_BT], axis=1
    ).astype(jnp.int32)
    in_prefix = jnp.broadcast_to(jnp.arange(reach), in_prefix_BS.shape)
    positions_BS = jnp.concatenate([in_prefix, positions_BT], axis=1)
    schedules = _schedules(config, kv_end_BS, positions_BS, kv_end_BT.shape[1])

    def local(
        layer: Array, q: Array, k: Array, v: Array, pages: pallas_kernels.Pages,
        table_BP: Array, in_prefix_BS: Array, schedules: Any,
    ) -> Array:  # fmt: skip
        # Slots of a page beyond the prefix may hold anything; weight 0 times NaN is NaN.
        kept = [
            jnp.where(in_prefix_BS[..., None, None], x, 0)
            for x in pages.read(layer, table_BP, config.head_size)
        ]
        k_BS = jnp.concatenate([kept[0].astype(k.dtype), k], axis=1)
        v_BS = jnp.concatenate([kept[1].astype(v.dtype), v], axis=1)
        own = _of_layer(config, layer, schedules)
        return pallas_kernels.packed_attention(q, k_BS, v_BS, own)[0]

    specs = (WHOLE, HEADS, HEADS, HEADS, PAGES, WHOLE, WHOLE, WHOLE)
    call = shards.shard_map(local, specs, HEADS)

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        out = call(layer, q, k, v, pages, prefix_table_BP, in_prefix_BS, schedules)
        return out, carry, (k, v)

    return attend


def packed_after_dense(
    config: PolicyConfig, kv_before: tuple[Array, Array] | None, start: int, length: int
) -> Attend:
    """Causal attention of `length` tokens after the first `start` of a dense [L, B, S, K, H]."""
    kv_end_BS = jnp.full((1, start + length), start + length, jnp.int32)
    schedules = _schedules(config, kv_end_BS, jnp.arange(start + length)[None], length)

    def local(
        layer: Array, q: Array, k: Array, v: Array, before: tuple[Array, ...], schedules: Any
    ) -> Array:
        if before:
            k_old, v_old = (x[layer, :, :start] for x in before)
            k, v = jnp.concatenate([k_old, k], 1), jnp.concatenate([v_old, v], 1)
        own = _of_layer(config, layer, schedules)
        return pallas_kernels.packed_attention(q, k, v, own)[0]

    call = shards.shard_map(local, (WHOLE, HEADS, HEADS, HEADS, STACKED, WHOLE), HEADS)

    def attend(layer: Array, q: Array, k: Array, v: Array, carry: Any) -> tuple[Array, Any, Any]:
        return call(layer, q, k, v, kv_before or (), schedules), carry, ()

    return attend


def paged(
    config: PolicyConfig, tables: pallas_kernels.PageTables, kv_lens_B: Int[Array, " B"]
) -> Attend:
    """Decode attention: one new token per slot against the paged cache, which is the carry.

    `kv_lens_B` counts the slot's context, this token included; 0 is an idle slot.
    """

    def local(
        layer: Array, q: Array, k: Array, v: Array, pages: pallas_kernels.Pages,
        tables: pallas_kernels.PageTables, kv_lens_B: Array,
    ) -> tuple[Array, pallas_kernels.Pages]:  # fmt: skip
        window = jnp.array(config.windows)[layer] if config.windows else None
        out_BNH, pages = pallas_kernels.paged_attention(
            q[:, 0], k[:, 0], v[:, 0], pages, layer, tables, kv_lens_B, window=window
        )
        return out_BNH[:, None], pages

    specs = (WHOLE, HEADS, HEADS, HEADS, PAGES, WHOLE, WHOLE)
    call = shards.shard_map(local, specs, (HEADS, PAGES))

    def attend(layer: Array, q: Array, k: Array, v: Array, pages: Any) -> tuple[Array, Any, Any]:
        out, pages = call(layer, q, k, v, pages, tables, kv_lens_B)
        return out, pages, ()

    return attend


def write_pages(
    pages: pallas_kernels.Pages, k_LBTKH: Array, v_LBTKH: Array, table_BP: Int[Array, "B P"]
) -> pallas_kernels.Pages:
    """`Pages.write_pages`, each device the heads that it holds."""
    specs = (PAGES, STACKED, STACKED, WHOLE)
    return shards.shard_map(pallas_kernels.Pages.write_pages, specs, PAGES)(
        pages, k_LBTKH, v_LBTKH, table_BP
    )


def write_tokens(
    pages: pallas_kernels.Pages, k_L1XKH: Array, v_L1XKH: Array, index_X: Int[Array, " X"]
) -> pallas_kernels.Pages:
    """Writes a row's keys and values, all layers, at flat cache indices, each device its heads."""

    def local(pages: pallas_kernels.Pages, k: Array, v: Array, index_X: Array) -> Any:
        return pages.write_tokens(k[:, 0], v[:, 0], jnp.arange(k.shape[0]), index_X)

    return shards.shard_map(local, (PAGES, STACKED, STACKED, WHOLE), PAGES)(
        pages, k_L1XKH, v_L1XKH, index_X
    )


def copy_page(
    pages: pallas_kernels.Pages,
    source: Int[Array, ""],
    target: Int[Array, ""],
    tokens: Int[Array, ""],
) -> pallas_kernels.Pages:
    """`Pages.copy_page`, each device the heads that it holds."""
    return shards.shard_map(pallas_kernels.Pages.copy_page, (PAGES, WHOLE, WHOLE, WHOLE), PAGES)(
        pages, source, target, tokens
    )
