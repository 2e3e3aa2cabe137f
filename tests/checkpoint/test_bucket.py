"""Steps in a bucket: whole or not counted, whatever breaks off; handed over, chosen, exported.

The bucket is a server of this machine (fake_bucket); the client is the one that gs:// has.
"""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.checkpoint import (
    best,
    bucket,
    checksums,
    commit,
    handoff,
    lazy_arrays,
    steps,
    training_state,
)
from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.checkpoint.hf import storage
from notepad_jax.types import PolicySnapshot
from tests.checkpoint.fake_bucket import cloud

WHERE = "gs://bucket/runs/mine/checkpoints"
PREFIX = "runs/mine/checkpoints/"


@pytest.fixture
def there(monkeypatch):
    with cloud() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server


def state(seed=0):
    params = {"embed": jnp.arange(12.0).reshape(4, 3) + seed, "layers": {"q": jnp.ones((2, 3))}}
    return params, optax.sgd(0.1, momentum=0.9).init(params)


def restored(say=print, step=None):
    return training_state.Checkpoints(WHERE).restore(*map(abstract, state()), say, step)


def save(step, **options):
    training_state.Checkpoints(WHERE, **options).save(
        step, *state(step), {"next": step}, {"seed": step}
    )


def assert_is(found, step):
    params, opt = state(step)
    assert (found.step, found.data, found.meta["seed"]) == (step, {"next": step}, step)
    jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt), (params, opt))


def step_of(name):
    return name.removeprefix(PREFIX).split("/")[0]


def test_a_step_in_a_bucket_comes_back_and_the_newest_are_kept(there):
    assert steps.steps_in(WHERE) == []
    for step in range(3):
        save(step, keep=2)
    assert steps.steps_in(WHERE) == [1, 2]
    assert_is(restored(), 2)
    assert_is(restored(step=1), 1)
    assert {step_of(name) for name in there.objects} == {"1", "2"}
    # A step counts by its manifest: written last of all, deleted first.
    for step in "012":
        calls = [(verb, name) for verb, name in there.calls if step_of(name) == step]
        writes = [name for verb, name in calls if verb == "write"]
        assert writes.index(f"{PREFIX}{step}/life-0/manifest.json") == len(writes) - 1 > 8
    deleted = [name for verb, name in there.calls if verb == "delete" and name.count("/") > 3]
    gone = [name for name in deleted if step_of(name) == "0"]
    assert gone[0] == f"{PREFIX}0/life-0/manifest.json" and len(gone) > 8


def test_a_save_that_broke_off_anywhere_is_as_if_it_had_never_begun(there):
    save(0)
    save(1)
    objects = sum(step_of(name) == "1" for name in there.objects)
    for most in (0, 3, objects - 1):
        begun = len(there.calls)
        there.refuse = lambda verb, name, begun=begun, most=most: (
            verb == "delete" or sum(v == "write" for v, _ in there.calls[begun:]) >= most
            if verb != "read"
            else False
        )
        with pytest.raises((ValueError, OSError)):
            save(2)
        there.refuse = lambda verb, name: False
        assert steps.steps_in(WHERE) == [0, 1]
        assert_is(restored(), 1)
    save(2)
    assert_is(restored(), 2)
    whole = {name for name in there.objects if step_of(name) == "2"}
    listed = json.loads(there.objects[f"{PREFIX}2/life-0/manifest.json"])["files"]
    assert {f"{PREFIX}2/life-0/{name}" for name in listed} | {
        f"{PREFIX}2/life-0/manifest.json"
    } == whole


def test_what_is_copied_from_a_bucket_is_a_folder_of_steps_on_a_disk(there, tmp_path):
    """As launch/README.md copies it, to look at a run at home and go on with it."""
    save(1)
    save(2)
    for name, content in there.objects.items():
        place = tmp_path / name.removeprefix(PREFIX)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    at_home = training_state.Checkpoints(tmp_path, keep=2)
    assert_is(at_home.restore(*map(abstract, state()), pytest.fail), 2)
    at_home.take_over()
    at_home.save(3, *state(3), {"next": 3}, {"seed": 3})
    assert steps.steps_in(tmp_path) == [2, 3]
    assert_is(at_home.restore(*map(abstract, state()), pytest.fail), 3)


