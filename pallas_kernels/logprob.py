"""Logprob, logsumexp and entropy of every token, from hidden states, without any [T, V] array.

The TPU kernels behind `token_logprob`; `reference.token_logprob` is the plain-jnp twin and the
oracle. The forward keeps a block of tokens in VMEM and streams the weights past it once, with
an online softmax; the backward takes a cotangent for each token and each of the three outputs
and computes the logits again, block by block.

The softmax runs lane by lane. A register holds 8 tokens x 128 vocabulary entries, and reducing
over those 128 lanes at every step would cost more than the softmax itself. So entry v belongs
to lane v % 128, every (token, lane) keeps a running peak, sum and weighted sum of its own, and
the 128 partial answers of a token are merged once, after the kernel, by the formula that also
merges the shards of a vocabulary split over a mesh axis.

The backward is two kernels because its two results accumulate along different axes: dx of a
token block sums over the vocabulary, dw of a vocabulary block over the tokens. Each kernel
keeps its accumulator in VMEM and computes the logits for itself: 8 instead of 6 units of
matrix work, but nothing is written to HBM more than once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels import tuning
from pallas_kernels.tiles import LANES, LOG2E, Interpret, dot, interpret_mode

_NEGATIVE = -1e30  # a finite stand-in for -inf: differences of two of them stay finite
_ROWS = 256  # tokens a matrix product at a time: the next one hides this one's softmax
_VMEM_LIMIT = 56 << 20  # what a kernel may use: v5p and tpu7x have 64 MiB a core, others 128
_VMEM_BLOCKS = 48 << 20  # what its blocks may use: the compiler wants some for itself


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Block sizes: tokens (multiples of 16) x vocabulary entries (multiples of 128).

    The stationary side of a kernel decides its arithmetic intensity: `tokens` FLOPs a byte of
    streamed weights in the forward, `2 * dx_tokens` and `2 * dw_vocab` in the backward. Above
    240 (v5e), 190 (v5p), 560 (v6e), 310 (tpu7x) the kernel waits for its arithmetic.
    """

    tokens: int  # forward
    vocab: int
    dx_tokens: int
    dx_vocab: int
    dw_tokens: int
    dw_vocab: int


@dataclasses.dataclass(frozen=True)
class _Vmem:
    """Bytes of VMEM that each kernel's blocks take; what the pipeline moves is there twice."""

    D: int
    x_bytes: int
    w_bytes: int

    def _inputs(self, tokens: int, vocab: int) -> int:
        cast = self.x_bytes if self.x_bytes != self.w_bytes else 0
        moved = 2 * self.D * (tokens * self.x_bytes + vocab * self.w_bytes)
        # A float32 product splits both operands; the compiler keeps six copies (seen: 70 MiB
        # where the blocks alone are 26, D 3584).
        split = 6 * self.D * (tokens + vocab) * 4 if self.x_bytes == 4 else 0
        return moved + self.D * vocab * cast + split + 2 * 2 * tokens * LANES * 4

    def forward(self, tokens: int, vocab: int) -> int:
        partials = 2 * 4 * tokens * LANES * 4
        return self._inputs(tokens, vocab) + partials + 2 * min(tokens, _ROWS) * vocab * 4

    def dx(self, tokens: int, vocab: int) -> int:
        result = (2 * self.x_bytes + 4) * tokens * self.D
        return self._inputs(tokens, vocab) + result + tokens * vocab * (4 + self.x_bytes)

    def dw(self, tokens: int, vocab: int) -> int:
        result = (2 * self.w_bytes + 4) * vocab * self.D
        return self._inputs(tokens, vocab) + result + tokens * vocab * (4 + self.x_bytes)

    def needed(self, sizes: Sizes) -> int:
        return max(
            self.forward(sizes.tokens, sizes.vocab),
            self.dx(sizes.dx_tokens, sizes.dx_vocab),
            self.dw(sizes.dw_tokens, sizes.dw_vocab),
        )


def fit_sizes(D: int, x_bytes: int, w_bytes: int) -> Sizes:
    """Returns the default sizes, halved as often as it takes for a model of width D to fit.

    A float32 product is six bfloat16 passes, all unrolled: small blocks keep the time to compile
    at a minute, and a sixth of the speed needs a sixth of the arithmetic intensity.

    Raises:
      ValueError: not even the smallest blocks fit into VMEM.
    """
    vmem = _Vmem(D, x_bytes, w_bytes)
    base = Sizes(*tuning.logprob_blocks(jnp.bfloat16 if x_bytes == 2 else jnp.float32))
    return Sizes(
        *_fit(vmem.forward, base.tokens, base.vocab),
        *_fit(vmem.dx, base.dx_tokens, base.dx_vocab),
        *_fit(vmem.dw, base.dw_tokens, base.dw_vocab),
    )


