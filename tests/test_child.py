"""A child process ends with whoever asks it, and an error travels as itself. (What kills one:
tests/planner/test_subprocesses.py.)"""

import os
import signal
import sys

from notepad_jax.child import Child, Died, sendable


def echo(pipe):
    while True:
        pipe.send(pipe.recv())


def about(pipe):
    pipe.send((os.environ["SAID"], sorted(os.sched_getaffinity(0)), sys.path))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    pipe.send("goes on")


class Odd(ValueError):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_it_answers_until_nobody_asks():
    child = Child(echo)
    child.send({"a": [1, 2]})
    assert child.receive() == {"a": [1, 2]}
    child._pipe.close()
    assert child._process.wait(30) == 0
    child.close()


def test_it_has_its_cores_its_variables_and_our_path_and_leaves_signals_to_us():
    core = min(os.sched_getaffinity(0))
    child = Child(about, [core], {"SAID": "this"})
    said, cores, path = child.receive()
    assert (said, cores) == ("this", [core]) and child.receive() == "goes on"
    assert set(map(os.path.abspath, sys.path)) <= set(map(os.path.abspath, path))
    assert child.receive() == Died(0, "")
    child.close()


def test_an_error_is_sent_as_itself_or_as_its_words():
    try:
        raise FileNotFoundError(2, "nowhere")
    except OSError as problem:
        sent = sendable(problem)
    assert type(sent) is FileNotFoundError and "test_an_error" in sent.__notes__[0]
    odd = Odd("this", "that")
    for _ in range(40):  # one error of all readings of a document
        sent = sendable(odd)
    assert type(sent) is ValueError and str(sent) == "Odd: this and that"
    assert not hasattr(odd, "__notes__") and len(sent.__notes__) == 1
