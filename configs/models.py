"""Policies at the exact sizes that were published, without their weights.

    from configs.models import MODELS
    config = MODELS["Qwen2.5-7B-Instruct"]

For size estimates, compile-only runs, benchmarks with random weights. To train or serve a
published model nothing of this is needed: its own config.json is read. Each entry is what
`checkpoint.hf.config.read_config` makes of the config.json in the model's repository on
huggingface.co (Qwen/Qwen2.5-0.5B, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen2.5-14B-Instruct,
Qwen/Qwen3-4B, Qwen/Qwen3-30B-A3B, meta-llama/Llama-3.1-8B), read in stored copies, November
2026. Parameter counts, tested to the unit: 494,032,768; 7,615,616,512; 14,770,033,664;
4,022,468,096; 30,532,122,624; 8,030,261,248. Unlike the other files here this one imports
`PolicyConfig`: these are values for code, not a run's settings.

`valid_vocab` is all rows of the embedding; a program lowers it to its tokenizer's size.
"""

from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.model.rope import Llama3

_QWEN = dict(rope_theta=1e6, rms_eps=1e-6, dtype="bfloat16")
_QWEN25 = _QWEN | dict(
    head_size=128,
    qk_norm=False,
    attention_bias=True,
    tied_embeddings=False,
    vocab_size=152_064,
    valid_vocab=152_064,
    max_positions=32_768,
)
_QWEN3 = _QWEN | dict(
    head_size=128,
    qk_norm=True,
    attention_bias=False,
    vocab_size=151_936,
    valid_vocab=151_936,
    max_positions=40_960,
)

MODELS = {
    "Qwen2.5-0.5B": PolicyConfig(
        vocab_size=151_936,
        valid_vocab=151_936,
        width=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_size=64,
        feed_forward=4864,
        rope_theta=1e6,
        rms_eps=1e-6,
        qk_norm=False,
        attention_bias=True,
        tied_embeddings=True,
        dtype="bfloat16",
        max_positions=32_768,
    ),
    "Qwen2.5-7B-Instruct": PolicyConfig(
        **_QWEN25, width=3584, layers=28, heads=28, kv_heads=4, feed_forward=18_944
    ),
    "Qwen2.5-14B-Instruct": PolicyConfig(
        **_QWEN25, width=5120, layers=48, heads=40, kv_heads=8, feed_forward=13_824
    ),
    "Qwen3-4B": PolicyConfig(
        **_QWEN3,
        width=2560,
        layers=36,
        heads=32,
        kv_heads=8,
        feed_forward=9728,
        tied_embeddings=True,
    ),
    "Qwen3-30B-A3B": PolicyConfig(
        **_QWEN3,
        width=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        feed_forward=6144,
        tied_embeddings=False,
        experts=Experts(count=128, per_token=8, feed_forward=768, normalize=True),
    ),
    "Llama-3.1-8B": PolicyConfig(
        vocab_size=128_256,
        valid_vocab=128_256,
        width=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_size=128,
        feed_forward=14_336,
        rope_theta=5e5,
        rope=Llama3(8.0, low_frequency=1.0, high_frequency=4.0, original_positions=8192),
        rms_eps=1e-5,
        qk_norm=False,
        attention_bias=False,
        tied_embeddings=False,
        dtype="bfloat16",
        max_positions=131_072,
    ),
}
