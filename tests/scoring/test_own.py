"""A user's reward is numbers from 0 to 1, in the order asked, or one line that says what it did."""

import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

import notepad_jax as nj
from notepad_jax import functions
from notepad_jax.scoring import own, own_calls
from notepad_jax.scoring.reading_record import MemoryRecord, ReadingRecord, told, understood

REWARDS = """
import asyncio, math, os, re, sys, threading, time
import notepad_jax as nj

def right(reading):
    print("a word on the side")
    os.system("echo and one of another process")
    return reading.answer in reading.row["answers"]

class Inside:
    @staticmethod
    def level(reading):
        return reading.row["level"] / 10

async def recalled(reading):
    await asyncio.sleep(0)
    return [sum(memory.held) / len(reading.evidence) for memory in reading.memories] + [1]

@nj.reward(batch=True)
def best(readings):
    longest = max(len(reading.answer) for reading in readings)
    return [len(reading.answer) / longest for reading in readings]

together = threading.Barrier(3)

def three_at_once(reading):
    together.wait(60)
    return 0.5

both = []

async def all_at_once(reading):
    both.append(reading)
    while len(both) < 3:
        await asyncio.sleep(0)
    return 0.5

@nj.reward(seconds=0.3)
def hangs(reading): time.sleep(600)

@nj.reward(seconds=0.3)
async def blocks(reading): time.sleep(600)

@nj.reward(seconds=0.3)
async def sleeps(reading): await asyncio.sleep(600)

@nj.reward(batch=True)
def few(readings): return [1.0]

@nj.reward(batch=True)
def no_list(readings): return 1.0

@nj.reward(seconds=0.3)
def holds(reading): return re.match("(a+)+$", "a" * 60 + "b")

@nj.reward(seconds=0.01)
def holds_for_long(reading):
    return holds(reading)

sys.modules["__main__"].SPARE = 0.5  # CPU seconds, of the worker
def raises(reading): return {}[reading.answer]
def lines(reading): raise ValueError("one\\ntwo")
def leaves(reading): sys.exit(3)
async def leaves_too(reading): sys.exit(3)
def stops(reading): raise StopIteration
def nan(reading): return math.nan
def words(reading): return "good"
def much(reading): return 2
def nothing(reading): pass
def three(reading): return [1, 0.5, 1]
def not_all(reading): return [1, math.nan]
def none(reading): return []
def late(reading): return sleeps(reading)
def dies(reading): os._exit(7)
def old(answer, row): return 1.0
one = 1
"""
RULE = "a reward is a number from 0 to 1, or one a turn, here 2"
WRONG = {
    "raises": "raised KeyError: 'ann'",
    "lines": "raised ValueError: one two",
    "leaves": "raised SystemExit: 3",
    "leaves_too": "raised SystemExit: 3",
    "stops": "raised StopIteration: ",
    "hangs": "had not answered after 0.3 s",
    "blocks": "had not answered after 0.3 s",
    "sleeps": "had not answered after 0.3 s",
    "nan": f"returned nan; {RULE}",
    "words": f"returned 'good'; {RULE}",
    "much": f"returned 2; {RULE}",
    "nothing": f"returned None; {RULE}",
    "three": f"returned [1, 0.5, 1]; {RULE}",
    "not_all": f"returned [1, nan]; {RULE}",
    "none": f"returned []; {RULE}",
    "no_list": "returned 1.0 for a batch of 1 readings; it returns a list with what each is worth",
}
IN_A_PROCESS = ("leaves", "nan", "none", "blocks")
ROW = {"id": "mine:7", "question": "who ?", "answers": ["ann"], "level": 3}
MEMORY = MemoryRecord("ann is it", 3, 4, False, 20, (True,))


def reading(answer="ann", sample=0, memories=(MEMORY,)) -> ReadingRecord:
    return ReadingRecord(answer, ROW, tuple(memories), 2, "answered", ("ann",), sample)


def judged(judge: own.Own, *answers: str) -> list[own.Worth]:
    return asyncio.run(
        judge.judge([reading(*pair) for pair in zip(answers, range(9), strict=False)])
    )


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards_of_mine.py").write_text(REWARDS)
    return "rewards_of_mine"


@pytest.fixture
def space():
    made = {"__name__": "rewards_of_mine"}
    exec(REWARDS, made)
    return made


@contextlib.contextmanager
def opened(where, rewards, space, name, memories=False):
    """The reward, by name in a process, or lent here."""
    if where == "process":
        yield own.named(f"{rewards}:{name}", "tasks.reward", memories)
        return
    with functions.lending([space[name]]) as (known,):
        yield own.named(known, "tasks.reward", memories)


def test_a_record_travels_as_json_and_knows_its_turns():
    one = reading(memories=[MEMORY, dataclasses.replace(MEMORY, chunk_tokens=5)])
    assert understood(told(one)) == one
    assert (one.turns, one.document_tokens) == (3, 25)


