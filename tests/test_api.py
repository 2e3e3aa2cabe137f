"""The Python API puts what it is given where the programs look for it; the programs are theirs."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import notepad_jax as nj
from notepad_jax import api, functions, keys
from notepad_jax.data import files
from notepad_jax.engine.replay import Replay
from notepad_jax.setup import configuration, stopping
from notepad_jax.telemetry.identity import write_sealed
from notepad_jax.telemetry.metrics import LEDGER, METRICS

ROOT = Path(__file__).parents[1]
STARTER = str(ROOT / "data" / "starter")
ROWS = [
    {"question": f"code of {name} ?", "document": f"the secret code of {name} is amber .",
     "answers": "amber", "level": number}
    for number, name in enumerate(("Ada", "Basil", "Clara"))
]  # fmt: skip


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Nothing is trained; returns what each call of the program was given."""
    monkeypatch.chdir(tmp_path)
    calls = []

    def train(config, folder, screen, resume, step, told, mended):
        calls.append((config, folder, resume, step, told))
        (folder / "checkpoints" / "0").mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(keys.plain(config)))
        (folder / METRICS).write_text('{"step": 1, "reward": 0.5}\n')
        names = [part.rpartition("=")[0] or part for part in config.tasks.reward.split(",")]
        calls[-1] += ([functions.lent(name) for name in names],)
        return folder / "checkpoints"

    monkeypatch.setattr(api.training, "train", train)
    return calls


async def later(step, metrics):
    pass


def half(reading):
    return 0.5


def keep(memory, written):
    return memory


