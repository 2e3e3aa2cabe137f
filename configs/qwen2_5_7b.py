"""A 7B memory agent on a TPU slice: Qwen2.5-7B-Instruct, chunks of 5,000 tokens.

    notepad-jax plan --config configs/qwen2_5_7b.py --tpu v5p:2x4x4      (no TPU is needed)
    notepad-jax build ruler-qa --hotpotqa hotpot_train_v1.1.json --paragraphs 200 --samples 8192 \
        --seed 1 --form array_record --out data/train
    notepad-jax train --config configs/qwen2_5_7b.py --name qwen2_5_7b

It was never run: no TPU was at hand. `plan` on 2026-11-24, for v5p:2x4x4: it fits, 38.2 of 102.8
GB a chip in the update and 19.1 in the rollout; a step at its limits takes at least 381 s (an
estimate, a floor). `plan --fastest` finds what is fastest elsewhere, and it fits: on v6e:8x8
`--config.parallel.tensor=2 --config.engine.tensor=2`, 33.0 of 33.6 GB, at least 165 s; on v5e:8x8
`--config.parallel.tensor=4 --config.grpo.micro_batch_rows=16 --config.grpo.row_length=22528
--config.engine.pages=5864`, 16.8 of 16.9 GB, at least 629 s.

The batch, the optimizer and the limits are those of the published memory agents: 128 questions
read 16 times each, AdamW at 1e-6; how it learns is recipe memagent. Rows of a micro-batch are
spread over all devices: on another slice than 32 of them change `grpo.micro_batch_rows` (a
multiple of its devices / parallel.tensor) and plan again. What is not named here is as in
configs/quickstart.py, which says what every key means.
"""

from ml_collections import ConfigDict

from configs import quickstart
from configs.recipes import memagent


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    # A Hugging Face folder. `plan` needs no weights: there its last part names a published model.
    config.policy = "policies/Qwen2.5-7B-Instruct"
    config.steps = 200  # rollouts
    config.reading.update(
        template="chunk_first",  # a group shares everything before its memories
        max_question=256,
        chunk_size=5000,  # tokens per turn
        max_memory=1024,
        max_answer=1024,
    )
    # The starter's documents, drawn where `tasks.files` is empty: not for this policy.
    config.data.update(tokens=32768, questions=1, unanswerable=0.0, chapter_rate=0.0)
    config.tasks.update(
        files=("data/train/hotpotqa-200paragraphs.array_record",),
        max_tokens=32768,  # of a document: 7 chunks
        reward="memagent",  # as published: 1 for a gold answer in the box at the end
    )
    config.rollout.update(documents=128, group_size=16, temperature=1.0, max_staleness=1)
    memagent.apply(config)
    config.grpo.update(
        micro_batch_rows=32,  # one on each of 32 devices
        row_length=39424,  # a prefix of 5,333 tokens and all sixteen tails of 2,122
        remat=True,
    )
    config.grpo.lora.update(rank=0, alpha=32.0, targets=("q", "k", "v", "o"))
    config.optimizer.update(
        kind="adamw",
        learning_rate=1e-6,
        adam_learning_rate=1e-6,  # unused by adamw
        warmup_steps=20,  # rollouts
        decay="none",
        decay_from=0,
        decay_steps=0,
        weight_decay=0.01,
    )
    # All devices there are; weights are cut over all of them by their width (fsdp).
    config.parallel.devices = 0
    config.checkpoint.update(
        handoff="memory",  # "storage" reads 30 GB every step
        every=10,
    )
    config.engine.update(
        tensor=4,  # the devices of a host, a kv head each
        replicas=0,  # as many engines as the host has room for
        per_cpu=1,
        max_prompt=0,
        slots=256,  # 16 groups: what a host of eight reads in a step
        page_size=128,
        pages=6144,  # 786K tokens; 57 KB each over 4 devices: 11.3 GB
        steps_per_launch=32,
        row_tokens=8192,
        give_back=True,  # the cache's memory to the update, and take it again after it
    )
    # Greedy reading in `quickstart`; real suites: config ruler.
    config.evaluate.update(
        lengths=("32k", "128k"),
        lengths_before=("32k",),
        chunk_size=5000,
        context=28672,
        questions=128,
        questions_per_document=1,
        questions_longest=64,
        questions_per_longest=1,
        data=dict(unanswerable=0.0, chapter_rate=0.0),
    )
    return config
