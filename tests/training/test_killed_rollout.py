"""A rollout that is killed goes on with the turns that were written as they ended: the same bits.

The loop is that of `test_whole_loop`, without a device; a kill is a launch that fails, after which
only the thread that writes turns is done with what it had begun.
"""

import contextlib
import errno
import json
import os
import time
from pathlib import Path

import pytest

from notepad_jax import waiting
from notepad_jax.engine import journal
from notepad_jax.telemetry.metrics import TIMINGS, read_metrics
from notepad_jax.training.partial_rollout import FILE
from notepad_jax.types import CompleterFailed
from tests.support import same_run
from tests.training.test_pod import MOST_SECONDS, SMALL, ended, started
from tests.training.test_whole_loop import How, Loop, account, go


def killed(how: How, folder: Path, launch: int, keep_turns: int) -> int:
    """A process that is killed at a launch; returns the turns that had ended in its rollout."""
    folder.mkdir(exist_ok=True)
    loop = Loop(how, folder, -1, launch, keep_turns)
    with contextlib.suppress(CompleterFailed):
        waiting.run(loop.run(1))
    loop.begun._thread.shutdown()
    return len(loop.begun.replays.turns)


@pytest.mark.parametrize("keep_turns", [1, 4])
def test_a_rollout_killed_at_any_launch_goes_on_with_its_segments_to_the_same_bits(
    keep_turns, tmp_path
):
    how = How(answer_chunks=3, carry=2, slots=3, page_size=4, more_pages=4)
    whole = go(how, tmp_path / "whole", 1)
    kept = set()
    for launch in range(1, whole.made, 3):
        folder = tmp_path / str(launch)
        turns = killed(how, folder, launch, keep_turns)
        turns = turns // keep_turns * keep_turns
        assert (folder / FILE).exists() == (turns > 0)
        # Killed again, sooner or later than before, with a half segment on the disk.
        if turns and launch % 2:
            with (folder / FILE).open("ab") as file:
                file.write(b'{"seed": 7, "asked": "')
            assert killed(how, folder, launch // 2, keep_turns) >= turns
        if (folder / "account.jsonl").exists():  # so little was left
            continue
        again = go(how, folder, 1)
        assert account(folder) == account(tmp_path / "whole"), launch
        assert again.begun.replays.replayed >= turns
        assert not (folder / FILE).exists()
        kept.add(turns)
    assert len(kept) > 10 // keep_turns


def test_turns_that_are_kept_as_they_end_change_nothing(tmp_path):
    how = How(slots=3)
    for keep_turns in (0, 1, 3, 10**6):
        loop = Loop(how, folder := tmp_path / str(keep_turns), -1, -1, keep_turns)
        folder.mkdir()
        waiting.run(loop.run(3))
        loop.begun._thread.shutdown()
        assert not list(folder.glob("under_way*")) and not loop.says
        assert account(folder) == account(tmp_path / "0")


def test_segments_of_a_later_step_wait_for_it(tmp_path):
    """Killed in step 2 with step 1 not saved: step 1 is made anew, and step 2 goes on."""
    how = How(slots=3)
    go(how, tmp_path / "whole", 2)
    killed(how, folder := tmp_path / "run", 10**6, 0)  # a whole step 1
    loop = Loop(how, folder, -1, 5, 1)
    with contextlib.suppress(CompleterFailed):
        waiting.run(loop.run(2))
    loop.begun._thread.shutdown()
    turns = len(loop.begun.replays.turns)
    assert turns and (folder / FILE).exists()
    (folder / "saved.json").unlink()
    (folder / "account.jsonl").unlink()
    killed(how, folder, 3, 1)  # and once more, in step 1
    loop = Loop(how, folder, -1, -1, 1)
    waiting.run(loop.run(2))
    assert loop.says == [f"step 2 goes on with the {turns} turns that had ended"]
    assert account(folder) == account(tmp_path / "whole")


def test_a_disk_that_is_full_costs_the_turns_and_not_the_rollout(tmp_path, monkeypatch):
    how = How(slots=3)
    go(how, tmp_path / "whole", 1)
    loop = Loop(how, folder := tmp_path / "run", -1, -1, 1)
    folder.mkdir()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal, "begin", full)
    waiting.run(loop.run(1))
    loop.begun._thread.shutdown()
    (said,) = loop.says
    assert "under_way.jsonl cannot be written (No space left on device)" in said
    assert account(folder) == account(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_killed_in_a_rollout_makes_fewer_turns_and_is_the_run_that_was_not(tmp_path):
    words = ("--name=mine", *SMALL, "--config.checkpoint.keep_turns=4")
    assert ended(started(tmp_path / "whole", 1, *words))[0] == 0
    run = tmp_path / "killed" / "runs" / "mine"
    process = started(tmp_path / "killed", 1, *words)
    until = time.monotonic() + MOST_SECONDS
    while segments(run, of_step=2) < 4:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.002)
    process.kill()
    process.communicate()
    header, turns = journal.read(run / FILE)
    code, said = ended(started(tmp_path / "killed", 1, "--name=mine", "--resume"))
    assert code == 0, said
    replayed = {line["step"]: line["replayed_turns"] for line in read_metrics(run, TIMINGS)}
    assert header["step"] == 2 and replayed[2] == len(turns) >= 12
    assert same_run.differences(tmp_path / "whole" / "runs" / "mine", run) == []


def segments(run: Path, of_step: int) -> int:
    """How many have turns in the file, if it is of that step."""
    try:
        lines = (run / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    first = json.loads(lines[0])["header"]["step"]
    return sum(map(is_seal, lines)) - 1 if first == of_step else 0


def is_seal(line: bytes) -> bool:
    return line.startswith(journal.SEAL)
