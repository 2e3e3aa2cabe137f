"""Sicknesses are seen where they are, once, with the mend; healthy runs hear nothing.

`healthy.jsonl` is what these look at in the metrics of a whole quick start (100 steps, seed 0,
two CPU cores, 2026-11-22): its reward goes from 0.50 to 0.99, its entropy from 0.04 to 0.005, and
at its end most groups carry no signal, all of which is well.
"""

import json
import math
import re
from pathlib import Path

import pytest

from notepad_jax import keys
from notepad_jax.setup import configuration
from notepad_jax.training import health
from notepad_jax.training.health import TurnLimits

LIMITS = TurnLimits(memory=100, answer=50)
HEALTHY = [json.loads(line) for line in Path(__file__).with_name("healthy.jsonl").open()]
WELL = {
    "groups/sampled": 20,
    "groups/informative_share": 0.4,
    "reward": 0.5,
    "entropy_update": 0.5,
    "entropy_answer": 0.4,
    "logprob_gap_mean": 0.004,
    "rollout/memory_tokens": 60.0,
    "rollout/truncated_memories": 0.02,
    "rollout/truncated_answers": 0.0,
}


def run(steps, **sick):
    """A history: each of `sick` ("reward", "gap", ...) is a function of the step, from 1."""
    short = {"gap": "logprob_gap_mean", "informative": "groups/informative_share"}
    short |= {"memory": "rollout/memory_tokens", "cut": "rollout/truncated_memories"}
    short |= {"cut_answers": "rollout/truncated_answers"}
    short |= {name: f"rollout/{name}" for name in ("keep", "exit", "again", "unwritten")}
    return [
        {"step": k, **WELL, **{short.get(name, name): of(k) for name, of in sick.items()}}
        for k in range(1, steps + 1)
    ]


def told(lines, limits=LIMITS):
    return {(one.name, one.step) for one in health.course(lines, limits)}


def falls(k):
    return 0.5 * 0.6 ** (k - 1)


SICK = {
    "too hard": (run(9, informative=lambda k: 0.2 * (k < 4), reward=lambda k: 0.0),
                 "uninformative groups", 6, "the tasks are too hard for this policy"),
    "all alike": (run(9, informative=lambda k: 0), "uninformative groups", 3, "end alike"),
    "memories collapse": (run(20, entropy_update=falls), "collapsed memories", 10, "of memories"),
    "answers collapse": (run(20, entropy_answer=falls), "collapsed answers", 10, "of answers fell"),
    "exit forgotten": (run(12, exit=lambda k: 0.3 * (k < 6)), "exit died out", 10, "has died out"),
    "keep forgotten": (run(12, keep=lambda k: 0.5**k), "keep died out", 10, "its rate fell from"),
    "silence": (run(12, unwritten=lambda k: 0.7), "nothing written", 10, "nothing has taken over"),
    "leaving": (run(12, exit=lambda k: min(1, k / 9), reward=lambda k: 0.5 - 0.02 * k),
                "leaves early", 10, "leaving has taken over"),
    "apart": (run(12, gap=lambda k: 0.004 * k**1.4), "sampler and trainer apart", 10, "tis_cap=2"),
    "pinned": (run(9, memory=lambda k: 99.0, cut=lambda k: 0.8), "pinned memories", 3,
               "memories have 99 of at most 100 tokens, and 80% are cut there"),
    "cut": (run(9, cut=lambda k: 0.04 * k), "cut memories", 4, "12% of the memories are cut"),
    "cut answers": (run(9, cut_answers=lambda k: 0.11), "cut answers", 3, "limit of 50 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", SICK)
def test_a_sick_run_is_told_once_with_the_mend(name):
    lines, sick, step, words = SICK[name]
    assert told(lines) == {(sick, step)}
    (one,) = health.course(lines, LIMITS)
    assert words in one.words and str(one).startswith(f"step {step}: ") and "\n" not in str(one)
    assert told(lines[: step - 1]) == set()


@pytest.mark.parametrize("name", SICK)
def test_every_mend_is_a_key_that_there_is(name):
    known = keys.flat(configuration.load("quickstart"))
    words = health.course(SICK[name][0], LIMITS)[0].words
    named = re.findall(r"\b[a-z]+\.[a-z_]+[a-z]\b", words)
    assert named and [key for key in named if key not in known] == []


def test_answers_in_contexts_have_a_limit_and_a_mend_of_their_own():
    """4 + 2 (4 - 1) tokens; raising max_answer would undo what the contexts are for."""
    words = ("answer_chunks=3", "carry=1")
    config = configuration.load("quickstart", [f"--config.reading.{word}" for word in words])
    (one,) = health.course(run(9, cut_answers=lambda k: 0.2), health.limits_of(config))
    assert "limit of 10 tokens" in one.words and "raise reading.answer_chunks" in one.words


@pytest.mark.parametrize("word", ["mask_truncated=true", "overlong_window=2"])
def test_a_mend_is_none_that_is_taken_already_or_would_be_refused(word):
    config = configuration.load("quickstart", [f"--config.grpo.{word}"])
    for sick in (dict(cut=lambda k: 0.2), dict(cut_answers=lambda k: 0.2)):
        (one,) = health.course(run(9, **sick), health.limits_of(config))
        assert "mask_truncated" not in one.words


WELL_RUNS = {
    "steady": run(30),
    "young": run(1),
    "solved: no group can differ": run(20, informative=lambda k: 0, reward=lambda k: 0.99),
    "one dull step": run(20, informative=lambda k: 0.3 * (k % 3 > 0)),
    "sharper and better": run(20, entropy_update=falls, reward=lambda k: 0.1 + 0.04 * k),
    "sharp from the start": run(20, entropy_answer=lambda k: 0.04 * 0.5**k),
    "int8, apart but not more so": run(20, gap=lambda k: 0.05),
    "grows, and is nothing": run(20, gap=lambda k: 1e-7 * k**2),
    "memories of the same length": run(20, memory=lambda k: 100.0),
    "a tenth": run(20, cut=lambda k: 0.099, cut_answers=lambda k: 0.099),
    "not numbers": run(20, gap=lambda k: math.nan, entropy_update=lambda k: math.nan),
}


@pytest.mark.parametrize("name", WELL_RUNS)
def test_a_healthy_run_hears_nothing(name):
    assert told(WELL_RUNS[name]) == set()


def test_a_whole_quick_start_hears_nothing():
    assert len(HEALTHY) == 100 and HEALTHY[-1]["reward"] > 0.99
    assert told(HEALTHY, TurnLimits(memory=8, answer=4)) == set()


def test_what_is_seen_at_the_last_step_is_what_the_course_tells():
    """So a run that goes on knows what was said: step by step it is what it is at once."""
    for lines, *_ in SICK.values():
        said = {}
        for end in range(1, len(lines) + 1):
            for one in health.at_last(lines[:end], LIMITS):
                said.setdefault(one.name, one)
        assert list(said.values()) == health.course(lines, LIMITS)


def test_steps_that_learnt_nothing_do_not_hide_a_collapse():
    lines = run(20, entropy_update=falls)
    for line in lines[11::3]:
        del line["entropy_update"], line["entropy_answer"], line["logprob_gap_mean"]
    assert told(lines) == {("collapsed memories", 10)}


def test_lines_of_validations_are_none_of_steps():
    lines = run(3, informative=lambda k: 0)
    between = [x for line in lines for x in (line, {"step": line["step"], "validation/score": 0.5})]
    assert health.lines_of(between) == lines
    assert health.at_last([], LIMITS) == [] == health.course([], LIMITS)
