"""Makes the goldens beside this file: tiny random checkpoints, and what transformers says.

    pip install torch==2.13.0 transformers==5.23.0
    python tests/goldens/make_goldens.py            # all; or name some: ... qwen2_tied

Each folder is a checkpoint as transformers writes it (float16 to be small; every number here
was computed in float32 from those very weights) and golden.npz: ragged prompts, logits of
their last positions, and 64 greedy tokens for each from `generate` on the left-padded batch.
A seed is only taken if the two best logits are never closer than `GAP` along the way: a
greedy token then says something about the network and nothing about rounding.
`tests/golden_policies.py` reads them without torch.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

FOLDER = Path(__file__).parent
LENGTHS = (3, 9, 17, 30)  # tokens of the prompts
NEW = 64  # greedy tokens
KEPT = 2  # last positions of each prompt whose logits are kept
GAP = 1e-3

SMALL = dict(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=20, rope_theta=1e4, max_position_embeddings=128,
)  # fmt: skip
# Contexts reach 94 tokens; scalings made for 16 or 32 are in full effect there.
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
MOE = dict(moe_intermediate_size=8, intermediate_size=24, head_dim=8, num_attention_heads=2,
           num_key_value_heads=1)  # fmt: skip

CASES = {
    "qwen2_tied": dict(model_type="qwen2", tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2_yarn": dict(model_type="qwen2", rope_scaling=YARN),
    "qwen3_tied": dict(model_type="qwen3", tie_word_embeddings=True, head_dim=6, rope_theta=1e6),
    "qwen3_bias": dict(model_type="qwen3", head_dim=8, attention_bias=True, num_attention_heads=2),
    "llama3": dict(model_type="llama", rope_scaling=LLAMA3, rms_norm_eps=1e-5),
    "llama_linear": dict(
        model_type="llama", tie_word_embeddings=True, attention_bias=True, num_key_value_heads=4,
        rope_scaling=dict(rope_type="linear", factor=4.0),
    ),
    "llama_yarn": dict(
        model_type="llama",
        rope_scaling=YARN | dict(attention_factor=1.3, beta_fast=8.0, beta_slow=2.0)
        | dict(truncate=False),
    ),
    "mistral": dict(model_type="mistral", sliding_window=None, head_dim=6, num_key_value_heads=1),
    # contexts reach 94 tokens: windows of 12 are in full effect, in prompts and in what follows
    "mistral_window": dict(model_type="mistral", sliding_window=12, head_dim=6),
    "qwen2_window": dict(model_type="qwen2", use_sliding_window=True, sliding_window=12,
                         max_window_layers=1, num_key_value_heads=1),
    "qwen3_window": dict(model_type="qwen3", tie_word_embeddings=True, head_dim=6,
                         use_sliding_window=True, sliding_window=12,
                         layer_types=["sliding_attention", "full_attention"]),
    "moe_top1": dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=1,
                     norm_topk_prob=False, **MOE),
    "moe_top2": dict(model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2,
                     norm_topk_prob=True, tie_word_embeddings=True, attention_bias=True, **MOE),
    "moe_top8": dict(model_type="qwen3_moe", num_experts=12, num_experts_per_tok=8,
                     norm_topk_prob=True, rope_scaling=YARN, **MOE | dict(moe_intermediate_size=4)),
}  # fmt: skip


def random_model(case: dict, seed: int) -> torch.nn.Module:
    """A network whose weights are float16 numbers held in float32."""
    config = AutoConfig.for_model(**SMALL | dict(bos_token_id=None, eos_token_id=None) | case)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                drawn = 1 + 0.2 * drawn
            elif name.endswith("bias"):
                drawn = 0.3 * drawn
            elif "embed" in name:  # tied, it is the output matrix, too: keep logits near 1
                drawn = drawn * (0.3 if config.tie_word_embeddings else 1.0)
            else:
                drawn = 1.5 * drawn / weight.shape[-1] ** 0.5
            weight.copy_(drawn.half())
    return model


def answers(model: torch.nn.Module, seed: int) -> tuple[dict[str, np.ndarray], float]:
    """What to compare with, and how close the best two logits ever come."""
    rng = np.random.default_rng(seed)
    vocab, longest = model.config.vocab_size, max(LENGTHS)
    prompts = [rng.integers(0, vocab, n) for n in LENGTHS]
    padded = np.stack([np.pad(p, (longest - len(p), 0)) for p in prompts])
    mask = np.stack([np.arange(longest) >= longest - len(p) for p in prompts]).astype(int)
    with torch.no_grad():
        out = model.generate(
            torch.tensor(padded), attention_mask=torch.tensor(mask), do_sample=False,
            max_new_tokens=NEW, pad_token_id=0,
        )  # fmt: skip
        greedy = out[:, longest:].numpy()
        logits, gap = [], np.inf
        for prompt, new in zip(prompts, greedy, strict=True):
            whole = model(torch.tensor(np.concatenate([prompt, new]))[None]).logits[0].numpy()
            logits.append(whole[len(prompt) - KEPT : len(prompt)])
            best = np.sort(whole[len(prompt) - 1 : -1], axis=-1)
            gap = min(gap, (best[:, -1] - best[:, -2]).min())
            assert (whole[len(prompt) - 1 : -1].argmax(-1) == new).all()
    golden = dict(
        prompts=np.concatenate(prompts).astype(np.int16), lengths=np.array(LENGTHS, np.int16),
        logits=np.stack(logits).astype(np.float32), greedy=greedy.astype(np.int16),
    )  # fmt: skip
    return golden, float(gap)


def make(name: str) -> None:
    for seed in range(200):
        model = random_model(CASES[name], seed)
        golden, gap = answers(model, seed)
        variety = min(len(set(row)) for row in golden["greedy"].tolist())
        if gap > GAP and variety > 4:  # a text that repeats one token would hide positions
            break
    else:
        raise SystemExit(f"{name}: no seed whose greedy path is clear")
    folder = FOLDER / name
    copy.deepcopy(model).half().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "golden.npz", **golden)
    written = json.loads((folder / "config.json").read_text())
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{name}: seed {seed}, gap {gap:.4f}, variety {variety}, {size:,} bytes, "
          f"dtype {written.get('dtype', written.get('torch_dtype'))}")  # fmt: skip


if __name__ == "__main__":
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    torch.set_num_threads(1)
    for case_name in sys.argv[1:] or CASES:
        make(case_name)
