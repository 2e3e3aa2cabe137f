"""The dataclasses of a kernel's benchmark: the model's sizes, a program to compile, its parts.

`ours` and `public` make programs of this form; `rows` reads their figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes that a kernel sees; letters as everywhere."""

    N: int  # query heads
    K: int  # kv heads
    H: int  # head size
    D: int  # model width
    V: int  # vocabulary
    experts: int  # 1: a dense model
    top: int  # experts that a token goes to
    width: int  # of one expert, or of the dense feed-forward layer
    dtype: str = "bfloat16"

    def array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def bytes(self, *shape: int) -> int:
        return math.prod(shape) * jnp.dtype(self.dtype).itemsize


MODELS = {
    "qwen2.5-7b": Model(N=28, K=4, H=128, D=3584, V=152064, experts=1, top=1, width=18944),
    "qwen3-30b-a3b": Model(N=32, K=4, H=128, D=2048, V=151936, experts=128, top=8, width=768),
}
TOKENS = 8192  # one causal sequence for packed attention; tokens of a step for the products
PAGE = 128  # tokens of a cache page
SEQUENCES = 64  # sequences in a ragged call, slots of a decode step
MEMBERS = 8  # slots that share a prefix


@dataclasses.dataclass(frozen=True)
class Part:
    """One kernel of a program: where to find it and what one step of it does."""

    family: str  # kernels of one family compute the same and are compared
    pattern: str  # a regular expression for its name in the dump
    flops: int  # useful FLOPs of a step
    hbm_bytes: int  # what a step moves from or to HBM in the steady state
    variant: str = ""  # what sets it apart from others of the program and family
    # Hot blocks of which a step executes one, from the dearest to the cheapest; those without a
    # name are rare and are not reported. No names at all: a step executes all of them.
    alternatives: tuple[str, ...] = ()
    # A step is one turn of the loop at this depth; 1 is the grid. In it the hot block is executed
    # `repeats` times; loops that start or await DMAs make `copies` turns each.
    depth: int = 1
    repeats: int = 1
    copies: int = 1


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled in one go."""

    function: Callable[..., Any]
    avals: tuple[Any, ...]
    parts: tuple[Part, ...]
    donate: tuple[int, ...] = ()
    facts: Callable[[], list[str]] = list  # sentences for below the table; exact, not estimates


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def attention_part(
    family: str, pattern: str, products: int, model: Model, size_q: int, size_k: int,
    keeps_keys: bool = False, **more: Any,
) -> Part:  # fmt: skip
    """A kernel on tiles of size_q x size_k, of which a step does `repeats`, one a query head.

    It keeps its queries and fetches keys and values, once for all heads of the step; a backward
    in one moves the float32 sums of their gradients both ways besides. Or it keeps keys and
    values and fetches every head's queries, the cotangents of their outputs and two float32
    numbers a query; a backward in one then writes a part of their gradients besides.
    """
    heads, in_one = more.get("repeats", 1), family == "attention backward"
    moved = model.bytes(2, size_k, model.H) + 2 * 2 * 4 * size_k * model.H * in_one
    if keeps_keys:
        moved = heads * (model.bytes(2 + in_one, size_q, model.H) + 2 * 4 * size_q)
    return Part(family, pattern, heads * products * 2 * size_q * size_k * model.H, moved, **more)
