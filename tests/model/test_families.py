"""Every supported family computes what transformers computes, and is read and written whole.

The goldens were made by tests/goldens/make_goldens.py with torch and transformers; nothing
here needs them, except the last test, which asks transformers itself.
"""

import asyncio
import dataclasses
import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from configs.models import MODELS
from notepad_jax.checkpoint.hf import families, huggingface
from notepad_jax.checkpoint.hf.safetensors_store import Safetensors
from notepad_jax.engine.driver import EngineDriver
from notepad_jax.engine.paged_engine import EngineSettings, PagedEngine
from notepad_jax.model import attention, logprobs, moe, parameters, policy, rope
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.layers import rope_angles
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, tokens
from pallas_kernels import aot

GOLDENS = Path(__file__).parents[1] / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/golden.npz"))
EXPERTS = Experts(count=4, per_token=2, feed_forward=6, normalize=True)
MOE = PolicyConfig(
    vocab_size=24, width=8, layers=3, heads=4, kv_heads=2, head_size=6, feed_forward=12,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=False,
    valid_vocab=21, experts=EXPERTS,
)  # fmt: skip
DENSE = dataclasses.replace(MOE, experts=None)


@functools.cache
def load(case):
    """(config, params, golden), all in float32 though the files are float16."""
    config, params = huggingface.import_policy(GOLDENS / case)
    config = dataclasses.replace(config, dtype="float32")
    golden = dict(np.load(GOLDENS / case / "golden.npz"))
    return config, jax.tree.map(lambda x: jnp.asarray(x, "float32"), params), golden


def prompts(golden):
    return np.split(golden["prompts"].astype(np.int32), np.cumsum(golden["lengths"])[:-1])


@functools.partial(jax.jit, static_argnames="config")
def all_logits(config, params, tokens_BT):
    B, T = tokens_BT.shape
    attend = attention.packed(config, jnp.full((B, T), T, jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    hidden, _, _ = policy.forward(config, params, tokens_BT, positions, attend)
    return logprobs.logits(config, params, hidden)


def right_padded(rows):
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows]).astype(np.int32)


# ---------------------------------------------------------------- parity with transformers


def test_there_is_a_golden_of_every_family_and_kind_of_rope():
    configs = [load(case)[0] for case in CASES]
    assert {families.family_of(config) for config in configs} == set(families.FAMILIES)
    kinds = {type(config.rope) for config in configs}
    assert kinds == {rope.Unscaled, rope.Linear, rope.Llama3, rope.Yarn}
    assert {config.experts.per_token for config in configs if config.experts} == {1, 2, 8}
    for field in ("tied_embeddings", "attention_bias", "qk_norm", "output_bias"):
        assert {getattr(config, field) for config in configs} == {True, False}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    config, params, golden = load(case)
    rows = prompts(golden)
    found = np.asarray(all_logits(config, params, right_padded(rows)))
    kept = golden["logits"].shape[1]
    for row, logits, want in zip(rows, found, golden["logits"], strict=True):
        np.testing.assert_allclose(logits[len(row) - kept : len(row)], want, atol=1e-5)


