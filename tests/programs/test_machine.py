"""What a process asks of jax before it begins."""

import jax
import pytest

from notepad_jax.programs import machine

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
    monkeypatch.setattr(machine, "CHIPS", chips)
    monkeypatch.setattr(machine, "entry_points", lambda group: plugins)
    before = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", chosen)
        machine.without_chips()
        assert jax.config.jax_platforms == asked
    finally:
        jax.config.update("jax_platforms", before)
