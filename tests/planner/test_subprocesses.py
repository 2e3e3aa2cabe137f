"""Children may die of their work: the others' work goes on, and what ended one is told."""

import functools
import os
import signal
import sys
import threading

import pytest

from notepad_jax.planner import subprocesses
from notepad_jax.planner.subprocesses import Died


class Worker:
    """Answers with the item's square; some items are too much for it. Counts in a folder."""

    def __init__(self, folder):
        self.folder = folder
        open(os.path.join(folder, f"child {os.getpid()}"), "x").close()

    def key(self, item):
        return f"key {abs(item)}"

    def answer(self, item):
        open(os.path.join(self.folder, f"item {item}"), "x").close()
        if item == 3:
            print("doing well\nF0000 00:00 Check failed: a < b\nmore", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        if item == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if item == 5:
            os._exit(7)
        if item == 6:
            raise FileNotFoundError("6 is nowhere")
        return item * item


def run(folder, items, workers=1, known=None, done=lambda item: None):
    begin = functools.partial(Worker, str(folder))
    return subprocesses.run(begin, items, workers, {} if known is None else known, done)


def test_what_kills_a_child_is_told_and_the_others_are_answered(tmp_path):
    known, seen = {"key 9": 81}, []
    found = run(tmp_path, [2, 3, 1, 4, -2, 5, 9], known=known, done=seen.append)
    assert {item: found[item] for item in (1, 2, -2, 9)} == {1: 1, 2: 4, -2: 4, 9: 81}
    assert found[3].words == "SIGABRT: F0000 00:00 Check failed: a < b" and not found[3].killed
    assert found[4] == Died(-9, "") and found[4].killed and found[4].words == "SIGKILL"
    assert found[5].words == "exit code 7"
    assert seen == [2, 3, 1, 4, -2, 5, 9]
    assert known == {"key 9": 81, "key 2": 4, "key 1": 1}
    made = sorted(name.name for name in tmp_path.iterdir())
    assert [name for name in made if name.startswith("item")] == [f"item {n}" for n in range(1, 6)]
    assert sum(name.startswith("child") for name in made) == 4  # the first, and after each death


def test_an_error_of_a_worker_ends_the_work_and_leaves_no_child(tmp_path):
    before = threading.active_count()
    with pytest.raises(FileNotFoundError, match="6 is nowhere") as raised:
        run(tmp_path, [6, 1, 2], workers=2)
    assert any("in answer" in note for note in raised.value.__notes__)
    assert threading.active_count() == before
    for name in tmp_path.glob("child *"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(name.name.split()[1]), 0)


def test_nothing_to_do_starts_nobody(tmp_path):
    assert run(tmp_path, []) == {} and not list(tmp_path.iterdir())
