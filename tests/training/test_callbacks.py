"""Callbacks see every step, may end the run, and are named where they fail."""

import numpy as np
import pytest

from notepad_jax.checkpoint.steps import steps_in
from notepad_jax.setup import configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import callbacks, train
from notepad_jax.training.callbacks import CallbackFailed, Stop, go_on
from tests.runs import SMALL


def stops(step, metrics):
    raise Stop


def fails(step, metrics):
    return metrics["no such thing"]


def test_all_are_called_with_metrics_of_their_own_and_any_may_end_the_run():
    seen = []

    def note(step, metrics):
        seen.append((step, dict(metrics)))
        metrics.clear()

    metrics = {"reward": 0.5}
    assert go_on([note, note], 3, metrics)
    assert seen == [(3, metrics)] * 2 and metrics == {"reward": 0.5}
    for end in (stops, lambda step, metrics: False):
        assert not go_on([note, end, note], 4, metrics)
    assert len(seen) == 6
    assert not go_on([lambda step, metrics: np.float64(0) > 1], 4, metrics)  # of numpy's numbers
    assert go_on([], 1, metrics) and go_on([lambda step, metrics: 0], 1, metrics)


def test_one_process_that_ends_the_run_ends_it_for_all(monkeypatch):
    monkeypatch.setattr(callbacks.hosts, "count", lambda: 2)
    monkeypatch.setattr(callbacks.hosts, "gather", lambda said: [said, b'{"value": false}'])
    assert not go_on([lambda step, metrics: True], 1, {})


def test_one_that_fails_is_named():
    says = f"the callback {__name__}:fails failed after step 2: KeyError: 'no such thing'"
    with pytest.raises(CallbackFailed) as said:
        go_on([fails], 2, {})
    assert str(said.value) == says


@pytest.mark.slow
def test_the_step_after_which_one_fails_is_saved(tmp_path):
    """Where steps are saved every fourth."""
    words = ("--config.checkpoint.every=4", "--config.checkpoint.handoff=memory")
    config = configuration.load("quickstart", [*SMALL, *words])

    def late(step, metrics):
        assert step < 2, "enough"

    with pytest.raises(CallbackFailed, match="failed after step 2: AssertionError: enough"):
        train.train(config, tmp_path / "run", SilentScreen(), told=[late])
    assert steps_in(tmp_path / "run" / "checkpoints")[-1] == 2
