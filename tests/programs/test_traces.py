"""`notepad-jax trace`: what it finds, where it puts a page, and what it says to bad input."""

import json
import re
import shlex
from pathlib import Path

import pytest

from notepad_jax import cli
from notepad_jax.programs import traces
from notepad_jax.telemetry.screen import SilentScreen
from tests.limits import content, largest_file
from tests.report.made_traces import evaluation, training

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with a trace of training and two evaluations, in the current folder's runs."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/mine")
    training(folder / "trajectories.jsonl")
    for step in (100, 0):
        evaluation(folder / f"readings/step_{step}/readings.jsonl")
    return folder


def made(*paths, out=None):
    return traces.run([str(path) for path in paths], out and str(out), SilentScreen())


def index(page):
    (line,) = (Path(page).parent / "data/index.js").read_text().splitlines()
    return json.loads(line.removeprefix('trace.part("index",').removesuffix(");"))


def test_a_run_is_found_with_all_that_was_read_in_it(run):
    page = made(run)
    assert (page.page, page.readings) == ("runs/mine/trace/index.html", 4)
    assert index(page.page)["sources"] == ["trajectories", "step_0", "step_100"]
    assert index(page.page)["title"] == "mine"
    assert made("mine").sources == page.sources  # by its name alone; the page is no source
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_two_runs_and_single_files_are_told_apart(run):
    training(Path("runs/other/trajectories.jsonl"))
    page = made(run, "runs/other", out="compared")
    assert index(page.page)["sources"] == [
        "mine/trajectories", "mine/step_0", "mine/step_100",
        "other/trajectories",
    ]  # fmt: skip
    alone = made(run / "trajectories.jsonl")
    assert alone.page == "runs/mine/trajectories.trace/index.html"
    assert index(alone.page)["sources"] == ["trajectories"]


def test_a_page_is_made_anew_as_a_whole_or_not_at_all(run, tmp_path):
    made(run)
    stray = run / "trace/data/99.js"
    stray.write_text("old")
    made(run)
    assert not stray.exists()
    before = content(tmp_path)
    with largest_file(1000), pytest.raises(OSError):
        made(run)
    assert content(tmp_path) == before


def test_a_page_is_made_anew_where_the_user_stands_and_what_else_is_there_stays(run, monkeypatch):
    made(run, out="pages")
    Path("pages/notes.txt").write_text("mine")
    page = Path("pages/index.html").read_bytes()
    Path("led").symlink_to("pages")
    about = run.absolute()
    for where, out in (("pages", "."), (".", "led")):
        with monkeypatch.context() as patch:
            patch.chdir(where)
            made(about, out=out)
        assert sorted(path.name for path in Path("pages").iterdir()) == [
            "data", "index.html", "notes.txt"
        ]  # fmt: skip
        assert Path("pages/index.html").read_bytes() == page


def test_bad_input_is_named_with_its_mend(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("years of work")
    (tmp_path / "text.jsonl").write_text('{"question": "no trace"}\n')
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/readings.jsonl").write_text('{"reading": {"cut')
    for path, out, said in (
        ("mien", None, "there is no mien; name a run .* in runs there are mine"),
        ("empty", None, "empty has no trajectories.jsonl and no readings.jsonl: nothing was read"),
        ("text.jsonl", None, "text.jsonl is no trace: its first line is no reading; name a run"),
        ("gs://bucket/run", None, "lies in a bucket.*copy its trajectories.jsonl"),
        ("begun", None, "no reading of begun has ended yet"),
        ("mine", "full", "full holds other things than a page; name a new folder with --out"),
        ("mine", "text.jsonl", "text.jsonl is a file; name a folder for the page with --out"),
    ):
        with pytest.raises(ValueError, match=said):
            made(path, out=out)
    assert (tmp_path / "full/thesis.txt").read_text() == "years of work"
    lines = (run / "trajectories.jsonl").read_text()
    (run / "trajectories.jsonl").write_text(lines + '{"reading": {}, "memories": 5}\n')
    with pytest.raises(ValueError, match="line 3 of runs/mine/trajectories.jsonl is no reading"):
        made(run)
    assert not (run / "trace").exists()


def test_the_command_prints_and_opens(run, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(traces.webbrowser, "open", opened.append)
    assert cli.main(["trace", "runs/mine", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["page"], told["readings"], told["turns"]) == ("runs/mine/trace/index.html", 4, 14)
    assert opened == []
    assert cli.main(["trace", "mine", "--open", "yes"]) == 0
    assert opened == [(run / "trace/index.html").resolve().as_uri()]
    assert capsys.readouterr().out.startswith("runs/mine/trace/index.html: 4 readings, 14 turns")
    assert cli.main(["trace", "nothing"]) == 1
    assert capsys.readouterr().err.startswith("notepad-jax: there is no nothing; name a run")


def test_the_commands_of_the_page_about_traces_work(run):
    evaluation(Path("runs/eval/readings.jsonl"))
    evaluation(Path("asked.jsonl"))
    training(Path("runs/other/trajectories.jsonl"))
    page = (ROOT / "docs/traces.md").read_text(encoding="utf-8")
    commands = "".join(re.findall(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)).splitlines()
    assert len(commands) >= 3
    for line in commands:
        program, *words = shlex.split(line)
        assert program == "notepad-jax" and words[0] == "trace"
        assert cli.main([*words, "--open", "no"]) == 0
