"""Serialization of groups as JSON: those that wait in a checkpoint, and other processes'.

Of a turn only what the policy said is written: ids and logprobs, bit by bit. Its prompt follows
from the task and from what was said before, by the same pure functions that asked for it
(`memory_agent`), and a digest of all prompts says whether they came out the same: a changed
document, template or tokenizer is refused, not learnt from. What a reading was worth is written,
too: a judge need not say the same twice. Local turns are never waited with (`local`), and between
processes they need no digest: each has their group. Above: training.rollouts; below:
memory_agent, ledger and local.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from notepad_jax.reading import memory_agent
from notepad_jax.reading.loop import Reader
from notepad_jax.rollout import local, pass_rates
from notepad_jax.rollout.collector import Failed, shared_once
from notepad_jax.rollout.ledger import Ledger, Outcome, Place, Waiting
from notepad_jax.rollout.local import ChosenTurn, Sample
from notepad_jax.telemetry.identity import IDS, LOGPROBS, array_of, text_of
from notepad_jax.types import (
    Completion,
    Finish,
    Group,
    Reading,
    Status,
    Task,
    Tokens,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)

# (place, chunks at most) -> the task that was drawn there, and the reader of documents so long
TaskAt = Callable[[Place, int], tuple[Task, Reader]]


def encode(ledger: Ledger) -> dict[str, Any]:
    """Returns the account and its waiting groups as JSON values."""
    return {
        "next": ledger.next,
        "groups": ledger.groups,
        "settled": {outcome.value: count for outcome, count in ledger.settled.items()},
        "waiting": [{**_told(one.group), "share": one.share} for one in ledger.waiting],
        **({"rates": ledger.rates.encoded()} if ledger.rates.known else {}),
        **({"out": list(ledger.out)} if ledger.out else {}),
    }


def decode(said: Mapping[str, Any], task_at: TaskAt) -> Ledger:
    """Returns the account that `encode` wrote, its waiting groups made again.

    Raises ValueError for groups whose prompts cannot be made again as they were, and for those
    of an earlier version, which did not keep what they were worth.
    """
    return Ledger(
        next=said["next"],
        groups=said["groups"],
        settled={Outcome(name): count for name, count in said["settled"].items()},
        waiting=tuple(Waiting(_group(one, task_at), one["share"]) for one in said["waiting"]),
        rates=pass_rates.decoded(said.get("rates", {})),
        out=tuple(said.get("out", ())),
    )


def tell(groups: Sequence[Group], failed: Sequence[Failed]) -> dict[str, Any]:
    """Returns a round's groups and failures, as JSON values for the other processes."""
    return {
        "groups": [_told(group) for group in groups],
        "failed": [
            [*one.place, one.sample, f"{type(one.failure).__name__}: {one.failure}"]
            for one in failed
        ],
    }


def told(said: Mapping[str, Any], task_at: TaskAt) -> tuple[list[Group], list[Failed]]:
    """Returns the groups and failures that another process `tell`s; raises as `decode` does."""
    groups = [_group(one, task_at) for one in said["groups"]]
    failed = [
        Failed(
            task_at((ordinal, question), 0)[0], ordinal, question, sample, FailedElsewhere(words)
        )
        for ordinal, question, sample, words in said["failed"]
    ]
    return groups, failed


def tell_local(sets: Sequence[Sequence[Sample]]) -> list[list[dict[str, Any] | None]]:
    """Returns turns that were written again, a set a turn, as JSON values for other processes."""
    return [[None if one is None else _said_again(one) for one in made] for made in sets]


def told_local(
    said: Sequence[Sequence[Mapping[str, Any] | None]], chosen: Sequence[ChosenTurn]
) -> list[tuple[Sample, ...]]:
    """Returns another process's samples of the turns `chosen`, with the prompts known here."""
    return [
        tuple(one if one is None else _again(one, turn, k) for k, one in enumerate(made))
        for turn, made in zip(chosen, said, strict=True)
    ]


def _said_again(one: Trajectory) -> dict[str, Any]:
    reading = one.reading
    return {
        **_completions(reading.turns),
        "score": one.reward,
        "answer": reading.answer,
        "status": reading.status.value,
    }


