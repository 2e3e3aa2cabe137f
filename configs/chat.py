"""Your own model: a published chat model learns to read your own questions, on one machine.

    notepad-jax train --config chat --name mine --config.policy=path/to/Qwen2.5-0.5B-Instruct \
        --config.tasks.files=questions.jsonl
    notepad-jax export-hf runs/mine@best exported

It trains adapters of rank 16 on 64 readings a step (8 questions, 8 times each), holds a tenth of
the questions out and reads them greedily every 10 steps. Sizes that are 0 follow from template
and limits. The rates are those that such runs are published with; no published model was at hand
to try them. On a TPU slice, begin with configs/qwen2_5_7b.py instead. What is not named here is
as in configs/quickstart.py, which says what every key means.
"""

from ml_collections import ConfigDict

from configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.policy = ""  # a Hugging Face folder, a run (runs/NAME, runs/NAME@best) or adapters
    config.steps = 200  # rollouts
    config.reading.update(
        template="chunk_first",  # a group shares everything before its memories
        max_question=128,
        chunk_size=1024,  # tokens per turn
        max_memory=256,
        max_answer=128,
    )
    # Of the starter's documents, which no other policy can be trained on; for `plan` alone.
    config.data.update(tokens=8192, questions=1, unanswerable=0.0, chapter_rate=0.0)
    # `tasks.files` must be given: jsonl, parquet, array_record, or what others publish.
    config.tasks.max_tokens = 16384  # of a document; longer ones lose their middle
    config.rollout.update(documents=8, group_size=8, temperature=1.0, max_rounds=2, max_staleness=1)
    config.grpo.update(
        micro_batch_rows=1,
        row_length=0,  # derived: a prefix and four tails
        remat=True,
    )
    # Rank 0 trains all weights; then at 1e-6.
    config.grpo.lora.update(rank=16, alpha=32.0, targets=("q", "k", "v", "o"))
    config.optimizer.update(
        kind="adamw",
        learning_rate=1e-5,
        adam_learning_rate=1e-5,  # unused by adamw
        warmup_steps=10,
        decay="none",
        decay_from=0,
        decay_steps=0,
        weight_decay=0.01,
    )
    config.checkpoint.update(handoff="memory", every=5)
    config.validation.update(every=10, split=0.1)  # of the documents of tasks.files
    config.engine.update(
        replicas=0,  # as many engines as there are devices for
        per_cpu=1,
        max_prompt=0,
        slots=64,
        pages=0,  # derived: all slots at once, or as many as fit the memory
        steps_per_launch=16,
        row_tokens=0,  # derived: four tails
    )
    # Of `ask`, and of `eval` with this config, which then wants a --suite.
    config.evaluate.update(
        lengths=("8k", "32k", "128k"),
        lengths_before=("8k",),
        at_once=64,
        questions=128,
        questions_per_document=1,
        questions_longest=64,
        questions_per_longest=1,
        data=dict(unanswerable=0.0, chapter_rate=0.0),
    )
    return config
