"""Estimates the speed of kernels: compiles ours and the public ones, prints one table.

    python -m benchmarks.kernels --tpu v5e v5p v6e tpu7x
    python -m benchmarks.kernels --tpu v6e --model qwen2.5-7b --kernels packed splash-1024

No TPU is needed: libtpu compiles for chips that are not there (`pallas_kernels.aot`) and writes
down the instructions it chose, which `bundles` counts. The programs are in
`ours` and `public`, the compiling in `children`; docs/performance.md has the expected table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.kernels.children import PROGRAMS, Failure, compile_here, compile_on
from benchmarks.kernels.ours import OURS
from benchmarks.kernels.programs import MODELS
from benchmarks.kernels.public import PUBLIC
from benchmarks.kernels.rows import Row, compare
from benchmarks.kernels.table import HEADER, table
from notepad_jax.planner import chips
from pallas_kernels import aot


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
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
        "example: python -m benchmarks.kernels --tpu v6e --kernels splash-512 splash-1024",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    several = dict(nargs="+", metavar="NAME")
    parser.add_argument(
        "--tpu", **several, default=list(chips.CHIPS),
        help=f"chips, of {', '.join(chips.CHIPS)} (default: all)",
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
        ("--tpu", options.tpu, chips.CHIPS),
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
        for outcome in compile_on(chip, list(jobs), options.keep_dumps, say):
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
