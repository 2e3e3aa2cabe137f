"""A run that was killed goes on as if nothing had happened."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from sentencepiece import sentencepiece_model_pb2

from notepad_jax import cli
from notepad_jax.checkpoint import steps
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.data import files
from notepad_jax.data.records import Records
from notepad_jax.programs import configuration, parts, train
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.rollout.ledger import Outcome
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import LEDGER, METRICS, read_metrics
from notepad_jax.telemetry.progress import SilentScreen
from tests import limits, tiny

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


def run(
    folder: Path, *words: str, resume: bool = False, step: int | None = None
) -> list[dict[str, float]]:
    config = configuration.load("quickstart", [*SMALL, *words])
    train.train(config, folder, SilentScreen(), resume, step)
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


def test_a_run_killed_with_sigkill_resumes_with_identical_metrics(uninterrupted, tmp_path):
    folder = tmp_path / "run"
    program = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from notepad_jax.programs import configuration, train;"
        "from notepad_jax.telemetry.progress import SilentScreen;"
        "c = configuration.load('quickstart', sys.argv[3:]);"
        "train.train(c, Path(sys.argv[2]), SilentScreen())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(ROOT), str(folder), *SMALL],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.is_file() and metrics.read_text().count("\n") >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run(folder, resume=True)
    for name in WRITTEN:
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_run_is_not_begun_over_another(uninterrupted):
    before = limits.content(uninterrupted)
    with pytest.raises(ValueError, match=r"run exists; choose another .* go on with it \(--resume"):
        run(uninterrupted)
    assert limits.content(uninterrupted) == before


@pytest.mark.parametrize("damage", ["no checkpoint is finished", "there are metrics alone"])
def test_a_run_is_not_begun_over_what_is_left_of_another(uninterrupted, tmp_path, damage):
    """What no checkpoint reader sees is somebody's nevertheless."""
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    if damage == "there are metrics alone":
        shutil.rmtree(folder / "checkpoints")
    else:
        for mark in folder.glob("checkpoints/*/_CHECKPOINT_METADATA"):
            mark.write_text("{}")
    before = limits.content(folder)
    with pytest.raises(ValueError, match="run exists"):
        run(folder)
    assert limits.content(folder) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config.seed=5",), "resume with the settings of the saved run"),
        (("--config.grpo.lora.rank=2", "--config.optimizer.kind=adamw"), "opt"),
        (("--config.policy={wider}",), r"\d"),
        (("--config.engine.pages=3",), "engine.pages"),
        (("--config.policy=/nowhere",), "/nowhere"),
    ],
)
def test_a_refused_resume_leaves_every_step_and_line(uninterrupted, tmp_path, words, message):
    folder = tmp_path / "run"
    shutil.copytree(uninterrupted, folder)
    wider = dataclasses.replace(parts.load_policy(ROOT / "data" / "starter").config, layers=1)
    words = [word.format(wider=policy_folder(wider, tmp_path / "wider")) for word in words]
    before = limits.content(folder)
    with pytest.raises(ValueError, match=message):
        run(folder, *words, resume=True)
    assert limits.content(folder) == before


class Filling(SilentScreen):
    """A disk that is full after so many steps: no file grows beyond what it says then."""

    def __init__(self, steps, size):
        self._steps, self._size = steps, size

    def bar(self, label, total, unit=""):
        return self

    def advance(self, amount=1, **shown):
        self._steps -= 1
        if self._steps == 0:
            limits.limit_files(self._size())

    def finish(self):
        pass


FILLING = {
    "a checkpoint": lambda folder: 300_000,
    "a line of metrics": lambda folder: (folder / "metrics.jsonl").stat().st_size + 20,
    "the first of a line": lambda folder: (folder / "metrics.jsonl").stat().st_size,
}


