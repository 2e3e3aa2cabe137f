"""How fast should the kernels be? Compiles ours and the public ones, prints one table.

    python -m pallas_kernels.report --tpu v5e v5p v6e tpu7x
    python -m pallas_kernels.report --tpu v6e --model qwen2.5-7b --kernels packed splash-1024

No TPU is needed: libtpu compiles for chips that are not there (`aot`) and writes down the
instructions it chose, which `estimate` counts. One child process per chip does the compiling,
because libtpu reads its flags once; a compiler that crashes takes down one child and one
kernel. To measure one more kernel, add a function to `PROGRAMS`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from pallas_kernels import aot, estimate, logprob, packed, paged, schedule, tuning


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
SEQUENCES = 64  # sequences in a ragged call


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


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Every figure but `compile_seconds` is an estimate."""

    model: str
    family: str
    program: str
    variant: str
    chip: str
    bundles: int  # of the hot block
    mxu_cycles: float  # cycles in it that the matrix units are busy
    hot_cycles: float  # max of the two, times the executions in a step
    step_cycles: float  # with what every step costs besides
    dma_cycles: float  # what moving the step's bytes takes
    peak_in_block: float  # parts of the bf16 peak
    peak_in_step: float
    hbm_in_step: float  # part of HBM's peak, computing and moving overlapped
    limit: str  # the unit that needs the most cycles; "dma" if moving takes longer than the step
    spills: int
    compile_seconds: float  # of the whole program
    ratio: float = 0.0  # speed against the best public kernel of the family; 0: nothing to compare
    versus: str = ""  # that kernel

    @property
    def kernel(self) -> str:
        return f"{self.program} {self.variant}".strip()


@dataclasses.dataclass(frozen=True)
class Success:
    rows: list[Row]
    facts: list[str]


@dataclasses.dataclass(frozen=True)
class Failure:
    model: str
    program: str
    chip: str
    reason: str


# ---------------------------------------------------------------- the catalogue


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _attention_part(
    family: str, pattern: str, products: int, model: Model, size_q: int, size_k: int, **more: Any
) -> Part:
    """A kernel on tiles of size_q x size_k, of which a step does `repeats`, one a query head.

    The forward and dq kernels keep their queries and fetch keys and values, once for all heads
    of the step; dkv keeps keys and values and fetches every head's queries, the cotangents of
    their outputs and two float32 numbers a query.
    """
    heads = more.get("repeats", 1)
    moved = model.bytes(2, size_k, model.H)
    if family == "attention dkv":
        moved = heads * (model.bytes(2, size_q, model.H) + 2 * 4 * size_q)
    return Part(family, pattern, heads * products * 2 * size_q * size_k * model.H, moved, **more)


def _splash(model: Model, chip: str, size: int) -> Program:
    """jax's splash attention: causal, with segment ids, blocks of `size` x `size` everywhere.

    Keys are taken 512 at a time, which is better for blocks of 1,024 than all at once. The
    forward kernel is compiled alone, as for inference, and with the logsumexp, as in training.
    """
    inner = min(size, 512)
    sizes = splash.BlockSizes(
        block_q=size, block_kv=size, block_kv_compute=inner,
        block_q_dkv=size, block_kv_dkv=size, block_kv_dkv_compute=inner,
        block_q_dq=size, block_kv_dq=size,
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
    part = functools.partial(_attention_part, model=model, size_q=size, size_k=size)
    return Program(
        forward_and_gradients,
        (model.array(model.N, TOKENS, model.H), kv, kv, _int32(TOKENS)),
        (
            part("attention forward", "splash_.*_fwd_.*no_residuals", 2),
            part("attention forward", "splash_.*_fwd_.*d_residuals", 2, variant="with lse"),
            part("attention dq", "splash_.*_dq", 3),
            part("attention dkv", "splash_.*_dkv", 4),
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
            _int32(SEQUENCES),
            _int32(SEQUENCES, context),
            _int32(SEQUENCES + 1),
            _int32(1),
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
            _int32(model.experts),
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


def _packed(model: Model, chip: str) -> Program:
    """Our packed attention on one causal sequence: half of what it could skip is not there."""
    with aot.targeting(chip):
        size_q, size_k = tuning.packed_blocks(model.H, model.dtype)
    blocks = jax.eval_shape(
        lambda kv_end_BS: schedule.packed_schedule(kv_end_BS, TOKENS, size_q, size_k),
        _int32(1, TOKENS),
    )

    def gradients(q: Any, k: Any, v: Any, blocks: Any) -> Any:
        loss = lambda q, k, v: packed.packed_attention(q, k, v, blocks)[0].sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2))(q, k, v)

    kv = model.array(1, TOKENS, model.K, model.H)
    part = functools.partial(
        _attention_part,
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
            part("attention dq", "packed_attention_dq", 3),
            part("attention dkv", "packed_attention_dkv", 4),
        ),
        facts=lambda: _blocks_of_a_group(size_q, size_k, prefix=5120, tails=16, tail=2048),
    )


