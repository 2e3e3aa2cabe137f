"""A policy-gradient algorithm of the GRPO family: four choices by name, which make its batches.

    advantage   baseline and scale of a reward            `advantages`
    ratio       how far a token's step may go             `ratios`, within `settings.UpdateSettings`
    normaliser  what a token weighs, what is divided by   `normalisers`
    guards      what is left out, and how long a step is  here

Each is a pure function in a table, so every combination is an algorithm; what does not go
together is refused when the config is read (`Algorithm`), and what cannot act says so
(`idle`). Which published algorithm is which choice: docs/algorithms.md. Above:
setup.learner, which reads a config and takes the steps; below: `batch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from notepad_jax.grpo import advantages, batch, entropy_gate, normalisers, objective, ratios
from notepad_jax.grpo.advantages import Scales
from notepad_jax.grpo.batch import PackingStats
from notepad_jax.grpo.entropy_gate import Gate
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.types import Group, TrainBatch

Logprobs = Callable[[TrainBatch], np.ndarray]  # of every completion token, float32 [B, T]


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """The choices of an algorithm: how a rollout's groups become optimizer steps; no defaults."""

    advantage: str  # a name in advantages.ADVANTAGES
    scale_memory: float  # what a rollout back counts in the scale of a kind; 0: nothing
    normaliser: str  # a name in normalisers.NORMALISERS
    constant: float  # completion tokens of a trajectory, of the normaliser of that name
    mask_truncated: bool  # turns that were cut at their limit are not learnt from
    kl_weight: float  # of KL to the reference policy; 0 needs none
    kl_in: str  # "loss", or "reward": what a trajectory's tokens add up to is taken off
    minibatches: int  # parts of a rollout, of whole groups; each is one optimizer step
    epochs: int  # times that a rollout is gone through
    row_length: int  # tokens of a packed row
    full_rate_at: float  # share of informative groups for the whole rate; 0: always whole
    ess_at: float  # effective share of turns for the whole rate; 0: always whole
    entropy_high: float  # nats above which turns of a kind learn from success alone; 0: never
    entropy_low: float  # nats below which they learn from failure again
    max_skipped: int  # steps in a row that may be skipped for not being finite
    memory_weight: float  # of the advantage of a turn's own memory, beside its trajectory's
    local_weight: float  # of the advantage of turns that were written again (`Group.local`)

    def __post_init__(self) -> None:
        advantages.of_groups(self.advantage, ())  # knows its name
        if not 0 <= self.scale_memory < 1:
            raise ValueError(
                f"grpo.scale_memory is {self.scale_memory}; it must be at least 0 (off) and below "
                f"1: what the rollout before counts in a scale"
            )
        normalisers.named(self.normaliser)
        if self.normaliser == "constant" and not self.constant > 0:
            raise ValueError(
                f"grpo.constant is {self.constant}; the normaliser 'constant' divides by it, so "
                "it must be above 0: the completion tokens that a trajectory may have"
            )
        if self.kl_in not in ("loss", "reward"):
            raise ValueError(f"grpo.kl_in is {self.kl_in!r}; use 'loss' or 'reward'")
        if self.entropy_high and not 0 < self.entropy_low <= self.entropy_high:
            raise ValueError(
                f"grpo.entropy_high is {self.entropy_high} and grpo.entropy_low "
                f"{self.entropy_low}; need 0 < entropy_low <= entropy_high: a gate that shut at "
                "the one opens below the other"
            )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that a rollout of enough groups is learnt from."""
        return self.minibatches * self.epochs

    @property
    def remembers(self) -> bool:
        """Whether rollouts that lie behind are in the scales of kinds of tasks."""
        return self.scale_memory > 0 and self.advantage in advantages.SCALES

    def needs_proximal(self, settings: UpdateSettings) -> bool:
        """Whether the trainer computes logprobs of its own before the first step.

        With a single step the policy that learns is the one that sampled, so the sampler's own
        logprobs are the ratio's denominator. With several, the trainer computes them once: then
        the ratio is exactly 1 at the first step, and the clips bound how far the others go. The
        entropies that a gate looks at come of the same pass.
        """
        if settings.proximal == "interpolated":
            return False
        looked_at = self.ess_at > 0 or self.entropy_high > 0
        return self.optimizer_steps > 1 or settings.tis_cap > 0 or looked_at

    def forwards(self, settings: UpdateSettings, parts: int) -> int:
        """Forward passes over a part that a rollout of so many costs beside those of its steps.

        Proximal and reference logprobs of each part, before the first step; the ratio of whole
        trajectories of one part before each step but the first.
        """
        each = self.needs_proximal(settings) + bool(self.kl_weight)
        again = parts * self.epochs - 1 if settings.ratio in ratios.TRAJECTORYWISE else 0
        return parts * each + again

    def rate_scale(self, share: float, effective: float = 1.0) -> float:
        """The factor on the learning rate when that share of the groups is informative.

        And where `effective` is the share of turns that count, weighed by how the sampler was
        off (`effective_share`): its root (VCPO 2026), as noise falls with the root of a count.
        """
        scale = min(1.0, share / self.full_rate_at) if self.full_rate_at else 1.0
        return scale * (min(1.0, effective / self.ess_at) ** 0.5 if self.ess_at else 1.0)


def problems(how: Algorithm, settings: UpdateSettings) -> Iterator[str]:
    """Yields what is wrong with choices that are each right alone."""
    if how.kl_weight and how.kl_in == "loss" and settings.kl == "k1":
        yield (
            "grpo.kl='k1' as a loss pulls nowhere: its gradient is zero on average; use k2 or k3, "
            "or grpo.kl_in='reward'"
        )
    if settings.proximal == "interpolated":
        asked = {
            f"grpo.ratio={settings.ratio!r}": settings.ratio in ratios.TRAJECTORYWISE,
            "grpo.ess_at": how.ess_at,
            "grpo.entropy_high": how.entropy_high,
        }
        for key in (key for key, on in asked.items() if on):
            yield (
                f"grpo.proximal='interpolated' saves the forward pass before a step that {key} "
                "looks at; use 'recomputed'"
            )


def idle(how: Algorithm, settings: UpdateSettings, oldest: int = 0) -> Iterator[str]:
    """Yields, in words, what was chosen and cannot act; turns are `oldest` versions old at most."""
    to_sampler = settings.proximal == "recomputed" and not how.needs_proximal(settings)
    moves = how.optimizer_steps > 1 or (to_sampler and oldest > 0)
    chosen = f"grpo.ratio={settings.ratio!r}"
    if settings.ratio == "ppo_clip":  # the usual range is a default, not a choice
        range_, usual = settings.limits[:2], ratios.USUAL[:2]
        chosen = f"grpo.clip_low={range_[0]:g}, clip_high={range_[1]:g}" * (range_ != usual)
    if chosen and not moves and settings.ratio != "likelihood":
        yield (
            f"{chosen} cannot act: with one optimizer step a rollout all ratios are 1 up to "
            "rounding; raise grpo.minibatches or grpo.epochs"
        )
    for name in ratios.ignored(settings.ratio, settings.limits):
        yield f"grpo.{name} cannot act: grpo.ratio={settings.ratio!r} does not look at it"
    if settings.proximal == "interpolated" and not oldest:
        yield (
            "grpo.proximal='interpolated' cannot act: every turn is the newest policy's (see "
            "rollout.max_staleness), and the ratio is to the sampler's own logprobs"
        )
    if how.entropy_low and not how.entropy_high:
        yield "grpo.entropy_low cannot act: grpo.entropy_high is 0"
    if how.scale_memory and how.advantage not in advantages.SCALES:
        yield (
            f"grpo.scale_memory cannot act: grpo.advantage={how.advantage!r} has no scale of "
            f"several groups; {', '.join(advantages.SCALES)} have"
        )
    if how.kl_weight == 0 and how.kl_in == "reward":
        yield "grpo.kl_in='reward' cannot act: grpo.kl_weight is 0"
    if how.normaliser != "constant" and how.constant:
        yield f"grpo.constant cannot act: grpo.normaliser is {how.normaliser!r}"


def idle_on(advantage: str, groups: Sequence[Group]) -> Iterator[str]:
    """Yields what of an advantage cannot act on these groups."""
    kind = advantages.BY_KIND.get(advantage)
    kinds = {kind(group) for group in groups} if kind else set()
    if len(kinds) == 1:
        yield (
            f"grpo.advantage={advantage!r} scales each kind of task by its own spread, and "
            f"there is one kind here ({kinds.pop()}): it is a batch's scale"
        )


# ---------------------------------------------------------------- batches


def batches(
    how: Algorithm, settings: UpdateSettings, groups: Sequence[Group], now: Logprobs,
    reference: Logprobs, version: int | None = None, scales: Scales | None = None,
) -> tuple[list[TrainBatch | None], list[PackingStats]]:  # fmt: skip
    """Returns the training batch of each part of a rollout, in order, before the first step.

    A part of whose turns all were cut and are left out for it (`mask_truncated`) is None, and
    has no stats: there is nothing to learn from it.

    `now` gives logprobs of the policy that learns, `reference` of the one that KL is taken to;
    neither is called unless it is needed. An advantage sees all groups, since some
    scale by what others did, or by the `scales` of earlier rollouts, which are of rewards as they
    were judged; a part is one optimizer step with one denominator. `version` is that of the
    policy that learns. A group's local turns are in its part, as a group of their own: to a
    normaliser each is a trajectory, all of them a prompt.
    """
    cut, parts = parts_of(len(groups), how.minibatches), parts_with_local(how, groups)
    values = _advantages(how, parts, cut, scales)
    packed = [
        batch.pack(
            part,
            its,
            row_length=how.row_length,
            rows_multiple=settings.micro_batch_rows,
            length_multiple=how.row_length,  # one width: each further one compiles anew
            normaliser=normalisers.named(how.normaliser),
            constant=how.constant,
            mask_truncated=how.mask_truncated,
            version=version,
        )
        if not how.mask_truncated or batch.teach(part, how.mask_truncated)
        else None
        for part, its in zip(parts, values, strict=True)
    ]
    made: list[TrainBatch | None] = []
    for one in (each and each.batch for each in packed):
        if one is None:
            made.append(None)
            continue
        found = {}
        if how.needs_proximal(settings):
            found["proximal_logprobs"] = now(one)
        if how.kl_weight:
            found["reference_logprobs"] = reference(one)
        made.append(dataclasses.replace(one, **found))
    if how.kl_weight and how.kl_in == "reward":
        kl = objective.kl_named(settings.kl)
        parts = [
            _less(part, _kl_of(kl, one, part), how.kl_weight) if one else part
            for one, part in zip(made, parts, strict=True)
        ]
        values = _advantages(how, parts, cut, scales)
        made = [
            one and batch.with_advantages(one, part, its, how.mask_truncated)
            for one, part, its in zip(made, parts, values, strict=True)
        ]
    return made, [each.stats for each in packed if each]


def parts_of(count: int, parts: int) -> list[slice]:
    """Cuts `count` groups, in order, into at most `parts` parts that differ by one at most."""
    parts = min(parts, count)
    ends = [count * (i + 1) // parts for i in range(parts)]
    return [slice(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def parts_with_local(how: Algorithm, groups: Sequence[Group]) -> list[list[Group]]:
    """Returns what is packed in each part of a rollout: its groups, and then their local sets.

    The local turns of a group that has some are a group of their own.
    """

    def sets(part: Sequence[Group]) -> list[Group]:
        some = (one for one in part if one.local)
        return [dataclasses.replace(one, trajectories=one.local, local=()) for one in some]

    cut = parts_of(len(groups), how.minibatches)
    return [[*groups[part], *sets(groups[part])] for part in cut]


def _advantages(
    how: Algorithm, parts: Sequence[Sequence[Group]], cut: Sequence[slice], scales: Scales | None
) -> list[list[Sequence[np.ndarray]]]:
    """Advantages of the groups of each part, as `batch.pack` takes them, and of its local sets.

    `cut` says which of all groups are a part's; what follows them in it are local sets.
    """
    counts = [part.stop - part.start for part in cut]
    whole = [one for part, n in zip(parts, counts, strict=True) for one in part[:n]]
    found = advantages.of_groups(how.advantage, whole, scales)
    name, weight = how.advantage, how.memory_weight
    values = [advantages.of_turns(*pair, name, weight) for pair in zip(whole, found, strict=True)]
    return [
        values[here]
        + [advantages.local(how.advantage, one.rewards, how.local_weight) for one in part[n:]]
        for here, part, n in zip(cut, parts, counts, strict=True)
    ]


def _kl_of(kl: Callable, one: TrainBatch, groups: Sequence[Group]) -> list[np.ndarray]:
    """Summed KL [G] of each group's trajectories, of the policy before the first step."""
    on_BT = one.weights > 0
    pair = (jnp.asarray(x[on_BT]) for x in (one.proximal_logprobs, one.reference_logprobs))
    apart = np.asarray(kl(*pair))
    sizes = [len(group.trajectories) for group in groups]
    sums_I = np.bincount(one.trajectory[on_BT], apart, minlength=sum(sizes))
    return np.split(sums_I, np.cumsum(sizes)[:-1])


