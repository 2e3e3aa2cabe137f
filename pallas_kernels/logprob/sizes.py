"""Block sizes of the logprob kernels, and how much VMEM they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.tiles import LANES

ROWS = 256  # tokens a matrix product at a time: the next one hides this one's softmax
VMEM_LIMIT = 56 << 20  # what a kernel may use: v5p and tpu7x have 64 MiB a core, others 128
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
class Vmem:
    """Bytes of VMEM that each kernel's blocks take; what the pipeline moves is there twice.

    Weights wider than x are cast before the kernels read them; narrower ones within.
    """

    D: int
    x_bytes: int
    w_bytes: int

    def _inputs(self, tokens: int, vocab: int) -> int:
        cast = self.x_bytes if self.x_bytes > self.w_bytes else 0
        moved = 2 * self.D * (tokens * self.x_bytes + vocab * min(self.x_bytes, self.w_bytes))
        # A float32 product splits both operands; the compiler keeps six copies (seen: 70 MiB
        # where the blocks alone are 26, D 3584).
        split = 6 * self.D * (tokens + vocab) * 4 if self.x_bytes == 4 else 0
        return moved + self.D * vocab * cast + split + 2 * 2 * tokens * LANES * 4

    def forward(self, tokens: int, vocab: int) -> int:
        partials = 2 * 4 * tokens * LANES * 4
        return self._inputs(tokens, vocab) + partials + 2 * min(tokens, ROWS) * vocab * 4

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
    vmem = Vmem(D, x_bytes, w_bytes)
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
