"""A training run with local advantages, and the same one stopped in the midst of them."""

import signal

import pytest

from notepad_jax.engine.replay import Replay
from notepad_jax.rollout import local
from notepad_jax.setup.stopping import Stopped
from notepad_jax.telemetry.metrics import TIMINGS, read_metrics
from tests.runs import run
from tests.support import same_run

WORDS = ("--config.steps=2", "--config.rollout.local.samples=4", "--config.rollout.local.share=1.0")


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """A process begun in the background inherits that Ctrl-C is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_run_stopped_among_its_local_turns_is_the_run_that_was_not(tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    lines = run(whole, *WORDS)
    for line in lines:
        assert line["local/groups"] == line["groups/kept"] > 0
        assert line["local/samples"] == 4 * line["local/groups"] and line["local/failed"] == 0
        assert line["local/tokens"] > 0 and 0 <= line["local/score"] <= 1
    assert any(line["local/informative_share"] and line["local/spread"] for line in lines)

    launched, write_again, left = Replay._launched, local.write_again, []

    def counted(self, *given):
        sampled = launched(self, *given)
        if left and left.pop():
            signal.raise_signal(signal.SIGINT)
        return sampled

    async def begun(*given):
        left.append(True)  # the next launch is the last
        return await write_again(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Replay, "_launched", counted)
        patch.setattr(local, "write_again", begun)
        with pytest.raises(Stopped, match="in the rollout of step 1, of which .* turns are kept"):
            run(stopped, *WORDS)
    run(stopped, *WORDS, resume=True)
    turns = 4 * 4 * 3  # readings of a round, of two chunks and an answer each
    assert read_metrics(stopped, TIMINGS)[0]["replayed_turns"] >= turns
    assert same_run.differences(whole, stopped) == []