def _less(groups: Sequence[Group], apart: Sequence[np.ndarray], weight: float) -> list[Group]:
    """The groups with `weight` times their KL taken off their rewards."""
    return [
        dataclasses.replace(
            group,
            trajectories=tuple(
                dataclasses.replace(one, shaping=one.shaping - weight * float(far))
                for one, far in zip(group.trajectories, far_G, strict=True)
            ),
        )
        for group, far_G in zip(groups, apart, strict=True)
    ]


# ---------------------------------------------------------------- guards


def gated(
    how: Algorithm, gate: Gate, made: Sequence[TrainBatch | None], entropies: Sequence[np.ndarray]
) -> tuple[list[TrainBatch | None], Gate, dict[str, float]]:
    """Returns the batches as they are learnt from, the gate as it is now, and metrics of both.

    `entropies` [B, T] are those of the batches' tokens before the first step on any; one that is
    None has none. A batch of which nothing is left is None.
    """
    there = [one for one in made if one is not None]
    found = entropy_gate.mean_entropies(there, entropies)
    gate = entropy_gate.after(gate, found, how.entropy_low, how.entropy_high)
    normaliser = normalisers.named(how.normaliser)
    kept, out = [], 0
    for one in made:
        if one is None:
            kept.append(None)
            continue
        out_BT = entropy_gate.left_out(one, gate)
        out += int(out_BT.sum())
        kept.append(batch.without(one, out_BT, normaliser, how.constant))
    share = out / sum(int((one.weights > 0).sum()) for one in there)
    metrics = {f"entropy_gate/{name}": value for name, value in found.items()}
    metrics |= {f"entropy_gate/{name}_shut": float(name in gate) for name in entropy_gate.KINDS}
    return kept, gate, metrics | {"entropy_gate/left_out": share}
