"""Rows with a fault, by command: left out and counted before any is drawn, mended on resume."""

import dataclasses
import itertools
import json

import pyarrow
import pyarrow.parquet
import pytest

from notepad_jax import cli
from notepad_jax.data import files, formats
from notepad_jax.setup import builders, configuration, eval_jobs, task_stream
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text import approximate
from notepad_jax.training import train, validation
from tests.runs import SMALL


class Heard(SilentScreen):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    warn = say


def table(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def rows(count: int = 9) -> list[dict]:
    made = [make_tasks(seed, 512, 1)[0] for seed in range(count)]
    return [
        {
            "id": f"t{k}", "question": task.question, "answers": list(task.answers),
            "source": "own", "metric": "em", "document": "".join(task.document.pieces()),
        }
        for k, task in enumerate(made)
    ]  # fmt: skip


def faulty() -> list[dict]:
    """Nine rows, of which five can be drawn."""
    made = rows()
    made[1]["document"] = None
    made[3]["metric"] = "exact"
    made[4]["document"] = " "
    made[7]["answers"] = [""]
    return made


FIRST = ("row 2 has an empty 'document'", "row 4: there is no metric 'exact'", "row 8 has a blank")


def settings(*words):
    return configuration.load("quickstart", [*SMALL, *(f"--config.{word}" for word in words)])


def opened(*words):
    config, screen = settings(*words), Heard()
    tokenizer = builders.words(config.policy).tokenizer
    return config, tokenizer, task_stream.opened(config, tokenizer, screen), screen.lines


# ---------------------------------------------------------------- train


def test_what_is_left_out_of_files_is_said_by_reason_with_its_first_row(tmp_path):
    path = table(tmp_path / "own.parquet", faulty())
    *_, stream, lines = opened(f"tasks.files={path}")
    assert stream.records.tasks == {"own": 5}
    assert [line.partition(", with ")[0] for line in lines[:3]] == [
        "left out: 2 of 9 rows", "left out: 1 of 9 rows", "left out: 1 of 9 rows",
    ]  # fmt: skip
    pairs = zip(FIRST, lines[:3], strict=True)
    assert all(f"the first is {path} {said}" in line for said, line in pairs)
    assert lines[3:] == ["tasks.files: 9 rows, 5 to draw from, 4 left out"]
    assert opened(f"tasks.files={table(tmp_path / 'good.parquet', rows())}")[-1] == []


def test_one_line_says_what_is_drawn_held_out_and_left_out(tmp_path):
    path = table(tmp_path / "own.parquet", rows(40))
    twins = rows(40)
    for k, row in enumerate(twins):
        twins[k] = {**row, "id": f"twin{k}", "source": "twin", "document": row["document"] + " \n"}
    twin = table(tmp_path / "twin.parquet", twins)
    words = (f"tasks.files={path},{twin}", "validation.every=1", "validation.split=0.3")
    config, tokenizer, stream, (line,) = opened(*words)
    drawn, held = sum(stream.records.tasks.values()), sum(map(len, stream.held_out.values()))
    assert f"80 rows, {drawn:,} to draw from, {held:,} held out" in line
    assert line.endswith(", 0 left out")
    read = {(task.question, task.answers) for own in stream.held_out.values() for task, _ in own}
    trained = (stream.records.at(ordinal)[0] for ordinal in range(200))
    assert not read & {(task.question, task.answers) for task in trained}
    assert {len(own) for own in stream.held_out.values()} == {held // 2}
    assert validation.items(config, stream, tokenizer, Heard())


def test_validation_files_say_what_of_them_is_left_out_and_trained_on(tmp_path):
    made = rows(12)
    train_on, other = made[:8], [{**row, "id": f"v{k}"} for k, row in enumerate(made[6:])]
    other[5]["metric"] = "loud"
    other[4]["document"] = made[0]["document"]
    paths = [table(tmp_path / f"{k}.parquet", own) for k, own in enumerate((train_on, other))]
    words = (f"tasks.files={paths[0]}", "validation.every=1", f"validation.files={paths[1]}")
    config, tokenizer, stream, _ = opened(*words)
    screen = Heard()
    assert len(validation.items(config, stream, tokenizer, screen)) == 5
    left_out, shared = screen.lines
    assert left_out.startswith("validation.files: left out: 1 of 6 rows, with an unknown metric")
    assert "of 5 tasks, 2 ask what a task of tasks.files asks" in shared
    assert "and 3 are about a document of tasks.files" in shared


def run(folder, path, *words, resume=False, mended=False):
    screen = Heard()
    config = settings(f"tasks.files={path}", *words)
    train.train(config, folder, screen, resume, mended=mended)
    return read_metrics(folder), screen.lines


@pytest.mark.slow
def test_a_run_goes_on_with_mended_rows_where_that_is_said(tmp_path):
    """A null document and an unknown metric ended runs in the step that drew them."""
    path, folder = table(tmp_path / "own.parquet", faulty()), tmp_path / "run"
    run(folder, path, "steps=1")
    told = json.loads((folder / task_stream.ROWS).read_text())
    assert told["files"][0]["rows"] == 9 and told["files"][0]["left_out"] == [2, 4, 5, 8]
    assert {one["why"]: one["count"] for one in told["left_out"]} == {
        "no text to read": 2, "an unknown metric": 1, "no gold answer": 1,
    }  # fmt: skip
    mended = rows()
    mended[0]["answers"] = ["nobody"]
    table(path, mended)
    with pytest.raises(ValueError, match="were mended where they stand, with --mended"):
        run(folder, path, "steps=2", resume=True)
    metrics, lines = run(folder, path, "steps=2", resume=True, mended=True)
    assert [m["step"] for m in metrics] == [1, 2]
    assert any(f"from step 2 on, rows of {path} are read as they are now" in line for line in lines)
    assert any("4 of 9 rows, with a fault when this run began" in line for line in lines)
    told = json.loads((folder / task_stream.ROWS).read_text())
    assert told["mended"] == [{"step": 1, "files": [str(path)]}]
    assert told["files"][0]["left_out"] == [2, 4, 5, 8]
    run(folder, path, "steps=2", resume=True)  # said once
    fewer = tmp_path / "fewer.parquet"
    table(fewer, mended[:-1])
    with pytest.raises(ValueError, match="none may come, go or change sides"):
        run(folder, fewer, "steps=3", resume=True, mended=True)
    with pytest.raises(ValueError, match="--mended is for a run that goes on: say --resume"):
        run(tmp_path / "new", path, mended=True)
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- eval and build


def test_an_evaluation_says_what_it_leaves_out(tmp_path):
    screen = Heard()
    path = table(tmp_path / "own.parquet", faulty())
    config = configuration.load("ruler", [f"--config.evaluate.suite={path}"])
    tasks = eval_jobs.tasks_of(config, [], approximate.count, screen)
    assert sum(map(len, tasks.values())) == 5
    assert sum(line.startswith("left out: ") for line in screen.lines) == 3
    assert any("5 rows of" in line for line in screen.lines)


def test_build_says_why_it_leaves_out_which_rows(tmp_path, capsys):
    """All were "gold answers that exact gives nothing for", or lost without a word."""
    path, out = table(tmp_path / "own.parquet", faulty()), tmp_path / "out"
    assert cli.main(["build", str(path), "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    made = json.loads(said.out)
    assert made["tasks"] == 5 and made["left_out"] == {
        "no text to read": 2, "an unknown metric": 1, "no gold answer": 1,
    }  # fmt: skip
    assert all(f"the first is {path} {first}" in said.err for first in FIRST)
    assert len(formats.read_any(out / "own.jsonl")) == 5
    table(path, rows())
    assert cli.main(["build", str(path), "--out", str(out)]) == 1
    assert "was made with sha256 of rows = " in capsys.readouterr().err
    table(path, [{**row, "metric": "exact"} for row in rows()])
    assert cli.main(["build", str(path), "--out", str(tmp_path / "none")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "none of the 9 rows of" in error and "there is no metric 'exact'" in error
    assert not list((tmp_path / "none").glob("*.jsonl"))


def test_build_refuses_a_file_of_which_no_gold_answer_can_be_earned(tmp_path, capsys):
    task = dataclasses.replace(make_tasks(0, 512, 1)[0], metric="row_iou", answers=("no table",))
    files.write(tmp_path / "own.jsonl", [task], itertools.repeat(1))
    words = ["build", str(tmp_path / "own.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(words) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "none of the 1 rows of" in error and "'no table' is itself worth 0" in error


def test_golongrl_rows_with_a_fault_are_left_out_and_counted(tmp_path, capsys):
    row = {
        "data_source": "selection",
        "prompt": [{"role": "user", "content": "Ada lives in Oslo.\n\nWhere? A Rome B Oslo"}],
        "reward_model": {"ground_truth": "B"},
        "extra_info": {"reward_mode": "selection", "question": "Where? A Rome B Oslo"},
    }
    unknown = {**row, "data_source": "x", "extra_info": {**row["extra_info"], "reward_mode": "x"}}
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, (row, unknown, {**row, "reward_model": None}))))
    words = ["build", "golongrl", "--rows", str(path), "--out", str(tmp_path / "out"), "--json"]
    assert cli.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tasks"] == 1 and sum(made["left_out"].values()) == 2
    assert made["left_out"]["an unknown metric"] == 1
