"""What training changes: float32 masters of the parameters that are trained, and moments.

A published model's weights are bfloat16, and at the published rate of 1e-6 a step is far less
than half a unit in the last place of nearly all of them: added in bfloat16 it is lost, and the
moments with it. So whatever dtype a policy is stored in and computes in, its trained leaves
live here in float32; the forward pass and the engine see casts of them. What is not trained
(`frozen`: the base of adapters, or nothing) keeps its stored dtype and stands beside the state.
Above: `update` moves the state; programs save and restore it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that changes from step to step on the device."""

    step: Any  # int32 scalar: optimizer steps taken
    masters: Any  # the trained partition of the policy's tree, float32
    opt_state: Any


def start(trained: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step.

    `trained` is taken over: what is float32 already is not copied, and the first update
    donates it. Whoever needs those arrays after that holds a copy.
    """
    masters = jax.tree.map(_master, trained)
    step, opt_state = _fresh(masters, optimizer=optimizer)
    return TrainState(step, masters, opt_state)


def _master(leaf: Any) -> jax.Array:
    """A committed float32 array where `leaf` lies: an uncommitted one compiles programs twice."""
    leaf = jnp.asarray(leaf, jnp.float32)
    return jax.device_put(leaf, leaf.sharding)


# What is unused must be kept: without an argument nothing says where the results are committed.
@functools.partial(jax.jit, static_argnames="optimizer", keep_unused=True)
def _fresh(masters: Any, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    return jnp.zeros((), jnp.int32), optimizer.init(masters)
