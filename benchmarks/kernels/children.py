"""One child process per chip does the compiling, because libtpu reads its flags once.

A compiler that crashes takes down one child and one kernel; another child does the rest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.kernels import bundles
from benchmarks.kernels.ours import OURS
from benchmarks.kernels.programs import MODELS
from benchmarks.kernels.public import PUBLIC
from benchmarks.kernels.rows import Row, rows_of
from pallas_kernels import aot

PROGRAMS = {**OURS, **PUBLIC}


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


def _child_environment(dumps: Path) -> dict[str, str]:
    flags = bundles.DUMP_FLAGS.format(directory=dumps)
    before = os.environ.get("LIBTPU_INIT_ARGS", "")
    return os.environ | aot.ENVIRONMENT | {"LIBTPU_INIT_ARGS": f"{before} {flags}".strip()}


def _child_command(
    chip: str, jobs: list[tuple[str, str]], dumps: Path, keep: Path | None
) -> list[str]:
    arguments = json.dumps([chip, jobs, str(dumps), str(keep) if keep else None])
    return [sys.executable, "-m", "benchmarks.kernels", "--child", arguments]


def compile_on(
    chip: str, jobs: list[tuple[str, str]], keep: Path | None, say: Callable[[str], None]
) -> Iterator[Success | Failure]:
    """Yields what became of each job; a child that dies loses one job, another does the rest."""
    while jobs:
        with tempfile.TemporaryDirectory(prefix="kernels-benchmark-") as directory:
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
