"""llama.cpp beside `serving`, where llama_cpp and gguf are installed; elsewhere that it says so."""

import dataclasses
import importlib
import importlib.util

import jax
import numpy as np
import pytest

from benchmarks import serving
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.model import parameters


@pytest.fixture
def peer():
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    return importlib.import_module("benchmarks.peer_llama")


def test_a_peer_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    work = serving.Work(vocab=600, prompt=8, made=6, requests=1)
    assert "llama_cpp and gguf" in serving.llamas(tmp_path, [1], work)
    assert "transformers" in serving.theirs(tmp_path, [1], work)


def test_the_ids_together_are_those_of_each_client():
    work = serving.Work(vocab=600, prompt=8, made=6, requests=2)
    first, second = work.together(3)
    assert first.shape == second.shape == (3, 8)
    assert second[2].tolist() == work.ids(2, 1)


@pytest.mark.slow
def test_llama_cpp_continues_as_many_as_are_asked(tmp_path, peer):
    folder = serving.random_policy(tmp_path, width=64, layers=2)
    work = serving.Work(vocab=600, prompt=8, made=6, requests=2)
    found = serving.llamas(folder, [1, 3], work)
    assert set(found) == {1, 3}
    for speeds in found.values():
        assert speeds["llama.cpp"] > 0 and speeds["llama.cpp f32"] > 0


@pytest.mark.slow
def test_the_same_seeds_draw_the_same_tokens_and_others_do_not(tmp_path, peer):
    folder = serving.random_policy(tmp_path, width=64, layers=1)
    peer.write_gguf(folder, tmp_path / "policy.gguf")
    ids_BT = np.array(serving.Work(600, 8, 6, 1).together(3)[0])

    def drawn(decoder, seeds):
        decoder.restart(seeds)
        return decoder.sampled(ids_BT, 0).ravel().tolist()

    with peer.loaded(tmp_path / "policy.gguf") as model:
        decoder = peer.Decoder(model, 3, 16, exact=True)
        one, again, other = (drawn(decoder, seeds) for seeds in ([1, 2, 3], [1, 2, 3], [4, 5, 6]))
        decoder.close()
    assert one == again != other


@pytest.mark.slow
def test_another_network_is_not_measured(tmp_path, peer):
    """The GGUF of one policy beside the folder of another, of other norms."""
    folder = serving.random_policy(tmp_path / "one", width=64, layers=1)
    peer.write_gguf(folder, tmp_path / "policy.gguf")
    config, params = huggingface.import_policy(folder)
    params["final_norm"] = params["final_norm"].at[0].mul(1.5)
    other = huggingface.export_params(config, params, tmp_path / "other", {})
    ids_BT = serving.Work(600, 8, 6, 1).together(3)[0]
    with peer.loaded(tmp_path / "policy.gguf") as model:
        assert peer.check_same(folder, model, ids_BT) < 1e-4
        with pytest.raises(RuntimeError, match="computes another network"):
            peer.check_same(other, model, ids_BT)


@pytest.mark.slow
def test_other_families_are_not_written(tmp_path, peer):
    config = huggingface.import_config(serving.random_policy(tmp_path, width=64, layers=1))
    config = dataclasses.replace(config, qk_norm=False, attention_bias=True)
    params = parameters.init_params(config, jax.random.key(0))
    folder = huggingface.export_params(config, params, tmp_path / "qwen2", {})
    said = serving.llamas(folder, [1], serving.Work(600, 8, 6, 1))
    assert "qwen2 policy" in said and "--policy" in said
