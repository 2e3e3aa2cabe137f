"""Cycles of TPU kernels, counted in the instructions that the compiler wrote.

libtpu can write down the instructions it chose: *bundles*, one of which a core issues per
cycle, and for each bundle how many slots of each unit it fills. This module cuts the bundles
into straight-line blocks, finds those that hold matrix products (the *hot* blocks), and
counts. A program that compiles with `DUMP_FLAGS` (`aot`) finds its figures here.

The figures are estimates: a block takes max(bundles, cycles the matrix units are busy);
waits for DMA, conflicts of memory banks and waits for weights are not modelled. Against
seven published measurements on TPU7x the model promises 1/0.8 of what the chip does, always
by about the same factor: compare kernels of one chip with it, and believe no absolute.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from pathlib import Path

from notepad_jax.planner.chips import Chip

DUMP_FLAGS = (
    "--xla_jf_dump_to={directory} --xla_jf_dump_llo_text=true "
    # Without this every pass writes its text: 20 times the bytes and twice the time.
    "--xla_jf_dump_llo_pass_label_regex=final"
)

# Columns of the dump -> names of units.
UNITS = {
    "VALU": "VALU",  # arithmetic on vectors
    "XLU": "XLU",  # moves across lanes: transposes, reductions
    "EUP": "EUP",  # exp, log, reciprocal
    "VPOP": "VPOP",  # results taken from the units above
    "VLOAD": "VLD",
    "VSTORE": "VST",
    "SALU": "SALU",
}
_VECTOR_UNITS = ("VALU", "XLU", "EUP", "VLD", "VST")
_DELAY_SLOTS = 4  # bundles after a branch that are executed all the same

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(LH|LB|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{")
_MATMUL = re.compile(r"\bvmatmul\.([a-z0-9.]+)")
_BRANCH = re.compile(r"\bsbr\.(?:rel|abs)\b")
_COPY = re.compile(r"= dma\.")
_NARROW = re.compile(r"\b(?:s8|u8|f8\w*|e4m3\w*|e5m2\w*)\b")


@dataclasses.dataclass(frozen=True)
class Cycle:
    """The instructions of a bundle, which a core issues in one cycle."""

    address: int
    label: str  # "LB" where a loop's body begins, "PF" where a branch lands, ...; "" inside
    depth: int  # loops around it
    matmuls: tuple[str, ...]  # "bf16", "f32" or "8bit" for each matrix product it issues
    copies: bool  # starts a DMA or waits for one
    branches: bool


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block: bundles that are executed together or not at all."""

    start: int  # address of the first bundle
    bundles: int
    depth: int
    matmuls: dict[str, int]  # matrix products by type
    mxu_cycles: float  # cycles in which all matrix units are busy with them
    units: dict[str, float]  # cycles that each other unit needs for its share
    copies: bool  # starts a DMA or waits for one
    fills: int  # loads and stores of values for which there was no register
    spills: int

    @property
    def cycles(self) -> float:
        return float(max(self.bundles, self.mxu_cycles))

    @property
    def on_vectors(self) -> bool:
        """Whether a vector unit is busy in a quarter of the bundles or more."""
        return any(self.units[unit] >= 0.25 * self.bundles for unit in _VECTOR_UNITS)

    @property
    def limit(self) -> str:
        """The unit that needs the most cycles."""
        needs = {"MXU": self.mxu_cycles, **self.units}
        return max(needs, key=lambda unit: needs[unit])


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the blocks that the compiler wrote for one chip."""

    name: str
    blocks: tuple[Block, ...]

    @property
    def hot(self) -> tuple[Block, ...]:
        return tuple(block for block in self.blocks if block.matmuls)

    @property
    def spills(self) -> int:
        return sum(block.spills for block in self.blocks)

    def overhead(self, hot: Block, depth: int, copies: int, repeats: int = 1) -> int:
        """Cycles that one step costs beside its hot blocks: loop counters, addresses, DMAs.

        Blocks that work on vectors without a matrix product clear an accumulator or finish and
        write it out, once in many steps; they are left out. Of the other blocks behind branches
        all are counted, taken or not.

        Args:
          hot: the hot block of the step.
          depth: a step is one turn of the loop at this depth; 1 is the grid.
          copies: turns of the loops inside a step that start DMAs or wait for them.
          repeats: turns of its other loops, that of the hot block among them.
        """
        at = next(i for i, block in enumerate(self.blocks) if block.start == hot.start)
        first, last = at, at
        while first > 0 and self.blocks[first - 1].depth >= depth:
            first -= 1
        while last + 1 < len(self.blocks) and self.blocks[last + 1].depth >= depth:
            last += 1

        def turns(block: Block) -> int:
            if block.depth <= depth:
                return 1
            return copies if block.copies else repeats

        return sum(
            block.bundles * turns(block)
            for block in self.blocks[first : last + 1]
            if not block.matmuls and not block.on_vectors
        )


def together(blocks: tuple[Block, ...]) -> Block:
    """Returns hot blocks that are executed one after the other, as one."""
    matmuls: collections.Counter[str] = collections.Counter()
    units: collections.Counter[str] = collections.Counter()
    for block in blocks:
        matmuls.update(block.matmuls)
        units.update(block.units)
    return Block(
        start=blocks[0].start,
        bundles=sum(block.bundles for block in blocks),
        depth=max(block.depth for block in blocks),
        matmuls=dict(matmuls),
        mxu_cycles=sum(block.mxu_cycles for block in blocks),
        units=dict(units),
        copies=any(block.copies for block in blocks),
        fills=sum(block.fills for block in blocks),
        spills=sum(block.spills for block in blocks),
    )


def share_of_peak(flops: int, cycles: float, chip: Chip) -> float:
    """Returns the share of the chip's peak, for `flops` useful operations in `cycles`."""
    return flops / chip.flops_per_cycle / cycles


