"""The call of the logprob kernels: checks, a vocabulary sharded over a mesh axis, custom VJP."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.interpret import Interpret, interpret_mode
from pallas_kernels.logprob.backward import backward
from pallas_kernels.logprob.blocks import Setup, vary, varying
from pallas_kernels.logprob.forward import forward
from pallas_kernels.logprob.sizes import ROWS, VMEM_LIMIT, Sizes, Vmem, fit_sizes
from pallas_kernels.tiles import LANES


def token_logprob(
    x_TD: Float[Array, "T D"],
    w: Float[Array, "M N"],
    labels_T: Int[Array, " L"],
    *,
    temperature: float,
    valid_vocab: int,
    transposed: bool = False,
    axis_name: str | None = None,
    sizes: Sizes | None = None,
    interpret: Interpret = False,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """Logprob of each label, logsumexp and entropy of softmax(x w / temperature), in float32.

    Ids at or above `valid_vocab` get no probability; a label that is no valid id has logprob
    -1e30 and picks nothing in the gradient. Differentiable in x and w through all three
    results; gradients come in the dtypes of x and w.

    A vocabulary split over a mesh axis: call inside `jax.shard_map` (with its default
    check_vma=True) with `axis_name`; w is then this shard's slice, in order, while labels and
    valid_vocab stay global. Every shard returns the full answer. The types of the arguments
    decide the gradients: an x that is the same on all shards gets its dx summed over them, a w
    that is the same on all shards of some *other* axis (data parallelism) gets its dw summed
    over that one, and a sliced w gets the gradient of its slice.

    Args:
      x_TD: hidden states, bfloat16 or float32. float32 multiplies at HIGHEST precision.
      w: output matrix [D, V], or with `transposed` an embedding table [V, D], read as it is
        (no transposed copy is made). Cast to x's dtype: block by block if it is narrower, and
        before anything reads it if it is wider. Its gradient is not rounded on the way, so that
        devices can sum it in float32.
      labels_T: ids, int [T].
      temperature: divides the logits; a Python number above 0.
      valid_vocab: ids in use, of the whole vocabulary.
      sizes: block sizes; None takes those that fit D and the dtypes.
      interpret: True, or parameters: TPU interpret mode, on any backend.
    Returns:
      (logprob, lse, entropy), float32 [T] each, in nats.
    Raises:
      ValueError: shapes, sizes or numbers that do not fit each other; nothing is compiled.
    """
    setup = _setup(
        x_TD, w, labels_T, temperature, valid_vocab, transposed, axis_name, sizes, interpret
    )
    # Inside shard_map every argument is made to vary over the same mesh axes. The transpose of
    # that step is a psum exactly where an argument was replicated, which is all that the
    # gradients of a sharded vocabulary (and of data parallelism) need.
    axes = frozenset().union(*(varying(a) for a in (x_TD, w, labels_T)))
    if axis_name is not None:
        axes |= {axis_name}
    x_TD, w, labels_T = (vary(a, axes) for a in (x_TD, w, labels_T))
    with jax.named_scope("token_logprob"):
        return _token_logprob(setup, x_TD, w, labels_T.astype(jnp.int32))


def _setup(
    x: Array, w: Array, labels: Array, temperature: float, valid_vocab: int, transposed: bool,
    axis_name: str | None, sizes: Sizes | None, interpret: Any,
) -> Setup:  # fmt: skip
    """Checks everything that can be checked without compiling."""
    T, D = x.shape
    V, width = w.shape if transposed else w.shape[::-1]
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; logprobs need one above 0")
    if width != D:
        raise ValueError(f"hidden states are {D} wide, the output matrix {width}")
    if labels.shape != (T,):
        raise ValueError(f"{labels.shape[0]} labels for {T} tokens")
    if T == 0 or V == 0:
        raise ValueError(f"{T} tokens and {V} ids: there is nothing to compute")
    for name, a in (("hidden states", x), ("output matrix", w)):
        if a.dtype not in (jnp.bfloat16, jnp.float32):
            raise ValueError(f"the {name} are {a.dtype}, need bfloat16 or float32")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are {labels.dtype}, need integers")
    shards = 1
    if axis_name is not None:
        if axis_name not in varying(lax.axis_index(axis_name)):
            raise ValueError(
                f"axis {axis_name!r} is not tracked: call inside jax.shard_map with check_vma=True"
            )
        shards = lax.axis_size(axis_name)
    if not 0 < valid_vocab <= V * shards:
        raise ValueError(f"{valid_vocab} valid ids in a vocabulary of {V * shards}")
    widths = D, x.dtype.itemsize, w.dtype.itemsize
    sizes = sizes or fit_sizes(*widths)
    for tokens, vocab in (
        (sizes.tokens, sizes.vocab),
        (sizes.dx_tokens, sizes.dx_vocab),
        (sizes.dw_tokens, sizes.dw_vocab),
    ):
        if tokens % 16 or tokens < 16 or (tokens > ROWS and tokens % ROWS):
            raise ValueError(f"blocks of {tokens} tokens: need a multiple of 16, of {ROWS} above")
        if vocab % LANES or vocab < LANES:
            raise ValueError(f"blocks of {vocab} ids: need a multiple of {LANES}")
    needs = Vmem(*widths).needed(sizes)
    if needs > VMEM_LIMIT:
        raise ValueError(f"{sizes} need {needs} bytes of VMEM; kernels have {VMEM_LIMIT}")
    interpret = interpret_mode(interpret)
    temperature = float(temperature)
    return Setup(temperature, valid_vocab, transposed, axis_name, sizes, w.dtype, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprob(setup: Setup, x: Array, w: Array, labels: Array) -> Any:
    return _forward(setup, x, w, labels)[0]


def _forward(setup: Setup, x: Array, w: Array, labels: Array) -> Any:
    if w.dtype.itemsize > x.dtype.itemsize:
        w = w.astype(x.dtype)
    return forward(setup, x, w, labels)


_token_logprob.defvjp(_forward, backward)
