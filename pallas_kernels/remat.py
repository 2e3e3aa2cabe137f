"""The remat policy of packed attention: a layer keeps its outputs, and their logsumexps.

They are all that attention's backward needs beside queries, keys and values, which projections
make again. Without them a layer's backward would run attention's forward kernel once more. They
cost as much memory as the layer's input, for what grows with the square of a row. Above: the
model's `jax.checkpoint`; below: every implementation of packed attention names its residuals.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

_NAME = "packed_attention"

# For `jax.checkpoint(layer, policy=SAVE_ATTENTION)`.
SAVE_ATTENTION = jax.checkpoint_policies.save_only_these_names(_NAME)


def kept(out: Array, lse: Array) -> tuple[Array, Array]:
    """Names what remat is to keep; the results must be both residuals and outputs."""
    return checkpoint_name(out, _NAME), checkpoint_name(lse, _NAME)