def _fit(bytes_of: Callable[[int, int], int], tokens: int, vocab: int) -> tuple[int, int]:
    while bytes_of(tokens, vocab) > _VMEM_BLOCKS:
        if tokens == 16 and vocab == LANES:
            raise ValueError(
                f"even blocks of {tokens} tokens x {vocab} ids need {bytes_of(tokens, vocab)} "
                f"bytes of VMEM; kernels have {_VMEM_BLOCKS}"
            )
        if tokens > vocab or vocab == LANES:
            tokens //= 2
        else:
            vocab //= 2
    return tokens, vocab


@dataclasses.dataclass(frozen=True)
class _Setup:
    """What is fixed when the kernels are compiled."""

    temperature: float
    valid_vocab: int  # of the whole vocabulary
    transposed: bool  # w is [V, D]
    axis_name: str | None
    sizes: Sizes
    interpret: Any

    @property
    def scale(self) -> float:
        """Softmax in base 2: exp(a / temperature) = exp2(a * scale)."""
        return LOG2E / self.temperature

    def vocab(self, w: Any) -> int:
        return w.shape[0 if self.transposed else 1]


# ---------------------------------------------------------------- the public function


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
        (no transposed copy is made). Cast to x's dtype block by block if that differs.
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
    axes = frozenset().union(*(_varying(a) for a in (x_TD, w, labels_T)))
    if axis_name is not None:
        axes |= {axis_name}
    x_TD, w, labels_T = (_vary(a, axes) for a in (x_TD, w, labels_T))
    with jax.named_scope("token_logprob"):
        return _token_logprob(setup, x_TD, w, labels_T.astype(jnp.int32))


def _varying(a: Array) -> frozenset[str]:
    """The mesh axes over which shard_map knows `a` to differ; none outside of shard_map."""
    return frozenset(jax.typeof(a).manual_axis_type.varying)


def _vary(a: Array, axes: frozenset[str]) -> Array:
    missing = tuple(sorted(axes - _varying(a)))
    return lax.pcast(a, missing, to="varying") if missing else a


def _setup(
    x: Array, w: Array, labels: Array, temperature: float, valid_vocab: int, transposed: bool,
    axis_name: str | None, sizes: Sizes | None, interpret: Any,
) -> _Setup:  # fmt: skip
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
        if axis_name not in _varying(lax.axis_index(axis_name)):
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
        if tokens % 16 or tokens < 16 or (tokens > _ROWS and tokens % _ROWS):
            raise ValueError(f"blocks of {tokens} tokens: need a multiple of 16, of {_ROWS} above")
        if vocab % LANES or vocab < LANES:
            raise ValueError(f"blocks of {vocab} ids: need a multiple of {LANES}")
    needs = _Vmem(*widths).needed(sizes)
    if needs > _VMEM_LIMIT:
        raise ValueError(f"{sizes} need {needs} bytes of VMEM; kernels have {_VMEM_LIMIT}")
    interpret = interpret_mode(interpret)
    return _Setup(float(temperature), valid_vocab, transposed, axis_name, sizes, interpret)


# ---------------------------------------------------------------- forward


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_logprob(setup: _Setup, x: Array, w: Array, labels: Array) -> Any:
    return _forward(setup, x, w, labels)[0]


def _forward(setup: _Setup, x: Array, w: Array, labels: Array) -> Any:
    T = x.shape[0]
    tokens, padded = _token_blocks(T, setup.sizes.tokens)
    partials = _forward_call(
        setup, tokens, _bounds(setup, w), _pad(labels[:, None], padded), _pad(x, padded), w
    )
    results = _merge(setup, *(p[:T] for p in partials))
    return results, (x, w, labels, *results[1:])


