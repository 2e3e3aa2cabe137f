"""Health checks of a training run: known failure modes, seen in its metrics, and their remedies.

Each is a pure function of the first lines of metrics.jsonl and the last ones; what it returns is
for people. It is said once a run: the lines before a step tell whether it was said already, also to
a run that goes on. A bound stands where healthy runs stay below it: a policy that begins sharp has
no entropy to lose, and one that has learnt its tasks has no group left to learn from. Above:
run_log, which says it, and outcome, which puts it on the page.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from notepad_jax.setup import builders
from notepad_jax.setup.config.whole import Training

Line = Mapping[str, float]  # of metrics.jsonl

SHORT, LONG = 3, 5  # steps that must agree; steps of a mean
SOLVED = 0.95  # mean reward from which groups may all be equal
PLATEAU = 0.02  # a mean reward that rises by less stands still
COLLAPSED, SOME_ENTROPY = 0.1, 0.05  # of the entropy at first; nats a token that can be lost
APART, GROWN = 0.02, 3.0  # nats a token between sampler and trainer; times the gap at first
PINNED, MOSTLY = 0.95, 0.25  # of the limit of a memory; share of memories that are cut there
CUT = 0.1  # share of turns
SOME_USE, HALF = 0.02, 0.5  # rate of an action that was in use; share of readings


@dataclasses.dataclass(frozen=True)
class TurnLimits:
    """Token limits of turns, and what is done about those that are cut."""

    memory: int
    answer: int  # all its contexts
    contexts: int = 1  # of an answer
    masked: bool = False  # turns that were cut are not learnt from
    shaped: bool = False  # they cost, and so cannot be masked


def limits_of(config: Training) -> TurnLimits:
    """Returns the limits of a config for training."""
    rules, g = builders.rules(config.reading), config.grpo
    return TurnLimits(
        rules.max_memory, rules.longest_answer, rules.answer_chunks,
        masked=g.mask_truncated, shaped=bool(g.overlong_window),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sickness:
    """A failure mode that a run shows."""

    name: str
    step: int
    words: str  # what is seen, what it means, what to change

    def __str__(self) -> str:
        return f"step {self.step}: {self.words}"


@dataclasses.dataclass(frozen=True)
class _View:
    """The first and last metrics of a run up to a step; means are nan if not known."""

    first: Sequence[Line]  # LONG lines at most
    last: Sequence[Line]  # 2 LONG lines at most
    limits: TurnLimits

    def latest(self, name: str, count: int) -> float:
        """The mean over the last `count` steps."""
        lines = self.last[-count:]
        return _mean(lines, name) if len(lines) == count else math.nan

    def at_first(self, name: str) -> float:
        """The mean over the first steps, if the last ones are all later."""
        apart = bool(self.last) and self.last[-LONG:][0]["step"] > self.first[-1]["step"]
        return _mean(self.first, name) if apart and len(self.first) == LONG else math.nan


def _mean(lines: Sequence[Line], name: str) -> float:
    """Of those that have the number: a step that learnt nothing has no entropy."""
    values = [line[name] for line in lines if name in line]
    return statistics.fmean(values) if 2 * len(values) >= len(lines) > 0 else math.nan


def lines_of(metrics: Sequence[Line]) -> list[Line]:
    """Returns the metrics of steps alone; lines of validations lie between them."""
    return [line for line in metrics if "groups/sampled" in line]


def at_last(lines: Sequence[Line], limits: TurnLimits) -> list[Sickness]:
    """Returns the failure modes that the last of these steps shows, given those before it."""
    return _seen(_View(lines[:LONG], lines[-2 * LONG :], limits))


def course(lines: Sequence[Line], limits: TurnLimits) -> list[Sickness]:
    """Returns the failure modes that a run has shown, each at the first step that showed it."""
    found: dict[str, Sickness] = {}
    for end in range(1, len(lines) + 1):
        for one in _seen(_View(lines[:LONG], lines[max(0, end - 2 * LONG) : end], limits)):
            found.setdefault(one.name, one)
    return list(found.values())


def _seen(view: _View) -> list[Sickness]:
    step = int(view.last[-1]["step"]) if view.last else 0
    said = {name: words for name, check in CHECKS.items() if (words := check(view))}
    if "pinned memories" in said:  # says more of the same
        said.pop("cut memories", None)
    return [Sickness(name, step, words) for name, words in said.items()]


# ---------------------------------------------------------------- the sicknesses


def _uninformative(view: _View) -> str:
    lines = view.last[-SHORT:]
    if len(lines) < SHORT or any(line["groups/informative_share"] != 0 for line in lines):
        return ""
    reward = view.latest("reward", SHORT)
    if not reward < SOLVED:
        return ""
    if reward <= 1 - SOLVED:
        mend = (
            "the tasks are too hard for this policy; begin with shorter documents (data.tokens, "
            "tasks.max_tokens), or with a reward that has steps between wrong and right "
            "(tasks.reward)"
        )
    else:
        mend = (
            "readings of a question all end alike; raise rollout.group_size or "
            "rollout.temperature, or take tasks that are neither too hard nor too easy"
        )
    return (
        f"no group of the last {SHORT} steps has two different rewards (their mean is "
        f"{reward:.2f}), so nothing is learnt: {mend}"
    )


def _stands_still(view: _View) -> bool:
    """Whether the reward of the last steps is neither good nor better than just before."""
    reward = view.latest("reward", LONG)
    before = _mean(view.last[:LONG], "reward")
    return len(view.last) == 2 * LONG and reward < SOLVED and not reward > before + PLATEAU


def _collapsed(name: str, of: str) -> Callable[[_View], str]:
    def check(view: _View) -> str:
        before, now = view.at_first(name), view.latest(name, LONG)
        if not (before > SOME_ENTROPY and now < COLLAPSED * before):
            return ""
        if not _stands_still(view):  # else it may have found what is right
            return ""
        reward = view.latest("reward", LONG)
        return (
            f"the entropy of {of} fell from {before:.3g} to {now:.3g} nats a token, and the reward "
            f"stands still at {reward:.2f}: readings of a question are nearly the same, and there "
            f"is little left to compare; go back some steps (--resume --step) with a larger "
            f"grpo.clip_high (0.28), a smaller optimizer.learning_rate, or a grpo.kl_weight"
        )

    return check


def _apart(view: _View) -> str:
    before, now = view.at_first("logprob_gap_mean"), view.latest("logprob_gap_mean", LONG)
    if not (now > APART and now > GROWN * before):
        return ""
    return (
        f"sampler and trainer are {now:.3g} nats a token apart, and were {before:.3g} at first: "
        f"what is learnt from was sampled by another policy than the one that learns; weigh it "
        f"(grpo.tis_cap=2), and let the engine compute as the trainer does "
        f"(checkpoint.rollout_dtype and engine.cache_dtype)"
    )


def _pinned(view: _View) -> str:
    long = view.latest("rollout/memory_tokens", SHORT)
    cut = view.latest("rollout/truncated_memories", SHORT)
    if not (long >= PINNED * view.limits.memory and cut >= MOSTLY):
        return ""
    return (
        f"memories have {long:,.0f} of at most {view.limits.memory:,} tokens, and {cut:.0%} are "
        f"cut there: the policy writes until it is stopped, and what it meant to write last is "
        f"lost; raise reading.max_memory, or begin with a policy or a reading.template that "
        f"writes less"
    )


def _cut(kind: str, limit: Callable[[TurnLimits], tuple[int, str]]) -> Callable[[_View], str]:
    """`limit` says how many tokens, and the key to raise."""

    def check(view: _View) -> str:
        cut = view.latest(f"rollout/truncated_{kind}", SHORT)
        if not cut > CUT:
            return ""
        most, key = limit(view.limits)
        free = not (view.limits.masked or view.limits.shaped)
        return (
            f"{cut:.0%} of the {kind} are cut at their limit of {most:,} tokens: they end before "
            f"they are done; raise {key}"
            + ", or learn from none that was cut (grpo.mask_truncated=true)"
            * free
        )

    return check


def _died_out(name: str, what: str) -> Callable[[_View], str]:
    """Of an action: ReMemR1's issue 3 tells of one that training forgot."""

    def check(view: _View) -> str:
        before, now = view.at_first(f"rollout/{name}"), view.latest(f"rollout/{name}", LONG)
        if not (before > SOME_USE and now < COLLAPSED * before and _stands_still(view)):
            return ""
        return (
            f"{what} has died out: its rate fell from {before:.2g} to {now:.2g}, and the reward "
            f"stands still at {view.latest('reward', LONG):.2f}; an action that is not sampled is "
            f"not learnt: go back some steps (--resume --step) with a higher rollout.temperature "
            f"or a smaller optimizer.learning_rate, teach it once more by imitation, or give it a "
            f"price or a prize (tasks.reward)"
        )

    return check


