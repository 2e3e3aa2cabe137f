"""Backend dispatch: which implementation of a kernel runs, decided while a program is traced.

On TPUs and on GPUs their Pallas kernels, on GPUs for which Triton does not compile large dense
products through XLA, on CPUs block lists in plain jnp. `use` forces one of them, for tests, for
comparisons and for compiling ahead of time for a chip that is not here. Arguments are checked here,
before anything compiles.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels import gpu, logprob, packed, paged, reference, schedule, tuning
from pallas_kernels.pages import Pages, PageTables

BACKENDS = ("auto", "pallas", "interpret", "triton", "triton-interpret", "xla", "reference")
AMPERE = 8.0  # the compute capability from which on Triton compiles for a GPU
LOGITS = 2**27  # bytes of the logits that a CPU holds at once, float32
CORE = 2**20  # bytes of keys and values that a step of decode attention reads on a CPU, at most

# Part of the key of all of jax's caches: what was traced for one backend is never taken for
# another.
_forced = jax.make_user_context("auto")


def use(name: str) -> None:
    """Forces a backend for every call from now on, in all threads; "auto" undoes it.

    A function that jax has compiled for another backend is traced again.

    "pallas" is the TPU kernels, "interpret" the same kernels on the CPU in TPU interpret mode
    (slow, for tests); "triton" is the GPU kernels, "triton-interpret" the same on the CPU; "xla" is
    dense products, "reference" block lists in plain jnp.
    """
    if name not in BACKENDS:
        raise ValueError(f"no kernel backend {name!r}; there are {', '.join(BACKENDS)}")
    _forced.set_global(name)  # not for this thread alone: the engine traces in its own


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """A context in which a backend is forced, as by `use`."""
    before = _forced.value
    use(name)
    try:
        yield
    finally:
        use(before)


def backend() -> str:
    """Returns the backend in use: one of `BACKENDS` but "auto"."""
    if _forced.value != "auto":
        return _forced.value
    platform = jax.default_backend()
    if platform == "gpu":
        return "triton" if _ampere() else "xla"
    return "pallas" if platform == "tpu" else "reference"


def import_lowering() -> None:
    """Imports what jax imports while it lowers its first kernel, which takes some 0.3 s.

    Before threads that lower start: modules of MLIR set attributes of nanobind's classes as they
    are imported, and another thread then reads `ir.Location.current` as the property itself.
    """
    if on_gpu() or backend() == "interpret":
        with contextlib.suppress(ImportError):  # as jax does
            importlib.import_module("jax.experimental.pallas.mosaic_gpu")


@functools.cache
def _ampere() -> bool:
    """Whether this process's GPUs are NVIDIA's, of 2020 or newer."""
    try:
        return float(jax.local_devices()[0].compute_capability) >= AMPERE
    except ValueError:  # AMD's are names: gfx90a
        return False


def _pallas() -> bool:
    return backend() in ("pallas", "interpret")


def _triton() -> bool:
    return backend() in ("triton", "triton-interpret")


def on_gpu() -> bool:
    """Whether programs are traced for GPUs: by whichever of their backends."""
    return _triton() or backend() == "xla"


def packed_schedule(
    kv_end_BS: Int[Array, "B S"],
    queries: int,
    *,
    head_size: int,
    dtype: DTypeLike,
    positions_BS: Int[Array, "B S"] | None = None,
    window: int = 0,
) -> schedule.Schedule:
    """Builds the block list of a batch of packed rows, once for all layers with one window.

    Args:
      kv_end_BS: the mask: query i sees key j iff j <= i < kv_end[j]. A prefix token's entry is
        the end of its group, a tail token's the end of its tail, padding's its own index + 1.
        Every query must see itself; keys before the queries may have any end, 0 hides them.
      queries: T; the queries are the last T of each row's S positions.
      head_size, dtype: of the queries that will come; they choose the block sizes.
      positions_BS: int32, each token's place in its text, if a layer has a window.
      window: a query sees keys less than so many positions back, itself at 0; 0: all keys that
        the mask shows. Lists with positions can be stacked, a window each.
    Raises:
      ValueError: there are no queries, or more than keys; a window without positions.
    """
    keys = kv_end_BS.shape[1]
    if _pallas():
        q_size, k_size = tuning.packed_blocks(head_size, dtype)
        q_size, k_size = min(q_size, _up(queries, 128)), min(k_size, _up(keys, 128))
    elif _triton():
        best = zip(gpu.blocks(head_size, dtype), (queries, keys), strict=True)
        q_size, k_size = (min(size, gpu.power_of_two(count)) for size, count in best)
    elif backend() == "xla":
        q_size, k_size = min(1024, _up(queries, 8)), min(128, _up(keys, 8))
    else:  # all of a block is computed: queries in equal blocks, so that none is half empty
        q_size, k_size = _up(pl.cdiv(queries, pl.cdiv(queries, 128)), 8), min(128, _up(keys, 8))
    return schedule.packed_schedule(kv_end_BS, queries, q_size, k_size, positions_BS, window)


def _up(count: int, multiple: int) -> int:
    return pl.cdiv(max(count, 1), multiple) * multiple


def packed_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    blocks: schedule.Schedule,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attention of packed rows: query i sees key j iff j <= i < kv_end[j], and within the window.

    The T queries are the last T of the row's S packed positions (S - T keys come from a
    cache; S == T in training). Differentiable in q, k and v. float32 or bfloat16.

    Returns:
      (out, lse): out in q's dtype, lse the float32 logsumexp of each query's scores.
    Raises:
      ValueError: query heads are not a multiple of kv heads, keys and values differ in
        shape, or the schedule was built for other lengths.
    """
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    check_heads(N, K)
    if k_BSKH.shape != v_BSKH.shape or k_BSKH.shape != (B, S, K, H):
        raise ValueError(
            f"keys {k_BSKH.shape} and values {v_BSKH.shape} do not fit queries {q_BTNH.shape}"
        )
    rows = blocks.q_start.shape[0], blocks.kv_end.shape[0] // blocks.k_size
    want = B * pl.cdiv(T, blocks.q_size), B * pl.cdiv(S, blocks.k_size)
    if rows != want:
        raise ValueError(
            f"the schedule has {rows[0]} query and {rows[1]} key blocks; "
            f"{B} rows of {T} queries and {S} keys have {want[0]} and {want[1]}"
        )
    if _pallas():
        return packed.packed_attention(q_BTNH, k_BSKH, v_BSKH, blocks, backend() == "interpret")
    if _triton():
        return gpu.packed_attention(q_BTNH, k_BSKH, v_BSKH, blocks, backend() == "triton-interpret")
    if backend() == "xla":
        return reference.sliced_packed_attention(q_BTNH, k_BSKH, v_BSKH, blocks)
    return reference.packed_attention(q_BTNH, k_BSKH, v_BSKH, blocks)


