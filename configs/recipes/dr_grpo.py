"""Dr. GRPO: no division by a spread and none by a length, both of which bias what is learnt.

    notepad-jax train --recipe dr_grpo

Liu et al. 2025 (arXiv 2503.20783): the denominator is what an answer may have in tokens, here
what a trajectory may: all its memories and the answer (of files, name `tasks.max_tokens`, or
`data.tokens` stands for it). No KL. Measured here: as
`dr_grpo` with `token_mean` (docs/results.md, config `mix`).
"""

from ml_collections import ConfigDict


def apply(config: ConfigDict) -> None:
    reading = config.reading
    document = (config.tasks.max_tokens if config.tasks.files else 0) or config.data.tokens
    turns = -(-document // reading.chunk_size)
    more = (reading.answer_chunks - 1) * (reading.max_answer - reading.carry)
    config.grpo.update(
        advantage="dr_grpo",
        normaliser="constant",
        constant=float(turns * reading.max_memory + reading.max_answer + more),
        ratio="ppo_clip",
        clip_low=0.2,
        clip_high=0.2,
        kl_weight=0.0,
    )
