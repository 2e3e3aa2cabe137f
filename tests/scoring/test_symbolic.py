r"""Formulas are compared in a process that can be killed, replaced, and never outlives us."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from notepad_jax.scoring import metrics, symbolic, worker
from notepad_jax.scoring.extraction import Malformed


@pytest.mark.parametrize(
    ("said", "golds", "equal"),
    [
        (r"\sqrt{4}", ["2"], True),
        (r"2\pi", ["6.283185"], True),
        ("(x+1)^2", ["y", "x^2 + 2x + 1"], True),
        ("x^2 + 1", ["x^2 + 2x + 1"], False),
        (r"\{1, 2\}", [r"\{2, 1\}"], True),
        ("(1, 2)", ["(2, 1)"], False),
        (r"\frac{\sqrt{2}}{2}", [r"\frac{1}{\sqrt{2}}"], True),
    ],
)
def test_formulas(said, golds, equal):
    assert symbolic.equal(said, golds) is equal
    assert metrics.METRICS["numeric"](said, golds) == float(equal)


@pytest.mark.parametrize(
    ("text", "worth_asking"),
    [
        (r"\sqrt{4}", True),
        ("2x+1", True),
        ("sin(x)^2", True),
        ("the square root of 4", False),
        ("x", False),
        ("", False),
        ("1" * 301, False),
        ("(" * 13 + "1" + ")" * 13, False),
        ("5 字", False),
    ],
)
def test_what_is_worth_asking(text, worth_asking):
    assert symbolic.formula(text) is worth_asking


@pytest.mark.slow
def test_a_question_without_end_is_ended_and_the_next_one_answered():
    assert symbolic.equal("1+1", ["2"])
    first, before = symbolic._worker.pid, resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(Malformed, match="too_hard"):
        symbolic.equal("10000000!", ["10!"])
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before.ru_utime
    assert spent < symbolic.MAX_WAIT / 4  # it was not the clock that ended it
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)  # gone, and not even a zombie
    assert metrics.score("1+1", ["2"], "numeric", "plain") == metrics.Score(1.0, "")
    assert symbolic._worker.pid != first


def test_a_worker_that_somebody_killed_is_replaced():
    assert symbolic.equal("1+1", ["2"])
    os.kill(symbolic._worker.pid, signal.SIGKILL)
    assert symbolic.equal("1+1", ["2"])


def test_unreadable_formulas_say_so():
    with pytest.raises(Malformed, match="unreadable_formula"):
        symbolic.equal(r"\frac{", ["2"])


def test_threads_take_turns_under_asyncio():
    async def ask_many():
        asked = (f"{k}+1" for k in range(6))
        return await asyncio.gather(
            *(asyncio.to_thread(symbolic.equal, said, ["4"]) for said in asked)
        )

    assert asyncio.run(ask_many()) == [False, False, False, True, False, False]


def test_an_interrupted_question_leaves_no_stale_reply(monkeypatch):
    def interrupt(process, seconds):
        raise KeyboardInterrupt

    assert symbolic.equal("1+1", ["2"])
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(worker, "_line", interrupt)
        symbolic.equal("1+1", ["2"])
    assert symbolic.equal("1+1", ["3"]) is False


def test_a_fork_asks_a_worker_of_its_own():
    program = (
        "import os\n"
        "from notepad_jax.scoring import symbolic\n"
        "assert symbolic.equal('1+1', ['2'])\n"
        "first = symbolic._worker.pid\n"
        "symbolic._worker._lock.acquire()  # as if a thread were asking just then\n"
        "child = os.fork()\n"
        "if child: symbolic._worker._lock.release()\n"
        "assert all(symbolic.equal(f'{k}+1', [str(k + 1 + bool(child))]) != bool(child)"
        " for k in range(20))\n"
        "assert (symbolic._worker.pid == first) == bool(child)\n"
        "if child: assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()


DIE = "os.kill(os.getpid(), signal.SIGKILL)"
ASK_TOO_MUCH = "threading.Thread(target=symbolic.equal, args=('10000000!', ['1!'])).start()"


@pytest.mark.parametrize(
    "ending",
    ["sys.exit(0)", DIE, f"{ASK_TOO_MUCH}; time.sleep(0.3); {DIE}"],
    ids=["at rest", "killed", "killed while it computes"],
)
def test_the_worker_ends_with_the_process_that_asked(ending):
    program = (
        "import os, signal, sys, threading, time\n"
        "from notepad_jax.scoring import symbolic\n"
        "symbolic.equal('1+1', ['2'])\n"
        "print(symbolic._worker.pid, flush=True)\n" + ending
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    worker = int(done.stdout)
    for _ in range(200):  # what it computes may need to reach its limit first
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    state = open(f"/proc/{worker}/stat").read().rpartition(")")[2].split()[0]
    assert state == "Z", f"worker {worker} lives on in state {state}"
