"""transformers' side of `accelerator`: the same shapes and tokens in bfloat16, by torch on a GPU.

    python -m benchmarks.peer_accelerator [--shapes 0.5b 7b] [--repeats 5]

It needs `torch` and `transformers`, which are no dependencies of ours. The model is what
`AutoModelForCausalLM` makes of the sizes, random, with torch's own attention (sdpa), run as
`generate` runs it: not compiled, a cache that grows by a copy. Times are medians of `--repeats`
calls after one that warms up, the device waited for.

prefill  one chunk; logits of its last token alone.
decode   32 tokens a slot behind contexts of 5,120; every slot has a context of its own.
update   gradients of all weights (0.5b), a sequence at a time: what `accelerator` packs behind
         two prefixes are six sequences here, which is how it is done without sharing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"  # jax only reads the sizes here; torch has the device

import torch
import transformers

from benchmarks.accelerator import SHAPES, Sizes
from notepad_jax.model.config import PolicyConfig


def build(config: PolicyConfig) -> torch.nn.Module:
    """The same sizes with random weights, on the device."""
    sizes = transformers.Qwen2Config(
        vocab_size=config.vocab_size, hidden_size=config.width,
        intermediate_size=config.feed_forward, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions, rms_norm_eps=config.rms_eps,
        tie_word_embeddings=config.tied_embeddings,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            sizes, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def median_seconds(work: Callable[[], object], repeats: int) -> float | None:
    """Returns the median seconds of a call; None if the device's memory runs out."""
    taken = []
    try:
        for _ in range(1 + repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begin)
    except torch.cuda.OutOfMemoryError:
        return None
    return statistics.median(taken[1:])


def draw(config: PolicyConfig, *shape: int) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, shape, device="cuda")


@torch.inference_mode()
def prefill(model: torch.nn.Module, ids_BT: torch.Tensor) -> None:
    model(ids_BT, use_cache=True, logits_to_keep=1)


class Decoding:
    """Slots behind contexts of random keys and values."""

    def __init__(self, model: torch.nn.Module, config: PolicyConfig, sizes: Sizes, slots: int):
        self.model, self.sizes, self.ids_B1 = model, sizes, draw(config, slots, 1)
        self.cache = transformers.DynamicCache()
        shape = (slots, config.kv_heads, sizes.context, config.head_size)
        for layer in range(config.layers):
            k, v = (torch.rand(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            self.cache.update(k, v, layer)

    @torch.inference_mode()
    def __call__(self) -> None:
        self.cache.crop(self.sizes.context)
        ids_B1 = self.ids_B1
        for _ in range(self.sizes.steps):
            logits = self.model(ids_B1, past_key_values=self.cache, use_cache=True).logits
            ids_B1 = torch.multinomial(torch.softmax(logits[:, -1].float(), -1), 1)


def update(model: torch.nn.Module, ids_NT: torch.Tensor, trained: int) -> None:
    """Gradients of the mean logprob of each sequence's last tokens."""
    model.zero_grad()
    for ids_1T in ids_NT[:, None]:
        logits = model(ids_1T, use_cache=False, logits_to_keep=trained + 1).logits[:, :-1]
        wanted = ids_1T[:, -trained:]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten()).backward()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "7b"])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}", flush=True)
    for name in options.shapes:
        measure(name, options.repeats)


def measure(name: str, repeats: int) -> None:
    shape = SHAPES[name]
    config, sizes = shape.config, shape.sizes
    model = build(config)

    def told(part: str, work: Callable[[], object], tokens: int) -> None:
        seconds = median_seconds(work, repeats)
        figures = (
            "no memory" if seconds is None else f"{1e3 * seconds:10.2f}{tokens / seconds:12.0f}"
        )
        print(f"{name:6}{part:26}{figures}", flush=True)

    ids_1T = draw(config, 1, sizes.chunk)
    told("prefill", lambda: prefill(model, ids_1T), sizes.chunk)
    for slots in sizes.batches:
        told(f"decode, {slots} slots", Decoding(model, config, sizes, slots), slots * sizes.steps)
        torch.cuda.empty_cache()
    if shape.full:
        length = sizes.prefix + sizes.tail + sizes.completion
        ids_NT = draw(config, sizes.rows * sizes.members, length)
        told("update, full", lambda: update(model, ids_NT, sizes.completion), ids_NT.numel())


if __name__ == "__main__":
    main()
