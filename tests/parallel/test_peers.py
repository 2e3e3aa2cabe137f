"""Processes that watch one another: who is gone is known at once, and nobody else is missed.

Each is a thread here; one dies as a process does, by its connections.
"""

import contextlib
import queue
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from notepad_jax.parallel import hosts, peers
from notepad_jax.parallel.peers import First, Meeting, Other

SECONDS = 20


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def meeting(seconds: float = SECONDS, say=print) -> Meeting:
    return Meeting(seconds, say)


class Told:
    """Who was told what."""

    def __init__(self):
        self._said = queue.SimpleQueue()

    def to(self, index):
        return lambda why: self._said.put((index, why))

    def next(self, number):
        return dict(self._said.get(timeout=SECONDS) for _ in range(number))

    def nothing(self):
        return self._said.empty()


@contextlib.contextmanager
def met(count):
    """All of `count` processes, and what they are told."""
    port, told = free_port(), Told()
    with ThreadPoolExecutor(count) as pool:
        first = pool.submit(First, port, count, told.to(0), meeting())
        others = [
            pool.submit(Other, "localhost", port, count, index, told.to(index), meeting())
            for index in range(1, count)
        ]
        everybody = [one.result(SECONDS) for one in (first, *others)]
    yield everybody, told
    for one in everybody:
        one.leave(None)
        die(one)
    first.result()._door.close()


def die(one) -> None:
    one._over = True  # nobody is left to be told
    for line in one._lines():
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)


def test_when_one_is_gone_all_others_are_told_once():
    with met(4) as (everybody, told):
        die(everybody[2])
        assert told.next(3) == dict.fromkeys((0, 1, 3), "process 2 of 4 is gone")
        die(everybody[3])
        die(everybody[0])
    assert told.nothing()


def test_when_the_first_is_gone_all_others_are_told():
    with met(3) as (everybody, told):
        die(everybody[0])
        assert told.next(2) == dict.fromkeys((1, 2), "process 0 of 3 is gone")


def test_who_leaves_is_not_missed():
    with met(3) as (everybody, told):
        for one in everybody:
            one.leave(None)
        for one in everybody:
            die(one)
    assert told.nothing()


def test_when_one_has_failed_the_others_end_with_its_words(monkeypatch):
    monkeypatch.setattr(peers, "FAREWELL", 0.05)
    with met(3) as (everybody, told):
        everybody[1].leave("the disk is full")
        assert told.next(2) == dict.fromkeys((0, 2), "process 1 of 3 has ended (the disk is full)")


def test_what_jax_says_is_passed_on_and_its_end_is_not(monkeypatch):
    """Else jax's client would abort the process."""
    monkeypatch.setattr(peers, "GREETING", 0.2)
    with met(2) as ((first, other), _):
        with socket.create_server(("127.0.0.1", first._service)) as service:
            host, port = other.coordinator.split(":")
            client = socket.create_connection((host, int(port)), timeout=SECONDS)
            coordinator, _ = service.accept()
            coordinator.settimeout(SECONDS)
            client.sendall(b"hello\n")
            assert coordinator.recv(6) == b"hello\n"
            threading.Event().wait(3 * peers.GREETING)  # silence is no end
            coordinator.sendall(b"world\n")
            assert client.recv(6) == b"world\n"
            coordinator.close()
        client.settimeout(0.2)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.close()


def test_what_listens_there_and_says_nothing_is_no_first_process(monkeypatch):
    monkeypatch.setattr(peers, "GREETING", 0.1)
    with socket.create_server(("localhost", 0)) as silent:
        with pytest.raises(ValueError, match="not the first process of a run; if another program"):
            Other("localhost", silent.getsockname()[1], 2, 1, pytest.fail, meeting())


def test_a_port_that_is_taken_is_refused_at_once():
    with socket.create_server(("localhost", 0)) as taken:
        with pytest.raises(ValueError, match="cannot be had .Address already in use"):
            First(taken.getsockname()[1], 2, pytest.fail, meeting())


def test_who_does_not_come_is_named():
    with pytest.raises(ValueError, match="of 3 processes 1, 2 have not come within 0 s"):
        First(free_port(), 3, pytest.fail, meeting(0))
    with pytest.raises(ValueError, match="nobody answers at localhost:"):
        Other("localhost", free_port(), 3, 1, pytest.fail, meeting(0))


def test_who_waits_says_once_for_whom(monkeypatch):
    """One that was killed before they met is waited for as one that is late; nobody can tell."""
    monkeypatch.setattr(peers, "LATE", 0.3)
    said, port = queue.SimpleQueue(), free_port()
    with ThreadPoolExecutor(2) as pool:
        pool.submit(Other, "localhost", port, 3, 1, pytest.fail, meeting(2, said.put))
        one = said.get(timeout=SECONDS)
        pool.submit(First, port, 3, str, meeting(2, said.put))  # it may hear that one gave up
        two = said.get(timeout=SECONDS)
    until = "a host may be late, so up to 2 s"
    assert one == f"still waiting for the first process, at localhost:{port}; {until}"
    assert two.endswith(f"2 of 3, here at port {port}; {until}")  # the other has come by then
    assert said.empty()


def test_a_process_of_another_run_is_refused_and_harms_nobody():
    with met(2) as ((first, _), told):
        port = first._door.getsockname()[1]
        for count, says in ((3, "told of 3 processes, the first of 2"), (2, "is there already")):
            with pytest.raises(ValueError, match=says):
                Other("localhost", port, count, 1, pytest.fail, meeting())
        assert told.nothing()


def test_a_process_that_is_killed_is_missed():
    """As the kernel tells it: the connection of a process is closed with it."""
    port, told = free_port(), Told()
    program = (
        "import sys, threading; from notepad_jax.parallel.peers import Meeting, Other\n"
        "Other('localhost', int(sys.argv[1]), 2, 1, print, Meeting(60, print))\n"
        "threading.Event().wait(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(port)])
    try:
        first = First(port, 2, told.to(0), meeting())
        process.kill()
        assert told.next(1) == {0: "process 1 of 2 is gone"}
    finally:
        process.kill()
        process.wait(60)
    first._door.close()


def test_what_breaks_waits_for_the_news_of_why():
    """Of two processes one was told to stop, and the other said what Gloo says of that."""
    assert hosts.SETTLE > peers.FAREWELL
