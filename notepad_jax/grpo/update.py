"""One optimizer step over one `TrainBatch`: rows in, new parameters and metrics out.

The rows are split into micro-batches of equal shape. Each runs the policy, gathers the
hidden states that predict a completion token (the host knows which; nothing of size
[B, T, V] ever exists) and adds its gradient and its `Sums` to a running total on the
device. Only when all are in is the total divided, once, by the global token count, so how
rows are packed or split moves neither loss nor gradient. Gradients add up in float32.

How many completion tokens a micro-batch holds varies; their number is padded up to one of
a few sizes (`bucket`), so that few programs are compiled. Scalars such as the clip range
are ordinary arguments: changing them compiles nothing.

Buffers of the state are donated: after `step` the state that was passed in is gone, and
whoever still needs its parameters (engine, reference policy) must hold a copy. Above:
programs. Beside: `packing` makes the batch, `objective` the sums, `optimizer` the rule.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from notepad_jax.grpo import objective as objectives
from notepad_jax.model import attention, logprobs, lora, moe, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.lora import Lora
from notepad_jax.types import TrainBatch

Leaf = Any  # an array, or whatever jax puts in its place when it maps over a tree
# Summed gradient (float32), sums, and tokens per layer and expert [L, E] (E is 0 if dense).
Total = tuple[Any, objectives.Sums, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that changes from step to step on the device."""

    step: Any  # int32 scalar: optimizer steps taken
    params: Any
    opt_state: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frozen:
    """What stays as it is when only adapters are trained."""

    base: Any  # the policy's parameters
    lora: Lora = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """How one optimizer step is taken; no defaults here, they live in configs/."""

    clip_low: float  # ratios below 1 - clip_low give no gradient when the advantage is negative
    clip_high: float  # ratios above 1 + clip_high give none when it is positive
    dual_clip: float  # ratios above it give none when it is negative
    kl_weight: float  # of k3 to the reference policy, per token; 0 needs no reference
    temperature: float  # the sampler's
    micro_batch_rows: int  # rows whose activations are alive at once
    remat: bool  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}; a greedy sampler gives no gradient, "
                "set it above 0"
            )
        if self.micro_batch_rows < 1:
            raise ValueError(f"micro_batch_rows is {self.micro_batch_rows}; it must be at least 1")
        if not 0 <= self.clip_low < 1 or self.clip_high < 0 or self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"clip range ({self.clip_low}, {self.clip_high}), dual clip {self.dual_clip}: need "
                "0 <= clip_low < 1, clip_high >= 0 and dual_clip > 1 + clip_high"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _MicroBatch:
    """b rows and, flat over them, the X completion tokens that are trained on."""

    tokens: Leaf  # [b, T]
    positions: Leaf  # [b, T]
    kv_end: Leaf  # [b, T]
    before: Leaf  # [X] flat index of the hidden state that predicts the token
    labels: Leaf  # [X]
    mask: Leaf  # [X] 0 on the padding of X
    advantages: Leaf  # [X]
    behaviour: Leaf  # [X]
    reference: Leaf  # [X]
    update_turn: Leaf  # [X]