def read_dumps(directory: Path, chip: Chip) -> list[Compiled]:
    """Returns the kernels with matrix products that libtpu wrote into `directory`, by name.

    Raises:
      ValueError: the two files of a kernel do not fit together, or are not as we know them.
    """
    kernels = []
    for path in sorted(directory.glob("*-final_bundles.txt")):
        match = re.fullmatch(r"(\d+-(.+))-\d+-final_bundles\.txt", path.name)
        if match is None or match[2].endswith("schedule-analysis"):
            continue
        text = path.read_text(errors="replace")
        if "vmatmul" not in text:
            continue
        stem = match[1]
        tables = [
            other
            for other in directory.glob("*-final_hlo-static-per-bundle-utilization.txt")
            if re.fullmatch(re.escape(stem) + r"-\d+-final_hlo.*", other.name)
        ]
        if len(tables) != 1:
            raise ValueError(f"{path.name} has {len(tables)} tables of utilisation, not 1")
        blocks = parse(text, tables[0].read_text(errors="replace"), chip)
        kernels.append(Compiled(re.sub(r"\.\d+$", "", match[2]), blocks))
    return sorted(kernels, key=lambda kernel: kernel.name)


def parse(bundles_text: str, utilisation_text: str, chip: Chip) -> tuple[Block, ...]:
    """Returns the blocks of one kernel.

    Args:
      bundles_text: the file `*-final_bundles.txt`.
      utilisation_text: the file `*-final_hlo-static-per-bundle-utilization.txt`: the names of
        the units, how many slots a bundle has for each, and a row for every bundle.
    """
    bundles = _bundles(bundles_text)
    capacity, rows = _utilisation(utilisation_text)
    if len(rows) != len(bundles):
        raise ValueError(f"{len(bundles)} bundles but {len(rows)} rows of utilisation")
    cuts = {0, len(bundles)}
    for index, bundle in enumerate(bundles):
        if bundle.label:
            cuts.add(index)
        if bundle.branches:
            cuts.add(min(index + _DELAY_SLOTS + 1, len(bundles)))
    edges = sorted(cuts)
    return tuple(
        _block(bundles[start:end], rows[start:end], capacity, chip)
        for start, end in zip(edges, edges[1:], strict=False)
    )


def _block(
    bundles: list[Cycle], rows: list[dict[str, int]], capacity: dict[str, int], chip: Chip
) -> Block:
    used: collections.Counter[str] = collections.Counter()
    for row in rows:
        used.update(row)
    matmuls = collections.Counter(kind for bundle in bundles for kind in bundle.matmuls)
    # A matrix product takes one register of rows: 8 of 32 bits, 16 of 16, 32 of 8.
    registers = {"f32": 8, "bf16": 16, "8bit": 32}
    operand_rows = sum(registers[kind] * count for kind, count in matmuls.items())
    return Block(
        start=bundles[0].address,
        bundles=len(bundles),
        depth=max(bundle.depth for bundle in bundles),
        matmuls=dict(matmuls),
        mxu_cycles=operand_rows / chip.rows_per_cycle / chip.mxus,
        units={unit: used[column] / capacity[column] for column, unit in UNITS.items()},
        copies=any(bundle.copies for bundle in bundles),
        fills=used["VLOAD:FILL"],
        spills=used["VSTORE:SPILL"],
    )


def _bundles(text: str) -> list[Cycle]:
    """A bundle begins at its address and may go over several lines."""
    heads: list[re.Match[str]] = []
    bodies: list[list[str]] = []
    for line in text.splitlines():
        if head := _BUNDLE.match(line):
            heads.append(head)
            bodies.append([line])
        elif bodies:
            bodies[-1].append(line)
    found = []
    for head, lines in zip(heads, bodies, strict=True):
        body = "\n".join(lines)
        found.append(
            Cycle(
                address=int(head[1], 16),
                label=head[2] or "",
                depth=len(head[3]),
                matmuls=tuple(_kind(operation) for operation in _MATMUL.findall(body)),
                copies=_COPY.search(body) is not None,
                branches=_BRANCH.search(body) is not None,
            )
        )
    return found


def _kind(operation: str) -> str:
    if "bf16" in operation:
        return "bf16"
    return "8bit" if _NARROW.search(operation) else "f32"


def _utilisation(text: str) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Returns slots per bundle and, for each bundle, slots filled; both by column name."""
    columns: list[str] = []
    numbers: list[list[int]] = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("==") or not words:
            continue
        if all(word.lstrip("-").isdigit() for word in words):
            numbers.append([int(word) for word in words])
        elif not columns:
            columns = [word.strip() for word in line.split(",")]
    missing = [name for name in (*UNITS, "VLOAD:FILL", "VSTORE:SPILL") if name not in columns]
    if missing or not numbers or any(len(row) != len(columns) for row in numbers):
        raise ValueError(f"not a table of utilisation as we know it: {columns} lacks {missing}")
    capacity, *rows = (dict(zip(columns, row, strict=True)) for row in numbers)
    return capacity, rows
