"""Adapters as PEFT keeps them: merged from the files alone they are the policy that was trained."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from notepad_jax.checkpoint.hf import huggingface, storage
from notepad_jax.checkpoint.hf.adapters import export_adapters
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import Experts

ALL = lora.Lora(rank=4, alpha=6.0, targets=lora.TARGETS)


def trained(chosen=ALL, config=tiny.CONFIG):
    """Adapters after some training: B is no longer zero."""
    rng = np.random.default_rng(0)
    fresh = jax.eval_shape(lambda: lora.init(config, chosen, jax.random.key(0)))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, fresh)


def whole(chosen, base, adapters, config=tiny.CONFIG):
    frozen, _ = lora.partition(config, base, chosen, jax.random.key(0))
    return lora.merged(parameters.join(frozen, adapters))


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