def test_the_package_costs_nothing_and_knows_its_names():
    program = (
        "import sys, notepad_jax\n"
        "assert not {'jax', 'numpy', 'notepad_jax.api'} & set(sys.modules)\n"
        "assert set(notepad_jax.__all__) <= set(dir(notepad_jax))\n"
        "assert notepad_jax.score('it is ann', 'ann') == 1.0\n"
        "assert 'jax' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    for name in nj.__all__:
        assert getattr(nj, name).__name__ == name
    assert set(nj.__all__) == set(nj._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        nj.trane  # noqa: B018


def test_score():
    assert nj.score(r"it is \boxed{Paris}", ["Paris"], metric="boxed") == 1.0
    assert nj.score("bob", ["ann", "bo"]) == 0.0
    with pytest.raises(ValueError, match="no metric 'bleu'"):
        nj.score("bob", "bob", metric="bleu")
    with pytest.raises(ValueError, match="no gold answer"):
        nj.score("bob", [])
    for answer, golds in ((None, "bob"), ("bob", None), ("bob", ["bob", 3])):
        with pytest.raises(ValueError, match="answers are texts, and (None|3) is of type"):
            nj.score(answer, golds)


def test_what_train_is_given_is_where_the_program_looks(trained):
    def note(step, metrics):
        pass

    run = nj.train(
        dataset=iter(ROWS), validation=ROWS[:1], reward=[(3, half), (1, "em")],
        memory_update=keep, callbacks=[note], policy=STARTER, name="mine",
        changes={"steps": 20, "rollout": {"documents": 2}, "optimizer.learning_rate": 1e-3},
        quiet=True,
    )  # fmt: skip
    config, folder, resume, step, told, lent = trained[0]
    assert run.name == "runs/mine" and run.best is None and run.report.is_file()
    assert run.metrics == [{"step": 1, "reward": 0.5}]
    assert (resume, step, told) == (False, None, [note]) and folder == run.folder
    assert (config.steps, config.rollout.documents, config.policy) == (20, 2, STARTER)
    assert config.tasks.files == ("runs/mine/given/dataset.jsonl",)
    assert [task.extra for task, _ in files.read(config.tasks.files[0])] == [
        {"level": 0}, {"level": 1}, {"level": 2},
    ]  # fmt: skip
    v = config.validation
    assert v.files == ("runs/mine/given/validation.jsonl",) and (v.split, v.suite) == (0, "")
    assert v.every == 2  # ten times in a run
    assert config.tasks.reward == f"{__name__}:half=3.0,em=1.0" and lent == [half, None]
    assert config.reading.memory_update == f"{__name__}:keep"
    assert functions.lent(f"{__name__}:half") is None  # no longer


def test_a_run_goes_on_with_its_own_settings_and_the_same_rows(trained):
    how = {"policy": STARTER, "steps": 7, "validation.every": 3}
    nj.train(dataset=ROWS, validation=ROWS, name="mine", changes=how, quiet=True)
    nj.train(name="mine", resume=True, quiet=True)
    nj.train(dataset=ROWS, name="mine", resume=True, step=4, changes={"steps": 9}, quiet=True)
    first, second, third = (call[0] for call in trained)
    assert first == second and trained[2][2:4] == (True, 4)
    assert third.steps == 9 and third.tasks.files == first.tasks.files
    assert third.validation.every == 3
    with pytest.raises(ValueError, match="row 2 is not the one that .*given/dataset.jsonl holds"):
        nj.train(dataset=[ROWS[0]] * 3, name="mine", resume=True, quiet=True)
    nj.train(
        dataset=[{**ROWS[0], "answers": ["mended"]}, *ROWS[1:]],
        name="mine", resume=True, mended=True, quiet=True,
    )  # fmt: skip
    given = Path(third.tasks.files[0]).read_text()
    assert '"answers": ["mended"]' in given
    with pytest.raises(ValueError, match="there is no run runs/yours to resume"):
        nj.train(name="yours", resume=True, quiet=True)
    with pytest.raises(ValueError, match="which run goes on"):
        nj.train(resume=True, quiet=True)
    assert len(trained) == 4


def test_files_are_taken_as_they_are_and_names_are_numbered(trained, tmp_path):
    for dataset in ("mine.jsonl", Path("mine.jsonl"), ["mine.jsonl"]):
        nj.train(dataset=dataset, quiet=True)
        assert trained[-1][0].tasks.files == ("mine.jsonl",)
        assert not (trained[-1][1] / "given").exists()
    assert [call[1].name for call in trained] == ["train", "train-2", "train-3"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dataset": [*ROWS, 5]}, "row 4 of the dataset is of type int"),
        ({"dataset": 5}, "the dataset is of type int"),
        ({"reward": 5}, "reward is 5; give a function of a reading, the name of a metric"),
        ({"reward": [half]}, "give a function of .* or a list of .weight, one of these"),
        ({"reward": [(1, 5)]}, "5 is no function; give one that can be called"),
        ({"memory_update": 5}, "5 is no function"),
        ({"changes": {"step": 5}}, "no config key 'step'; did you mean steps?"),
        ({"changes": {"rollout.documents": "many"}}, "rollout.documents needs a whole number"),
        ({"config": "chatt"}, "there is no config chatt; did you mean chat?"),
        ({"name": "a/b"}, "is no name for a run"),
        ({"dataset": []}, r"\[\] has no rows; give rows, or the paths of task files, or leave it"),
        ({"validation": ()}, r"\(\) has no rows"),
        ({"dataset": iter(())}, "no rows|no row"),
        ({"reward": []}, r"reward is \[\]; give a function of a reading"),
        ({"callbacks": half}, "callbacks is <function half .*; give a list"),
        ({"callbacks": [5]}, "the callback 5 is no function"),
        ({"callbacks": [later]}, "the callback .*:later is a coroutine function, which nobody"),
        ({"callbacks": [lambda step: None]}, r"cannot be called with \(step, metrics\)"),
    ],
)
def test_what_is_wrong_is_one_line_and_leaves_no_folder(trained, given, says):
    with pytest.raises(ValueError, match=says) as said:
        nj.train(**{"dataset": ROWS, "name": "mine", "quiet": True, **given})
    assert "\n" not in str(said.value)
    assert not Path("runs").exists() and not trained


def old(answer, row):
    return 1.0


@pytest.mark.parametrize("key", ["reward", "memory_reward"])
def test_a_reward_that_cannot_be_called_is_one_line_before_step_0(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"tasks.{key} is '.*:old', which cannot be") as said:
        nj.train(dataset=ROWS, name="mine", policy=STARTER, quiet=True, **{key: old})
    assert "\n" not in str(said.value) and not Path("runs/mine").exists()


def test_how_an_evaluation_is_asked_for(trained, monkeypatch):
    seen = []
    monkeypatch.setattr(api.subjects, "named", lambda config, screen, suite: "somebody")
    monkeypatch.setattr(api.evaluation, "run", lambda *what: seen.append(what))
    Path("mine.jsonl").touch()
    nj.evaluate(STARTER, name="own", quiet=True)
    nj.evaluate(STARTER, dataset=ROWS, name="rows", changes={"evaluate.lengths": "512"}, quiet=True)
    judged = {"dataset": "mine.jsonl", "reward": [(3, half), (1, "em")]}
    nj.evaluate("http://localhost:1/v1", **judged, quiet=True)
    with pytest.raises(ValueError, match=r"\[\] has no rows"):
        nj.evaluate(STARTER, dataset=[], quiet=True)
    own, rows, served = (what[0] for what in seen)
    assert own.evaluate.suite == "synthetic" and own.policy == STARTER
    assert rows.evaluate.suite == "runs/rows/given/dataset.jsonl"
    usual = configuration.load("quickstart")
    assert rows.reading == usual.reading and rows.engine.slots == usual.engine.slots
    assert rows.evaluate.chunk_size == usual.evaluate.chunk_size
    assert served.endpoint.url == "http://localhost:1/v1"
    assert served.evaluate.reward == f"{__name__}:half=3.0,em=1.0" and own.evaluate.reward == ""
    assert served.reading == configuration.load("ruler").reading
    assert [what[2] for what in seen] == [Path("runs/own"), Path("runs/rows"), Path("runs/eval")]


def test_an_evaluation_goes_on_with_its_own_settings(trained, monkeypatch):
    def run(config, reader, folder, screen):
        write_sealed(folder / "config.json", keys.plain(config))
        (folder / "readings.jsonl").touch()
        trained.append(config)

    monkeypatch.setattr(api.subjects, "named", lambda *what: "somebody")
    monkeypatch.setattr(api.evaluation, "run", run)
    short = {"changes": {"evaluate.lengths": ("1k",)}}
    rows, trains = {"dataset": ROWS, "reward": "em"}, {"dataset": ROWS, "config": "quickstart"}
    for name, how in {"short": short, "served": short, "rows": rows, "trains": trains}.items():
        source = "http://localhost:1/v1" if name == "served" else STARTER
        nj.evaluate(source, **how, name=name, quiet=True)
        nj.evaluate(source, name=name, resume=True, quiet=True)
        assert trained[-1] == trained[-2]
    Path("runs/short/config.json").unlink()
    with pytest.raises(ValueError, match="config.json cannot be read .*; say config= again"):
        nj.evaluate(STARTER, name="short", resume=True, quiet=True)
    nj.evaluate(STARTER, name="short", config="quickstart", resume=True, quiet=True)
    for file in ("config.json", "readings.jsonl"):  # killed while the policy was loaded
        Path("runs/short", file).unlink()
    nj.evaluate(STARTER, name="short", resume=True, quiet=True)


# ---------------------------------------------------------------- the whole, in a running loop


def in_a_notebook(cell):
    """Calls it while the thread's loop runs, with Ctrl-C as ipykernel has it."""

    async def kernel():
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return cell()
        finally:
            signal.signal(signal.SIGINT, before)

    return asyncio.run(kernel())


HOW = {
    "policy": STARTER, "steps": 3, "data": {"tokens": 512, "questions": 2},
    "rollout": {"documents": 2, "group_size": 4}, "engine": {"slots": 16, "pages": 96},
    "grpo": {"row_length": 512, "micro_batch_rows": 1},
}  # fmt: skip


@pytest.mark.slow
def test_a_callback_ends_a_run_with_its_step_on_disk_from_where_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rarely = {**HOW, "steps": 9, "checkpoint": {"handoff": "memory", "every": 5}}
    run = nj.train(
        name="mine", changes=rarely, callbacks=[lambda step, metrics: step < 2], quiet=True
    )
    assert [line["step"] for line in run.metrics] == [1, 2]
    saved = sorted(path.name for path in (run.folder / "checkpoints").iterdir())
    assert [name for name in saved if name.isdecimal()] == ["0", "2"]
    run = nj.train(name="mine", resume=True, changes={"steps": 3}, quiet=True)
    assert [line["step"] for line in run.metrics] == [1, 2, 3]


@pytest.mark.slow
def test_the_stop_button_keeps_what_was_begun_and_the_run_goes_on(tmp_path, monkeypatch):
    """Stopped in the second rollout; then it is the run that was not stopped."""
    monkeypatch.chdir(tmp_path)
    nj.train(name="whole", changes=HOW, quiet=True)
    launched, seen = Replay._launched, []

    def interrupted(self, launch, params, contexts):
        sampled = launched(self, launch, params, contexts)
        seen.append(any(context.version == 1 for context in contexts))
        if sum(seen) == 3 and seen[-1]:
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), signal.SIGINT)
        return sampled

    with monkeypatch.context() as patched:
        patched.setattr(Replay, "_launched", interrupted)
        with pytest.raises(stopping.Stopped, match="in the rollout of step 2, of which"):
            in_a_notebook(lambda: nj.train(name="mine", changes=HOW, quiet=True))
    reading = []

    def enough(step, metrics):
        reading.append((step, metrics["reward"]))

    in_a_notebook(lambda: nj.train(name="mine", resume=True, callbacks=[enough], quiet=True))
    assert [step for step, _ in reading] == [2, 3]
    whole, mine = (Path("runs", name, METRICS).read_bytes() for name in ("whole", "mine"))
    assert whole == mine


