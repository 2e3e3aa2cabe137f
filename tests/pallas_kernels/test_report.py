"""The report's arithmetic, on a dump small enough to count by hand, and its command line."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from pallas_kernels import aot, estimate, report

V5E = estimate.CHIPS["v5e"]

# One loop. Scalar work with a DMA and a branch (1 + 1 + 1 + 4 delay slots), a hot block of two
# bundles, of which one goes over two lines, and a block that only stores.
BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %5 = dma.hbm_to_vmem [thread:$0]  %s2, /*size_in_granules=*/4096 }
   0x3   : > { %6 = sbr.rel (%p1) target = $region4 }
   0x4   : > { %s3 = sadd.s32 1, %s2 }
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vmatmul.bf16.vlgmr.msra.gmra.mxu1 %v0 }
   0x9   : > { %v3 = vmatmul.mubr.f32.gmra.mxu0 %v0  ;;  %v4 = vadd.f32 %v1, %v2 /* window:
second_minor_factor: 1 */ ;; %9 = vst [vmem:#allocation2_spill] %v4 }
   0xa PF: > { %10 = vst [vmem:%s1] %v4 } /* Start/End empty region 4 */
   0xb   : > { %11 = vst [vmem:%s2] %v4 }
   0xc   :  { %12 = sfence }
"""
UTILISATION = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0
2 0 0 0 0 0 0 0 0 0
1 0 1 0 0 3 2 1 1 0
0 0 0 0 0 0 0 1 0 0
0 0 0 0 0 0 0 1 0 0
0 0 0 0 0 0 0 0 0 0
"""


def dump(directory: Path, name: str = "jvp_kernel_.3", bundles: str = BUNDLES) -> None:
    stem = directory / f"1795-{name}"
    Path(f"{stem}-03-final_bundles.txt").write_text(bundles)
    Path(f"{stem}-02-schedule-analysis_final_bundles.txt").write_text("not a list of bundles")
    table = Path(f"{stem}-01-final_hlo-static-per-bundle-utilization.txt")
    table.write_text(UTILISATION)


# ---------------------------------------------------------------- estimate


def test_a_hot_block_counted_by_hand() -> None:
    blocks = estimate.parse(BUNDLES, UTILISATION, V5E)
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
    kernel = estimate.Compiled("kernel", estimate.parse(BUNDLES, UTILISATION, V5E))
    (hot,) = kernel.hot
    assert kernel.overhead(hot, depth=1, copies=1) == 7
    assert kernel.spills == 1
    # 10 cycles of four 128 x 128 units, a multiplication and an addition each.
    flops = 10 * 4 * 128 * 128 * 2
    assert estimate.share_of_peak(flops, hot.cycles, V5E) == 1
    assert estimate.share_of_peak(flops, hot.cycles + 7, V5E) == 10 / 17


def block(start: int, bundles: int, depth: int, **more: object) -> estimate.Block:
    nothing = dict.fromkeys(estimate.UNITS.values(), 0.0)
    fields = dict(matmuls={}, mxu_cycles=0.0, units=nothing, copies=False, fills=0, spills=0)
    return estimate.Block(start=start, bundles=bundles, depth=depth, **(fields | more))


def test_a_step_inside_the_grid_counts_loops_of_copies_by_their_turns() -> None:
    hot = block(70, 100, 3, matmuls={"bf16": 1}, mxu_cycles=4.0)
    kernel = estimate.Compiled(
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
    blocks = estimate.parse(BUNDLES, UTILISATION, V5E)
    both = estimate.together((blocks[2], blocks[2]))
    assert both.cycles == 20 and both.matmuls == {"bf16": 4, "f32": 2} and both.units["VST"] == 2


def test_dumps_are_read_by_kernel(tmp_path: Path) -> None:
    dump(tmp_path)
    dump(tmp_path, "copy.1", BUNDLES.replace("vmatmul", "vadd"))  # no matrix product: not ours
    (kernel,) = estimate.read_dumps(tmp_path, V5E)
    assert kernel.name == "jvp_kernel_" and len(kernel.hot) == 1


def test_a_dump_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="12 bundles but 13 rows"):
        estimate.parse(BUNDLES.replace("   0xc   :  { %12 = sfence }\n", ""), UTILISATION, V5E)
    with pytest.raises(ValueError, match="lacks .'SALU'"):
        estimate.parse(BUNDLES, UTILISATION.replace("SALU", "scalar"), V5E)
    dump(tmp_path)
    next(tmp_path.glob("*utilization.txt")).unlink()
    with pytest.raises(ValueError, match="0 tables of utilisation"):
        estimate.read_dumps(tmp_path, V5E)


@pytest.mark.parametrize("chip", estimate.CHIPS.values(), ids=lambda chip: chip.name)
def test_a_published_peak_fits_the_matrix_units(chip: estimate.Chip) -> None:
    assert 1.4e9 < chip.clock_hz < 2.4e9
    assert chip.name in aot.TOPOLOGIES


# ---------------------------------------------------------------- rows


def program(**part: object) -> report.Program:
    fields = dict(family="family", pattern="kernel", flops=10 * 131072, hbm_bytes=0)
    return report.Program(max, (), (report.Part(**(fields | part)),))


def rows(directory: Path, name: str = "packed", **part: object) -> list[report.Row]:
    return report.rows_of(program(**part), "qwen2.5-7b", name, "v5e", directory, seconds=1.5)


def test_a_row(tmp_path: Path) -> None:
    dump(tmp_path)
    (row,) = rows(tmp_path)
    assert (row.bundles, row.hot_cycles, row.step_cycles) == (2, 10, 17)
    assert (row.peak_in_block, row.peak_in_step, row.limit) == (1, 10 / 17, "MXU")
    # 3 executions a step, three times the work: the same in the block, less overhead each.
    (row,) = rows(tmp_path, flops=30 * 131072, repeats=3)
    assert (row.hot_cycles, row.step_cycles, row.peak_in_block) == (30, 37, 1)


def test_dma_is_the_limit_where_it_takes_longer_than_the_step(tmp_path: Path) -> None:
    dump(tmp_path)
    (row,) = rows(tmp_path, hbm_bytes=round(20 * V5E.hbm_bytes_per_cycle))
    assert (
        row.limit == "dma"
        and row.dma_cycles == pytest.approx(20, rel=1e-3)
        and row.hbm_in_step == 1
    )
    (row,) = rows(tmp_path, hbm_bytes=round(8.5 * V5E.hbm_bytes_per_cycle))
    assert row.limit == "MXU" and row.hbm_in_step == pytest.approx(0.5, rel=1e-3)


def test_alternatives_get_a_row_each_the_dearest_first(tmp_path: Path) -> None:
    store = "   0xb   : > { %11 = vst [vmem:%s2] %v4 }"
    assert store in BUNDLES
    cheap = BUNDLES.replace(store, "   0xb PF: > { %v5 = vmatmul.bf16.gmra.mxu0 %v0 }")
    dump(tmp_path, bundles=cheap)
    masked, full = rows(tmp_path, alternatives=("masked", "full"))
    assert (masked.kernel, full.kernel) == ("packed masked", "packed full")
    assert (masked.hot_cycles, full.hot_cycles) == (10, 4)
    (masked,) = rows(tmp_path, alternatives=("masked", ""))
    assert masked.variant == "masked"
    with pytest.raises(ValueError, match="has 2 blocks with matrix products where .* has 1"):
        rows(tmp_path, alternatives=("full",))


def test_a_kernel_that_is_not_in_the_dump_is_missed(tmp_path: Path) -> None:
    dump(tmp_path)
    with pytest.raises(ValueError, match="0 kernels match 'dq', not 1; there are: jvp_kernel_"):
        rows(tmp_path, pattern="dq")


def test_ours_is_compared_with_the_best_public_kernel(tmp_path: Path) -> None:
    dump(tmp_path)
    ours, slow, fast = (
        rows(tmp_path, name, flops=flops * 131072)[0]
        for name, flops in (("packed", 9), ("splash-512", 3), ("splash-1024", 6))
    )
    compared = report.compare([ours, slow, fast])
    assert [row.versus for row in compared] == ["splash-1024", "", ""]
    assert compared[0].ratio == pytest.approx(1.5)
    failure = report.Failure("qwen2.5-7b", "logprob", "v5e", "no memory")
    text = report.table(compared, ["446 blocks"], [failure])
    assert "ESTIMATE" in text and "446 blocks" in text
    assert "FAILED qwen2.5-7b v5e logprob: no memory" in text
    at = [line.split()[3] for line in text.splitlines() if line.startswith("qwen2.5-7b")]
    assert at == ["packed", "splash-512", "splash-1024"]
    assert "1.50x splash-1024" in text


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--tpu", "v4"], "--tpu: 'v4' is not one of v5e, v5p, v6e, tpu7x"),
        (["--model", "gpt"], "--model: 'gpt' is not one of qwen2.5-7b, qwen3-30b-a3b"),
        (["--kernels", "flash"], "--kernels: 'flash' is not one of packed, paged-mixed"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_right_ones(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture
) -> None:
    assert report.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(says) and error.count("\n") == 1


def test_without_libtpu_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert report.main(["--tpu", "v5e"]) == 2
    error = capsys.readouterr().err
    assert "notepad-jax[aot]" in error and "x86_64 Linux only" in error and error.count("\n") == 1


def test_a_compiler_that_crashes_costs_one_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    child = """
import json, os, sys
for model, name in json.loads(sys.argv[1]):
    if name == "paged-mixed":
        print("F0000 check failed", file=sys.stderr, flush=True)
        os._exit(9)
    print(json.dumps({"reason": "RuntimeError: as planned"}), flush=True)
