"""Adapters as PEFT keeps them: merged from the files alone they are the policy that was trained."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from notepad_jax.checkpoint import abstract_trees
from notepad_jax.checkpoint.hf import huggingface, names, storage
from notepad_jax.checkpoint.hf.adapters import (
    base_name,
    export_adapters,
    import_adapters,
    open_adapters,
    read_lora,
)
from notepad_jax.checkpoint.hf.added import Rounding, Sum, added
from notepad_jax.model import lora, lora_merge, parameters
from notepad_jax.model.config import Experts

ALL = lora.Lora(rank=4, alpha=6.0, targets=lora.TARGETS)


def trained(chosen=ALL, config=tiny.CONFIG):
    """Adapters after some training: B is no longer zero."""
    rng = np.random.default_rng(0)
    fresh = jax.eval_shape(lambda: lora.init(config, chosen, jax.random.key(0)))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, fresh)


def whole(chosen, base, adapters, config=tiny.CONFIG):
    frozen, _ = lora.partition(config, base, chosen, jax.random.key(0))
    return lora_merge.merged(parameters.join(frozen, adapters))


def merged_from_files(base, folder):
    """What PEFT computes, by numpy: every A finds its B and its matrix by their names."""
    text = json.loads((folder / storage.ADAPTER_CONFIG).read_text())
    found = load_file(folder / storage.ADAPTER_WEIGHTS)
    weights = load_file(base / storage.WEIGHTS)
    for name in [name for name in found if name.endswith(".lora_A.weight")]:
        a, b = found.pop(name), found.pop(name.replace("lora_A", "lora_B"))
        matrix = name.removeprefix("base_model.model.").replace(".lora_A", "")
        assert matrix.split(".")[-2] in text["target_modules"]
        weights[matrix] = weights[matrix] + text["lora_alpha"] / text["r"] * (b @ a)
    assert not found
    return weights


@pytest.mark.parametrize("targets", [lora.TARGETS, ("q", "o")])
def test_merged_from_the_files_alone_they_are_the_trained_policy(targets, tmp_path):
    base, chosen = tiny.params(), dataclasses.replace(ALL, targets=targets)
    adapters = trained(chosen)
    huggingface.export_params(tiny.CONFIG, base, tmp_path / "base")
    done = export_adapters(tiny.CONFIG, chosen, adapters, "base", tmp_path / "adapters")
    assert sorted(done.files) == sorted(os.listdir(tmp_path / "adapters"))
    assert done.tensors == 2 * 3 * len(targets)
    merged = whole(chosen, base, adapters)
    huggingface.export_params(tiny.CONFIG, merged, tmp_path / "whole")
    wanted = load_file(tmp_path / "whole" / storage.WEIGHTS)
    found = merged_from_files(tmp_path / "base", tmp_path / "adapters")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    plain = load_file(tmp_path / "base" / storage.WEIGHTS)
    changed = {name for name in wanted if not np.array_equal(plain[name], wanted[name])}
    assert len(changed) == 3 * len(targets)


def test_names_shapes_and_config_are_pefts(tmp_path):
    """Width 32, 4 heads of 8, feed-forward 48, rank 4."""
    adapters = trained()
    export_adapters(tiny.CONFIG, ALL, adapters, "Qwen/Qwen3-4B", tmp_path / "a")
    found = load_file(tmp_path / "a" / storage.ADAPTER_WEIGHTS)
    shapes = {name: tensor.shape for name, tensor in found.items()}
    first = "base_model.model.model.layers.0."
    assert shapes[first + "self_attn.q_proj.lora_A.weight"] == (4, 32)
    assert shapes[first + "self_attn.k_proj.lora_B.weight"] == (16, 4)
    assert shapes[first + "self_attn.o_proj.lora_A.weight"] == (4, 32)
    assert shapes[first + "mlp.down_proj.lora_A.weight"] == (4, 48)
    assert shapes[first + "mlp.down_proj.lora_B.weight"] == (32, 4)
    assert {tensor.dtype for tensor in found.values()} == {np.dtype(np.float32)}
    heads = adapters["layers"]["o_lora_in"][2]  # [N, H, r]; heads are folded head major
    np.testing.assert_array_equal(
        found["base_model.model.model.layers.2.self_attn.o_proj.lora_A.weight"][3],
        heads[:, :, 3].reshape(-1),
    )
    text = json.loads((tmp_path / "a" / storage.ADAPTER_CONFIG).read_text())
    assert (text["peft_type"], text["task_type"], text["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (text["r"], text["lora_alpha"], text["use_rslora"]) == (4, 6, False)
    assert text["base_model_name_or_path"] == "Qwen/Qwen3-4B"
    assert text["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
    ]  # fmt: skip


def test_same_adapters_same_bytes_and_only_exports_are_replaced(tmp_path):
    def export(folder, **options):
        return export_adapters(tiny.CONFIG, ALL, trained(), "b", tmp_path / folder, **options)

    export("a")
    export("b")
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(ValueError, match="a is not empty; choose another folder, or --overwrite"):
        export("a")
    export("a", overwrite=True, dtype="bfloat16")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"policy": "data/starter"}')
    with pytest.raises(ValueError, match="choose another folder"):
        export("run", overwrite=True)


def test_adapters_of_another_policy_are_refused_in_one_line(tmp_path):
    moe = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))
    one = dataclasses.replace(ALL, targets=("q",))
    other = dataclasses.replace(ALL, rank=2)
    for config, chosen, adapters, says in (
        (tiny.CONFIG, ALL, {}, "the adapters lack down_lora_in, which lora.targets asks for"),
        (tiny.CONFIG, one, trained(), "the adapters have down_lora_in; lora.targets are"),
        (tiny.CONFIG, other, trained(), r"has shape \(3, 48, 4\); this policy at rank 2 has"),
        (moe, ALL, trained(), "lora.targets has 'gate', which this policy does not have"),
    ):
        with pytest.raises(ValueError, match=says) as raised:
            export_adapters(config, chosen, adapters, "b", tmp_path / "a")
        assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == []


FAMILIES = {
    "qwen3": tiny.CONFIG,
    "qwen3_moe": dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True)),
    "qwen2": dataclasses.replace(tiny.CONFIG, qk_norm=False, attention_bias=True),
    "llama": dataclasses.replace(tiny.CONFIG, qk_norm=False, tied_embeddings=False),
    "mistral": dataclasses.replace(tiny.CONFIG, qk_norm=False, family="mistral"),
}


def place_of(config, chosen):
    base = abstract_trees.placed(parameters.abstract_params(config))
    return jax.tree.map(lambda x: x.sharding, lora.abstract(config, chosen, base)[1])


@pytest.mark.parametrize("family", names.FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_written_is_read_and_what_was_read_is_written(family, dtype, tmp_path):
    """Bit by bit, in float32; in bfloat16 they are the adapters rounded once."""
    config = FAMILIES[family]
    attention = lora.TARGETS[:4]
    chosen = dataclasses.replace(ALL, targets=attention if config.experts else lora.TARGETS)
    adapters = trained(chosen, config)
    export_adapters(config, chosen, adapters, "b", tmp_path / "a", dtype)
    opened = open_adapters(tmp_path / "a", config, "b")
    found = import_adapters(opened, place_of(config, chosen))
    wanted = jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), adapters)
    assert opened.lora == chosen and base_name(tmp_path / "a") == "b"
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    export_adapters(config, opened.lora, found, "b", tmp_path / "again", dtype)
    for name in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_what_a_dtype_takes_of_a_delta_by_hand():
    """Beside 1 bfloat16 has steps of 2^-7: of a delta of 2^-10 nothing is left, of 2^-7 all."""
    rounding = Rounding(np.dtype("bfloat16"))
    assert rounding.lost is None
    # Off the grid by 2^-10, too: the base is written as 1, so what is left is counted from there.
    matrix = np.float32([[[1.0, 1.0 + 2**-10]]])
    b = np.float32([[[2**-10, 2**-7]]])
    summed = Sum(matrix, np.ones((1, 1, 1), np.float32), b, np.float32(1.0), rounding)
    np.testing.assert_array_equal(summed[(0,)], [[1 + 2**-10, 1 + 2**-7 + 2**-10]])
    assert rounding.lost == pytest.approx(2**-10 / (2**-20 + 2**-14) ** 0.5)
    assert (rounding.moved, rounding.unseen) == (2, 1)
    exact = Rounding(np.dtype("float32"))
    dataclasses.replace(summed, rounding=exact)[(0,)]
    assert exact.lost == 0.0


def test_a_policy_that_was_read_is_the_one_that_is_added_up_while_it_is_streamed(tmp_path):
    base, adapters = tiny.params(), trained()
    huggingface.export_params(tiny.CONFIG, base, tmp_path / "base")
    export_adapters(tiny.CONFIG, ALL, adapters, "b", tmp_path / "a")
    opened = open_adapters(tmp_path / "a", tiny.CONFIG, "b")
    read = import_adapters(opened, place_of(tiny.CONFIG, ALL))
    joined = lora.adapted(tiny.CONFIG, base, opened.lora, read)
    assert lora.of(joined) == ALL and lora.of(base) is None
    wanted = whole(ALL, base, adapters)
    jax.tree.map(np.testing.assert_array_equal, lora_merge.in_place(joined), wanted)
    on_disk = huggingface.open_tree(*huggingface.open_policy(tmp_path / "base"))
    rounding = Rounding(np.dtype("float32"))
    summed = added(on_disk, ALL, read, rounding)
    huggingface.export_params(tiny.CONFIG, summed, tmp_path / "sum")
    _, found = huggingface.import_policy(tmp_path / "sum")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)
    assert 0 < rounding.lost < 1e-6
    # Who goes on with them has them as they were; who asks for others is told of both.
    frozen, taken = lora.partition(tiny.CONFIG, joined, ALL, jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, taken, adapters)
    jax.tree.map(np.testing.assert_array_equal, parameters.join(frozen, taken), joined)
    for other, says in (
        ({"rank": 2}, "lora.rank=4 .*lora.rank=2 "), ({"alpha": 7.5}, "alpha=6 .*alpha=7.5 "),
        ({"targets": ("q", "v")}, "targets=q,k,v,o,gate,up,down.*targets=q,v;"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"has adapters with .*{says}"):
            asked = dataclasses.replace(ALL, **other)
            lora.partition(tiny.CONFIG, joined, asked, jax.random.key(5))


def test_modules_are_matched_as_peft_matches_them(tmp_path):
    """By the end of their path; a file by PEFT may be in float16 and say more than ours."""
    chosen = lora.Lora(2, 3.0, ("q", "down"))
    export_adapters(tiny.CONFIG, chosen, trained(chosen), "b", tmp_path / "a")
    path = tmp_path / "a" / storage.ADAPTER_CONFIG
    text = json.loads(path.read_text())
    weights = tmp_path / "a" / storage.ADAPTER_WEIGHTS
    half = {name: x.astype(np.float16) for name, x in load_file(weights).items()}
    save_file(half, weights)
    paths = ["self_attn.q_proj", "mlp.down_proj"]
    every = [f"model.layers.{layer}.{path}" for layer in range(3) for path in paths]
    for said in (["q_proj", "down_proj"], paths, every):
        more = {"target_modules": said, "peft_version": "0.21.2", "exclude_modules": None}
        path.write_text(json.dumps(text | more | {"lora_dropout": 0.05, "qalora_group_size": 16}))
        assert open_adapters(tmp_path / "a", tiny.CONFIG, "b").lora == chosen
    path.write_text(json.dumps(text | {"target_modules": "all-linear"}))
    assert read_lora(tmp_path / "a", tiny.CONFIG).targets == lora.TARGETS
    path.write_text(json.dumps(text))
    opened = open_adapters(tmp_path / "a", tiny.CONFIG, "b")
    found = import_adapters(opened, place_of(tiny.CONFIG, chosen))
    into = trained(chosen)["layers"]["q_lora_in"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found["layers"]["q_lora_in"], into)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"peft_type": "LOHA"}, "says peft_type: 'LOHA'; adapters here have \"LORA\""),
        ({"task_type": "SEQ_CLS"}, "says task_type: 'SEQ_CLS'"),
        ({"bias": "lora_only"}, "says bias: 'lora_only'"),
        ({"init_lora_weights": "pissa"}, "says init_lora_weights: 'pissa'"),
        ({"init_lora_weights": 1}, "says init_lora_weights: 1"),
        ({"use_rslora": True}, "says use_rslora: True, which is not computed here"),
        ({"use_dora": True}, "says use_dora: True"),
        ({"modules_to_save": ["lm_head"]}, "says modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "says rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "says alpha_pattern"),
        ({"layers_to_transform": [1]}, "says layers_to_transform"),
        ({"fan_in_fan_out": True}, "says fan_in_fan_out"),
        ({"trainable_token_indices": [3]}, "says trainable_token_indices"),
        ({"r": 0}, "says r: 0; a rank is a whole number above 0"),
        ({"r": True}, "says r: True"),
        ({"r": 4.0}, "says r: 4.0"),
        ({"lora_alpha": -1}, "says lora_alpha: -1; it is a number above 0"),
        ({"lora_alpha": float("nan")}, "says lora_alpha: nan"),
        ({"lora_alpha": "16"}, "says lora_alpha: '16'"),
        ({"target_modules": None}, "says target_modules: None; list the modules by name"),
        ({"target_modules": "all-linear|q"}, "says target_modules: 'all-linear|q'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "has 'lm_head' among .* of a qwen3 q_proj, k_"),
        ({"target_modules": ["q_proj"]}, "k_proj.lora_A.weight', which adapters of q on the base"),
        ({"r": 8}, r"shape \(4, 32\), and on the base with r=8 it has \(8, 32\); name the policy"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(said, says, tmp_path):
    chosen = dataclasses.replace(ALL, targets=("q", "k"))
    export_adapters(tiny.CONFIG, chosen, trained(chosen), "b", tmp_path / "a")
    path = tmp_path / "a" / storage.ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    with pytest.raises(ValueError, match=says) as raised:
        open_adapters(tmp_path / "a", tiny.CONFIG, "the base")
    assert "\n" not in str(raised.value)


def test_damaged_adapters_and_those_of_another_base_are_one_line(tmp_path):
    folder = tmp_path / "a"
    export_adapters(tiny.CONFIG, ALL, trained(), "b", folder)
    path, text = folder / storage.ADAPTER_WEIGHTS, folder / storage.ADAPTER_CONFIG
    kept, said, tensors = path.read_bytes(), text.read_text(), load_file(path)
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def refused(says, config=tiny.CONFIG, read=False):
        with pytest.raises(ValueError, match=says) as raised:
            opened = open_adapters(folder, config, "policies/base")
            assert read
            import_adapters(opened, place_of(config, ALL))
        assert "\n" not in str(raised.value)
        path.write_bytes(kept)
        text.write_text(said)

    for size in (4, 100, len(kept) - 1):
        path.write_bytes(kept[:size])
        refused("adapter_model.safetensors is cut short")
    path.write_bytes(kept + b"x")
    refused("goes on after its last tensor")
    save_file({name: x for name, x in tensors.items() if name != first}, path)
    refused("layers.0.self_attn.q_proj.lora_A.weight' is missing; its .*adapts q, k, v, o, gate")
    save_file(tensors | {"lm_head.weight": np.zeros((4, 4), np.float32)}, path)
    refused("a tensor 'lm_head.weight', which adapters of q, k, .* on policies/base do not have")
    save_file(tensors | {first: np.full((4, 32), np.nan, np.float32)}, path)
    refused("holds nan, which is no weight", read=True)
    save_file(tensors | {first: np.zeros((4, 32), np.int8)}, path)
    refused("is I8; weights are read as F32, BF16, F16")
    text.write_text(said[:-9])
    refused("adapter_config.json is not JSON")
    text.write_text("[]")
    refused("adapter_config.json is not a JSON object")
    text.unlink()
    refused("adapter_config.json is missing; adapters are adapter_config.json and adapter_model")
    path.unlink()
    refused("adapter_model.safetensors is missing; download the weights as safetensors")
    path.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    refused("adapter_model.bin is a pickle, which is not read")
    refused("shape .*on policies/base .*it has", dataclasses.replace(tiny.CONFIG, width=64))
    refused("do not have", dataclasses.replace(tiny.CONFIG, layers=2))
    refused("layers.3.self_attn.q.* is missing", dataclasses.replace(tiny.CONFIG, layers=4))
    moe = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))
    refused("has 'down_proj' among .* of a qwen3_moe q_proj, k_proj, v_proj, o_proj can be", moe)


@pytest.mark.slow
def test_peft_computes_the_policy_that_was_trained(tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch, transformers and peft")
    transformers = pytest.importorskip("transformers", reason="needs torch, transformers and peft")
    peft = pytest.importorskip("peft", reason="needs torch, transformers and peft")
    config = dataclasses.replace(tiny.CONFIG, tied_embeddings=False)
    base = parameters.init_params(config, jax.random.key(0))
    adapters = trained(config=config)
    huggingface.export_params(config, base, tmp_path / "base")
    huggingface.export_params(config, whole(ALL, base, adapters, config), tmp_path / "whole")
    export_adapters(config, ALL, adapters, str(tmp_path / "base"), tmp_path / "adapters")

    def logits(model):
        with torch.no_grad():
            return model.eval()(torch.arange(4, 40)[None]).logits.numpy()

    def read(name):
        folder = tmp_path / name
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    wanted, plain = logits(read("whole")), logits(read("base"))
    adapted = logits(peft.PeftModel.from_pretrained(read("base"), tmp_path / "adapters"))
    np.testing.assert_allclose(adapted, wanted, atol=1e-4)
    assert np.abs(adapted - plain).max() > 0.1
