"""RoPE frequencies: plain, and the published scalings to longer contexts.

A `Scaling` is a frozen value inside `PolicyConfig`; each kind is a type of its own that has
exactly the numbers it needs. `frequencies` turns one into the rotation per position of every
pair of a head, on the host, once per trace; `layers.rope_angles` multiplies by positions.

Formulas and their rounding in float32 follow transformers 5.23 (modeling_rope_utils.py), which
published checkpoints were trained with. The rounding is no pedantry: at position 100 a last
bit of a frequency moved logits of a tiny network by 4e-5, five times all other rounding.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Unscaled:
    """Rotary embedding as first published (Su et al. 2021)."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2023): every position divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        _positive(self, "factor")


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a ramp between.

    A wavelength is long above original_positions / low_frequency tokens, and short below
    original_positions / high_frequency.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int  # tokens of context before the stretching

    def __post_init__(self) -> None:
        _positive(self, "factor", "low_frequency", "high_frequency", "original_positions")
        if self.low_frequency >= self.high_frequency:
            raise ValueError(
                f"llama3 rope scaling has low frequency {self.low_frequency} and high frequency "
                f"{self.high_frequency}; the low one must be below the high one"
            )


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, eq. 15-22): a ramp over pairs, and louder queries and keys.

    `beta_fast` and `beta_slow` are rotations within the original context: pairs that turn
    more often than the first are kept, fewer than the second are divided by `factor`.
    """

    factor: float
    original_positions: int  # tokens of context before the stretching
    attention_factor: float  # multiplies cos and sin; `yarn_attention_factor` is the paper's
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # the ends of the ramp are rounded outwards to whole pairs

    def __post_init__(self) -> None:
        _positive(self, "factor", "original_positions", "attention_factor", "beta_fast")
        _positive(self, "beta_slow")


Scaling = Unscaled | Linear | Llama3 | Yarn
UNSCALED = Unscaled()


def _positive(scaling: object, *names: str) -> None:
    for name in names:
        if not getattr(scaling, name) > 0:
            kind = type(scaling).__name__.lower()
            raise ValueError(f"{kind} rope scaling has {name} {getattr(scaling, name)}; need > 0")


def yarn_attention_factor(factor: float) -> float:
    """Returns the paper's cos/sin factor, sqrt(1/t) = 0.1 ln(factor) + 1 (eq. 22)."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def frequencies(
    head_size: int, theta: float, scaling: Scaling = UNSCALED
) -> tuple[Float[np.ndarray, " half"], float]:
    """Returns (RoPE frequencies, radians per position, float32; the factor on cos and sin)."""
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    # numpy's own float32 power is off by a bit or two; round the exact one.
    per_turn = (theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = 1 / per_turn
    match scaling:
        case Unscaled():
            stretched, loudness = plain, 1.0
        case Linear(factor=factor):
            stretched, loudness = plain / np.float32(factor), 1.0
        case Llama3():
            stretched, loudness = _llama3(plain, scaling), 1.0
        case Yarn():
            stretched, loudness = _yarn(per_turn, theta, scaling), scaling.attention_factor
    return stretched, loudness


def _llama3(plain: np.ndarray, s: Llama3) -> np.ndarray:
    f32 = np.float32
    wavelength = 1 / plain * f32(2 * math.pi)
    turns = 1 / wavelength * f32(s.original_positions)  # within the original context
    keep = (turns - f32(s.low_frequency)) / f32(s.high_frequency - s.low_frequency)
    between = (1 - keep) * plain / f32(s.factor) + keep * plain
    stretched = np.where(keep < 0, plain / f32(s.factor), between)
    return np.where(keep > 1, plain, stretched)


def _yarn(per_turn: np.ndarray, theta: float, s: Yarn) -> np.ndarray:
    half = len(per_turn)

    def pair(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times within the original context."""
        return half * math.log(s.original_positions / (rotations * 2 * math.pi)) / math.log(theta)

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    # 2 half - 1, not half - 1: the published code counts dimensions here and pairs below.
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    slow = 1 / (np.float32(s.factor) * per_turn)
    return slow * (1 - keep) + 1 / per_turn * keep
