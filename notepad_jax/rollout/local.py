"""Local advantages: one update turn of a finished reading is sampled again several times.

A reward at the end of a reading says little about one memory on the way: members of a group
read the same chunk with other memories. So of some groups one turn is taken whose question and
memory are known, its prompt is completed `samples` times more, and these memories are compared
with one another alone (LoGo-GRPO, Memory-R2 2026). A memory is worth the share of the task's
facts that it holds, where these are known (`Task.evidence`), else the reward of an answer from
it. The turns go with their group into its update, as a set with a baseline of its own
(`grpo.advantages.local`).

They are sampled once it is known which groups are learnt from, so nothing is spent on others: a
group that waits has no local turns, and when its time comes they are of the policy that learns,
however old the group is. What is chosen and all noise are functions of (run seed, place of the
group), as a reading's; a sample that fails costs itself. Above: training.rollouts; below:
collector, reading.loop and scoring.recall.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from notepad_jax.keys import SHARE, UNSIGNED, key, whole
from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import Again, Job, Reader, ReadingEnd, read_all
from notepad_jax.reading.sampling import hashed_seed
from notepad_jax.rollout import collector, rewards
from notepad_jax.rollout.ledger import Place
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.scoring.recall import Recall
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Group,
    Reading,
    Status,
    Tokens,
    Trajectory,
    Turn,
    TurnKind,
)

Sample = Trajectory | None  # None: it failed
FINE = 2**53  # shares are compared with so many parts of 1


@dataclasses.dataclass(frozen=True)
class LocalSamples:
    """Settings of local samples; the config's section `rollout.local`."""

    samples: int = key(
        "completions, 0 or at least 2",
        "[local advantages](algorithms.md#local-advantages-rolloutlocal): of some groups that are "
        "learnt from, the prompt of one update turn is completed so many times more, and the "
        "memories are compared with one another. 0: off",
        whole(0),
    )
    share: float = key(
        "0 to 1",
        "of these groups. 0 is refused where `samples` is not",
        SHARE,
    )
    weight: float = key(
        "number",
        "of these advantages, beside those of readings. 0 is refused where `samples` is not",
        UNSIGNED,
    )

    def __post_init__(self) -> None:
        if self.samples < 0 or self.samples == 1:
            raise ValueError(
                f"samples is {self.samples}; completions of a turn are compared with one another, "
                "so use at least 2, or 0 for none"
            )
        for name in ("share", "weight") if self.samples else ():
            if not getattr(self, name):
                raise ValueError(
                    f"{name} is 0, so nothing is learnt from samples = {self.samples}; use "
                    f"samples = 0 to have none, or a {name} above 0"
                )


@dataclasses.dataclass(frozen=True, eq=False)
class ChosenTurn:
    """The turn of a group that is sampled again."""

    group: Group
    trajectory: int  # which member
    turn: int  # which of its turns, an update


