"""Which optimizer, as a value: `OptimizerSettings` in, an `optax.GradientTransformation` out.

Two kinds. `adamw` is what large policies are fine-tuned with. `muon` orthogonalises the
update of every weight matrix and leaves embeddings, norms and biases to Adam; for the tiny
policies of the quick start it needs several times fewer steps. Our leaves are stacked over
layers and attention projections keep their heads apart ([L, D, N, H]), so `MATRICES` tells
muon which axes of a leaf are the matrix; the layer axis is a batch of matrices.

`update` applies it; `programs.warmup` uses the same for supervised training. Equal settings
give the same object, so that a jitted step that is static in it compiles once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """A hashable choice of optimizer; learning rates are per optimizer step."""

    kind: str  # "adamw" or "muon"
    learning_rate: float  # of all leaves (adamw), of the weight matrices (muon)
    adam_learning_rate: float  # of the leaves muon leaves to Adam; unused by adamw
    warmup_steps: int  # linear from 0 to the rate, then constant; 0 starts at the rate
    decay_steps: int = 0  # the step at which a linear decay ends; 0 never decays
    decay_from: int = 0  # the step at which it begins
    decay_to: float = 0.02  # share of the rate that is left at its end
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0  # global norm; 0 switches clipping off

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "muon"):
            raise ValueError(f"no optimizer is called {self.kind!r}; known: adamw, muon")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps is {self.warmup_steps}; it must be 0 or more")
        if self.decay_steps and not self.warmup_steps <= self.decay_from < self.decay_steps:
            raise ValueError(
                f"the decay goes from step {self.decay_from} to {self.decay_steps}, the warm-up to "
                f"{self.warmup_steps}; need warmup_steps <= decay_from < decay_steps"
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


def matrix_axes(params: Any) -> Any:
    """Returns `params`' tree with a MuonDimensionNumbers for matrices and None elsewhere."""

    def axes(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        names = [getattr(key, "key", None) for key in path]
        return MATRICES.get(names[-1]) if names[0] == "layers" else None

    return jax.tree.map_with_path(axes, params)


def schedule(settings: OptimizerSettings, peak: float) -> optax.Schedule:
    """Linear warm-up to `peak`, constant, then (if asked for) linear decay.

    Step 0 of a warm-up of n already moves: it uses peak / n.
    """
    constant = optax.constant_schedule(peak)
    parts, ends = [constant], []
    if settings.warmup_steps:
        first = peak / settings.warmup_steps
        parts = [optax.linear_schedule(first, peak, settings.warmup_steps - 1), constant]
        ends = [settings.warmup_steps - 1]
    if settings.decay_steps:
        steps = settings.decay_steps - settings.decay_from
        parts.append(optax.linear_schedule(peak, peak * settings.decay_to, steps))
        ends.append(settings.decay_from)
    return optax.join_schedules(parts, ends)


@functools.cache
def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """Returns the optimizer; weight decay spares norms and biases, gradients are clipped first."""
    rate = schedule(settings, settings.learning_rate)
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
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            adam_b1=settings.b1,
            adam_b2=settings.b2,
            adam_learning_rate=schedule(settings, settings.adam_learning_rate),
            muon_weight_dimension_numbers=matrix_axes,
        )
    if not settings.max_grad_norm:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), optimizer)


def _decayed(params: Any) -> Any:
    """True for matrices and embeddings, False for norms and biases."""

    def decayed(path: Any, leaf: Any) -> bool:
        name = str(getattr(path[-1], "key", ""))
        return not name.endswith(("norm", "bias"))

    return jax.tree.map_with_path(decayed, params)
