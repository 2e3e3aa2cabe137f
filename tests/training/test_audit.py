"""What a run says of its turns is what its checkpoints say; another policy's words are found."""

import json
import shutil

import pytest

from notepad_jax import cli, keys
from notepad_jax.setup import builders, configuration
from notepad_jax.telemetry.identity import write_json, write_sealed
from notepad_jax.telemetry.metrics import CONFIG
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import audit, record
from tests.runs import run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose checkpoints are all there."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    run(folder, "--config.checkpoint.keep=9", "--config.steps=3")
    return folder


@pytest.mark.slow
def test_every_token_is_as_its_version_says_it(whole):
    made = audit.run(whole, None, SilentScreen())
    assert [one.version for one in made.versions] == [0, 1, 2]
    assert made.steps == (1, 2, 3) and made.gone == () and made.off == ()
    # Four decimals are kept, of which rounding is half of the last one.
    assert all(0 < one.most < 1e-4 and one.tokens >= one.turns > 3 for one in made.versions)
    assert audit.text(made).endswith("every token is as its version says it, to 0.002 nats")
    one = audit.run(whole, 2, SilentScreen())
    assert one.steps == (2,) and one.versions == made.versions[1:2]


def test_rounding_is_that_of_the_machine_that_the_run_was_on(whole, tmp_path):
    """A config says "" of dtypes, and a GPU decides otherwise than the machine that audits."""
    for name in ("config.json", "machine.json"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    found = json.loads((tmp_path / "machine.json").read_text())
    write_json(tmp_path / "machine.json", found | {"dtype": "bfloat16"})
    assert record.decided_of(whole).dtype == "float32"
    assert record.decided_of(tmp_path).dtype == "bfloat16"


def changed(whole, folder, word, step):
    """A copy of the run, as if it had gone on after `step` with another setting."""
    shutil.copytree(whole, folder)
    config = configuration.changed(record.config_of(whole), [f"--config.{word}"])
    record.change(folder, step, config, {})
    write_sealed(folder / CONFIG, keys.plain(config))
    return folder


def test_turns_are_compared_at_the_temperature_that_they_were_sampled_at(whole, tmp_path):
    folder = changed(whole, tmp_path / "run", "rollout.temperature=0.8", 1)
    before, after = (audit.run(folder, step, SilentScreen()) for step in (1, 2))
    assert not before.off and [one.version for one in after.off] == [1]


def test_a_teachers_turns_are_no_policys(whole, tmp_path):
    folder = changed(whole, tmp_path / "run", "rollout.teacher=script", 2)
    with pytest.raises(ValueError, match="version 2 of .* rollout.teacher=script, which no policy"):
        audit.run(folder, None, SilentScreen())
    assert not audit.run(folder, 2, SilentScreen()).off


def test_words_of_another_version_are_found(whole, monkeypatch, capsys):
    load = builders.load_policy

    def other(name, *words, **more):
        return load(str(name).replace("@1", "@3"), *words, **more)

    monkeypatch.setattr(builders, "load_policy", other)
    made = audit.run(whole, 2, SilentScreen())
    assert [one.version for one in made.off] == [1] and made.off[0].most > 0.01
    assert cli.main(["audit", str(whole), "--step", "2"]) == 1
    said = capsys.readouterr()
    assert "has a token that version 1 says otherwise, by" in said.err
    assert "step 2, task synthetic-" in said.err and "every token" not in said.out


def test_what_cannot_be_looked_at_is_said_in_a_line(whole, tmp_path):
    def refused(folder, step=None):
        with pytest.raises(ValueError) as refusal:
            audit.run(folder, step, SilentScreen())
        return str(refusal.value)

    assert "has no turns of step 7, token by token" in refused(whole, 7)
    assert "has no turns of step 0, token by token" in refused(whole, 0)
    assert "config.json cannot be read" in refused(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")  # as of an evaluation, which has other keys
    assert "has no trajectories.jsonl: it is no training run's" in refused(tmp_path)


@pytest.mark.slow
def test_versions_without_a_checkpoint_are_named(uninterrupted):
    made = audit.run(uninterrupted, None, SilentScreen())
    assert made.gone and "not looked at: versions 0" in audit.text(made)
    with pytest.raises(
        ValueError, match=r"were said by versions 0, and checkpoints of .* are kept"
    ):
        audit.run(uninterrupted, 1, SilentScreen())
