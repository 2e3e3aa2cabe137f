"""The peer's side of `grpo_step`: GRPO steps of google-tunix 0.1.7, vanilla rollout.

Imported only where `grpo_step --peer` was asked for, in an environment that has tunix. Its
Qwen3 model has the sizes of ours, prompts of N words are N tokens, and the end of sequence
is an id that is never sampled. Its learner has a loop of its own, so the others take their
turn (`between`) at the end of each of its updates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

from benchmarks.grpo_step import Sizes


def run(sizes: Sizes, steps: int, between: Callable[[], None]) -> list[dict[str, float]]:
    """Takes `steps` steps, with `between` after each; returns CPU seconds of rollout and step."""
    logging.disable(logging.WARNING)
    cluster = _cluster(sizes, steps)
    generate, update_actor = cluster.generate, cluster.update_actor
    measured: list[dict[str, float]] = []
    lengths: set[int] = set()
    rollout, begun = 0.0, time.process_time()

    def timed_generate(*arguments, **options):
        nonlocal rollout
        begin = time.process_time()
        out = generate(*arguments, **options)
        jax.block_until_ready(out.tokens)
        rollout += time.process_time() - begin
        lengths.update(len(ids) for ids in out.tokens)
        return out

    def timed_update(*arguments, **options):
        nonlocal rollout, begun
        update_actor(*arguments, **options)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
        measured.append({"rollout": rollout, "step": time.process_time() - begun})
        between()
        rollout, begun = 0.0, time.process_time()

    cluster.generate, cluster.update_actor = timed_generate, timed_update
    rng = np.random.default_rng(0)
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: rng.random(len(prompts)).tolist(),
        algo_config=grpo_learner.GRPOConfig(
            num_generations=sizes.samples, num_iterations=1, beta=0.0
        ),
    )
    learner.train(_prompts(sizes, steps))
    if lengths != {sizes.completion}:
        raise RuntimeError(f"the peer's completions have {sorted(lengths)} tokens")
    return measured


def _prompts(sizes: Sizes, steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"prompts": np.array([" ".join(f"w{i}" for i in ids) for ids in batch])}
        for batch in rng.integers(3, sizes.vocab, (steps, sizes.prompts, sizes.prompt - 1))
    ]


def _cluster(sizes: Sizes, steps: int) -> rl_cluster_lib.RLCluster:
    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, sizes.vocab)}
    config = qwen3.ModelConfig(
        num_layers=sizes.layers, vocab_size=sizes.vocab, embed_dim=sizes.width,
        hidden_dim=sizes.feed_forward, num_heads=sizes.heads, head_dim=sizes.head_size,
        num_kv_heads=sizes.heads, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
    )  # fmt: skip
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    with mesh:
        actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
    roles = rl_cluster_lib.Role
    return rl_cluster_lib.RLCluster(
        actor=actor,
        reference=None,
        tokenizer=test_common.MockVocab(words),
        cluster_config=rl_cluster_lib.ClusterConfig(
            role_to_mesh={role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
            rollout_engine="vanilla",
            training_config=rl_cluster_lib.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-4),
                eval_every_n_steps=10**9,
                max_steps=steps,
                mini_batch_size=sizes.prompts,
                train_micro_batch_size=sizes.prompts,
            ),
            rollout_config=base_rollout.RolloutConfig(
                max_tokens_to_generate=sizes.completion,
                max_prompt_length=sizes.prompt,
                kv_cache_size=sizes.prompt + sizes.completion,
                temperature=1.0,
                top_p=1.0,
                top_k=None,
                eos_tokens=[sizes.vocab + 7],
            ),
        ),
    )
