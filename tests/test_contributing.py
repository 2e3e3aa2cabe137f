"""What CONTRIBUTING.md, the hooks and the workflow name is there."""

import os
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tests import budget

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PROGRAMS = ("pytest", "pip", "pre-commit")


def test_every_file_that_is_named_exists():
    folders = "notepad_jax|pallas_kernels|configs|docs|tests"
    named = re.findall(rf"[`(]((?:{folders})/[\w/.]*)", PAGE)
    assert len(named) > 30 and [name for name in named if not (ROOT / name).exists()] == []


def test_every_name_stands_in_the_file_it_is_said_to_stand_in():
    told = re.findall(r"`([A-Z_]+)`(?: and `([A-Z_]+)`)? of `([\w/]+\.py)`", PAGE)
    assert len(told) >= 7
    for *names, file in told:
        text = (ROOT / file).read_text(encoding="utf-8")
        for name in filter(None, names):
            assert re.search(rf"^{name}\b.*=", text, re.MULTILINE), f"{name} in {file}"


def test_every_room_with_tests_is_in_the_table():
    rooms = {
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.is_dir()
        and any(path.glob("test_*.py"))
        and (ROOT / "notepad_jax" / path.name).is_dir()
    }
    assert {room for room in rooms if f"`tests/{room}`" not in PAGE} <= {"starter"}


def test_every_command_can_be_given():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    blocks = re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert len(lines) >= 10
    for first, *rest in lines:
        if first == "make":
            assert rest[0] in targets
        elif first == "export":
            name, _, flags = rest[0].partition("=")
            assert name == "XLA_FLAGS" and set(flags.split()) <= set(_test_flags().split())
        else:
            assert first.startswith(".venv/bin/") and PROGRAMS.count(_program(first, rest)) == 1
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests/"))


def _program(first: str, rest: list[str]) -> str:
    return rest[1] if first.endswith("/python") else first.removeprefix(".venv/bin/")


def _test_flags() -> str:
    (flags,) = re.findall(r"^TEST_FLAGS := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    return flags


def test_the_workflow_runs_what_ci_runs():
    yaml = pytest.importorskip("yaml")
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    (command,) = [step["run"] for step in job["steps"] if "run" in step]
    assert command == ".ci/run" and os.access(ROOT / command, os.X_OK)


def test_the_hooks_use_the_tools_of_the_environment():
    yaml = pytest.importorskip("yaml")
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"  # nothing is downloaded
    for hook in repo["hooks"]:
        assert hook["entry"].startswith(".venv/bin/") and hook["language"] == "system"
        words = hook["entry"].split()
        assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))


def test_one_file_says_what_a_test_that_needs_libtpu_is():
    """`make test` does not install it: skipped and not slow, CI would run it nowhere."""
    skipped = re.compile(r"skipif\(\s*aot\.missing_compiler")
    files = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in files if skipped.search(path.read_text(encoding="utf-8"))] == [
        "tpu_compiler.py"
    ]


def test_no_module_of_tests_hides_a_package():
    """jax imports libtpu where it looks for TPUs, and had found tests/libtpu.py."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    ours = {path.stem for folder in options["pythonpath"][1:] for path in (ROOT / folder).iterdir()}
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    theirs = {name.lower().replace("-", "_") for name in pinned} | sys.stdlib_module_names
    assert "libtpu" in theirs and ours & theirs == set()


@pytest.mark.slow
def test_what_is_too_much_is_said(tmp_path):
    for package in budget.PACKAGES:
        (tmp_path / package).mkdir()
    text = '"""Says what it is."""\n\n# A comment.\nx = (\n    1\n)\n'
    assert budget.code_lines(text) == 3
    assert budget.code_lines('def f():\n    """Nothing."""\n    return "a"\n') == 2
    (tmp_path / "notepad_jax" / "long.py").write_text(text + "\n" * budget.LONGEST)
    (line,) = budget.problems(tmp_path)
    assert (
        line
        == f"notepad_jax/long.py has {6 + budget.LONGEST} lines, and {budget.LONGEST} are meant"
    )
    assert list(budget.problems()) == []
