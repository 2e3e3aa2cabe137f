"""`notepad-jax quickstart`: measures, trains and measures again, at laptop scale."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from notepad_jax.commands.options import training_options
from notepad_jax.commands.parser import Parser
from notepad_jax.programs import quickstart
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen

CONFIG = "quickstart"
LONG = """\
Measures the starter policy by document length, trains it with GRPO on short documents,
measures it again up to 3.5 million tokens, exports it, and writes a report with plots."""


def options(parser: Parser) -> None:
    training_options(parser)


def run(
    arguments: argparse.Namespace, config: Training, folder: Path, screen: Screen
) -> tuple[Any, str]:
    outcome = quickstart.run(config, folder, screen, arguments.resume, arguments.step)
    return outcome, quickstart.text(outcome)
