"""Which optimizer, as a value: `OptimizerSettings` in, an `optax.GradientTransformation` out.

Two kinds. `adamw` is what large policies are fine-tuned with. `muon` orthogonalises the
update of every weight matrix and leaves embeddings, norms and biases to Adam; for the tiny
policies of the quick start it needs several times fewer steps. Our leaves are stacked over
layers and attention projections keep their heads apart ([L, D, N, H]), so `MATRICES` tells
muon which axes of a leaf are the matrix; the layer axis is a batch of matrices. `ADAPTERS`
does the same for low-rank adapters, whose two factors are matrices as well.

`update` applies it; `programs.warmup` uses the same for supervised training. The optimizer steps
at its whole rates: what they rise and fall by is a factor of its caller's (`schedule`), who knows
what is counted. Training counts rollouts, however many optimizer steps each takes. Equal settings
give the same object, so that a jitted step that is static in it compiles once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from notepad_jax.model import lora

KINDS = ("adamw", "muon")
DECAYS = ("none", "linear", "cosine")

# On the device these numbers are float32 and steps are int32: what is 0, 1 or infinite there
# is refused as such here. A beta that rounds to 1 divides by 0 in the first bias correction.
_TINY, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
_RANGES = {  # lowest, highest, and both in words
    "learning_rate": (_TINY, _MOST, "above 0 and finite"),
    "adam_learning_rate": (0, _MOST, "at least 0 and finite"),
    "decay_to": (0, 1, "a share of the rate, 0 to 1"),
    "momentum": (0, _BELOW_ONE, "at least 0 and, in float32, below 1"),
    "b1": (0, _BELOW_ONE, "at least 0 and, in float32, below 1"),
    "b2": (0, _BELOW_ONE, "at least 0 and, in float32, below 1"),
    "eps": (_TINY, _MOST, "above 0 in float32, and finite"),
    "weight_decay": (0, _MOST, "at least 0 and finite"),
    "max_grad_norm": (0, _MOST, "at least 0 and finite; 0 switches clipping off"),
}
_STEPS = ("warmup_steps", "decay_from", "decay_steps")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """A hashable choice of optimizer; learning rates are per optimizer step.

    Warm-up and decay count steps of whoever calls: rollouts in training, lessons in the warm-up
    of a starter.

    Raises:
      ValueError: a number is out of its range or not finite, a name is not known, or the
        steps of warm-up and decay are out of order.
    """

    kind: str  # "adamw" or "muon"
    learning_rate: float  # of all leaves (adamw), of the weight matrices (muon)
    adam_learning_rate: float  # of the leaves muon leaves to Adam; unused by adamw
    warmup_steps: int  # linear from 0 to the rate, then constant; 0 starts at the rate
    decay: str = "none"  # the shape of the fall: "linear", "cosine" (half a wave), or none
    decay_from: int = 0  # the step at which it begins; unused with "none", as the next two
    decay_steps: int = 0  # the step at which it ends; constant from there
    decay_to: float = 0.02  # share of the rate that is left at its end
    momentum: float = 0.95  # of muon's matrices (Nesterov's); unused by adamw
    b1: float = 0.9  # Adam's first moment
    b2: float = 0.999  # Adam's second moment
    eps: float = 1e-8  # Adam's, and the least norm that muon divides a matrix by
    weight_decay: float = 0.01  # times the rate; muon decays the matrices only
    max_grad_norm: float = 1.0  # global norm; 0 switches clipping off

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("decay", DECAYS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use {', '.join(known)}")
        for name, (lowest, highest, words) in _RANGES.items():
            if not lowest <= getattr(self, name) <= highest:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {words}")
        for name in _STEPS:
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < 2**31:
                raise ValueError(
                    f"{name} is {value}; it must be a whole number of steps, 0 to {2**31 - 1}"
                )
        if self.decay != "none" and not self.warmup_steps <= self.decay_from < self.decay_steps:
            raise ValueError(
                f"the decay goes from step {self.decay_from} to {self.decay_steps}, the warm-up to "
                f"{self.warmup_steps}; need warmup_steps <= decay_from < decay_steps, or "
                "decay='none'"
            )


# Reduction and output axes of the matrices, by leaf name under "layers"; axis 0 is the layer.
MATRICES: dict[str, MuonDimensionNumbers] = {
    "q": MuonDimensionNumbers((1,), (2, 3)),
    "k": MuonDimensionNumbers((1,), (2, 3)),
    "v": MuonDimensionNumbers((1,), (2, 3)),
    "o": MuonDimensionNumbers((1, 2), (3,)),
    "gate": MuonDimensionNumbers((1,), (2,)),
    "up": MuonDimensionNumbers((1,), (2,)),
    "down": MuonDimensionNumbers((1,), (2,)),
    "expert_gate": MuonDimensionNumbers((2,), (3,)),  # axis 1 is the expert
    "expert_up": MuonDimensionNumbers((2,), (3,)),
    "expert_down": MuonDimensionNumbers((2,), (3,)),
}


def _factors(name: str) -> dict[str, MuonDimensionNumbers]:
    """Returns the axes of a matrix's adapters: A [L, inputs, r] and B [L, r, outputs].

    Orthogonalising each factor keeps the rate's meaning. On inputs of size 1 a fresh A gives r
    numbers of size 1; a step of B has singular values rate * sqrt(outputs / r) and so moves the
    outputs by the rate (times alpha / r), as a step of a whole square matrix does. A itself
    begins with singular values near 1 and moves by the rate, too. While B is zero A has no
    gradient and stays.
    """
    inputs, outputs = MATRICES[name]
    return {
        f"{name}_lora_in": MuonDimensionNumbers(inputs, (1 + len(inputs),)),
        f"{name}_lora_out": MuonDimensionNumbers((1,), tuple(range(2, 2 + len(outputs)))),
    }


ADAPTERS = {leaf: axes for name in lora.TARGETS for leaf, axes in _factors(name).items()}


def matrix_axes(params: Any) -> Any:
    """Returns `params`' tree with a MuonDimensionNumbers for matrices and None elsewhere."""
    known = MATRICES | ADAPTERS

    def axes(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        names = [getattr(key, "key", None) for key in path]
        return known.get(names[-1]) if names[0] == "layers" else None

    return jax.tree.map_with_path(axes, params)


def schedule(settings: OptimizerSettings) -> optax.Schedule:
    """The share of the rates at a step: a linear warm-up to 1, constant, then the decay, if any.

    Step 0 of a warm-up of n already moves: it uses 1 / n.
    """
    constant = optax.constant_schedule(1.0)
    parts, ends = [constant], []
    if settings.warmup_steps:
        first = 1.0 / settings.warmup_steps
        parts = [optax.linear_schedule(first, 1.0, settings.warmup_steps - 1), constant]
        ends = [settings.warmup_steps - 1]
    if settings.decay != "none":
        steps = settings.decay_steps - settings.decay_from
        parts.append(
            optax.cosine_decay_schedule(1.0, steps, alpha=settings.decay_to)
            if settings.decay == "cosine"
            else optax.linear_schedule(1.0, settings.decay_to, steps)
        )
        ends.append(settings.decay_from)
    return optax.join_schedules(parts, ends)


@functools.cache
def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Returns the optimizer at its whole rates; gradients are clipped first.

    Weight decay spares norms and biases. The state has the same structure with and without
    clipping, and counts steps, as that of older checkpoints does.
    """
    rate = optax.constant_schedule(settings.learning_rate)
    if settings.kind == "adamw":
        optimizer = optax.adamw(
            rate,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=_decayed,
        )
    else:
        optimizer = optax.contrib.muon(
            rate,
            beta=settings.momentum,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            adam_b1=settings.b1,
            adam_b2=settings.b2,
            adam_learning_rate=optax.constant_schedule(settings.adam_learning_rate),
            muon_weight_dimension_numbers=matrix_axes,
        )
    norm = settings.max_grad_norm
    return optax.chain(optax.clip_by_global_norm(norm) if norm else optax.identity(), optimizer)


def _decayed(params: Any) -> Any:
    """True for matrices and embeddings, False for norms and biases."""

    def decayed(path: Any, leaf: Any) -> bool:
        name = str(getattr(path[-1], "key", ""))
        return not name.endswith(("norm", "bias"))

    return jax.tree.map_with_path(decayed, params)
