"""The quick start at toy sizes: every step runs, every promised file is there."""

import json
from pathlib import Path

import numpy as np
import pytest

from notepad_jax.checkpoint import huggingface
from notepad_jax.eval import lengths
from notepad_jax.programs import configuration, evaluate, parts, quickstart
from notepad_jax.telemetry.progress import SilentScreen

ROOT = Path(__file__).parents[2]
SMALL = (
    f"--config.policy={ROOT / 'data' / 'starter'}",
    "--config.steps=2",
    "--config.data.tokens=512",
    "--config.data.questions=2",
    "--config.rollout.documents=2",
    "--config.rollout.group_size=4",
    "--config.engine.slots=16",
    "--config.engine.pages=128",
    "--config.grpo.row_length=512",
    "--config.grpo.micro_batch_rows=1",
    "--config.evaluate.lengths=('512', '4k')",
    "--config.evaluate.lengths_before=('512',)",
    "--config.evaluate.chunk_size=512",
    "--config.evaluate.questions=6",
)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    config = configuration.load("quickstart", SMALL)
    return quickstart.run(config, tmp_path_factory.mktemp("quick") / "run", SilentScreen())


def test_it_leaves_everything_it_promises(outcome):
    names = {path.name for path in outcome.folder.iterdir()}
    assert {"report.html", "accuracy.png", "training.png", "hf", "checkpoints", "metrics.jsonl",
            "eval_before.json", "eval_after.json", "trajectories.jsonl"} <= names  # fmt: skip
    assert [s.length for s in outcome.after] == [512, 4096]
    assert [s.n for s in outcome.after] == [6, 6]
    assert outcome.after[1].turns == 6 * (4096 // 512 + 1)
    page = outcome.report.read_text()
    assert "spoilt" in page or "on purpose" in page
    text = quickstart.text(outcome)
    assert str(outcome.report) in text and "before RL" in text


def test_what_is_exported_is_what_was_measured(outcome):
    """The folder's weights read like the trained ones: same answers to the same questions."""
    config = configuration.load("quickstart", SMALL)
    policy = parts.load_policy(outcome.exported)
    again = evaluate.measure(config, policy, ["512"], "again", SilentScreen())
    kept = [r for r in evaluate.load(outcome.folder / "eval_after.json") if r.length == 512]
    assert [(r.task_id, r.answer) for r in again] == [(r.task_id, r.answer) for r in kept]
    trained = huggingface.import_policy(outcome.exported)[1]
    starter = huggingface.import_policy(ROOT / "data" / "starter")[1]
    assert not np.array_equal(trained["embed"], starter["embed"])


def test_evaluation_documents_are_the_same_for_every_policy_and_never_trained_on():
    config = configuration.load("quickstart", SMALL)
    one, two = (evaluate.tasks_of_length(config, 4096) for _ in range(2))
    assert one == two
    assert all(task.document.seed >= evaluate.HELD_OUT for task in one)
    other = configuration.load("quickstart", [*SMALL, "--config.seed=1"])
    assert evaluate.tasks_of_length(other, 4096) != one


def test_long_documents_get_fewer_questions_over_several_documents():
    tasks = evaluate.tasks_of_length(configuration.load("quickstart"), 3_670_016)
    assert len(tasks) == 64
    assert len({id(task.document) for task in tasks}) == 4


def test_saved_readings_come_back(outcome):
    path = outcome.folder / "eval_after.json"
    loaded = evaluate.load(path)
    summary = json.loads(path.read_text())["summary"]
    assert [s.accuracy.mean for s in lengths.summarise(loaded)] == [
        s["accuracy"]["mean"] for s in summary
    ]