def _blocks_of_a_group(size_q: int, size_k: int, prefix: int, tails: int, tail: int) -> list[str]:
    """Compares the schedule of tails behind a shared prefix with what its mask needs."""
    ends = [prefix + tails * tail] * prefix
    for i in range(1, tails + 1):
        ends += [prefix + i * tail] * tail
    kv_end = np.asarray(ends, np.int32)
    total = len(ends)
    built = schedule.packed_schedule(jnp.asarray(kv_end[None]), total, size_q, size_k)
    scheduled = int(built.by_query.count)
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


def _paged(model: Model, tokens: int, distribution: Any, part: Part) -> Program:
    def attend(*arguments: Any) -> Any:
        return paged.ragged_paged_attention(*arguments, distribution)

    pages = 8192 // PAGE
    new = model.array(tokens, model.K, model.H)
    return Program(
        attend,
        (
            model.array(tokens, model.N, model.H),
            new,
            new,
            model.array(SEQUENCES * pages, 2, model.K, PAGE, model.H),
            _int32(SEQUENCES, pages),
            _int32(SEQUENCES),
            _int32(SEQUENCES + 1),
        ),
        (part,),
        donate=(3,),
    )


def _paged_sizes(model: Model, chip: str) -> tuple[paged.PagedSizes, int]:
    """Our block sizes, and the kv heads of one core."""
    with aot.targeting(chip):
        sizes = paged.default_sizes(model.N, model.K, model.H, model.dtype)
    return sizes, model.K // sizes.head_split


def _paged_mixed(model: Model, chip: str) -> Program:
    """Our paged attention, prefill: a step is one key block, for which the heads take turns."""
    sizes, heads = _paged_sizes(model, chip)
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
    return _paged(model, 2048, None, part)


def _paged_decode(model: Model, chip: str) -> Program:
    """Our paged attention, one query a sequence: a step is one DMA block, computed in chunks."""
    sizes, heads = _paged_sizes(model, chip)
    page_bytes = model.bytes(2, heads, PAGE, model.H)
    pages = sizes.decode_block_bytes // page_bytes
    part = Part(
        "paged decode",
        "paged_decode",
        2 * 2 * heads * (model.N // model.K) * pages * PAGE * model.H,
        pages * page_bytes,
        alternatives=("masked", "full", "", ""),  # and two shorter tails
        repeats=pages * PAGE * heads // sizes.decode_chunk_rows,
        copies=pages,
    )
    return _paged(model, SEQUENCES, (SEQUENCES,) * 3, part)


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
        (model.array(TOKENS, model.D), model.array(model.D, model.V), _int32(TOKENS)),
        (
            part("logprob forward", "logprob_forward", 1, sizes.tokens, sizes.vocab, sizes.vocab),
            part("logprob dx", "logprob_dx", 2, sizes.dx_tokens, sizes.dx_vocab, sizes.dx_vocab),
            part("logprob dw", "logprob_dw", 2, sizes.dw_tokens, sizes.dw_vocab, sizes.dw_tokens),
        ),
    )