def worth(reading):
    """One number a turn: what was noted, and whether the answer is right."""
    noted = [memory.tokens / (1 + memory.written) for memory in reading.memories]
    return [*noted, nj.score(reading.answer, reading.row["answers"])]


async def worth_in_time(reading):
    """The same, by judges that overtake one another."""
    for _ in range(random.randrange(50)):
        await asyncio.sleep(0)
    return worth(reading)


@pytest.mark.slow
def test_a_run_is_the_same_whoever_of_its_judges_answers_first_also_when_it_goes_on(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    how = {**HOW, "rollout": {"documents": 2, "group_size": 4, "max_staleness": 1}}
    told = {"dataset": ROWS, "validation": ROWS, "changes": how, "quiet": True}
    nj.train(name="whole", reward=worth, **told)
    stopping_at = [lambda step, metrics: step < 2]
    nj.train(name="mine", reward=worth_in_time, callbacks=stopping_at, **told)
    nj.train(name="mine", resume=True, reward=worth_in_time, quiet=True)
    for file in (METRICS, LEDGER):
        whole, mine = (Path("runs", name, file).read_bytes() for name in ("whole", "mine"))
        assert whole == mine
    measured = [
        nj.evaluate("runs/whole", dataset=ROWS, reward=one, quiet=True).by_length[0].accuracy.mean
        for one in (worth, worth_in_time)
    ]
    assert measured[0] == measured[1]


@pytest.mark.slow
def test_runs_in_two_threads_are_those_that_each_is_alone(tmp_path, monkeypatch):
    """One of two used to be lost: orbax counts its operations in the process."""
    monkeypatch.chdir(tmp_path)
    names = ("whole", "one", "two")
    nj.train(name="whole", changes=HOW, quiet=True)
    with ThreadPoolExecutor(2) as pool:
        made = pool.map(lambda name: nj.train(name=name, changes=HOW, quiet=True), names[1:])
        assert [run.folder.name for run in made] == ["one", "two"]
    whole, *others = (Path("runs", name, METRICS).read_bytes() for name in names)
    assert others == [whole, whole]
