"""What is computed in where nobody says: float32 on CPUs, elsewhere what the policy names."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.models import MODELS
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.planner import lowering, planned_policy
from notepad_jax.programs import evaluate, subjects
from notepad_jax.setup import builders, configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import base_fingerprint
from pallas_kernels import aot
from tests import fakes, tiny, tpu_compiler

ROOT = Path(__file__).parents[2]
STORED = dataclasses.replace(tiny.CONFIG, dtype="bfloat16")


@pytest.mark.parametrize(
    "said, platform, expected",
    [
        ("", "cpu", "float32"),
        ("", "tpu", "bfloat16"),
        ("", "gpu", "bfloat16"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float32", "tpu", "float32"),
    ],
)
def test_what_is_said_counts_and_what_is_not_suits_the_machine(said, platform, expected):
    assert builders.computes_in(said, STORED, platform) == expected


def test_a_policy_stored_in_float32_computes_in_it_everywhere():
    stored = dataclasses.replace(STORED, dtype="float32")
    assert {builders.computes_in("", stored, p) for p in ("cpu", "gpu", "tpu")} == {"float32"}


def test_float16_is_computed_in_bfloat16_where_there_are_chips_and_that_is_said(
    tmp_path, monkeypatch
):
    policy = builders.load_policy(ROOT / "data" / "starter")
    beside = huggingface.companions(policy.folder)
    huggingface.export(policy.config, policy.params, tmp_path / "half", "float16", beside)
    said = []
    assert builders.load_policy(tmp_path / "half", say=said.append).config.dtype == "float32"
    monkeypatch.setattr(builders, "_platform", lambda shardings: "tpu")
    assert (
        builders.load_policy(tmp_path / "half", "float32", say=said.append).config.dtype
        == "float32"
    )
    assert not said
    half = builders.load_policy(tmp_path / "half", say=said.append)
    assert half.config.dtype == "bfloat16" and dtypes_of(half.params) == {jnp.dtype("float16")}
    assert len(said) == 1 and "half is float16, and is computed in bfloat16" in said[0]
    config = configuration.load("quickstart")
    assert builders.rollout_dtype(config, half.config) == "bfloat16"  # which it used to refuse


def test_what_nothing_computes_in_is_refused_with_what_there_is():
    known = r"dtype is 'float16'; use one of 'float32', 'bfloat16', or '' for what suits the mach"
    with pytest.raises(ValueError, match=known):
        builders.computes_in("float16", STORED, "cpu")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The starter as models are published: bfloat16, in its files and in config.json."""
    policy = builders.load_policy(ROOT / "data" / "starter")
    folder, beside = tmp_path_factory.mktemp("stored") / "hf", huggingface.companions(policy.folder)
    huggingface.export(policy.config, policy.params, folder, "bfloat16", beside)
    return folder


def engine_of(policy, *words: str):
    config = configuration.load("quickstart", words)
    rules = builders.rules(config.reading)
    return builders.engine_settings(config.engine, policy.config, rules, fakes.template())


def dtypes_of(tree) -> set:
    return {x.dtype for x in jax.tree.leaves(tree)}


def test_a_bfloat16_policy_lies_and_computes_in_float32_here(stored):
    policy = builders.load_policy(stored)
    assert dtypes_of(policy.params) == {jnp.dtype("float32")}
    assert dtypes_of(policy.stored) == {jnp.dtype("bfloat16")}
    assert policy.config.dtype == "float32" and engine_of(policy).cache_dtype == "float32"
    said = builders.load_policy(stored, "bfloat16")
    assert dtypes_of(said.params) == dtypes_of(said.stored) == {jnp.dtype("bfloat16")}
    for wide, narrow in zip(*map(jax.tree.leaves, (policy.params, said.params)), strict=True):
        np.testing.assert_array_equal(wide, narrow.astype("float32"))  # the same numbers
    # What a run began with is known by what lies on the disk.
    assert base_fingerprint.content(policy) == base_fingerprint.content(said)
    assert said.config.dtype == "bfloat16" == engine_of(said).cache_dtype
    assert engine_of(said, "--config.engine.cache_dtype=int8").cache_dtype == "int8"
    assert builders.words(stored, "bfloat16").config == said.config  # and without its weights


def test_the_trainer_hands_the_engine_what_both_compute_in(stored):
    config = configuration.load("quickstart")
    policy = builders.load_policy(stored).config
    wanted = jax.tree.leaves(builders.adopted(config, policy))
    assert {x.dtype for x in wanted} == {jnp.dtype("float32")}


@pytest.mark.parametrize(
    "name",
    ["chat", "memagent", "mix", "quickstart", "qwen2_5_14b", "qwen2_5_7b", "qwen3_30b_a3b",
     "qwen3_4b", "ruler"],
)  # fmt: skip
def test_no_config_of_ours_says_a_dtype(name):
    config = configuration.load(name)
    rollout = config.checkpoint.rollout_dtype if config.grpo else ""
    assert (config.dtype, config.engine.cache_dtype, rollout) == ("", "", "")


def test_an_evaluation_remembers_what_it_computed_in(stored):
    """Going on with it on a machine with another default would mix readings of two roundings."""
    config = configuration.load("quickstart", [f"--config.policy={stored}"])
    reader = subjects.named(config, SilentScreen())
    assert reader.dtypes == {"dtype": "float32", "engine.cache_dtype": "float32"}
    assert reader.dtypes.keys() <= evaluate.identity(config).keys()


def test_sizes_are_planned_for_the_devices_that_are_named():
    config = configuration.load("qwen2_5_7b")
    for platform, dtype in {"tpu": "bfloat16", "cpu": "float32"}.items():
        policy = planned_policy.policy_of(config, platform).config
        rules, template = builders.rules(config.reading), fakes.template()
        engine = builders.engine_settings(config.engine, policy, rules, template)
        assert policy.dtype == dtype == engine.cache_dtype


@tpu_compiler.needed
def test_a_plan_for_tpus_has_their_default_on_whatever_machine_it_is_made():
    config = configuration.load("qwen2_5_7b")
    made = lowering.plan_of(config, aot.slice_of("v5p:2x4x4"))
    assert made.policy.dtype == "bfloat16" == MODELS["Qwen2.5-7B-Instruct"].dtype
    assert made.residents[lowering.ROLLOUT]["weights"] == pytest.approx(
        2 * 7_615_616_512 / 4, rel=0.02
    )
    assert made.residents[lowering.ROLLOUT]["cache"] == 6144 * 128 * 28 * 2 * 128 * 2