def _token_blocks(T: int, largest: int) -> tuple[int, int]:
    """(tokens a block, tokens in all): evenly split, rounded up to whole matrix products."""
    blocks = -(-T // largest)
    each = -(-T // blocks)
    step = 16 if each <= _ROWS else _ROWS
    each = -(-each // step) * step
    return each, blocks * each


def _pad(a: Array, length: int) -> Array:
    return jnp.pad(a, ((0, length - a.shape[0]), (0, 0))) if length > a.shape[0] else a


def _bounds(setup: _Setup, w: Array) -> Int[Array, " 2"]:
    """This shard's first id, and where its valid ids end (maybe before they begin)."""
    V = setup.vocab(w)
    first = 0 if setup.axis_name is None else lax.axis_index(setup.axis_name) * V
    return jnp.stack([jnp.int32(first), jnp.minimum(first + V, setup.valid_vocab)])


def _merge(setup: _Setup, peak_TL: Array, sum_TL: Array, weighted_TL: Array, label_TL: Array):
    """Merges the lanes' partial softmaxes, then the shards', into the three results.

    With peak m, sum s = sum exp(z - m) and weighted u = sum exp(z - m) (z - m) in base 2, the
    logsumexp is m + log s and the entropy log s - u / s: it never sees the size of the logits.
    """
    across = (lambda f, a: a) if setup.axis_name is None else lambda f, a: f(a, setup.axis_name)
    peak = across(lax.pmax, peak_TL.max(axis=-1))
    down_TL = (peak_TL - peak[:, None]) * setup.scale
    weight_TL = jnp.exp2(down_TL)
    # A lane that saw no valid id has peak -1e30 and weight 0; it must not become 0 * inf.
    weighted_TL = jnp.where(weight_TL > 0, weighted_TL + down_TL * sum_TL, 0)
    total = across(lax.psum, jnp.sum(weight_TL * sum_TL, axis=-1))
    weighted = across(lax.psum, jnp.sum(weight_TL * weighted_TL, axis=-1)) / LOG2E
    label = across(lax.pmax, label_TL.max(axis=-1))  # all others hold -1e30
    log_total = jnp.log(total)
    logprob = (label - peak) / setup.temperature - log_total
    return logprob, peak / setup.temperature + log_total, log_total - weighted / total


def _forward_call(
    setup: _Setup, tokens: int, bounds_2: Array, labels_T1: Array, x_TD: Array, w: Array
) -> Any:
    """Grid: token blocks, then vocabulary blocks: each token block sees each weight block once."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.vocab
    row = lambda width: pl.BlockSpec((tokens, width), lambda t, v, _: (t, 0))  # noqa: E731
    return pl.pallas_call(
        functools.partial(_forward_kernel, setup=setup),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # Blocks past the last valid id are not even read.
            grid=(T // tokens, pl.cdiv(min(V, setup.valid_vocab), size)),
            in_specs=[row(1), row(D), _weight_spec(setup, D, size, lambda t, v, _: v)],
            out_specs=[row(LANES)] * 4,
        ),
        out_shape=[_like((T, LANES), jnp.float32, x_TD)] * 4,
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=2 * T * D * V,
            bytes_accessed=T // tokens * w.size * w.dtype.itemsize
            + x_TD.size * x_TD.dtype.itemsize,
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_forward",
    )(bounds_2, labels_T1, x_TD, w)


def _weight_spec(setup: _Setup, D: int, size: int, vocab_block: Any) -> pl.BlockSpec:
    if setup.transposed:
        return pl.BlockSpec((size, D), lambda *grid: (vocab_block(*grid), 0))
    return pl.BlockSpec((D, size), lambda *grid: (0, vocab_block(*grid)))


def _like(shape: tuple[int, ...], dtype: Any, a: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(a).manual_axis_type)


def _compiler_params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        # The outer axis owns its accumulators, so v5p's two cores may share it.
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=_VMEM_LIMIT,
        disable_bounds_checks=True,  # every address below is static or made by a BlockSpec
    )


def _row_slices(tokens: int) -> list[Any]:
    rows = min(tokens, _ROWS)
    return [pl.ds(start, rows) for start in range(0, tokens, rows)]


def _forward_kernel(
    bounds,  # SMEM int32 [2]: first id of this shard, end of its valid ids
    labels,  # [tokens, 1]
    x,  # [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    peak, total, weighted, label,  # outputs and accumulators, float32 [tokens, 128]
    *, setup: _Setup,
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        peak[...] = jnp.full_like(peak, _NEGATIVE)
        total[...] = jnp.zeros_like(total)
        weighted[...] = jnp.zeros_like(weighted)
        label[...] = jnp.full_like(label, _NEGATIVE)

    size = setup.vocab(w)
    first = bounds[0] + step * size
    # Unrolled on purpose: the scheduler runs one slice's softmax under the next one's product.
    for rows in _row_slices(x.shape[0]):
        x_rows = x[rows, :]
        logits = dot(x_rows, w[...].astype(x.dtype), 1, 1 if setup.transposed else 0)
        lane = first + lax.broadcasted_iota(jnp.int32, (x_rows.shape[0], LANES), 1)
        to_label, to_end = labels[rows, :] - lane, bounds[1] - lane
        # Masking always costs 1% (the matrix unit is the bottleneck); a second, unmasked copy
        # of the code would double the time to compile.
        chunks = [
            (at, jnp.where(to_end > at, logits[:, at : at + LANES], _NEGATIVE))
            for at in range(0, size, LANES)
        ]
        old_peak, old_total = peak[rows, :], total[rows, :]
        new_peak = functools.reduce(jnp.maximum, (c for _, c in chunks), old_peak)
        down = (old_peak - new_peak) * setup.scale
        keep = jnp.exp2(down)
        new_total, new_weighted = keep * old_total, keep * (weighted[rows, :] + down * old_total)
        new_label = label[rows, :]
        for at, chunk in chunks:
            down = (chunk - new_peak) * setup.scale
            weight = jnp.exp2(down)
            new_total += weight
            new_weighted += weight * down
            new_label = jnp.where(to_label == at, chunk, new_label)
        peak[rows, :], total[rows, :] = new_peak, new_total
        weighted[rows, :], label[rows, :] = new_weighted, new_label


# ---------------------------------------------------------------- backward


def _backward(setup: _Setup, residuals: Any, cotangents: Any) -> Any:
    """d logits = (d_logprob (onehot - p) + d_lse p - d_entropy p (log p + entropy)) / temperature.

    The kernels see it as p (a + b log2 p) + c onehot, three numbers a token.
    """
    x, w, labels, lse, entropy = residuals
    d_logprob, d_lse, d_entropy = (d / setup.temperature for d in cotangents)
    factors_T4 = jnp.stack(
        [lse * LOG2E, d_lse - d_logprob - d_entropy * entropy, -d_entropy / LOG2E, d_logprob], 1
    )
    # Cotangents of results that all shards share are shared, too; the kernels' arguments vary.
    factors_T4 = _vary(factors_T4, _varying(x))
    results = []
    for call, largest in (
        (_dx_call, setup.sizes.dx_tokens),
        (_dw_call, setup.sizes.dw_tokens),
    ):
        tokens, padded = _token_blocks(x.shape[0], largest)
        per_token = (_pad(a, padded) for a in (labels[:, None], factors_T4, x))
        results.append(call(setup, tokens, _bounds(setup, w), *per_token, w))
    dx, dw = results
    return dx[: x.shape[0]], dw, None


_token_logprob.defvjp(_forward, _backward)


def _dx_call(
    setup: _Setup, tokens: int, bounds_2: Array, labels_T1: Array, factors_T4: Array,
    x_TD: Array, w: Array,
) -> Array:  # fmt: skip
    """Grid: token blocks, then vocabulary blocks, as in the forward."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.dx_vocab
    blocks = pl.cdiv(min(V, setup.valid_vocab), size)
    row = lambda width: pl.BlockSpec((tokens, width), lambda t, v, _: (t, 0))  # noqa: E731
    return pl.pallas_call(
        functools.partial(_dx_kernel, setup=setup, ragged=V % size if blocks * size > V else 0),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(T // tokens, blocks),
            in_specs=[row(1), row(4), row(D), _weight_spec(setup, D, size, lambda t, v, _: v)],
            out_specs=row(D),
            scratch_shapes=[pltpu.VMEM((tokens, D), jnp.float32)],
        ),
        out_shape=_like((T, D), x_TD.dtype, x_TD),
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * D * V,
            bytes_accessed=T // tokens * w.size * w.dtype.itemsize
            + 2 * x_TD.size * x_TD.dtype.itemsize,
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_dx",
    )(bounds_2, labels_T1, factors_T4, x_TD, w)


def _dw_call(
    setup: _Setup, tokens: int, bounds_2: Array, labels_T1: Array, factors_T4: Array,
    x_TD: Array, w: Array,
) -> Array:  # fmt: skip
    """Grid: vocabulary blocks (all of them: invalid ids get zeros), then token blocks."""
    T, D = x_TD.shape
    V, size = setup.vocab(w), setup.sizes.dw_vocab
    row = lambda width: pl.BlockSpec((tokens, width), lambda v, t, _: (t, 0))  # noqa: E731
    weights = _weight_spec(setup, D, size, lambda v, t, _: v)
    return pl.pallas_call(
        functools.partial(_dw_kernel, setup=setup),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(V, size), T // tokens),
            in_specs=[row(1), row(4), row(D), weights],
            out_specs=weights,
            scratch_shapes=[
                pltpu.VMEM((size, D), jnp.float32),
                pltpu.VMEM((size, tokens), x_TD.dtype),
            ],
        ),
        out_shape=_like(w.shape, w.dtype, x_TD),
        compiler_params=_compiler_params(),
        cost_estimate=pl.CostEstimate(
            flops=4 * T * D * V,
            bytes_accessed=pl.cdiv(V, size) * x_TD.size * x_TD.dtype.itemsize
            + 2 * w.size * w.dtype.itemsize,
            transcendentals=T * V,
        ),
        interpret=setup.interpret,
        name="token_logprob_dw",
    )(bounds_2, labels_T1, factors_T4, x_TD, w)


def _d_logits(
    setup: _Setup, first: Array, end: Array, labels_R1: Array, factors_R4: Array,
    x_RD: Array, w: Array,
) -> Array:  # fmt: skip
    """The cotangents of one tile of logits, float32 [R, vocab]; invalid ids get 0."""
    logits = dot(x_RD, w, 1, 1 if setup.transposed else 0)
    ids = first + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    lse, a, b, c = (factors_R4[:, i : i + 1] for i in range(4))
    log_p = logits * setup.scale - lse
    d_logits = jnp.exp2(log_p) * (a + b * log_p) + jnp.where(ids == labels_R1, c, 0)
    # Past the end w may hold anything, NaN too: nothing computed from it may survive.
    return jnp.where(ids < end, d_logits, 0)


def _dx_kernel(
    bounds,  # SMEM int32 [2]
    labels, factors, x,  # [tokens, 1], [tokens, 4], [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    dx,  # [tokens, D], x's dtype
    sums,  # scratch float32 [tokens, D]
    *, setup: _Setup,
    ragged: int,  # how much of the last block lies inside w; 0: all of it
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    size = setup.vocab(w)
    if ragged:
        # The last block hangs over the end of w, where 0 * garbage may be NaN.
        @pl.when(step == pl.num_programs(1) - 1)
        def _():
            ids = lax.broadcasted_iota(jnp.int32, w.shape, 0 if setup.transposed else 1)
            w[...] = jnp.where(ids < ragged, w[...], 0)

    weights = w[...].astype(x.dtype)
    first = bounds[0] + step * size
    for rows in _row_slices(x.shape[0]):
        d_logits = _d_logits(
            setup, first, bounds[1], labels[rows, :], factors[rows, :], x[rows, :], weights
        )
        sums[rows, :] += dot(d_logits.astype(x.dtype), weights, 1, 0 if setup.transposed else 1)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        dx[...] = sums[...].astype(dx.dtype)


def _dw_kernel(
    bounds,  # SMEM int32 [2]
    labels, factors, x,  # [tokens, 1], [tokens, 4], [tokens, D]
    w,  # [D, vocab], or [vocab, D] if transposed
    dw,  # as w
    sums,  # scratch float32 [vocab, D]: in a table's orientation for either
    d_logits_VT,  # scratch [vocab, tokens], x's dtype
    *, setup: _Setup,
):  # fmt: skip
    step = pl.program_id(1)

    @pl.when(step == 0)
    def _():
        sums[...] = jnp.zeros_like(sums)

    size = setup.vocab(w)
    weights = w[...].astype(x.dtype)
    first = bounds[0] + pl.program_id(0) * size
    for rows in _row_slices(x.shape[0]):
        d_logits = _d_logits(
            setup, first, bounds[1], labels[rows, :], factors[rows, :], x[rows, :], weights
        )
        # Transposing this small tile is free; a product with x transposed costs half the speed.
        d_logits_VT[:, rows] = d_logits.astype(x.dtype).T
    sums[...] += dot(d_logits_VT[...], x[...], 1, 0)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        result = sums[...].astype(dw.dtype)
        dw[...] = result if setup.transposed else result.T
