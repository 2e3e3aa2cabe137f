"""Training on task files: the stream of draws, what is left out, what cannot be read."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from notepad_jax.data import files
from notepad_jax.data.records import Records
from notepad_jax.reading.trace import TraceFile
from notepad_jax.rollout import archive
from notepad_jax.rollout.ledger import Outcome
from notepad_jax.setup import configuration
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.metrics import LEDGER, read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import train
from tests.runs import SMALL, WRITTEN, run


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_document_that_cannot_be_read_costs_its_groups_or_ends_the_run(tmp_path, monkeypatch):
    whole = Records.at

    def at(records, ordinal):
        tasks = whole(records, ordinal)
        if ordinal != 1:
            return tasks
        document = Torn()
        return tuple(dataclasses.replace(task, document=document) for task in tasks)

    monkeypatch.setattr(Records, "at", at)
    words = ("--config.steps=1", "--config.rollout.group_size=2")
    first, *_ = run(tmp_path / "goes-on", *words, "--config.rollout.max_failed_share=1")
    assert first["groups/dropped_failed"] == 2 and first["groups/sampled"] > 4
    line = json.loads((tmp_path / "goes-on" / LEDGER).read_text())
    assert line["failed"] == [[1, 0], [1, 1]]
    with pytest.raises(ValueError, match="in 2 of the .* of a step .*OSError: the disk is g"):
        run(tmp_path / "ends", *words, "--config.rollout.max_failed_share=0.1")


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


@pytest.mark.slow
def test_documents_of_files_are_read_to_their_end(read_whole):
    """They were cut at data.tokens, the length of generated ones: 64 chunks were read as 8."""
    _, metrics, lines = read_whole
    for m in metrics:
        assert m["rollout/update_turns"] == 4 * m["rollout/trajectories"]  # 1,024 tokens by 256
        assert m["data/truncated_documents"] == m["data/truncated_tokens"] == 0
    assert not any("max_tokens" in line for line in lines)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_limit_of_files_is_said_once_and_counted(twice_as_long, tmp_path):
    words = (f"--config.tasks.files={twice_as_long}", "--config.tasks.max_tokens=600")
    metrics, lines = run_and_listen(tmp_path / "run", *words, "--config.steps=2")
    for m in metrics:
        assert m["rollout/update_turns"] == 3 * m["rollout/trajectories"]  # 600 tokens by 256
        assert m["data/truncated_documents"] == m["groups/sampled"]
        assert m["data/truncated_tokens"] == 424 * m["data/truncated_documents"]
    (line,) = [line for line in lines if "max_tokens" in line]
    assert "in step 1, " in line and "more than 600 tokens" in line


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_run_stopped_within_a_window_goes_on_as_one_that_was_not(tmp_path):
    """Three steps are a window, and one of them reads its longest documents."""
    sizes = [size for _ in range(4) for size in (128, 256, 512)]
    tasks = [make_tasks(k, size, 1)[0] for k, size in enumerate(sizes)]
    files.write(tmp_path / "mixed.jsonl", tasks, iter(sizes))
    words = [
        f"--config.tasks.files={tmp_path / 'mixed.jsonl'}", "--config.rollout.documents=2",
        "--config.rollout.max_rounds=1", "--config.rollout.archive=2",
    ]  # fmt: skip
    window = [*words, "--config.rollout.window=3"]
    whole = run(tmp_path / "whole", *window, "--config.steps=6")
    run(tmp_path / "parts", *window, "--config.steps=4")
    assert run(tmp_path / "parts", *window, "--config.steps=6", resume=True) == whole
    for name in WRITTEN:
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ValueError, match="windows of 3 steps of 2 documents, .* without windows"):
        run(tmp_path / "parts", *words, "--config.steps=7", resume=True)

    read: dict[int, list[int]] = {}  # by step: tokens of documents, of the groups that are kept
    with TraceFile(tmp_path / "whole" / archive.FILE) as trajectories:
        for _, reading in trajectories.readings():
            size = sizes[int(reading["task_id"].split("-")[1])]
            read.setdefault(reading["step"], []).append(size)
    for window in ((1, 2, 3), (4, 5, 6)):
        longest = sorted((read[step] for step in window if step in read), key=max, reverse=True)
        assert len(longest) > 1
        assert all(min(long) >= max(short) for long, short in itertools.pairwise(longest))
