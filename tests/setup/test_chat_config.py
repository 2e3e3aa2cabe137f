"""README's "Your own model": the block as it stands, and what is refused before anything loads."""

import json
import re
import shlex
from pathlib import Path

import pytest

from notepad_jax import cli
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.setup import builders, configuration, policies, sizes
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.training import train
from notepad_jax.training.validation import SCORE
from tests import chat_models
from tests.runs import ROOT

POLICY = "path/to/Qwen2.5-0.5B-Instruct"
WORDS = (f"--config.policy={POLICY}", "--config.tasks.files=questions.jsonl")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with the model and the questions that the README names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    chat_models.folder(tmp_path / POLICY)
    chat_models.questions(tmp_path / "questions.jsonl")
    (tmp_path / "book.txt").write_text("the secret code of ann is red . " * 60)
    return tmp_path


def refused(*words, config="chat"):
    with pytest.raises(ValueError) as problem:
        train.check(configuration.load(config, words), Path("runs/x"), False, None)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def test_without_questions_nobody_is_trained_on_the_starters_game(here, capsys):
    said = refused(WORDS[0])
    assert "starter's word game" in said and "--config.tasks.files=" in said
    assert "starter's word game" in refused(WORDS[0], config="quickstart")
    assert cli.main(["train", "--config", "chat", "--name", "mine", "--json", WORDS[0]]) == 1
    assert "starter's word game" in capsys.readouterr().err
    assert cli.main(["eval", "--policy", POLICY, "--lengths", "2k", "--json"]) == 1
    assert "choose another --suite" in capsys.readouterr().err
    assert not (here / "runs").exists() or not list((here / "runs").iterdir())


def test_what_does_not_fit_together_is_refused_before_anything_is_loaded(here):
    assert "engine.row_tokens is 512" in refused(*WORDS, "--config.engine.row_tokens=512")
    assert "grpo.row_length is 768" in refused(*WORDS, "--config.grpo.row_length=768")
    assert "engine.pages is 5" in refused(*WORDS, "--config.engine.pages=5")
    suite = [f"--config.validation.{word}" for word in ("split=0", "suite=synthetic", "lengths=2k")]
    assert "validation.suite is synthetic, which is in the starter's" in refused(*WORDS, *suite)
    assert "no task file mine.jsonl" in refused(WORDS[0], "--config.tasks.files=mine.jsonl")
    assert "there is no folder path/to/Qwen3" in refused("--config.policy=path/to/Qwen3", WORDS[1])
    config = configuration.load("chat", WORDS)
    train.check(config, Path("runs/x"), False, None)
    words, rules = builders.words(POLICY), builders.rules(config.reading)
    template = builders.template(config.reading, words)
    turns = sizes.turns(template, rules)
    engine = builders.engine_settings(config.engine, words.config, rules, template)
    assert engine.row_tokens % 128 == 0 and engine.row_tokens >= 4 * turns.update.private
    assert engine.pages >= engine.pages_for(turns.update.whole) + 64
    assert sizes.row_length(config, turns) >= turns.update.whole
    assert "{" not in words.tokenizer.decode(template.no_memory)


def block() -> list[list[str]]:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.search(r"## Your own model\n.*?```\n(.*?)```", page, re.DOTALL)[1]
    return [shlex.split(line, comments=True)[1:] for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.slow
def test_the_readmes_block_works_as_it_is_written(here, capsys):
    """Smaller and shorter than it says, and otherwise word by word."""
    small = [f"--config.{word}" for word in (
        "steps=3", "rollout.documents=2", "rollout.group_size=2", "rollout.max_rounds=1",
        "engine.slots=8", "validation.every=2", "reading.max_memory=12", "reading.max_answer=8",
    )]  # fmt: skip
    commands = block()
    assert [words[0] for words in commands] == ["train", "eval", "ask", "export-hf"]
    for words in commands:
        assert cli.main([*words, *(small if words[0] == "train" else [])]) == 0
        if words[0] == "train":
            said = capsys.readouterr().out
            assert "notepad-jax export-hf runs/mine@best exported" in said
        elif words[0] == "eval":  # all rows that were written
            table = re.findall(r"^notepad +\S+ +(\d+)", capsys.readouterr().out, re.MULTILINE)
            assert sum(map(int, table)) == 20
    lines = read_metrics("runs/mine")
    assert [line["step"] for line in lines if SCORE in line] == [0, 2, 3]
    page = (here / "runs" / "mine" / "report.html").read_text()
    assert "Held-out tasks" in page and "notepad-jax ask --policy runs/mine@best" in page
    config, _ = huggingface.import_policy("exported")
    assert config.layers == 2
    capsys.readouterr()
    assert cli.main(["train", "--name", "mine", "--resume", "--config.steps=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"][-1] == 4 and told["best"]["step"] in told["steps"]
    # A run may begin with another; which step that was is written down.
    second = ["train", "--config", "chat", "--name", "second", WORDS[1], *small, "--json"]
    assert cli.main([*second, "--config.policy=runs/mine@best", "--config.steps=1"]) == 0
    began = json.loads((here / "runs" / "second" / "config.json").read_text())["policy"]
    assert began == f"runs/mine@{told['best']['step']}"
    assert policies.folder_of(policies.resolved("runs/second")) == POLICY
