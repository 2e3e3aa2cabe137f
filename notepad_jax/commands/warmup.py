"""`notepad-jax warmup`: trains the starter policy, by supervised learning."""

from __future__ import annotations

import argparse
from typing import Any

from notepad_jax.commands.parser import Parser
from notepad_jax.programs import warmup
from notepad_jax.setup.config.whole import Starter
from notepad_jax.telemetry.screen import Screen

CONFIG = "starter"
LONG = """\
Teaches a tiny policy to find facts and copy notes, and to forget: something honest for
reinforcement learning to mend. Writes a Hugging Face folder."""


def options(parser: Parser) -> None:
    """Adds no option: the command has none of its own."""


def run(
    arguments: argparse.Namespace, config: Starter, folder: None, screen: Screen
) -> tuple[Any, str]:
    numbers = warmup.run(config, screen)
    lines = [f"{name:>18}  {value:.4g}" for name, value in sorted(numbers.items())]
    return numbers, "\n".join(lines)