def test_what_is_copied_from_a_disk_is_gone_on_with_in_a_bucket(there, tmp_path):
    """As launch/host_run.sh copies the steps of one host, before several go on with the run."""
    at_home = training_state.Checkpoints(tmp_path)
    at_home.take_over()
    at_home.keep_base(state(7)[0])
    for step in (1, 2, 3):
        at_home.save(step, *state(step), {"next": step}, {"seed": step})
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        name = PREFIX + path.relative_to(tmp_path).as_posix()
        there.objects[name], there.generations[name] = path.read_bytes(), 1
    there.objects.pop(f"{PREFIX}2/manifest.json")  # the copy is not whole yet
    assert steps.steps_in(WHERE) == [1, 3]
    assert_is(restored(), 3)
    assert steps.base_in(WHERE) == steps.base_in(tmp_path)
    over = training_state.Checkpoints(WHERE, keep=2)
    over.take_over()
    assert over.life.number == 2
    over.go_on_from(1)
    assert steps.steps_in(WHERE) == [1] and f"{PREFIX}3/manifest.json.set-aside" in there.objects
    over.save(2, *state(2), {"next": 2}, {"seed": 2})
    assert steps.steps_in(WHERE) == [1, 2]
    assert not [name for name in there.objects if step_of(name) == "3"]
    assert_is(restored(), 2)
    over.save(4, *state(4), {"next": 4}, {"seed": 4})
    assert not [name for name in there.objects if step_of(name) == "1"]
    # What an earlier life writes on beside a copy is not taken for all of that step.
    there.objects[f"{PREFIX}4/manifest.json"] = b"{}"
    there.generations[f"{PREFIX}4/manifest.json"] = 1
    commit.at(WHERE, over.life).sweep(aside=False)
    assert_is(restored(), 4)


def test_damage_in_a_bucket_is_one_line_and_the_older_step_is_restored(there):
    save(0)
    save(1)
    sound = dict(there.objects)
    name = max((n for n in sound if f"{PREFIX}1/life-0/opt/" in n), key=lambda n: len(sound[n]))
    flipped = bytes([sound[name][0] ^ 1]) + sound[name][1:]
    for harm, words in (
        (lambda: there.objects.update({name: flipped}), "has other bytes"),
        (lambda: there.objects.update({name: sound[name][:-1]}), "has other bytes"),
        (lambda: there.objects.pop(name), "is missing"),
        (
            lambda: there.objects.update({f"{PREFIX}1/life-0/more": b""}),
            "more does not belong there",
        ),
    ):
        said = []
        there.generations.setdefault(f"{PREFIX}1/life-0/more", 1)
        harm()
        assert_is(restored(said.append), 0)
        assert len(said) == 1 and words in said[0] and WHERE in said[0]
        there.objects.clear()
        there.objects.update(sound)


def test_a_bucket_that_refuses_is_no_damage_and_nothing_is_deleted(there):
    """Neither another step than the newest is gone on from, nor the best one taken for old."""
    for step in (1, 2, 3):
        save(step)
    training_state.Checkpoints(WHERE).mark(best.Best(1, 0.5))
    whole = dict(there.objects)
    for name in (f"{PREFIX}3/life-0/manifest.json", f"{PREFIX}3/life-0/meta/data.json"):
        there.refuse = lambda verb, asked, name=name: 401 if (verb, asked) == ("read", name) else 0
        with pytest.raises(OSError, match=f"gs://bucket/{name} cannot be read: .*401") as found:
            restored(pytest.fail)
        assert "\n" not in str(found.value)
        with pytest.raises(OSError, match="cannot be read"):
            steps.require(WHERE, 3)
    marked = f"{PREFIX}best.json"
    there.refuse = lambda verb, name: 401 if (verb, name) == ("read", marked) else 0
    with pytest.raises(OSError, match=f"gs://bucket/{marked} cannot be read"):
        steps.retain(WHERE, 1)
    there.refuse = lambda verb, name: False
    assert there.objects == whole
    assert_is(restored(pytest.fail), 3)
    there.objects[marked] = b"{"
    assert best.read(WHERE) is None  # damaged: a run that goes on marks it anew


