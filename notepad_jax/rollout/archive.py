"""Readings on disk, one JSON line each: what a person needs to see what happened.

A line has the question, the gold answers, the memory after every turn as text, the
answer and the reward; the report's example readings come from here. Lines are appended
with one write each call, so a killed run leaves at most one cut line at the end: the
reader skips it, and the next append starts on a line of its own.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from notepad_jax.reading import memory_agent
from notepad_jax.rollout.collector import Reader
from notepad_jax.types import Group, Task, Tokens, Trajectory, Turn


def append(
    path: str | pathlib.Path,
    groups: Iterable[Group],
    reader: Reader,
    step: int,
) -> int:
    """Appends all trajectories of `groups`; returns how many lines were written."""
    lines = [
        json.dumps(record(group.task, trajectory, reader, step), ensure_ascii=False)
        for group in groups
        for trajectory in group.trajectories
    ]
    if not lines:
        return 0
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" for line in lines).encode("utf-8", "backslashreplace")
    with open(path, "a+b", buffering=0) as file:
        data = _mend(file.fileno()) + text
        done = file.write(data)
    if done != len(data):
        raise OSError(f"only {done} of {len(data)} bytes fitted into {path}; is the disk full?")
    return len(lines)


def read(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file; a line that a kill cut in two is passed over."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(entry, dict):
                yield entry


def record(task: Task, trajectory: Trajectory, reader: Reader, step: int) -> dict[str, Any]:
    """Returns one trajectory as plain data, its memories decoded."""
    reading = trajectory.reading
    memories = memory_agent.memories(reader.rules, reader.template, reading.turns)
    return {
        "step": step,
        "task": task.id,
        "source": task.source,
        "sample": reading.sample,
        "question": task.question,
        "answers": list(task.answers),
        "answer": reading.answer,
        "status": reading.status.value,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "turns": [
            _turn(turn, memory, reader)
            for turn, memory in zip(reading.turns, memories, strict=True)
        ],
    }


def _turn(turn: Turn, memory: Tokens, reader: Reader) -> dict[str, Any]:
    return {
        "kind": turn.kind.value,
        "chunk": turn.chunk,
        "text": reader.tokenizer.decode(memory_agent.written(turn.completion)),
        "memory": reader.tokenizer.decode(memory),  # after the turn; "" if there is none
        "finish": turn.completion.finish.value,
        "prompt_tokens": len(turn.prompt.shared) + len(turn.prompt.tail),
        "tokens": len(turn.completion.tokens),
        "policy_version": turn.completion.policy_version,
    }


def _mend(descriptor: int) -> bytes:
    """A line break if the file ends inside a line, else nothing."""
    size = os.fstat(descriptor).st_size
    cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
    return b"\n" if cut else b""
