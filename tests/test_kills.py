"""The harness that kills runs: its parts at once, and a short form of it all (slow)."""

import collections
import copy
import dataclasses
import json
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.rollout import archive
from notepad_jax.telemetry.metrics import LEDGER, METRICS, TIMINGS
from tests.support import fleet_kills, kill_moments, kills, same_run
from tests.support.kill_moments import Moment, Seen, Watch
from tests.support.kill_settings import SETTINGS

LINES = {
    name: "".join(json.dumps({"step": step, "x": step / 7}) + "\n" for step in (1, 2, 3))
    for name in (*same_run.WRITTEN, TIMINGS)
}
STATE = {
    "params": {"layers": {"q": np.arange(6, dtype=np.float32).reshape(2, 3)}},
    "opt": {
        "mu": (np.full((2, 2), 0.5, np.float32), {"q": np.zeros(3, jnp.bfloat16)}),
        "count": np.array(3, np.int32),
    },
    "data": {"next": 7, "waiting": [{"place": [5, 0], "share": 0.5}]},
    "meta": {"seed": 1},
}


def made(folder, state=STATE, lines=LINES):
    """A run's folder with one checkpoint, of step 3."""
    folder.mkdir()
    for name, text in lines.items():
        (folder / name).write_text(text)
    Checkpoints(folder / "checkpoints").save(3, **state)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return made(tmp_path_factory.mktemp("runs") / "whole")


def test_equal_runs_have_no_difference_whatever_the_clock_said(whole, tmp_path):
    later = {**LINES, TIMINGS: LINES[TIMINGS].replace("0.4", "0.5")}
    assert later != LINES
    assert same_run.differences(whole, made(tmp_path / "other", lines=later)) == []


@pytest.mark.parametrize("name", same_run.WRITTEN)
def test_one_flipped_bit_in_a_file_is_found_at_its_place(whole, tmp_path, name):
    shutil.copytree(whole, other := tmp_path / "other")
    written = bytearray((other / name).read_bytes())
    second = written.index(b"\n") + 1
    written[second + 12] ^= 1
    (other / name).write_bytes(written)
    (found,) = same_run.differences(whole, other)
    assert found.startswith(f"{name}: line 2, byte 12: ")
    (other / name).write_bytes(written[: second + 5])
    (found,) = same_run.differences(whole, other)
    assert found.startswith(f"{name}: line 2, byte 5: ")


def flipped(array, at):
    """A copy of `array` with the lowest bit of element `at` flipped."""
    other = np.array(array)
    other.reshape(-1).view(np.uint8)[at * other.itemsize] ^= 1
    return other


