"""The peer's side of `grpo_step`: one GRPO step of google-tunix 0.1.7, vanilla rollout.

Runs in the peer's own environment (`python benchmarks/peer_grpo_step.py`; `grpo_step
--peer-venv` starts it), so it imports nothing of ours. Its Qwen3 model has the sizes of
ours, prompts of 64 words are 64 tokens, and the end of sequence is an id that is never
sampled. Prints JSON: CPU seconds of rollout and of the whole step, for every step.
"""

import json
import logging
import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster as rl_cluster_lib
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout
from tunix.tests import test_common

VOCAB, PROMPTS, SAMPLES, PROMPT, COMPLETION = 256, 4, 8, 64, 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 12

logging.disable(logging.WARNING)
words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
tokenizer = test_common.MockVocab(words)
config = qwen3.ModelConfig(
    num_layers=2, vocab_size=VOCAB, embed_dim=64, hidden_dim=128, num_heads=4, head_dim=16,
    num_kv_heads=4, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
)  # fmt: skip
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
with mesh:
    actor = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
roles = rl_cluster_lib.Role
cluster = rl_cluster_lib.RLCluster(
    actor=actor,
    reference=None,
    tokenizer=tokenizer,
    cluster_config=rl_cluster_lib.ClusterConfig(
        role_to_mesh={role: mesh for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
        rollout_engine="vanilla",
        training_config=rl_cluster_lib.RLTrainingConfig(
            actor_optimizer=optax.adamw(1e-4),
            eval_every_n_steps=10**9,
            max_steps=STEPS,
            mini_batch_size=PROMPTS,
            train_micro_batch_size=PROMPTS,
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=COMPLETION,
            max_prompt_length=PROMPT,
            kv_cache_size=PROMPT + COMPLETION,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            eos_tokens=[VOCAB + 7],
        ),
    ),
)
rng = np.random.default_rng(0)
data = [
    {"prompts": np.array([" ".join(f"w{i}" for i in ids) for ids in batch])}
    for batch in rng.integers(3, VOCAB, (STEPS, PROMPTS, PROMPT - 1))
]
rollouts: list[float] = []
lengths: list[int] = []
ends: list[float] = []
generate = cluster.generate
update_actor = cluster.update_actor


def timed_generate(*arguments, **options):
    begin = time.process_time()
    out = generate(*arguments, **options)
    jax.block_until_ready(out.tokens)
    rollouts.append(time.process_time() - begin)
    lengths.extend(len(ids) for ids in out.tokens)
    return out


def timed_update(*arguments, **options):
    update_actor(*arguments, **options)
    jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
    ends.append(time.process_time())


cluster.generate, cluster.update_actor = timed_generate, timed_update
learner = grpo_learner.GRPOLearner(
    rl_cluster=cluster,
    reward_fns=lambda prompts, completions, **_: rng.random(len(prompts)).tolist(),
    algo_config=grpo_learner.GRPOConfig(num_generations=SAMPLES, num_iterations=1, beta=0.0),
)
learner.train(data)
assert set(lengths) == {COMPLETION}, f"completions of {sorted(set(lengths))} tokens"
print(json.dumps({"rollout": rollouts[1:], "step": np.diff(ends).tolist()}))
