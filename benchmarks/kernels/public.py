"""The public kernels that ours are compared with: splash, ragged paged attention, megablox.

They come with jax; each with the blocks that suit it best.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from benchmarks.kernels.programs import (
    SEQUENCES,
    TOKENS,
    Model,
    Part,
    Program,
    attention_part,
    int32,
)


def _splash(model: Model, chip: str, size: int, fused: bool = False) -> Program:
    """jax's splash attention: causal, with segment ids, blocks of `size` x `size` everywhere.

    `fused`: its backward in one kernel, which writes dq once for every key block of the row.

    Keys are taken 512 at a time, which is better for blocks of 1,024 than all at once. The
    forward kernel is compiled alone, as for inference, and with the logsumexp, as in training.
    """
    inner = min(size, 512)
    dq = None if fused else size
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=inner,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=inner,
        block_q_dq=dq, block_kv_dq=dq, use_fused_bwd_kernel=fused,
    )  # fmt: skip
    mask = splash_attention_mask.CausalMask((TOKENS, TOKENS))
    kernel = splash.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * model.N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
    )

    def attend(q_NTH: Any, k_KTH: Any, v_KTH: Any, ids_T: Any) -> Any:
        return kernel(q_NTH, k_KTH, v_KTH, splash.SegmentIds(ids_T, ids_T))

    def forward_and_gradients(*arguments: Any) -> Any:
        loss = lambda *x: attend(*x).astype(jnp.float32).sum()  # noqa: E731
        return attend(*arguments), jax.grad(loss, (0, 1, 2))(*arguments)

    kv = model.array(model.K, TOKENS, model.H)
    part = functools.partial(attention_part, model=model, size_q=size, size_k=size)
    backward: tuple[Part, ...] = (
        part("attention dq", "splash_.*_dq", 3),
        part("attention dkv", "splash_.*_dkv", 4, keeps_keys=True),
    )
    if fused:
        backward = (part("attention backward", "splash_.*_dkv", 5, keeps_keys=True),)
    return Program(
        forward_and_gradients,
        (model.array(model.N, TOKENS, model.H), kv, kv, int32(TOKENS)),
        (
            part("attention forward", "splash_.*_fwd_.*no_residuals", 2),
            part("attention forward", "splash_.*_fwd_.*d_residuals", 2, variant="with lse"),
            *backward,
        ),
    )


def _ragged(model: Model, chip: str, page: int) -> Program:
    """jax's ragged paged attention with the blocks of its own table for 28/4 heads of 128.

    Blocks of 16 pages and 32 queries, with pages of 16 tokens or of 128: 256 or 2,048 keys.
    Decode runs the same code, of whose 32 query rows one is useful.
    """
    pages, queries = 16, 32
    keys = pages * page
    products = 2 * 2 * keys * model.N * model.H
    moved = model.bytes(keys, 2, model.K, model.H)
    context = 8192 // page
    return Program(
        functools.partial(
            ragged_paged_attention,
            sm_scale=model.H**-0.5,
            num_kv_pages_per_block=pages,
            num_queries_per_block=queries,
            vmem_limit_bytes=48 * 2**20,
        ),
        (
            model.array(2048, model.N, model.H),
            model.array(SEQUENCES * context, page, 2 * model.K, model.H),
            int32(SEQUENCES),
            int32(SEQUENCES, context),
            int32(SEQUENCES + 1),
            int32(1),
        ),
        (
            Part("paged mixed", "ragged_paged_attention", queries * products, moved),
            Part("paged decode", "ragged_paged_attention", products, moved),
        ),
    )


def _grouped_matmul(model: Model, chip: str) -> Program:
    """megablox: tokens times the first matrix of the experts (or of the dense layer)."""
    rows = TOKENS * model.top
    # An expert sees 512 tokens of these; a dense layer all of them.
    tile_m, tile_k, tile_n = (1024, 512, 1024) if model.experts == 1 else (512, 1024, 768)
    return Program(
        functools.partial(
            gmm, preferred_element_type=jnp.bfloat16, tiling=(tile_m, tile_k, tile_n)
        ),
        (
            model.array(rows, model.D),
            model.array(model.experts, model.D, model.width),
            int32(model.experts),
        ),
        (
            Part(
                "matrix product",
                "gmm",
                2 * tile_m * tile_k * tile_n,
                model.bytes(tile_m + tile_n, tile_k),
                alternatives=("last k", "other k"),
            ),
        ),
    )


PUBLIC: dict[str, Callable[[Model, str], Program]] = {
    "splash-512": functools.partial(_splash, size=512),
    "splash-1024": functools.partial(_splash, size=1024),
    "splash-1024-fused": functools.partial(_splash, size=1024, fused=True),
    "ragged-256": functools.partial(_ragged, page=16),
    "ragged-2048": functools.partial(_ragged, page=128),
    "megablox": _grouped_matmul,
}
