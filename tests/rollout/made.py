"""Hand-made groups, for the tests of this folder."""

import fakes
import numpy as np

from notepad_jax.rollout.rewards import score
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


def task(name: str = "t", answer: str = "ann") -> Task:
    return Task(name, "who ?", TextDocument("ann"), (answer,), "test", "em")


def turn(kind: TurnKind, text: str, version: int = 0, finish: Finish = Finish.STOP) -> Turn:
    ids = [*fakes.tokenizer().encode(text), *([2] if finish is Finish.STOP else [])]
    logprobs = np.full(len(ids), -1.0, np.float32)
    completion = Completion(tokens(ids), logprobs, finish, version)
    return Turn(kind, 0, Prompt(tokens([300]), tokens([5])), completion)


def trajectory(reward: float, name: str = "t", sample: int = 0, versions=(0, 0)) -> Trajectory:
    said = "ann" if reward else "bob"
    turns = (
        turn(TurnKind.UPDATE, "the code", versions[0]),
        turn(TurnKind.ANSWER, said, versions[1]),
    )
    reading = Reading(name, sample, turns, said, Status.ANSWERED)
    return Trajectory(reading, reward, score(reading, task(name)).reward_parts)


def group(*rewards: float, name: str = "t", place=(-1, 0), versions=(0, 0)) -> Group:
    members = (trajectory(reward, name, k, versions) for k, reward in enumerate(rewards))
    return Group(task(name), tuple(members), *place)
