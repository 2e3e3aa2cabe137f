"""The table's rows from the compiler's dumps, and ours against the best public kernel.

`bundles` counts; here a program's parts say what the counts mean.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.kernels import bundles
from benchmarks.kernels.programs import Part, Program
from benchmarks.kernels.public import PUBLIC
from notepad_jax.planner import chips


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


def rows_of(
    program: Program, model: str, name: str, chip: str, dumps: Path, seconds: float
) -> list[Row]:
    """Returns the lines of one compiled program.

    Raises:
      ValueError: the dumps lack a kernel of the program or hold it twice, or the number of its
        hot blocks is not what the catalogue says.
    """
    kernels = bundles.read_dumps(dumps, chips.CHIPS[chip])
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


def _variants(part: Part, kernel: bundles.Compiled) -> Iterator[tuple[str, bundles.Block]]:
    if not part.alternatives:
        yield part.variant, bundles.together(kernel.hot)
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
    part: Part, kernel: bundles.Compiled, block: bundles.Block, model: str, program: str,
    variant: str, chip_name: str, seconds: float,
) -> Row:  # fmt: skip
    chip = chips.CHIPS[chip_name]
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
        peak_in_block=bundles.share_of_peak(part.flops, hot, chip),
        peak_in_step=bundles.share_of_peak(part.flops, step, chip),
        hbm_in_step=dma / max(dma, step),
        limit="dma" if dma > step else block.limit,
        spills=kernel.spills,
        compile_seconds=seconds,
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
