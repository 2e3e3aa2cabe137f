"""The layout of the paged key-value cache, and the tables that map sequences onto it.

A page holds Z consecutive tokens of one layer: `[2, K, Z, H]`, keys then values, so that
every head is a plain tile. The pages of all layers lie in one array; layer l's page p is row
`l * pages_per_layer + p`. One array can then be threaded through a scan over layers and
updated in place. A sequence's context is read in two parts: pages it shares with others
(always full), then its private pages. Sharing is nothing but the same page number in
several tables.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The cache: `data` is [layers * pages_per_layer, 2, K, Z, C].

    C is the head size H, or more (see `dispatch.cache_head_size`); the rest is zeros.
    """

    data: Any  # float [LP, 2, K, Z, C]
    pages_per_layer: int = dataclasses.field(metadata=dict(static=True))

    @classmethod
    def zeros(
        cls, layers: int, pages: int, kv_heads: int, page_size: int, head_size: int, dtype: str
    ) -> Pages:
        shape = (layers * pages, 2, kv_heads, page_size, head_size)
        return cls(jnp.zeros(shape, dtype), pages)

    @property
    def page_size(self) -> int:
        return self.data.shape[3]

    @property
    def layers(self) -> int:
        return self.data.shape[0] // self.pages_per_layer

    def read_heads(
        self, layer: Array, table_BP: Int[Array, "B P"], head_size: int
    ) -> tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]]:
        """Returns the keys and values of each row's pages, S = P * Z, heads before tokens."""
        _, _, K, Z, C = self.data.shape
        B, P = table_BP.shape
        rows = (layer * self.pages_per_layer + table_BP)[:, None, :]  # [B, 1, P]
        k, v = (self.data[rows, kind, jnp.arange(K)[:, None]] for kind in (0, 1))
        k, v = k.reshape(B, K, P * Z, C), v.reshape(B, K, P * Z, C)
        return k[..., :head_size], v[..., :head_size]

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
        kv = self._entries(kv.transpose(0, 1, 2, 4, 5, 3, 6))
        rows = self._rows(table_BP[None], jnp.arange(L)[:, None, None])
        return dataclasses.replace(self, data=self.data.at[rows].set(kv, mode="drop"))

    def write_tokens(
        self,
        k_LXKH: Float[Array, "L X K H"],
        v_LXKH: Float[Array, "L X K H"],
        layers_L: Int[Array, " L"],
        index_X: Int[Array, " X"],
    ) -> Pages:
        """Writes single tokens of the given layers at flat indices `page * Z + offset`."""
        Z, K = self.page_size, self.data.shape[2]
        rows = self._rows(index_X[None] // Z, layers_L[:, None])
        kv = self._entries(jnp.stack([k_LXKH, v_LXKH], 2))  # [L, X, 2, K, C]
        # All indices but the last are given: with a window over kinds and heads XLA would turn
        # the whole cache round for it, and back.
        kinds, heads, at = jnp.arange(2)[:, None], jnp.arange(K), (index_X % Z)[:, None, None]
        data = self.data.at[rows[..., None, None], kinds, heads, at]
        return dataclasses.replace(self, data=data.set(kv, mode="drop"))

    def copy_page(self, source: Int[Array, ""], target: Int[Array, ""]) -> Pages:
        """Copies a page in every layer (one in which a shared prefix ends)."""
        first_L = jnp.arange(self.layers) * self.pages_per_layer
        return dataclasses.replace(
            self, data=self.data.at[first_L + target].set(self.data[first_L + source])
        )

    def _entries(self, kv: Array) -> Array:
        """Keys and values as they lie in the cache: its dtype, its width."""
        beyond = self.data.shape[-1] - kv.shape[-1]
        return jnp.pad(kv, ((0, 0),) * (kv.ndim - 1) + ((0, beyond),)).astype(self.data.dtype)

    def _rows(self, page: Array, layer: Array) -> Array:
        """Row numbers in `data`; a page past the layer's end goes past the array's end."""
        inside = page < self.pages_per_layer
        return jnp.where(inside, layer * self.pages_per_layer + page, self.data.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageTables:
    """Where B decode slots find their context.

    Slots that share a prefix form a row r of M places, so that the prefix's keys are read
    once for all of them. A slot that shares nothing sits in a row of length 0.
    """

    shared_RP: Any  # int32 [R, P]: page numbers of each row's shared prefix
    shared_lens_R: Any  # int32 [R]: its length in tokens, a multiple of Z
    members_RM: Any  # int32 [R, M]: the slot at each place of a row; any slot at unused places
    place_B: Any  # int32 [B]: each slot's place, r * M + m
    private_BQ: Any  # int32 [B, Q]: page numbers of each slot's private tokens

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
