"""Block lists: which blocks of a packed attention contain anything to compute.

The mask "query i sees key j iff j <= i < kv_end[j]" is almost empty for packed rows with a
shared prefix. `packed_schedule` turns it into a list of (query block, key block) once per
batch, on device; every layer, forward and backward, walks the same list. Without a window a
block is listed exactly if one of its queries sees one of its keys.

The rows of a batch lie behind each other: block numbers count through all rows, and so do
the positions that the mask compares (row b's keys start at b * S, S a multiple of the key
block). kv_end never reaches into the next row, so one formula serves the whole batch.

A window is counted in positions of the text, which packing leaves apart from places in the row:
a tail's first token follows the prefix's last one, wherever in the row it lies. So it is a
second condition, "position of query i < k_reach[j]", and a block of other rows' or groups' keys
may be listed for it in which no query sees a key.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Int

# What a kernel does at an entry, as bits of `flags`.
FIRST = 1  # of its run: start a new accumulator
LAST = 2  # of its run: write the accumulator out
PARTIAL = 4  # some query of the block does not see some key: apply the mask

_EVERYWHERE = np.int32(2**31 - 1)  # a key's reach without a window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Where the runs of a list begin, and the list ordered by key block, each run's queries too."""

    of_queries: Any  # int32 [query blocks + 1]: each query block's first entry; the last: `count`
    of_keys: Any  # int32 [key blocks + 1]: the same in the order by key block
    q_block: Any  # int32 [E]: in the order by key block; the queries of a run ascend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """The block list of a batch of packed rows; the first `count` entries are real, the rest zero.

    Entries of one query block follow each other: a run, in which the keys ascend.
    """

    q_block: Any  # int32 [E]
    k_block: Any  # int32 [E]
    flags: Any  # int32 [E]: FIRST | LAST | PARTIAL
    count: Any  # int32 []
    q_start: Any  # int32 [query blocks]: the position of each query block's first query
    kv_end: Any  # int32 [B * S, S padded]: kv_end in positions of the batch, 0 for padding
    q_position: Any  # int32 [query blocks * q_size]: in the text; None: no layer has a window
    k_reach: Any  # int32 [B * S, S padded]: the first position that no longer sees the key
    runs: Runs
    q_size: int = dataclasses.field(metadata=dict(static=True))  # queries per block
    k_size: int = dataclasses.field(metadata=dict(static=True))  # keys per block

    @property
    def room(self) -> int:
        """How many entries the list has room for: every causal block."""
        return self.flags.shape[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 5))
def packed_schedule(
    kv_end_BS: Int[Array, "B S"],
    queries: int,
    q_size: int,
    k_size: int,
    positions_BS: Int[Array, "B S"] | None = None,
    window: int = 0,
) -> Schedule:
    """Lists the blocks that `kv_end_BS` makes visible to the last `queries` tokens of each row.

    Args:
      kv_end_BS: key j of a row is seen by the queries j <= i < kv_end[j]. Every query must
        see itself (kv_end[i] > i); keys before the queries may have any end, 0 hides them.
      queries: T; the queries are the last T of the S positions.
      q_size, k_size: tokens per block.
      positions_BS: each token's place in its text; only read with a window.
      window: a query sees keys less than so many positions back; 0: however far. Lists with
        positions have the same arrays whatever the window is, so they can be stacked.
    Raises:
      ValueError: there are no queries, or more than keys; or a window without positions.
    """
    B, S = kv_end_BS.shape
    if not 0 < queries <= S:
        raise ValueError(f"{queries} queries cannot be the end of rows of {S} tokens")
    if window and positions_BS is None:
        raise ValueError(f"a window of {window} tokens is counted in positions: give them")
    bq, bk = q_size, k_size
    nq, nk = pl.cdiv(queries, bq), pl.cdiv(S, bk)
    kv_end = jnp.pad(kv_end_BS, ((0, 0), (0, nk * bk - S))).reshape(B, nk, bk)
    q_first = S - queries + jnp.arange(nq)[:, None] * bq
    q_last = jnp.minimum(q_first + bq, S) - 1
    k_first = jnp.arange(nk) * bk
    k_last = k_first + bk - 1
    causal = k_first <= q_last
    needed = causal & (q_first < kv_end.max(axis=2)[:, None, :])  # [B, nq, nk]
    full = (k_last <= q_first) & (q_last < kv_end.min(axis=2)[:, None, :])
    position = reach = None
    if positions_BS is not None:
        # Past the row's end: positions that no block's range minds, keys that nothing sees.
        reach_BS = positions_BS + window if window else jnp.full((B, S), _EVERYWHERE)
        reach = jnp.pad(reach_BS, ((0, 0), (0, nk * bk - S))).reshape(B, nk, bk)
        last_T = positions_BS[:, S - queries :]
        position = jnp.pad(last_T, ((0, 0), (0, nq * bq - queries)), "edge").reshape(B, nq, bq)
        needed &= position.min(axis=2)[:, :, None] < reach.max(axis=2)[:, None, :]
        full &= position.max(axis=2)[:, :, None] < reach.min(axis=2)[:, None, :]
        position, reach = (x.reshape(-1).astype(jnp.int32) for x in (position, reach))
    row_start = (jnp.arange(B) * nk * bk)[:, None]
    in_row = jnp.arange(nk * bk) < S
    entries = _entries(needed, full, B * _causal_blocks(S, queries, bq, bk))
    return Schedule(
        *entries,
        q_start=(row_start + q_first[:, 0]).reshape(-1).astype(jnp.int32),
        kv_end=jnp.where(in_row, row_start + kv_end.reshape(B, -1), 0)
        .reshape(-1)
        .astype(jnp.int32),
        q_position=position,
        k_reach=reach,
        runs=_runs(*entries[:2], entries[3], B * nq, B * nk),
        q_size=bq,
        k_size=bk,
    )


def _causal_blocks(S: int, T: int, bq: int, bk: int) -> int:
    """Blocks of one row that causality leaves, whatever kv_end says."""
    q_last = np.minimum(S - T + np.arange(1, pl.cdiv(T, bq) + 1) * bq, S) - 1
    return int((q_last // bk + 1).sum())


def _entries(
    needed_BQK: Bool[Array, "B Q K"], full_BQK: Bool[Array, "B Q K"], room: int
) -> tuple[Array, Array, Array, Array]:
    """Returns q_block, k_block and flags of each entry, and their count."""
    _, nq, nk = needed_BQK.shape
    entry = jnp.nonzero(needed_BQK.reshape(-1), size=room, fill_value=0)[0]
    count = needed_BQK.sum()
    real = jnp.arange(room) < count
    row, run = entry // (nq * nk), entry // nk
    # A run's neighbours: `run` differs from the entry before, or there is none.
    first = real & (run != jnp.concatenate([jnp.full(1, -1, run.dtype), run[:-1]]))
    last = real & jnp.concatenate([(run[1:] != run[:-1]) | ~real[1:], jnp.ones(1, bool)])
    partial = real & ~full_BQK.reshape(-1)[entry]
    flags = FIRST * first + LAST * last + PARTIAL * partial
    q_block, k_block = jnp.where(real, run, 0), jnp.where(real, row * nk + entry % nk, 0)
    q_block, k_block, flags, count = (x.astype(jnp.int32) for x in (q_block, k_block, flags, count))
    return q_block, k_block, flags, count


def _runs(q_block: Array, k_block: Array, count: Array, queries: int, keys: int) -> Runs:
    real = jnp.arange(q_block.shape[0]) < count

    def begins(block: Array, blocks: int) -> Array:
        # Entries that are not real lie behind all blocks.
        sorted_to = jnp.where(real, block, blocks)
        return jnp.searchsorted(sorted_to, jnp.arange(blocks + 1)).astype(jnp.int32)

    by_key = jnp.argsort(jnp.where(real, k_block, keys), stable=True)
    return Runs(begins(q_block, queries), begins(k_block[by_key], keys), q_block[by_key])