QUICK = ("qwen2_tied", "qwen3_tied", "llama3", "mistral", "moe_top2")  # one of each family
ENGINE_CASES = [
    case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.parametrize("case", ENGINE_CASES)
def test_the_engines_greedy_tokens_are_those_of_transformers(case):
    """A ragged batch, 64 tokens each; the longer prompts come out of the prefix cache."""
    config, params, golden = load(case)
    new = golden["greedy"].shape[1]
    settings = EngineSettings(
        slots=4, page_size=8, pages=80, max_prompt=32, max_new_tokens=new, steps_per_launch=16,
        row_tokens=64,
    )  # fmt: skip
    sampling = SamplingParams(0.0, 1.0, new, (), 0)

    async def complete():
        engine = PagedEngine(config, settings, sampling)
        async with EngineDriver(engine, PolicySnapshot(0, params)) as driver:
            asked = [
                Prompt(tokens(row[: len(row) // 8 * 8 - 8]), tokens(row[len(row) // 8 * 8 - 8 :]))
                if len(row) > 16
                else Prompt(tokens(), tokens(row))
                for row in prompts(golden)
            ]
            return await asyncio.gather(*[driver.complete(p, sampling) for p in asked])

    found = np.stack([completion.tokens for completion in asyncio.run(complete())])
    np.testing.assert_array_equal(found, golden["greedy"])


# ---------------------------------------------------------------- files


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


def shapes_of(store):
    return {name: tensor.shape for name, tensor in store.tensors.items()}


@pytest.mark.parametrize("case", CASES)
def test_config_json_comes_back(case):
    text = json.loads((GOLDENS / case / "config.json").read_text())
    config = families.read_config(text)
    written = families.write_config(config, config.dtype)
    assert written["model_type"] == text["model_type"]
    assert written["architectures"] == text["architectures"]
    assert families.read_config(json.loads(json.dumps(written))) == config


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
    table = families.table(config)
    for part in table:
        count = seen
        for key in part.path:
            count = count[key]
        assert count[part.index].shape == part.shape
        count[part.index] += 1
    assert all((count == 1).all() for count in jax.tree.leaves(seen))
    assert len({part.name for part in table}) == len(table)


# ---------------------------------------------------------------- published sizes

COUNTS = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Llama-3.1-8B": 8_030_261_248,
}
_QWEN2 = dict(
    model_type="qwen2", hidden_act="silu", max_position_embeddings=32768, rms_norm_eps=1e-6,
    rope_theta=1000000.0, sliding_window=131072, use_sliding_window=False,
    tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=152064,
)  # fmt: skip
_QWEN3 = dict(
    attention_bias=False, head_dim=128, hidden_act="silu", max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000000, sliding_window=None,
    torch_dtype="bfloat16", use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
PUBLISHED = {  # what of each config.json has a meaning for a decoder
    "Qwen2.5-7B-Instruct": _QWEN2 | dict(
        hidden_size=3584, intermediate_size=18944, max_window_layers=28, num_attention_heads=28,
        num_hidden_layers=28, num_key_value_heads=4,
    ),
    "Qwen2.5-14B-Instruct": _QWEN2 | dict(
        hidden_size=5120, intermediate_size=13824, max_window_layers=70, num_attention_heads=40,
        num_hidden_layers=48, num_key_value_heads=8,
    ),
    "Qwen3-4B": _QWEN3 | dict(
        model_type="qwen3", hidden_size=2560, intermediate_size=9728, max_window_layers=36,
        num_attention_heads=32, num_hidden_layers=36, num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "Qwen3-30B-A3B": _QWEN3 | dict(
        model_type="qwen3_moe", decoder_sparse_step=1, hidden_size=2048, intermediate_size=6144,
        max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
        num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
        num_key_value_heads=4, tie_word_embeddings=False,
    ),
    "Llama-3.1-8B": dict(
        model_type="llama", attention_bias=False, hidden_act="silu", hidden_size=4096,
        intermediate_size=14336, max_position_embeddings=131072, mlp_bias=False,
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-5,
        rope_scaling=dict(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192, rope_type="llama3",
        ),
        rope_theta=500000.0, tie_word_embeddings=False, torch_dtype="bfloat16", vocab_size=128256,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_published_configs_become_the_policies_of_configs_models(name):
    assert families.read_config(PUBLISHED[name]) == MODELS[name]
    assert parameters.count(MODELS[name]) == COUNTS[name]
    elements = sum(math.prod(part.published_shape) for part in families.table(MODELS[name]))
    assert elements == COUNTS[name]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model_type": "gemma3_text"}, r"'gemma3_text' is not supported; supported are "
         "llama, mistral, qwen2, qwen3, qwen3_moe"),
        ("llama", {"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ("mistral", {"sliding_window": 64}, "sliding window of 64 tokens in a context of 128"),
        ("mistral", {"max_position_embeddings": 8192, "sliding_window": ...},
         "sliding window of 4096"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
         "sliding window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding window"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'; supported"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope scaling: 'factor' is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}},
         "config.json: linear rope scaling has factor 0.0; need > 0"),
        ("llama", {"partial_rotary_factor": 0.5}, "only 0.5 of each head"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized weights"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_size": "16"}, "'hidden_size' is '16', not a positive whole number"),
        ("llama", {"num_key_value_heads": 3}, "config.json: 4 query heads cannot share 3"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "config.json: every token is sent to 9 of 4"),
    ],
)  # fmt: skip
def test_what_would_be_computed_differently_is_refused(kind, change, message):
    base = dict(qk_norm=kind.startswith("qwen3"), attention_bias=kind == "qwen2", max_positions=128)
    base |= dict(experts=EXPERTS if kind == "qwen3_moe" else None)
    config = dataclasses.replace(MOE, **base, family="mistral" if kind == "mistral" else "")
    text = families.write_config(config, "float32")
    assert text["model_type"] == kind and families.read_config(text) == config
    text = {key: value for key, value in (text | change).items() if value is not ...}
    with pytest.raises(families.ImportProblem, match=message) as raised:
        families.read_config(text)
    assert "\n" not in str(raised.value)


def test_windows_that_no_context_reaches_are_no_windows():
    text = families.write_config(dataclasses.replace(DENSE, max_positions=128), "float32")
    assert families.read_config(text | dict(use_sliding_window=True, sliding_window=128))
    layers = dict(use_sliding_window=True, sliding_window=8, max_window_layers=3)
    assert families.read_config(text | layers)  # all three layers are below the first window


def test_combinations_that_no_family_has_are_refused():
    for change in (
        dict(output_bias=True), dict(family="mistral"), dict(family="gemma"),
        dict(qk_norm=False, experts=EXPERTS), dict(qk_norm=False, output_bias=True),
    ):  # fmt: skip
        with pytest.raises(families.ImportProblem):
            families.table(dataclasses.replace(DENSE, **change))


def test_a_config_json_that_disagrees_with_the_tensors_is_refused():
    shapes = shapes_of(Safetensors.open(GOLDENS / "moe_top2"))
    config = load("moe_top2")[0]
    families.check(config, shapes)

    def refused(config, shapes, message):
        with pytest.raises(families.ImportProblem, match=message):
            families.check(config, shapes, "here")

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


# ---------------------------------------------------------------- rope


def test_linear_scaling_divides_positions():
    positions = jnp.arange(40)[None]
    want = rope_angles(positions[:, :10], 8, 1e4)
    got = rope_angles(positions[:, ::4], 8, 1e4, rope.Linear(4.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def test_llama3_and_yarn_keep_fast_pairs_and_slow_down_slow_ones():
    plain, _ = rope.frequencies(128, 5e5)
    for scaling in (rope.Llama3(8.0, 1.0, 4.0, 8192), rope.Yarn(8.0, 8192, 1.2)):
        scaled, loudness = rope.frequencies(128, 5e5, scaling)
        ratio = plain / scaled
        np.testing.assert_allclose([ratio[0], ratio[-1]], [1.0, 8.0], rtol=1e-6)
        assert (np.diff(ratio) > -1e-5).all() and ((ratio > 1.01) & (ratio < 7.9)).any()
        assert loudness == (1.2 if isinstance(scaling, rope.Yarn) else 1.0)
    assert rope.yarn_attention_factor(math.e) == pytest.approx(1.1)


# ---------------------------------------------------------------- experts


def moe_params():
    rng = np.random.default_rng(0)

    def draw(spec):
        norm = spec.scale == 0
        drawn = rng.normal(size=spec.shape) * (0.2 if norm else 2 * spec.scale) + norm
        return jnp.asarray(drawn, "float32")

    return parameters.map_specs(draw, MOE)


def test_routing_by_hand():
    """Two tokens of width 1, three experts, the best two."""
    two = Experts(count=3, per_token=2, feed_forward=1, normalize=False)
    router = jnp.log(jnp.array([[1.0, 5.0, 2.0]]))  # softmax: 1/8, 5/8, 2/8; and their inverses
    chosen, weights = moe.route(jnp.array([[1.0], [-1.0]]), router, two)
    np.testing.assert_array_equal(chosen, [[1, 2], [0, 2]])
    np.testing.assert_allclose(weights[0], [5 / 8, 2 / 8], rtol=1e-6)
    even = dataclasses.replace(two, normalize=True)
    _, weights = moe.route(jnp.array([[1.0], [-1.0]]), router, even)
    np.testing.assert_allclose(weights, [[5 / 7, 2 / 7], [2 / 3, 1 / 3]], rtol=1e-6)


def test_experts_are_a_weighted_sum_of_small_networks():
    params = {name: leaf[0] for name, leaf in moe_params()["layers"].items()}
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    found, routes = jax.jit(lambda x: moe.RoutedSwiGLU(EXPERTS, params)(x))(x)
    flat = x.reshape(-1, 8)
    chosen, weights = moe.route(flat, params["router"], EXPERTS)
    want = np.zeros_like(flat)
    gates, ups, downs = (np.asarray(params[f"expert_{n}"]) for n in ("gate", "up", "down"))
    for i, row in enumerate(np.asarray(flat)):
        for expert, weight in zip(np.asarray(chosen[i]), np.asarray(weights[i]), strict=True):
            gate = row @ gates[expert]
            inside = gate / (1 + np.exp(-gate)) * (row @ ups[expert])
            want[i] += weight * (inside @ downs[expert])
    np.testing.assert_allclose(found.reshape(-1, 8), want, atol=1e-5)
    np.testing.assert_array_equal(routes.reshape(-1, 2), chosen)


def test_megablox_and_ragged_dot_agree_in_value_and_gradient():
    """The TPU kernel in interpret mode, with empty experts and rows that fill no tile."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (150, 16)), jax.random.normal(keys[1], (5, 16, 24))
    sizes = jnp.array([70, 0, 3, 77, 0], jnp.int32)
    weight = jax.random.normal(keys[2], (150, 24))

    def value(x, w):
        return jnp.sum(moe.grouped_matmul(x, w, sizes) * weight)

    want = jax.value_and_grad(value, (0, 1))(x, w)
    with pallas_kernels.using("interpret"):
        got = jax.value_and_grad(value, (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


def test_load_counts_the_tokens_that_count():
    params = moe_params()
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 21, (2, 16)), jnp.int32)
    counted = np.arange(16) < np.array([[16], [5]])
    attend = attention.packed(MOE, jnp.full((2, 16), 16, jnp.int32))
    positions = jnp.broadcast_to(jnp.arange(16), (2, 16))

    @jax.jit
    def run(params):
        hidden, _, _, routes = policy.forward_with_routes(MOE, params, ids, positions, attend)
        return hidden, routes, moe.load(routes, jnp.asarray(counted), EXPERTS.count)

    hidden, routes, load = run(params)
    assert routes.shape == (3, 2, 16, 2)  # [L, B, T, A]
    plain = jax.jit(lambda p: policy.forward(MOE, p, ids, positions, attend)[0])(params)
    np.testing.assert_allclose(hidden, plain, atol=1e-6)
    for layer in range(3):
        want = np.bincount(np.asarray(routes[layer])[counted].reshape(-1), minlength=4)
        np.testing.assert_array_equal(load[layer], want)
    assert float(load.sum()) == 3 * 2 * 21  # layers, experts a token, tokens
    metrics = moe.load_metrics(jnp.array([[4.0, 0.0, 2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]))
    assert float(metrics["moe_load_max"]) == pytest.approx((2 + 1) / 2)
    assert float(metrics["moe_load_idle"]) == pytest.approx(1 / 8)


def test_every_expert_that_is_used_gets_gradient_and_remat_changes_nothing():
    params, ids = moe_params(), jnp.arange(20, dtype=jnp.int32)[None]
    attend = attention.packed(MOE, jnp.full((1, 20), 20, jnp.int32))

    def loss(params, remat):
        args = (MOE, params, ids, jnp.arange(20)[None], attend)
        hidden, _, _, routes = policy.forward_with_routes(*args, remat=remat)
        logp, _, _ = logprobs.token_logprobs(MOE, params, hidden[0], ids[0], 1.0)
        return -logp.sum(), routes

    grad = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    plain, routes = grad(params, False)
    again, _ = grad(params, True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), again, plain)
    size = np.abs(np.asarray(plain["layers"]["expert_down"])).max(axis=(2, 3))  # [L, E]
    for layer in range(3):
        used = np.isin(np.arange(4), np.asarray(routes[layer]))
        assert (size[layer][used] > 0).all() and (size[layer][~used] == 0).all()
    assert float(jnp.abs(plain["layers"]["router"]).max()) > 1e-6


def test_experts_have_a_logical_axis_of_their_own():
    specs = parameters.specs(MOE)["layers"]
    axes = {name: spec.axes for name, spec in specs.items() if "expert" in spec.axes}
    assert set(axes) == {"expert_gate", "expert_up", "expert_down"}
    for name, places in axes.items():
        assert specs[name].shape[places.index("expert")] == EXPERTS.count


SPREAD = """
import numpy as np, jax, jax.numpy as jnp
from notepad_jax.model import attention, parameters, policy
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.parallel import mesh as meshes, place, rules

config = PolicyConfig(
    vocab_size=24, width=8, layers=2, heads=4, kv_heads=2, head_size=6, feed_forward=12,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=24, experts=Experts(count=4, per_token=2, feed_forward=6, normalize=True),
)
rng = np.random.default_rng(0)
draw = lambda s: jnp.asarray(rng.normal(size=s.shape) * s.scale * 2 + (s.scale == 0), "float32")
params = parameters.map_specs(draw, config)
mesh = meshes.make(tensor=2)
table = dict(rules.TRAINING) | {"expert": "tensor"}
spread = place.commit(params, parameters.shardings(config, mesh, table))
assert spread["layers"]["expert_gate"].addressable_shards[0].data.shape == (2, 2, 4, 6)

@jax.jit
def run(params):
    tokens = jnp.arange(64).reshape(4, 16) % 24
    positions = jnp.broadcast_to(jnp.arange(16), (4, 16))
    attend = attention.packed(config, jnp.full((4, 16), 16, jnp.int32))
    return policy.forward_with_routes(config, params, tokens, positions, attend)

one, many = run(params), run(spread)
np.testing.assert_allclose(many[0], one[0], atol=2e-5)
np.testing.assert_array_equal(many[3], one[3])
"""


def test_experts_spread_over_devices_compute_the_same():
    """Expert parallelism is one line in the table of rules: the logical axis "expert"."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", SPREAD], cwd=root, env=os.environ | flags, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(aot.missing_compiler() != "", reason=aot.missing_compiler())
@pytest.mark.parametrize("rows", [64, 16384])  # decoding and training, Qwen3-30B-A3B
def test_megablox_compiles_for_the_smallest_tpu(rows):
    experts = MODELS["Qwen3-30B-A3B"].experts
    shapes = (rows, 2048), (experts.count, 2048, experts.feed_forward)
    x, w = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    sizes = jax.ShapeDtypeStruct((experts.count,), "int32")

    def both(x, w, sizes):
        out, back = jax.vjp(lambda x, w: moe.grouped_matmul(x, w, sizes), x, w)
        return out, back(out)

    with pallas_kernels.using("pallas"):
        compiled = aot.compile_for("v5e", both, x, w, sizes)
    assert compiled.as_text().count('"tpu_custom_call"') == 3  # forward, dx, dw


# ---------------------------------------------------------------- transformers itself


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_our_export_and_computes_the_same(case, tmp_path):
    """In several files, as a policy of many gigabytes is written."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    config, params, golden = load(case)
    # other weights than the goldens': an export that copied a file would not pass
    params = jax.tree.map(lambda x: x * 0.75, params)
    folder = tmp_path / "export"
    size = 4 * parameters.count(config)
    written = huggingface.export(config, params, folder, part_bytes=size // 3)
    parts = [name for name in written.files if name.endswith(".safetensors")]
    assert len(parts) >= 3 and (folder / huggingface.INDEX).exists()
    assert max((folder / name).stat().st_size for name in parts) < size / 2
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == families.family_of(config)
    rows = [np.concatenate(pair) for pair in zip(prompts(golden), golden["greedy"], strict=True)]
    ours = np.asarray(all_logits(config, params, right_padded(rows)))
    for row, found in zip(rows, ours, strict=True):
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(row[None].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(found[: len(row)], theirs, atol=1e-5, rtol=1e-5)