@dataclasses.dataclass(frozen=True)
class LocalStats:
    """Metrics of a step's sets of local samples, as sums and counts; add two with `+`."""

    sets: int = 0  # groups of which a turn was written again
    informative: int = 0  # whose scores differ: the others are not learnt from
    samples: int = 0  # that came back
    failed: int = 0
    score_sum: float = 0.0
    spread_sum: float = 0.0  # over sets, of their scores' standard deviation
    tokens: int = 0  # of completions, without those of answers that were asked for as a score

    def __add__(self, other: LocalStats) -> LocalStats:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return LocalStats(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def metrics(self) -> dict[str, float]:
        """Returns averages and counts under metric names; the one place that divides."""
        sets, samples = max(1, self.sets), max(1, self.samples)
        return {
            "local/groups": self.sets,
            "local/informative_share": self.informative / sets,
            "local/samples": self.samples,
            "local/failed": self.failed,
            "local/score": self.score_sum / samples,
            "local/spread": self.spread_sum / sets,
            "local/tokens": self.tokens,
        }


def choose(groups: Sequence[Group], share: float, run_seed: int) -> list[ChosenTurn]:
    """Returns the turns that are sampled again, at most one a group, in the groups' order.

    Which they are is decided by (run seed, place) alone: a group with probability `share`, then
    one of its trajectories, then one of that's update turns.
    """
    chosen: list[ChosenTurn] = []
    for group in groups:
        drawn = functools.partial(_drawn, run_seed=run_seed, place=group.place)
        if drawn("group", FINE) >= share * FINE:
            continue
        member = drawn("trajectory", len(group.trajectories))
        turns = group.trajectories[member].turns
        updates = [k for k, turn in enumerate(turns) if turn.kind is TurnKind.UPDATE]
        if updates:  # a document without a token has none
            chosen.append(ChosenTurn(group, member, updates[drawn("turn", len(updates))]))
    return chosen


def _drawn(what: str, below: int, run_seed: int, place: Place) -> int:
    return hashed_seed(f"local {what}", int(run_seed), *place) % below


async def write_again(
    chosen: Sequence[ChosenTurn],
    reader: Reader,
    samples: int,
    run_seed: int,
    scoring: Scoring = rewards.PLAIN,
) -> list[tuple[Sample, ...]]:
    """Completes the prompt of every turn `samples` times; returns each turn's set, scored.

    Raises ValueError naming a task that cannot be scored, and CompleterFailed if the completer
    has failed.
    """
    jobs = [
        Job(
            one.group.task,
            hashed_seed("local sample", int(run_seed), *one.group.place, k),
            again=Again(_turn(one), _memory_before(one, reader), not one.group.task.evidence),
        )
        for one in chosen
        for k in range(samples)
    ]

    made: list[Sample] = [None] * len(jobs)

    async def judge(index: int, seen: _Seen, end: ReadingEnd) -> None:
        if end.failure is None:
            number, sample = divmod(index, samples)
            made[index] = await _scored(chosen[number], sample, seen, end, reader, scoring)

    await read_all(jobs, reader, lambda index: _Seen(), lambda *end: None, judge)
    return [tuple(made[at : at + samples]) for at in range(0, len(made), samples)]


def joined(
    groups: Sequence[Group], sets: Mapping[Place, Sequence[Sample]]
) -> tuple[list[Group], LocalStats]:
    """Returns the groups with the local turns that are theirs by place, and counts of these.

    A set whose scores are all equal, or of which fewer than two came back, teaches nothing and
    is left out, as a group would be.
    """
    stats, found = LocalStats(), []
    for group in groups:
        if (made := sets.get(group.place)) is None:
            found.append(group)
            continue
        there = tuple(sample for sample in made if sample is not None)
        scores = np.array([sample.reward for sample in there], np.float64)
        informative = len(there) > 1 and bool(scores.max() > scores.min())
        found.append(dataclasses.replace(group, local=there) if informative else group)
        stats += LocalStats(
            sets=1,
            informative=int(informative),
            samples=len(there),
            failed=len(made) - len(there),
            score_sum=float(scores.sum()),
            spread_sum=float(scores.std()) if len(there) else 0.0,
            tokens=sum(len(sample.turns[0].completion.tokens) for sample in there),
        )
    return found, stats


def trajectory(
    one: ChosenTurn, sample: int, completion: Completion, score: float, answer: str, status: Status
) -> Trajectory:
    """Returns a completion of a turn as a one-turn trajectory, its prompt the group's own.

    `answer` and its status are the probe's; "" and ANSWERED where none was asked for.
    """
    turn = dataclasses.replace(_turn(one), completion=completion)
    return Trajectory(Reading(one.group.task.id, sample, (turn,), answer, status), score, {})


def _turn(one: ChosenTurn) -> Turn:
    return one.group.trajectories[one.trajectory].turns[one.turn]


def _memory_before(one: ChosenTurn, reader: Reader) -> Tokens:
    before = one.group.trajectories[one.trajectory].turns[: one.turn]
    memories = memory_agent.memories(reader.rules, reader.template, before)
    return memories[-1] if memories else NO_TOKENS


async def _scored(
    one: ChosenTurn, sample: int, seen: _Seen, end: ReadingEnd, reader: Reader, scoring: Scoring
) -> Trajectory:
    task, completion = one.group.task, seen.turns[0].completion
    if not task.evidence:
        said = collector.reading(task, sample, seen.turns, end)
        (worth,) = await scoring.of_group([said], task, [_until(one, said)])
        return trajectory(one, sample, completion, worth.reward, said.answer, said.status)
    try:
        recall = Recall(task.evidence)
    except ValueError as error:
        raise ValueError(f"task {task.id!r}: {error}") from error
    recall.see(reader.tokenizer.decode(seen.memory))
    return trajectory(one, sample, completion, recall.final, "", Status.ANSWERED)


def _until(one: ChosenTurn, said: Reading) -> Reading:
    """Returns the whole reading that ends with a turn written again and the answer from it."""
    whole = one.group.trajectories[one.trajectory].reading
    turns = (*whole.turns[: one.turn], *said.turns)
    return dataclasses.replace(said, turns=turns, chunks=whole.chunks[: one.turn + 1])


class _Seen:
    """Watches one turn written again, and the answer from it."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.memory = NO_TOKENS

    def turn(self, turn: Turn, memory: Tokens) -> None:
        self.turns.append(turn)
        self.memory = memory
