"""The layout of the paged KV cache, and the page tables that map sequences onto it.

A page holds Z consecutive tokens of one layer: `[2, K, Z, H]`, keys then values, so that
every head is a plain tile. The pages of all layers lie in one array; layer l's page p is row
`l * pages_per_layer + p`. One array can then be threaded through a scan over layers and
updated in place. A sequence's context is read in two parts: pages it shares with others
(always full), then its private pages. Sharing is nothing but the same page number in
several tables.

An int8 cache holds each key and each value as integers of -127..127 times one float32 number, its
scale. The scales lie in a second array, page for page and head for head beside the first, so
that both are cut over a mesh along the same axis.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

CACHE_DTYPES = ("float32", "bfloat16", "int8")


def quantised(dtype: DTypeLike) -> bool:
    """Whether a cache of this dtype has scales."""
    return jnp.dtype(dtype) == jnp.int8


def quantise(x: Float[Array, "*any H"]) -> tuple[Int[Array, "*any H"], Float[Array, "*any"]]:
    """Quantises vectors to int8 with a float32 scale each, their largest number / 127."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127
    rounded = jnp.round(x / jnp.where(scale == 0, 1, scale)[..., None])
    return rounded.astype(jnp.int8), scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The paged KV cache: `data` is [layers * pages_per_layer, 2, K, Z, C].

    C is the head size H, or more (see `dispatch.cache_head_size`); the rest is zeros.
    """

    data: Any  # float32, bfloat16 or int8 [LP, 2, K, Z, C]
    pages_per_layer: int = dataclasses.field(metadata=dict(static=True))
    scales: Any = None  # float32 [LP, 2, K, 1, Z] of an int8 cache; other caches have none

    @classmethod
    def zeros(
        cls, layers: int, pages: int, kv_heads: int, page_size: int, head_size: int, dtype: str
    ) -> Pages:
        before = layers * pages, 2, kv_heads
        data = jnp.zeros((*before, page_size, head_size), dtype)
        scales = jnp.zeros((*before, 1, page_size), jnp.float32) if quantised(dtype) else None
        return cls(data, pages, scales)

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def layers(self) -> int:
        return self.data.shape[0] // self.pages_per_layer

    @property
    def arrays(self) -> tuple[Array, ...]:
        """`data`, and `scales` if there are any."""
        return (self.data,) if self.scales is None else (self.data, self.scales)

    def of(self, *arrays: Array) -> Pages:
        """Returns a cache like this one with other `arrays`."""
        data, scales = (*arrays, None)[:2]
        return dataclasses.replace(self, data=data, scales=scales)

    def read_heads(
        self, layer: Array, table_BP: Int[Array, "B P"], head_size: int
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """Returns the keys and values of each row's pages, S = P * Z, heads before tokens.

        In the cache's dtype, of an int8 cache in float32.
        """
        return self.read_rows(layer * self.pages_per_layer + table_BP, head_size)

    def read_rows(
        self, rows_BP: Int[Array, "B P"], head_size: int
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """`read_heads` of rows of `data`, whichever layer's they are."""
        _, _, K, Z, C = self.data.shape
        B, P = rows_BP.shape
        rows = rows_BP[:, None, :]  # [B, 1, P]

        def one(kind: int) -> Array:
            at = rows, kind, jnp.arange(K)[:, None]
            x = self.data[at].reshape(B, K, P * Z, C)[..., :head_size]
            return x if self.scales is None else x * self.scales[at].reshape(B, K, P * Z, 1)

        return one(0), one(1)

    def read(
        self, layer: Array, table_BP: Int[Array, "B P"], head_size: int
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Returns the keys and values of each row's pages, S = P * Z, tokens before heads."""
        k, v = self.read_heads(layer, table_BP, head_size)
        return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)

    def write_pages(
        self,
        k_LBTKH: Float[Array, "L B T K H"],
        v_LBTKH: Float[Array, "L B T K H"],
        table_BP: Int[Array, "B P"],
    ) -> Pages:
        """Writes whole pages of every layer, T = P * Z; a page number past the end is skipped."""
        L, B, T, K, H = k_LBTKH.shape
        Z, P = self.page_size, table_BP.shape[1]
        kv = jnp.stack([k_LBTKH, v_LBTKH], 3).reshape(L, B, P, Z, 2, K, H)
        data, *scales = self.entries(kv.transpose(0, 1, 2, 4, 5, 3, 6))
        rows = self._rows(table_BP[None], jnp.arange(L)[:, None, None])
        new = data, *(scale[..., None, :] for scale in scales)
        return self.of(
            *(old.at[rows].set(x, mode="drop") for old, x in zip(self.arrays, new, strict=True))
        )

    def write_tokens(
        self,
        k_LXKH: Float[Array, "L X K H"],
        v_LXKH: Float[Array, "L X K H"],
        layers_L: Int[Array, " L"],
        index_X: Int[Array, " X"],
    ) -> Pages:
        """Writes single tokens of the given layers at flat indices `page * Z + offset`."""
        Z, K = self.page_size, self.data.shape[2]
        rows = self._rows(index_X[None] // Z, layers_L[:, None])[..., None, None]
        # All indices but the last are given: with a window over kinds and heads XLA would turn
        # the whole cache round for it, and back.
        kinds, heads, at = jnp.arange(2)[:, None], jnp.arange(K), (index_X % Z)[:, None, None]
        data, *scales = self.entries(jnp.stack([k_LXKH, v_LXKH], 2))  # [L, X, 2, K, C]
        places = self.data.at[rows, kinds, heads, at].set(data, mode="drop")
        return self.of(
            places,
            *(self.scales.at[rows, kinds, heads, 0, at].set(x, mode="drop") for x in scales),
        )

    def copy_page(
        self, source: Int[Array, ""], target: Int[Array, ""], tokens: Int[Array, ""]
    ) -> Pages:
        """Copies the first `tokens` of a page in every layer; what lies behind them stays."""
        first_L = jnp.arange(self.layers) * self.pages_per_layer
        copied_Z = jnp.arange(self.page_size) < tokens

        def one(x: Array, copied: Array) -> Array:
            old, new = x[first_L + target], x[first_L + source]
            return x.at[first_L + target].set(jnp.where(copied, new, old))

        # [..., Z, C], and scales are [..., 1, Z].
        return self.of(*map(one, self.arrays, (copied_Z[:, None], copied_Z)))

    def entries(self, kv: Float[Array, "*any H"]) -> tuple[Array, ...]:
        """Keys or values as they lie in `arrays`: (values [..., C],) or (values, scales [...])."""
        beyond = self.data.shape[-1] - kv.shape[-1]
        kv = jnp.pad(kv, ((0, 0),) * (kv.ndim - 1) + ((0, beyond),))
        return (kv.astype(self.data.dtype),) if self.scales is None else quantise(kv)

    def _rows(self, page: Array, layer: Array) -> Array:
        """Row numbers in `data`; a page past the layer's end goes past the array's end."""
        inside = page < self.pages_per_layer
        return jnp.where(inside, layer * self.pages_per_layer + page, self.data.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTables:
    """The page tables of B decode slots: where each finds its context.

    Slots that share a prefix form a row r of M places, so that the prefix's keys are read
    once for all of them. A slot that shares nothing sits in a row of length 0.
    """

    shared_RP: Any  # int32 [R, P]: page numbers of each row's shared prefix
    shared_lens_R: Any  # int32 [R]: its length in tokens, a multiple of Z
    members_RM: Any  # int32 [R, M]: the slot at each place of a row; any slot at unused places
    place_B: Any  # int32 [B]: each slot's place, r * M + m
    private_BQ: Any  # int32 [B, Q]: page numbers of each slot's private tokens

    @classmethod
    def apart(cls, private_BQ: Int[Array, "B Q"]) -> PageTables:
        """Page tables of slots that share nothing."""
        B = private_BQ.shape[0]
        order_B = jnp.arange(B, dtype=jnp.int32)
        nothing_R, nothing_RP = jnp.zeros(B, jnp.int32), jnp.zeros((B, 0), jnp.int32)
        return cls(nothing_RP, nothing_R, order_B[:, None], order_B, private_BQ)

    @property
    def shared_lens_B(self) -> Int[Array, " B"]:
        """Tokens of each slot's shared prefix."""
        return self.shared_lens_R[self.place_B // self.members_RM.shape[1]]

    def whole_BP(self, page_size: int) -> Int[Array, "B P"]:
        """The page numbers of each slot's whole context, shared pages first."""
        row_B = self.place_B // self.members_RM.shape[1]
        shared_BP = self.shared_RP[row_B]
        P, Q = shared_BP.shape[1], self.private_BQ.shape[1]
        first_B1 = (self.shared_lens_B // page_size)[:, None]
        at = jnp.arange(P + Q)[None, :]
        private = jnp.take_along_axis(self.private_BQ, jnp.clip(at - first_B1, 0, Q - 1), axis=1)
        if P == 0:
            return private
        shared = jnp.take_along_axis(shared_BP, jnp.minimum(at, P - 1), axis=1)
        return jnp.where(at < first_B1, shared, private).astype(jnp.int32)
