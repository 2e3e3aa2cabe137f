"""The quick start at toy sizes: every step runs, every promised file is there."""

import json
import re
import resource

import numpy as np
import pytest

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.eval.readings import Readings
from notepad_jax.programs import evaluate, quickstart
from notepad_jax.setup import builders, configuration, eval_jobs
from notepad_jax.telemetry.metrics import METRICS, TIMINGS
from notepad_jax.telemetry.screen import SilentScreen
from tests import runs
from tests.runs import ROOT

SMALL = (
    *runs.SMALL,  # the programs that these tests compile, other tests have compiled
    "--config.steps=2",
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
    assert {"report.html", "accuracy.svg", "training.svg", "hf", "checkpoints", "metrics.jsonl",
            "readings", "trajectories.jsonl", "config.json"} <= names  # fmt: skip
    assert [s.length for s in outcome.after] == [512, 4096]
    assert [s.n for s in outcome.after] == [6, 6]
    assert outcome.after[1].turns == 6 * (4096 // 512 + 1)
    page = outcome.report.read_text()
    assert "spoilt" in page or "on purpose" in page
    assert 'data-length="512" data-source="synthetic/' in page and page.count("<h3>after RL") == 12
    assert page.count("<h3>before RL") == 6  # paired: only the shorter ones were read before
    text = quickstart.text(outcome)
    assert str(outcome.report) in text and "before RL" in text


def test_every_number_that_a_run_writes_is_explained(outcome):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    told = [re.sub("SOURCE|NAME|LENGTH", ".+", name) for name in re.findall(r"`([\w/]+)`", page)]
    for file in (METRICS, TIMINGS):
        lines = (outcome.folder / file).read_text(encoding="utf-8").splitlines()
        names = {name for line in lines for name in json.loads(line)}
        assert names, file
        assert [one for one in sorted(names) if not any(re.fullmatch(t, one) for t in told)] == []


def test_what_was_measured_is_the_export_and_reads_as_the_run_does(outcome, tmp_path):
    """Adapters that are added in, and those that lie beside, answer the same questions alike."""
    config = configuration.load("quickstart", SMALL)
    with Readings(outcome.folder / "readings/step_2", evaluate.identity(config)) as readings:
        kept = {(r.task_id, r.answer) for r in readings.all() if r.length == 512}
    assert len(kept) == 6
    for number, name in enumerate((outcome.exported, outcome.folder)):
        policy, own = builders.load_policy(name), tmp_path / str(number)
        again, _ = quickstart.measured(config, policy, ["512"], "again", own, SilentScreen())
        assert {(r.task_id, r.answer) for r in again} == kept
    trained = huggingface.import_policy(outcome.exported)[1]
    starter = huggingface.import_policy(ROOT / "data" / "starter")[1]
    assert not np.array_equal(trained["embed"], starter["embed"])


def test_evaluation_documents_are_the_same_for_every_policy_and_never_trained_on():
    config = configuration.load("quickstart", SMALL)
    one, two = (eval_jobs.tasks_of_length(config, 4096) for _ in range(2))
    assert one == two
    assert all(task.document.seed >= eval_jobs.HELD_OUT for task in one)
    other = configuration.load("quickstart", [*SMALL, "--config.seed=1"])
    assert eval_jobs.tasks_of_length(other, 4096) != one


def test_peak_memory_is_in_bytes_on_every_system(monkeypatch):
    used = quickstart._peak_memory(resource.RUSAGE_SELF)
    assert 1e7 < used < 1e12
    monkeypatch.setattr("sys.platform", "darwin")
    assert quickstart._peak_memory(resource.RUSAGE_SELF) < used / 500


def test_long_documents_get_as_many_questions_as_is_said_over_several_documents():
    fewer = ["--config.evaluate.questions_longest=64", "--config.evaluate.questions_per_longest=16"]
    for words, questions, documents in ([], 256, 8), (fewer, 64, 4):
        config = configuration.load("quickstart", words)
        tasks = eval_jobs.tasks_of_length(config, 3_670_016)
        assert len(tasks) == questions
        assert len({id(task.document) for task in tasks}) == documents


def test_it_goes_on_without_reading_anything_twice(outcome):
    """The training is done and every reading is there: the second run measures the same."""
    config = configuration.load("quickstart", SMALL)
    lines = (outcome.folder / "readings/step_2/readings.jsonl").read_bytes()
    again = quickstart.run(config, outcome.folder, SilentScreen(), resume=True)
    assert (again.before, again.after) == (outcome.before, outcome.after)
    assert (outcome.folder / "readings/step_2/readings.jsonl").read_bytes() == lines