def _again(said: Mapping[str, Any], turn: ChosenTurn, sample: int) -> Trajectory:
    ((_, finish, version),) = said["turns"]
    ids, logprobs = array_of(said["ids"], IDS), array_of(said["logprobs"], LOGPROBS)
    completion = Completion(tokens(ids), logprobs, Finish(finish), version)
    status = Status(said["status"])
    return local.trajectory(turn, sample, completion, said["score"], said["answer"], status)


class FailedElsewhere(Exception):
    """The error of a reading that failed in another process, in its words."""


def _told(group: Group) -> dict[str, Any]:
    readings = [_said(trajectory) for trajectory in group.trajectories]
    stage = {"chunks": group.chunks} if group.chunks else {}
    return {"place": list(group.place), **stage, "readings": readings}


def _said(trajectory: Trajectory) -> dict[str, Any]:
    worth = {
        "judged": trajectory.judged,
        "shaping": trajectory.shaping,
        "parts": dict(trajectory.reward_parts),
        "memories": trajectory.memory_rewards,
    }
    return {"prompts": _digest(trajectory.turns), **_completions(trajectory.turns), "worth": worth}


def _completions(turns: Sequence[Turn]) -> dict[str, Any]:
    completions = [turn.completion for turn in turns]
    return {
        "ids": text_of([c.tokens for c in completions], IDS),
        "logprobs": text_of([c.behaviour_logprobs for c in completions], LOGPROBS),
        "turns": [[len(c.tokens), c.finish.value, c.policy_version] for c in completions],
    }


def _group(said: Mapping[str, Any], task_at: TaskAt) -> Group:
    (ordinal, question), chunks = said["place"], said.get("chunks", 0)
    (task, reader), kept = task_at((ordinal, question), chunks), {}
    members = [
        _scored(one, _reading(one, task, sample, reader, kept))
        for sample, one in enumerate(said["readings"])
    ]
    return Group(task, tuple(members), ordinal, question, chunks)


def _scored(said: Mapping[str, Any], reading: Reading) -> Trajectory:
    """Returns the reading with what it was worth: judged once, and never again."""
    if (worth := said.get("worth")) is None:
        raise ValueError(
            f"a reading of task {reading.task_id!r} waits in the checkpoint without what it was "
            f"worth; go on with the version that wrote it, or from a step where none waits"
        )
    memories = tuple(worth["memories"])
    return Trajectory(reading, worth["judged"], worth["parts"], worth["shaping"], memories)


def _reading(
    said: Mapping[str, Any], task: Task, sample: int, reader: Reader, kept: dict[bytes, Tokens]
) -> Reading:
    turns: list[Turn] = []
    asked = memory_agent.question_of(task, reader.tokenizer, reader.rules.max_question)
    state = memory_agent.start(asked, reader.chunks_of(task))
    ids, logprobs, at = array_of(said["ids"], IDS), array_of(said["logprobs"], LOGPROBS), 0
    for length, finish, version in said["turns"]:
        kind, prompt = memory_agent.prompt(reader.rules, reader.template, state)
        here, at = slice(at, at + length), at + length
        completion = Completion(tokens(ids[here]), logprobs[here], Finish(finish), version)
        prompt = shared_once(prompt, kept)
        turns.append(memory_agent.turn_of(reader.rules, reader.template, state, prompt, completion))
        state = memory_agent.after(reader.rules, reader.template, state, turns[-1])
    if _digest(turns) != said["prompts"]:
        raise ValueError(
            f"a reading of task {task.id!r} waits in the checkpoint, and its prompts come out "
            "otherwise now; resume with the documents, template and tokenizer of the run"
        )
    last = turns[-1].completion
    status = Status.ANSWERED if last.finish is Finish.STOP else Status.TRUNCATED
    answer = reader.tokenizer.decode(memory_agent.answered(state))
    sizes = tuple(turn.size for turn in turns if turn.kind is TurnKind.UPDATE)
    return Reading(task.id, sample, tuple(turns), answer, status, sizes)


def _digest(turns: Sequence[Turn]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for turn in turns:
        digest.update(np.int64(len(turn.prompt.tokens)).tobytes() + turn.prompt.tokens.tobytes())
    return digest.hexdigest()
