"""config.json: read and written whole, and what we would compute differently is refused."""

import dataclasses
import json
import math

import pytest
from golden_policies import CASES, DENSE, EXPERTS, GOLDENS, MOE

from configs.models import MODELS
from notepad_jax.checkpoint.hf import names
from notepad_jax.checkpoint.hf.config import read_config, write_config
from notepad_jax.model import parameters


@pytest.mark.parametrize("case", CASES)
def test_config_json_comes_back(case):
    text = json.loads((GOLDENS / case / "config.json").read_text())
    config = read_config(text)
    written = write_config(config, config.dtype)
    assert written["model_type"] == text["model_type"]
    assert written["architectures"] == text["architectures"]
    assert read_config(json.loads(json.dumps(written))) == config


COUNTS = {
    "Qwen2.5-0.5B": 494_032_768,
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
    "Qwen2.5-0.5B": _QWEN2 | dict(
        hidden_size=896, intermediate_size=4864, max_window_layers=24, num_attention_heads=14,
        num_hidden_layers=24, num_key_value_heads=2, sliding_window=None,
        tie_word_embeddings=True, vocab_size=151936,
    ),
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
    assert read_config(PUBLISHED[name]) == MODELS[name]
    assert parameters.count(MODELS[name]) == COUNTS[name]
    elements = sum(math.prod(part.published_shape) for part in names.table(MODELS[name]))
    assert elements == COUNTS[name]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("llama", {"model_type": "gemma3_text"}, r"'gemma3_text' is not supported; supported are "
         "llama, mistral, qwen2, qwen3, qwen3_moe"),
        ("llama", {"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'"),
        ("mistral", {"layer_types": ["full_attention", "sliding_attention"]},
         "windows in some layers .layer_types.*does not compute"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
         "'layer_types' is .* not all full, as use_sliding_window is not true"),
        ("qwen3", {"layer_types": ["full_attention"]}, "one word for each of num_hidden_layers"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 0}, "'sliding_window' is 0"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1,
                   "num_hidden_layers": 10**9}, "at most 10,000 where there are windows"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'; supported"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope_scaling: 'factor' is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}},
         "rope_scaling: 'factor' is 0, not a positive number"),
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
    text = write_config(config, "float32")
    assert text["model_type"] == kind and read_config(text) == config
    text = {key: value for key, value in (text | change).items() if value is not ...}
    with pytest.raises(names.ImportProblem, match=message) as raised:
        read_config(text)
    assert "\n" not in str(raised.value)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kind", "change", "windows"),
    [
        ("mistral", {"sliding_window": 64}, (64, 64, 64)),
        ("mistral", {"sliding_window": None}, ()),
        ("mistral", {"max_position_embeddings": 8192, "sliding_window": ...}, (4096,) * 3),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, (64, 64, 64)),
        ("qwen3_moe", {"sliding_window": 64}, ()),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
         (0, 64, 64)),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64}, ()),  # 28 full layers
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64,
                   "layer_types": [SLIDING, FULL, SLIDING]}, (64, 0, 64)),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0,
                   "layer_types": [FULL, FULL, FULL]}, ()),
        ("mistral", {"sliding_window": 128}, (128, 128, 128)),  # its max_positions
        ("mistral", {"sliding_window": 1000}, (1000, 1000, 1000)),
        # in no layer
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, ()),
        ("llama", {"use_sliding_window": True, "sliding_window": 8}, ()),
    ],
)  # fmt: skip
def test_windows_as_transformers_takes_them(kind, change, windows):
    """The rules of the configuration files of transformers 5.23, a family each."""
    base = dict(qk_norm=kind.startswith("qwen3"), attention_bias=kind == "qwen2", max_positions=128)
    base |= dict(experts=EXPERTS if kind == "qwen3_moe" else None)
    config = dataclasses.replace(MOE, **base, family="mistral" if kind == "mistral" else "")
    text = write_config(config, "float32") | change
    read = read_config({key: value for key, value in text.items() if value is not ...})
    assert read.windows == windows
    assert read_config(write_config(read, "float32")) == read  # and written so that they come back
    like = {key: value for key, value in text.items() if value is not ... and key != "layer_types"}
    assert read_config(like | write_config(read, "float32")) == read  # as an export writes them


def test_windows_that_no_family_has_cannot_be_exported():
    llama = dataclasses.replace(DENSE, qk_norm=False, windows=(8, 8, 8))
    for config, kind in (
        (llama, "llama"),
        (dataclasses.replace(llama, family="mistral", windows=(8, 0, 8)), "mistral"),
        (dataclasses.replace(MOE, windows=(8, 0, 8)), "qwen3_moe"),
    ):
        with pytest.raises(names.ImportProblem, match=f"no {kind} has windows="):
            write_config(config, "float32")
