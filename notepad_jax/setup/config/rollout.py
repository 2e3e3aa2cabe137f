"""Config sections rollout and fleet: what is read in a step, and by which processes."""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import SHARE, key, whole
from notepad_jax.rollout import local
from notepad_jax.types import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutKeys:
    """Section rollout: what is read in a step."""

    documents: int = key(
        "documents a step",
        "groups a step = documents x `data.questions` (1 with `tasks.files`); readings = groups x "
        "`rollout.group_size`",
        whole(1),
    )
    group_size: int = key(
        "readings (G)",
        "of each question; their mean is the baseline. At least 2, or no group ever carries a "
        "signal",
        whole(1),
    )
    temperature: float = key(
        "1e-4 to 1e4",
        "1 samples the policy itself. Logprobs of sampler and trainer are both taken at this "
        "temperature",
    )
    top_p: float = key(
        "1",
        "another value is refused: the ratio compares whole distributions, and below 1 the tail "
        "is cut when sampling. `evaluate.top_p` is free",
    )
    max_rounds: int = key(
        "rounds",
        "1: groups that were judged alike are dropped (the [shaping](algorithms.md#guards) of "
        "lengths does not count). More: they are replaced, up to so many rounds: a round draws "
        "what is missing divided by the share of informative groups so far in the step, at most "
        "`rollout.documents`",
        whole(1),
    )
    max_staleness: int = key(
        "policy versions",
        "an informative group that the batch had no room for waits for the next step if it is at "
        "most so old by then (counted from its oldest turn), also across a kill; else it is "
        "dropped and counted (`groups/dropped_stale`). 0: nothing waits",
        whole(0),
    )
    window: int = key(
        "steps",
        "the draws of so many steps are sorted by the length of their documents and dealt to as "
        "many batches, in an order that chance decides: the longest document is waited for once a "
        "window and not once a step, and every draw is read by the newest policy. 1: as the stream "
        "has them. It [changes what meets in a batch](training.md#windows). With files; made "
        "documents are of one length, but for stories of `tasks.min_tokens`",
        whole(1),
    )
    max_failed_share: float = key(
        "share of groups",
        "a group of which a reading failed is named on the screen, counted "
        "(`groups/dropped_failed`) and replaced; if more of a step's groups fail, the run stops "
        "with the first failure",
        SHARE,
    )
    archive: int = key(
        "groups a step",
        "written to `trajectories.jsonl`, all their readings: questions, memories, answers, "
        "rewards, advantages",
        whole(0),
    )
    archive_turns: int = key(
        "groups a step",
        "of `rollout.archive`, those that are kept token by token: the exact prompts, what was "
        "sampled and its logprobs, for `notepad-jax trace`. A group costs some 6 bytes a prompt "
        "token (what its members share once) and 14 a sampled one",
        whole(0),
    )
    teacher: str = key(
        '`""`, `script`, run or file',
        'who writes the turns that are learnt from. `""`: the policy. `script`: what the tasks\' '
        "scripts say of good notes (`tasks.stories`). A run, the folder of an evaluation or its "
        "`readings.jsonl`: those of its readings that were right, of the tasks that are drawn, by "
        "whatever model made them in the same chunks. [Imitation](algorithms.md#imitation), "
        "`--recipe imitate`",
    )
    local: local.LocalSamples

    def __post_init__(self) -> None:
        SamplingParams(self.temperature, self.top_p, 1, (), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetKeys:
    """Section fleet: readers in processes, or on machines, of their own."""

    readers: int = key(
        "processes",
        "that read for the run beside it, on this machine; `train` starts them, starts those again "
        "that die, and ends them. What they say is in `runs/NAME/readers`. 0: the trainer reads, "
        "unless `fleet.apart` ([fleet.md](fleet.md))",
        whole(0),
    )
    apart: bool = key(
        "true, false",
        "readers are started elsewhere, with `notepad-jax rollout` on the run's folder, or on that "
        "of `checkpoint.folder`, any number of them, at any time",
    )
    bundles: int = key(
        "parts of a step's draws",
        "each is read by one reader, from an empty cache, in launches of its own: part of what "
        "decides the last bits. 0: one for each of `fleet.readers`, 1 where there are none; with "
        "`fleet.live` one for each document",
        whole(0),
    )
    lead: int = key(
        "versions",
        "by which the policy that reads may be older than the one that learns, so that both work "
        "at once. 0: readers wait for each update, and what is learnt is what `train` alone "
        "learns",
        whole(0),
    )
    live: bool = key(
        "true, false",
        "each turn is read by the newest policy that its reader has, at most `lead` versions "
        "older than the one that learns; a reading may span several. What came of it is written "
        "down before it is learnt from, and learnt from again after a kill, but another run ends "
        "with other weights. For documents of very uneven lengths",
    )
    slack: int = key(
        "steps",
        "of `fleet.live`: a step begins as soon as `rollout.documents` documents are read, "
        "whichever of those that are under way, and waits for those alone that so many steps have "
        "passed by. Turns are then at most `lead` + `slack` versions old. 0: a step waits for all "
        "of its own",
        whole(0),
    )
    keep: bool = key(
        "true, false",
        "what steps have learnt from stays in the run's folder, so that `train --replay RUN` can "
        "learn it again. false: it goes when its step is saved",
    )

    @property
    def on(self) -> bool:
        """Whether other processes read than the trainer."""
        return self.readers > 0 or self.apart

    def parts(self, documents: int) -> int:
        """Returns the bundles of a step that has so many documents."""
        return self.bundles or (documents if self.live else max(1, self.readers))