"""
    monkeypatch.setattr(
        report,
        "_child_command",
        lambda chip, jobs, dumps, keep: [sys.executable, "-c", child, json.dumps(jobs)],
    )
    monkeypatch.setattr(aot, "missing_compiler", lambda: "")
    names = ["packed", "paged-mixed", "logprob"]
    command = ["--tpu", "v5e", "--model", "qwen2.5-7b", "--json", "--kernels", *names]
    assert report.main(command) == 1
    output = capsys.readouterr()
    reasons = [failure["reason"] for failure in json.loads(output.out)["failures"]]
    assert reasons[0] == reasons[2] == "RuntimeError: as planned"
    assert "code 9" in reasons[1] and "F0000 check failed" in reasons[1]
    assert "[3/3] v5e qwen2.5-7b logprob" in output.err


@pytest.mark.skipif(aot.missing_compiler() != "", reason=aot.missing_compiler())
def test_one_kernel_from_the_compiler_to_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["--tpu", "v5e", "--model", "qwen2.5-7b", "--kernels", "paged-decode"]
    assert report.main([*command, "--json", "--keep-dumps", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "ESTIMATE" in found["note"]
    for row in found["rows"]:
        assert row["limit"] == "dma"  # a decode that waits for anything else is too slow
        assert 0 < row["bundles"] < row["step_cycles"] and row["mxu_cycles"] > 0
    kept = tmp_path / "v5e" / "qwen2.5-7b" / "paged-decode"
    assert list(kept.glob("*paged_decode*-final_bundles.txt"))
