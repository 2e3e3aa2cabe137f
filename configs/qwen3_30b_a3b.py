"""A mixture of experts on 64 chips of v5p: Qwen3-30B-A3B, otherwise the 7B's run.

    notepad-jax plan --config configs/qwen3_30b_a3b.py --tpu v5p:4x4x4      (no TPU is needed)
    notepad-jax train --config configs/qwen3_30b_a3b.py --name qwen3_30b_a3b

`plan` on 2026-11-22, of the programs that a step launches: it fits, 41.2 of 102.8 GB a chip in the
update, 32.9 in the rollout; a step at its limits takes at least 636 s (an estimate, a floor). Since
then a hand-off goes by layers: by arithmetic alone (`--estimate`) it has 22.2 GB where it had 46.9,
and v6e:8x8 fits, too, with 32.0 of 33.6 GB in the rollout.

What is read, sampled and learnt is as in configs/qwen2_5_7b.py, which also says how the training
file is built; here stands what another size and slice change.
"""

from ml_collections import ConfigDict

from configs import qwen2_5_7b


def get_config() -> ConfigDict:
    config = qwen2_5_7b.get_config()
    config.policy = "policies/Qwen3-30B-A3B"
    config.parallel.tensor = 4  # 32 of 128 experts and a kv head on each device of a row
    config.grpo.update(
        micro_batch_rows=16,  # one on each row of 4 devices
        row_length=16384,  # longer rows were not compiled
    )
    config.engine.slots = 128  # 8 groups: what a host of sixteen reads in a step
    config.engine.pages = 3072  # 393K tokens; 98 KB each over 4 devices: 9.7 GB
    return config
