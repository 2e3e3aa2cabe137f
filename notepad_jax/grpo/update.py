"""The update: optimizer steps over `TrainBatch`es; rows in, new master weights and metrics out.

The rows are split into micro-batches of equal shape (`micro_batches`). Each runs the policy
(`forward`) and adds its gradient and its `Sums` to a running total on the device. Only when all
are in is the total divided, once, by the batch's denominator, so how rows are packed or split
moves neither loss nor gradient. Gradients add up in float32, and float32 masters move
(`state`); the forward pass sees casts of them.

A policy's tree comes in two partitions: the state's masters, which are trained, and `frozen`,
which is not (empty unless adapters are trained). A step whose loss, gradient or new parameters
are not finite leaves the state as it was, and says so in its metrics. Scalars such as the clip
range are ordinary arguments: changing them compiles nothing.

Buffers of the state are donated: after `learn` the state that was passed in is gone. Above:
programs. Beside: `batch` makes the batch, `objective` the sums, `optimizer` the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from notepad_jax.grpo import forward, micro_batches, ratios
from notepad_jax.grpo import objective as objectives
from notepad_jax.grpo.micro_batches import MicroBatch
from notepad_jax.grpo.ratios import Limits
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.grpo.state import TrainState, abstract
from notepad_jax.model import moe, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh, place, shards
from notepad_jax.parallel.shards import ROWS
from notepad_jax.types import TrainBatch

# Summed gradient (float32), sums, and tokens per layer and expert [L, E] (E is 0 if dense).
Total = tuple[Any, objectives.Sums, Array]

# Totals that grow beside each other on one CPU, which runs at the same time what does not wait for
# each other. Others do one thing after the other, and on several devices programs must not mix.
BESIDE = 2


def learn(
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    state: TrainState,
    frozen: Any,
    batches: Sequence[TrainBatch],
    rate_scale: float = 1.0,
    moved: bool = True,
) -> tuple[TrainState, dict[str, float]]:
    """Takes one optimizer step on each batch, in order; `state`'s buffers are donated.

    `rate_scale` multiplies what the optimizer would add to the parameters: the share of the
    rates that a schedule leaves, and less where a caller knows that a batch carries little
    signal, since Muon and Adam move as far for a faint gradient as for a strong one. A ratio of
    whole trajectories costs a forward pass before each step, but before the first if the policy
    has not `moved` from the batches' proximal logprobs: then it is 1. Interpolated proximal
    logprobs take the steps as one policy version's, in equal parts. Returns the new state and
    metrics (`_metrics`).

    Raises:
      ValueError: the rows cannot be split, or no token or a row's first token is trained.
    """
    taken, cut = [], place.specs(state)
    for number, batch in enumerate(batches):
        total = _sum(
            config, settings, state.masters, frozen, batch,
            since=number / len(batches), moved=moved or number > 0,
        )  # fmt: skip
        with mesh.within(mesh.of(state.masters)):
            state, report = _apply(
                state, total, batch.denominator, rate_scale, optimizer=optimizer, cut=cut
            )
        taken.append(report)
    taken = jax.device_get(taken)  # the one device-to-host copy of all these steps
    return state, _metrics(taken, [batch.denominator for batch in batches])


def loss_and_gradient(
    config: PolicyConfig,
    settings: UpdateSettings,
    masters: Any,
    frozen: Any,
    batch: TrainBatch,
    since: float = 0.0,
) -> tuple[Float[Array, ""], Any]:
    """Returns what a step of `learn` gives the optimizer: mean loss and its gradient, float32.

    `since` is what has been learnt since the proximal policy, in versions (`ratios.interpolated`).
    """
    gradient, sums, _ = _sum(config, settings, masters, frozen, batch, since)
    d = batch.denominator
    return sums.loss / d, jax.tree.map(lambda g: g / d, gradient)


def _sum(
    config: PolicyConfig, settings: UpdateSettings, masters: Any, frozen: Any, batch: TrainBatch,
    since: float, moved: bool = True,
) -> Total:  # fmt: skip
    """Returns the gradient and the sums over the whole batch, micro-batch by micro-batch."""
    ratio_BT = None
    if settings.ratio in ratios.TRAJECTORYWISE and moved:
        ratio_BT = _over_trajectories(config, settings, masters, frozen, batch)
    there, cut = mesh.of(masters), place.specs(masters)
    parts = there.shape["fsdp"]
    fixed = _fixed(config, settings)
    with mesh.within(there):
        every = micro_batches.split(batch, settings.micro_batch_rows, parts, ratio_BT)
        beside = BESIDE if [d.platform for d in there.devices.flat] == ["cpu"] else 1
        totals = [_nothing_yet(masters, config, cut) for _ in every[:beside]]
        numbers = _numbers(settings, since)
        for number, micro in enumerate(every):
            micro, own = place.commit(micro, place.rows(there)), number % beside
            totals[own] = _accumulate(
                totals[own], masters, frozen, micro, *numbers, **fixed, cut=cut
            )
        return functools.reduce(_added, totals)


def _over_trajectories(
    config: PolicyConfig, settings: UpdateSettings, masters: Any, frozen: Any, batch: TrainBatch
) -> np.ndarray:
    """Mean log ratio [B, T] of each trained token's trajectory, of the policy as it is now.

    On the host, over all rows at once: a trajectory's turns lie in several micro-batches.
    """
    now_BT = forward.told(
        config, parameters.join(frozen, masters), batch, settings.temperature,
        settings.micro_batch_rows,
    ).logprobs  # fmt: skip
    on_BT = batch.weights > 0
    far_N = (now_BT - batch.proximal_logprobs)[on_BT]
    _, which_N, count_I = np.unique(
        batch.trajectory[on_BT], return_inverse=True, return_counts=True
    )
    out_BT = np.zeros_like(batch.weights)
    out_BT[on_BT] = (np.bincount(which_N, far_N) / count_I)[which_N]
    return out_BT


def _numbers(
    settings: UpdateSettings, since: float
) -> tuple[Limits, float, float | None, float | None]:
    """What may change and compile nothing; None is what is off, and no part of the program."""
    s = settings
    since = since if s.proximal == "interpolated" else None
    return s.limits, s.kl_weight, s.entropy_weight or None, since


def _fixed(config: PolicyConfig, settings: UpdateSettings) -> dict[str, Any]:
    s = settings
    return dict(config=config, temperature=s.temperature, remat=s.remat, ratio=s.ratio, kl=s.kl)


def lowered(
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    trained: Any,
    frozen: Any,
    row_length: int,
    most: int,
) -> dict[str, jax.stages.Lowered]:
    """Returns the lowered programs of an update for abstract arrays, not compiled yet.

    `trained` and `frozen` are trees of `jax.ShapeDtypeStruct`s with their shardings. Rows are
    `row_length` tokens; the fullest device's rows hold `most` trained ones. `accumulate` and
    `apply` make up `learn`, `logprobs` is `forward.told`.
    """
    state = abstract(trained, optimizer)
    there, cut = mesh.of(state.masters), place.specs(state.masters)
    micro = micro_batches.shapes(
        settings.micro_batch_rows, row_length, there.shape["fsdp"], most
    )  # fmt: skip
    micro = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.rows(there)), micro
    )
    with mesh.within(there):
        total = jax.eval_shape(lambda: _nothing_yet(state.masters, config, cut))
        gradient, sums, load = total
        gradient = jax.tree.map(
            lambda x, like: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=like.sharding),
            gradient, state.masters,
        )  # fmt: skip
        total = gradient, *_everywhere((sums, load), there)
        fixed = _fixed(config, settings)
        number = jax.ShapeDtypeStruct((), jnp.float32)
        limits = _everywhere(jax.tree.map(lambda _: number, _numbers(settings, 0.0)), there)
        return {
            "accumulate": _accumulate.lower(
                total, state.masters, frozen, micro, *limits, **fixed, cut=cut
            ),
            "apply": _apply.lower(
                state, total, *_everywhere((number, number), there),
                optimizer=optimizer, cut=place.specs(state),
            ),
            "logprobs": forward.of_micro_batch.lower(
                parameters.join(frozen, state.masters), micro,
                config=config, temperature=settings.temperature,
            ),
        }  # fmt: skip


def _everywhere(tree: Any, there: jax.sharding.Mesh) -> Any:
    where = place.replicated(there)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


def _metrics(
    taken: Sequence[tuple[objectives.Sums, dict[str, Any]]], denominators: Sequence[float]
) -> dict[str, float]:
    """Merges what optimizer steps reported, already on the host, into one line of metrics.

    Means over completion tokens (`objective.divide`) and, as means over the steps, the global
    norms of gradient (before clipping), update and new parameters, the share of the masters'
    elements that an update changed and the norm that arrived over the norm that was asked
    for. For a mixture of experts also how evenly the trained tokens were spread
    (`moe.load_metrics`). Steps that were skipped are counted and count nowhere else.
    """
    good = [i for i, (_, norms) in enumerate(taken) if norms["applied"]]
    counted = {"update/optimizer_steps": len(taken), "update/skipped": len(taken) - len(good)}
    if not good:
        return counted
    sums = functools.reduce(objectives.merge, (taken[i][0] for i in good))
    means = {
        name: float(np.mean([taken[i][1][name] for i in good]))
        for name in taken[good[0]][1]
        if name != "applied"
    }
    return objectives.divide(sums, sum(denominators[i] for i in good)) | means | counted


# ---------------------------------------------------------------- on the device


# The masters lend no more than their shapes; kept, they also say where the total lives.
@functools.partial(jax.jit, static_argnames=("config", "cut"), keep_unused=True)
def _nothing_yet(masters: Any, config: PolicyConfig, cut: Any) -> Total:
    gradient = place.held(jax.tree.map(jnp.zeros_like, masters), cut)
    return gradient, objectives.zero(), jnp.zeros((config.layers, forward.experts(config)))


@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "remat", "ratio", "kl", "cut"),
    donate_argnames=("total",),
)  # fmt: skip
def _accumulate(
    total: Total,
    masters: Any,
    frozen: Any,
    micro: MicroBatch,
    limits: Limits,
    kl_weight: float | Array,
    entropy_weight: float | Array | None,
    since: float | Array | None,
    config: PolicyConfig,
    temperature: float,
    remat: bool,
    ratio: str,
    kl: str,
    cut: Any,
) -> Total:
    """Adds the micro-batch's summed gradient and sums to `total`."""

    def loss(masters: Any) -> tuple[Float[Array, ""], tuple[objectives.Sums, Array]]:
        params = parameters.join(frozen, masters)
        logprob_X, entropy_X, load_LE = forward.run(params, micro, config, temperature, remat)
        with jax.named_scope("objective"):
            m, proximal_X = micro, micro.proximal
            if since is not None:
                proximal_X = ratios.interpolated(m.behaviour, logprob_X, m.age, since)
            sums = objectives.objective(
                logprob_X, m.behaviour, proximal_X, m.reference, m.advantages, m.weights,
                m.update_turn, entropy_X, limits, kl_weight, entropy_weight, ratio, kl,
                lambda x_X: _over_turns(x_X, m.turn), m.trajectory_ratio,
            )  # fmt: skip
        return sums.loss, (sums, load_LE)

    gradient, (sums, load_LE) = jax.grad(loss, has_aux=True)(masters)
    summed, sums_so_far, load_so_far = total
    summed = place.held(jax.tree.map(jnp.add, summed, gradient), cut)
    return summed, objectives.merge(sums_so_far, sums), load_so_far + load_LE


