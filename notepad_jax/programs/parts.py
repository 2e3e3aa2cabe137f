"""From a config to the parts of a run: policy, tokenizer, template, rules, engine.

Every program reads the same keys through these functions, so training, evaluation and
`ask` cannot differ in how they read. What comes out are plain values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.steps import as_stored, load_params, require
from notepad_jax.checkpoint.targets import check_shapes
from notepad_jax.engine.executor import Executor
from notepad_jax.engine.service import EngineService, Runs
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model import parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import place
from notepad_jax.programs import compiled, convert
from notepad_jax.reading.memory_agent import Rules
from notepad_jax.text import chat
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer, open_tokenizer
from notepad_jax.types import PolicySnapshot

ACTIVATIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A policy from a Hugging Face folder, and its tokenizer."""

    config: PolicyConfig
    params: Any
    tokenizer: Tokenizer
    folder: Path


def load_policy(folder: str | Path, activations: str = "") -> LoadedPolicy:
    """Reads config, weights and tokenizer of a Hugging Face folder, or of what import-hf wrote.

    The weights are as stored, committed to the first device. `activations` is the dtype that
    the policy computes in; "" is the one that its config.json names.
    """
    if activations not in ("", *ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"dtype is {activations!r}; use one of {known}, or '' for the policy's")
    compiled.keep()  # for those who come by Python and not by the command line
    steps = Path(folder) / convert.CHECKPOINTS
    if steps.is_dir():
        config = huggingface.import_config(folder)
        require(steps, 0, ("params", "meta"), "import the policy again")
        like = as_stored(steps, 0)
        check_shapes(like, parameters.abstract_params(config), str(steps))
        params, _ = load_params(steps, 0, like)
    else:
        config, params = huggingface.import_policy(folder)
    tokenizer = open_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{tokenizer.path} has {tokenizer.vocab_size} ids and the policy's embedding "
            f"{config.vocab_size} rows; this tokenizer belongs to another policy"
        )
    config = dataclasses.replace(
        config, valid_vocab=tokenizer.vocab_size, dtype=activations or config.dtype
    )
    return LoadedPolicy(config, place.commit(params), tokenizer, Path(folder))


def template(reading: ConfigDict, policy: LoadedPolicy) -> Template:
    """Returns the prompts of a reading, in the turn markers of the model or of the file."""
    if reading.chat not in ("model", "file"):
        raise ValueError(f"reading.chat is {reading.chat!r}; use 'model' or 'file'")
    frame = None
    if reading.chat == "model" and chat.has_template(policy.folder):
        frame = chat.frame(chat.ChatTemplate.read(policy.folder), policy.tokenizer)
    return Template.load(reading.template, policy.tokenizer, frame)


def rules(reading: ConfigDict) -> Rules:
    """Returns the limits of a reading from a config's `reading` section."""
    return Rules(
        max_question=reading.max_question,
        chunk_size=reading.chunk_size,
        max_memory=reading.max_memory,
        max_answer=reading.max_answer,
        memory_update=reading.memory_update,
    )


def service(
    engine: ConfigDict, policy: LoadedPolicy, reading: Rules, template: Template,
    snapshot: PolicySnapshot, around: Callable[[Runs], Runs] = lambda executor: executor,
) -> EngineService:  # fmt: skip
    """Builds an engine that is large enough for `reading`; it runs `around` its executor."""
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
    return EngineService(
        around(Executor(policy.config, settings)),
        snapshot,
        share_prefixes=engine.share_prefixes,
        read_ahead=engine.read_ahead,
        use_drafts=engine.use_drafts,
    )
