"""Groups made of random tokens, and the tiny random policy that the update tests run."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax import types
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig

VOCAB = 64
CONFIG = PolicyConfig(
    vocab_size=VOCAB,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_size=8,
    feed_forward=48,
    rope_theta=1e4,
    rms_eps=1e-6,
    qk_norm=True,
    attention_bias=False,
    tied_embeddings=True,
    valid_vocab=60,
)


@pytest.fixture(scope="session")
def config() -> PolicyConfig:
    return CONFIG


@pytest.fixture(scope="session")
def params() -> dict:
    """Random parameters (numpy's, which compiles nothing), sharp enough to be far from uniform."""
    rng = np.random.default_rng(0)
    return parameters.map_specs(
        lambda s: jnp.asarray(s.fill + 1.5 * s.scale * rng.normal(size=s.shape), jnp.float32),
        CONFIG,
    ) | {"embed": jnp.asarray(0.2 * rng.normal(size=(VOCAB, CONFIG.width)), jnp.float32)}


def turn(shared, tail, completion, behaviour=None, kind=types.TurnKind.UPDATE) -> types.Turn:
    completion = types.tokens(completion)
    if behaviour is None:
        behaviour = np.full(len(completion), -4.0, np.float32)
    return types.Turn(
        kind=kind,
        chunk=0,
        prompt=types.Prompt(types.tokens(shared), types.tokens(tail)),
        completion=types.Completion(
            completion, np.asarray(behaviour, np.float32), types.Finish.STOP, 0
        ),
    )


def group(turns_of_samples, rewards) -> types.Group:
    trajectories = tuple(
        types.Trajectory(
            types.Reading("t", sample, tuple(turns), "", types.Status.ANSWERED), reward, {}
        )
        for sample, (turns, reward) in enumerate(zip(turns_of_samples, rewards, strict=True))
    )
    task = types.Task("t", "?", types.TextDocument(""), ("a",), "test", "em")
    return types.Group(task, trajectories)


def random_groups(
    seed: int, groups=2, samples=4, turns=3, prefix=(5, 20), alike=False
) -> list[types.Group]:
    """Groups whose members share each chunk's prefix; an answer turn without one ends them.

    Behind it come random tails; `alike` ones are a group's question, the same for all of its
    turns, and one of few memories. Completions hold token id 0 and end in the stop token 2;
    behaviour logprobs are random.
    """
    rng = np.random.default_rng(seed)

    def draw(low, high):
        return rng.integers(0, 60, rng.integers(low, high))

    made = []
    for _ in range(groups):
        chunks = [types.tokens(draw(*prefix)) for _ in range(turns)]
        question = draw(0, 4) if alike else ()

        def tail(question=question):
            if not alike:
                return draw(1, 6)
            return np.append(question, rng.integers(0, 2, rng.integers(1, 4)))

        members = []
        for _ in range(samples):
            own = []
            for c in range(turns + 1):
                answer = c == turns
                completion = np.append(draw(0, 9), 2)
                own.append(
                    turn(
                        () if answer else chunks[c],
                        tail(),
                        completion,
                        rng.normal(-4, 0.5, len(completion)),
                        types.TurnKind.ANSWER if answer else types.TurnKind.UPDATE,
                    )
                )
            members.append(own)
        rewards = rng.permutation(np.arange(samples) % 2).astype(float)
        made.append(group(members, rewards))
    return made


@pytest.fixture(scope="session")
def make() -> dict[str, Callable]:
    return {"turn": turn, "group": group, "random_groups": random_groups}
