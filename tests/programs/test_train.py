"""A run that stopped goes on as if nothing had happened (`benchmarks/test_kills.py` kills some)."""

import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from notepad_jax.checkpoint import steps
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.data import files
from notepad_jax.programs import configuration, parts, train
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.rollout.ledger import Outcome
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import LEDGER, METRICS, read_metrics
from notepad_jax.telemetry.progress import SilentScreen

ROOT = Path(__file__).parents[2]
WRITTEN = (METRICS, LEDGER, archive.FILE)  # of every byte that a resumed run must repeat
SMALL = (
    f"--config.policy={ROOT / 'data' / 'starter'}",
    "--config.steps=4",
    "--config.data.tokens=512",
    "--config.data.questions=2",
    "--config.rollout.documents=2",
    "--config.rollout.group_size=4",
    "--config.engine.slots=16",
    "--config.engine.pages=96",
    "--config.grpo.row_length=512",
    "--config.grpo.micro_batch_rows=1",
)


def run(folder: Path, *words: str, resume: bool = False) -> list[dict[str, float]]:
    config = configuration.load("quickstart", [*SMALL, *words])
    train.train(config, folder, SilentScreen(), resume)
    return read_metrics(folder)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(folder)
    return folder


def test_a_run_writes_what_people_look_for(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {"config.json", *WRITTEN, "timings.jsonl"} <= names
    metrics = read_metrics(uninterrupted)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert m["rollout/prefix_tokens_saved"] > 5 * m["rollout/prefix_tokens"]
        assert 0 <= m["reward"] <= 1 and 4 <= m["groups/sampled"] <= 4 * m["groups/rounds"]
    learnt = [m for m in metrics if m["groups/kept"]]
    assert learnt, "no group carried a signal; choose another seed for this test"
    for m in learnt:
        assert m["logprob_gap_max"] < 2e-5  # the sampler reports what the trainer computes
        assert m["ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert m["update/prefix_tokens_saved"] > 0


def test_a_run_is_not_begun_over_another(uninterrupted):
    before = sorted(path.name for path in (uninterrupted / "checkpoints").iterdir())
    with pytest.raises(ValueError, match="already holds a run; resume it"):
        run(uninterrupted)
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == before


def test_the_handoff_in_memory_gives_the_same_metrics(uninterrupted, tmp_path):
    run(tmp_path / "run", "--config.checkpoint.handoff=memory", "--config.checkpoint.every=4")
    assert read_metrics(tmp_path / "run") == read_metrics(uninterrupted)


def test_handoff_through_storage_needs_every_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="every is 2, but handoff='storage'"):
        run(tmp_path / "run", "--config.checkpoint.every=2")


def test_a_kl_to_the_starting_policy_is_measured(tmp_path):
    metrics = run(tmp_path / "run", "--config.grpo.kl_weight=0.1", "--config.steps=3")
    assert [m["kl"] for m in metrics if m["groups/kept"]][-1] > 0


def test_the_engine_may_keep_its_weights_in_bfloat16(tmp_path):
    """Half the bytes, other roundings: the gap to the trainer grows, and is reported."""
    metrics = run(
        tmp_path / "run", "--config.steps=2", "--config.checkpoint.rollout_dtype=bfloat16"
    )
    gaps = [m["logprob_gap_max"] for m in metrics if m["groups/kept"]]
    assert gaps and 1e-4 < max(gaps) < 0.5
    known = "use one of 'float32', 'bfloat16', 'int8'"
    with pytest.raises(ValueError, match=f"rollout_dtype is 'int4'; {known}"):
        run(tmp_path / "other", "--config.checkpoint.rollout_dtype=int4")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The starter as models are published: bfloat16, in its files and in config.json."""
    policy = parts.load_policy(ROOT / "data" / "starter")
    folder = tmp_path_factory.mktemp("published") / "hf"
    beside = huggingface.companions(policy.folder)
    huggingface.export(policy.config, policy.params, folder, "bfloat16", beside)
    return folder


def test_a_published_bfloat16_policy_trains_at_the_published_rate(published, tmp_path):
    words = (
        f"--config.policy={published}",
        "--config.optimizer.kind=adamw",
        "--config.optimizer.learning_rate=1e-6",
        "--config.checkpoint.handoff=memory",
    )
    metrics = run(tmp_path / "run", *words)
    learnt = [m for m in metrics if m["groups/kept"]]
    assert learnt, "no group carried a signal; choose another seed for this test"
    for m in learnt:
        assert m["update/changed_share"] > 0.5  # what no completion saw gets no gradient
        assert m["update/applied_over_asked"] == pytest.approx(1, abs=0.05)
        assert m["logprob_gap_max"] < 0.3  # sampler and trainer: the same bits, other sums
    step = tmp_path / "run" / "checkpoints" / "4"
    kinds = {leaf.dtype for leaf in jax.tree.leaves(steps.as_stored(step.parent, 4))}
    assert kinds == {np.dtype("float32")}  # masters, not what the engine computes with


INT8 = "--config.checkpoint.rollout_dtype=int8"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "run"
    run(folder, "--config.steps=2", INT8)
    return folder


def test_the_engine_may_keep_its_weights_in_int8(quantised):
    """A coarser sampler still: the gap is what the importance ratio corrects, and is reported."""
    metrics = [m for m in read_metrics(quantised) if m["groups/kept"]]
    assert metrics, "no group carried a signal; choose another seed for this test"
    assert all(1e-3 < m["logprob_gap_max"] < 0.3 for m in metrics)
    assert all(m["ratio_mean"] == pytest.approx(1, abs=0.05) for m in metrics)


def test_int8_weights_are_the_same_by_memory_by_storage_and_after_resuming(quantised, tmp_path):
    """Checkpoints hold what the trainer holds, and quantising is a function of it."""
    whole = read_metrics(quantised)
    words = ("--config.steps=2", INT8, "--config.checkpoint.handoff=memory")
    assert run(tmp_path / "memory", *words) == whole
    run(tmp_path / "half", "--config.steps=1", INT8)
    assert run(tmp_path / "half", "--config.steps=2", INT8, resume=True) == whole


def test_adapters_train_resume_and_are_saved_added_in(tmp_path):
    """The base stays, the saved parameters move, and a run cut in two is the whole run."""
    words = (
        "--config.grpo.lora.rank=4",
        "--config.optimizer.kind=adamw",
        "--config.grpo.minibatches=2",  # and several optimizer steps a rollout
        "--config.grpo.epochs=2",
    )
    whole = run(tmp_path / "whole", *words)
    learnt = [m for m in whole if m["groups/kept"] > 1]
    assert learnt and all(m["update/optimizer_steps"] == 4 for m in learnt)
    assert max(m["ratio_max"] for m in learnt) > 1  # later steps move off the proximal policy
    assert any(m.get("update_norm", 0) > 0 for m in whole)
    assert all(m["logprob_gap_max"] < 2e-5 for m in whole if m["groups/kept"])
    run(tmp_path / "half", *words, "--config.steps=2")
    assert run(tmp_path / "half", *words, resume=True) == whole
    with pytest.raises(ValueError, match="lora.targets has 'x'"):
        run(tmp_path / "bad", *words, '--config.grpo.lora.targets=("x",)')


def test_updates_that_are_not_finite_stop_the_run_at_the_last_good_step(tmp_path):
    words = ("--config.optimizer.kind=adamw", "--config.optimizer.learning_rate=1e38")
    message = r"last 2 rollouts was finite.*grpo.max_skipped is 2.*last good step is \d+, kept"
    with pytest.raises(ValueError, match=message) as stopped:
        run(tmp_path / "run", *words, "--config.grpo.max_skipped=2", "--config.steps=30")
    good = int(str(stopped.value).partition("step is ")[2].partition(",")[0])
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics if m.get("update/skipped")] == [good + 1, good + 2]
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert max(steps) == good  # nothing newer hides it
    went_on = run(tmp_path / "run", words[0], f"--config.steps={good + 2}", resume=True)
    assert [m["step"] for m in went_on] == list(range(1, good + 3))
    assert not any(m.get("update/skipped", 0) for m in went_on)


def test_tasks_may_come_from_files_and_a_resumed_run_draws_the_next_ones(tmp_path):
    """The generator's own tasks, written to two files: fewer of one kind than of the other."""
    tasks = [task for seed in range(30) for task in make_tasks(seed, 512, 2)]
    for kind, count in (("one_hop", 20), ("two_hop", 9)):
        chosen = [task for task in tasks if task.source.endswith(kind)][:count]
        files.write(tmp_path / f"{kind}.jsonl", chosen, itertools.repeat(512))
    words = [
        f"--config.tasks.files={tmp_path / 'one_hop.jsonl'},{tmp_path / 'two_hop.jsonl'}",
        "--config.tasks.weights=synthetic/one_hop=3",
        "--config.rollout.documents=4",
    ]
    whole = run(tmp_path / "whole", *words, "--config.steps=3")
    run(tmp_path / "parts", *words, "--config.steps=2")
    assert run(tmp_path / "parts", *words, "--config.steps=3", resume=True) == whole
    with TraceFile(tmp_path / "whole" / archive.FILE) as trajectories:
        read = [reading for _, reading in trajectories.readings()]
    assert {reading["task_id"] for reading in read} <= {task.id for task in tasks}
    # Three of four draws are of the heavier source: ordinals say which (29 tasks, 12 draws).
    ledger = [json.loads(line) for line in (tmp_path / "whole" / LEDGER).open()]
    assert [line["drawn"][0] for line in ledger[1:]] == [line["drawn"][1] for line in ledger[:-1]]
    assert whole[-1]["data/draws"] == ledger[-1]["drawn"][1] >= 12


def test_a_stream_may_come_round_within_a_step_and_what_waits_survives_a_kill(tmp_path):
    """Three tasks, four draws a step: "task id occurs twice" ended the run, and its resume."""
    tasks = [task for seed in range(3) for task in make_tasks(seed, 512, 1, unanswerable=0)]
    files.write(tmp_path / "three.jsonl", tasks, itertools.repeat(512))
    words = [
        f"--config.tasks.files={tmp_path / 'three.jsonl'}", "--config.rollout.documents=4",
        "--config.rollout.max_staleness=1", "--config.rollout.max_rounds=3",
    ]  # fmt: skip
    whole = run(tmp_path / "whole", *words, "--config.steps=5")
    assert sum(m["groups/waiting"] for m in whole) > 0, "nothing waited; choose another seed"
    waited = next(m["step"] for m in whole if m["groups/waiting"])
    run(tmp_path / "parts", *words, f"--config.steps={waited}")
    assert run(tmp_path / "parts", *words, "--config.steps=5", resume=True) == whole
    for name in WRITTEN:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    ledger = [json.loads(line) for line in (tmp_path / "whole" / LEDGER).open()]
    settled = [
        tuple(place)
        for line in ledger
        for outcome in Outcome
        for place in line.get(outcome.value, ())
    ]
    waiting = [tuple(place) for place in ledger[-1]["waiting"]]
    assert sorted(settled + waiting) == [(o, 0) for o in range(ledger[-1]["drawn"][1])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config.tasks.files=nowhere.jsonl",), "nowhere.jsonl"),
        (("--config.tasks.files={0}", "--config.tasks.weights=one"), "has 'one'; write SOURCE="),
        (("--config.tasks.files={0}", "--config.tasks.weights=vt=2"), "no source 'vt' to weigh"),
    ],
)
def test_files_that_cannot_be_trained_on_are_named(tmp_path, words, message):
    path = tmp_path / "tasks.jsonl"
    files.write(path, make_tasks(0, 512, 2), itertools.repeat(512))
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", *(word.format(path) for word in words))
    assert not (tmp_path / "run").exists()
