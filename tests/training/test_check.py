"""Whatever is damaged in a run's folder is said, and nothing is said of one that is whole."""

import json
import random
import shutil

import numpy as np
import pytest

from notepad_jax import cli, keys
from notepad_jax.checkpoint import best
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.engine import journal
from notepad_jax.reading.trace import MemoryChange, Spool, TraceFile
from notepad_jax.rollout import archive
from notepad_jax.setup import configuration
from notepad_jax.telemetry.identity import write_json
from notepad_jax.telemetry.metrics import RunLog
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.telemetry.sinks import Sinks
from notepad_jax.training import check, record
from tests.training.test_stopping import TURNS

CONFIG = configuration.load("quickstart", ["--config.steps=3", "--config.rollout.group_size=2"])
STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder as a training run of adapters leaves it, stopped in its fourth rollout."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    write_json(folder / "config.json", keys.plain(CONFIG))
    write_json(folder / "machine.json", {"dtype": "float32", "engine.pages": 96})
    record.begin(folder, CONFIG)
    other = configuration.changed(CONFIG, ["--config.grpo.clip_low=0.1"])
    record.change(folder, 2, other, {})
    write_json(folder / "config.json", keys.plain(other))
    nowhere = Sinks((), folder, {}, print)
    with RunLog(folder, nowhere) as log, TraceFile(folder / archive.FILE) as readings:
        for step in STEPS:
            account = {"drawn": [step - 1, step], "trained": [[step, 0]], "waiting": []}
            log.write(step, {"reward": step / 7}, {"rollout_seconds": 0.1}, account)
            for sample in range(2):
                told = {"step": step, "ordinal": step, "sample": sample}
                readings.add(told, Spool([MemoryChange(0, "a memory", 2)]))
            log.write(step, {"validation/score": step / 8})
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.keep_base({"embed": np.arange(64, dtype=np.float32)})
    for step in STEPS[1:]:
        arrays = {"a": np.full(64, step, np.float32)}
        checkpoints.save(step, arrays, {"mu": arrays}, {"next": step}, {"seed": 0})
    best.mark(folder / "checkpoints", best.Best(3, 3 / 8))
    journal.begin(folder / "under_way.jsonl", {"step": 4}, TURNS)
    return folder


def looked(folder):
    return check.run(folder, SilentScreen())


def test_a_folder_that_is_whole_is_said_to_be(whole):
    found = looked(whole)
    assert found.damaged == () and found.notes == () and found.old_lines == 0
    assert found.steps == (2, 3) and found.bytes > 1000 and found.lines == 6 + 3 + 3 + 6 + 2
    assert check.text(found).endswith("everything is as it was written")


@pytest.mark.slow
def test_a_run_that_has_just_ended_is_whole(uninterrupted):
    found = looked(uninterrupted)
    assert found.damaged == () and found.notes == ()


def flip(path, chance):
    content = bytearray(path.read_bytes())
    at = chance.randrange(len(content))
    content[at] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def halve(path, chance):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path, chance):
    path.write_bytes(b"")


def remove(path, chance):
    path.unlink()


def take_a_line(path, chance):
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[chance.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def swap_lines(path, chance):
    first, second, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((second, first, *others)))


FILES = ("config.json", "machine.json", "metrics.jsonl", "ledger.jsonl", "timings.jsonl",
         "trajectories.jsonl", "history.jsonl", "under_way.jsonl", "checkpoints/best.json",
         "checkpoints/3/meta/data.json", "checkpoints/2/manifest.json",
         "checkpoints/base/0/meta/data.json")  # fmt: skip
ALLOWED = {
    ("under_way.jsonl", remove),  # nobody stopped it
    ("checkpoints/best.json", remove),  # nothing was validated
    ("metrics.jsonl", swap_lines),  # a step's own line and that of its validation
}


@pytest.mark.parametrize("file", FILES)
def test_every_damage_is_said_and_nothing_is_changed(whole, tmp_path, file):
    chance = random.Random(file)
    folder = shutil.copytree(whole, tmp_path / "mine")
    content = (folder / file).read_bytes()
    damages = [flip, flip, flip, flip, halve, empty, remove]
    damages += [take_a_line, take_a_line, swap_lines] if file.endswith(".jsonl") else []
    for damage in damages:
        (folder / file).write_bytes(content)
        if (file, damage) in ALLOWED:
            continue
        damage(folder / file, chance)
        before = (folder / file).read_bytes() if (folder / file).exists() else None
        found = looked(folder)
        # A kill cuts what was being written of the turns, which is no damage.
        torn = file == "under_way.jsonl" and damage in (halve, take_a_line) and found.notes
        assert found.damaged or torn, (damage, before)
        assert all(one.mend and one.problem and one.where for one in found.damaged)
        assert before == ((folder / file).read_bytes() if before is not None else None)


def test_weights_and_what_is_missing_among_them(whole, tmp_path):
    parts = [path for path in whole.glob("checkpoints/**/*") if path.is_file()]
    for number, path in enumerate(random.Random(0).sample(sorted(parts), 12)):
        folder = shutil.copytree(whole, tmp_path / str(number))
        (folder / path.relative_to(whole)).unlink()
        found = looked(folder).damaged
        assert found or path.name == best.NAME
    folder = shutil.copytree(whole, tmp_path / "base")
    shutil.rmtree(folder / "checkpoints" / "base")
    (found,) = looked(folder).damaged
    assert found.where == "checkpoints/base" and "--resume saves it again" in found.mend
    shutil.rmtree(folder / "checkpoints")
    assert "has no step" in looked(folder).damaged[0].problem


def test_lines_of_an_earlier_version_and_one_that_a_kill_cut_are_no_damage(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "mine")
    for name in ("metrics.jsonl", "ledger.jsonl", "timings.jsonl"):
        values = [json.loads(line) for line in (folder / name).open()]
        for one in values:
            del one["digest"]
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in values))
    with (folder / "timings.jsonl").open("a") as file:
        file.write('{"step": 4, "ro')
    (folder / "history.jsonl").unlink()
    found = looked(folder)
    assert found.damaged == () and found.old_lines == 12
    assert found.notes == ("the last line of timings.jsonl is cut off; --resume cuts it back",)
    with (folder / "under_way.jsonl").open("ab") as file:
        file.write(b'{"seed": 8, "asked"')
    found = looked(folder)
    assert found.damaged == () and found.notes[1:] == (
        "the last turns in under_way.jsonl are cut off; --resume makes them anew",
    )


def test_an_edited_setting_is_named(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "mine")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"clip_low": 0.1', '"clip_low": 0.3'))
    (found,) = looked(folder).damaged
    assert (found.where, found.problem) == (
        "config.json",
        "grpo.clip_low is 0.3, and the run has 0.1",
    )


def test_the_command_says_what_is_damaged_and_what_to_do(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "runs" / "mine")
    assert cli.main(["check", "runs/mine"]) == 0
    assert capsys.readouterr().out.startswith("runs/mine: ")
    (tmp_path / "runs/mine/checkpoints/3/meta/data.json").unlink()
    assert cli.main(["check", "runs/mine", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["damaged"][0]["where"] == "checkpoints/3" and found["steps"] == [2, 3]
    assert said.err == "notepad-jax: runs/mine is damaged in one place\n"
    for words, code in ((["check", "runs/nobody"], 1), (["check", str(tmp_path)], 1)):
        assert cli.main(words) == code
        assert len(capsys.readouterr().err.splitlines()) == 1
