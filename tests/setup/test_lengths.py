"""How long the document of a draw is: what a row says, or what its characters make; read once."""

import itertools

import pytest

from notepad_jax.data import files
from notepad_jax.setup import builders, configuration, lengths, task_stream
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.text.tokenizer import counter
from notepad_jax.training import rollout_settings
from notepad_jax.types import TextDocument
from tests.runs import SMALL
from tests.training.test_train_files import Said

SIZES = (128, 512, 2048, 4096)


def opened(tmp_path, said, *words):
    """A file of four documents of SIZES; `said` is what their rows say of their lengths."""
    tasks = [make_tasks(k, size, 1)[0] for k, size in enumerate(SIZES)]
    files.write(tmp_path / "four.jsonl", tasks, said)
    given = f"--config.tasks.files={tmp_path / 'four.jsonl'}"
    config = configuration.load("quickstart", [*SMALL, given, *words])
    tokenizer = builders.words(config.policy).tokenizer
    return task_stream.opened(config, tokenizer, Said()), tokenizer


def sizes(stream, length):
    """Length by source and number, of the first draws."""
    return {stream.records.key(place): length(place) for place in range(12)}


def test_a_row_that_says_nothing_is_measured_by_its_characters(tmp_path):
    stream, tokenizer = opened(tmp_path, itertools.repeat(0))
    found = sizes(*lengths.in_windows(stream, tokenizer, 1, 2, 0))
    assert len(found) == 4
    for (source, number), length in found.items():
        document = stream.sources.tasks[source][number][0].document
        true = sum(map(counter(tokenizer), document.pieces()))
        assert true / 1.1 < length < true * 1.1


def test_what_a_row_says_is_taken_and_nothing_is_read(tmp_path, monkeypatch):
    stream, tokenizer = opened(tmp_path, iter((5, 6, 7, 8)))
    monkeypatch.setattr(lengths, "about", None)
    assert sorted(sizes(*lengths.in_windows(stream, tokenizer, 1, 2, 0)).values()) == [5, 6, 7, 8]


def test_a_document_is_measured_once_for_window_and_shares(tmp_path, monkeypatch):
    stream, tokenizer = opened(tmp_path, itertools.repeat(0))
    read, about = [], lengths.about
    monkeypatch.setattr(lengths, "about", lambda *how: read.append(1) or about(*how))
    sizes(*lengths.in_windows(stream, tokenizer, 3, 2, 0))
    assert len(read) == 4


def test_by_hand():
    count = lambda text: len(text.split())  # noqa: E731
    assert lengths.about(TextDocument("ab cd ef gh "), count) == 4
    assert lengths.about(TextDocument("abc " * 5000), count) == 5000  # 20,000 characters of 4
    assert lengths.about(TextDocument(""), count) == 0


def test_in_windows_a_document_that_cannot_be_read_is_named(tmp_path):
    class Torn:
        def pieces(self):
            raise OSError("the disk is gone")

    stream, tokenizer = opened(tmp_path, itertools.repeat(0))
    pairs = stream.sources.tasks["synthetic/one_hop"]
    object.__setattr__(pairs[0][0], "document", Torn())
    stream, length = lengths.in_windows(stream, tokenizer, 2, 4, 0)
    with pytest.raises(ValueError, match="of task 'synthetic-.*OSError: the disk is gone.*=1"):
        for place in range(8):
            length(place)


def test_made_documents_are_of_one_length(tmp_path):
    config = configuration.load("quickstart", [*SMALL, "--config.rollout.window=4"])
    tokenizer = builders.words(config.policy).tokenizer
    stream = task_stream.opened(config, tokenizer, Said())
    same, length = lengths.in_windows(stream, tokenizer, 4, 2, 0)
    assert same is stream and length(7) == 0
    (said,) = rollout_settings.idle(config)
    assert said.startswith("rollout.window=4 cannot act: documents that are made")


def idle(*words):
    words = ("--config.tasks.files=a.jsonl", "--config.rollout.max_rounds=1", *words)
    return list(rollout_settings.idle(configuration.load("quickstart", [*SMALL, *words])))


def test_what_takes_from_a_window_is_said():
    steps = "--config.steps=8"
    assert idle(steps) == [] == idle(steps, "--config.rollout.window=4")
    (said,) = idle("--config.steps=9", "--config.rollout.window=4")
    assert "a run of 9 steps ends within a window" in said
    (said,) = idle(steps, "--config.rollout.window=4", "--config.rollout.max_rounds=3")
    assert "saves less with rollout.max_rounds: steps then draw" in said


def test_windows_and_balanced_batches_do_not_go_together():
    words = [
        "--config.tasks.files=a.jsonl", "--config.tasks.balanced=true", "--config.rollout.window=2"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="window is 2, and tasks.balanced passes over draws"):
        rollout_settings.check(configuration.load("quickstart", [*SMALL, *words]))
    rollout_settings.check(configuration.load("quickstart", [*SMALL, *words[:2]]))
