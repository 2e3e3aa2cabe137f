"""Training state comes back exactly; killed saves are as if they had never begun."""

import concurrent.futures
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from notepad_jax.checkpoint import best, checksums, training_state
from notepad_jax.checkpoint.abstract_trees import abstract


def state(seed: int = 0):
    params = {
        "embed": jax.random.normal(jax.random.key(seed), (16, 8)),
        "layers": {"q": jax.random.normal(jax.random.key(seed + 1), (2, 8, 8))},
    }
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 1e-3 / step))
    return params, optimizer.init(params)


def targets(params, opt):
    return abstract(params), abstract(opt)


def test_a_step_comes_back_as_it_was(tmp_path):
    params, opt = state()
    meta = {"seeds": [1, 2], "policy": {"width": 8, "rope_theta": 1e6}, "note": None}
    checkpoints = training_state.Checkpoints(tmp_path)
    assert checkpoints.steps() == []
    checksum = checkpoints.save(7, params, opt, {"next": [3]}, meta)
    checkpoints = training_state.Checkpoints(tmp_path)
    saved = checkpoints.restore(*targets(params, opt), print)
    assert (saved.step, saved.data) == (7, {"next": [3]})
    assert saved.meta["checksum"] == checksum == checksums.checksum(saved.params)
    assert {name: saved.meta[name] for name in meta} == meta
    assert jax.tree.structure(saved.opt) == jax.tree.structure(opt)
    for was, now in zip(jax.tree.leaves(opt), jax.tree.leaves(saved.opt), strict=True):
        np.testing.assert_array_equal(was, now)
    assert json.loads((tmp_path / "7" / "meta" / "data.json").read_text())["step"] == 7


def test_a_grain_iterator_goes_on_where_it_stood(tmp_path):
    def batches():
        return iter(grain.MapDataset.range(20).seed(3).shuffle().to_iter_dataset().batch(4))

    params, opt = state()
    iterator = batches()
    next(iterator)
    checkpoints = training_state.Checkpoints(tmp_path)
    checkpoints.save(0, params, opt, iterator.get_state(), {})
    expected = next(iterator)
    resumed = batches()
    resumed.set_state(checkpoints.restore(*targets(params, opt), print).data)
    np.testing.assert_array_equal(next(resumed), expected)


def test_restoring_casts_params(tmp_path):
    params, opt = state()
    checkpoints = training_state.Checkpoints(tmp_path)
    checkpoints.save(0, params, opt, {}, {})
    narrow = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params)
    saved = checkpoints.restore(narrow, abstract(opt), print)
    np.testing.assert_array_equal(saved.params["embed"], params["embed"].astype(jnp.bfloat16))


@pytest.mark.slow
def test_two_threads_save_and_restore_at_once(tmp_path):
    """Orbax counts its operations in the process: of two saves one removed the other's folders."""
    params, opt = state()

    def run(name):
        checkpoints = training_state.Checkpoints(tmp_path / name, keep=2)
        for step in range(6):
            checkpoints.save(step, params, opt, {}, {})
            checkpoints.restore(*targets(params, opt), print)
        return checkpoints.steps()

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert list(threads.map(run, "abc")) == [[4, 5]] * 3


def test_the_newest_and_the_best_are_kept(tmp_path):
    params, opt = state()
    checkpoints = training_state.Checkpoints(tmp_path, keep=2)
    checkpoints.mark(best.Best(1, 0.5))
    for step in range(5):
        checkpoints.save(step, params, opt, {}, {})
    assert checkpoints.steps() == [1, 3, 4]


def test_resuming_further_back_drops_what_came_later(tmp_path):
    (params, opt), (others, _) = state(), state(5)
    checkpoints = training_state.Checkpoints(tmp_path, keep=9)
    for step in range(4):
        checkpoints.save(step, params, opt, {}, {})
    assert checkpoints.restore(*targets(params, opt), print, step=1).step == 1
    checkpoints.save(2, others, opt, {}, {})
    assert checkpoints.steps() == [0, 1, 2]
    restored = checkpoints.restore(*targets(params, opt), print).params
    assert checksums.checksum(restored) == checksums.checksum(others)


def test_mistakes_are_named(tmp_path):
    params, opt = state()
    checkpoints = training_state.Checkpoints(tmp_path)
    with pytest.raises(ValueError, match="no finished checkpoint"):
        checkpoints.restore(*targets(params, opt), print)
    with pytest.raises(ValueError, match="meta is written as JSON"):
        checkpoints.save(0, params, opt, {}, {"key": jax.random.key(0)})
    with pytest.raises(ValueError, match="data is written as JSON"):
        checkpoints.save(0, params, opt, {"state": object()}, {})
    for name in ("one[1]", "one\\two"):
        with pytest.raises(ValueError, match="orbax cannot read what it writes below a folder"):
            training_state.Checkpoints(tmp_path / name).save(0, params, opt, {}, {})
    checkpoints.save(0, params, opt, {}, {})
    with pytest.raises(ValueError, match="has no step 3; there: 0$"):
        checkpoints.restore(*targets(params, opt), print, step=3)
    with pytest.raises(ValueError, match=r"opt has no leaf|opt has a leaf"):
        other = optax.sgd(1e-3, momentum=0.9).init(params)
        checkpoints.restore(abstract(params), abstract(other), print)


def test_leftovers_of_a_killed_save_are_ignored(tmp_path):
    params, opt = state()
    checkpoints = training_state.Checkpoints(tmp_path)
    checkpoints.save(3, params, opt, {}, {})
    shutil.copytree(tmp_path / "3", tmp_path / "9.orbax-checkpoint-tmp")
    for name in (".8.writing", ".8.writing.orbax-checkpoint-tmp", ".2.removed"):
        shutil.copytree(tmp_path / "3" / "params", tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert checkpoints.steps() == [3]
    assert checkpoints.restore(*targets(params, opt), print).step == 3
    checkpoints.save(8, params, opt, {}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "8", "notes"]


SAVE_FOR_EVER = """
import sys
import jax.numpy as jnp
from notepad_jax.checkpoint import training_state

checkpoints = training_state.Checkpoints(sys.argv[1], keep=2)
for step in range(100_000):
    params = {"a": jnp.full((64, 1024), float(step)), "b": jnp.full(3, float(step))}
    checkpoints.save(step, params, {"m": params["a"]}, {"step": step}, {})
    print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.01, 0.05])
def test_a_run_killed_while_saving_restores_a_whole_step(tmp_path, delay):
    with subprocess.Popen(
        [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
    ) as process:
        for _ in range(3):
            last = int(process.stdout.readline())
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    a, b = jnp.zeros((64, 1024)), jnp.zeros(3)
    checkpoints = training_state.Checkpoints(tmp_path, keep=2)
    saved = checkpoints.restore(*targets({"a": a, "b": b}, {"m": a}), print)
    assert saved.step >= last
    assert saved.data == {"step": saved.step}
    assert float(saved.params["b"][0]) == float(saved.opt["m"][0, 0]) == saved.step
