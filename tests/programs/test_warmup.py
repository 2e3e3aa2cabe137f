"""Warmup: its own forward pass is the policy's, it is resumable, and what it made is good."""

from __future__ import annotations

import functools
import importlib
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax import cli, keys
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.model import attention, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import init_params
from notepad_jax.programs import warmup
from notepad_jax.setup import configuration, habits, policies
from notepad_jax.starter import lessons, mixed_lessons, vocabulary
from notepad_jax.starter.habits import Habits
from notepad_jax.telemetry.progress import choose
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer

STARTER = pathlib.Path(__file__).parents[2] / "data" / "starter"
HABITS = Habits(0.75, 0.98, 0.25, merge=1.0, leave=0.0, stay=1.0)


def packed(lesson: lessons.Lesson):
    """The rows of a TrainBatch: each chunk, then its tails, under one kv_end mask."""
    B, C = lesson.chunk.shape
    Q, T = lesson.tail.shape[1:]
    tokens = np.concatenate([lesson.chunk, lesson.tail.reshape(B, Q * T)], axis=1)
    positions = np.concatenate([np.arange(C), np.tile(np.arange(C, C + T), Q)])
    ends = np.concatenate([np.full(C, C + Q * T), C + T + T * np.repeat(np.arange(Q), T)])
    return (
        jnp.asarray(tokens),
        jnp.asarray(np.tile(positions, (B, 1))),
        jnp.asarray(np.tile(ends, (B, 1)), jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0)
def whole_forward(config, params, tokens, positions, ends):
    attend = attention.packed(config, ends, positions)
    return policy.forward(config, params, tokens, positions, attend)[0]


@pytest.mark.slow
@pytest.mark.parametrize("heads, kv_heads, windows", [(2, 1, ()), (4, 2, ()), (2, 1, (9, 0))])
def test_two_streams_equal_the_policys_packed_forward(heads, kv_heads, windows):
    config = PolicyConfig(
        vocab_size=len(vocabulary.PIECES), width=32, layers=2, heads=heads, kv_heads=kv_heads,
        head_size=16, feed_forward=48, rope_theta=1e6, rms_eps=1e-6, qk_norm=True,
        attention_bias=False, tied_embeddings=True, valid_vocab=len(vocabulary.PIECES),
        windows=windows,
    )  # fmt: skip
    params = jax.tree.map(lambda x: 3 * x, init_params(config, jax.random.key(1)))
    lesson = lessons.draw(np.random.default_rng(0), 2, 64, 6, HABITS)
    read = jax.jit(warmup.read_lesson, static_argnums=0)
    hidden, _ = read(config, params, lesson.chunk, lesson.tail, lesson.sees_chunk)
    tokens, positions, ends = packed(lesson)
    rows = whole_forward(config, params, tokens, positions, ends)
    rows = rows[:, 64:].reshape(hidden.shape)
    sees = lesson.sees_chunk
    # Sharp attention (weights times 3) amplifies float32 rounding to 3e-5; a mistake gives 1.
    np.testing.assert_allclose(hidden[sees], rows[sees], atol=1e-4)
    alone = jnp.asarray(lesson.tail[~sees])  # answer turns: rows of their own
    whole = jnp.full(alone.shape, lessons.TAIL, jnp.int32)
    at = jnp.tile(jnp.arange(lessons.TAIL), (len(alone), 1))
    rows = whole_forward(config, params, alone, at, whole)
    np.testing.assert_allclose(hidden[~sees], rows, atol=1e-4)


def tiny(folder: pathlib.Path, steps: int):
    config = importlib.import_module("configs.starter").get_config()
    config.policy.update(width=32, head_size=16, feed_forward=32)
    config.lessons = config.lessons[:1]
    config.lessons[0].update(chunks=2, tails=4)
    config.update(folder=str(folder), steps=steps, drill_steps=0)
    config.optimizer.update(decay_from=steps // 4, decay_steps=steps)
    return configuration.changed(config, [])


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path):
    screen = choose(quiet=True)
    whole = tiny(tmp_path / "whole", 8)
    warmup.run(whole, screen)
    config = tiny(tmp_path / "parts", 8)
    config = keys.changed(
        config, {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_every": 3}
    )
    real_draw = warmup.draw_lesson
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "draw_lesson", lambda c, s: real_draw(c, s) if s < 7 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            warmup.run(config, screen)
    warmup.run(config, screen)
    for name in ("model.safetensors", "config.json", "tokenizer.model"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_learning_lowers_the_loss_and_keeps_the_readme(tmp_path):
    folder = tmp_path / "starter"
    config = tiny(folder, 30)
    huggingface.export_params(*huggingface.import_policy(STARTER), folder)
    (folder / "README.md").write_text("mine")
    last = warmup.run(config, choose(quiet=True))
    assert last["loss@64"] < 0.75 * np.log(len(vocabulary.PIECES))
    assert (folder / "README.md").read_text() == "mine"
    assert policies.reads_as(folder) == policies.reads_as(STARTER)  # both are the quick start's


def test_the_shipped_starter_is_read_as_the_quick_start_reads():
    usual = keys.plain(configuration.load("quickstart"))
    said = policies.reads_as(STARTER)
    assert said["reading"] == usual["reading"]
    assert said["evaluate"] == {"chunk_size": usual["evaluate"]["chunk_size"]}
    machine = {key: usual["engine"][key] for key in habits.MACHINE if key in usual["engine"]}
    assert machine and said["engine"] | machine == usual["engine"]


@pytest.mark.parametrize("starter", ["starter", "starter_mix", "starter_rounds", "starter_exits"])
def test_a_starter_is_read_by_the_config_that_trains_it(starter):
    config = configuration.load(starter)
    assert configuration.load(config.reads_as).policy == config.folder


@pytest.mark.slow
def test_the_command_makes_what_its_config_says(tmp_path, capsys):
    small = (
        "    config.policy.update(width=32, head_size=16, feed_forward=32)\n"
        "    config.lessons = config.lessons[:1]\n"
        "    config.lessons[0].update(chunks=2, tails=4)\n"
        f"    config.update(folder={str(tmp_path / 'made')!r}, drill_steps=0)\n"
    )
    (tmp_path / "small.py").write_text(
        f"import configs.starter\n\ndef get_config():\n    config = configs.starter.get_config()\n"
        f"{small}    return config\n"
    )
    asked = ["warmup", "--config", str(tmp_path / "small.py"), "--config.steps=1", "--json"]
    assert cli.main(asked) == 0
    assert (tmp_path / "made" / "model.safetensors").is_file()
    assert json.loads(capsys.readouterr().out)


def test_one_layer_is_refused(tmp_path):
    config = keys.changed(tiny(tmp_path, 1), {"policy.layers": 1})
    with pytest.raises(ValueError, match="layers is 1.*at least 2"):
        warmup.run(config, choose(quiet=True))


def test_no_training_goes_on_with_another_seed_or_other_lessons(tmp_path, monkeypatch):
    def taught(policy, optimizer, params, opt_state, *rest):
        return params, opt_state, {"loss": 1.0, "retrieval": 0.0}

    monkeypatch.setattr(warmup, "train_step", taught)
    saved = {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_every": 1}
    config = keys.changed(tiny(tmp_path / "made", 1), saved)
    warmup.run(config, choose(quiet=True))
    later = keys.changed(config, {"steps": 2, "folder": str(tmp_path / "elsewhere")})
    warmup.run(later, choose(quiet=True))
    for change, name in (({"seed": 1}, "seed = 0"), ({"noise": 0.5}, "noise = ")):
        with pytest.raises(ValueError, match=f"was made with {name}.*; choose another folder for"):
            warmup.run(keys.changed(later, change), choose(quiet=True))


def test_the_mixs_starter_learns_other_questions_in_the_same_way():
    usual, mix = (configuration.load(name) for name in ("starter", "starter_mix"))
    assert mix.folder != usual.folder and mix.habits == usual.habits
    _, lesson = warmup.draw_lesson(mix, 3)
    asked = {vocabulary.PIECES[i].removeprefix("▁") for i in np.unique(lesson["tail"][..., 1])}
    assert asked == {"code", "market", "songs", "story"}
    spoken = lesson["weight"] > 0
    assert not spoken[..., : warmup.SPOKEN].any() and lesson["tail"].shape[-1] == mixed_lessons.TAIL
    (size,) = mix.lessons
    assert size.chunk_size == configuration.load("mix").reading.chunk_size


@pytest.mark.slow
def test_noise_is_relative_to_a_leaf_and_spares_norms():
    sizes = vars(configuration.load("starter").policy)
    config = PolicyConfig(**sizes, vocab_size=512, valid_vocab=512)
    params = init_params(config, jax.random.key(0))
    key = jax.random.key(1)
    jax.tree.map(np.testing.assert_array_equal, warmup.shaken(params, 0.0, key), params)
    noisy = warmup.shaken(params, 0.1, key)
    moved = jax.tree.map(lambda a, b: jnp.std(a - b) / jnp.sqrt(jnp.mean(b * b)), noisy, params)
    for name, size in moved["layers"].items():
        assert size == pytest.approx(0.0 if name.endswith("norm") else 0.1, rel=0.05), name
    assert moved["embed"] == pytest.approx(0.025, rel=0.05) and moved["final_norm"] == 0
    other = warmup.shaken(params, 0.1, jax.random.key(2))
    assert (other["embed"] != noisy["embed"]).mean() > 0.99


# ---------------------------------------------------------------- the shipped starter


def test_the_shipped_tokenizer_is_the_one_we_build():
    path = STARTER / "tokenizer.model"
    assert path.read_bytes() == vocabulary.sentencepiece_model()
    assert SentencePieceTokenizer(path).vocab_size == len(vocabulary.PIECES)
    assert sum(file.stat().st_size for file in STARTER.iterdir()) <= 2_000_000


@pytest.mark.parametrize("chunk_size, chunks, tails", [(256, 8, 24), (1024, 3, 32)])
def test_the_shipped_starter_is_skilled_and_forgetful(chunk_size, chunks, tails):
    config, params = huggingface.import_policy(STARTER)
    params = jax.tree.map(jnp.asarray, params)
    lesson = lessons.draw(np.random.default_rng(99), chunks, chunk_size, tails, HABITS)
    judge = jax.jit(warmup.lesson_loss, static_argnums=0)
    _, numbers = judge(config, params, vars(lesson), 0.0)
    assert numbers["retrieval"] >= 0.98
    assert numbers["rest"] >= 0.98
    assert numbers["slip"] <= 0.01  # else reinforcement learning is slow
