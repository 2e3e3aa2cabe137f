"""The folder of compiled programs: whose it is, when there is none, and what is cleared from it."""

import logging
import os
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from notepad_jax.setup import compiled

OWN = ("jax_compilation_cache_dir", "jax_enable_compilation_cache", *compiled.SETTINGS)


@pytest.fixture(autouse=True)
def nobody_decided(monkeypatch, tmp_path):
    """jax as it is without variables; nothing is compiled before its settings are back."""
    before = {name: getattr(jax.config, name) for name in OWN}
    for name in OWN:
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.delenv(compiled.SWITCH, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", -1)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def chosen() -> str | None:
    return jax.config.jax_compilation_cache_dir


def test_by_default_programs_are_kept_among_the_users_caches(tmp_path):
    compiled.keep()
    assert chosen() == str(tmp_path / ".cache" / "notepad_jax" / "xla")
    assert Path(chosen()).stat().st_mode & 0o777 == 0o700  # what lies there is run
    assert jax.config.jax_compilation_cache_max_size == 2**30
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


@pytest.mark.parametrize(
    ("variable", "value", "folder"),
    [
        ("XDG_CACHE_HOME", "{0}/caches", "caches/notepad_jax/xla"),
        ("XDG_CACHE_HOME", "relative", ".cache/notepad_jax/xla"),
        (compiled.SWITCH, "{0}/mine", "mine"),
        (compiled.SWITCH, "~/mine", "mine"),
        (compiled.SWITCH, "here/mine", "here/mine"),
    ],
)
def test_the_folder_can_be_named(monkeypatch, tmp_path, variable, value, folder):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(variable, value.format(tmp_path))
    compiled.keep()
    assert chosen() == str(tmp_path / folder) and Path(chosen()).is_dir()


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_it_can_be_switched_off(monkeypatch, tmp_path, word):
    monkeypatch.setenv(compiled.SWITCH, word)
    compiled.keep()
    assert chosen() is None and not list(tmp_path.iterdir())


def test_who_has_set_jaxs_own_cache_keeps_it(monkeypatch, tmp_path):
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path / "ours"))
    jax.config.update("jax_compilation_cache_dir", "theirs")
    compiled.keep()
    assert chosen() == "theirs" and jax.config.jax_compilation_cache_max_size == -1
    assert not list(tmp_path.iterdir())


def test_jaxs_own_variables_win_over_our_settings(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "5000000")
    jax.config.update("jax_compilation_cache_max_size", 5_000_000)  # as jax reads it at its start
    compiled.keep()
    assert chosen() and jax.config.jax_compilation_cache_max_size == 5_000_000


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("{0}/file/inside", "Not a directory"),
        ("{0}/file", "File exists"),
        ("gs://bucket/folder", "JAX_COMPILATION_CACHE_DIR takes buckets"),
        ("~nobody-of-this-name/folder", "home"),
    ],
)
def test_a_folder_that_cannot_be_used_costs_one_line(monkeypatch, tmp_path, caplog, named, says):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(compiled.SWITCH, named.format(tmp_path))
    with caplog.at_level(logging.WARNING):
        compiled.keep()
        compiled.keep()
    (record,) = caplog.records
    assert says in record.getMessage() and "NOTEPAD_JAX_CACHE" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert chosen() is None and not jax.config.jax_enable_compilation_cache


def test_nothing_is_put_on_a_full_disk(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    compiled.keep()
    assert "a disk with 1 free bytes of 67,108,864" in caplog.text and chosen() is None


def test_entries_whose_writer_was_killed_are_cleared(monkeypatch, tmp_path):
    """jax would neither read nor replace them, nor write anything else beside them."""
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    for name in ("whole-cache", "whole-atime", "cut-cache", "note.txt"):
        (tmp_path / name).write_bytes(b"12345678")
    compiled.keep()
    left = {name for name in os.listdir(tmp_path) if not name.startswith(".")}
    assert left == {"whole-cache", "whole-atime", "note.txt"}


def test_a_cache_without_a_bound_has_no_stamps_and_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv(compiled.SWITCH, str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "-1")
    (tmp_path / "whole-cache").write_bytes(b"12345678")
    compiled.keep()
    assert chosen() and (tmp_path / "whole-cache").exists()


def test_who_watches_is_told_while_jax_compiles_and_no_longer():
    busy = compiled.watched()
    before, seen = busy.seconds, []

    def traced(x):
        seen.append(busy())
        time.sleep(0.01)
        if x.shape == (7,):
            raise ValueError("no seven")
        return x + 1

    assert busy() == ""
    jax.jit(traced).lower(np.zeros(5))
    with pytest.raises(ValueError, match="no seven"):
        jax.jit(traced).lower(np.zeros(7))
    assert seen == ["compiling"] * 2 and busy() == ""
    spent = busy.seconds - before
    assert spent > 0.02
    time.sleep(0.01)
    assert busy.seconds - before == spent
