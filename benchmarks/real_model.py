"""A published model on one CPU thread: prefill, decoding and a LoRA update, beside its peers.

    taskset -c 0 python -m benchmarks.real_model [--policy FOLDER] [--peer] [--pairs 5]
        [--parts prefill decode update] [--json]

FOLDER has a llama-like policy, as `make smollm` and others leave it; its tokenizer is not looked
at, since prompts are random ids. Without one, a Qwen3 of 19 million random weights is measured
(SMALL). All is float32. Rows, in CPU seconds of the process:

- `prefill 512`, `prefill 2048`: a prompt of so many tokens and one more, to its first sampled
  token, through the engine's service; nothing of it is cached.
- `decode 1`, `8`, `32`: `--tokens` tokens for so many requests at once after prompts of 256 tokens
  that are read already, all different, at temperature 1.
- `LoRA update`: gradients of adapters on all matrices, two rows of 896 tokens, the last 224 of
  each trained. No prefix is shared and no optimizer moves.

Each row has what its matrix products alone cost (`floor`): one array a layer, the same numbers of
rows, by XLA, in the same turns; twice in the update (forward, gradient of the input). With
--peer, those of PEERS that are installed (`make peers`) do the same work on the same weights, by
turns in this process: transformers (`peer_transformers`), and llama.cpp as it comes and all in
float32 (`peer_llama`), which does not train. Logits, and the adapters' gradients, are compared
first. Ratios are of neighbours. Pin the process to one core, so that each has one thread. What
flatters which side stands in docs/performance.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax import cli
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import forward, ratios, update
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import attention, logprobs, lora, parameters, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, TrainBatch, tokens

CLOSE = 1e-3  # of the logits' or a gradient's deviation; float32 sums in another order: 1e-5
PROMPT = 256  # tokens of a prompt that is decoded after
ADAPTERS = lora.Lora(8, 16.0, lora.TARGETS)
UPDATE = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
    entropy_weight=0.0, temperature=1.0, micro_batch_rows=1, remat=False,
)  # fmt: skip

SMALL = PolicyConfig(
    vocab_size=16384, width=384, layers=8, heads=6, kv_heads=2, head_size=64, feed_forward=1024,
    rope_theta=1e6, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=16384,
)  # fmt: skip

# Only their users have them: by name, so that this file can be imported without them. Each is a
# module beside this one, the packages that it needs, and how it is loaded.
PEERS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {
    "transformers": ("peer_transformers", ("torch", "transformers"), {}),
    "llama.cpp": ("peer_llama", ("llama_cpp", "gguf"), {"exact": False}),
    "llama.cpp f32": ("peer_llama", ("llama_cpp", "gguf"), {"exact": True}),
}

Peers = dict[str, tuple[Any, Any]]  # by name: its module, and the model that it has loaded
Way = Callable[[], object]
Row = dict[str, Way]  # ours, floor and each peer's: each does the work once


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured; tests have a toy's."""

    prefill: Sequence[int] = (512, 2048)
    decode: Sequence[int] = (1, 8, 32)
    made: int = 32  # tokens
    row: int = 896
    trained: int = 224  # of a row


def loaded(folder: Path) -> tuple[PolicyConfig, Any]:
    """The policy, all of it in float32; every id of the embedding may be drawn."""
    config, params = huggingface.import_policy(folder)
    config = dataclasses.replace(config, dtype="float32", valid_vocab=config.vocab_size)
    return config, jax.tree.map(lambda x: x.astype("float32"), params)


def with_safetensors(policy: Path | None, place: Path) -> Path:
    """Returns a policy's folder, or a new one in `place` where its weights are a checkpoint."""
    if policy is None:
        fresh = parameters.init_params(SMALL, jax.random.key(0))
        return huggingface.export_params(SMALL, fresh, place / "small", {})
    if any(policy.glob("*.safetensors")):
        return policy
    with contextlib.redirect_stdout(sys.stderr):
        if code := cli.main(["export-hf", str(policy), str(place / "exported")]):
            sys.exit(code)
    return place / "exported"