def start(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step, on its own copy of `params`."""
    params = jax.tree.map(jnp.copy, params)
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def step(
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    settings: UpdateSettings,
    state: TrainState,
    batch: TrainBatch,
    rate_scale: float = 1.0,
    frozen: Frozen | None = None,
) -> tuple[TrainState, dict[str, float]]:
    """Takes one optimizer step on `batch`; `state`'s buffers are donated.

    `rate_scale` multiplies what the optimizer would add to the parameters. Muon and Adam
    move as far for a faint gradient as for a strong one; a caller who knows that a batch
    carries little signal says so here. With `frozen`, the state's parameters are adapters.
    Returns the new state and metrics: means over all completion tokens (`objective.divide`)
    and the global norms of gradient (before clipping), update and new parameters; for a
    mixture of experts also how evenly the trained tokens were spread (`moe.load_metrics`).

    Raises:
      ValueError: the rows cannot be split, or no token or a row's first token is trained.
    """
    total = _sum(config, settings, state.params, batch, frozen)
    state, (sums, norms) = _apply(state, total, rate_scale, optimizer=optimizer)
    sums, norms = jax.device_get((sums, norms))  # the one device-to-host copy of a step
    return state, objectives.divide(sums) | {name: float(norm) for name, norm in norms.items()}


def loss_and_gradient(
    config: PolicyConfig,
    settings: UpdateSettings,
    params: Any,
    batch: TrainBatch,
    frozen: Frozen | None = None,
) -> tuple[Float[Array, ""], Any]:
    """Returns what `step` gives the optimizer: mean loss and its gradient, float32."""
    gradient, sums, _ = _sum(config, settings, params, batch, frozen)
    return sums.loss / sums.tokens, jax.tree.map(lambda g: g / sums.tokens, gradient)


def _sum(
    config: PolicyConfig,
    settings: UpdateSettings,
    params: Any,
    batch: TrainBatch,
    frozen: Frozen | None,
) -> Total:
    """Returns the gradient and the sums over the whole batch, micro-batch by micro-batch."""
    s = settings
    clip = (s.clip_low, s.clip_high, s.dual_clip, s.kl_weight)
    fixed = dict(config=config, temperature=s.temperature, remat=s.remat, frozen=frozen)
    total = _nothing_yet(params, config)
    for micro in micro_batches(batch, s.micro_batch_rows):
        total = _accumulate(total, params, micro, *clip, **fixed)
    return total


def token_logprobs_of(
    config: PolicyConfig, params: Any, batch: TrainBatch, temperature: float, micro_batch_rows: int
) -> np.ndarray:
    """Returns `params`' logprob of every completion token, float32 [B, T], 0 elsewhere.

    With frozen parameters these are the batch's reference logprobs, with the trainer's
    before the first step on the batch its proximal ones.
    """
    micros = micro_batches(batch, micro_batch_rows)
    parts = [_logprobs(params, m, config=config, temperature=temperature)[0] for m in micros]
    parts = jax.device_get(parts)
    out_BT = np.zeros(batch.tokens.shape, np.float32)
    trained_BT = batch.loss_mask > 0
    counts = [int(micro.mask.sum()) for micro in micros]
    out_BT[trained_BT] = np.concatenate([p[:n] for p, n in zip(parts, counts, strict=True)])
    return out_BT


def bucket(count: int) -> int:
    """Rounds up to a power of two, at least 256; above 4,096 to quarters of one.

    Padded positions cost a row of logits each. For a few thousand, compiling the update once
    more costs far more than they do; for many, at most 25% are padding.
    """
    if count <= 4096:
        return max(256, 1 << (count - 1).bit_length())
    unit = 1 << (count - 1).bit_length() - 3
    return -(-count // unit) * unit


def micro_batches(batch: TrainBatch, rows: int) -> list[_MicroBatch]:
    """Splits the batch's rows, in order, into micro-batches of equal shape, on the host."""
    height, width = batch.tokens.shape
    if height % rows:
        raise ValueError(
            f"{height} rows cannot be split into micro-batches of {rows}; "
            f"pack with rows_multiple={rows}"
        )
    trained_BT = batch.loss_mask > 0
    if trained_BT[:, 0].any():
        raise ValueError("the first token of a row is trained, but nothing precedes it")
    places = [np.flatnonzero(trained_BT[at : at + rows]) for at in range(0, height, rows)]
    most = max(len(place_X) for place_X in places)
    if not most:
        raise ValueError("the batch holds not one trained token; there is nothing to learn from")
    size = bucket(most)

    def one(number: int, place_X: np.ndarray) -> _MicroBatch:
        here = slice(number * rows, (number + 1) * rows)

        def take(values_BT: np.ndarray) -> np.ndarray:
            out_X = np.zeros(size, values_BT.dtype)
            out_X[: len(place_X)] = values_BT[here].reshape(-1)[place_X]
            return out_X

        before_X = np.zeros(size, np.int32)
        before_X[: len(place_X)] = place_X - 1
        return _MicroBatch(
            tokens=batch.tokens[here],
            positions=batch.positions[here],
            kv_end=batch.kv_end[here],
            before=before_X,
            labels=take(batch.tokens),
            mask=take(batch.loss_mask),
            advantages=take(batch.advantages),
            behaviour=take(batch.behaviour_logprobs),
            reference=take(batch.reference_logprobs),
            update_turn=take(batch.update_turn),
        )

    return [one(number, place_X) for number, place_X in enumerate(places) if len(place_X)]


# ---------------------------------------------------------------- on the device


@functools.partial(jax.jit, static_argnames="config")
def _nothing_yet(params: Any, config: PolicyConfig) -> Total:
    gradient = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return gradient, objectives.zero(), jnp.zeros((config.layers, _experts(config)))


def _experts(config: PolicyConfig) -> int:
    return 0 if config.experts is None else config.experts.count


def _run(
    params: Any, micro: _MicroBatch, config: PolicyConfig, temperature: float, remat: bool
) -> tuple[Float[Array, " X"], Float[Array, " X"], Float[Array, "L E"]]:
    """Returns (logprob, entropy, load of the experts) of the micro-batch's trained tokens."""
    attend = attention.packed(config, micro.kv_end)
    hidden_BTD, _, _, routes_LBTA = policy.forward_with_routes(
        config, params, micro.tokens, micro.positions, attend, remat=remat
    )
    hidden_XD = hidden_BTD.reshape(-1, config.width)[micro.before]
    logprob_X, _, entropy_X = logprobs.token_logprobs(
        config, params, hidden_XD, micro.labels, temperature
    )
    if config.experts is None:
        return logprob_X, entropy_X, jnp.zeros((config.layers, 0))
    trained_BT = jnp.zeros(micro.tokens.size).at[micro.before].add(micro.mask) > 0
    load_LE = moe.load(routes_LBTA, trained_BT.reshape(micro.tokens.shape), _experts(config))
    return logprob_X, entropy_X, load_LE


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def _logprobs(
    params: Any, micro: _MicroBatch, config: PolicyConfig, temperature: float
) -> tuple[Float[Array, " X"], Float[Array, " X"]]:
    return _run(params, micro, config, temperature, remat=False)[:2]


@functools.partial(
    jax.jit, static_argnames=("config", "temperature", "remat"), donate_argnames=("total",)
)
def _accumulate(
    total: Total,
    params: Any,
    micro: _MicroBatch,
    clip_low: float | Array,
    clip_high: float | Array,
    dual_clip: float | Array,
    kl_weight: float | Array,
    config: PolicyConfig,
    temperature: float,
    remat: bool,
    frozen: Frozen | None,
) -> Total:
    """Adds the micro-batch's summed gradient and sums to `total`."""

    def loss(params: Any) -> tuple[Float[Array, ""], tuple[objectives.Sums, Array]]:
        if frozen is not None:
            params = lora.attach(frozen.lora, frozen.base, params)
        logprob_X, entropy_X, load_LE = _run(params, micro, config, temperature, remat)
        with jax.named_scope("objective"):
            sums = objectives.objective(
                logprob_X,
                micro.behaviour,
                micro.reference,
                micro.advantages,
                micro.mask,
                micro.update_turn,
                entropy_X,
                clip_low,
                clip_high,
                dual_clip,
                kl_weight,
            )
        return sums.loss, (sums, load_LE)

    gradient, (sums, load_LE) = jax.grad(loss, has_aux=True)(params)
    summed, sums_so_far, load_so_far = total
    summed = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), summed, gradient)
    return summed, objectives.merge(sums_so_far, sums), load_so_far + load_LE


@functools.partial(jax.jit, static_argnames=("optimizer",), donate_argnames=("state",))
def _apply(
    state: TrainState,
    total: Total,
    rate_scale: float | Array,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, tuple[objectives.Sums, dict[str, Array]]]:
    """Divides once by the global token count and lets the optimizer move the parameters."""
    summed, sums, load_LE = total
    gradient = jax.tree.map(lambda g, p: (g / sums.tokens).astype(p.dtype), summed, state.params)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        updates = jax.tree.map(lambda u: (u * rate_scale).astype(u.dtype), updates)
        params = optax.apply_updates(state.params, updates)
    norms = {
        "grad_norm": optax.tree.norm(gradient),
        "update_norm": optax.tree.norm(updates),
        "param_norm": optax.tree.norm(params),
    }
    if load_LE.shape[1]:
        norms |= moe.load_metrics(load_LE)
    return TrainState(state.step + 1, params, opt_state), (sums, norms)