def check_heads(q_heads: int, kv_heads: int) -> None:
    if kv_heads < 1 or q_heads % kv_heads:
        raise ValueError(f"{q_heads} query heads cannot be split over {kv_heads} kv heads")


def paged_attention(
    q_TNH: Float[Array, "T N H"],
    k_TKH: Float[Array, "T K H"],
    v_TKH: Float[Array, "T K H"],
    pages: Pages,
    layer: Int[Array, ""],
    tables: PageTables,
    kv_lens_B: Int[Array, " B"],
    cu_q_lens_B1: Int[Array, " B+1"] | None = None,
    decode: int = 0,
    window: Int[Array, ""] | None = None,
) -> tuple[Float[Array, "T N H"], Pages]:
    """Ragged paged attention: writes new keys and values of B sequences into the cache, attends.

    Sequence b's queries are the last tokens of its context, and each sees the context up to
    and including itself. Shared prefixes are read, never written.

    Args:
      q_TNH, k_TKH, v_TKH: the new tokens of all sequences, one after the other.
      pages: the cache; donate it, it is updated in place.
      layer: int32, which layer's pages.
      tables: where each sequence finds its context.
      kv_lens_B: int32, tokens of each context, the new ones included. 0 is an idle slot: it
        writes nothing and its output is 0.
      cu_q_lens_B1: int32; sequence b has queries cu_q_lens[b] .. cu_q_lens[b + 1], and what
        lies past cu_q_lens[B] is padding. None: decoding, one query a sequence, T == B.
      decode: how many leading sequences have at most one query (static): they take the
        kernel that is made for it. Only read with `cu_q_lens_B1`.
      window: int32, of this layer: the query sees so many tokens, itself included; 0: all. None:
        no layer has a window. Decoding only, and through XLA on TPUs, too.
    Raises:
      ValueError: shapes, head counts or dtypes do not fit each other, a window without decoding,
        or a page size does not tile (the TPU kernels need a multiple of 8 tokens in float32, 16
        in bfloat16, 32 in int8).
    """
    T, N, _ = q_TNH.shape
    check_heads(N, k_TKH.shape[1])
    B = kv_lens_B.shape[0]
    if cu_q_lens_B1 is None and T != B:
        raise ValueError(f"{T} queries for {B} sequences: give cu_q_lens if they are not decoding")
    if cu_q_lens_B1 is not None and window is not None:
        raise ValueError("a window is for decoding: of queries in any mix, none is read")
    if cu_q_lens_B1 is None and _pallas() and window is None:
        return paged.paged_attention(
            q_TNH, k_TKH, v_TKH, pages, layer, tables, kv_lens_B,
            interpret=backend() == "interpret",
        )  # fmt: skip
    if cu_q_lens_B1 is None:
        return reference.paged_attention(
            q_TNH, k_TKH, v_TKH, pages, layer, tables, kv_lens_B, _attend_to_pages(B), window
        )
    rows_BP = layer * pages.pages_per_layer + tables.whole_BP(pages.page_size)
    ragged = reference.ragged_paged_attention
    if _pallas():
        ragged = functools.partial(paged.ragged_paged_attention, interpret=backend() == "interpret")
    return ragged(q_TNH, k_TKH, v_TKH, pages, rows_BP, kv_lens_B, cu_q_lens_B1, (decode, decode, B))


