"""The log of a rollout's trajectories (`trajectories.jsonl`), in the trace format of readings.

A line of `trajectories.jsonl` has the question, the gold answers, the answer, the reward and what
became of it, and how the memory changed on the way; of the first groups of a step also every turn,
token by token. Above: training.run_log; below: reading.trace and reading.turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.trace import Kept, MemoryChange, Spool, TraceFile
from notepad_jax.reading.turns import Turns
from notepad_jax.text.pieces import Pieces
from notepad_jax.types import NO_TOKENS, Group, Trajectory, TurnKind

FILE = "trajectories.jsonl"


def append(
    file: TraceFile, groups: Sequence[Group], reader: Reader, step: int,
    advantages: Sequence[np.ndarray], turns: int, proximal: Sequence[np.ndarray] = (),
) -> None:  # fmt: skip
    """Appends all trajectories of `groups`, and of the first `turns` groups their turns.

    `advantages` [G] of each group, or of no group: where they are not known. `proximal`: the
    trainer's logprobs of each turn of the first groups, in order, as far as they are known.
    """
    recomputed = iter(proximal)
    pieces = Pieces(reader.tokenizer)
    for number, group in enumerate(groups):
        first = len(file)
        for k, trajectory in enumerate(group.trajectories):
            told = record(group, trajectory, step)
            told["advantage"] = float(advantages[number][k]) if len(advantages) else None
            kept = None
            if number < turns:
                taken = Turns(pieces, reader.rules, reader.template)
                kept = turns_kept(trajectory, group.trajectories[0], taken, first, recomputed)
            file.add(told, Spool(changes(trajectory, reader)), kept)


def turns_kept(
    trajectory: Trajectory, first: Trajectory, turns: Turns, number: int,
    proximal: Iterator[np.ndarray],
) -> Kept:  # fmt: skip
    """Returns a trajectory's turns; what its prompts share with those of `first` is kept there.

    `number` is the one that `first` has in the file. Where an answer may take several contexts,
    these begin with a memory, which is not shared: so it is looked at turn by turn.
    """
    others = () if trajectory is first else reversed(first.turns)  # of a chunk the first one
    theirs = {turn.chunk: turn.prompt.shared for turn in others}
    for turn in trajectory.turns:
        same = turn.chunk in theirs and np.array_equal(turn.prompt.shared, theirs[turn.chunk])
        turns.add(turn, next(proximal, ()), number if same else None)
    return turns.kept()


def sample(group: Group, reader: Reader) -> str:
    """Returns the first reading of a group as Markdown, for people who watch a run."""
    task, trajectory = group.task, group.trajectories[0]
    memory = "(none)"
    for change in changes(trajectory, reader):
        memory = change.memory
    told = {
        "question": task.question,
        "last memory": memory,
        "answer": trajectory.reading.answer or "(none)",
        "gold": " | ".join(task.answers),
        "reward": f"{trajectory.reward:g}",
    }
    return "\n\n".join(f"**{name}**\n\n{_quoted(said)}" for name, said in told.items())


def _quoted(said: str) -> str:
    """Returns a block of Markdown in which nothing of a text is Markdown."""
    return "\n".join("    " + line for line in said.splitlines() or [""])


def take_back(file: TraceFile, step: int) -> list[ValueError]:
    """Drops the readings of `step` and later: a run that goes on writes them again.

    Returns which of the others are damaged.
    """
    return file.drop_from(lambda reading: reading["step"] >= step)


def record(group: Group, trajectory: Trajectory, step: int) -> dict[str, Any]:
    """Returns a trajectory's record, as JSON values."""
    task, reading = group.task, trajectory.reading
    completions = [turn.completion for turn in reading.turns]
    return {
        "step": step,
        "ordinal": group.ordinal,
        "task_id": task.id,
        "source": task.source,
        "sample": reading.sample,
        "question": task.question,
        "gold": list(task.answers),
        "evidence": [fact.text for fact in task.evidence],
        "answer": reading.answer,
        "status": reading.status.value,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        **({"memory_rewards": list(own)} if (own := trajectory.memory_rewards) else {}),
        "turns": len(reading.turns),
        "answer_turns": sum(turn.kind is TurnKind.ANSWER for turn in reading.turns),
        "truncated_memories": sum(
            cut and turn.kind is TurnKind.UPDATE
            for turn, cut in zip(reading.turns, reading.cut, strict=True)
        ),
        "completion_tokens": sum(len(c.tokens) for c in completions),
        "policy_versions": sorted({c.policy_version for c in completions}),
        "staleness": step - 1 - trajectory.oldest_version,
    }


def changes(trajectory: Trajectory, reader: Reader) -> Iterator[MemoryChange]:
    """Yields how the memory changed, by playing the reading again."""
    turns, before = trajectory.turns, NO_TOKENS
    after = memory_agent.memories(reader.rules, reader.template, turns)
    for turn, memory in zip(turns, after, strict=True):
        if not np.array_equal(memory, before):
            before = memory
            yield MemoryChange(turn.chunk, reader.tokenizer.decode(memory), len(memory))
