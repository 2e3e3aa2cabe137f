"""A real model on two cores: SmolLM2-135M learns to read, by imitation and then by GRPO.

    make smollm-train        (imitation, at most an hour on two cores, then GRPO: docs/results.md)

It trains adapters of rank 8 on all matrices (4.9 MB), on documents of 1,280 tokens of English
prose in which stories of RULER and of the memory tasks are hidden, four questions about each. What
is not named here is as in configs/quickstart.py, which says what every key means.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.policy = "policies/smollm2"  # what `make smollm` imports
    config.reading.update(
        template="document_first",
        max_question=128,
        chunk_size=512,
        chunk_ends="sentence",  # so that no fact is torn in two
        max_memory=128,
        max_answer=96,
        memory_update="overwrite_or_keep",
    )
    config.data.update(tokens=1280, questions=4)
    config.tasks.stories = (
        *("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue"),
        *("niah_multiquery", "vt", "updates", "conflicts", "counting", "ordering"),
        *("multi_evidence", "unanswerable", "instruction"),
    )
    config.steps = 40
    config.rollout.update(
        documents=8, group_size=8, temperature=1.0, max_rounds=2, max_staleness=1, archive=2
    )
    config.grpo.update(micro_batch_rows=1, row_length=1792, remat=False, full_rate_at=0.0)
    config.grpo.lora.update(rank=8, alpha=16.0, targets=("q", "k", "v", "o", "gate", "up", "down"))
    config.optimizer.update(
        kind="adamw",
        learning_rate=1e-3,
        adam_learning_rate=1e-3,
        warmup_steps=4,
        decay="linear",
        decay_from=10,
        decay_steps=40,
        decay_to=0.1,
        weight_decay=0.0,
    )
    config.checkpoint.update(handoff="memory", every=5, keep=2)
    config.validation.update(every=10, suite="stories", lengths=("1280",), samples=4)
    config.engine.update(
        per_cpu=1,
        max_prompt=0,
        slots=32,
        pages=0,
        page_size=64,
        steps_per_launch=8,
        row_tokens=0,
        cache_dtype="float32",
    )
    config.evaluate.update(
        suite="stories",
        lengths=("1280", "4k"),
        lengths_before=("1280",),
        at_once=32,
        chunk_size=512,
        questions_per_document=16,
    )
    return config