def _nothing_written(view: _View) -> str:
    share = view.latest("rollout/unwritten", LONG)
    if not (share > HALF and _stands_still(view)):
        return ""
    return (
        f"{share:.0%} of the readings write nothing down at all, and the reward stands still at "
        f"{view.latest('reward', LONG):.2f}: saying nothing has taken over; begin with imitation, "
        f"a higher rollout.temperature, or documents whose answers need notes (data.unanswerable, "
        f"tasks.weights)"
    )


def _leaves_early(view: _View) -> str:
    share, before = view.latest("rollout/exit", LONG), view.at_first("rollout/exit")
    lost = view.at_first("reward") - view.latest("reward", LONG)
    if not (share > before + SOME_USE and lost > PLATEAU):
        return ""
    return (
        f"{share:.0%} of the readings end early, {before:.0%} at first, and the reward fell by "
        f"{lost:.2f}: leaving has taken over; lower optimizer.learning_rate, or read to the end "
        f"(reading.exits=false)"
    )


def _of_memory(limits: TurnLimits) -> tuple[int, str]:
    return limits.memory, "reading.max_memory"


def _of_answer(limits: TurnLimits) -> tuple[int, str]:
    return limits.answer, f"reading.{'answer_chunks' if limits.contexts > 1 else 'max_answer'}"


CHECKS: dict[str, Callable[[_View], str]] = {
    "uninformative groups": _uninformative,
    "collapsed memories": _collapsed("entropy_update", "memories"),
    "collapsed answers": _collapsed("entropy_answer", "answers"),
    "sampler and trainer apart": _apart,
    "pinned memories": _pinned,
    "cut memories": _cut("memories", _of_memory),
    "cut answers": _cut("answers", _of_answer),
    "nothing written": _nothing_written,
    "leaves early": _leaves_early,
    **{
        f"{name} died out": _died_out(name, what)
        for name, what in (
            ("keep", "keeping the memory as it is"),
            ("nothing", "noting nothing"),
            ("exit", "leaving early"),
            ("again", "reading again"),
        )
    },
}
