"""What a process asks of jax before it begins."""

import gc
import os

import jax
import pytest

from notepad_jax.setup import process
from pallas_kernels import aot

NONE, CHIP = ("/dev/no-such-chip*",), ("/dev/null",)


@pytest.mark.parametrize(
    "chosen, plugins, chips, asked",
    [
        (None, (), NONE, "cpu"),
        (None, (), CHIP, None),  # jax finds out itself
        (None, ("cuda",), NONE, None),
        ("tpu,cpu", (), NONE, "tpu,cpu"),
    ],
)
def test_where_nothing_but_cpus_can_be_found_nothing_else_is_looked_for(
    chosen, plugins, chips, asked, monkeypatch
):
    """libtpu, which `[aot]` brings to compile with, prints five lines where it misses chips."""
    monkeypatch.setattr(process, "CHIPS", chips)
    monkeypatch.setattr(process, "entry_points", lambda group: plugins)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", chosen)
        process.without_chips()
        assert jax.config.jax_platforms == asked
    finally:
        jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(
    ("libtpu", "said", "then"),
    [
        ("0.0.42.1", "", f"{aot.SMALL_TILES}=false"),
        ("0.0.42.1", "--other=1", f"--other=1 {aot.SMALL_TILES}=false"),
        ("0.0.42.1", f"{aot.SMALL_TILES}=true", f"{aot.SMALL_TILES}=true"),
        ("0.0.43", "--other=1", "--other=1"),
    ],
)
def test_the_pinned_libtpu_is_told_once_to_keep_small_tiles(monkeypatch, libtpu, said, then):
    """One that does not know a flag ends the process, so others are told nothing."""
    monkeypatch.setattr(aot.metadata, "version", lambda name: libtpu)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", said)
    for _ in range(2):
        aot.keep_small_tiles()
        assert os.environ["LIBTPU_INIT_ARGS"] == then


@pytest.mark.parametrize(("before", "then"), [(700, 5_000), (9_000, 9_000), (0, 0)])
def test_garbage_is_looked_for_rarely_and_never_where_a_user_said_so(before, then):
    said = gc.get_threshold()
    try:
        gc.set_threshold(before, 11, 12)
        process.prepared(None)
        assert gc.get_threshold() == (then, 11, 12)
    finally:
        gc.set_threshold(*said)
