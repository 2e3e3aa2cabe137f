"""A published model beside transformers, at toy size: what is compared, not how fast it was."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny

from benchmarks import real_model
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.model import parameters

LLAMA = dataclasses.replace(tiny.CONFIG, qk_norm=False, valid_vocab=64)
SIZES = real_model.Sizes(prefill=(48,), decode=(1, 3), made=5, row=40, trained=9)


@pytest.fixture
def folder(tmp_path):
    params = parameters.init_params(LLAMA, jax.random.key(0))
    return huggingface.export_params(LLAMA, params, tmp_path / "policy", {})


def test_the_summary_by_hand():
    found = real_model.summary({"ours": [1.0, 3.0, 2.0], "floor": [2.0, 2.0, 1.0]})
    assert found == {"ours": 2.0, "floor": 2.0, "ours/floor": [1.5, 0.5, 2.0]}


def test_other_numbers_are_not_compared():
    with pytest.raises(RuntimeError, match="two networks"):
        real_model._far(np.arange(4.0), np.arange(4.0) * 1.01, "logits")


@pytest.mark.slow
def test_every_part_is_measured(folder):
    config, params = real_model.loaded(folder)
    for part in real_model.PARTS.values():
        for _, row in part(config, params, SIZES, {}):
            found = real_model.summary(real_model.measure(row, 1))
            assert found["ours"] > 0 and found["floor"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", real_model.PEERS)
def test_a_peer_does_the_same_work(folder, name):
    """Logits and gradients are compared on the way."""
    for package in real_model.PEERS[name][1]:
        pytest.importorskip(package)
    config, params = real_model.loaded(folder)
    peers = {name: real_model.loaded_peers(folder)[name]}
    assert real_model.check_logits(config, params, *peers[name]) < real_model.CLOSE
    for part in real_model.PARTS.values():
        for which, row in part(config, params, SIZES, peers):
            found = real_model.summary(real_model.measure(row, 1))
            assert name not in row or found[name] > 0
            assert name in row or which == "LoRA update" and name != "transformers"
