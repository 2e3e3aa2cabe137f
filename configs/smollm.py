"""A real model on two cores: SmolLM2-135M learns to read, by imitation and then by GRPO.

    make smollm-train                                    # all lessons, from the published model on
    notepad-jax train --config smollm --name smollm      # the second half, from what imitation made

Adapters of rank 8 on all matrices (4.9 MB) are trained on documents of 1,440 tokens of English
prose, in which stories of RULER and of the memory tasks are hidden, six questions about each. What
is not named here is as in configs/quickstart.py, which says what every key means.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.policy = "data/smollm2-imitated"  # of configs/smollm_imitate.py; its base: `make smollm`
    config.reading.update(
        template="document_first",
        max_question=128,
        chunk_size=512,
        chunk_ends="sentence",  # so that no fact is torn in two
        max_memory=128,
        max_answer=96,
        memory_update="overwrite_or_keep",
    )
    config.data.update(tokens=1440, questions=6)  # three chunks
    # Imitation does two of five of these: what a memory does when facts change, disagree, hang
    # together or are missing is learnt from the answers. Twice as often as what it does well.
    wanting = ("vt", "updates", "conflicts", "multi_evidence", "unanswerable")
    config.tasks.stories = (
        *("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue"),
        *("niah_multiquery", "counting", "ordering", "instruction", *wanting, *wanting),
    )
    config.steps = 16
    config.rollout.update(
        documents=3, group_size=8, temperature=1.0, max_rounds=1, max_staleness=0, archive=2
    )
    # A chunk, six questions about it and eight readings of each are at most one row.
    config.grpo.update(micro_batch_rows=1, row_length=2560, remat=False, full_rate_at=0.5)
    # A list is worth the same however often its names are written, and writing until the limit
    # misses none: without a price, a fifth of the answers did so after twenty steps.
    config.grpo.update(overlong_window=32, overlong_weight=0.5)
    config.grpo.lora.update(rank=8, alpha=16.0, targets=("q", "k", "v", "o", "gate", "up", "down"))
    config.optimizer.update(
        kind="adamw",
        learning_rate=6e-4,
        adam_learning_rate=6e-4,  # unused by adamw
        warmup_steps=2,
        decay="linear",
        decay_from=8,
        decay_steps=16,
        decay_to=0.1,
        weight_decay=0.0,
    )
    config.checkpoint.update(handoff="memory", every=5, keep=4, keep_turns=16)
    config.validation.update(every=0, suite="stories", lengths=("1280",), samples=4)
    config.engine.update(
        per_cpu=1,
        max_prompt=0,
        slots=32,
        pages=0,
        page_size=64,
        steps_per_launch=8,
        row_tokens=0,
    )
    config.evaluate.update(chunk_size=512)  # of `ask`, and of `eval --policy runs/NAME`
    return config
