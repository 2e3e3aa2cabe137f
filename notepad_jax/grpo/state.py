"""The train state: float32 master weights of what is trained, and the optimizer state.

A published model's weights are bfloat16, and at the published rate of 1e-6 a step is far less than
half a unit in the last place of nearly all of them: added in bfloat16 it is lost, and the moments
with it. So whatever dtype a policy is stored in and computes in, its trained leaves live here in
float32; the forward pass and the engine see casts of them. What is not trained (`frozen`: the base
of adapters, or nothing) keeps its stored dtype and stands beside the state. Above: `update` moves
the state; setup.learner and training.run save and restore it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from notepad_jax.parallel import mesh, place


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Step, master weights and optimizer state: all that changes from step to step on devices."""

    step: Any  # int32 scalar: optimizer steps taken
    masters: Any  # the trained partition of the policy's tree, float32
    opt_state: Any


def start(trained: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the train state before the first step, where `trained` lies.

    `trained` is taken over: what is float32 already is not copied, and the first update
    donates it. A caller that needs those arrays after that keeps a copy. Leaves that lie on no
    mesh are committed to the first device.
    """
    masters = jax.tree.map(_master, trained)
    cut = place.specs(abstract(masters, optimizer).opt_state)
    with mesh.within(mesh.of(masters)):
        step, opt_state = _fresh(masters, optimizer=optimizer, cut=cut)
    return TrainState(step, masters, opt_state)


def abstract(trained: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns shapes, dtypes and shardings of the train state that `start` makes.

    `trained` holds arrays, or `jax.ShapeDtypeStruct`s with their shardings. Moments are cut as
    their parameters are: no device holds the whole of anything that a parameter's size has.
    """
    masters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding), trained
    )
    there = mesh.of(masters)
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=place.replicated(there))
    made = jax.eval_shape(optimizer.init, masters)
    opt_state = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        made, place.beside(made, masters, there),
    )  # fmt: skip
    return TrainState(step, masters, opt_state)


def _master(leaf: Any) -> jax.Array:
    """A committed float32 array where `leaf` lies: an uncommitted one compiles programs twice."""
    leaf = jnp.asarray(leaf, jnp.float32)
    on_a_mesh = isinstance(leaf.sharding, NamedSharding)
    return place.commit(leaf, leaf.sharding if on_a_mesh else place.first_device())


# What is unused must be kept: without an argument nothing says where the results are committed.
@functools.partial(jax.jit, static_argnames=("optimizer", "cut"), keep_unused=True)
def _fresh(masters: Any, optimizer: optax.GradientTransformation, cut: Any) -> tuple[Any, Any]:
    return jnp.zeros((), jnp.int32), place.held(optimizer.init(masters), cut)
