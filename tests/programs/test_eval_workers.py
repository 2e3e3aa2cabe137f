"""Worker processes read what one process reads, to the last byte, and end with it."""

import asyncio
import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import jax
import pytest

from notepad_jax.eval.readings import Readings
from notepad_jax.planner.machine import MachineMemory
from notepad_jax.programs import eval_workers, evaluate, subjects
from notepad_jax.programs.eval_worker import Share
from notepad_jax.setup import configuration, eval_jobs
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import CompleterFailed, TextDocument

SMALL = (
    "--config.policy=data/starter",
    "--config.evaluate.lengths=2k",
    "--config.evaluate.questions=6",
    "--config.evaluate.questions_per_document=3",
    "--config.evaluate.archive_turns=2",
    "--config.engine.slots=16",
)


@pytest.fixture
def two_cores(monkeypatch):
    """Also where there is one."""
    there = eval_workers._cores()
    monkeypatch.setattr(eval_workers, "_cores", lambda: (there * 2)[: max(2, len(there))])


@pytest.fixture
def started(monkeypatch, two_cores):
    """The children that were started; any work is worth it."""
    children, child = [], eval_workers.Child

    def start(*what):
        children.append(child(*what))
        return children[-1]

    monkeypatch.setattr(eval_workers, "Child", start)
    monkeypatch.setattr(eval_workers, "WORTH", 0)
    return children


def read(folder, screen=None, *words):
    config = configuration.load("quickstart", [*SMALL, *words])
    screen = SilentScreen() if screen is None else screen
    return evaluate.run(config, subjects.named(config, screen), folder, screen)


def on_disk(folder):
    """Readings with memories and turns, without clocks and the seals of their lines."""
    found = {}
    for line in (folder / "readings.jsonl").read_text().splitlines():
        one = json.loads(line)
        result = one["reading"]
        clocks = [result.pop("began"), result.pop("seconds")]
        clocks += [memory.pop("seconds") for memory in one["memories"]]
        assert all(clock >= 0 for clock in clocks)
        kept = {part: one.get(part) for part in ("memories", "turns", "pieces")}
        found[tuple(result[name] for name in ("method", "length", "task_id", "repeat"))] = (
            result, kept,
        )  # fmt: skip
    return found


class Watched(SilentScreen):
    """A screen that counts turns, and calls `at` when the first of them are done."""

    def __init__(self, at=lambda: None):
        self.turns, self.rates, self.warnings, self._at = 0, [], [], at

    def advance(self, amount=1, **shown):
        self.turns += amount
        if self.turns:
            self._at()

    def warn(self, text):
        self.warnings.append(text)

    def work(self, tokens, turns, seconds):
        self.rates.append((tokens, turns, seconds))


def gone(children):
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(child._process.pid, 0)
    return True


MORE = (  # two methods are two rules
    "--config.evaluate.methods=notepad,recent-only", "--config.evaluate.repeats=2",
    "--config.evaluate.temperature=0.9", "--config.evaluate.at_once=3",
)  # fmt: skip


@pytest.mark.parametrize("words", [(), pytest.param(MORE, marks=pytest.mark.slow)])
def test_workers_make_the_readings_of_one_process(tmp_path, started, words):
    one = read(tmp_path / "one", None, "--config.engine.per_cpu=1", *words)
    assert not started  # one engine is this process's own
    screen = Watched()
    two = read(tmp_path / "two", screen, *words)
    assert len(started) == 2 and gone(started)
    expected = on_disk(tmp_path / "one")
    assert on_disk(tmp_path / "two") == expected and len(expected) == (24 if words else 6)
    kept = sum(kept["turns"] is not None for _, kept in expected.values())
    assert kept == (4 if words else 2)
    assert [s.accuracy.mean for s in two.by_length] == [s.accuracy.mean for s in one.by_length]
    turns = sum(result["turns"] for result, _ in expected.values())
    assert screen.turns == turns == sum(turns for _, turns, _ in screen.rates)


@pytest.mark.slow
def test_whoever_kills_a_worker_loses_no_reading(tmp_path, started):
    words = "--config.evaluate.lengths=2k,4k", "--config.evaluate.questions=12"
    read(tmp_path / "one", None, "--config.engine.per_cpu=1", *words)
    expected = on_disk(tmp_path / "one")

    def kill():
        os.kill(started[-1]._process.pid, signal.SIGKILL)

    with pytest.raises(CompleterFailed, match=r"ended \(SIGKILL\).*What was read is kept"):
        read(tmp_path / "killed", Watched(kill), *words)
    assert gone(started)
    read(tmp_path / "killed", None, *words)
    assert on_disk(tmp_path / "killed") == expected and len(expected) == 24 and gone(started)


def test_where_workers_have_another_policy_one_process_reads(tmp_path, started):
    config = configuration.load("quickstart", SMALL)
    subject = subjects.named(config, SilentScreen())
    policy = dataclasses.replace(subject.policy, name=str(tmp_path / "nowhere"))
    said = Watched()
    evaluate.run(config, dataclasses.replace(subject, policy=policy), tmp_path / "run", said)
    assert len(started) == 2 and gone(started) and len(on_disk(tmp_path / "run")) == 6
    assert said.warnings == [
        "the worker processes did not load the policy that is here: one process reads"
    ]


