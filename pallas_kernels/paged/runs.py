"""The work list of the decode kernel: runs of pages, and the queries that meet each.

Plain jnp, a few hundred integers a call. Above: `call` makes it; `decode` prefetches it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array

from pallas_kernels.pages import PageTables


class Runs(NamedTuple):
    """The work list, prefetched scalars: for each row its prefix, then its M members' own pages."""

    starts: Array  # int32 [J + 1]: where each run's pages begin in the flat list
    table_at: Array  # int32 [J]: where they begin in `table`
    tokens: Array  # int32 [J]
    who: Array  # int32 [J]: the row of a prefix; the token (query) of a member
    member: Array  # int32 [J]: its place in the row; -1 for a prefix
    table: Array  # int32 [R * P + B * Q]: rows of the cache


def list_runs(
    first_row: Any, tables: PageTables, kv_lens_B: Array, active_B: Array, token_B: Array, Z: int
) -> Runs:
    """The runs of the active slots; `token_B` says which query is each slot's."""
    (R, P), M = tables.shared_RP.shape, tables.members_RM.shape[1]
    Q = tables.private_BQ.shape[1]
    place_RM = jnp.arange(R * M, dtype=jnp.int32).reshape(R, M)
    # An unused place names any slot, whose own place is another.
    here_RM = (tables.place_B[tables.members_RM] == place_RM) & active_B[tables.members_RM]
    own_B = jnp.maximum(kv_lens_B - tables.shared_lens_B, 0)
    own_RM = jnp.where(here_RM, own_B[tables.members_RM], 0)
    shared_R = jnp.where(here_RM.any(axis=1), tables.shared_lens_R, 0)

    def beside(shared_R: Any, own_RM: Any) -> Array:
        first_R1 = jnp.broadcast_to(jnp.asarray(shared_R, jnp.int32), (R,))[:, None]
        return jnp.concatenate([first_R1, own_RM.astype(jnp.int32)], axis=1).reshape(-1)

    tokens = beside(shared_R, own_RM)
    ends = jnp.cumsum(pl.cdiv(tokens, Z), dtype=jnp.int32)
    return Runs(
        jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        beside(jnp.arange(R) * P, R * P + tables.members_RM * Q),
        tokens,
        beside(jnp.arange(R), token_B[tables.members_RM]),
        beside(-1, place_RM % M),
        first_row + jnp.concatenate([tables.shared_RP.reshape(-1), tables.private_BQ.reshape(-1)]),
    )