PUBLIC: dict[str, Callable[[Model, str], Program]] = {
    "splash-512": functools.partial(_splash, size=512),
    "splash-1024": functools.partial(_splash, size=1024),
    "ragged-256": functools.partial(_ragged, page=16),
    "ragged-2048": functools.partial(_ragged, page=128),
    "megablox": _grouped_matmul,
}
OURS: dict[str, Callable[[Model, str], Program]] = {
    "packed": _packed,
    "paged-mixed": _paged_mixed,
    "paged-decode": _paged_decode,
    "logprob": _logprob,
}
PROGRAMS = {**OURS, **PUBLIC}


# ---------------------------------------------------------------- one chip: the child process


def rows_of(
    program: Program, model: str, name: str, chip: str, dumps: Path, seconds: float
) -> list[Row]:
    """Returns the lines of one compiled program.

    Raises:
      ValueError: the dumps lack a kernel of the program or hold it twice, or the number of its
        hot blocks is not what the catalogue says.
    """
    kernels = estimate.read_dumps(dumps, estimate.CHIPS[chip])
    rows = []
    for part in program.parts:
        found = [kernel for kernel in kernels if re.search(part.pattern, kernel.name)]
        if len(found) != 1:
            names = ", ".join(kernel.name for kernel in kernels)
            raise ValueError(
                f"{len(found)} kernels match {part.pattern!r}, not 1; there are: {names}"
            )
        for variant, block in _variants(part, found[0]):
            rows.append(_row(part, found[0], block, model, name, variant, chip, seconds))
    return rows


def _variants(part: Part, kernel: estimate.Compiled) -> Iterator[tuple[str, estimate.Block]]:
    if not part.alternatives:
        yield part.variant, estimate.together(kernel.hot)
        return
    if len(kernel.hot) != len(part.alternatives):
        raise ValueError(
            f"{kernel.name} has {len(kernel.hot)} blocks with matrix products where the catalogue "
            f"has {len(part.alternatives)} ({', '.join(part.alternatives)})"
        )
    dearest_first = sorted(kernel.hot, key=lambda block: -block.cycles)
    for name, block in zip(part.alternatives, dearest_first, strict=True):
        if name:
            yield f"{part.variant} {name}".strip(), block


def _row(
    part: Part, kernel: estimate.Compiled, block: estimate.Block, model: str, program: str,
    variant: str, chip_name: str, seconds: float,
) -> Row:  # fmt: skip
    chip = estimate.CHIPS[chip_name]
    hot = part.repeats * block.cycles
    step = hot + kernel.overhead(block, part.depth, part.copies, part.repeats)
    dma = part.hbm_bytes / chip.hbm_bytes_per_cycle
    return Row(
        model=model,
        family=part.family,
        program=program,
        variant=variant,
        chip=chip_name,
        bundles=block.bundles,
        mxu_cycles=block.mxu_cycles,
        hot_cycles=hot,
        step_cycles=step,
        dma_cycles=dma,
        peak_in_block=estimate.share_of_peak(part.flops, hot, chip),
        peak_in_step=estimate.share_of_peak(part.flops, step, chip),
        hbm_in_step=dma / max(dma, step),
        limit="dma" if dma > step else block.limit,
        spills=kernel.spills,
        compile_seconds=seconds,
    )


def compile_here(chip: str, jobs: list[tuple[str, str]], dumps: Path, keep: Path | None) -> None:
    """Compiles (model, program) pairs in this process; prints a line of JSON for each.

    This process must have been started with the flags of `_child_environment`: libtpu writes
    into `dumps`, which is emptied after every program.
    """
    for model, name in jobs:
        try:
            program = PROGRAMS[name](MODELS[model], chip)
            start = time.monotonic()
            aot.compile_for(chip, program.function, *program.avals, donate=program.donate)
            seconds = time.monotonic() - start
            rows = rows_of(program, model, name, chip, dumps, seconds)
            answer = {
                "rows": [dataclasses.asdict(row) for row in rows],
                "facts": [f"{chip}: {fact}" for fact in program.facts()],
            }
        except Exception as error:  # the compiler's errors are many and none may end the report
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"reason": f"{type(error).__name__}: {lines[0]}"}
        if keep is not None:
            shutil.copytree(dumps, keep / chip / model / name, dirs_exist_ok=True)
        for path in dumps.iterdir():
            path.unlink()
        print(json.dumps(answer), flush=True)


