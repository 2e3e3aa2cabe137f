"""A trainer and readers that meet in a folder: what they learn is what `train` alone learns.

Readers are threads here, so that what one has compiled all have; as processes, killed where it
hurts, they are in `tests/support/fleet_kills.py`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from notepad_jax.checkpoint import bucket, fence
from notepad_jax.checkpoint.objects import Objects
from notepad_jax.commands import parser, rollout
from notepad_jax.data import files
from notepad_jax.engine import journal
from notepad_jax.engine.metered import EngineStats
from notepad_jax.engine.replay import Given, Replays
from notepad_jax.rollout import schedule
from notepad_jax.rollout.schedule import Plan
from notepad_jax.setup import configuration, stopping
from notepad_jax.starter.synthetic import make_tasks
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import (
    fleet,
    fleet_batch,
    fleet_claims,
    fleet_processes,
    fleet_reader,
    rollout_settings,
    train,
)
from notepad_jax.training.fleet_batch import Spooled
from notepad_jax.training.fleet_claims import Claims
from tests.checkpoint.fake_bucket import cloud
from tests.runs import SMALL, run
from tests.support import same_run

ALONE = (  # of the first seed with which every step has something to learn from
    "--config.seed=8", "--config.steps=3", "--config.data.questions=1",
    "--config.rollout.max_rounds=1", "--config.validation.suite=synthetic",
    "--config.validation.every=2", "--config.validation.lengths=512",
    "--config.validation.samples=2",
)  # fmt: skip
APART = (*ALONE, "--config.fleet.apart=true")


@contextlib.contextmanager
def readers(folder, *names):
    """Reads for the run in the folder, as several, until it ends; yields what each said it did.

    Raises what a reader met, where the block passed.
    """
    found, leave = {}, threading.Event()

    def one(name):
        while not (bucket.is_bucket(folder) or folder.exists()) and not leave.wait(0.02):
            pass
        while name not in found:
            try:
                found[name] = fleet_reader.read(
                    str(folder), name, None, SilentScreen(), leave.is_set
                )
            except Exception as problem:
                if "start it again" not in str(problem):  # as a supervisor does
                    found[name] = problem

    threads = [threading.Thread(target=one, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        leave.set()
        for thread in threads:
            thread.join()
    for problem in found.values():
        if isinstance(problem, Exception):
            raise problem


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(folder, *ALONE)
    return folder


def learnt(folder, *words, names=("one",), place=None):
    with readers(place or folder, *names) as found:
        run(folder, *APART, *words)
    return found


@pytest.mark.slow
def test_without_a_lead_it_learns_what_train_learns_byte_by_byte(alone, tmp_path):
    found = learnt(tmp_path / "run", "--config.fleet.lead=0")
    assert same_run.differences(alone, tmp_path / "run") == []
    assert found["one"].bundles == 3
    assert Objects(tmp_path / "run" / fleet.FOLDER).names() == ["ended", "terms"]


@pytest.mark.slow
def test_they_meet_in_a_bucket_as_well_and_end_in_a_line_where_it_refuses(
    alone, tmp_path, monkeypatch
):
    monkeypatch.setattr(fleet, "FAR", fleet.NEAR)
    folder = tmp_path / "run"
    words = ("--config.fleet.lead=0", "--config.checkpoint.folder=gs://bucket/runs")
    with cloud() as there:
        for name, value in there.environment.items():
            monkeypatch.setenv(name, value)
        with readers("gs://bucket/runs/run", "one") as found:
            there.refuse = lambda verb, name: verb == "write" and "plan/2" in name
            with pytest.raises(OSError, match="plan/2 cannot be written: .*403"):
                run(folder, *APART, *words)
            there.refuse = lambda verb, name: False
            run(folder, *APART, *words, resume=True)
        left = {name for name in there.objects if name.startswith("runs/run/fleet")}
    assert left == {"runs/run/fleet/terms", "runs/run/fleet/ended"}
    assert found["one"].bundles == 3
    for name in same_run.WRITTEN:
        assert (folder / name).read_bytes() == (alone / name).read_bytes()


@pytest.fixture(scope="module")
def by_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_one") / "run"
    learnt(folder, "--config.fleet.bundles=2", "--config.checkpoint.every=2")
    return folder


@pytest.mark.slow
def test_with_a_lead_versions_are_as_old_as_they_may_be(by_one):
    lines = [json.loads(line) for line in (by_one / "metrics.jsonl").open()]
    ages = [line.get("rollout/age_max") for line in lines if "reward" in line]
    assert ages[0] == 0 and set(ages[1:]) <= {1, None}  # None: nothing to learn from
    assert 1 in ages


@pytest.mark.slow
def test_how_many_read_changes_no_bit(by_one, tmp_path):
    words = ("--config.fleet.bundles=2", "--config.checkpoint.every=2")
    found = learnt(tmp_path / "run", *words, names=("one", "two"))
    assert same_run.differences(by_one, tmp_path / "run") == []
    assert sum(one.bundles for one in found.values()) >= 6


@pytest.mark.slow
def test_a_trainer_that_was_killed_goes_on_with_what_readers_have_read(by_one, tmp_path):
    """Between saving and publishing, with a step read ahead, and one that has to be made again."""
    folder = tmp_path / "run"
    words = ("--config.fleet.bundles=2", "--config.checkpoint.every=2")
    published = fleet.Fleet.publish

    def killed(self, snapshot, ledger, saved):
        if snapshot.version == 2:
            raise KeyboardInterrupt
        published(self, snapshot, ledger, saved)

    with readers(folder, "one") as found:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fleet.Fleet, "publish", killed)
            run(folder, *APART, *words)
        objects = Objects(folder / fleet.FOLDER)
        objects.replace("plan/3", objects.get("plan/3")[:9])
        with pytest.raises(ValueError, match="plan/3 is cut off, or was changed; remove it, and"):
            run(folder, *APART, *words, resume=True)
        objects.remove("plan/3")
        run(folder, *APART, *words, resume=True)
    assert same_run.differences(by_one, folder) == []
    assert found["one"].bundles == 6  # no bundle was read twice


def test_a_run_with_task_files_goes_on_with_what_was_read_ahead(tmp_path):
    """Its terms are those that it began with, at the first --resume and at the second."""
    tasks = [make_tasks(seed, 512, 1)[0] for seed in range(9)]
    files.write(tmp_path / "rows.jsonl", tasks, itertools.repeat(512))
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{}\n")  # a row that is left out
    words = (*SMALL, *APART, f"--config.tasks.files={tmp_path / 'rows.jsonl'}")
    config, objects = configuration.load("quickstart", words), Objects(tmp_path / "run" / "fleet")

    def begun(resume):
        train.prepare(config, tmp_path / "run", SilentScreen(), resume, None)
        return objects.get("terms"), objects.names()

    first = begun(False)
    assert b'"left_out": [\n' in first[0] and "plan/2" in first[1]
    objects.put("spool/1-0", b"read")
    for _ in range(2):
        assert begun(True) == (first[0], sorted([*first[1], "spool/1-0"]))


@pytest.mark.slow
def test_a_bundle_that_was_changed_on_the_way_is_read_again(alone, tmp_path):
    folder, objects = tmp_path / "run", Objects(tmp_path / "run" / fleet.FOLDER)
    put, broken = Objects.put, []

    def flipped(self, name, content):
        if name == "spool/2-0" and not broken:
            broken.append(name)
            content = content.replace(b'"ids"', b'"idz"', 1)
        return put(self, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Objects, "put", flipped)
        found = learnt(folder, "--config.fleet.lead=0")
    assert broken and found["one"].bundles == 4
    assert same_run.differences(alone, folder) == []
    assert objects.get("ended") == b""


@pytest.mark.slow
def test_a_reader_of_other_code_or_another_policy_says_so(by_one, tmp_path, monkeypatch):
    def refused(**changes):
        terms = fleet.terms_of(Objects(by_one / fleet.FOLDER).get(schedule.TERMS))
        place = tmp_path / "run"
        Objects(place / fleet.FOLDER).replace(
            schedule.TERMS, dataclasses.replace(terms, **changes).encoded()
        )
        with pytest.raises(ValueError) as refusal:
            fleet_reader.read(str(place), "me", None, SilentScreen(), lambda: False)
        return str(refusal.value)

    assert "is trained by 1234567, and this is" in refused(code="1234567")
    start = {"folder": "elsewhere", "weights": "0", "tokenizer": "0", "config": "0"}
    assert "began with the policy in elsewhere; not the same" in refused(start=start)
    other = {**fleet.terms_of(Objects(by_one / fleet.FOLDER).get("terms")).stream, "seed": 5}
    assert "this data position was saved with seed = 5" in refused(stream=other)
    with pytest.raises(ValueError, match="there is no run .*nothing; name the folder of a run"):
        fleet_reader.read(str(tmp_path / "nothing"), "me", None, SilentScreen(), lambda: False)


def test_what_is_kept_lies_where_nobody_looks_for_work(tmp_path):
    config = configuration.load("quickstart", [*SMALL, *APART, "--config.fleet.keep=true"])
    terms = fleet.terms(config, {"folder": "here", "weights": "1"}, {"seed": 0}, {})
    policies = SimpleNamespace(forget=lambda after: None, versions=lambda: [0, 1])
    life = fence.take(tmp_path / "checkpoints")
    trainer = fleet.Fleet(tmp_path, life, terms, None, policies, lambda line: None)
    objects, kept = Objects(tmp_path / fleet.FOLDER), Objects(tmp_path / fleet.KEPT)
    trainer.begin(0, False)
    for name in ("plan/1", "claim/1-0-0", "progress/1-0", "spool/1-0", "choice/1", "plan/2"):
        objects.put(name, name.encode())
    trainer._tidy(1)
    assert objects.names() == ["plan/2", "terms"]
    assert kept.names() == ["choice/1", "plan/1", "spool/1-0"]
    assert kept.get("spool/1-0") == b"spool/1-0"
    objects.put("spool/1-0", b"too late")
    trainer._tidy(1)
    assert kept.get("spool/1-0") == b"spool/1-0" and objects.names() == ["plan/2", "terms"]
    kept.put("plan/2", b"of a step that is made again")
    trainer.begin(1, False)
    assert kept.names() == ["choice/1", "plan/1", "spool/1-0"]
    trainer.begin(0, True)  # anew: of no use for a replay
    assert kept.names() == [] and objects.names() == ["terms"]


def test_a_reader_names_the_damaged_object_and_its_mend(tmp_path):
    objects = Objects(tmp_path / "run" / fleet.FOLDER)
    objects.put("plan/1", b'{"step": 1, "ver')
    with pytest.raises(ValueError) as refused:
        Claims(objects, "terms", "one").next(objects.names(), bool)
    assert str(refused.value) == (
        f"{objects.folder}/plan/1 is cut off, or was changed; remove it, and train --resume makes "
        f"it again"
    )
    objects.put("terms", b"{")
    with pytest.raises(ValueError, match="/terms is cut off, or was changed; train --resume"):
        fleet_reader.read(str(tmp_path / "run"), "one", None, SilentScreen(), lambda: False)


@pytest.mark.slow
def test_a_reader_of_a_run_that_has_no_readers_says_so_and_waits(alone, tmp_path):
    folder, warned = shutil.copytree(alone, tmp_path / "run"), []

    class Screen(SilentScreen):
        def warn(self, text):
            warned.append(text)

    with pytest.raises(ValueError, match="no trainer has begun in"):
        fleet_reader.read(str(folder), "one", None, Screen(), lambda: bool(warned))
    (line,) = warned
    assert "was begun without readers; train --resume --config.fleet.apart=true" in line


def test_a_reader_that_is_stopped_while_weights_come_keeps_what_was_kept(tmp_path):
    objects, bundle = Objects(tmp_path), schedule.Bundle(7, 0, 6, 0, (1, 2))
    replays, stop = Replays(), stopping.Stop()
    for _ in range(2):
        replays.around(SimpleNamespace(settings=None))

    class Engine:
        def rest(self, weights=False): ...

        async def adopt(self, snapshot, drain):
            stop.number = signal.SIGTERM
            stop.noticed.set()
            await asyncio.sleep(60)

    reader = fleet_reader.PinnedReader(
        Claims(objects, "terms", "one"), None, Engine(), replays,
        SimpleNamespace(adopt=lambda version: None), 100, stop, lambda: False, SilentScreen(), 0.1,
    )  # fmt: skip
    made = Given("asked", np.zeros(1, np.int32), np.zeros(1, np.float32), (1,))
    kept = journal.encoded(reader._header(bundle), dict.fromkeys(range(5), made))
    objects.put("plan/7", b"")
    objects.put("progress/7-0", kept)
    with pytest.raises(stopping.Stopped, match="of which 5 turns are kept"):
        asyncio.run(reader.take(bundle))
    assert objects.get("progress/7-0") == kept


def test_no_group_waits_in_a_fleet_whose_turns_are_as_old_as_its_lead():
    for apart, oldest in (((), 2), (("--config.fleet.apart=true",), 1)):
        config = configuration.load("quickstart", ["--config.rollout.max_staleness=2", *apart])
        assert rollout_settings.oldest(config) == oldest
        said = [one for one in rollout_settings.idle(config) if "max_staleness=2 cannot" in one]
        assert len(said) == len(apart)


def test_keys_of_a_fleet_that_cannot_act_without_one_are_said():
    words = ["--config.fleet.keep=true", "--config.fleet.slack=1", "--config.fleet.bundles=4"]
    said = list(rollout_settings.idle(configuration.load("quickstart", words)))
    assert [one.split(":")[0] for one in said] == [
        f"fleet.{key} cannot act" for key in ("bundles=4", "keep=True", "slack=1")
    ]
    assert not list(rollout_settings.idle(configuration.load("quickstart", [*APART, *words])))


@pytest.mark.parametrize(("place", "wait"), [("gs://bucket/run", "FAR"), ("", "NEAR")])
def test_a_reader_looks_for_a_trainer_as_often_as_for_work(tmp_path, monkeypatch, place, wait):
    async def slept(seconds):
        raise KeyboardInterrupt(seconds)

    monkeypatch.setattr(fleet_reader.asyncio, "sleep", slept)
    looking = fleet_reader._terms(
        Objects(tmp_path), bucket.path(place or tmp_path), SilentScreen(), lambda: False
    )
    with pytest.raises(KeyboardInterrupt) as waited:
        asyncio.run(looking)
    assert waited.value.args == (getattr(fleet, wait),)


def test_a_reader_without_work_says_once_what_it_waits_for(tmp_path, monkeypatch):
    objects = Objects(tmp_path / "run" / fleet.FOLDER)
    claims = Claims(objects, "terms", "one")
    assert claims.next([], {0}.__contains__) is None and claims.idle({0}.__contains__) == ""
    monkeypatch.setattr(fleet_claims, "QUIET", -1.0)
    assert "has planned nothing" in claims.idle({0}.__contains__)
    assert claims.idle({0}.__contains__) == ""
    objects.put("plan/2", Plan(2, 1, 0, ((4, 5),), "terms").encoded())
    assert claims.next(objects.names(), {1}.__contains__).ordinals == (4, 5)
    assert claims.next(objects.names(), {0}.__contains__) is None
    assert claims.idle({0}.__contains__).startswith("waiting for version 1 of the policy")


def test_a_trainer_without_a_reader_says_how_to_start_one(tmp_path, monkeypatch):
    monkeypatch.setattr(fleet_batch, "LONELY", 0.0)
    folder, said = tmp_path / "run", []

    def enough(seconds, sleep=asyncio.sleep):
        if said:
            raise KeyboardInterrupt
        return sleep(seconds)

    class Screen(SilentScreen):
        def say(self, text):
            said.append(text) if "waits for a reader" in text else None

    monkeypatch.setattr(fleet_batch.asyncio, "sleep", enough)
    with pytest.raises(KeyboardInterrupt):
        config = configuration.load("quickstart", [*SMALL, *APART])
        train.train(config, folder, Screen())
    assert said == [
        f"step 1 waits for a reader, and none has come; start one: notepad-jax rollout {folder}"
    ]


def test_a_reader_that_loads_beside_the_trainer_is_not_missed(tmp_path, monkeypatch):
    objects, said = Objects(tmp_path / "run" / "fleet"), []
    monkeypatch.setattr(fleet_batch, "LONELY", -1.0)
    monkeypatch.setattr(fleet_processes.Readers, "running", contextlib.nullcontext)
    arrivals = fleet_batch.Arrivals(objects, fence.Life(tmp_path / "steps"), said.append, 0.0)
    config = configuration.load("quickstart", ["--config.fleet.readers=1"])
    monkeypatch.setattr(fleet_processes.Readers, "look", lambda self, step: None)
    begun = SimpleNamespace(
        config=config, fleet=SimpleNamespace(arrivals=arrivals), screen=SilentScreen(),
        checkpoints=SimpleNamespace(folder=tmp_path / "run" / "checkpoints"),
    )  # fmt: skip
    with fleet_processes.beside(begun, tmp_path / "run"):
        asyncio.run(arrivals._waited(1))
    assert said == []


def test_a_reader_ends_with_the_process_that_started_it(tmp_path, monkeypatch):
    """Also where that was gone before it first looked."""
    started = []
    monkeypatch.setattr(
        fleet_processes.subprocess, "Popen", lambda words, **how: started.append(words)
    )
    fleet_processes.Readers("run", 1, tmp_path, started.append).begin()
    said = parser.build_parser("rollout").parse_args(started[0][3:])
    monkeypatch.setattr(
        fleet_reader, "read",
        lambda *given: SimpleNamespace(run="", bundles=given[-1](), seconds=0.0),
    )  # fmt: skip
    for parent, ends in ((os.getpid(), False), (1, True)):
        monkeypatch.setattr(rollout.os, "getppid", lambda parent=parent: parent)
        assert rollout.run(said, None, None, SilentScreen())[0].bundles is ends


@pytest.mark.parametrize("patient", [-1.0, 1e9])
def test_a_trainer_whose_readers_are_gone_says_so_after_a_while(tmp_path, monkeypatch, patient):
    monkeypatch.setattr(fleet_batch, "LONELY", -1.0)
    monkeypatch.setattr(fleet_batch, "PATIENT", patient)
    objects, said = Objects(tmp_path / "run" / "fleet"), []
    objects.put("claim/1-0-0", b"one")
    arrivals = fleet_batch.Arrivals(objects, fence.Life(tmp_path / "steps"), said.append, 0.0)
    asyncio.run(arrivals._waited(1))
    line = (
        f"step 1 waits for a reader, and those that began to read are slow, or gone; start one: "
        f"notepad-jax rollout {tmp_path / 'run'}"
    )
    assert said == ([line] if patient < 0 else [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config.rollout.max_rounds=2",), "rollout.max_rounds is 2, and a fleet reads what was"),
        (("--config.rollout.local.samples=2",), "rollout.local.samples is 2, which are of turns"),
        (("--config.tasks.retire_at=0.9",), "tasks.retire_at is 0.9, by which"),
        (("--config.grpo.minibatches=2",), "fleet.lead is 1, and nothing bounds what is learnt"),
        (("--config.grpo.proximal=interpolated",), "fleet.lead is 1, and nothing bounds"),
    ],
)
def test_what_a_fleet_cannot_do_is_refused_before_anything_is_loaded(words, message):
    with pytest.raises(ValueError, match=message):
        rollout_settings.check(configuration.load("quickstart", [*SMALL, *APART, *words]))


def test_what_bounds_old_turns_lets_a_lead_be():
    for words in (
        ("--config.grpo.minibatches=2", "--config.grpo.tis_cap=2"),
        ("--config.grpo.minibatches=2", "--config.fleet.lead=0"),
        (),
    ):
        rollout_settings.check(configuration.load("quickstart", [*SMALL, *APART, *words]))


# ---------------------------------------------------------------- what is put

BUNDLE = schedule.Bundle(3, 0, 2, 0, (7, 9))
TOLD = {
    "groups": [{"place": [7, 0], "readings": [{"turns": [[4, "stop", 2], [1, "stop", 2]]}]}],
    "failed": [[9, 0, 1, "ValueError: no"]],
}


def test_a_bundle_is_taken_whole_or_not_at_all():
    made = Spooled("terms", TOLD, dataclasses.asdict(EngineStats(turns=2)))
    content = made.encoded()
    assert fleet_batch.spooled(content, BUNDLE, "terms", 2) == made
    for cut in range(len(content) - 1):
        with pytest.raises((ValueError, KeyError)):
            fleet_batch.spooled(content[:cut], BUNDLE, "terms", 2)
    for at in range(len(content) - 1):
        broken = bytes([*content[:at], content[at] ^ 1, *content[at + 1 :]])
        with pytest.raises(ValueError, match="is cut off, or was changed"):
            fleet_batch.spooled(broken, BUNDLE, "terms", 2)


@pytest.mark.parametrize(
    ("bundle", "terms", "message"),
    [
        (BUNDLE, "others", "with other settings, or by other code"),
        (dataclasses.replace(BUNDLE, ordinals=(7,)), "terms", "is of other draws"),
        (dataclasses.replace(BUNDLE, ordinals=(7, 9, 11)), "terms", "is of other draws"),
        (dataclasses.replace(BUNDLE, version=1), "terms", "by another version"),
    ],
)
def test_what_is_not_the_bundles_is_refused(bundle, terms, message):
    with pytest.raises(ValueError, match=message):
        fleet_batch.spooled(Spooled("terms", TOLD, {}).encoded(), bundle, terms, bundle.version)


def test_settings_that_change_no_turn_leave_the_terms_as_they_are():
    def digest(*words):
        config = configuration.load("quickstart", [*SMALL, *words])
        start = {"folder": "here", "weights": "1"}
        return fleet.terms(config, start, {"seed": 0}, {}).digest

    same = digest("--config.fleet.bundles=2")
    for words in (
        ("--config.fleet.readers=2",),  # two bundles, too
        ("--config.fleet.bundles=2", "--config.steps=9", "--config.fleet.apart=true"),
        ("--config.fleet.bundles=2", "--config.validation.every=7"),
    ):
        assert digest(*words) == same
    for word in ("fleet.bundles=3", "fleet.lead=2", "rollout.temperature=1.1", "seed=3"):
        assert digest("--config.fleet.bundles=2", f"--config.{word}") != same
