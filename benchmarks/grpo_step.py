"""One GRPO step of a toy policy, ours and a peer's: CPU seconds of rollout and update.

    python -m benchmarks.grpo_step [--peer-venv PATH] [--json]

2 layers, width 64, 4 heads of 16 (as many kv heads), feed-forward 128, 256 ids, float32,
AdamW; 4 prompts x 8 samples, 64 prompt + 64 completion tokens, every length the same (the
stop id is never sampled). A step is one rollout through the engine, packing, one update
and the adoption of the new policy. Expected on one busy core of a 2-core AMD EPYC: 0.11 CPU
seconds, 0.15 with prefix sharing off; google-tunix 0.1.7 (vanilla rollout) 0.18.

`--peer-venv` is an environment made by `pip install google-tunix==0.1.7 jax==0.10.2`; the
peer (`peer_grpo_step`) then runs as a process of its own, in turns with ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.sharing import make_groups
from notepad_jax.engine.executor import Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import update
from notepad_jax.grpo.batch import pack
from notepad_jax.grpo.optimizer import OptimizerSettings, make_optimizer
from notepad_jax.grpo.state import start
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, tokens

VOCAB, PROMPTS, SAMPLES, PROMPT, COMPLETION = 256, 4, 8, 64, 64
STOP = VOCAB - 1  # outside valid_vocab, so it is never sampled

POLICY = PolicyConfig(
    vocab_size=VOCAB, width=64, layers=2, heads=4, kv_heads=4, head_size=16, feed_forward=128,
    rope_theta=1e4, rms_eps=1e-6, qk_norm=True, attention_bias=False, tied_embeddings=True,
    valid_vocab=STOP,
)  # fmt: skip
ENGINE = EngineSettings(
    slots=PROMPTS * SAMPLES, page_size=16, pages=PROMPTS * SAMPLES * 9, max_prompt=PROMPT,
    max_new_tokens=COMPLETION, steps_per_launch=COMPLETION, row_tokens=PROMPT,
)  # fmt: skip
UPDATE = update.UpdateSettings(
    clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl_weight=0.0, temperature=1.0,
    micro_batch_rows=PROMPTS, remat=False,
)  # fmt: skip
OPTIMIZER = OptimizerSettings(
    kind="adamw", learning_rate=1e-4, adam_learning_rate=1e-4, warmup_steps=0
)


async def ours(steps: int, share_prefixes: bool) -> list[dict[str, float]]:
    """Takes `steps` whole steps; returns CPU seconds and the sampler-trainer gap of each."""
    optimizer = make_optimizer(OPTIMIZER)
    state = start(parameters.init_params(POLICY, jax.random.key(0)), optimizer)
    service = EngineService(
        Executor(POLICY, ENGINE), PolicySnapshot(0, jax.tree.map(jnp.copy, state.masters)),
        share_prefixes=share_prefixes,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    row = PROMPT + SAMPLES * (1 + COMPLETION)  # a whole group; 4 turns where nothing is shared
    measured = []
    async with service:
        for step in range(steps):
            begin = time.process_time()
            drawn = [tokens(ids) for ids in rng.integers(0, STOP, (PROMPTS, PROMPT))]
            prompts = [[Prompt(tokens(p[:-1]), tokens(p[-1:]))] * SAMPLES for p in drawn]
            completions = await asyncio.gather(
                *(
                    service.complete(
                        prompt, SamplingParams(1.0, 1.0, COMPLETION, (STOP,), 1000 * step + i)
                    )
                    for i, prompt in enumerate(p for members in prompts for p in members)
                )
            )
            assert all(len(completion.tokens) == COMPLETION for completion in completions)
            rolled_out = time.process_time()
            packed = pack(
                *make_groups(prompts, completions, step), row_length=row,
                share_prefixes=share_prefixes, rows_multiple=UPDATE.micro_batch_rows,
            )  # fmt: skip
            state, metrics = update.learn(POLICY, optimizer, UPDATE, state, {}, [packed.batch])
            await service.adopt(
                PolicySnapshot(step + 1, jax.tree.map(jnp.copy, state.masters)), drain=True
            )
            end = time.process_time()
            measured.append(
                {
                    "rollout": rolled_out - begin,
                    "step": end - begin,
                    "logprob_gap_max": metrics["logprob_gap_max"],
                }
            )
    return measured[2:]  # the first ones compile


def peer(venv: Path, steps: int) -> list[dict[str, float]]:
    """Runs the peer in its own environment; ValueError with its last words if it fails."""
    program = Path(__file__).with_name("peer_grpo_step.py")
    done = subprocess.run(
        [venv / "bin" / "python", program, str(steps)], capture_output=True, text=True
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise ValueError(f"the peer in {venv} ended with {done.returncode}:\n{last}")
    found = json.loads(done.stdout.splitlines()[-1])
    pairs = zip(found["rollout"], found["step"], strict=True)
    return [{"rollout": rollout, "step": step} for rollout, step in pairs][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-venv", type=Path, help="environment with google-tunix==0.1.7")
    parser.add_argument("--steps", type=int, default=20, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=3, help="how often the ways take turns")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    ways = {
        "ours": lambda: asyncio.run(ours(options.steps, True)),
        "ours, sharing off": lambda: asyncio.run(ours(options.steps, False)),
    }
    if options.peer_venv:
        ways["google-tunix 0.1.7"] = lambda: peer(options.peer_venv, options.steps)
    measured: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for name, way in ways.items():
            measured.setdefault(name, []).extend(way())
    medians = {
        name: {key: statistics.median(step[key] for step in steps) for key in steps[0]}
        for name, steps in measured.items()
    }
    if options.json:
        print(json.dumps(medians, indent=2))
        return
    print(f"{'CPU seconds a step':22}{'rollout':>10}{'update':>10}{'total':>10}")
    for name, m in medians.items():
        print(f"{name:22}{m['rollout']:10.3f}{m['step'] - m['rollout']:10.3f}{m['step']:10.3f}")


if __name__ == "__main__":
    main()
