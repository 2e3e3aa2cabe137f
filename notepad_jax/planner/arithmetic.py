"""An analytical cost model of programs, memory and time: no compiler, no libtpu.

The fields are those that `cost_analysis` reads out of compiled programs, so a plan made of these
is a plan like any other, made in milliseconds: enough to search among hundreds (`fastest`) and to
plan on a machine without libtpu. FLOPs and what devices send follow from shapes; temporaries and
traffic are counted in arrays of an activation's size whose numbers were fitted to what libtpu
0.0.42 made of Qwen2.5-7B on v5p (the constants below; how far off they are on others stands in
docs/performance.md). Above: `plan` and `advice`; below: `lowering`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from notepad_jax.model import flops, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.planner import cost_analysis, lowering
from notepad_jax.planner.chips import Chip
from notepad_jax.planner.cost_analysis import Facts, ProgramCost
from notepad_jax.planner.lowering import PlannedRun, Program


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Counts of a layer's activation arrays, by the width of each part of a layer."""

    width: float  # the residual stream: whole on every device of a row
    heads: float  # of queries
    keys: float  # and values
    wide: float  # of the feed-forward, or of a token's experts

    def bytes(self, policy: PolicyConfig, tensor: int) -> float:
        """Bytes of a token on a device that shares a layer with `tensor - 1` others."""
        cut = self.heads * policy.heads * policy.head_size + self.wide * flops.wide(policy)
        cut += self.keys * policy.kv_heads * policy.head_size
        return jnp.dtype(policy.dtype).itemsize * (self.width * policy.width + cut / tensor)


# Moved by what is not bound to a matrix product, in a layer.
MOVED_FORWARD = Arrays(width=8, heads=8, keys=0, wide=0)
MOVED_LEARNING = Arrays(width=36, heads=20, keys=0, wide=4)
# Alive at once in one layer; and kept of every layer for the way back.
ALIVE_FORWARD = Arrays(width=2, heads=2, keys=0, wide=1)
ALIVE_LEARNING = Arrays(width=10, heads=10, keys=0, wide=6.5)
ALIVE_NORMED = Arrays(width=0, heads=12, keys=12, wide=0)  # more, where queries and keys are
ALIVE_ROUTED = 16  # more, of a token's width for each of its experts
KEPT_WITH_REMAT = Arrays(width=1, heads=1, keys=0, wide=0)
KEPT_WITHOUT = Arrays(width=8, heads=6, keys=4, wide=6)

LOGITS_LEARNING = 5  # of the unembedding's: logits are made again for either way back
ADAM = 73  # bytes moved for a trained parameter by the optimizer, and
ADAM_ALIVE = 6  # alive beside its arguments
SAMPLING = 36  # passes over float32 logits; most find the nucleus
SAMPLED_AT_ONCE = 6  # arrays of logits alive in a launch


def estimated(made: PlannedRun, chip: Chip, wanted: Sequence[Program]) -> tuple[Facts, ...]:
    """Returns what `cost_analysis.compiled` would of the `wanted` programs, by arithmetic."""
    return tuple(cost_analysis.placed(one, read(one, made, chip), made, chip) for one in wanted)


def read(program: Program, made: PlannedRun, chip: Chip) -> ProgramCost:
    """Returns the figures of one launch on a device; attention's kernels are not in it."""
    if program.phase == lowering.ROLLOUT:
        return _reading(program, made, chip)
    one = {"accumulate": _accumulate, "apply": _apply, "logprobs": _logprobs}[program.name]
    return one(program, made, chip)


def kept(policy: PolicyConfig, tensor: int, remat: bool) -> float:
    """Bytes of a token that an update's layers keep, and that one layer's way back needs."""
    layers = (KEPT_WITH_REMAT if remat else KEPT_WITHOUT).bytes(policy, tensor)
    alive = ALIVE_LEARNING.bytes(policy, tensor)
    if policy.qk_norm:
        alive += ALIVE_NORMED.bytes(policy, tensor)
    if policy.experts:
        size = jnp.dtype(policy.dtype).itemsize * policy.width
        alive += ALIVE_ROUTED * policy.experts.per_token * size
    return policy.layers * layers + alive


# ---------------------------------------------------------------- the trainer's


