"""Config sections grpo, parallel and checkpoint: what is learnt, where, and what is kept."""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import NATS, POSITIVE, SHARE, UNSIGNED, also, key, whole, words
from notepad_jax.model.lora import Lora


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterKeys:
    """Section grpo.lora: adapters in the place of the weights."""

    rank: int = key(
        "integer, 0 is off",
        "train adapters of this rank (Hu et al. 2021) in the place of the weights: gradients and "
        "optimizer state shrink to their size, so a small slice can train a 7B. The engine runs "
        "them beside its weights; checkpoints and hand-off hold the base once and then the "
        "adapters alone. A policy that has adapters, a folder or a run, is gone on with: then the "
        "three keys are its own ([models.md](models.md#adapters))",
        whole(0),
    )
    alpha: float = key(
        "number",
        "their product is multiplied by alpha / rank",
        POSITIVE,
    )
    targets: tuple[str, ...] = key(
        "list of `q`, `k`, `v`, `o`, `gate`, `up`, `down`",
        'which matrices get adapters. With `optimizer.kind="muon"` either factor is '
        "orthogonalised, at `optimizer.learning_rate`",
    )

    def __post_init__(self) -> None:
        _ = self.wanted

    @property
    def wanted(self) -> Lora | None:
        """The adapters that are asked for; None for none."""
        return Lora(self.rank, self.alpha, self.targets) if self.rank else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GrpoKeys:
    """Section grpo: what is learnt of a step's readings."""

    advantage: str = key(
        "text",
        "baseline and scale of a reward: `dr_grpo`, `grpo`, `rloo`, `batch_std`, `task_std`, "
        "`tmn`, `tmn_reweight`, `imitation` ([algorithms.md](algorithms.md) has all formulas)",
    )
    scale_memory: float = key(
        "0 (off) to below 1",
        "scales of `batch_std`, `task_std`, `tmn` and `tmn_reweight` are of all rollouts so far, "
        "each by its number of groups, and one counts so much for each later rollout that had its "
        "kind. For kinds of which a rollout has few groups; 0.9 looks back some ten rollouts. "
        "Part of a checkpoint",
        SHARE,
    )
    memory_weight: float = key(
        "above 0",
        "of a turn's own advantage, of what its memory is worth (`tasks.memory_reward`), beside "
        "that of its reading ([turn-level advantages](algorithms.md#rewards-of-memories)). 1: they "
        "count alike; 0.25 is 0.8 of outcome and 0.2 of steps",
        POSITIVE,
    )
    normaliser: str = key(
        "text",
        "what a token weighs and what an optimizer step is divided by: `token_mean`, `turn_mean`, "
        "`trajectory_mean`, `prompt_mean`, `constant`",
    )
    constant: float = key(
        "tokens",
        "of `constant`: the completion tokens that a trajectory may have",
        UNSIGNED,
    )
    ratio: str = key(
        "text",
        "how far a token's step may go: `ppo_clip`, `gspo` (a turn's ratio; clips of some 3e-4), "
        "`gspo_trajectory` (all turns' together; a forward pass more before each step but the "
        "first), `cispo` (a cap, and every token keeps its gradient), `likelihood` (imitation). "
        "One that cannot act, because a rollout has one optimizer step, says so at the start",
    )
    clip_low: float = key(
        "ratio",
        "the gradient of a token ends where its probability ratio leaves [1 - low, 1 + high] in "
        "the advantage's direction. With one step per rollout the ratio is 1 up to rounding, so "
        "the clips are guards",
    )
    clip_high: float = also()
    dual_clip: float = key(
        "ratio, above 1 + `clip_high`; 0: none",
        "for negative advantages, the ratio beyond which there is no gradient; 0: there is one "
        "however large it is",
    )
    cap: float = key(
        "ratio, at least 1",
        "of `cispo`: ratios count for no more",
    )
    proximal: str = key(
        "`recomputed`, `interpolated`",
        "the ratio's denominator where a rollout has several steps or old turns: logprobs of the "
        "trainer's own pass, or between sampler and policy by a turn's age in versions, without a "
        "pass. The second acts with `rollout.max_staleness` above 0",
    )
    tis_cap: float = key(
        "ratio, 0 or at least 1",
        "each token weighs trainer's over sampler's probability, but no more than this (2 is "
        "usual; 1e9 is the decoupled loss of stale data); 0 does not correct. Costs a forward "
        "pass where a rollout has one optimizer step",
    )
    tis_low: float = key(
        "0 (off) to 1",
        "tokens whose weight is below it, or above `grpo.tis_cap`, weigh nothing; at 0 those "
        "above are capped. `tis_left_out` is their share",
    )
    tis_veto: float = key(
        "0 (off) to 1",
        "a turn with one token whose weight is below it weighs nothing (1e-4: what the trainer "
        "would say ten thousand times less often). Also in `tis_left_out`",
    )
    off_policy_at: float = key(
        "nats a token, 0: off",
        "a turn with an advantage below 0 teaches nothing once the mean of its tokens' log "
        "behaviour - log policy is above it: failures that the policy does not make any more. "
        "Seen anew in every optimizer step; `off_policy_left_out` is the share of tokens",
        NATS,
    )
    mask_truncated: bool = key(
        "true, false",
        "turns that were cut at their limit are not learnt from",
    )
    overlong_window: int = key(
        "tokens, 0: off; 0 or more",
        "a turn costs nothing until so many tokens before its limit (`reading.max_memory`, "
        "`reading.max_answer`: the window is at most the smaller), and from there in a line up to "
        "1 at the limit; the mean over a reading's turns times the weight is taken off its reward "
        "before advantages are computed; whether a group is informative is seen from what was "
        "judged alone. Logged as `rollout/overlong`, and a reward part of each reading. Refused "
        "beside `grpo.mask_truncated`",
        whole(0),
    )
    overlong_weight: float = also(UNSIGNED)
    ess_at: float = key(
        "share of turns",
        "if the effective share of turns (weighed by trainer over sampler, "
        "`update/effective_share`) is below it, the rate falls with its root; 0 switches this off",
        SHARE,
    )
    full_rate_at: float = key(
        "share of groups",
        "if fewer of the sampled groups than this carry a signal, the step is shortened in "
        "proportion; 0 switches this off. Muon and Adam step as far on noise as on signal, and "
        "noise wears the policy's skills down",
        SHARE,
    )
    kl_weight: float = key(
        "per token",
        "weight of KL to the starting policy. 0 skips the reference's forward pass",
        UNSIGNED,
    )
    kl: str = key(
        "`k1`, `k2`, `k3`",
        "its estimate",
    )
    kl_in: str = key(
        "`loss`, `reward`",
        "a term of the loss; or what a trajectory's tokens add up to is taken off its reward "
        "before advantages are computed",
    )
    entropy_high: float = key(
        "nats",
        "while the mean entropy of turns of a kind (updates, answers) is above the first, and "
        "until it is below the second, their tokens in trajectories with an advantage below 0 are "
        "left out ([the gate](algorithms.md#guards)). 0: no gate. Costs a forward pass where a "
        "rollout has one optimizer step",
        NATS,
    )
    entropy_low: float = also(NATS)
    entropy_weight: float = key(
        "per nat",
        "a bonus for the entropy of each completion token's distribution, off the loss; peers "
        "that use one have about 1e-3. 0 computes no gradient of it",
        UNSIGNED,
    )
    minibatches: int = key(
        "parts, 1 or more",
        "a rollout's groups are cut into as many parts, in order, and each is one optimizer step "
        "(the published recipe: 16). With more than one step a rollout, the ratio is to the "
        "trainer's own logprobs before the first of them (proximal), and the clips bound how far "
        "the rest may go",
        whole(1),
    )
    epochs: int = key(
        "passes, 1 or more",
        "how often a rollout is gone through",
        whole(1),
    )
    max_skipped: int = key(
        "rollouts in a row",
        "an update whose loss, gradient or parameters are not finite is skipped and counted "
        "(`update/skipped`); after as many rollouts none of whose updates was finite the run "
        "stops with exit code 1 and names the last good step, which is never deleted",
        whole(1),
    )
    micro_batch_rows: int = key(
        "rows",
        "whose activations are alive at once: memory against speed. The result does not depend on "
        "it",
    )
    row_length: int = key(
        "tokens",
        "the most that a packed row holds; the longest turn that template and limits allow must "
        "fit, and a config in which it does not is refused. Longer rows repeat fewer prefixes. 0 "
        "derives it: a prefix and four tails",
        whole(0),
    )
    remat: bool = key(
        "true, false",
        "recompute a layer's activations, but for attention's outputs, in the backward pass: less "
        "memory, more time, same result",
    )
    lora: AdapterKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelKeys:
    """Section parallel: devices to learn on."""

    devices: int = key(
        "devices",
        "to learn on; 0 takes all there are, of all processes",
        whole(0),
    )
    tensor: int = key(
        "devices",
        "that share heads, experts and vocabulary; a divisor of the policy's kv heads and of the "
        "devices. `grpo.micro_batch_rows` is a multiple of devices / tensor",
        whole(1),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointKeys:
    """Section checkpoint: what is kept, and how weights are handed over."""

    handoff: str = key(
        "text",
        "`storage`: the engine loads each step's parameters from its checkpoint, as a separate "
        "machine would. `memory`: from a copy on the device, which is faster. Both give the same "
        "metrics, and of a run that trains adapters both give the base once",
        words("storage", "memory"),
    )
    rollout_dtype: str = key(
        '`""`, `float32`, `bfloat16`, `int8`',
        "dtype of the engine's copy of the weights, empty for that of the activations (`dtype`), "
        "so that engine and trainer compute with the same numbers; the trainer's, the "
        "checkpoints' and the exports' stay as they are. bfloat16 halves its memory and widens "
        "`logprob_gap_max` from 1e-5 to some 1e-2; int8 keeps the layers' matrices in a byte an "
        "element with a scale for each output channel, all else in bfloat16, takes 0.51 to 0.57 "
        "of bfloat16's memory ([models.md](models.md#the-engines-copy)) and widens it to some "
        "5e-2. With one optimizer step a rollout the importance ratio corrects either, since "
        "logprobs are those of the weights that sampled; with several it is taken to the "
        "trainer's own logprobs and does not",
    )
    every: int = key(
        "steps",
        "between checkpoints (the last step is always saved). Must be 1 with `storage`, unless "
        "readers are apart ([fleet.md](fleet.md)). After a "
        "kill, at most this many steps are done again, and those that were skipped "
        "(`grpo.max_skipped`)",
        whole(1),
    )
    keep: int = key(
        "checkpoints",
        "the newest ones that stay on disk. With 1 there is none to go back to if it is damaged. "
        "While one is saved there is one more",
        whole(1),
    )
    folder: str = key(
        "folder or `gs://` URL",
        "checkpoints lie in FOLDER/NAME/checkpoints; empty: in `runs/NAME/checkpoints`. In a "
        "bucket a step counts from the moment its manifest is there. A run of several processes "
        "needs a bucket or a disk that all of them see; all try to write there before anything is "
        "loaded. The run's settings lie beside the steps (`run.json`): where its folder is lost, "
        "`--resume --config.checkpoint.folder=FOLDER` goes on from them",
    )
    keep_turns: int = key(
        "turns",
        "of a rollout are written to `under_way.jsonl` whenever so many more have ended, in a "
        "thread beside it; after a kill, `--resume` computes only the others. `0`: only when the "
        "run is told to stop",
        whole(0),
    )
