"""A wheel has all that the program opens, and runs from an empty folder without JetStream."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from notepad_jax.starter.synthetic import make_tasks

pytestmark = pytest.mark.slow  # a quick start in processes of its own
ROOT = Path(__file__).parents[1]
SOURCES = ("notepad_jax", "pallas_kernels", "configs", "data")
TINY = (
    "--config.steps=1",
    "--config.data.tokens=512",
    "--config.data.questions=2",
    "--config.rollout.documents=2",
    "--config.rollout.group_size=4",
    "--config.rollout.max_rounds=1",
    "--config.engine.slots=16",
    "--config.engine.pages=96",
    "--config.grpo.row_length=512",
    "--config.grpo.micro_batch_rows=1",
)
READ = (
    "--config.evaluate.lengths=512",
    "--config.evaluate.questions=4",
    "--config.evaluate.chunk_size=256",
)


def done(words: list, folder: Path, **env: str) -> str:
    left = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in words], cwd=folder, env=left | env, timeout=400,
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, which a build leaves its own files in."""
    if int(importlib.metadata.version("setuptools").split(".")[0]) < 77:
        pytest.skip("building needs setuptools 77 or newer")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "-m pip wheel . --no-deps --no-build-isolation --no-index --quiet --wheel-dir"
    done([sys.executable, *build.split(), out], source)
    (made,) = out.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The folder of programs of an environment with the wheel, and no JetStream.

    What it depends on is that of this environment; nothing is downloaded.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    there = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "there.pth").write_text("\n".join(there) + "\n")
    (site / "jetstream.py").write_text("raise ImportError('not installed')\n")
    programs = home / "bin"
    install = "install --no-deps --no-index --quiet"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python"]
    done([*pip, *install.split(), wheel], home)
    return programs


def test_a_wheel_has_every_file_of_its_packages_and_no_other(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    packages = [p for name in SOURCES[:3] for p in (ROOT / name).rglob("*")]
    starter = [
        f"notepad_jax/starter/policy/{path.name}" for path in (ROOT / "data" / "starter").iterdir()
    ]
    there = {str(path.relative_to(ROOT)) for path in packages if path.is_file()}
    assert names == {n for n in there if "__pycache__" not in n}.union(starter)


def test_it_runs_from_an_empty_folder(installed, tmp_path):
    program = installed / "notepad-jax"
    cache = {"NOTEPAD_JAX_CACHE": str(tmp_path / "cache")}
    folder = tmp_path / "empty"
    folder.mkdir()
    where = "import notepad_jax, configs; print(notepad_jax.__file__, configs.__file__)"
    places = done([installed / "python", "-c", where], folder).split()
    assert all(str(installed.parent) in place for place in places)

    measured = ("--config.evaluate.lengths_before=512", *READ)
    words = ["quickstart", "--json", "--name", "q", *TINY, *measured]
    outcome = json.loads(done([program, *words], folder, **cache))
    assert (folder / outcome["report"]).is_file() and outcome["after"][0]["n"] == 4

    task = make_tasks(5, tokens=512, questions=1, unanswerable=0.0, two_hop=0.0)[0]
    (folder / "story.txt").write_text("".join(task.document.pieces()))
    for policy in ((), ("--policy", "runs/q/hf")):
        words = ["ask", "--json", *policy, "story.txt", task.question]
        assert json.loads(done([program, *words], folder, **cache))["tokens"] == 512
    found = json.loads(done([program, "eval", "--json", "--name", "e", *READ], folder, **cache))
    assert found["by_length"][0]["n"] == 4
    assert sorted(path.name for path in folder.iterdir()) == ["runs", "story.txt"]
