"""Callbacks see every step, may end the run, and are named where they fail."""

import pytest

from notepad_jax.training import callbacks
from notepad_jax.training.callbacks import CallbackFailed, Stop, go_on


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
    assert go_on([], 1, metrics) and go_on([lambda step, metrics: 0], 1, metrics)


def test_one_process_that_ends_the_run_ends_it_for_all(monkeypatch):
    monkeypatch.setattr(callbacks.hosts, "gather", lambda said: [said, b"false"])
    assert not go_on([lambda step, metrics: True], 1, {})


def test_one_that_fails_is_named():
    says = f"the callback {__name__}:fails failed after step 2: KeyError: 'no such thing'"
    with pytest.raises(CallbackFailed) as said:
        go_on([fails], 2, {})
    assert str(said.value) == says
