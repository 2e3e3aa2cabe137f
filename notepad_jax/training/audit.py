"""An audit of behaviour logprobs: recomputed from the checkpoint of the version a turn names.

Reinforcement learning goes by what the sampler said a token's probability was, and by which version
said it. Both are in trajectories.jsonl, for the groups that are kept token by token. Here the
trainer's forward pass computes them again, from the checkpoint of that version: a sampler that read
with other weights, a hand-off that lost a layer, a reader of an abandoned run would be off by far
more than rounding. Above: commands.audit; below: grpo.forward and reading.trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from notepad_jax.checkpoint.steps import place_of, steps_in
from notepad_jax.grpo import batch, forward
from notepad_jax.reading.trace import Trace, TurnRecord
from notepad_jax.rollout import archive
from notepad_jax.setup import builders, process
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import record
from notepad_jax.types import (
    Completion,
    Finish,
    Group,
    Prompt,
    Reading,
    Status,
    Task,
    TextDocument,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)

# Nats by which a token may be off, by what the engine keeps weights in: the widest that are usual
# (checkpoint.rollout_dtype), with room. Another version is off by tenths, soon by whole nats.
LIMITS = {"float32": 2e-3, "bfloat16": 0.1, "int8": 0.3}
AT_ONCE = 64  # turns of one pass


@dataclasses.dataclass(frozen=True)
class Version:
    """The audit of the turns that one policy version said."""

    version: int
    turns: int
    tokens: int
    mean: float  # nats by which a token's logprob is off
    most: float
    where: str  # the reading of that token


@dataclasses.dataclass(frozen=True)
class Audit:
    """The audit of a run's turns, by policy version."""

    run: str
    steps: tuple[int, ...]  # whose turns were looked at
    limit: float  # nats by which a token may be off
    versions: tuple[Version, ...]
    gone: tuple[int, ...]  # versions of which no checkpoint is kept

    @property
    def off(self) -> tuple[Version, ...]:
        """Versions whose recomputed logprobs differ by more than the limit."""
        return tuple(one for one in self.versions if not one.most <= self.limit)


def run(folder: Path, step: int | None, screen: Screen) -> Audit:
    """Recomputes the logprobs of the turns of `step`, or of all steps, that were kept.

    Raises ValueError for a folder that is no training run's, and where no turn can be looked at.
    """
    if folder.is_dir() and not (folder / archive.FILE).exists():
        raise ValueError(
            f"{folder} has no {archive.FILE}: it is no training run's, or no reading was kept yet "
            "(none is with rollout.archive=0); name the folder of a training run, runs/NAME"
        )
    config, settings = record.decided_of(folder), record.read(folder)
    process.prepared(config)
    kept = steps_in(place_of(folder, config.checkpoint.folder))
    with Trace(folder / archive.FILE) as trace:
        found = list(_turns(trace, step))
    if not found:
        of = "any step" if step is None else f"step {step}"
        raise ValueError(
            f"{folder} has no turns of {of}, token by token; rollout.archive_turns says of how "
            f"many groups a run keeps them"
        )
    steps = sorted({said for _, said, _ in found})
    versions = sorted({turn.completion.policy_version for _, _, turn in found})
    for version in versions:
        if teacher := settings.at(version, "rollout.teacher", config.rollout.teacher):
            raise ValueError(
                f"the turns of version {version} of {folder} are those of rollout.teacher="
                f"{teacher}, which no policy sampled: there is nothing to compare; look at a step "
                f"that has others"
            )
    there = [version for version in versions if version in kept]
    if not there:
        raise ValueError(
            f"the turns of {folder} were said by versions {_listed(versions)}, and checkpoints of "
            f"{_listed(kept) or 'none'} are kept; look at a later step, or let a run keep more "
            f"(checkpoint.keep)"
        )
    looked, bar = [], screen.bar("auditing", len(there))
    for version in there:
        own = [(w, t) for w, _, t in found if t.completion.policy_version == version]
        at = settings.at(version, "rollout.temperature", config.rollout.temperature)
        looked.append(_version(folder, version, config.dtype, at, own, screen))
        bar.advance()
    bar.finish()
    weights = config.checkpoint.rollout_dtype or config.dtype or "float32"
    limit = max(LIMITS[weights], LIMITS[config.engine.cache_dtype or weights])
    gone = tuple(version for version in versions if version not in kept)
    return Audit(str(folder), tuple(steps), limit, tuple(looked), gone)


