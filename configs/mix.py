"""Reinforcement learning on a mix of four kinds of questions, each with a reward of its own.

    notepad-jax warmup --config starter_mix
    notepad-jax train --config mix

Expected: 1 to 2 CPU minutes; the held-out score, sampled, rises from .5 to .97. For comparing
algorithms, therefore small. What the kinds are: notepad_jax/starter/mixed.py. `python -m
benchmarks.ablation` trains on it with one algorithm after another: docs/results.md.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.policy = "runs/starter_mix"
    # A chunk tells one fact of a question at most, as the starter has learnt to read.
    config.reading.update(chunk_size=64, max_memory=6, max_answer=7)
    config.data.update(
        tokens=512,  # 8 chunks
        questions=4,
        kinds=("exact", "list", "count", "order"),
        unanswerable=0.2,
        two_hop=0.0,
        distractor_share=0.5,
        chapter_rate=1 / 32,  # two a document: what is to be learnt is above all to keep notes
    )
    config.steps = 24
    config.rollout.update(documents=5, group_size=8, temperature=1.0, max_rounds=2)
    config.grpo.update(row_length=256, micro_batch_rows=4)
    config.grpo.lora.rank = 0
    config.optimizer.update(
        kind="muon",
        learning_rate=8e-3,
        adam_learning_rate=1.6e-3,
        weight_decay=0.0,
        decay_from=6,
        decay_steps=24,
    )
    config.checkpoint.update(handoff="memory", every=8)
    # Sampled as in training: the most likely words are right after a dozen steps, and what goes
    # on being learnt is how likely they are.
    config.validation.update(
        every=4, suite="synthetic", lengths=("512",), samples=160, temperature=1.0
    )
    config.engine.update(page_size=16, row_tokens=256)
    # The training length, and eight times as long, in the chunks of training.
    config.evaluate.update(
        lengths=("512", "4k"), chunk_size=64, questions=128, questions_per_document=4,
        temperature=1.0, data={name: config.data[name] for name in config.evaluate.data},
    )  # fmt: skip
    return config