# ---------------------------------------------------------------- all chips


def _child_environment(dumps: Path) -> dict[str, str]:
    flags = estimate.DUMP_FLAGS.format(directory=dumps)
    before = os.environ.get("LIBTPU_INIT_ARGS", "")
    return os.environ | aot.ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"{before} {flags}".strip()}


def _child_command(
    chip: str, jobs: list[tuple[str, str]], dumps: Path, keep: Path | None
) -> list[str]:
    arguments = json.dumps([chip, jobs, str(dumps), str(keep) if keep else None])
    return [sys.executable, "-m", "pallas_kernels.report", "--child", arguments]


def _compile_on(
    chip: str, jobs: list[tuple[str, str]], keep: Path | None, say: Callable[[str], None]
) -> Iterator[Success | Failure]:
    """Yields what became of each job; a child that dies loses one job, another does the rest."""
    while jobs:
        with tempfile.TemporaryDirectory(prefix="pallas-report-") as directory:
            dumps = Path(directory, "dumps")
            dumps.mkdir()
            errors = Path(directory, "stderr")
            with errors.open("w") as stderr, subprocess.Popen(
                _child_command(chip, jobs, dumps, keep),
                env=_child_environment(dumps), stdout=subprocess.PIPE, stderr=stderr, text=True,
            ) as child:  # fmt: skip
                assert child.stdout is not None
                model, name = jobs[0]
                say(f"{chip} {model} {name}")
                for line in child.stdout:
                    (model, name), *jobs = jobs
                    answer = json.loads(line)
                    if "rows" in answer:
                        yield Success([Row(**row) for row in answer["rows"]], answer["facts"])
                    else:
                        yield Failure(model, name, chip, answer["reason"])
                    if jobs:
                        say(f"{chip} {jobs[0][0]} {jobs[0][1]}")
            if jobs:
                (model, name), *jobs = jobs
                last = errors.read_text(errors="replace").strip().splitlines()[-1:]
                yield Failure(
                    model, name, chip, f"the compiler ended with code {child.returncode}: {last}"
                )


def compare(rows: list[Row]) -> list[Row]:
    """Returns the rows of ours with their speed against the best public kernel of the family."""
    compared = []
    for row in rows:
        rivals = [
            other
            for other in rows
            if (other.model, other.family, other.chip) == (row.model, row.family, row.chip)
            and other.program in PUBLIC
        ]
        if row.program in PUBLIC or not rivals:
            compared.append(row)
            continue
        best = max(rivals, key=_speed)
        ratio = _speed(row) / _speed(best)
        compared.append(dataclasses.replace(row, ratio=ratio, versus=best.kernel))
    return compared


def _speed(row: Row) -> float:
    """Useful work per time: the share of peak in a step, DMA overlapped."""
    return row.peak_in_step * row.step_cycles / max(row.step_cycles, row.dma_cycles)


HEADER = """\
Every figure below is an ESTIMATE, read out of the instructions that libtpu compiled; nothing
was run. A block takes max(bundles, MXU-busy) cycles. A step adds the scalar bundles and DMA
starts that it issues besides; what happens once in many steps (clearing an accumulator,
writing it out) is left out. DMA is the time of a step's bytes at HBM's peak and is taken to
overlap. Waits for DMA, memory-bank conflicts and weight loads are not modelled: on TPU7x the
model promised 1/0.8 of what was measured. Compare on one chip; gaps under 10% mean little.
"""


def table(rows: list[Row], facts: list[str], failures: list[Failure]) -> str:
    """Returns the rows as aligned text, kernels that compute the same next to each other."""
    head = (
        "model", "computes", "chip", "kernel", "bundles", "MXU-busy", "DMA", "in block", "in step",
        "of HBM", "limit", "spills", "compile", "against the best public kernel",
    )  # fmt: skip
    families = list(dict.fromkeys(row.family for row in rows))
    chips = list(estimate.CHIPS)
    ordered = sorted(
        rows,
        key=lambda r: (r.model, families.index(r.family), chips.index(r.chip), r.program in PUBLIC),
    )
    lines = [head]
    for r in ordered:
        lines.append((
            r.model, r.family, r.chip, r.kernel, f"{r.bundles:,}", f"{r.mxu_cycles:,.0f}",
            f"{r.dma_cycles:,.0f}", f"{r.peak_in_block:.0%}", f"{r.peak_in_step:.0%}",
            f"{r.hbm_in_step:.0%}", r.limit, str(r.spills), f"{r.compile_seconds:.1f} s",
            f"{r.ratio:.2f}x {r.versus}" if r.versus else "",
        ))  # fmt: skip
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    right = range(4, 10)
    text = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if facts:
        text += ["", "Counted, not estimated:", *facts]
    text += [f"FAILED {f.model} {f.chip} {f.program}: {f.reason}" for f in failures]
    return "\n".join([HEADER, *text])


