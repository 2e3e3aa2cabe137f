"""The optimizer (AdamW or Muon) and its schedule: settings in, an optax transformation out.

Two kinds. `adamw` is what large policies are fine-tuned with. `muon` orthogonalises the
update of every weight matrix and leaves embeddings, norms and biases to Adam; for the tiny
policies of the quick start it needs several times fewer steps. Our leaves are stacked over
layers and attention projections keep their heads apart ([L, D, N, H]), so `MATRICES` tells
muon which axes of a leaf are the matrix; the layer axis is a batch of matrices. `ADAPTERS`
does the same for low-rank adapters, whose two factors are matrices as well.

`update` applies it; `programs.warmup` uses the same for supervised training. The optimizer steps
at its whole rates: what they rise and fall by is a factor of its caller's (`schedule`), which knows
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

from notepad_jax import keys
from notepad_jax.keys import INT32, LARGEST, TINY, Range, also, key, words
from notepad_jax.model import lora

KINDS = ("adamw", "muon")
DECAYS = ("none", "linear", "cosine")

# On the device these numbers are float32 and steps are int32: what is 0, 1 or infinite there
# is refused as such here. A beta that rounds to 1 divides by 0 in the first bias correction.
BETA = Range(
    0, float(np.nextafter(np.float32(1), np.float32(0))), "at least 0 and, in float32, below 1"
)
NOT_NEGATIVE = Range(0, LARGEST, "at least 0 and finite")
STEPS = Range(0, INT32, f"a whole number of steps, 0 to {INT32}")


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """A hashable choice of optimizer; the config's section `optimizer`. Rates are per step.

    Warm-up and decay count the caller's steps: rollouts in training, lessons in the warm-up of a
    starter.

    Raises:
      ValueError: a number is out of its range or not finite, a name is not known, or the
        steps of warm-up and decay are out of order.
    """

    kind: str = key(
        "`muon`, `adamw`",
        "`muon` orthogonalises the step of every weight matrix, and of either factor of an "
        "adapter, and leaves embedding, norms, biases and routers to Adam (with Nesterov's "
        "momentum). `adamw`: one rule for all",
        words(*KINDS),
    )
    learning_rate: float = key(
        "above 0, per step",
        "of the weight matrices (`muon`), of everything (`adamw`). Muon's step does not depend on "
        "the gradient's size, and the rate bounds how far a layer's outputs move; the rates of "
        "published fine-tuning (1e-6 to 1e-5) are Adam's",
        Range(TINY, LARGEST, "above 0 and finite"),
    )
    adam_learning_rate: float = key(
        "0 or more, per step",
        "of what `muon` leaves to Adam; 0 keeps that as it is. Unused by `adamw`, and where "
        "adapters are trained, which are all muon's",
        NOT_NEGATIVE,
    )
    warmup_steps: int = key(
        "rollouts; of a starter, steps",
        "linear rise to the rate; 0 starts at it. All updates of a rollout have one rate",
        STEPS,
    )
    decay: str = key(
        "`none`, `linear`, `cosine`",
        "how both rates fall after the warm-up. `cosine` stays high for longer and lands softly. "
        "`none` keeps them, and does not look at the three keys below",
        words(*DECAYS),
        default="none",
    )
    decay_from: int = key(
        "rollouts; of a starter, steps",
        "where the fall begins (not before the warm-up ends) and where it ends; the rates stay "
        "there. They do not follow `steps`: a run that is made longer goes on at the last rate",
        STEPS,
        default=0,
    )
    decay_steps: int = also(STEPS, default=0)
    decay_to: float = key(
        "share, 0 to 1",
        "of the rates that is left at the end. At 0 later steps change nothing",
        Range(0, 1, "a share of the rate, 0 to 1"),
        default=0.02,
    )
    momentum: float = key(
        "[0, 1)",
        "of muon: share of the past in the averaged gradient, about 1 / (1 - momentum) steps. "
        "Unused by `adamw`",
        BETA,
        default=0.95,
    )
    b1: float = key(
        "[0, 1)",
        "the same for Adam's averages of the gradient and of its square. A smaller `b2` (0.95) "
        "forgets a spike sooner and makes steps noisier",
        BETA,
        default=0.9,
    )
    b2: float = also(BETA, default=0.999)
    eps: float = key(
        "above 0",
        "added to the root of Adam's second average: elements whose gradient is well below it "
        "hardly move. Also the least norm that muon divides a matrix by",
        Range(TINY, LARGEST, "above 0 in float32, and finite"),
        default=1e-8,
    )
    weight_decay: float = key(
        "0 or more; per step, times the rate",
        "with `adamw`, norms and biases are spared; with `muon`, only what it orthogonalises "
        "decays",
        NOT_NEGATIVE,
        default=0.01,
    )
    max_grad_norm: float = key(
        "norm",
        "the gradient's global norm is clipped to it, before moments are taken; 0 switches that "
        "off. Muon and Adam forget a gradient's size again, so this acts on outliers among steps, "
        "and not on the length of every step",
        Range(0, LARGEST, "at least 0 and finite; 0 switches clipping off"),
        default=1.0,
    )

    def __post_init__(self) -> None:
        keys.check(self)
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
    """The learning-rate schedule, as a factor: linear warm-up to 1, constant, then any decay.

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