def loaded_peers(folder: Path) -> Peers:
    """Those of PEERS whose packages are here, each with the folder's policy."""
    modules = {
        name: (importlib.import_module(f"benchmarks.{module}"), words)
        for name, (module, packages, words) in PEERS.items()
        if all(map(importlib.util.find_spec, packages))
    }
    return {name: (peer, peer.load(folder, **words)) for name, (peer, words) in modules.items()}


# ---------------------------------------------------------------- what is measured


class Engine:
    """A service in a loop that stands still between calls."""

    def __init__(self, config: PolicyConfig, params: Any, slots: int, prompt: int, made: int):
        settings = EngineSettings(
            slots=slots, page_size=16, pages=(slots + 2) * (-(-(prompt + made) // 16) + 2),
            max_prompt=prompt + 1, max_new_tokens=made, steps_per_launch=8,
            row_tokens=max(made, 32),
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        executor = Executor(settings, Device(config, settings))
        self._service = EngineService(executor, PolicySnapshot(0, params))
        self._loop.run_until_complete(self._service.__aenter__())

    def complete(self, ids_BT: np.ndarray, made: int) -> None:
        """Makes `made` tokens after each prompt."""

        async def all_of_them() -> None:
            prompts = [Prompt(tokens(ids[:-1]), tokens(ids[-1:])) for ids in ids_BT]
            each = (
                self._service.complete(prompt, SamplingParams(1.0, 1.0, made, (), seed))
                for seed, prompt in enumerate(prompts)
            )
            done = await asyncio.gather(*each)
            assert all(len(completion.tokens) == made for completion in done)

        self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        self._loop.run_until_complete(self._service.__aexit__(None, None, None))
        self._loop.close()


def products(config: PolicyConfig, params: Any, rows: int, sampled: int, times: int) -> Way:
    """The matrix products of a forward pass alone: `rows` through the layers, `sampled` out."""
    widths = [
        (spec.shape, len(spec.inputs), matrix)
        for name, spec in parameters.specs(config)["layers"].items()
        if spec.inputs
        for matrix in [params["layers"][name]]
    ]
    flat = []
    for shape, inputs, stacked in widths:
        inner = int(np.prod(shape[1 : 1 + inputs]))
        flat += [x.reshape(inner, -1) for x in stacked]
    x = {w.shape[0]: jnp.ones((rows, w.shape[0])) for w in flat}
    last = jnp.ones((sampled, config.width))
    out = params["embed"] if config.tied_embeddings else params["unembed"].T

    @jax.jit
    def multiplied(x: Any, last: Any, flat: Any, out: Any) -> Any:
        # Sums keep the products from being dropped, and cost next to nothing.
        return [(x[w.shape[0]] @ w).max() for w in flat], (last @ out.T).max()

    def way() -> None:
        for _ in range(times):
            jax.block_until_ready(multiplied(x, last, flat, out))

    return way


def batch_of(config: PolicyConfig, sizes: Sizes) -> TrainBatch:
    """Two rows, one context each, of which the last tokens are trained."""
    B, T = 2, sizes.row
    rng, zero = np.random.default_rng(1), np.zeros((B, T), np.float32)
    trained = np.broadcast_to(np.arange(T) >= T - sizes.trained, (B, T))
    number = np.broadcast_to(np.arange(B, dtype=np.int32)[:, None], (B, T))
    return TrainBatch(
        tokens=rng.integers(0, config.vocab_size, (B, T)).astype(np.int32),
        positions=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        kv_end=np.full((B, T), T, np.int32), weights=trained.astype(np.float32),
        advantages=rng.normal(size=(B, T)).astype(np.float32), behaviour_logprobs=zero,
        proximal_logprobs=zero, reference_logprobs=zero, turn=number, trajectory=number,
        prompt=number, age=np.zeros((B, T), np.int32), update_turn=zero,
        denominator=float(trained.sum()),
    )  # fmt: skip


def random_ids(config: PolicyConfig) -> Callable[..., np.ndarray]:
    rng = np.random.default_rng(0)
    return lambda *shape: rng.integers(0, config.vocab_size, shape).astype(np.int32)


# Each yields what is to be measured; what a row holds is let go when the next one is asked for.


def prefills(
    config: PolicyConfig, params: Any, sizes: Sizes, peers: Peers
) -> Iterator[tuple[str, Row]]:
    ids = random_ids(config)
    for length in sizes.prefill:
        engine = Engine(config, params, 1, length, 16)
        row: Row = {
            "ours": lambda e=engine, n=length: e.complete(ids(1, n + 1), 1),
            "floor": products(config, params, length, 1, 1),
        }
        for name, (peer, model) in peers.items():
            row[name] = lambda p=peer, m=model, n=length: p.first_token(m, ids(1, n + 1))
        yield f"prefill {length}", row
        engine.close()


def decodes(
    config: PolicyConfig, params: Any, sizes: Sizes, peers: Peers
) -> Iterator[tuple[str, Row]]:
    ids, made = random_ids(config), sizes.made
    for count in sizes.decode:
        prompts = ids(count, PROMPT + 1)
        engine = Engine(config, params, count, PROMPT, made)
        row = {
            "ours": lambda e=engine, p=prompts: e.complete(p, made),  # the first call reads
            "floor": products(config, params, count, count, made),
        }
        for name, (peer, model) in peers.items():
            row[name] = functools.partial(peer.decoder(model, prompts), made)
        yield f"decode {count}", row
        engine.close()


def updates(
    config: PolicyConfig, params: Any, sizes: Sizes, peers: Peers
) -> Iterator[tuple[str, Row]]:
    batch = batch_of(config, sizes)
    frozen, fresh = lora.partition(config, params, ADAPTERS, jax.random.key(1))
    told = forward.told(config, params, batch, 1.0, 1).logprobs
    batch = dataclasses.replace(batch, behaviour_logprobs=told, proximal_logprobs=told)

    def ours() -> Any:
        return update.loss_and_gradient(config, UPDATE, fresh, frozen, batch)[1]

    passes = 2 * len(batch.tokens)  # forward, gradient of the input
    row: Row = {"ours": ours, "floor": products(config, params, sizes.row, sizes.trained, passes)}
    for name, (peer, model) in peers.items():
        if hasattr(peer, "adapt"):
            row[name] = peer_gradients(config, fresh, batch, peer, model)
            far = check_gradients(ours()["layers"], row[name]())
            print(
                f"gradients differ from {name}'s by {far:.0e} of their deviation", file=sys.stderr
            )
    yield "LoRA update", row


def peer_gradients(
    config: PolicyConfig, fresh: Any, batch: TrainBatch, peer: Any, model: Any
) -> Callable[[], dict[str, np.ndarray]]:
    """What computes a peer's gradients of the same adapters by the same batch."""
    layers = fresh["layers"]

    def factor(name: str, side: str) -> np.ndarray:
        leaf = np.asarray(layers[f"{name}_lora_{side}"])
        inner = (-1, ADAPTERS.rank) if side == "in" else (ADAPTERS.rank, -1)
        return leaf.reshape(config.layers, *inner)

    factors = {name: (factor(name, "in"), factor(name, "out")) for name in ADAPTERS.targets}
    adapted = peer.adapt(model, factors, ADAPTERS.alpha / ADAPTERS.rank)
    return lambda: peer.gradients(adapted, batch.tokens, batch.weights > 0, batch.advantages)


PARTS = {"prefill": prefills, "decode": decodes, "update": updates}


# ---------------------------------------------------------------- that both compute the same


def check_logits(config: PolicyConfig, params: Any, peer: Any, model: Any) -> float:
    """Returns how far logits are apart, of their deviation; RuntimeError if that is not little."""
    ids_BT = np.random.default_rng(2).integers(0, config.vocab_size, (2, 64)).astype(np.int32)

    @jax.jit
    def ours(params: Any) -> jax.Array:
        attend = attention.packed(config, jnp.full((2, 64), 64, jnp.int32))
        positions_BT = jnp.broadcast_to(jnp.arange(64), (2, 64))
        hidden = policy.forward(config, params, jnp.asarray(ids_BT), positions_BT, attend)[0]
        return logprobs.logits(config, params, hidden)

    return _far(np.asarray(ours(params)), peer.logits(model, ids_BT), "logits")


def check_gradients(ours: Any, theirs: dict[str, np.ndarray]) -> float:
    """As `check_logits`, of the gradients of the adapters' second factors."""
    own = {name: np.asarray(ours[f"{name}_lora_out"]) for name in theirs}
    return max(
        _far(own[name].reshape(found.shape), found, f"gradients of {name}")
        for name, found in theirs.items()
    )


def _far(ours: np.ndarray, theirs: np.ndarray, what: str) -> float:
    """The difference's norm over the norm: a few gradients are hundreds of deviations large."""
    far = float(np.linalg.norm(ours - theirs) / np.linalg.norm(ours - ours.mean()))
    if not far < CLOSE:
        raise RuntimeError(
            f"{what} differ by {far:.1e} of their deviation ({CLOSE:.0e} is allowed): these are "
            f"two networks, and their speeds would say nothing"
        )
    return far


# ---------------------------------------------------------------- taking turns


def cpu_seconds(way: Way) -> float:
    begin = time.process_time()
    jax.block_until_ready(way())
    return time.process_time() - begin


def measure(row: Row, pairs: int) -> dict[str, list[float]]:
    """CPU seconds of every way in each of `pairs` turns, after one that compiles."""
    for way in row.values():
        for _ in range(2):  # what the first left in the cache, the second may decode otherwise
            cpu_seconds(way)
    turns = [{name: cpu_seconds(way) for name, way in row.items()} for _ in range(pairs)]
    return {name: [turn[name] for turn in turns] for name in row}


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the median, least and largest ratio of ours to each of the others."""
    said: dict[str, Any] = {name: statistics.median(times) for name, times in found.items()}
    for name in found.keys() - {"ours"}:
        ratios = sorted(a / b for a, b in zip(found["ours"], found[name], strict=True))
        said[f"ours/{name}"] = [statistics.median(ratios), ratios[0], ratios[-1]]
    return said


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--policy", type=Path, help="a folder with a policy (SMALL)")
    parser.add_argument("--peer", action="store_true", help="beside the peers that are here")
    parser.add_argument("--pairs", type=int, default=5, help="turns of each way")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true")
    said = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        folder = with_safetensors(said.policy, Path(place))
        config, params = loaded(folder)
        peers = loaded_peers(folder) if said.peer else {}
    for name, (peer, model) in peers.items():
        far = check_logits(config, params, peer, model)
        print(f"logits differ from {name}'s by {far:.0e} of their deviation", file=sys.stderr)
    found = {}
    for part in said.parts:
        for name, row in PARTS[part](config, params, Sizes(), peers):
            found[name] = summary(measure(row, said.pairs))
            if not said.json:
                print(_line(name, found[name]), flush=True)
    if said.json:
        print(json.dumps(found, indent=2))


def _line(name: str, row: dict[str, Any]) -> str:
    words = [f"{name:14} CPU s: ours {row['ours']:.3f}"]
    for other in ("floor", *PEERS):
        if other in row:
            middle, low, high = row[f"ours/{other}"]
            words.append(f"{other} {row[other]:.3f}, ratio {middle:.2f} ({low:.2f} to {high:.2f})")
    return "; ".join(words)


if __name__ == "__main__":
    main()
