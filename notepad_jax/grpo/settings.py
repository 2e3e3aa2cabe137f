"""The settings of an optimizer step's loss: one frozen dataclass, checked when it is made.

Above: `update` takes the steps; setup.learner fills it in from a config.
"""

from __future__ import annotations

import dataclasses

from notepad_jax.grpo import objective, ratios


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """Settings of one optimizer step; the defaults are Dr. GRPO's, as in configs/quickstart.py."""

    ratio: str = "ppo_clip"  # a name in ratios.RATIOS
    clip_low: float = (
        0.2  # ratios below 1 - clip_low give no gradient when the advantage is negative
    )
    clip_high: float = 0.2  # ratios above 1 + clip_high give none when it is positive
    dual_clip: float = 3.0  # ratios above it give none when it is negative; 0: however large
    cap: float = 4.0  # of cispo: no ratio counts for more
    proximal: str = "recomputed"  # a name in ratios.PROXIMALS
    tis_cap: float = 0.0  # of proximal / behaviour, what a token weighs at most; 0: no correction
    tis_low: float = 0.0  # tokens outside [tis_low, tis_cap] weigh nothing; 0: they are capped
    tis_veto: float = 0.0  # a turn with a token below it weighs nothing; 0: no veto
    off_policy_at: float = 0.0  # nats a token by which the policy may have left a failure; 0: any
    kl: str = "k3"  # a name in objective.KLS
    kl_weight: float = 0.0  # of KL to the reference policy, per token; 0 needs no reference
    entropy_weight: float = 0.0  # of the bonus for a token's entropy; 0 computes no gradient of it
    temperature: float = 1.0  # the sampler's
    micro_batch_rows: int = 1  # rows whose activations are alive at once
    remat: bool = False  # recompute a layer's activations in the backward pass

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; a greedy sampler gives no gradient, "
                "set it above 0"
            )
        if self.micro_batch_rows < 1:
            raise ValueError(f"micro_batch_rows is {self.micro_batch_rows}; it must be at least 1")
        dual = self.dual_clip or ratios.NEVER
        if not (0 <= self.clip_low < 1 and 0 <= self.clip_high < dual - 1):
            raise ValueError(
                f"clip range ({self.clip_low}, {self.clip_high}), dual clip {self.dual_clip}: need "
                "0 <= clip_low < 1, clip_high >= 0 and dual_clip > 1 + clip_high, or 0 for none"
            )
        ratios.named(self.ratio)
        objective.kl_named(self.kl)
        if self.proximal not in ratios.PROXIMALS:
            known = " or ".join(map(repr, ratios.PROXIMALS))
            raise ValueError(f"grpo.proximal is {self.proximal!r}; use {known}")
        if not 1 <= self.cap < float("inf"):
            raise ValueError(f"cap is {self.cap}; a ratio of 1 must count whole, so at least 1")
        if not (self.tis_cap == 0 or 1 <= self.tis_cap < float("inf")):
            raise ValueError(f"tis_cap is {self.tis_cap}; it must be 0 (off) or at least 1")
        for name in ("tis_low", "tis_veto"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(
                    f"grpo.{name} is {value}; it must be 0 (off) or at most 1, which is where "
                    "sampler and trainer agree"
                )
            if value and not self.tis_cap:
                raise ValueError(
                    f"grpo.{name} is {value} and grpo.tis_cap 0, which corrects nothing: give a "
                    f"cap as well, or {name} = 0"
                )

    @property
    def limits(self) -> ratios.Limits:
        """The limits of `ratios`; what is off is one that is never met, or None (not compiled)."""
        return ratios.Limits(
            self.clip_low, self.clip_high, self.dual_clip or ratios.NEVER, self.cap, self.tis_cap,
            self.tis_low, self.tis_veto or None, self.off_policy_at or None,
        )  # fmt: skip
