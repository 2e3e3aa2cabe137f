"""Imitation: a teacher's turns are learnt as they are, before reinforcement learning begins.

    notepad-jax train --config smollm --recipe imitate

Supervised learning through the rows, kernels and masters of GRPO: advantage 1 for what is right, no
ratio, a group of one reading. The teacher is the script of tasks that have one (tasks.stories), or
readings that were kept: rollout.teacher names a run or an evaluation whose turns were archived,
this policy's or a stronger one's, of which the right ones are learnt (rejection sampling).
Measured here: SmolLM2-135M on two cores (docs/results.md, config `smollm`).
"""

from ml_collections import ConfigDict

from configs.recipes import Said, put

SAID = {
    "rollout.teacher": Said("script", "ours: whoever has no readings yet has scripts"),
    "rollout.group_size": Said(1, "ours: a teacher's reading is compared with nobody's"),
    "rollout.temperature": Said(1.0, "ours: the likelihood of a supervised loss is at 1"),
    "rollout.max_rounds": Said(1, "ours: a draw that teaches nothing is one that has no teacher"),
    "rollout.max_staleness": Said(0, "ours: a teacher's turns do not age"),
    "grpo.advantage": Said("imitation", "ours: what was right is learnt, nothing is unlearnt"),
    "grpo.ratio": Said("likelihood", "ours: no policy of ours sampled it"),
    "grpo.tis_cap": Said(0.0, "ours: no policy of ours sampled it"),
    "grpo.tis_low": Said(0.0, "ours: as above"),
    "grpo.tis_veto": Said(0.0, "ours: as above"),
    "grpo.ess_at": Said(0.0, "ours: as above"),
    "grpo.normaliser": Said("token_mean", "ours: nats a token, as supervised losses are"),
    "grpo.kl_weight": Said(0.0, "ours: what is learnt is to be another policy"),
    "grpo.minibatches": Said(1, "ours: supervised steps are as many as the config's"),
    "grpo.epochs": Said(1, "ours: there are always more scripts"),
    "grpo.full_rate_at": Said(0.0, "ours: groups of one are not informative or dull"),
}


def apply(config: ConfigDict) -> None:
    put(config, SAID)
