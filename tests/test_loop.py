"""The loop on one page has the numbers of `train`: same readings, same loss, same step."""

import asyncio
import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import pytest

from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.setup import configuration
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import train

ROOT = Path(__file__).parents[1]
MOST_LINES = 300


@pytest.fixture
def loop(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, "loop", raising=False)
    import loop

    return loop


def changes(loop) -> dict:
    """What of config quickstart the page has otherwise, in a config's words."""
    reading = {f"reading.{key}": getattr(loop.RULES, key) for key in ("chunk_size", "max_memory")}
    optimizer = {f"optimizer.{key}": v for key, v in dataclasses.asdict(loop.OPTIMIZER).items()}
    return {
        "steps": 3,
        **reading,
        **optimizer,
        "data.tokens": loop.DOCUMENT_TOKENS,
        "data.questions": loop.QUESTIONS,
        "data.distractor_share": 0.5,
        "data.chapter_rate": 1 / 64,
        "rollout.documents": loop.DOCUMENTS,
        "rollout.group_size": loop.READINGS,
        "rollout.temperature": loop.UPDATE.temperature,
        "rollout.max_rounds": 1,
        "grpo.row_length": loop.ROW_TOKENS,
        "grpo.full_rate_at": 0.0,
        "grpo.lora.rank": 0,
        "engine.per_cpu": 1,
        "engine.max_prompt": 0,
        "checkpoint.handoff": "memory",
        "checkpoint.every": 3,
    }


@pytest.mark.slow
def test_the_page_has_the_numbers_of_train(loop, tmp_path):
    loop.DOCUMENTS = 2
    told = []
    asyncio.run(loop.main(3, lambda step, metrics: told.append({"step": step, **metrics})))
    words = [f"{configuration.FLAG}{key}={value}" for key, value in changes(loop).items()]
    train.train(configuration.load("quickstart", words), tmp_path / "run", SilentScreen())
    metrics = read_metrics(tmp_path / "run")
    assert [one["step"] for one in told] == [one["step"] for one in metrics] == [1, 2, 3]
    assert any(one["groups/kept"] for one in metrics)
    for ours, theirs in zip(told, metrics, strict=True):
        same = {name for name in ours if name in theirs}
        assert {"reward", "loss", "grad_norm", "param_norm", "loss_tokens"} <= same
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_readme_shows_its_heart():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    page = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8")
    assert textwrap.indent(block, "    ") in page and len(block.splitlines()) <= 30


def test_it_is_a_page():
    text = (ROOT / "examples" / "loop.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < MOST_LINES
    rooms = ("setup", "planner", "training", "programs")  # it stands on the lower floors alone
    assert not [room for room in rooms if f"notepad_jax.{room}" in text]


def test_what_it_does_not_say_is_what_the_configs_say():
    """The defaults of `UpdateSettings` stand in config quickstart, too: the same."""
    said = configuration.load("quickstart").grpo
    unsaid = {k: v for k, v in dataclasses.asdict(UpdateSettings()).items() if k != "temperature"}
    assert unsaid == {key: getattr(said, key) for key in unsaid}
