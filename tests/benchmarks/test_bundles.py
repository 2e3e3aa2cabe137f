"""The arithmetic of counted bundles, on a dump small enough to count by hand."""

from pathlib import Path

import pytest

from benchmarks.kernels import bundles
from notepad_jax.planner import chips
from pallas_kernels import aot
from tests.benchmarks import dumps

V5E = chips.CHIPS["v5e"]


def test_a_hot_block_counted_by_hand() -> None:
    blocks = bundles.parse(dumps.BUNDLES, dumps.UTILISATION, V5E)
    assert [(block.start, block.bundles, block.depth) for block in blocks] == [
        (0, 1, 0),
        (1, 7, 1),
        (8, 2, 1),
        (10, 3, 1),
    ]
    hot = blocks[2]
    assert hot.matmuls == {"bf16": 2, "f32": 1}
    # 2 x 16 + 1 x 8 rows, one row a cycle, over four matrix units: more than its two bundles.
    assert hot.mxu_cycles == 10 and hot.cycles == 10
    assert (hot.units["VALU"], hot.units["VLD"], hot.units["VST"]) == (1 / 4, 3 / 3, 1)
    assert (hot.fills, hot.spills) == (2, 1)
    assert hot.limit == "MXU"


def test_a_step_adds_scalar_work_and_leaves_out_what_only_stores() -> None:
    kernel = bundles.Compiled("kernel", bundles.parse(dumps.BUNDLES, dumps.UTILISATION, V5E))
    (hot,) = kernel.hot
    assert kernel.overhead(hot, depth=1, copies=1) == 7
    assert kernel.spills == 1
    # 10 cycles of four 128 x 128 units, a multiplication and an addition each.
    flops = 10 * 4 * 128 * 128 * 2
    assert bundles.share_of_peak(flops, hot.cycles, V5E) == 1
    assert bundles.share_of_peak(flops, hot.cycles + 7, V5E) == 10 / 17


def block(start: int, length: int, depth: int, **more: object) -> bundles.Block:
    nothing = dict.fromkeys(bundles.UNITS.values(), 0.0)
    fields = dict(matmuls={}, mxu_cycles=0.0, units=nothing, copies=False, fills=0, spills=0)
    return bundles.Block(start=start, bundles=length, depth=depth, **(fields | more))


def test_a_step_inside_the_grid_counts_loops_of_copies_by_their_turns() -> None:
    hot = block(70, 100, 3, matmuls={"bf16": 1}, mxu_cycles=4.0)
    kernel = bundles.Compiled(
        "kernel",
        (
            block(0, 1000, 0),
            block(10, 500, 1),  # the grid's: not part of a step at depth 2
            block(20, 20, 2),
            block(40, 3, 3, copies=True),
            block(50, 5, 2, copies=True),  # at the step's own depth: once
            hot,
            block(200, 7, 2),
            block(210, 500, 1),
            block(300, 11, 2),  # another loop
        ),
    )
    assert kernel.overhead(hot, depth=2, copies=4) == 20 + 4 * 3 + 5 + 7


def test_hot_blocks_executed_together_add_up() -> None:
    blocks = bundles.parse(dumps.BUNDLES, dumps.UTILISATION, V5E)
    both = bundles.together((blocks[2], blocks[2]))
    assert both.cycles == 20 and both.matmuls == {"bf16": 4, "f32": 2} and both.units["VST"] == 2


def test_dumps_are_read_by_kernel(tmp_path: Path) -> None:
    dumps.dump(tmp_path)
    dumps.dump(
        tmp_path, "copy.1", dumps.BUNDLES.replace("vmatmul", "vadd")
    )  # no matrix product: not ours
    (kernel,) = bundles.read_dumps(tmp_path, V5E)
    assert kernel.name == "jvp_kernel_" and len(kernel.hot) == 1


def test_a_dump_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="12 bundles but 13 rows"):
        bundles.parse(
            dumps.BUNDLES.replace("   0xc   :  { %12 = sfence }\n", ""), dumps.UTILISATION, V5E
        )
    with pytest.raises(ValueError, match="lacks .'SALU'"):
        bundles.parse(dumps.BUNDLES, dumps.UTILISATION.replace("SALU", "scalar"), V5E)
    dumps.dump(tmp_path)
    next(tmp_path.glob("*utilization.txt")).unlink()
    with pytest.raises(ValueError, match="0 tables of utilisation"):
        bundles.read_dumps(tmp_path, V5E)


@pytest.mark.parametrize("chip", chips.CHIPS.values(), ids=lambda chip: chip.name)
def test_a_published_peak_fits_the_matrix_units(chip: chips.Chip) -> None:
    assert 1.4e9 < chip.clock_hz < 2.4e9
    assert chip.name in aot.TOPOLOGIES
