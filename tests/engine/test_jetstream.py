"""JetStream's own verbs over our engine, and what we repair of the package.

Its orchestrator and server over them are tried in test_jetstream_server.py.
"""

import importlib
import logging
import sys

import jax
import numpy as np
import pytest
import tiny

from notepad_jax.engine.jetstream import compat
from notepad_jax.engine.jetstream.engine import PagedEngine
from notepad_jax.types import Completion, Finish, Prompt, tokens

PROMPTS = [p.tokens for p in tiny.prompts(per_prefix=1)]
GREEDY = tiny.sampling(0, temperature=0.0, length=8)


def engine() -> PagedEngine:
    return PagedEngine(tiny.CONFIG, tiny.SETTINGS, GREEDY)


def padded(ids: np.ndarray, size: int = 64) -> np.ndarray:
    return np.pad(ids, (0, size - len(ids)))


def decode(made: PagedEngine, params, prefix, slot: int = 3):
    """Inserts a prefix, generates until the slot has stopped; (ids, logprobs)."""
    state = made.insert(prefix, made.init_decode_state(), slot)
    ids, logps = [], []
    while state.slots[slot].remaining:
        state, results = made.generate(params, state)
        data = results.convert_to_numpy().get_result_at_slot(slot)
        n = int(data.valid.sum())
        ids += data.tokens[0, :n].tolist()
        logps += results.logprobs[slot, :n].tolist()
        assert data.lengths[0] == len(ids)
    return ids, logps


@pytest.mark.parametrize("ids", PROMPTS, ids=lambda p: f"{len(p)} tokens")
def test_prefill_insert_generate_report_the_trainers_logprobs(ids):
    params, made = tiny.params(), engine()
    loaded = made.load_params(params)
    prefix = made.prefill(params=loaded, padded_tokens=padded(ids), true_length=len(ids))
    new, logps = decode(made, loaded, prefix)
    completion = Completion(tokens(new), np.array(logps), Finish.STOP, 0)
    exact = tiny.trainer_logprobs(params, Prompt(tokens(), tokens(ids)), completion, 0.0)
    assert np.abs(exact - logps).max() < 1e-5
    assert len(new) == 8 or new[-1] in tiny.STOPS


@pytest.mark.parametrize("cut", [1, 7, 8, 20])
def test_prefill_continues_an_existing_prefix(cut):
    made, ids = engine(), PROMPTS[2]
    loaded = made.load_params(tiny.params())
    whole = made.prefill(params=loaded, padded_tokens=padded(ids), true_length=len(ids))
    first = made.prefill(params=loaded, padded_tokens=padded(ids[:cut]), true_length=cut)
    both = made.prefill(
        params=loaded, existing_prefix=first, padded_tokens=padded(ids[cut:]),
        true_length=len(ids) - cut,
    )  # fmt: skip
    assert decode(made, loaded, both)[0] == decode(made, loaded, whole)[0]


def test_a_slot_can_be_taken_over_and_keeps_no_pages():
    made = engine()
    loaded = made.load_params(tiny.params())
    state = made.init_decode_state()
    for ids in PROMPTS:
        prefix = made.prefill(params=loaded, padded_tokens=padded(ids), true_length=len(ids))
        state = made.insert(prefix, state, 0)
    made.free_slot(state, 0)
    assert state.pool.free == tiny.SETTINGS.pages


def test_a_prompt_too_long_is_refused_before_any_work():
    with pytest.raises(ValueError, match="97 tokens exceeds the engine's 96"):
        engine().prefill(params=None, padded_tokens=np.zeros(128, np.int32), true_length=97)


def test_importing_the_server_leaves_logging_alone():
    root = logging.getLogger()
    level = root.level
    server = compat.load_server()
    assert root.level == level and server.orchestrator.handler not in root.handlers


def test_where_jetstream_is_not_installed_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "jetstream.engine", None)
    monkeypatch.delitem(sys.modules, compat.__name__)
    with pytest.raises(ImportError, match="pip install --no-deps google-jetstream") as caught:
        importlib.import_module(compat.__name__)
    assert len(str(caught.value).splitlines()) == 1


def test_results_are_jetstreams_with_logprobs_beside_them():
    made = np.array([2, 0])
    results = compat.results(
        np.array([[7, 8], [0, 0]]), np.array([[-1.0, -2.0], [0, 0]]), made, np.array([5, 0])
    )
    slot = results.get_result_at_slot(0)
    assert slot.tokens.tolist() == [[7, 8]] and slot.valid.tolist() == [[1, 1]]
    assert slot.lengths.tolist() == [5]
    assert results.convert_to_numpy().logprobs.tolist() == [[-1.0, -2.0], [0, 0]]
    assert isinstance(results, compat.engine_api.ResultTokens)


def test_the_orchestrator_can_delete_a_prefix():
    """`delete_pytree` is repaired: it used jax.tree_map, which jax removed."""
    orchestrator = compat.load_orchestrator()
    leaf = jax.numpy.ones(3)
    orchestrator.delete_pytree({"x": leaf})
    assert leaf.is_deleted()
