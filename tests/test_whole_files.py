"""Files that are there whole or not at all, also when the machine fails: bytes before names.

What a machine that fails remembers cannot be tried here. What can be is the order: a file is given
its name by a rename, and before that its bytes have been waited for (fsync).
"""

import asyncio
import itertools
import os

import pytest

from notepad_jax.checkpoint import best, manifest
from notepad_jax.data import files
from notepad_jax.serve.documents.store import Files
from notepad_jax.telemetry.identity import write_json, write_sealed
from notepad_jax.types import Task, TextDocument


@pytest.fixture
def named(monkeypatch):
    """(name, were its bytes on disk) of every file that was renamed."""
    synced, found = set(), []
    fsync = os.fsync

    def waited(handle):
        fsync(handle)
        at = os.fstat(handle)
        synced.add((at.st_ino, at.st_size))

    def renaming(rename):
        def renamed(source, target):
            at = os.stat(source)
            found.append((os.path.basename(target), (at.st_ino, at.st_size) in synced))
            rename(source, target)

        return renamed

    monkeypatch.setattr(os, "fsync", waited)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    return found


def upload(folder):
    with Files(folder) as kept:
        coming = kept.arriving(10)
        asyncio.run(coming.add(b"abc"))
        asyncio.run(coming.end())
        asyncio.run(kept.keep(coming, "a.txt", "a"))
        assert kept.get("a").bytes == 3


def build(folder):
    files.write(folder / "a.jsonl", [Task("1", "q", TextDocument("text"), ("a",), "s", "em")],
                itertools.repeat(1))  # fmt: skip


@pytest.mark.parametrize(
    ("write", "count"),
    [
        (lambda folder: write_json(folder / "a.json", {"a": 1}), 1),
        (lambda folder: write_sealed(folder / "a.json", {"a": 1}), 1),
        (lambda folder: best.mark(folder, best.Best(3, 0.5)), 1),
        (lambda folder: manifest.write(folder, b"{}"), 1),
        (build, 1),
        (upload, 2),  # its bytes, and the card that says whose they are
    ],
)
def test_a_name_is_given_to_bytes_that_are_on_disk(write, count, tmp_path, named):
    write(tmp_path)
    assert len(named) == count and all(there for _, there in named), named


def test_what_a_server_left_half_written_is_swept(tmp_path):
    with Files(tmp_path):
        pass
    place = next(path for path in tmp_path.rglob("*") if path.is_dir())
    (place / ("0" * 32 + ".part")).write_text("{")
    with Files(tmp_path):
        assert not list(tmp_path.rglob("*.part"))
