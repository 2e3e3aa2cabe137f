"""Of several trainers of one folder of steps only the last that took it over changes anything.

Each test is run on a disk and in a bucket, which is a server of this machine (fake_bucket).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.checkpoint import best, commit, fence, handoff, manifest, steps
from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.checkpoint.objects import Objects
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.types import PolicySnapshot
from tests.checkpoint.fake_bucket import cloud


@pytest.fixture(params=["disk", "bucket"])
def folder(request, tmp_path, monkeypatch):
    if request.param == "disk":
        yield tmp_path / "run" / "checkpoints"
        return
    with cloud() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield "gs://bucket/run/checkpoints"


def state(seed):
    params = {"embed": jnp.arange(12.0).reshape(4, 3) + seed}
    return params, optax.sgd(0.1, momentum=0.9).init(params)


def trainer(folder):
    checkpoints = Checkpoints(folder, keep=9)
    checkpoints.take_over()
    return checkpoints


def save(checkpoints, step, seed=0):
    checkpoints.save(step, *state(step + seed), {"next": step}, {})


def content(folder):
    """All that lies there, by name."""
    objects = steps.bucket.kvstore(folder)
    return {name: objects.read(name).result().value for name in steps.bucket.names(folder)}


def test_an_older_trainer_that_saves_leaves_what_the_newer_one_saved(folder):
    older = trainer(folder)
    save(older, 4)
    newer = trainer(folder)
    for step in (5, 6, 7):
        save(newer, step)
    before = content(folder)
    with pytest.raises(fence.Superseded) as found:
        save(older, 5, seed=100)
    line = str(found.value)
    assert "\n" not in line and str(folder) in line
    assert "life 2 of the trainer (process " in line and "this is life 1" in line
    assert steps.steps_in(folder) == [4, 5, 6, 7]
    assert content(folder) == before
    save(newer, 8)
    assert steps.steps_in(folder) == [4, 5, 6, 7, 8]


def test_whatever_an_older_trainer_does_changes_nothing(folder):
    older = trainer(folder)
    for step in (1, 2):
        save(older, step)
    snapshot = PolicySnapshot(2, state(2)[0])
    bridge = handoff.ThroughStorage(folder, abstract(snapshot.params), life=older.life)
    bridge.publish(snapshot)
    trainer(folder)
    before = content(folder)
    life, shelf = older.life, commit.at(folder, older.life)
    for work in (
        lambda: bridge.publish(snapshot),
        lambda: bridge.publish(PolicySnapshot(3, snapshot.params)),
        lambda: older.go_on_from(1),
        lambda: older.mark(best.Best(1, 0.5)),
        lambda: older.keep_base(state(0)[0]),
        lambda: steps.retain(folder, 1, life=life),
        lambda: steps.set_aside(folder, 1, life),
        lambda: shelf.begin(2),
        lambda: shelf.remove(2),
        lambda: shelf.sweep(aside=False),
        # Whoever never took it over is older than anybody who did.
        lambda: save(Checkpoints(folder), 3),
        lambda: steps.retain(folder, 1),
    ):
        with pytest.raises(fence.Superseded):
            work()
        assert content(folder) == before


@pytest.mark.parametrize("saves", [True, False])
def test_a_trainer_that_is_taken_over_while_it_saves_does_not_end_it(folder, saves, monkeypatch):
    """Frozen when all is written but the manifest; the other is done with a step, or not yet."""
    older = trainer(folder)
    save(older, 1)
    made = manifest.made

    def frozen(place):
        monkeypatch.setattr(manifest, "made", made)
        newer.append(trainer(folder))
        if saves:
            save(newer[0], 1, seed=100)
        return made(place)

    newer = []
    monkeypatch.setattr(manifest, "made", frozen)
    with pytest.raises(fence.Superseded):
        save(older, 2)
    assert steps.steps_in(folder) == [1]
    found = newer[0].restore(*map(abstract, state(0)), pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, found.params, state(101 if saves else 1)[0])
    save(newer[0], 2)
    assert steps.steps_in(folder) == [1, 2]


def test_a_step_that_two_lives_write_at_once_is_that_of_the_newer_one(tmp_path, monkeypatch):
    """On a disk; each writes in a place of its own."""
    older, made, newer = trainer(tmp_path), manifest.made, []

    def frozen(place):
        monkeypatch.setattr(manifest, "made", made)
        newer.append(trainer(tmp_path))
        save(newer[0], 2, seed=100)
        return made(place)

    monkeypatch.setattr(manifest, "made", frozen)
    with pytest.raises(fence.Superseded):
        save(older, 2)
    found = newer[0].restore(*map(abstract, state(0)), pytest.fail)
    jax.tree.map(np.testing.assert_array_equal, found.params, state(102)[0])


def test_lives_are_counted_up_and_each_is_somebody(folder):
    lives = [fence.take(steps.bucket.path(folder)).number for _ in range(12)]
    assert lives == list(range(1, 13)) and fence.newest(folder) == 12
    # One that was taken in between is passed over.
    Objects(folder).put("trainer/13", b"another")
    assert fence.take(steps.bucket.path(folder)).number == 14
    with pytest.raises(fence.Superseded, match="life 14"):
        fence.Life(folder, 13).check()


def test_a_life_whose_answer_was_lost_is_taken_nevertheless(folder, monkeypatch):
    put = Objects.put
    monkeypatch.setattr(Objects, "put", lambda *asked: put(*asked) and False)
    assert fence.take(steps.bucket.path(folder)).number == 1


def test_what_a_thawed_trainer_still_writes_of_a_step_is_not_its_successors(folder, monkeypatch):
    """Frozen before it writes the leaves of a step that its successor has saved meanwhile."""
    older, newer = trainer(folder), []
    save(older, 1)
    written = steps.ocp.save_checkpointables

    def frozen(place, parts):
        monkeypatch.setattr(steps.ocp, "save_checkpointables", written)
        newer.append(trainer(folder))
        steps._ORBAX.release()  # held by whoever saves; they are two processes
        save(newer[0], 2, seed=100)
        steps._ORBAX.acquire()
        return written(place, parts)

    monkeypatch.setattr(steps.ocp, "save_checkpointables", frozen)
    with pytest.raises(fence.Superseded):
        save(older, 2)
    found = newer[0].restore(*map(abstract, state(0)), pytest.fail)
    assert found.step == 2
    jax.tree.map(np.testing.assert_array_equal, found.params, state(102)[0])
