"""The published memory agents: recipe memagent on the files that it was published with.

    notepad-jax train --config memagent --config.tasks.files=hotpotqa_train_32k.parquet --name mine
    notepad-jax export-hf runs/mine exported
    notepad-jax eval --policy exported --suite eval_200.json

Chunks of 5,000 tokens, a memory and an answer of 1,024, 128 questions read 16 times each a step,
AdamW at 1e-6 after 20 rollouts of warm-up, documents of up to 8 chunks (longer ones lose their
middle), the last box judged; how it learns stands in configs/recipes/memagent.py. The training
file is read as it is, from a disk or a bucket; documents of 200 paragraphs have about 28K tokens.

The programs are those of configs/qwen2_5_7b.py: planned for v5p:2x4x4, 38.2 of 102.8 GB a chip.
It was never run: no TPU was at hand. What it reached where it was published, in 3 to 4 days on 32
GPUs, stands in eval/published.py.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.tasks.files = ()  # must be given: --config.tasks.files=hotpotqa_train_32k.parquet
    config.tasks.max_tokens = 40_000  # of a document: 8 chunks
    return config
