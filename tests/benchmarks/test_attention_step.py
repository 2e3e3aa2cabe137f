"""The estimate of a step's attention: blocks counted by hand, and time as their sum."""

import dataclasses

import pytest

from benchmarks import attention_step
from benchmarks.kernels.ours import row_of_a_group
from benchmarks.kernels.rows import Row
from notepad_jax.planner import chips


def test_blocks_by_hand() -> None:
    """A block of prefix and two tails of one: the diagonals, and the prefix seen by both."""
    kv_end = row_of_a_group(4, [4, 4])
    assert kv_end.tolist() == [12] * 4 + [8] * 4 + [12] * 4
    assert attention_step.blocks_of(kv_end, 4, 4) == {"masked": 3, "full": 2}


def test_time_is_cycles_times_blocks_times_heads_over_cores() -> None:
    plain = {field.name: 0 for field in dataclasses.fields(Row)}
    row = lambda family, variant, step, dma: Row(  # noqa: E731
        **plain | dict(family=family, variant=variant, step_cycles=step, dma_cycles=dma)
    )
    rows = [row("forward", "masked", 30, 5), row("forward", "full", 10, 5)]
    rows += [row("backward", "masked", 40, 5), row("backward", "full", 20, 50)]  # 50: of copying
    for chip, kv_heads in (("v6e", 4), ("v5p", 2)):  # of a core; v5p's chip has two cores
        found = attention_step.milliseconds(chip, rows, {"masked": 3, "full": 2})
        cycle = 1e3 / chips.CHIPS[chip].clock_hz
        assert found["forward"] == pytest.approx(kv_heads * (3 * 30 + 2 * 10) * cycle)
        assert found["backward"] == pytest.approx(kv_heads * (3 * 40 + 2 * 50) * cycle)


def test_an_unknown_chip_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert attention_step.main(["--tpu", "v4"]) == 2
    assert "'v4' is not one of v5e, v5p, v6e, tpu7x" in capsys.readouterr().err