def _accumulate(program: Program, made: PlannedRun, chip: Chip) -> ProgramCost:
    p, t, work = made.policy, made.trainer.shape["tensor"], program.work
    size = jnp.dtype(p.dtype).itemsize
    made_again = flops.layer(p, t) - flops.down(p, t) if made.remat else 0
    computed = 2 * work.tokens * p.layers * (flops.LEARNING * flops.layer(p, t) + made_again)
    computed += 2 * LOGITS_LEARNING * work.logits * p.width * p.vocab_size / t
    stacked, vocabulary = _stacked(p) * size / t, p.vocab_size * p.width * size / t
    moved = work.tokens * p.layers * MOVED_LEARNING.bytes(p, t) + 2 * stacked
    passes = 2 if made.remat else 1  # in which the weights come together
    wider = 4 / size
    # A layer as it came together, and its gradient in float32; so the vocabulary's.
    beside = work.tokens * kept(p, t, made.remat) + (1 + wider) * (stacked / p.layers + vocabulary)
    beside += 0 if made.remat else stacked  # as they came together, for the way back
    ring = _ring(made.trainer.shape["fsdp"])
    sums = (5 if made.remat else 4) * p.layers * work.tokens * p.width * size * 2 * _ring(t)
    sent = {
        "all-gather": ring * (passes * stacked + vocabulary),
        "reduce-scatter": ring * wider * stacked,
        "all-reduce": 2 * ring * wider * vocabulary + sums,
    }
    return _read(beside, computed, 0, moved, sent, chip)


def _logprobs(program: Program, made: PlannedRun, chip: Chip) -> ProgramCost:
    p, t, work = made.policy, made.trainer.shape["tensor"], program.work
    size = jnp.dtype(p.dtype).itemsize
    computed = flops.products(p, work.tokens, work.logits, t)
    stacked, vocabulary = _stacked(p) * size / t, p.vocab_size * p.width * size / t
    moved = work.tokens * p.layers * MOVED_FORWARD.bytes(p, t)
    beside = work.tokens * ALIVE_FORWARD.bytes(p, t) + 2 * stacked / p.layers + vocabulary
    ring = _ring(made.trainer.shape["fsdp"])
    sums = 2 * p.layers * work.tokens * p.width * size * 2 * _ring(t)
    sent = {"all-gather": ring * (stacked + vocabulary), "all-reduce": sums}
    return _read(beside, computed, 0, moved, sent, chip)


def _apply(program: Program, made: PlannedRun, chip: Chip) -> ProgramCost:
    trained = made.residents[lowering.UPDATE]["masters"] / 4
    return _read(ADAM_ALIVE * trained, 0, 0, ADAM * trained, {}, chip)


# ---------------------------------------------------------------- an engine's


def _reading(program: Program, made: PlannedRun, chip: Chip) -> ProgramCost:
    p, t, work = made.policy, made.engine.shape["tensor"], program.work
    size = jnp.dtype(p.dtype).itemsize
    computed = flops.products(p, work.tokens, work.logits, t)
    weights = work.steps * (_stacked(p) + (p.vocab_size * p.width if work.logits else 0)) * size / t
    moved = work.tokens * p.layers * MOVED_FORWARD.bytes(p, t)
    moved += SAMPLING * 4 * work.logits * p.vocab_size / t
    alive = work.tokens // work.steps
    keys = 2 * size * p.layers * p.kv_heads * p.head_size / t
    beside = alive * (ALIVE_FORWARD.bytes(p, t) + keys)
    beside += SAMPLED_AT_ONCE * 4 * work.logits / work.steps * p.vocab_size / t
    sums = 2 * p.layers * work.tokens * p.width * size * 2 * _ring(t)
    return _read(beside, computed, weights, moved, {"all-reduce": sums}, chip)


# ---------------------------------------------------------------- sizes


def _read(
    beside: float, computed: float, weights: float, moved: float, sent: dict[str, float], chip: Chip
) -> ProgramCost:
    """`weights` are bytes that matrix products read, `moved` those of everything else."""
    compute, memory = cost_analysis.seconds(computed, weights, chip)
    return ProgramCost(
        arguments=0, beside=int(beside), refused="", failed="", whole=False, flops=computed,
        moved=weights + moved, sent={kind: size for kind, size in sent.items() if size},
        compute_seconds=compute, memory_seconds=memory + cost_analysis.seconds(0, moved, chip)[1],
    )  # fmt: skip


def _stacked(p: PolicyConfig) -> int:
    """Weights of all layers, those of every expert among them."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(parameters.abstract_params(p)["layers"]))


def _ring(devices: int) -> float:
    """The share of an array that one of them sends to bring it together."""
    return (devices - 1) / devices
