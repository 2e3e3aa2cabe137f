"""Block lists: which blocks of a packed attention contain anything to compute.

The mask "query i sees key j iff j <= i < kv_end[j]" is almost empty for packed rows with a
shared prefix. `packed_schedule` turns it into a list of (row, query block, key block) once
per batch, on device; every layer, forward and backward, walks the same list. A block is
listed if any of its keys can be seen by any of its queries.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The first `count` entries of the lists are real; they are sorted by row, then query."""

    row: Any  # int32 [E]
    q_block: Any  # int32 [E]
    k_block: Any  # int32 [E]
    count: Any  # int32 []
    q_size: int = dataclasses.field(metadata=dict(static=True))  # queries per block
    k_size: int = dataclasses.field(metadata=dict(static=True))  # keys per block


def block_size(length: int, largest: int = 128) -> int:
    """Returns the block size for an axis: 128, or the whole axis rounded up to 8 if shorter."""
    return min(largest, -(-length // 8) * 8)


def packed_schedule(kv_end_BS: Int[Array, "B S"], queries: int) -> Schedule:
    """Lists the blocks that `kv_end_BS` makes visible to the last `queries` tokens of each row.

    The list has room for every block there is, so it can never overflow.
    """
    B, S = kv_end_BS.shape
    if not 0 < queries <= S:
        raise ValueError(f"{queries} queries cannot be the end of rows of {S} tokens")
    bq, bk = block_size(queries), block_size(S)
    nq, nk = -(-queries // bq), -(-S // bk)
    ends = jnp.pad(kv_end_BS, ((0, 0), (0, nk * bk - S))).reshape(B, nk, bk).max(axis=2)
    first_query = S - queries + jnp.arange(nq) * bq
    last_query = jnp.minimum(first_query + bq, S) - 1
    first_key = jnp.arange(nk) * bk
    needed = (first_key[None, None, :] <= last_query[None, :, None]) & (
        first_query[None, :, None] < ends[:, None, :]
    )
    entries = jnp.nonzero(needed.reshape(-1), size=B * nq * nk, fill_value=0)[0]
    row, rest = entries // (nq * nk), entries % (nq * nk)
    as_int = lambda x: x.astype(jnp.int32)  # noqa: E731
    return Schedule(
        as_int(row), as_int(rest // nk), as_int(rest % nk), as_int(needed.sum()), bq, bk
    )
