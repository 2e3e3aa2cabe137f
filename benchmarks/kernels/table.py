"""Formats the rows as a text table, with the sentences that say what they are worth."""

from __future__ import annotations

from benchmarks.kernels.children import Failure
from benchmarks.kernels.public import PUBLIC
from benchmarks.kernels.rows import Row
from notepad_jax.planner.chips import CHIPS

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
    chips = list(CHIPS)
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