class Refusing(eval_workers.Readings):
    """A disk that is full when the first reading ends."""

    def take(self, *what):
        raise OSError(28, os.strerror(28))


@pytest.mark.slow
def test_what_fails_here_ends_the_workers(tmp_path, started, monkeypatch):
    monkeypatch.setattr(evaluate, "Readings", Refusing)
    with pytest.raises(OSError, match="No space left"):
        read(tmp_path / "run")
    assert len(started) == 2 and gone(started)


def shares_of(*sizes):
    job = eval_workers._Job(sum(sizes), lambda now: None)
    for number, size in enumerate(sizes):
        job.left.append(Share(number, None, 0, (None,) * size, ()))
    return job


@pytest.mark.parametrize(
    ("sizes", "most", "first", "second"),
    [
        ((44, 20), 32, [0], [1]),  # a document of more is alone
        ((32, 3), 18, [0], [1]),
        ((5, 5, 5, 5), 10, [0, 1], [2, 3]),
        ((5, 5, 5), 9, [0], [1]),
    ],
)
def test_documents_are_dealt_out_as_there_is_room(sizes, most, first, second):
    job, one, two = shares_of(*sizes), {}, {}
    assert [share.number for share in job.taken(one, most)] == first == list(one)
    assert [share.number for share in job.taken(two, most)] == second == list(two)
    del one[0]
    more = [share.number for share in job.taken(one, most)]
    assert more == list(range(len(first) + len(second), len(sizes)))[: len(more)]


@pytest.mark.parametrize(("at_once", "each"), [(1, 1), (3, 1), (5, 2), (256, 3)])
def test_all_workers_together_have_no_more_than_at_once_under_way(at_once, each, tmp_path):
    config = configuration.load("quickstart", [*SMALL, f"--config.evaluate.at_once={at_once}"])
    (job,) = eval_jobs.jobs(config, {2048: eval_jobs.tasks_of_length(config, 2048)})
    seen = []

    async def follow(function):
        seen.append(function.args)

    with Readings(tmp_path, {}) as readings:
        two = eval_workers.EvalWorkers(config, SimpleNamespace(name=""), 2, readings, None, None)
        two._each = follow
        asyncio.run(two._measured(job.rules, job.items, None))
    ((dealt, most),) = seen
    assert len(job.items) == 6 and {most, *(share.at_once for share in dealt.left)} == {each}


def test_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 3, 4, 6, 1}, raising=False)
    assert (cores := eval_workers._cores()) == [1, 3, 4, 6, 7]
    assert eval_workers._shared_out(cores, 2) == [[1, 4, 7], [3, 6]]
    assert eval_workers._shared_out([5, 6], 3) == [[5], [6], [5, 6]]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert eval_workers._cores() == list(range(os.cpu_count()))


@pytest.fixture(scope="module")
def counted():
    """How many workers a config's readings get, if `turns` are enough."""

    def count(*words, see=None):
        config = configuration.load("quickstart", [*SMALL, *words])
        subject = subjects.named(config, SilentScreen())
        jobs = eval_jobs.jobs(config, {2048: eval_jobs.tasks_of_length(config, 2048)})
        return eval_workers.count(config, subject, jobs, *([see] if see else []))

    return count


def test_workers_are_for_what_takes_long_and_can_be_sent_and_fits(counted, monkeypatch, two_cores):
    assert counted() == 0  # a second of work
    monkeypatch.setattr(eval_workers, "WORTH", 0)
    assert counted() == 2
    assert counted("--config.engine.per_cpu=1") == 1
    assert counted("--config.engine.per_cpu=3", "--config.evaluate.questions=6") == 2  # documents
    assert counted("--config.evaluate.questions=3") < 2
    assert counted("--config.evaluate.reward=tests.somewhere:function") == 0
    assert counted("--config.reading.memory_update=tests.somewhere:function") == 0
    with monkeypatch.context() as one_core:
        one_core.setattr(eval_workers, "_cores", lambda: [3])
        assert counted() < 2
    little = lambda device: MachineMemory(8 * 10**9, 2 * 10**9)  # noqa: E731
    assert counted(see=little) == 0
    monkeypatch.setattr(eval_workers, "_can_be_sent", lambda item: False)
    assert counted() == 0


def test_documents_that_cannot_be_sent_are_found():
    config = configuration.load("quickstart", SMALL)
    (job,) = eval_jobs.jobs(config, {2048: eval_jobs.tasks_of_length(config, 2048)})
    assert eval_workers._can_be_sent(job.items[0])
    task = dataclasses.replace(job.items[0].task, document=TextDocument("a" * 2**21))
    assert not eval_workers._can_be_sent(dataclasses.replace(job.items[0], task=task))
    with open(os.devnull) as file:
        task = dataclasses.replace(job.items[0].task, document=file)
        item = dataclasses.replace(job.items[0], task=task)
        assert not eval_workers._can_be_sent(item)


def test_there_is_one_cpu_here():
    """What the tests above rely on: workers are for engines that share a device."""
    assert len(jax.local_devices()) == 1
