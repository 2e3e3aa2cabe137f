"""What a step computed, and how fast: counts that add up, and the share of a peak."""

import pytest
import tiny

from notepad_jax.engine.metered import EngineStats
from notepad_jax.model import flops
from notepad_jax.planner.peak import Peak
from notepad_jax.telemetry.metrics import TIMINGS, read_metrics
from notepad_jax.training import throughput
from notepad_jax.training.throughput import Clock

CLOCK = Clock(rollout=4.0, update=2.0, rollout_compiling=1.0, update_compiling=0.5)
TOKENS = {"rollout/prefix_tokens": 30, "rollout/tail_tokens": 6, "rollout/decode_tokens": 4}


def test_a_rollouts_last_tokens_are_sampled_and_read_by_nobody():
    stats = EngineStats(prefix_tokens=10, tail_tokens=6, draft_tokens=3, decode_tokens=5, turns=2)
    stats.pairs = 99
    found = throughput.of_rollout(stats, tiny.CONFIG, 7)
    assert found["rollout/tail_tokens"] == 6
    by_hand = flops.forward(tiny.CONFIG, 10 + 6 + 8 - 2, 99, 8, 7)
    assert found["rollout/model_flops"] == by_hand


def test_without_an_update_or_a_peak_there_is_no_utilization():
    learnt = TOKENS | {"update/model_flops": 1000}
    assert "update/mfu" not in throughput.timings(CLOCK, TOKENS, 0, Peak(1.0, "x"))
    assert "update/mfu" not in throughput.timings(CLOCK, learnt, 7, None)
    found = throughput.timings(CLOCK, learnt, 7, Peak(5000.0, "x"))
    assert found["update/mfu"] == 0.1 and found["peak_flops"] == 5000
    assert (found["rollout_tokens_per_second"], found["update_tokens_per_second"]) == (10, 3.5)


def test_a_run_tells_what_it_computed(uninterrupted):
    """The share times the seconds times the peak gives the FLOPs back."""
    metrics, timings = read_metrics(uninterrupted), read_metrics(uninterrupted, TIMINGS)
    learnt = [pair for pair in zip(metrics, timings, strict=True) if pair[0]["groups/kept"]]
    assert learnt, "no group carried a signal; choose another seed for this test"
    for m, t in learnt:
        found = t["update/mfu"] * t["update_seconds"] * t["peak_flops"]
        assert found == pytest.approx(m["update/model_flops"])
        weights = 6 * m["update/packed_tokens"] * 2 * 73_728  # of two layers; the rest is less
        assert weights < m["update/model_flops"] < 2 * weights
    assert all(m["rollout/model_flops"] > 0 for m in metrics)