@pytest.mark.parametrize("what", FILLING)
def test_a_disk_that_fills_up_ends_a_run_in_one_line_and_it_goes_on(
    uninterrupted, tmp_path, capfd, monkeypatch, what
):
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    screen = Filling(3, lambda: FILLING[what](folder))  # it advances by nothing at first
    monkeypatch.setattr(cli, "choose", lambda quiet: screen)
    with limits.largest_file(-1):
        assert cli.main(["train", "--name", "mine", *SMALL]) == 1
    (told,) = capfd.readouterr().err.strip().splitlines()
    assert "the disk is full, make room; go on with: notepad-jax train --name mine --res" in told
    assert read_metrics(folder) == read_metrics(uninterrupted)[: len(read_metrics(folder))]
    assert len(read_metrics(folder)) >= 2
    assert steps.steps_in(folder / "checkpoints")[-1] == 2
    monkeypatch.setattr(cli, "choose", lambda quiet: SilentScreen())
    assert cli.main(["train", "--name", "mine", "--resume"]) == 0
    name = "metrics.jsonl"
    assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_a_disk_that_is_full_from_the_start_leaves_no_run(
    uninterrupted, tmp_path, capfd, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for size in (2_000, 100_000):  # our words need some room: capfd keeps them in a file
        with limits.largest_file(size):
            assert cli.main(["train", "--json", "--name", "mine", *SMALL]) == 1
        (told,) = capfd.readouterr().err.strip().splitlines()
        assert told.startswith("notepad-jax: the disk is full, make room (")
        assert list(tmp_path.iterdir()) == []


def last_state(folder: Path) -> list[np.ndarray]:
    """Every array of the last step: weights and optimizer state."""
    with steps.context():
        found = ocp.load_checkpointables(
            folder / "checkpoints" / "4", {"params": None, "opt": None}
        )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def test_a_damaged_newest_step_is_passed_over_and_done_again(uninterrupted, tmp_path, capsys):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    path = max((folder / "checkpoints/4/opt").rglob("d/*"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-9])
    assert run(folder, resume=True) == read_metrics(uninterrupted)
    (said,) = capsys.readouterr().err.splitlines()  # also on a screen that is silent
    assert "step 4 is damaged (opt/" in said and said.endswith("; the newest good step is 3")
    jax.tree.map(np.testing.assert_array_equal, last_state(folder), last_state(uninterrupted))
    assert sorted(os.listdir(folder / "checkpoints")) == ["3", "4"]


def test_a_run_goes_on_from_the_step_that_is_asked_for(
    uninterrupted, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(uninterrupted, tmp_path / "runs" / "x")
    resume = ["train", "--name=x", "--resume", "--json"]
    assert cli.main([*resume, "--step=2"]) == 1
    assert "runs/x/checkpoints has no step 2; there: 3, 4" in capsys.readouterr().err
    assert cli.main(["train", "--name=y", "--step=2"]) == 1
    assert "say --resume as well" in capsys.readouterr().err and not Path("runs/y").exists()
    assert sorted(os.listdir("runs/x/checkpoints")) == ["3", "4"]
    assert cli.main([*resume, "--step=3"]) == 0
    metrics = Path("runs/x/metrics.jsonl")
    assert metrics.read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()
    jax.tree.map(
        np.testing.assert_array_equal, last_state(tmp_path / "runs/x"), last_state(uninterrupted)
    )
    for step in (3, 4):
        Path(f"runs/x/checkpoints/{step}/meta/data.json").unlink()
    capsys.readouterr()
    before = metrics.read_bytes()
    assert cli.main(resume) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "4 is damaged (meta/data.json is missing), step 3 is damaged (meta" in said
    assert metrics.read_bytes() == before


def test_a_run_of_an_earlier_version_is_neither_resumed_nor_begun_over(uninterrupted, tmp_path):
    folder = shutil.copytree(uninterrupted, tmp_path / "run")
    for step in (3, 4):
        (folder / "checkpoints" / str(step) / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no step under .* has a manifest.json \(there: 3, 4\)"):
        run(folder, resume=True)
    with pytest.raises(ValueError, match="already holds a run"):
        run(folder)
    assert sorted(os.listdir(folder / "checkpoints")) == ["3", "4"]


def another_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1_000] ^= 1  # the lowest of some weight's mantissa
    path.write_bytes(content)


def another_score(folder: Path) -> None:
    model = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    model.pieces[-1].score -= 1
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())


def another_end(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")


@pytest.mark.parametrize("words", ["grpo.lora.rank=2", "grpo.kl_weight=0.1"])
def test_a_run_is_resumed_with_the_policy_that_it_began_with(words, tmp_path):
    """By content: the folder may be another, what lies in it may not."""
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "data" / "starter", start)

    def prepared(policy: Path, resume: bool = True) -> train.Run:
        words_ = [*SMALL, f"--config.{words}", f"--config.policy={policy}"]
        if "lora" in words:
            words_.append("--config.optimizer.kind=adamw")
        config = configuration.load("quickstart", words_)
        return train.prepare(config, tmp_path / "run", SilentScreen(), resume, None)

    prepared(start, resume=False)
    shutil.copytree(start, elsewhere)
    assert prepared(elsewhere).step == 0
    for change, what in (
        (another_bit, "weights"),
        (another_score, "weights, tokenizer"),
        (another_end, "weights, tokenizer, config"),
    ):
        change(elsewhere)
        says = f"run began with the policy in {start}; not the same in {elsewhere}: {what};"
        with pytest.raises(ValueError, match=says) as refused:
            prepared(elsewhere)
        assert "\n" not in str(refused.value)
    another_score(start)
    with pytest.raises(ValueError, match=f"in {start}; not the same in {start}: tokenizer;"):
        prepared(start)


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


def policy_folder(config, folder: Path) -> Path:
    """A policy of other sizes that knows the starter's words."""
    beside = huggingface.companions(ROOT / "data" / "starter")
    return huggingface.export_params(config, tiny.params(0, config), folder, beside)


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


class Torn:
    """A document that cannot be read to its end."""

    def pieces(self):
        yield "the code of ann is red . " * 50
        raise OSError("the disk is gone")


def test_a_document_that_cannot_be_read_costs_its_groups_or_ends_the_run(tmp_path, monkeypatch):
    whole = Records.at

    def at(records, ordinal):
        tasks = whole(records, ordinal)
        if ordinal != 1:
            return tasks
        document = Torn()
        return tuple(dataclasses.replace(task, document=document) for task in tasks)

    monkeypatch.setattr(Records, "at", at)
    first, *_ = run(tmp_path / "goes-on", "--config.steps=1", "--config.rollout.max_failed_share=1")
    assert first["groups/dropped_failed"] == 2 and first["groups/sampled"] > 4
    line = json.loads((tmp_path / "goes-on" / LEDGER).read_text())
    assert line["failed"] == [[1, 0], [1, 1]]
    with pytest.raises(ValueError, match="in 2 of .* of step 1 .*sample 0: OSError: the disk is g"):
        run(tmp_path / "ends", "--config.steps=1", "--config.rollout.max_failed_share=0.1")


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


# ---------------------------------------------------------------- what of the files is read


class Said(SilentScreen):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def run_and_listen(folder: Path, *words: str, resume: bool = False):
    screen = Said()
    config = configuration.load("quickstart", [*SMALL, *words])
    train.train(config, folder, screen, resume)
    return read_metrics(folder), screen.lines


@pytest.fixture(scope="module")
def twice_as_long(tmp_path_factory):
    """Documents of twice `data.tokens`, and two questions that the starter cannot be asked."""
    path = tmp_path_factory.mktemp("files") / "tasks.jsonl"
    tasks = [make_tasks(seed, 1024, 1)[0] for seed in range(9)]
    for place, more in ((2, " please" * 4), (5, " please" * 9)):
        tasks[place] = dataclasses.replace(tasks[place], question=tasks[place].question + more)
    files.write(path, tasks, itertools.repeat(1024))
    return path


@pytest.fixture(scope="module")
def read_whole(twice_as_long, tmp_path_factory):
    folder = tmp_path_factory.mktemp("filed") / "run"
    words = (f"--config.tasks.files={twice_as_long}", "--config.steps=2")
    return folder, *run_and_listen(folder, *words)


def test_documents_of_files_are_read_to_their_end(read_whole):
    """They were cut at data.tokens, the length of generated ones: 64 chunks were read as 8."""
    _, metrics, lines = read_whole
    for m in metrics:
        assert m["rollout/update_turns"] == 4 * m["rollout/trajectories"]  # 1,024 tokens by 256
        assert m["data/truncated_documents"] == m["data/truncated_tokens"] == 0
    assert not any("max_tokens" in line for line in lines)


def test_questions_too_long_are_left_out_said_once_and_counted(read_whole, twice_as_long):
    """They ended the run in the step that drew them."""
    folder, metrics, lines = read_whole
    assert [m["data/questions_left_out"] for m in metrics] == [2, 2]
    (line,) = [line for line in lines if "max_question" in line]
    assert "2 of 9 tasks of " in line and "questions of more than 8 tokens" in line
    assert f"the longest, task '{make_tasks(5, 1024, 1)[0].id}'" in line
    with TraceFile(folder / archive.FILE) as trajectories:
        drawn = {reading["task_id"] for _, reading in trajectories.readings()}
    assert not drawn & {make_tasks(seed, 1024, 1)[0].id for seed in (2, 5)}


def test_a_limit_of_files_is_said_once_and_counted(twice_as_long, tmp_path):
    words = (f"--config.tasks.files={twice_as_long}", "--config.tasks.max_tokens=600")
    metrics, lines = run_and_listen(tmp_path / "run", *words, "--config.steps=2")
    for m in metrics:
        assert m["rollout/update_turns"] == 3 * m["rollout/trajectories"]  # 600 tokens by 256
        assert m["data/truncated_documents"] == m["groups/sampled"]
        assert m["data/truncated_tokens"] == 424 * m["data/truncated_documents"]
    (line,) = [line for line in lines if "max_tokens" in line]
    assert "in step 1, " in line and "more than 600 tokens" in line


def test_a_run_does_not_go_on_with_files_of_other_content(read_whole, twice_as_long, tmp_path):
    folder = read_whole[0]
    moved = tmp_path / "elsewhere.jsonl"
    whole = twice_as_long.read_bytes()
    assert whole.endswith(b'."}\n')
    moved.write_bytes(whole[:-4] + b"!" + whole[-3:])  # the last letter of the last document
    with pytest.raises(ValueError, match="elsewhere.jsonl .* is not what it was") as caught:
        run_and_listen(folder, f"--config.tasks.files={moved}", "--config.steps=3", resume=True)
    assert "\n" not in str(caught.value)
    words = (f"--config.tasks.files={twice_as_long}", "--config.steps=3")
    with pytest.raises(ValueError, match="resume with the reading.max_question of the saved run"):
        run_and_listen(folder, *words, "--config.reading.max_question=40", resume=True)
    moved.write_bytes(whole)
    words = (f"--config.tasks.files={moved}", "--config.steps=3")
    metrics, _ = run_and_listen(folder, *words, resume=True)
    assert [m["step"] for m in metrics] == [1, 2, 3]
