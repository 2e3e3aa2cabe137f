"""A live fleet: turns by the newest policy, steps that wait for nobody but who is far behind."""

import asyncio
import dataclasses
import itertools
import json
import threading

import pytest

from notepad_jax import keys
from notepad_jax.checkpoint.objects import Objects, sealed
from notepad_jax.rollout import schedule
from notepad_jax.setup import configuration
from notepad_jax.telemetry.identity import write_json, write_sealed
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import (
    audit,
    decided,
    fleet,
    fleet_claims,
    fleet_live,
    replay,
    rollout_settings,
)
from notepad_jax.training.fleet_claims import Claims
from tests.runs import SMALL, run
from tests.training.test_fleet import APART, learnt, readers

LIVE = ("--config.fleet.live=true", "--config.rollout.documents=3", "--config.validation.every=0")


class Held:
    """A completer that answers so many turns at once, and later ones by a later version."""

    def __init__(self, engine, turns, begun):
        self.engine, self.left, self.begun = engine, turns, begun

    async def complete(self, prompt, sampling):
        self.left -= 1
        while self.left < 0 and self.engine.version < 1:
            await asyncio.sleep(0.01)
        said = await self.engine.complete(prompt, sampling)
        self.begun.set()
        return said


class HeldOne:
    """An engine of several, `Held`."""

    count = 1

    def __init__(self, own, begun):
        self.own, self.begun = own, begun

    async def each(self, work):
        return await self.own.each(lambda number, engine: work(number, Held(engine, 8, self.begun)))


@pytest.fixture
def one_is_slow(monkeypatch):
    """The second draw's later turns wait until the first update is published.

    The others wait until it has begun, and until the first draw has ended: on a busy machine the
    update could come before that, or without the first. None is read by two: there a copy that
    began by the new version could end before the second draw's own reader has gone on.
    """
    reads, begun, ended = fleet_live.Live._read, threading.Event(), threading.Event()

    async def read(self, bundle, progress):
        if bundle.ordinals != (1,):
            first = bundle.ordinals == (0,)
            while not (begun if first else ended).is_set():
                await asyncio.sleep(0.01)
            said = await reads(self, bundle, progress)
            if first:
                ended.set()
            return said
        with self.engine.one() as own:
            reader = dataclasses.replace(self.rollouts.reader, completer=HeldOne(own, begun))
            rollouts = dataclasses.replace(self.rollouts, reader=reader)
            return await rollouts.read(bundle.chunks, bundle.ordinals, bundle.version)

    monkeypatch.setattr(fleet_claims, "SLOWER", 1e9)
    monkeypatch.setattr(fleet_live.Live, "_read", read)


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).open()]


def draws(folder):
    """Returns the draws of each step, by the ledger."""
    outcomes = ("trained", "uninformative", "failed", "stale", "waiting")
    return [
        sorted({ordinal for name in outcomes for ordinal, _ in line[name]})
        for line in lines(folder, "ledger.jsonl")
    ]


@pytest.mark.slow
def test_a_slow_document_holds_no_step_and_every_draw_is_settled_once(tmp_path, one_is_slow):
    folder = tmp_path / "run"
    words = (
        "--config.fleet.slack=1", "--config.steps=5", "--config.checkpoint.keep=9",
        "--config.rollout.archive_turns=6",
    )  # fmt: skip
    found = learnt(folder, *LIVE, *words, names=("one", "two"))
    by_step = draws(folder)
    assert 1 not in by_step[0] and 1 in by_step[1]  # one step later, and no more
    assert all(len(each) == 3 for each in by_step)
    assert sorted(itertools.chain(*by_step)) == list(range(15))
    ledger = lines(folder, "ledger.jsonl")
    assert 1 in ledger[0]["out"] and not ledger[-1].get("out")
    metrics = [line for line in lines(folder, "metrics.jsonl") if "rollout/age_max" in line]
    assert max(line["rollout/age_max"] for line in metrics) <= 2  # lead + slack
    assert all(0 <= line["rollout/turn_age_mean"] <= line["rollout/age_mean"] for line in metrics)
    assert max(line["rollout/versions"] for line in metrics) > 1  # a reading goes on by a newer one
    assert sum(one.bundles for one in found.values()) >= 15
    made = audit.run(folder, None, SilentScreen())
    assert not made.off and not made.gone and len(made.versions) > 1
    assert Objects(folder / fleet.FOLDER).names() == ["ended", "terms"]


