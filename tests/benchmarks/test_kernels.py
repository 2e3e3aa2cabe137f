"""The kernels' table and command line; what is read out of dumps is tested with the kernels."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from benchmarks.kernels import children, programs
from benchmarks.kernels.__main__ import main
from benchmarks.kernels.rows import Row, compare, rows_of
from benchmarks.kernels.table import table
from notepad_jax.planner import chips
from pallas_kernels import aot
from tests import tpu_compiler
from tests.benchmarks import dumps

V5E = chips.CHIPS["v5e"]


# ---------------------------------------------------------------- rows


def program(**part: object) -> programs.Program:
    fields = dict(family="family", pattern="kernel", flops=10 * 131072, hbm_bytes=0)
    return programs.Program(max, (), (programs.Part(**(fields | part)),))


def rows(directory: Path, name: str = "packed", **part: object) -> list[Row]:
    return rows_of(program(**part), "qwen2.5-7b", name, "v5e", directory, seconds=1.5)


def test_a_row(tmp_path: Path) -> None:
    dumps.dump(tmp_path)
    (row,) = rows(tmp_path)
    assert (row.bundles, row.hot_cycles, row.step_cycles) == (2, 10, 17)
    assert (row.peak_in_block, row.peak_in_step, row.limit) == (1, 10 / 17, "MXU")
    # 3 executions a step, three times the work: the same in the block, less overhead each.
    (row,) = rows(tmp_path, flops=30 * 131072, repeats=3)
    assert (row.hot_cycles, row.step_cycles, row.peak_in_block) == (30, 37, 1)


def test_dma_is_the_limit_where_it_takes_longer_than_the_step(tmp_path: Path) -> None:
    dumps.dump(tmp_path)
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
    assert store in dumps.BUNDLES
    cheap = dumps.BUNDLES.replace(store, "   0xb PF: > { %v5 = vmatmul.bf16.gmra.mxu0 %v0 }")
    dumps.dump(tmp_path, bundles=cheap)
    masked, full = rows(tmp_path, alternatives=("masked", "full"))
    assert (masked.kernel, full.kernel) == ("packed masked", "packed full")
    assert (masked.hot_cycles, full.hot_cycles) == (10, 4)
    (masked,) = rows(tmp_path, alternatives=("masked", ""))
    assert masked.variant == "masked"
    with pytest.raises(ValueError, match="has 2 blocks with matrix products where .* has 1"):
        rows(tmp_path, alternatives=("full",))


def test_a_kernel_that_is_not_in_the_dump_is_missed(tmp_path: Path) -> None:
    dumps.dump(tmp_path)
    with pytest.raises(ValueError, match="0 kernels match 'dq', not 1; there are: jvp_kernel_"):
        rows(tmp_path, pattern="dq")


def test_ours_is_compared_with_the_best_public_kernel(tmp_path: Path) -> None:
    dumps.dump(tmp_path)
    ours, slow, fast = (
        rows(tmp_path, name, flops=flops * 131072)[0]
        for name, flops in (("packed", 9), ("splash-512", 3), ("splash-1024", 6))
    )
    compared = compare([ours, slow, fast])
    assert [row.versus for row in compared] == ["splash-1024", "", ""]
    assert compared[0].ratio == pytest.approx(1.5)
    failure = children.Failure("qwen2.5-7b", "logprob", "v5e", "no memory")
    text = table(compared, ["446 blocks"], [failure])
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
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(says) and error.count("\n") == 1


def test_without_libtpu_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["--tpu", "v5e"]) == 2
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
        children,
        "_child_command",
        lambda chip, jobs, dumps, keep: [sys.executable, "-c", child, json.dumps(jobs)],
    )
    monkeypatch.setattr(aot, "missing_compiler", lambda: "")
    names = ["packed", "paged-mixed", "logprob"]
    command = ["--tpu", "v5e", "--model", "qwen2.5-7b", "--json", "--kernels", *names]
    assert main(command) == 1
    output = capsys.readouterr()
    reasons = [failure["reason"] for failure in json.loads(output.out)["failures"]]
    assert reasons[0] == reasons[2] == "RuntimeError: as planned"
    assert "code 9" in reasons[1] and "F0000 check failed" in reasons[1]
    assert "[3/3] v5e qwen2.5-7b logprob" in output.err


@tpu_compiler.needed
def test_one_kernel_from_the_compiler_to_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    command = ["--tpu", "v5e", "--model", "qwen2.5-7b", "--kernels", "paged-decode"]
    assert main([*command, "--json", "--keep-dumps", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "ESTIMATE" in found["note"]
    for row in found["rows"]:
        assert row["limit"] == "dma"  # a decode that waits for anything else is too slow
        assert 0 < row["bundles"] < row["step_cycles"] and row["mxu_cycles"] > 0
    kept = tmp_path / "v5e" / "qwen2.5-7b" / "paged-decode"
    assert list(kept.glob("*paged_decode*-final_bundles.txt"))
