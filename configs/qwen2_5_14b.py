"""A 14B memory agent on 64 chips of v5p: Qwen2.5-14B-Instruct, 256 questions a rollout.

    notepad-jax plan --config configs/qwen2_5_14b.py --tpu v5p:4x4x4      (no TPU is needed)
    notepad-jax train --config configs/qwen2_5_14b.py --name qwen2_5_14b

`plan` on 2026-11-24, of the programs that a step launches: it fits, 69.7 of 102.8 GB a chip in the
update and 50.8 in the rollout; a step at its limits takes at least 820 s (an estimate, a floor).

What is read, sampled and learnt is as in configs/qwen2_5_7b.py, which also says how the training
file is built; here stands what another size and slice change. The published launcher of this size
differs from the 7B's in its batch alone: 256 questions, 16 of them an optimizer step
(BytedTsinghua-SIA/MemAgent@76b7a658988e4ea53d7388a62de6c0ce79084146:run_memory_14B.sh#38,47).
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.policy = "policies/Qwen2.5-14B-Instruct"
    config.rollout.documents = 256  # still sixteen optimizer steps (recipe memagent)
    config.grpo.micro_batch_rows = 64  # one on each of 64 devices
    # As many slots and pages as the 7B's: 16 groups are what a host of sixteen reads in a step.
    # Of 786K tokens each takes 197 KB over 4 devices: 38.7 GB.
    return config
