"""A 14B memory agent on 64 chips of v5p: Qwen2.5-14B-Instruct, otherwise the 7B's run.

    notepad-jax plan --config configs/qwen2_5_14b.py --tpu v5p:4x4x4      (no TPU is needed)
    notepad-jax train --config configs/qwen2_5_14b.py --name qwen2_5_14b

`plan` on 2026-11-22, of the programs that a step launches: it fits, 37.6 of 102.8 GB a chip in the
update and 31.5 in the rollout; a step at its limits takes at least 590 s (an estimate, a floor).

What is read, sampled and learnt is as in configs/qwen2_5_7b.py, which also says how the training
file is built; here stands what another size and slice change.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.policy = "policies/Qwen2.5-14B-Instruct"
    config.grpo.micro_batch_rows = 64  # one on each of 64 devices
    config.engine.slots = 128  # 8 groups: what a host of sixteen reads in a step
    config.engine.pages = 3072  # 393K tokens; 197 KB each over 4 devices: 19.3 GB
    return config
