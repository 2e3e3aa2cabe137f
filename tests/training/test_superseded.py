"""A trainer that comes back when another has gone on with its run ends itself, in one line.

Each has a folder and a lock of its own, as on two hosts; what they share is a bucket.
"""

import signal
import time

import pytest

from notepad_jax.checkpoint import steps
from tests.checkpoint.fake_bucket import cloud
from tests.training.test_pod import MOST_SECONDS, SMALL, ended, started

WHERE = "runs/mine/checkpoints"


@pytest.mark.slow
def test_a_frozen_trainer_that_thaws_is_superseded(tmp_path, monkeypatch):
    shared = ("--name=mine", "--config.checkpoint.folder=gs://bucket/runs")
    with cloud() as there:
        for name, value in there.environment.items():
            monkeypatch.setenv(name, value)
        first = started(tmp_path / "one", 1, *shared, *SMALL, "--config.steps=9")
        try:
            until = time.monotonic() + MOST_SECONDS
            while f"{WHERE}/1/life-1/manifest.json" not in there.objects:
                assert first.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            first.send_signal(signal.SIGSTOP)
            code, said = ended(
                started(tmp_path / "other", 1, *shared, "--resume", "--config.steps=3")
            )
            assert code == 0, said
            saved = steps.steps_in(f"gs://bucket/{WHERE}")
            assert saved[-1] == 3
            first.send_signal(signal.SIGCONT)
            code, said = ended(first)
        finally:
            first.kill()
            first.communicate()
        (line,) = [line for line in said.splitlines() if line.startswith("notepad-jax")]
        assert code == 1 and "Traceback" not in said
        assert "was taken over by life 2 of the trainer" in line and "this is life 1" in line
        assert steps.steps_in(f"gs://bucket/{WHERE}") == saved
