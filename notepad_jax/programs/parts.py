"""From a config to the parts of a run: policy, tokenizer, template, rules, engine.

Every program reads the same keys through these functions, so training, evaluation and
`ask` cannot differ in how they read. What comes out are plain values.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from notepad_jax.agent.memory_agent import Rules
from notepad_jax.agent.prompts import Template
from notepad_jax.agent.tokenizer import SentencePieceTokenizer
from notepad_jax.checkpoint import huggingface
from notepad_jax.engine.driver import EngineDriver
from notepad_jax.engine.paged_engine import EngineSettings, PagedEngine
from notepad_jax.model.config import PolicyConfig
from notepad_jax.types import PolicySnapshot, SamplingParams


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A policy from a Hugging Face folder, and its tokenizer."""

    config: PolicyConfig
    params: Any
    tokenizer: SentencePieceTokenizer
    tokenizer_path: Path


def load_policy(folder: str | Path) -> LoadedPolicy:
    """Reads config, weights and tokenizer.model of a Hugging Face folder."""
    config, params = huggingface.import_policy(folder)
    path = Path(folder) / "tokenizer.model"
    if not path.is_file():
        raise ValueError(f"{folder} has no tokenizer.model; a sentencepiece model must lie there")
    tokenizer = SentencePieceTokenizer(path)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.vocab_size} pieces and the policy's embedding "
            f"{config.vocab_size} rows; this tokenizer belongs to another policy"
        )
    config = dataclasses.replace(config, valid_vocab=tokenizer.vocab_size)
    return LoadedPolicy(config, jax.tree.map(jax.numpy.asarray, params), tokenizer, path)


def rules(reading: ConfigDict) -> Rules:
    """Returns the limits of a reading from a config's `reading` section."""
    return Rules(
        max_question=reading.max_question,
        chunk_size=reading.chunk_size,
        max_memory=reading.max_memory,
        max_answer=reading.max_answer,
        memory_update=reading.memory_update,
    )


def driver(
    engine: ConfigDict, policy: LoadedPolicy, reading: Rules, template: Template,
    snapshot: PolicySnapshot,
) -> EngineDriver:  # fmt: skip
    """Builds an engine that is large enough for `reading`, and its driver."""
    longest = template.longest_prompt(reading.max_question, reading.chunk_size, reading.max_memory)
    answer = max(reading.max_memory, reading.max_answer)
    settings = EngineSettings(
        slots=engine.slots,
        page_size=engine.page_size,
        pages=engine.pages,
        max_prompt=longest,
        max_new_tokens=answer,
        steps_per_launch=engine.steps_per_launch,
        row_tokens=engine.row_tokens,
        cache_dtype=engine.cache_dtype,
    )
    default = SamplingParams(1.0, 1.0, answer, policy.tokenizer.stop_ids, 0)
    return EngineDriver(
        PagedEngine(policy.config, settings, default),
        snapshot,
        share_prefixes=engine.share_prefixes,
        read_ahead=engine.read_ahead,
        use_drafts=engine.use_drafts,
    )