@functools.partial(jax.jit, donate_argnums=0)
def _added(total: Total, other: Total) -> Total:
    gradient = jax.tree.map(jnp.add, total[0], other[0])
    return gradient, objectives.merge(total[1], other[1]), total[2] + other[2]


def _over_turns(x_X: Float[Array, " X"], turn_X: Array) -> Float[Array, " X"]:
    """The mean over the tokens of each one's turn, which lies on one device whole."""

    def local(x_X: Array, turn_X: Array) -> Array:
        nothing_X = jnp.zeros_like(x_X)
        count_X = nothing_X.at[turn_X].add(1.0)
        return (nothing_X.at[turn_X].add(x_X) / jnp.maximum(count_X, 1.0))[turn_X]

    return shards.shard_map(local, (ROWS, ROWS), ROWS)(x_X, turn_X)


@functools.partial(jax.jit, static_argnames=("optimizer", "cut"), donate_argnames="state")
def _apply(
    state: TrainState,
    total: Total,
    denominator: float | Array,
    rate_scale: float | Array,
    optimizer: optax.GradientTransformation,
    cut: Any,
) -> tuple[TrainState, tuple[objectives.Sums, dict[str, Array]]]:
    """Divides once and lets the optimizer move the masters, unless something is not finite."""
    summed, sums, load_LE = total
    gradient = jax.tree.map(lambda g: g / denominator, summed)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.masters)
        updates = jax.tree.map(lambda u: u * rate_scale, updates)
        masters = optax.apply_updates(state.masters, updates)
    moved = jax.tree.map(jnp.subtract, masters, state.masters)
    grad_norm, update_norm = optax.tree.norm(gradient), optax.tree.norm(updates)
    param_norm = optax.tree.norm(masters)
    applied = jnp.isfinite(sums.loss) & jnp.isfinite(grad_norm) & jnp.isfinite(param_norm)
    norms = {
        "applied": applied,
        "grad_norm": grad_norm,
        "update_norm": update_norm,
        "param_norm": param_norm,
        "update/changed_share": _share_changed(moved),
        "update/applied_over_asked": optax.tree.norm(moved) / jnp.maximum(update_norm, 1e-30),
    }
    if load_LE.shape[1]:
        norms |= moe.load_metrics(load_LE)
    new = TrainState(state.step + 1, masters, opt_state)
    state = jax.tree.map(lambda new, old: jnp.where(applied, new, old), new, state)
    return place.held(state, cut), (sums, norms)


def _share_changed(moved: Any) -> Array:
    leaves = jax.tree.leaves(moved)
    changed = sum(jnp.count_nonzero(leaf).astype(jnp.float32) for leaf in leaves)
    return changed / float(sum(leaf.size for leaf in leaves))  # beyond int32 at 2.1 billion
