"""All or nothing: kills, full disks and failures leave the old folder, or none."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from tensor_files import contents, tensors, write

from notepad_jax.checkpoint.hf import folder_swap, writing
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.storage import StoreProblem

ROOT = Path(__file__).parents[3]


def test_overwriting_is_asked_for_and_complete(tmp_path):
    write(tmp_path / "out", tensors(0), 100)
    before = contents(tmp_path / "out")
    with pytest.raises(StoreProblem, match="is not empty; choose another folder, or --overwrite"):
        write(tmp_path / "out", tensors(1))
    with pytest.raises(ZeroDivisionError):
        write(tmp_path / "out", tensors(1), overwrite=True, wrote=lambda t: 1 // (t.name != "c"))
    assert contents(tmp_path / "out") == before and os.listdir(tmp_path) == ["out"]
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_swapping_works_without_the_exchanging_rename(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_swap, "_exchange", lambda one, other: False)
    write(tmp_path / "out", tensors(0), 100)
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert sorted(contents(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path) == ["out"]


def test_an_empty_folder_is_filled_and_others_are_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", tensors())
    Safetensors.open(tmp_path / "empty")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"policy": "data/starter"}')
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(StoreProblem, match="choose another folder"):
            write(tmp_path / "thesis", tensors(), overwrite=overwrite)
        with pytest.raises(StoreProblem, match="choose another folder"):
            write(tmp_path / "run", tensors(), overwrite=overwrite)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreProblem, match="exists and is no folder"):
        write(tmp_path / "file", tensors())
    with pytest.raises(StoreProblem, match="cannot be written"):
        write(tmp_path / "file" / "below", tensors())
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "run", "thesis"]


def test_a_full_disk_is_found_out_before_or_during(tmp_path, monkeypatch):
    usage = folder_swap.shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folder_swap.shutil, "disk_usage", lambda path: usage._replace(free=300))
        with pytest.raises(StoreProblem, match="the disk is full: it needs .* are free; nothing"):
            write(tmp_path / "out", tensors())
    assert os.listdir(tmp_path) == []

    def fills(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writing, "_to_disk", fills)
    with pytest.raises(StoreProblem, match="the disk is full"):
        write(tmp_path / "out", tensors())
    assert os.listdir(tmp_path) == []


KILLED = """
import os, signal, sys
sys.path[:0] = ["tests"]
import tensor_files as t

def die(tensor):
    if tensor.name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

t.write(sys.argv[1], t.tensors(1), 100, overwrite=True, wrote=die)
"""


@pytest.mark.parametrize("tensor", ["b", "d"])  # after the first part, and after the last
def test_a_killed_export_leaves_the_old_folder(tmp_path, tensor):
    write(tmp_path / "out", tensors(0), 100)
    before = contents(tmp_path / "out")
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "out"), tensor],
        cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == -signal.SIGKILL
    assert contents(tmp_path / "out") == before
    (left,) = set(os.listdir(tmp_path)) - {"out"}
    assert left.startswith(".out.")  # hidden, and gone with the next export
    write(tmp_path / "out", tensors(1), overwrite=True)
    assert os.listdir(tmp_path) == ["out"]
    np.testing.assert_array_equal(Safetensors.open(tmp_path / "out").read("a"), tensors(1)["a"])


def test_an_export_that_still_runs_is_not_swept_away(tmp_path):
    with folder_swap.new_folder(tmp_path / "out") as running:
        write(tmp_path / "out", tensors())
        assert running.is_dir()
        with pytest.raises(StoreProblem, match="not empty"):
            # The slower of two does not replace the faster one's export.
            folder_swap._refuse_target(tmp_path / "out", overwrite=False)
        (tmp_path / "out" / "config.json").unlink()
        (tmp_path / "out" / "model.safetensors").unlink()
    assert os.listdir(tmp_path) == ["out"]