def test_a_function_by_name_is_found_in_the_working_folder_and_asked_again_and_again(rewards):
    judge = own.named(f"{rewards}:right", "tasks.reward")
    assert [judged(judge, said) for said in ("ann", "bob", "ann")] == [[(1.0,)], [(0.0,)], [(1.0,)]]
    assert judged(own.named(f"./{rewards}.py:Inside.level", "tasks.reward"), "") == [(0.3,)]


@pytest.mark.parametrize("where", ["process", "here"])
def test_a_number_or_one_a_turn_of_a_function_a_coroutine_or_a_batch(where, rewards, space):
    for name, answers, worth in (
        ("right", ("ann", "bob"), [(1.0,), (0.0,)]),
        ("recalled", ("ann",), [(1.0, 1.0)]),
        ("best", ("ann", "anna b", "a"), [(0.5,), (1.0,), (1 / 6,)]),
    ):
        with opened(where, rewards, space, name) as judge:
            assert judged(judge, *answers) == worth


def test_a_reward_of_memories_says_a_number_for_each():
    two = [reading(memories=[MEMORY, MEMORY], sample=k) for k in range(2)]

    def lengths(reading):
        return [memory.tokens / 10 for memory in reading.memories]

    def only_one(reading):
        return 0.5

    with functions.lending([lengths, only_one]) as names:
        right, wrong = (own.named(name, "tasks.memory_reward", True) for name in names)
        assert asyncio.run(right.judge(two)) == [(0.3, 0.3)] * 2
        assert asyncio.run(right.judge([reading(memories=())])) == [()]
        with pytest.raises(own.RewardFailed, match="0.5; it returns a number .* memory, here 2"):
            asyncio.run(wrong.judge(two))


@pytest.mark.parametrize("where", ["process", "here"])
@pytest.mark.parametrize("name", ["three_at_once", "all_at_once"])
def test_calls_are_under_way_together(where, name, rewards, space):
    """None of the three returns before all are there: one at a time they would wait for ever."""
    with opened(where, rewards, space, name) as judge:
        assert judged(judge, "a", "b", "c") == [(0.5,)] * 3


def test_no_more_calls_are_under_way_than_a_function_wants_and_who_is_first_changes_nothing():
    running, most, held = [], [], threading.Condition()

    @nj.reward(at_once=2)
    def slow(reading):
        with held:
            running.append(reading.sample)
            most.append(len(running))
            held.notify_all()
            # The first of the pair ends last.
            held.wait_for(lambda: reading.sample != running[0] or len(most) > 2, 30)
            running.remove(reading.sample)
            held.notify_all()
        return reading.sample / 10

    with functions.lending([slow]) as (name,):
        judge = own.named(name, "tasks.reward")
        assert judged(judge, *"abcdef") == [(k / 10,) for k in range(6)]
    assert max(most) == 2


def test_many_groups_share_the_calls_of_one_function_from_several_threads_loops():
    @nj.reward(at_once=3)
    async def worth(reading):
        await asyncio.sleep(0)
        return reading.sample / 10

    found = {}
    with functions.lending([worth]) as (name,):
        judge = own.named(name, "tasks.reward")

    def ask(number):
        found[number] = judged(judge, *"abcd")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {number: [(k / 10,) for k in range(4)] for number in range(4)}


def test_a_process_that_died_or_hung_is_named_and_the_next_answer_judged(rewards):
    judge = own.named(f"{rewards}:dies", "tasks.reward")
    for _ in range(2):
        with pytest.raises(own.RewardFailed, match=r"rewards_of_mine:dies ended its process \(co"):
            judged(judge, "ann")
    judge = own.named(f"{rewards}:hangs", "tasks.reward")
    pid = judge._way._process.popen.pid
    with pytest.raises(own.RewardFailed, match="had not answered after 0.3 s, and was stopped"):
        judged(judge, "ann")
    with pytest.raises(own.RewardFailed, match="had not answered after 0.3 s, and was stopped"):
        judged(judge, "ann")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_function_that_lets_nothing_be_read_is_stopped_however_much_it_is_sent(rewards):
    """The question that filled the pipe held up the clock, and the run with it, for ever."""
    judge = own.named(f"{rewards}:holds", "tasks.reward")
    long = dataclasses.replace(MEMORY, text="a word " * 5000)
    many, said = [reading(sample=k, memories=[long]) for k in range(8)], []

    def ask():
        with pytest.raises(own.RewardFailed, match="had not answered after 0.3 s, and was stopped"):
            asyncio.run(judge.judge(many))
        said.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(60)
    assert said


