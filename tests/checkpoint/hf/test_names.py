"""The name tables: every tensor of every family once, and checkpoints that disagree with them."""

import dataclasses

import jax
import numpy as np
import pytest
from golden_policies import CASES, DENSE, EXPERTS, GOLDENS, load, shapes_of

from notepad_jax.checkpoint.hf import huggingface, names
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.model import parameters


@pytest.mark.parametrize("case", CASES)
def test_export_of_an_import_is_the_same_tensors(case, tmp_path):
    config, params = huggingface.import_policy(GOLDENS / case)
    huggingface.export_params(config, params, tmp_path / "back")
    again, back = huggingface.import_policy(tmp_path / "back")
    assert again == config
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)
    read, written = Safetensors.open(GOLDENS / case), Safetensors.open(tmp_path / "back")
    assert shapes_of(read) == shapes_of(written)
    for name in read.tensors:
        assert read.read(name).tobytes() == written.read(name).tobytes(), name


def test_experts_are_stacked_by_layer_and_number():
    config, params = huggingface.import_policy(GOLDENS / "moe_top8")
    store = Safetensors.open(GOLDENS / "moe_top8")
    up = store.read("model.layers.1.mlp.experts.10.up_proj.weight")
    np.testing.assert_array_equal(params["layers"]["expert_up"][1, 10], up.T)
    router = store.read("model.layers.0.mlp.gate.weight")
    np.testing.assert_array_equal(params["layers"]["router"][0], router.T)


@pytest.mark.parametrize("case", CASES)
def test_the_table_covers_every_entry_of_the_tree_once(case):
    config = load(case)[0]
    seen = jax.tree.map(lambda x: np.zeros(x.shape, int), parameters.abstract_params(config))
    table = list(names.table(config))
    for part in table:
        count = seen
        for key in part.path:
            count = count[key]
        assert count[part.index].shape == part.shape
        count[part.index] += 1
    assert all((count == 1).all() for count in jax.tree.leaves(seen))
    assert len({part.name for part in table}) == len(table)


def test_combinations_that_no_family_has_are_refused():
    for change in (
        dict(output_bias=True), dict(family="mistral"), dict(family="gemma"),
        dict(qk_norm=False, experts=EXPERTS), dict(qk_norm=False, output_bias=True),
    ):  # fmt: skip
        with pytest.raises(names.ImportProblem):
            names.table(dataclasses.replace(DENSE, **change))


def test_a_config_json_that_disagrees_with_the_tensors_is_refused():
    shapes = shapes_of(Safetensors.open(GOLDENS / "moe_top2"))
    config = load("moe_top2")[0]
    names.check(config, shapes)

    def refused(config, shapes, message):
        with pytest.raises(names.ImportProblem, match=message):
            names.check(config, shapes, "here")

    wide = dataclasses.replace(config, width=config.width * 2)
    refused(wide, shapes, r"here: tensor 'model.embed_tokens.weight' has shape \(32, 16\), its")
    few = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=3))
    refused(few, shapes, "mlp.gate.weight' has shape")
    more = dataclasses.replace(config, layers=3)
    refused(more, shapes, "'model.layers.2.input_layernorm.weight' is missing")
    fewer = dataclasses.replace(config, layers=1)
    refused(fewer, shapes, "there is a tensor 'model.layers.1.*lacks")
    untied = dataclasses.replace(config, tied_embeddings=False)
    refused(untied, shapes, "'lm_head.weight' is missing; if .* tie_word_embeddings: true")
    dense = dataclasses.replace(config, experts=None)
    refused(dense, shapes, "'model.layers.0.mlp.gate_proj.weight' is missing")
