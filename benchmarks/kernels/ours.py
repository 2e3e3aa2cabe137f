"""Our kernels as programs to compile: packed and paged attention, token logprobs.

To measure one more kernel, add a function to `OURS`; `tests/pallas_kernels/test_aot.py`
compiles all of them for every chip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.programs import (
    MEMBERS,
    PAGE,
    SEQUENCES,
    TOKENS,
    Model,
    Part,
    Program,
    attention_part,
    int32,
)
from pallas_kernels import Pages, PageTables, aot, logprob, packed, paged, schedule, tuning


def _packed(model: Model, chip: str) -> Program:
    """Our packed attention on one causal sequence: half of what it could skip is not there."""
    with aot.targeting(chip):
        size_q, size_k = tuning.packed_blocks(model.H, model.dtype)
    blocks = jax.eval_shape(
        lambda kv_end_BS: schedule.packed_schedule(kv_end_BS, TOKENS, size_q, size_k),
        int32(1, TOKENS),
    )

    def gradients(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        loss = lambda q, k, v: packed.packed_attention(q, k, v, blocks)[0].sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    kv = model.array(1, TOKENS, model.K, model.H)
    part = functools.partial(
        attention_part,
        model=model,
        size_q=size_q,
        size_k=size_k,
        alternatives=("masked", "full"),
        repeats=packed.heads_per_step(model.N, model.K)[0],
    )
    return Program(
        gradients,
        (model.array(1, TOKENS, model.N, model.H), kv, kv, blocks),
        (
            part("attention forward", "packed_attention_forward", 2),
            part("attention backward", "packed_attention_backward", 5),
        ),
        facts=lambda: _blocks_of_a_group(size_q, size_k, prefix=5120, tails=16, tail=2048),
    )


def row_of_a_group(prefix: int, tails: Sequence[int]) -> np.ndarray:
    """The mask of a prefix and the tails that share it: kv_end, int32 [tokens]."""
    tail_ends = prefix + np.cumsum(tails)
    ends = [np.full(prefix, prefix + sum(tails)), np.repeat(tail_ends, tails)]
    return np.concatenate(ends).astype(np.int32)


def _blocks_of_a_group(size_q: int, size_k: int, prefix: int, tails: int, tail: int) -> list[str]:
    """Compares the schedule of tails behind a shared prefix with what its mask needs."""
    kv_end = row_of_a_group(prefix, [tail] * tails)
    total = len(kv_end)
    built = schedule.packed_schedule(jnp.asarray(kv_end[None]), total, size_q, size_k)
    scheduled = int(built.count)
    needed = visible = 0
    j = np.arange(-(-total // size_k) * size_k)
    end = np.pad(kv_end, (0, len(j) - total))
    for start in range(0, total, size_q):
        i = np.arange(start, min(start + size_q, total))[:, None]
        sees = (j <= i) & (i < end)
        visible += int(sees.sum())
        needed += int(sees.reshape(len(i), -1, size_k).any(axis=(0, 2)).sum())
    return [
        f"prefix of {prefix:,} tokens and {tails} tails of {tail:,} in blocks of {size_q} x "
        f"{size_k}: {scheduled:,} blocks scheduled, {needed:,} needed by the mask "
        f"({scheduled / needed:.2f}x), {visible / (scheduled * size_q * size_k):.0%} of their "
        "scores visible"
    ]


def _cache(model: Model, pages: int, dtype: str) -> Pages:
    make = functools.partial(Pages.zeros, 1, pages, model.K, PAGE, model.H, dtype)
    return jax.eval_shape(make)


def _paged_mixed(model: Model, chip: str) -> Program:
    """Our paged attention, prefill: a step is one key block, for which the heads take turns."""
    sizes, heads = _paged_sizes(model, chip, model.dtype)
    queries = sizes.q_tokens * heads * (model.N // model.K)
    part = Part(
        "paged mixed",
        "paged_mixed",
        2 * 2 * queries * sizes.kv_tokens * model.H,
        model.bytes(2, sizes.kv_tokens, heads, model.H),
        alternatives=("masked", "full"),
        depth=2,
        repeats=heads,
        copies=sizes.kv_tokens // PAGE,
    )
    tokens = 2048
    pages = 8192 // PAGE
    new = model.array(tokens, model.K, model.H)
    return Program(
        paged.ragged_paged_attention,
        (
            model.array(tokens, model.N, model.H),
            new,
            new,
            _cache(model, SEQUENCES * pages, model.dtype),
            int32(SEQUENCES, pages),
            int32(SEQUENCES),
            int32(SEQUENCES + 1),
        ),
        (part,),
        donate=(3,),
    )


def _paged_sizes(model: Model, chip: str, dtype: str) -> tuple[paged.PagedSizes, int]:
    """Our block sizes, and the kv heads of one core."""
    with aot.targeting(chip):
        sizes = paged.default_sizes(model.N, model.K, model.H, dtype)
    return sizes, model.K // sizes.head_split


def _paged_decode(model: Model, chip: str, dtype: str = "") -> Program:
    """Our decode step in rows of 8 slots that share a prefix.

    A step is one DMA block, computed in chunks: of a prefix, for all members of its row, or of
    pages of a slot's own.
    """
    dtype = dtype or model.dtype
    sizes, heads = _paged_sizes(model, chip, dtype)
    token_bytes = 2 * heads * (model.H * jnp.dtype(dtype).itemsize + 4 * (dtype == "int8"))
    page_bytes = 2 * heads * PAGE * model.H * jnp.dtype(dtype).itemsize
    pages = sizes.decode_block_bytes // page_bytes

    def part(name: str, readers: int, alternatives: tuple[str, ...]) -> Part:
        queries = readers * heads * (model.N // model.K)
        return Part(
            "paged decode",
            "paged_decode",
            2 * 2 * queries * pages * PAGE * model.H,
            pages * PAGE * token_bytes,
            variant=name,
            alternatives=alternatives,
            repeats=pages * PAGE * heads // sizes.decode_chunk_rows,
            copies=pages,
        )

    rows, shared, own = SEQUENCES // MEMBERS, 8192 // PAGE, 2048 // PAGE
    new = model.array(SEQUENCES, model.K, model.H)
    tables = PageTables(
        int32(rows, shared), int32(rows), int32(rows, MEMBERS), int32(SEQUENCES),
        int32(SEQUENCES, own),
    )  # fmt: skip
    # Six hot blocks: a prefix's masked and full, a slot's own masked and full, two shorter tails.
    return Program(
        paged.paged_attention,
        (
            model.array(SEQUENCES, model.N, model.H), new, new,
            _cache(model, SEQUENCES * shared, dtype), int32(), tables, int32(SEQUENCES),
        ),
        (
            part("prefix", MEMBERS, ("", "full", "", "", "", "")),
            part("own", 1, ("", "", "dearest", "", "", "")),
        ),
        donate=(3,),
        facts=lambda: [_tokens_of_a_step(readers=16, prefix=5120, own=1500)],
    )  # fmt: skip


def _tokens_of_a_step(readers: int, prefix: int, own: int) -> str:
    """Compares what a decode step reads with what it would read if nothing were shared."""
    whole = -(-own // PAGE) * PAGE
    apart = readers * (prefix + whole)
    ours = readers // MEMBERS * prefix + readers * whole
    return (
        f"{readers} slots in rows of {MEMBERS}, a prefix of {prefix:,} tokens and {own:,} of each "
        f"slot's own: a decode step reads {ours:,} tokens a layer, {apart:,} if each read the "
        f"prefix ({apart / ours:.2f}x)"
    )


def _logprob(model: Model, chip: str) -> Program:
    """Our token logprobs: the forward and dx stream weights past tokens, dw tokens past weights."""
    sizes = logprob.fit_sizes(model.D, x_bytes=model.bytes(1), w_bytes=model.bytes(1))

    def loss(x_TD: Any, w_DV: Any, labels_T: Any) -> Any:
        results = logprob.token_logprob(
            x_TD, w_DV, labels_T, temperature=1.0, valid_vocab=model.V, sizes=sizes
        )
        return sum(result.sum() for result in results)

    def part(family: str, pattern: str, products: int, tokens: int, vocab: int, moved: int) -> Part:
        return Part(
            family, pattern, 2 * products * tokens * vocab * model.D, model.bytes(moved, model.D)
        )

    return Program(
        jax.grad(loss, (0, 1)),
        (model.array(TOKENS, model.D), model.array(model.D, model.V), int32(TOKENS)),
        (
            part("logprob forward", "logprob_forward", 1, sizes.tokens, sizes.vocab, sizes.vocab),
            part("logprob dx", "logprob_dx", 2, sizes.dx_tokens, sizes.dx_vocab, sizes.dx_vocab),
            part("logprob dw", "logprob_dw", 2, sizes.dw_tokens, sizes.dw_vocab, sizes.dw_tokens),
        ),
    )


OURS: dict[str, Callable[[Model, str], Program]] = {
    "packed": _packed,
    "paged-mixed": _paged_mixed,
    "paged-decode": _paged_decode,
    "paged-decode-int8": functools.partial(_paged_decode, dtype="int8"),
    "logprob": _logprob,
}