def test_steps_set_aside_in_a_bucket_count_no_longer_and_leave_with_the_next_save(there):
    for step in range(3):
        save(step)
    training_state.Checkpoints(WHERE).go_on_from(1)
    assert steps.steps_in(WHERE) == [0, 1]
    assert f"{PREFIX}2/life-0/manifest.json.set-aside" in there.objects
    assert_is(restored(), 1)
    save(2, keep=9)
    assert steps.steps_in(WHERE) == [0, 1, 2]
    save(5, keep=9)
    save(3, keep=9)  # later ones leave, as on a disk
    assert steps.steps_in(WHERE) == [0, 1, 2, 3]


def test_a_policy_is_handed_over_and_exported_through_a_bucket(there):
    params, opt = state(7)
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), params)
    bridge = handoff.ThroughStorage(WHERE, wanted)
    assert bridge.newest() is None
    training_state.Checkpoints(WHERE).save(7, params, opt, {}, {})
    writes = len(there.calls)
    bridge.publish(PolicySnapshot(7, params))
    assert len(there.calls) == writes
    adopted = bridge.adopt()
    assert adopted.version == 7
    expected = jax.tree.map(lambda x: x.astype("bfloat16"), params)
    assert checksums.checksum(adopted.params) == checksums.checksum(expected)
    bridge.publish(PolicySnapshot(8, state(8)[0]))
    assert bridge.newest() == 8
    tree = lazy_arrays.open_tree(commit.place(WHERE, 8))
    np.testing.assert_array_equal(tree["embed"][()], state(8)[0]["embed"])


def test_a_run_says_where_its_steps_lie(tmp_path):
    run = tmp_path / "runs" / "mine"
    assert str(steps.place_of(run, "gs://bucket/runs")) == WHERE
    assert str(steps.place_of(run, "gs://bucket/runs/")) == WHERE
    assert steps.place_of(run, "") == run / "checkpoints"
    assert steps.place_of(run, str(tmp_path)) == tmp_path / "mine" / "checkpoints"
    assert steps.place_of(run, "~/of") == Path.home() / "of" / "mine" / "checkpoints"
    with pytest.raises(ValueError, match="on a disk or in a bucket, gs://"):
        steps.place_of(run, "s3://bucket/runs")


def test_a_place_that_cannot_be_written_is_one_line(there, tmp_path):
    steps.check_place(WHERE)
    steps.check_place(tmp_path / "new" / ".." / "new" / "folder")
    assert there.objects == {} and not list((tmp_path / "new" / "folder").iterdir())
    there.refuse = lambda verb, name: verb == "write"
    (tmp_path / "file").write_text("")
    for folder in (WHERE, "gs://another/x", "gs://", tmp_path / "file" / "x"):
        with pytest.raises(steps.CheckpointError) as found:
            steps.check_place(folder)
        assert f"{folder} cannot be written" in str(found.value) and "\n" not in str(found.value)


def test_a_path_that_is_not_utf8_is_refused_by_name(tmp_path):
    """Policies, runs and exports alike: tensorstore's own error is a traceback of pybind's."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    link = tmp_path / "plain"
    link.symlink_to(folder)
    opened = ((bucket.path, folder), (storage.open_kvstore, folder), (bucket.kvstore, link))
    for opens, place in opened:
        with pytest.raises(ValueError, match=r"caf\\udce9' is not UTF-8.*rename its folders"):
            opens(place)
    assert bucket.path(tmp_path / "caf\u00e9") == tmp_path / "caf\u00e9"
