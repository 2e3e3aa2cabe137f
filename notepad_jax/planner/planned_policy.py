"""The policy of a plan: its sizes, template and tokenizer, which need not be here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from configs.models import MODELS
from notepad_jax.checkpoint.hf import hub, huggingface
from notepad_jax.model.config import PolicyConfig
from notepad_jax.setup import builders, learner, policies
from notepad_jax.setup.config.whole import Training
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import open_tokenizer


@dataclasses.dataclass(frozen=True)
class PlannedPolicy:
    """The policy of a plan: its sizes, and how its prompts are counted."""

    name: str
    counted_by: str
    config: PolicyConfig
    stored: str  # dtype that its weights are read in
    template: Template


def policy_of(config: Training, platform: str) -> PlannedPolicy:
    """Reads what `policies` finds under `config.policy`; nothing there is a published model's name.

    `platform` is that of the devices it is planned for ("tpu"). Raises ValueError where it is
    neither, and for adapters other than the config's.
    """
    folder, reading = Path(config.policy), config.reading
    of_hub = folder.name not in MODELS and hub.is_id(config.policy)
    if of_hub or (config.policy and policies.is_here(config.policy)):
        learner.check_start(config.grpo.lora, config.policy)
        folder = Path(policies.folder_of(policies.resolved(config.policy, lambda line: None, ())))
        found = huggingface.import_config(folder)
        tokenizer = open_tokenizer(folder, lambda line: None)
        words = builders.Words(tokenizer, folder, found, found.dtype, None)
        template = builders.template(reading, words)
        counted_by, name = "its own tokenizer", str(Path(config.policy))
    elif folder.name in MODELS:
        found, name = MODELS[folder.name], folder.name
        counted_by = "a stand-in tokenizer"
        template = Template.load(reading.template, _StandIn())
        builders.rules(reading).check(template)
    else:
        raise ValueError(
            f"policy {config.policy!r} is no folder here, and its last part none of the published "
            f"models whose sizes are known: {', '.join(MODELS)}"
        )
    policy = dataclasses.replace(found, dtype=builders.computes_in(config.dtype, found, platform))
    stored = builders.widened(policy, platform) or found.dtype
    return PlannedPolicy(name, counted_by, policy, stored, template)


class _StandIn(ApproximateTokenizer):
    """Counts a template's text, its control pieces as a word each."""

    def encode_template(self, text: str) -> Any:
        return self.encode(text)
