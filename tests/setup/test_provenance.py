"""A page says which code made it, and never names the commit of somebody else's repository."""

import re
import shutil
import subprocess

import pytest

import notepad_jax
from notepad_jax.setup import provenance


def git(folder, *words):
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *words],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The package within somebody's repository, which does not track it."""
    package = tmp_path / "env" / "notepad_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "own.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "own.py")
    git(tmp_path, "commit", "-q", "-m", "own")
    monkeypatch.setattr(notepad_jax, "__file__", str(package / "__init__.py"))
    return tmp_path


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_checkout_tells_its_commit_and_an_installation_its_version(installed):
    version = f"version {notepad_jax.__version__}"
    assert provenance.commit() == version
    git(installed, "add", "env")
    git(installed, "commit", "-q", "-m", "now it is a checkout")
    assert re.fullmatch("[0-9a-f]{7,}", provenance.commit())
    (installed / "own.py").write_text("changed")
    assert provenance.commit().endswith(" and changes")


def test_without_git_the_version_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == f"version {notepad_jax.__version__}"


def test_the_hardware_is_named_where_the_numbers_are_ours():
    told = provenance.origin([])
    assert re.match(r"\d+ cores? of \S|\d+ x \S", told.hardware)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", told.date)
    assert provenance.origin([], here=False).hardware == ""


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("fpu avx2 avx512f", "AMD EPYC, AVX-512"),
        ("fpu avx2", "AMD EPYC, AVX2"),
        ("asimd", "AMD EPYC"),
    ],
)
def test_processors_of_one_name_are_told_apart(monkeypatch, flags, told):
    text = f"model name\t: AMD EPYC\nflags\t\t: {flags}\n"
    monkeypatch.setattr(provenance.Path, "read_text", lambda self, encoding: text)
    assert provenance.cpu() == told
