"""Every supported family computes what transformers computes.

The goldens were made by tests/goldens/make_goldens.py with torch and transformers; nothing
here needs them, except the last test, which asks transformers itself.
"""

import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_policies import CASES, load

from notepad_jax.checkpoint.hf import huggingface, names
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model import attention, logprobs, parameters, policy, rope
from notepad_jax.types import PolicySnapshot, Prompt, SamplingParams, tokens


def prompts(golden):
    return np.split(golden["prompts"].astype(np.int32), np.cumsum(golden["lengths"])[:-1])


@functools.partial(jax.jit, static_argnames="config")
def all_logits(config, params, tokens_BT):
    B, T = tokens_BT.shape
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    attend = attention.packed(config, jnp.full((B, T), T, jnp.int32), positions)
    hidden, *_ = policy.forward(config, params, tokens_BT, positions, attend)
    return logprobs.logits(config, params, hidden)


def right_padded(rows):
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row))) for row in rows]).astype(np.int32)


def test_there_is_a_golden_of_every_family_and_kind_of_rope():
    configs = [load(case)[0] for case in CASES]
    assert {names.family_of(config) for config in configs} == set(names.FAMILIES)
    kinds = {type(config.rope) for config in configs}
    assert kinds == {rope.Unscaled, rope.Linear, rope.Llama3, rope.Yarn}
    assert {config.experts.per_token for config in configs if config.experts} == {1, 2, 8}
    for field in ("tied_embeddings", "attention_bias", "qk_norm", "output_bias"):
        assert {getattr(config, field) for config in configs} == {True, False}
    assert {config.windows for config in configs} == {(), (12, 12), (0, 12), (12, 0)}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case):
    config, params, golden = load(case)
    rows = prompts(golden)
    found = np.asarray(all_logits(config, params, right_padded(rows)))
    kept = golden["logits"].shape[1]
    for row, logits, want in zip(rows, found, golden["logits"], strict=True):
        np.testing.assert_allclose(logits[len(row) - kept : len(row)], want, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if "window" in case])
def test_a_golden_with_windows_is_not_one_without(case):
    config, params, golden = load(case)
    row = prompts(golden)[-1]  # 30 tokens, windows of 12
    whole = all_logits(dataclasses.replace(config, windows=()), params, row[None])
    assert np.abs(np.asarray(whole)[0, -2:] - golden["logits"][-1]).max() > 0.01


# one of each family, and windows
QUICK = ("qwen2_tied", "qwen3_tied", "llama3", "mistral", "moe_top2", "qwen3_window")


ENGINE_CASES = [
    case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_the_engines_greedy_tokens_are_those_of_transformers(case):
    """A ragged batch, 64 tokens each; the longer prompts come out of the prefix cache."""
    config, params, golden = load(case)
    new = golden["greedy"].shape[1]
    settings = EngineSettings(
        slots=4, page_size=8, pages=80, max_prompt=32, max_new_tokens=new, steps_per_launch=16,
        row_tokens=64,
    )  # fmt: skip
    sampling = SamplingParams(0.0, 1.0, new, (), 0)

    async def complete():
        executor = Executor(settings, Device(config, settings))
        async with EngineService(executor, PolicySnapshot(0, params)) as service:
            asked = [
                Prompt(tokens(row[: len(row) // 8 * 8 - 8]), tokens(row[len(row) // 8 * 8 - 8 :]))
                if len(row) > 16
                else Prompt(tokens(), tokens(row))
                for row in prompts(golden)
            ]
            return await asyncio.gather(*[service.complete(p, sampling) for p in asked])

    found = np.stack([completion.tokens for completion in asyncio.run(complete())])
    np.testing.assert_array_equal(found, golden["greedy"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_our_export_and_computes_the_same(case, tmp_path):
    """In several files, as a policy of many gigabytes is written."""
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    transformers = pytest.importorskip("transformers", reason="needs torch and transformers")
    config, params, golden = load(case)
    # other weights than the goldens': an export that copied a file would not pass
    params = jax.tree.map(lambda x: x * 0.75, params)
    folder = tmp_path / "export"
    size = 4 * parameters.count(config)
    written = huggingface.export(config, params, folder, part_bytes=size // 3)
    parts = [name for name in written.files if name.endswith(".safetensors")]
    assert len(parts) >= 3 and (folder / huggingface.INDEX).exists()
    assert max((folder / name).stat().st_size for name in parts) < size / 2
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == names.family_of(config)
    rows = [np.concatenate(pair) for pair in zip(prompts(golden), golden["greedy"], strict=True)]
    ours = np.asarray(all_logits(config, params, right_padded(rows)))
    for row, found in zip(rows, ours, strict=True):
        with torch.no_grad():
            theirs = model.eval()(torch.tensor(row[None].astype(np.int64))).logits[0].numpy()
        np.testing.assert_allclose(found[: len(row)], theirs, atol=1e-5, rtol=1e-5)