def test_a_process_that_nobody_can_stop_any_more_ends_itself(rewards):
    """It ran on at all of a core: the thread that looks for the end never came to run."""
    command = [sys.executable, str(own.WORKER), f"{rewards}:holds_for_long", os.getcwd()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout.readline()  # it is ready
        question = json.dumps({"number": 0, "readings": [told(reading())]})
        worker.stdin.write(question.encode() + b"\n")
        worker.stdin.flush()
        try:
            assert worker.wait(timeout=60) == -signal.SIGVTALRM
        finally:
            worker.kill()


def test_a_process_ends_with_the_reward_that_it_was_begun_for(rewards):
    """It ran on for as long as the one that began it: two of them for each run of a notebook."""
    judge = own.named(f"{rewards}:right", "tasks.reward")
    assert judged(judge, "ann") == [(1.0,)]
    process = judge._way._process.popen
    del judge
    gc.collect()
    assert process.wait(timeout=60) == 0


@pytest.mark.parametrize("where", ["process", "here"])
def test_what_is_no_reward_is_one_line(where, rewards, space):
    for name in WRONG if where == "here" else IN_A_PROCESS:
        what = WRONG[name]
        with opened(where, rewards, space, name) as judge:
            with pytest.raises(own.RewardFailed) as said:
                judged(judge, "ann")
        stopped = ", and was stopped" if where == "process" and "had not" in what else ""
        assert str(said.value) == (
            f"the reward rewards_of_mine:{name} {what.strip()}{stopped} (row 'mine:7', reading 0)"
        )


def test_a_batch_of_another_size_is_one_line(rewards, space):
    with opened("here", rewards, space, "few") as judge:
        with pytest.raises(own.RewardFailed) as said:
            judged(judge, "ann", "bob")
    assert str(said.value) == (
        "the reward rewards_of_mine:few returned [1.0] for a batch of 2 readings; it returns a "
        "list with what each is worth (row 'mine:7')"
    )


def test_one_that_fails_ends_the_others_and_nobody_speaks_of_exceptions_never_retrieved(caplog):
    began = []

    async def fails(reading):
        began.append(reading.sample)
        if reading.sample == 1:
            raise KeyError("mine")
        await asyncio.Event().wait()

    with functions.lending([fails]) as (name,):
        judge = own.named(name, "tasks.reward")
        with pytest.raises(own.RewardFailed, match="raised KeyError: 'mine' .*, reading 1"):
            judged(judge, "a", "b", "c")
    assert sorted(began) == [0, 1, 2]
    assert caplog.text == ""


def test_an_object_is_called_here_with_a_row_of_its_own():
    def seen(reading):
        reading.row["answers"].clear()
        return len(reading.answer) / 10

    with functions.lending([seen]) as (name,):
        judge = own.named(name, "tasks.reward")
    assert judged(judge, "four") == [(0.4,)] and ROW["answers"] == ["ann"]


def test_how_a_function_is_called_is_checked_where_it_is_said():
    for how, says in (
        ({"at_once": 0}, "at_once is 0; at least 1 call"),
        ({"at_once": 1.5}, "at_once is 1.5"),
        ({"seconds": 0}, "seconds is 0; a call needs more than 0"),
        ({"seconds": "long"}, "seconds is 'long'"),
    ):
        with pytest.raises(ValueError, match=says):
            nj.reward(**how)
    assert own_calls.calls_of(len) == own_calls.Calls(False, 32, 60.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("not_a_module_of_mine:f", "which cannot be imported: ModuleNotFoundError: No module"),
        ("rewards_of_mine:missing", "but rewards_of_mine has no function missing"),
        ("rewards_of_mine:Judge#1", "a function of a script or a notebook: go on from there"),
        ("rewards_of_mine:one", "but rewards_of_mine has no function one"),
        ("missing.py:f", "which cannot be imported: FileNotFoundError"),
        ("__main__:f", "a function of a script or a notebook: go on from there"),
        (
            "rewards_of_mine:old",
            r"cannot be called with one argument; a reward takes \(reading\), and the answer and "
            r"the row are reading.answer and reading.row",
        ),
    ],
)
def test_a_function_that_is_not_there_or_cannot_be_called_is_one_line(rewards, name, says):
    with pytest.raises(ValueError, match=f"tasks.reward is '{name}', .*{says}") as said:
        own.named(name, "tasks.reward")
    assert "\n" not in str(said.value)


def test_a_file_may_have_dataclasses_of_its_own(tmp_path):
    path = tmp_path / "rewards_beside.py"
    path.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Words:\n    text: str = ''\n"
        "def one(reading):\n    return 1.0\n"
    )
    assert own.named(f"{path}:one", "tasks.reward").name == f"{path}:one"


def test_a_lent_function_that_cannot_be_called_is_one_line():
    @nj.reward(batch=True)
    def worth(answers, rows):
        return [1.0]

    with functions.lending([worth]) as (name,):
        with pytest.raises(ValueError, match=r"takes \(readings\), a list, and the answer"):
            own.named(name, "tasks.reward")
