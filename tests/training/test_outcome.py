"""What a training run leaves to look at, from its files alone."""

import dataclasses
import html
import json

import pytest

from notepad_jax.checkpoint import best
from notepad_jax.setup import configuration
from notepad_jax.training import outcome
from notepad_jax.training.validation import SCORE

HELD_OUT = {0: (0.5, 0.25), 2: (0.75, 0.5), 4: (0.75, 0.25)}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    for step in (2, 3, 4):
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
    return folder.relative_to(tmp_path)


def write(folder, validated=HELD_OUT):
    lines = [{"step": step, "reward": step / 8} for step in (1, 2, 3, 4)]
    for step, (short, long) in validated.items():
        mean = {SCORE: (short + long) / 2}
        lines.append({"step": step, **mean, f"{SCORE}_2K": short, f"{SCORE}_8K": long})
    lines.sort(key=lambda line: line["step"])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_has_the_curve_the_best_step_and_the_next_commands(run):
    write(run)
    best.mark(run / "checkpoints", best.Best(2, 0.625))
    found = outcome.outcome(configuration.load("quickstart"), run)
    assert found.steps == (2, 3, 4) and found.best == best.Best(2, 0.625)
    page = html.unescape(found.report.read_text(encoding="utf-8"))
    assert "best on held-out tasks is step 2, with 62.5%" in page
    for words in ("62.5%", "75.0%", "2K", "8K", "Held-out tasks", "GRPO"):
        assert words in page
    for command in found.next.values():
        assert "runs/mine@best" in command and command in page
    told = outcome.text(found).splitlines()
    assert told[0].split() == ["report", "runs/mine/report.html"]
    assert "(steps 2, 3, 4)" in told[1] and "step 2, with 62.5%" in told[2]
    assert [line.partition("  ")[2].split()[0] for line in told[3:]] == ["notepad-jax"] * 3


def test_without_validation_the_newest_step_is_what_is_gone_on_with(run):
    write(run, {})
    found = outcome.outcome(configuration.load("quickstart"), run)
    assert found.best is None and "Held-out" not in found.report.read_text(encoding="utf-8")
    assert all("runs/mine " in f"{command} " for command in found.next.values())


def test_a_config_without_the_section_validation_has_a_report_as_well(run):
    write(run, {})
    config = dataclasses.replace(configuration.load("quickstart"), validation=None)
    assert outcome.outcome(config, run).report.is_file()


def test_a_run_of_ones_own_questions_is_not_told_to_play_the_starters_game(run):
    write(run, {})
    config = configuration.load("chat", ["--config.tasks.files=mine.jsonl"])
    words = outcome.text(outcome.outcome(config, run))
    assert "--suite ruler-qa" in words and "code of NAME" not in words


def test_each_run_is_measured_on_what_its_policy_can_read(run):
    """The starter has no chat template, which RULER's questions are asked in."""
    write(run, {})
    for words, suite in (
        (["--config.tasks.files=mine.jsonl"], "--suite mine.jsonl"),
        (["--config.tasks.files=a.jsonl", "--config.validation.files=b.jsonl"], "--suite b.jsonl"),
        (["--config.tasks.files=two words.jsonl"], "--suite 'two words.jsonl'"),
        (["--config.tasks.stories=vt"], "--suite stories --lengths 2k"),
    ):
        command = outcome.outcome(configuration.load("quickstart", words), run).next["measure it"]
        assert suite in command


def test_what_looks_sick_and_who_taught_it_stand_on_the_page_and_in_what_is_printed(run):
    sick = {"reward": 0.0, "groups/sampled": 20, "groups/informative_share": 0}
    lines = [json.dumps({"step": step, **sick}) + "\n" for step in (1, 2, 3, 4)]
    (run / "metrics.jsonl").write_text("".join(lines))
    found = outcome.outcome(configuration.load("quickstart", ["--config.recipe=dapo"]), run)
    (warning,) = found.warnings
    assert warning.startswith("step 3: no group of the last 3 steps has two different rewards")
    page = html.unescape(found.report.read_text(encoding="utf-8"))
    assert warning in page and "What looks sick" in page and "recipe dapo" in page
    assert outcome.text(found).endswith(f"looks sick: {warning}")
    write(run)
    well = outcome.outcome(configuration.load("quickstart"), run)
    assert well.warnings == () and "looks sick" not in outcome.text(well)
    assert "looks sick" not in well.report.read_text(encoding="utf-8")


def test_what_a_run_leaves_is_looked_for_where_its_steps_lie(tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    steps = tmp_path / "elsewhere" / "mine" / "checkpoints"
    (steps / "1").mkdir(parents=True)
    best.mark(steps, best.Best(1, 0.5))
    words = [f"--config.checkpoint.folder={tmp_path / 'elsewhere'}"]
    found = outcome.outcome(configuration.load("quickstart", words), folder)
    assert (found.checkpoints, found.steps, found.best.step) == (steps, (1,), 1)
    assert "mine@best" in outcome.text(found) and found.report.is_file()