CHANGES = {  # what is changed, and how the difference begins
    "params": ("checkpoints/3/params: leaf layers/q[1, 1]: ", lambda s: s["params"]["layers"].
               update(q=flipped(s["params"]["layers"]["q"], 4))),
    "optimizer": ("checkpoints/3/opt: leaf mu/0[0, 1]: ", lambda s: s["opt"].
                  update(mu=(flipped(s["opt"]["mu"][0], 1), s["opt"]["mu"][1]))),
    "bfloat16": ("checkpoints/3/opt: leaf mu/1/q[2]: ", lambda s: s["opt"]["mu"][1].
                 update(q=flipped(s["opt"]["mu"][1]["q"], 2))),
    "scalar": ("checkpoints/3/opt: leaf count[]: ",
               lambda s: s["opt"].update(count=np.array(2, np.int32))),
    "dtype": ("checkpoints/3/opt: leaf count was int32[] and is now float32[]",
              lambda s: s["opt"].update(count=np.array(3, np.float32))),
    "no leaf": ("checkpoints/3/opt: leaf count is only in one", lambda s: s["opt"].pop("count")),
    "account": ("checkpoints/3/data/waiting/0/place/0: 5 is now 4",
                lambda s: s["data"]["waiting"][0]["place"].__setitem__(0, 4)),
    "meta": ("checkpoints/3/meta/seed: 1 is now 2", lambda s: s["meta"].update(seed=2)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_one_change_in_a_step_is_found_at_its_place(whole, tmp_path, change):
    begins, apply = CHANGES[change]
    state = copy.deepcopy(STATE)
    apply(state)
    found = same_run.differences(whole, made(tmp_path / "other", state))
    assert any(one.startswith(begins) for one in found), found
    items = {one.split("/")[2].split(":")[0] for one in found}
    assert items <= {"params", "meta"} if change == "params" else len(found) == 1


def test_of_many_leaves_the_first_is_told_and_the_others_are_counted(whole, tmp_path):
    state = copy.deepcopy(STATE)
    for change in ("optimizer", "bfloat16", "scalar"):
        CHANGES[change][1](state)
    (found,) = same_run.differences(whole, made(tmp_path / "other", state))
    assert found.startswith("checkpoints/3/opt: leaf count[]: ")
    assert found.endswith(" (and 2 leaves more)")


def test_another_base_of_adapters_is_found(whole, tmp_path):
    """It lies beside the steps, once, and has no optimizer state and no account of draws."""
    base = {"embed": np.arange(4, dtype=np.float32)}
    for name, of in (("one", base), ("same", base), ("two", {"embed": flipped(base["embed"], 2)})):
        shutil.copytree(whole, tmp_path / name)
        Checkpoints(tmp_path / name / "checkpoints").keep_base(of)
    assert same_run.differences(tmp_path / "one", tmp_path / "same") == []
    params, meta = same_run.differences(tmp_path / "one", tmp_path / "two")
    assert params.startswith("checkpoints/base/0/params: leaf embed[2]: ")
    assert meta.startswith("checkpoints/base/0/meta/checksum: ")
    assert kill_moments.see(tmp_path / "one").unfinished == ()  # it is no step under way


def test_what_is_missing_is_found(whole, tmp_path):
    shutil.copytree(whole, other := tmp_path / "other")
    (other / LEDGER).unlink()
    (other / TIMINGS).write_text(LINES[TIMINGS] + '{"step": 3}\n')
    shutil.rmtree(other / "checkpoints" / "3")
    ledger, timings, steps = same_run.differences(whole, other)
    assert ledger.startswith(LEDGER) and timings.startswith("timings.jsonl: steps [1, 2, 3] are")
    assert steps == "checkpoints: ['3'] are now []"


def test_what_is_left_over_is_found(whole, tmp_path):
    shutil.copytree(whole, other := tmp_path / "other")
    shutil.copytree(whole / "checkpoints" / "3", other / "checkpoints" / "1")
    assert same_run.differences(whole, other) == ["checkpoints: ['3'] are now ['1', '3']"]
    (other / "checkpoints" / "1").rename(other / "checkpoints" / ".4.writing")
    assert same_run.differences(whole, other) == ["checkpoints: ['3'] are now ['.4.writing', '3']"]
    shutil.rmtree(other / "checkpoints" / ".4.writing")
    (other / "under_way.jsonl").touch()
    assert same_run.differences(whole, other) == ["under_way.jsonl was left behind"]


# ---------------------------------------------------------------- moments


def test_moments_are_drawn_evenly_and_can_come():
    chance, again = random.Random(1), random.Random(1)
    drawn = [kill_moments.draw(chance, 20.0, 9, 2, True) for _ in range(3000)]
    assert drawn == [kill_moments.draw(again, 20.0, 9, 2, True) for _ in range(3000)]
    count = collections.Counter(moment.aim for moment in drawn)
    weights = {aim: weight for aim, (weight, _, _) in kill_moments.AIMS.items()}
    for aim, weight in weights.items():
        assert count[aim] == pytest.approx(3000 * weight / sum(weights.values()), rel=0.25)
    by_clock = [moment.seconds for moment in drawn if moment.aim == kill_moments.CLOCK]
    assert np.histogram(by_clock, 4, (0, 20))[0] == pytest.approx(len(by_clock) / 4, rel=0.25)
    most = {
        "clock": 0,
        "stop": 0,
        "save": 5,
        "commit": 5,
        "remove": 5,
        "line": 9,
        "reading": 36,
        "resume": 1,
    }
    for aim, nth in most.items():
        assert max(moment.nth for moment in drawn if moment.aim == aim) == nth
    fresh = [kill_moments.draw(chance, 20.0, 9, 2, False) for _ in range(300)]
    assert "resume" not in {moment.aim for moment in fresh}  # there is nothing to cut back


def test_a_watch_tells_what_happens_in_a_run(tmp_path):
    watch, checkpoints = Watch(tmp_path / "run"), tmp_path / "run" / "checkpoints"
    assert watch.look() == []
    checkpoints.mkdir(parents=True)
    temporary = checkpoints / ".3.writing"
    temporary.mkdir()
    assert watch.look() == [kill_moments.SAVE]
    temporary.rename(checkpoints / "3")
    assert watch.look() == [kill_moments.COMMIT]
    (checkpoints / "3").rename(checkpoints / ".3.removed")
    assert watch.look() == [kill_moments.REMOVE]
    metrics, readings = tmp_path / "run" / METRICS, tmp_path / "run" / archive.FILE
    metrics.touch(), readings.touch()
    assert watch.look() == []
    for path in (metrics, readings):
        path.write_text("1\n")
    assert watch.look() == [kill_moments.LINE, kill_moments.READING]
    (tmp_path / "new").touch()
    (tmp_path / "new").rename(metrics)
    assert watch.look() == [kill_moments.RESUME]
    assert watch.look() == []


def test_what_a_kill_hit_is_told_by_what_lies_there():
    before = Seen((0, 2), (), {name: 2 for name in kill_moments.FILES}, (), ((1, 1),), (0, 0))
    went_on = dataclasses.replace(before, files=((2, 2),))

    def hit(after, **changes):
        return kill_moments.place(before, dataclasses.replace(after, **changes))

    def lines(**changes):
        return {**{name: 3 for name in kill_moments.FILES}, **changes}

    assert hit(before, saved=()) == kill_moments.NOTHING_SAVED
    assert hit(went_on, kept=(5, 5)) == kill_moments.KEPT
    assert hit(before) == kill_moments.STARTING
    assert hit(before, unfinished=()) == kill_moments.STARTING
    assert hit(went_on) == kill_moments.CUT_BACK
    assert hit(went_on, lines=lines()) == kill_moments.LOGGED
    assert hit(went_on, lines=lines(), unfinished=(".3.writing",)) == kill_moments.SAVING
    assert hit(went_on, saved=(3,), unfinished=(".0.removed",)) == kill_moments.REMOVING
    assert hit(went_on, lines=lines(), torn=(METRICS,)) == kill_moments.TORN
    assert hit(went_on, lines=lines(**{LEDGER: 2})) == kill_moments.UNEVEN
    assert hit(went_on, lines=lines(), saved=(2, 3)) == kill_moments.AT_REST


def test_a_folder_is_seen_as_it_is(whole, tmp_path):
    assert kill_moments.see(tmp_path / "nothing").saved == ()
    shutil.copytree(whole, run := tmp_path / "run")
    (run / "checkpoints" / ".4.writing").mkdir()
    with (run / LEDGER).open("a") as ledger:
        ledger.write('{"step": 4')
    seen = kill_moments.see(run)
    assert (seen.saved, seen.unfinished) == ((3,), (".4.writing",))
    assert set(seen.lines.values()) == {3} and seen.torn == (LEDGER,)


def test_the_tables_count_every_kill_once():
    made = [
        kills.Kill("killed-1", aim, str(Moment(aim, 1, 0.5)), place, 3, 3)
        for aim, place in zip(kill_moments.AIMS, kill_moments.PLACES, strict=False)
    ]
    outcomes = [kills.Outcome("plain", kills=made, equal=2), kills.Outcome("lora", wrong=["x"])]
    assert kills.report(outcomes)["kills"] == len(kill_moments.AIMS)
    assert kills.report(outcomes)["wrong"] == ["lora: x"]
    for part in kills.table(outcomes).split("\n\n")[1:]:
        counts = [line.split()[-2:] for line in part.splitlines()[1:] if not line.endswith(": x")]
        assert sum(int(plain) for plain, _ in counts) == len(made)


# ---------------------------------------------------------------- the whole of it


@pytest.mark.slow
def test_killed_runs_end_as_the_undisturbed_one(tmp_path):
    """The short form of `python -m tests.support.kills`: three kills over two settings."""
    outcomes = kills.kill_all([SETTINGS["plain"], SETTINGS["files"]], 3, 0, tmp_path / "kills")
    assert [outcome.wrong for outcome in outcomes] == [[], []]
    assert [len(outcome.kills) for outcome in outcomes] == [2, 1]
    assert all(outcome.equal > 0 for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("live", [False, True])
def test_a_fleet_that_is_killed_ends_as_an_undisturbed_one(tmp_path, live):
    """The short form of `python -m tests.support.fleet_kills`: four kills in one run."""
    hit, wrong = fleet_kills.kill_all(tmp_path, 1, 4, 0, live)
    assert wrong == [] and len(hit) == 4