def text(made: Audit) -> str:
    """Returns what is printed of an audit."""
    lines = [f"{'version':>7}  {'turns':>6}  {'tokens':>7}  {'off by, mean':>12}  {'at most':>9}"]
    lines += [
        f"{one.version:>7}  {one.turns:>6,}  {one.tokens:>7,}  {one.mean:>12.1e}  {one.most:>9.1e}"
        for one in made.versions
    ]
    if made.gone:
        lines.append(f"not looked at: versions {_listed(made.gone)}, whose checkpoints are gone")
    if not made.off:
        lines.append(f"every token is as its version says it, to {made.limit:g} nats")
    return "\n".join(lines)


def problem(made: Audit) -> str:
    """Returns a line on which version's logprobs are off."""
    worst = max(made.off, key=lambda one: one.most)
    return (
        f"{worst.where} of {made.run} has a token that version {worst.version} says otherwise, by "
        f"{worst.most:.2g} nats (rounding is at most {made.limit:g})"
    )


def _turns(trace: Trace, step: int | None) -> Iterator[tuple[str, int, Turn]]:
    """Yields (which reading, step, turn) of all turns that were kept."""
    whole = functools.lru_cache(2)(trace.whole)  # a reading, and the one that it shares with
    for number, said in trace.readings():
        if step not in (None, said.get("step")):
            continue
        where = f"step {said.get('step')}, task {said.get('task_id')}, sample {said.get('sample')}"
        for one in whole(number).turns:
            shared = one.shared
            if one.shared_of is not None:  # that one's turn of this chunk has it
                others = whole(one.shared_of).turns
                shared = next(o.shared for o in others if o.chunk == one.chunk and o.shared)
            yield where, int(said["step"]), _turn(one, shared)


def _turn(said: TurnRecord, shared: Sequence[int]) -> Turn:
    completion = Completion(
        tokens(said.tokens), np.array(said.logprobs, np.float32), Finish(said.finish), said.version
    )
    prompt = Prompt(tokens(shared), tokens(said.tail))
    return Turn(TurnKind(said.kind), said.chunk, prompt, completion)


def _version(
    folder: Path, version: int, dtype: str, temperature: float, said: Sequence[tuple[str, Turn]],
    screen: Screen,
) -> Version:  # fmt: skip
    policy = builders.load_policy(f"{folder}@{version}", dtype, say=screen.warn)
    off: list[np.ndarray] = []
    for first in range(0, len(said), AT_ONCE):
        group = _group([turn for _, turn in said[first : first + AT_ONCE]])
        ours = _logprobs(policy, group, temperature)
        theirs = [one.turns[0].completion.behaviour_logprobs for one in group.trajectories]
        off += [np.abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    worst = max(range(len(off)), key=lambda k: off[k].max())
    every = np.concatenate(off)
    return Version(
        version, len(off), len(every), float(every.mean()), float(every.max()), said[worst][0]
    )


def _logprobs(policy: builders.LoadedPolicy, group: Group, temperature: float) -> list[np.ndarray]:
    """Returns what a policy says of each turn's tokens, float32 [n] each."""
    longest = max(len(one.turns[0].prompt.tokens) + len(one.turns[0].completion.tokens)
                  for one in group.trajectories)  # fmt: skip
    row = -(-longest // 128) * 128
    advantages = [np.ones(1, np.float32) for _ in group.trajectories]
    packed = batch.pack([group], [advantages], row, length_multiple=row).batch
    told = forward.told(policy.config, policy.params, packed, temperature, len(packed.weights))
    told = dataclasses.replace(packed, proximal_logprobs=told.logprobs)
    return batch.proximal_of(told, [group], False)


def _group(turns: Sequence[Turn]) -> Group:
    """Returns the turns as trajectories of one turn each, which is what is packed."""
    task = Task("audit", "", TextDocument(""), ("",), "audit", "em")
    readings = (Reading("audit", k, (turn,), "", Status.ANSWERED) for k, turn in enumerate(turns))
    return Group(task, tuple(Trajectory(one, 0.0, {}) for one in readings))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
