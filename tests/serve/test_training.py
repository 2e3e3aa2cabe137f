"""A group that was sampled over HTTP trains as one that was sampled in the process."""

import asyncio
import dataclasses

import httpx2
import jax
import numpy as np
import pytest

from notepad_jax.grpo import update
from notepad_jax.grpo.batch import pack
from notepad_jax.programs import serve
from notepad_jax.serve.completions.requests import chat
from notepad_jax.setup import builders, configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import (
    Completion,
    Finish,
    Group,
    Prompt,
    Reading,
    SamplingParams,
    Status,
    Task,
    TextDocument,
    Trajectory,
    Turn,
    TurnKind,
    tokens,
)
from tests import chat_models, tiny
from tests.grpo.test_update import SETTINGS
from tests.serve.fake import running

CONFIG = [
    "--config.engine.slots=8", "--config.engine.pages=96", "--config.engine.page_size=16",
    "--config.reading.chunk_size=48", "--config.evaluate.chunk_size=48",
    "--config.reading.max_question=24", "--config.reading.max_memory=12",
    "--config.reading.max_answer=12", "--config.engine.row_tokens=0", "--config.dtype=float32",
    "--config.engine.cache_dtype=float32",
]  # fmt: skip
ASKED = {"model": "m", "messages": [{"role": "user", "content": "who is ann ?"}], "seed": 3,
         "n": 4, "max_tokens": 12, "temperature": 0.8, "top_p": 0.9}  # fmt: skip


def group(prompt: Prompt, completions: list[Completion]) -> Group:
    task = Task("t", "?", TextDocument(""), ("a",), "test", "em")
    trajectories = [
        Trajectory(
            Reading("t", k, (Turn(TurnKind.ANSWER, 0, prompt, one),), "", Status.ANSWERED),
            float(k % 2), {},
        )
        for k, one in enumerate(completions)
    ]  # fmt: skip
    return Group(task, tuple(trajectories))


@pytest.mark.slow
def test_it_has_the_same_loss(tmp_path):
    folder = chat_models.folder(tmp_path / "chats")
    # One slot: else which choices share a launch is a matter of time, and with it the last bits of
    # their logprobs. So they are the same numbers, and so is all that is made of them.
    alone = [f"--config.policy={folder}", "--config.engine.slots=1"]
    config = configuration.load("chat", [*CONFIG, *alone])
    policy = builders.load_policy(folder, config.dtype, builders.to_read(config.engine))
    weights = serve.ServedWeights(config, policy, SilentScreen())
    engines, served = serve.opened(config, policy, "m", weights)
    stops = served.conversations.stop_ids

    def over_http(url: str) -> dict:
        more = {"logprobs": True, "return_token_ids": True}
        return httpx2.post(f"{url}/v1/chat/completions", json=ASKED | more, timeout=200).json()

    async def both():
        async with engines:
            with running(served) as url:
                reply = await asyncio.to_thread(over_http, url)
            ids = tokens(reply["prompt_token_ids"])
            prompt = Prompt(tokens(ids[:-1].copy()), tokens(ids[-1:].copy()))
            how = chat(ASKED).how
            with engines.seat() as seat:
                sampled = [
                    seat.complete(prompt, SamplingParams(0.8, 0.9, 12, stops, how.seed_of(k, 0)))
                    for k in range(4)
                ]
                return reply, prompt, await asyncio.gather(*sampled)

    reply, prompt, inside = asyncio.run(both())
    outside = [
        Completion(
            tokens(choice["token_ids"]),
            np.array([one["logprob"] for one in choice["logprobs"]["content"]], np.float32),
            Finish.STOP if choice["finish_reason"] == "stop" else Finish.LENGTH,
            choice["policy_version"],
        )
        for choice in reply["choices"]
    ]
    found = []
    # Advantages that do not cancel: a loss of nearly nothing would be equal to any other.
    uneven = [np.array([1.0, -0.25, 0.5, 0.25], np.float32)]
    for completions in (outside, inside):
        groups = [group(prompt, completions)]
        batch = pack(groups, uneven, 128, rows_multiple=1, length_multiple=128).batch
        settings = dataclasses.replace(SETTINGS, temperature=0.8, micro_batch_rows=1)
        found.append(update.loss_and_gradient(policy.config, settings, policy.params, {}, batch))
    for one, other in zip(outside, inside, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.behaviour_logprobs.tolist() == other.behaviour_logprobs.tolist()
    assert abs(found[0][0]) > 0.1
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)
    # And the logprobs are what the trainer computes, at the temperature, before top_p.
    for one in outside:
        exact = tiny.trainer_logprobs(policy.params, prompt, one, 0.8, policy.config)
        np.testing.assert_allclose(one.behaviour_logprobs, exact, atol=2e-4)
