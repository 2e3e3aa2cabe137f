"""No byte of a step can change unnoticed, and the newest good step is always found."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.checkpoint import handoff, manifest, steps, training_state
from notepad_jax.checkpoint.abstract_trees import abstract

OLDER, NEWEST = 35, 40


def state(seed):
    """What a run with adapters saves: params, and opt with moments and the adapters."""
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "embed": jax.random.normal(keys[0], (16, 8)),
        "layers": {"q": jax.random.normal(keys[1], (2, 8, 8))},
    }
    adapters = {"layers": {"q_lora_in": jax.random.normal(keys[2], (2, 8, 2))}}
    moments = jax.tree.map(lambda x: x + 1, optax.adamw(1e-3).init(adapters))
    return params, {"optimizer": moments, "trained": adapters}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    checkpoints = training_state.Checkpoints(folder)
    for step in (OLDER, NEWEST):
        checkpoints.save(step, *state(step), {"next": step}, {"seed": step})
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "steps")


def files_of(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(path, at, bit):
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def restored(folder, say, step=None):
    checkpoints = training_state.Checkpoints(folder)
    return checkpoints.restore(*map(abstract, state(OLDER)), say, step)


def assert_is(found, step):
    params, opt = state(step)
    assert (found.step, found.data, found.meta["seed"]) == (step, {"next": step}, step)
    jax.tree.map(np.testing.assert_array_equal, (found.params, found.opt), (params, opt))


def mutations(path, rng):
    """Yields (what is done to a file, the file that it damages); the file is as it was before."""
    size = path.stat().st_size
    if size:
        for _ in range(4):
            yield lambda: flip(path, rng.integers(size), rng.integers(8)), path
        for length in {*map(int, rng.integers(0, size, 2)), 0}:
            yield lambda length=length: path.write_bytes(path.read_bytes()[:length]), path
    yield path.unlink, path
    yield lambda: path.write_bytes(path.read_bytes() + b"\0"), path
    extra = path.with_name(path.name + ".copy")
    yield lambda: shutil.copy(path, extra), extra


@pytest.mark.slow
def test_every_damage_of_a_step_is_one_line_and_the_older_step_is_restored(folder):
    rng, newest, done = np.random.default_rng(0), folder / str(NEWEST), 0
    files = files_of(newest)
    kinds = {path.relative_to(newest).parts[0] for path in files}
    assert kinds > {"params", "opt", "data", "meta", "manifest.json", "_CHECKPOINT_METADATA"}
    for path in files:
        sound = path.read_bytes()
        for mutate, harmed in mutations(path, rng):
            mutate()
            said = []
            found = steps.choose(folder, None, said.append)
            name = harmed.relative_to(newest)
            assert found == OLDER and len(said) == 1, name
            assert f"step 40 is damaged ({name} " in said[0] and "\n" not in said[0], said
            with pytest.raises(ValueError, match="step 40 is damaged") as refused:
                restored(folder, said.append, NEWEST)
            assert str(name) in str(refused.value) and "\n" not in str(refused.value)
            if done % 10 == 0:
                assert_is(restored(folder, said.append), OLDER)
            path.write_bytes(sound)
            path.with_name(path.name + ".copy").unlink(missing_ok=True)
            done += 1
    assert done >= 150
    said = []
    assert_is(restored(folder, said.append), NEWEST)  # the harm was the mutations'
    assert said == []


def test_the_first_bad_file_is_told_with_its_sizes(folder):
    path = max(files_of(folder / "40" / "opt"), key=lambda path: path.stat().st_size)
    size, name = path.stat().st_size, path.relative_to(folder / "40")
    path.write_bytes(path.read_bytes()[:100])
    said = []
    assert_is(restored(folder, said.append), OLDER)
    damaged = f"step 40 is damaged ({name} is cut: 100 of {size:,} bytes)"
    assert said == [f"{folder}: {damaged}; the newest good step is 35"]
    with pytest.raises(ValueError) as refused:
        restored(folder, said.append, NEWEST)
    assert str(refused.value) == f"{folder}: {damaged}; others there: 35"
    (folder / "40" / "two\nlines").touch()
    assert "\n" not in manifest.damage(folder / "40")


def test_a_manifest_says_what_any_other_hash_says(folder):
    told = json.loads((folder / "40" / "manifest.json").read_text())["files"]
    expected = {
        str(path.relative_to(folder / "40")): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in files_of(folder / "40")
        if path.name != "manifest.json"
    }
    assert told == expected


def test_a_manifest_that_forgets_a_file_is_damaged(folder):
    """An edit that JSON would not mind: an entry, and its file, are gone."""
    path = folder / "40" / "manifest.json"
    told = json.loads(path.read_text())
    del told["files"]["data/data.json"]
    path.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")
    (folder / "40" / "data" / "data.json").unlink()
    assert manifest.damage(folder / "40") == "manifest.json has other bytes than were saved"


def test_who_reads_one_item_compares_that_and_no_more(folder, monkeypatch):
    read, digest = [], manifest._digest
    monkeypatch.setattr(manifest, "_digest", lambda path: read.append(path) or digest(path))
    path = max(files_of(folder / "40" / "opt"), key=lambda path: path.stat().st_size)
    flip(path, 7, 3)
    assert steps.choose(folder, None, print, ("params", "meta")) == NEWEST
    tops = {path.relative_to(folder / "40").parts[0] for path in read}
    assert {"params", "meta"} < tops and not tops & {"opt", "data"}
    assert steps.choose(folder, None, print, ("opt",)) == OLDER


def test_weights_that_cannot_be_loaded_are_told_by_their_file(folder):
    """A hand-off does not hash files beforehand, and yet names the one that harmed it."""
    bridge = handoff.ThroughStorage(folder, abstract(state(0)[0]))
    for path in files_of(folder / "40" / "params"):
        sound = path.read_bytes()
        for damaged in (b"", sound[: len(sound) // 2], bytes([sound[0] ^ 1]) + sound[1:]):
            path.write_bytes(damaged)
            try:
                found = bridge.adopt().params  # files that nobody needs for reading may be gone
                jax.tree.map(np.testing.assert_array_equal, found, state(NEWEST)[0])
            except ValueError as problem:
                assert f"step 40 is damaged ({path.relative_to(folder / '40')} " in str(problem)
                assert "\n" not in str(problem)
            path.write_bytes(sound)


def test_steps_without_a_manifest_are_told_as_such(folder):
    (folder / "40" / "manifest.json").unlink()
    said = []
    assert_is(restored(folder, said.append), OLDER)
    assert "step 40 is damaged (manifest.json is missing)" in said[0]
    (folder / "35" / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"no step under .* has a manifest.json \(there: 35, 40\)"):
        restored(folder, said.append)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="no finished checkpoint under"):
        restored(folder, said.append)


def test_where_nothing_is_good_all_steps_are_named(folder):
    for step in (OLDER, NEWEST):
        flip(folder / str(step) / "data" / "data.json", 3, 0)
    said = []
    both = r"step 40 is damaged \(data/data.json .*, step 35 is damaged \(data/data.json "
    with pytest.raises(ValueError, match=both) as refused:
        restored(folder, said.append)
    assert "\n" not in str(refused.value) and said == []


def test_a_run_that_goes_on_from_an_older_step_gives_up_the_later_ones(folder):
    checkpoints = training_state.Checkpoints(folder)
    bridge = handoff.ThroughStorage(folder, abstract(state(0)[0]))
    checkpoints.go_on_from(OLDER)
    assert checkpoints.steps() == [OLDER] and bridge.newest() == OLDER
    assert manifest.damage(folder / "40.set-aside") is None  # not deleted before a newer one is
    checkpoints.save(36, *state(36), {"next": 36}, {"seed": 36})
    assert sorted(os.listdir(folder)) == ["35", "36"]
    assert_is(restored(folder, print), 36)


def test_going_on_ends_what_a_killed_save_began_to_delete(tmp_path):
    """A kill between a step's name and the end of an older one left one too many for ever."""
    three = training_state.Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        three.save(step, *state(step), {"next": step}, {"seed": step})
    (tmp_path / ".0.removed").mkdir()
    (tmp_path / ".4.writing").mkdir()
    training_state.Checkpoints(tmp_path, keep=2).go_on_from(3)
    assert sorted(os.listdir(tmp_path)) == ["2", "3"]


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from notepad_jax.checkpoint import manifest, training_state

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints = training_state.Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"a": jnp.full(3, 1.0)}, {"m": jnp.ones(2)}, {}, {})
if sys.argv[2] == "before the manifest":
    manifest.write = kill
else:
    os.rename = lambda old, new, rename=os.rename: (
        kill() if os.path.exists(os.path.join(old, "manifest.json")) else rename(old, new)
    )
checkpoints.save(2, {"a": jnp.full(3, 2.0)}, {"m": jnp.ones(2)}, {}, {})
"""


@pytest.mark.parametrize("moment", ["before the manifest", "before the rename"])
def test_a_save_killed_after_orbax_was_done_is_as_if_it_had_never_begun(tmp_path, moment):
    """Also where one step is kept: the old one goes when the new one has its manifest."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), moment],
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    assert ".2.writing-0" in os.listdir(tmp_path)
    checkpoints, said = training_state.Checkpoints(tmp_path, keep=1), []
    params, opt = {"a": jnp.full(3, 2.0)}, {"m": jnp.ones(2)}
    found = checkpoints.restore(abstract(params), abstract(opt), said.append)
    assert (found.step, float(found.params["a"][0]), said) == (1, 1.0, [])
    checkpoints.save(2, params, opt, {}, {})
    assert os.listdir(tmp_path) == ["2"]
