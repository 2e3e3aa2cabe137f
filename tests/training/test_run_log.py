"""What a training run tells people while it goes: a known sickness once, also after a kill."""

import contextlib

import fakes
import pytest

from notepad_jax.reading.loop import Reader
from notepad_jax.rollout.dynamic_sampling import Rollout
from notepad_jax.rollout.groups import GroupStats
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import run_log

READER = Reader(None, fakes.tokenizer(), fakes.template(), fakes.rules(), None, None)
NOTHING = Rollout([], 0.0, GroupStats(), [], {}, Ledger())
TIMINGS = {"rollout_seconds": 1.0, "update_seconds": 1.0}
DULL = {
    "reward": 0.0,
    "groups/sampled": 4,
    "groups/kept": 0,
    "groups/informative_share": 0.0,
    "rollout/truncated_answers": 0.3,
    "data/truncated_documents": 0,
}


class Screen(SilentScreen):
    def __init__(self):
        self.warned = []

    def warn(self, text):
        self.warned.append(text)


def tell(folder, steps, resume=False, **changed):
    """Tells of these steps, as a run that is killed after them; returns the warnings."""
    screen, config = Screen(), configuration.load("quickstart")
    told = run_log.telling(config, folder, screen, READER, steps[0] - 1, resume)
    with contextlib.suppress(KeyboardInterrupt), told as it:
        for step in steps:
            it.step(step, DULL | changed, TIMINGS, Ledger(), NOTHING)()
            it.validated(step, {"validation/score": 0.5})
        raise KeyboardInterrupt
    return screen.warned


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def test_a_sickness_is_said_when_it_shows_and_once(folder):
    first, second = tell(folder, range(1, 10))
    assert first.startswith("step 3: no group of the last 3 steps") and "too hard" in first
    assert second.startswith("step 3: 30% of the answers are cut at their limit of 4 tokens")


def test_a_run_that_goes_on_says_what_is_new_alone(folder):
    assert len(tell(folder, (1, 2))) == 0
    assert len(tell(folder, (3, 4), resume=True)) == 2  # its history is in metrics.jsonl
    assert tell(folder, (5, 6), resume=True) == []
    assert len(tell(folder, (3,), resume=True)) == 2  # gone back to before it was said
    (new,) = tell(folder, (4, 5, 6), resume=True, **{"rollout/truncated_memories": 0.5})
    assert new.startswith("step 5: 50% of the memories are cut at their limit of 8 tokens")