def _attend_to_pages(slots: int) -> reference.Attends:
    if _triton():
        return functools.partial(gpu.attend_to_pages, interpret=backend() == "triton-interpret")
    if backend() == "reference":
        return _attend_on_a_core
    # How often a loop runs is in the data: a GPU's host waits for it before every round, so
    # what one round covers is no loop there.
    return reference.in_blocks(slots, 2048, loops=False)


def _attend_on_a_core(
    pages: Pages, layer: Array, q_RMNH: Array, *of_rows_R: Array
) -> tuple[Array, Array]:
    """`reference.in_blocks` for a CPU: it computes what is in a block and of no use, too.

    So where a row has one query, which is where private pages are read, blocks are small; and a
    block's keys and values stay in a core's own cache.
    """
    block = 64 if q_RMNH.shape[1] == 1 else 128
    row_bytes = 2 * pages.data.shape[2] * block * q_RMNH.shape[-1] * q_RMNH.dtype.itemsize
    rows = min(16, 1 << max(0, (CORE // row_bytes).bit_length() - 1))
    return reference.in_blocks(rows, block)(pages, layer, q_RMNH, *of_rows_R)


def cache_head_size(head_size: int) -> int:
    """Returns the head size of the paged KV cache: padded to 128 lanes for the TPU kernels.

    TPU memory has lanes of 128. A narrower cache would be stored densely by XLA and copied
    whole, at every step, into the padded layout that the kernels read. For the GPU kernels it is a
    power of two, as all their blocks are.
    """
    if _triton():
        return gpu.power_of_two(head_size)
    return max(head_size, 128) if _pallas() else head_size


def token_logprob(
    x_TD: Float[Array, "T D"],
    w: Float[Array, "M N"],
    labels_T: Int[Array, " T"],
    *,
    temperature: float,
    valid_vocab: int,
    transposed: bool = False,
    axis_name: str | None = None,
) -> tuple[Float[Array, " T"], Float[Array, " T"], Float[Array, " T"]]:
    """Logprob of each label, logsumexp and entropy of softmax(x w / temperature), in float32.

    Nothing of size [T, V] is ever held. Differentiable in x and w through all three results.

    Args:
      x_TD: hidden states, bfloat16 or float32.
      w: the output matrix [D, V], or with `transposed` an embedding table [V, D] as it is.
      labels_T: ids below `valid_vocab`.
      temperature: divides the logits.
      valid_vocab: ids at or above it get no probability.
      axis_name: inside `jax.shard_map`, the mesh axis over which the vocabulary is cut: w is
        this shard's slice, labels and valid_vocab are global, every shard gets the answer.
    Raises:
      ValueError: widths differ, or the temperature is not above 0.
    """
    how = dict(temperature=temperature, valid_vocab=valid_vocab, transposed=transposed)
    if _pallas():
        return logprob.token_logprob(
            x_TD, w, labels_T, **how, axis_name=axis_name, interpret=backend() == "interpret"
        )
    block = logprob_block(w.shape[0 if transposed else 1])
    return reference.token_logprob(x_TD, w, labels_T, **how, axis_name=axis_name, block=block)


def logprob_block(vocabulary: int) -> int:
    """Returns how many tokens' logits are held at once: 1,024, and on CPUs few enough for LOGITS.

    A GPU wants large products; a CPU gains nothing by them, and its memory is a laptop's.
    """
    return 1024 if backend() != "reference" else min(1024, max(64, LOGITS // (4 * vocabulary)))