# ---------------------------------------------------------------- the command


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.report",
        description="Compile our kernels and the public ones for TPUs that need not be there, and "
        "print what the compiler's instructions say about their speed: an estimate.",
        epilog="A program takes 2 to 20 s for a chip (ragged-2048 up to 100); all, 15 minutes.\n"
        "programs of ours: " + (", ".join(OURS) or "none") + "\n"
        "public programs:  " + ", ".join(PUBLIC) + "\n"
        "columns:\n"
        "  bundles   instructions of the hot block, one a cycle\n"
        "  MXU-busy  cycles in which its matrix products keep all matrix units busy\n"
        "  DMA       cycles that its bytes need at HBM's peak\n"
        "  in block  part of the bf16 peak inside the hot block; in step: with a step's overhead\n"
        "  limit     the unit that needs the most cycles; dma: moving takes longer than the step\n"
        "example: python -m pallas_kernels.report --tpu v6e --kernels splash-512 splash-1024",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = dict(nargs="+", metavar="NAME")
    parser.add_argument(
        "--tpu", **several, default=list(estimate.CHIPS),
        help=f"chips, of {', '.join(estimate.CHIPS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--model", **several, default=list(MODELS),
        help=f"shapes, of {', '.join(MODELS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--kernels", **several, default=list(PROGRAMS), help="programs (default: all; see below)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument(
        "--keep-dumps", type=Path, metavar="DIR",
        help="keep what libtpu wrote, about 10 MB a program, in DIR/chip/model/program",
    )  # fmt: skip
    return parser


def _complaint(options: argparse.Namespace) -> str:
    """Returns what is wrong with the command, in one line; "" if nothing is."""
    for what, given, allowed in (
        ("--tpu", options.tpu, estimate.CHIPS),
        ("--model", options.model, MODELS),
        ("--kernels", options.kernels, PROGRAMS),
    ):
        for name in given:
            if name not in allowed:
                return f"{what}: {name!r} is not one of {', '.join(allowed)}"
    return aot.missing_compiler()


def main(arguments: list[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 if a kernel did not compile, 2 if misused."""
    if arguments[:1] == ["--child"]:
        chip, jobs, dumps, keep = json.loads(arguments[1])
        compile_here(chip, [tuple(job) for job in jobs], Path(dumps), Path(keep) if keep else None)
        return 0
    options = _parser().parse_args(arguments)
    if complaint := _complaint(options):
        print(complaint, file=sys.stderr)
        return 2
    jobs = [(model, name) for model in options.model for name in options.kernels]
    total, done = len(jobs) * len(options.tpu), 0

    def say(what: str) -> None:
        print(f"[{done + 1}/{total}] {what}", file=sys.stderr, flush=True)

    rows: list[Row] = []
    facts: list[str] = []
    failures: list[Failure] = []
    for chip in options.tpu:
        for outcome in _compile_on(chip, list(jobs), options.keep_dumps, say):
            done += 1
            if isinstance(outcome, Failure):
                failures.append(outcome)
            else:
                rows += outcome.rows
                facts += [fact for fact in outcome.facts if fact not in facts]
    rows = compare(rows)
    if options.json:
        found = {
            "note": " ".join(HEADER.split()),
            "rows": [dataclasses.asdict(row) for row in rows],
            "facts": facts,
            "failures": [dataclasses.asdict(failure) for failure in failures],
        }
        print(json.dumps(found, indent=1))
    else:
        print(table(rows, facts, failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
