"""Tiny training runs, for the tests of training, resuming and task files."""

from pathlib import Path

from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.rollout import archive
from notepad_jax.setup import configuration
from notepad_jax.telemetry.metrics import LEDGER, METRICS, read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import train
from tests import tiny

ROOT = Path(__file__).parents[1]
WRITTEN = (METRICS, LEDGER, archive.FILE)  # of every byte that a resumed run must repeat
SMALL = (
    f"--config.policy={ROOT / 'data' / 'starter'}",
    "--config.steps=4",
    "--config.data.tokens=512",
    "--config.data.questions=2",
    "--config.rollout.documents=2",
    "--config.rollout.group_size=4",
    "--config.engine.slots=16",
    "--config.engine.pages=96",
    "--config.grpo.row_length=512",
    "--config.grpo.micro_batch_rows=1",
    "--config.grpo.lora.rank=0",
    "--config.optimizer.kind=adamw",
    "--config.optimizer.learning_rate=2e-3",
    "--config.optimizer.weight_decay=0",
)


def run(
    folder: Path, *words: str, resume: bool = False, step: int | None = None
) -> list[dict[str, float]]:
    config = configuration.load("quickstart", [*SMALL, *words])
    train.train(config, folder, SilentScreen(), resume, step)
    return read_metrics(folder)


def policy_folder(config, folder: Path, seed: int = 0) -> Path:
    """A policy of other sizes that knows the starter's words."""
    beside = huggingface.companions(ROOT / "data" / "starter")
    return huggingface.export_params(config, tiny.params(seed, config), folder, beside)
