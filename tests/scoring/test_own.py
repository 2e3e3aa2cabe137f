"""A user's reward is a number from 0 to 1, or one line that says what it did instead."""

import os
import time

import pytest

from notepad_jax import functions
from notepad_jax.scoring import own

REWARDS = """
import math, os, sys, time

def right(answer, row):
    print("a word on the side")
    return answer in row["answers"]

def half(answer, row):
    return 0.5

class Inside:
    @staticmethod
    def level(answer, row):
        return row["level"] / 10

def raises(answer, row): return {}[answer]
def leaves(answer, row): sys.exit(3)
def hangs(answer, row): time.sleep(600)
def nan(answer, row): return math.nan
def words(answer, row): return "good"
def much(answer, row): return 2
def nothing(answer, row): pass
def dies(answer, row): os._exit(7)
one = 1
"""
WRONG = {
    "raises": "raised KeyError: 'ann'",
    "leaves": "raised SystemExit: 3",
    "hangs": "had not answered after 0.3 s",
    "nan": "returned nan; a reward is a number from 0 to 1",
    "words": "returned 'good'; a reward is a number from 0 to 1",
    "much": "returned 2; a reward is a number from 0 to 1",
    "nothing": "returned None; a reward is a number from 0 to 1",
}
ROW = {"id": "mine:7", "question": "who ?", "answers": ["ann"], "level": 3}


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_of_mine.py").write_text(REWARDS)
    return "rewards_of_mine"


def test_a_function_by_name_is_found_in_the_working_folder_and_asked_again_and_again(rewards):
    judge = own.named(f"{rewards}:right", "tasks.reward")
    assert [judge(said, ROW) for said in ("ann", "bob", "ann")] == [1.0, 0.0, 1.0]
    assert own.named(f"./{rewards}.py:Inside.level", "tasks.reward")("", ROW) == 0.3


def test_a_process_that_died_or_hung_is_named_and_the_next_answer_judged(rewards, monkeypatch):
    judge = own.named(f"{rewards}:dies", "tasks.reward")
    for _ in range(2):
        with pytest.raises(own.RewardFailed, match=r"rewards_of_mine:dies ended its process \(co"):
            judge("ann", ROW)
    judge = own.named(f"{rewards}:hangs", "tasks.reward")
    process = judge.args[1]
    pid = process.pid
    monkeypatch.setattr(own, "MAX_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(own.RewardFailed, match="had not answered after 0.3 s, and was stopped"):
        judge("ann", ROW)
    assert time.monotonic() - began < 60
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("name", [name for name in WRONG if name != "hangs"])
def test_what_is_no_reward_is_one_line_in_the_process(rewards, name):
    judge = own.named(f"{rewards}:{name}", "tasks.reward")
    with pytest.raises(own.RewardFailed) as said:
        judge("ann", ROW)
    assert str(said.value) == f"the reward rewards_of_mine:{name} {WRONG[name]} (row 'mine:7')"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_reward_is_one_line_here(name, monkeypatch):
    space = {"__name__": "rewards_of_mine"}
    exec(REWARDS, space)
    monkeypatch.setattr(own, "MAX_SECONDS", 0.3 if name == "hangs" else 60)
    with functions.lending([space[name]]) as (known,):
        judge = own.named(known, "tasks.reward")
    with pytest.raises(own.RewardFailed) as said:
        judge("ann", ROW)
    assert str(said.value) == f"the reward rewards_of_mine:{name} {WRONG[name]} (row 'mine:7')"


def test_an_object_is_called_here_with_a_row_of_its_own():
    def seen(answer, row):
        row.clear()
        return len(answer) / 10

    with functions.lending([seen]) as (name,):
        judge = own.named(name, "tasks.reward")
    row = dict(ROW)
    assert judge("four", row) == 0.4 and row == ROW


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("not_a_module_of_mine:f", "which cannot be imported: ModuleNotFoundError: No module"),
        ("rewards_of_mine:missing", "but rewards_of_mine has no function missing"),
        ("rewards_of_mine:one", "but rewards_of_mine has no function one"),
        ("missing.py:f", "which cannot be imported: FileNotFoundError"),
        ("__main__:f", "a function of a script or a notebook: go on from there"),
    ],
)
def test_a_function_that_is_not_there_is_one_line(rewards, name, says):
    with pytest.raises(ValueError, match=f"tasks.reward is '{name}', .*{says}") as said:
        own.named(name, "tasks.reward")
    assert "\n" not in str(said.value)
