"""A 4B memory agent on 16 chips, v5p or v6e: Qwen3-4B, otherwise the 7B's run.

    notepad-jax plan --config configs/qwen3_4b.py --tpu v5p:2x2x4      (no TPU is needed)
    notepad-jax train --config configs/qwen3_4b.py --name qwen3_4b

`plan` on 2026-11-22, of the programs that a step launches: it fits, 24.4 of 102.8 GB a chip in the
update and 18.4 in the rollout; a step at its limits takes at least 820 s (an estimate, a floor).
On v6e:4x4 it fits as well, 24.3 of 33.6 GB in the update and 18.3 in the rollout; at least 676 s.

What is read, sampled and learnt is as in configs/qwen2_5_7b.py, which also says how the training
file is built; here stands what another size and slice change.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.policy = "policies/Qwen3-4B"
    config.grpo.update(
        micro_batch_rows=16,  # one on each of 16 devices
        row_length=16384,  # v6e has no room for the 7B's, whole groups
    )
    config.engine.slots = 128  # 8 groups at once, of the 32 that a host of four reads in a step
    config.engine.pages = 2560  # 328K tokens; 147 KB each over 4 devices: 12.1 GB
    return config