@pytest.mark.slow
def test_a_step_is_learnt_again_from_what_it_had_chosen(tmp_path):
    """Killed when version 3 is out and not saved; the bits are compared as it is published."""
    folder, objects = tmp_path / "run", Objects(tmp_path / "run" / fleet.FOLDER)
    words = (*LIVE, "--config.fleet.slack=1", "--config.checkpoint.every=2", "--config.steps=4")
    published = fleet.Fleet.publish

    def killed(self, snapshot, ledger, saved):
        published(self, snapshot, ledger, saved)
        if snapshot.version == 3:
            raise KeyboardInterrupt

    with readers(folder, "one"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fleet.Fleet, "publish", killed)
            run(folder, *APART, *words)
        choice, before = objects.get("choice/3"), lines(folder, "metrics.jsonl")
        assert schedule.choice_of(choice).step == 3
        run(folder, *APART, *words, resume=True)
    after = lines(folder, "metrics.jsonl")
    of_3 = [[line for line in told if line["step"] == 3] for told in (before, after)]
    assert of_3[0] == of_3[1] != []
    assert sorted(itertools.chain(*draws(folder))) == list(range(12))


@pytest.mark.slow
def test_what_a_step_had_chosen_has_to_be_there(tmp_path):
    folder, objects = tmp_path / "run", Objects(tmp_path / "run" / fleet.FOLDER)
    published = fleet.Fleet.publish

    def killed(self, snapshot, ledger, saved):
        if snapshot.version == 1:
            raise KeyboardInterrupt
        published(self, snapshot, ledger, saved)

    with readers(folder, "one"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fleet.Fleet, "publish", killed)
            run(folder, *APART, *LIVE, "--config.checkpoint.every=2")
    name = f"spool/{next(iter(schedule.choice_of(objects.get('choice/1')).read))}"
    objects.remove(name)
    with pytest.raises(ValueError, match=f"{name} is not what step 1 has learnt from before; go"):
        run(folder, *APART, *LIVE, "--config.checkpoint.every=2", resume=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("fleet.apart=false",), "fleet.live is true, and nobody reads apart"),
        (("fleet.lead=0",), "fleet.live is true with fleet.lead=0 and fleet.slack=0"),
        (("fleet.live=false", "fleet.slack=1"), "fleet.slack is 1, and readers are pinned"),
        (("fleet.slack=1", "fleet.bundles=2"), "fleet.bundles is 2; set it to 0"),
        (("fleet.slack=1", "tasks.retire_at=0.9", "fleet.lead=0"), "tasks.retire_at is 0.9"),
        (("rollout.teacher=script",), "rollout.teacher is script, who writes the turns"),
        (
            ("fleet.slack=1", "fleet.lead=0", "grpo.minibatches=2"),
            "fleet.lead is 0 and fleet.slack 1, and nothing bounds",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(words, message):
    words = [f"--config.{word}" for word in words]
    with pytest.raises(ValueError, match=message):
        rollout_settings.check(configuration.load("quickstart", [*SMALL, *APART, *LIVE, *words]))


def test_a_live_fleet_that_began_anew_has_other_terms():
    """Its versions have other weights under their numbers."""
    config = configuration.load("quickstart", [*SMALL, *APART, *LIVE])
    made = fleet.terms(config, {"folder": "here", "weights": "1"}, {"seed": 0}, {})
    assert made.config["fleet"]["bundles"] == 3  # a document each
    begun = [dataclasses.replace(made, begun=life) for life in (1, 2)]
    assert begun[0].digest == begun[1].digest and begun[0].agreed != begun[1].agreed


def test_what_another_has_begun_is_begun_again_and_makes_place_for_what_nobody_has(tmp_path):
    objects = Objects(tmp_path)
    plan = schedule.Plan(1, 0, 0, ((0,), (1,)), "t")
    objects.put("plan/1", plan.encoded())
    objects.put("claim/1-0-0", b"other")
    mine = Claims(objects, "t", "me", last=0.0)  # everything is long ago

    def begin(**how):
        found = mine.next(objects.names(), lambda version: version <= 0, **how)
        return found and (found.name, mine.copied)

    assert begin(copies=False) == ("1-1", False)
    assert begin(besides=["1-1"], copies=False) is None
    assert begin(besides=["1-1"]) == ("1-0", True)
    objects.put("plan/2", schedule.Plan(2, 1, 0, ((2,),), "t").encoded())
    assert begin(besides=["1-1", "1-0"]) is None  # its version is not there yet
    with pytest.raises(ValueError, match="went on with other settings since this reader began"):
        Claims(objects, "others", "me").next(objects.names(), bool)


@pytest.mark.slow
def test_what_readers_had_not_ended_is_not_lost_where_the_fleet_changes(tmp_path, one_is_slow):
    folder = tmp_path / "run"
    published = fleet.Fleet.publish

    def killed(self, snapshot, ledger, saved):
        if snapshot.version == 1:
            raise KeyboardInterrupt
        published(self, snapshot, ledger, saved)

    with readers(folder, "one", "two"):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(fleet.Fleet, "publish", killed)
            run(folder, *APART, *LIVE, "--config.fleet.slack=1")
    assert 1 in lines(folder, "ledger.jsonl")[0]["out"]
    changed = ("--config.fleet.live=false", "--config.fleet.slack=0")
    with readers(folder, "one"):
        run(folder, *APART, *LIVE, *changed, resume=True)
    by_step = draws(folder)
    assert by_step[1][0] == 1 and sorted(itertools.chain(*by_step)) == list(range(9))


@pytest.mark.slow
def test_a_pinned_run_is_learnt_again_as_well(tmp_path):
    words = ("--config.steps=2", "--config.fleet.keep=true", "--config.validation.every=0")
    learnt(tmp_path / "run", "--config.fleet.bundles=2", *words)
    replay.replay(tmp_path / "run", tmp_path / "again", SilentScreen())
    with pytest.raises(ValueError, match="is no run with readers that has saved a step"):
        run(tmp_path / "other", "--config.steps=1", "--config.validation.every=0")
        replay.replay(tmp_path / "other", tmp_path / "more", SilentScreen())


def test_a_run_is_learnt_again_with_what_its_machine_had_decided(tmp_path, monkeypatch):
    """And in a folder whose parent is made for it."""
    folder, asked = tmp_path / "run", []
    config = configuration.load("quickstart", [*SMALL, *APART, "--config.engine.pages=0"])
    objects = Objects(folder / fleet.FOLDER)
    objects.put("terms", fleet.terms(config, {"folder": "here"}, {}, {}).encoded())
    objects.put("plan/1", schedule.Plan(1, 0, 0, (), "terms").encoded())
    write_sealed(folder / CONFIG, keys.plain(config))
    write_json(folder / decided.FILE, {decided.PAGES: 77})

    def trained(config, *others):
        asked.append(config.engine.pages)
        raise KeyboardInterrupt

    monkeypatch.setattr(replay, "steps_in", lambda place: [1])
    monkeypatch.setattr(replay.train, "train", trained)
    with pytest.raises(KeyboardInterrupt):
        replay.replay(folder, tmp_path / "runs" / "again", SilentScreen())
    assert asked == [77]


@pytest.mark.slow
def test_a_run_that_keeps_what_it_learnt_from_is_learnt_again_bit_by_bit(tmp_path):
    folder = tmp_path / "run"
    learnt(folder, *LIVE, "--config.fleet.slack=1", "--config.fleet.keep=true")
    made = replay.replay(folder, tmp_path / "again", SilentScreen())
    assert made.steps == 3 and sorted(path.name for path in tmp_path.iterdir()) == ["again", "run"]
    assert (folder / "metrics.jsonl").read_bytes() == (
        tmp_path / "again" / "metrics.jsonl"
    ).read_bytes()
    assert Objects(folder / fleet.FOLDER).names() == ["ended", "terms"]  # nobody lists the rest
    objects = Objects(folder / fleet.KEPT)
    read = schedule.choice_of(objects.get("choice/2")).read
    spooled = objects.get(name := f"spool/{next(iter(read))}")
    objects.remove(name)

    def refused(message):
        """In a line that names an object of the run, before the new run takes its name."""
        with pytest.raises(ValueError, match=message):
            replay.replay(folder, tmp_path / "none", SilentScreen())
        assert not (tmp_path / "none").exists()

    refused(f"{objects.folder} has no {name}; without it this run is not learnt again")
    objects.put(name, sealed({}))
    refused(f"{objects.folder}/{name} is not what was learnt from")
    objects.replace(name, spooled[:-9])
    refused(f"{objects.folder}/{name} is cut off, or was changed; without it")
    objects.replace(name, spooled)
    Objects(folder / fleet.FOLDER).replace("terms", b"{}")
    refused(f"{folder / fleet.FOLDER}/terms is cut off, or was changed")
    objects.remove("choice/2")
    refused("has no choice/2; a run that begins with fleet.keep")
