"""What a training run holds, refuses and does with updates, without an engine."""

import dataclasses
import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax import keys, types
from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.grpo import forward
from notepad_jax.model import lora, lora_merge, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.setup import configuration, learner

POLICY = PolicyConfig(
    vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_size=16, feed_forward=128,
    rope_theta=1e4, rms_eps=1e-6, qk_norm=False, attention_bias=True, tied_embeddings=True,
    valid_vocab=512, dtype="bfloat16",
)  # fmt: skip
ADAMW = (
    "--config.optimizer.kind=adamw", "--config.optimizer.decay=none", "--config.grpo.lora.rank=0",
    "--config.optimizer.learning_rate=2e-3", "--config.optimizer.decay_from=25",
    "--config.optimizer.decay_steps=100", "--config.steps=100",
)  # fmt: skip
NAMED = {"test": "test"}  # what the source of a task is called in metrics


def config(*words: str):
    return configuration.load("quickstart", [*ADAMW, *words])


def published() -> dict:
    drawn = parameters.init_params(POLICY, jax.random.key(0))
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), drawn)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ((), 4 * 3),  # float32 masters and two moments
        (("--config.grpo.kl_weight=0.1",), 4 * 3 + 2),  # and the starting policy, as published
        (("--config.grpo.lora.rank=1",), 2),  # the base; adapters are next to nothing
        (("--config.grpo.lora.rank=1", "--config.grpo.kl_weight=0.1"), 2),  # it is the reference
    ],
    ids=["all", "all, KL", "adapters", "adapters, KL"],
)
def test_nobody_holds_a_copy_of_the_weights_without_need(words, copies):
    """Bytes a parameter that stay alive, once the caller has let go of what it loaded."""
    before, count = live_bytes(), parameters.count(POLICY)
    learning = learner.prepare(config(*words), POLICY, published())
    held = (live_bytes() - before) / count
    assert learning.state.step == 0
    assert copies <= held < copies + (1 if learning.frozen else 0.05)


def test_what_is_trained_is_float32_and_what_is_frozen_as_stored():
    learning = learner.prepare(config("--config.grpo.lora.rank=2"), POLICY, published())
    assert {x.dtype for x in jax.tree.leaves(learning.state.masters)} == {jnp.dtype("float32")}
    assert learning.frozen["layers"]["q"].dtype == jnp.bfloat16
    whole = parameters.join(learning.frozen, learning.state.masters)
    # B is zero first.
    jax.tree.map(np.testing.assert_array_equal, lora_merge.merged(whole), published())


def test_a_base_is_kept_as_it_is_stored_whatever_it_lies_in():
    """On a CPU that computes in float32 it is widened: what is saved is the published half."""
    wide = jax.tree.map(lambda x: x.astype("float32"), published())
    stored = abstract(published())
    learning = learner.prepare(config("--config.grpo.lora.rank=2"), POLICY, wide)
    kept = learner.base(learning, stored)
    jax.tree.map(np.testing.assert_array_equal, lora.plain(kept), published())
    assert kept["layers"]["q"].dtype == jnp.bfloat16
    assert set(kept["layers"]) - set(stored["layers"]) == {"lora_scale"}
    whole = learner.prepare(config(), POLICY, published())
    assert learner.base(whole, stored) == {}


def test_how_much_of_what_was_learnt_the_sampler_sees_by_hand():
    """Of adapters that are handed over halved, a quarter of the delta; of none, nothing to say."""
    learning = learner.prepare(config("--config.grpo.lora.rank=2"), POLICY, published())
    assert learner.seen(learning, learning.state.masters) == {}  # B is zero at first
    learning.state = jax.tree.map(lambda x: x + 1, learning.state)
    theirs = learning.state.masters
    assert learner.seen(learning, theirs) == {"rollout/delta_seen": 1.0}
    half = jax.tree.map(lambda x: x / 2, theirs)
    assert learner.seen(learning, half) == {"rollout/delta_seen": 0.25}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), theirs)
    assert learner.seen(learning, rounded)["rollout/delta_seen"] == pytest.approx(1, abs=5e-3)
    whole = learner.prepare(config(), POLICY, published())
    assert learner.seen(whole, published()) == {}


def test_a_resumed_learner_is_the_one_that_was_saved():
    """With adapters, whose base is no part of it, and without."""
    for words in (("--config.grpo.lora.rank=2",), ()):
        learning = learner.prepare(config(*words), POLICY, published())
        moved = jax.tree.map(lambda x: x + 1, learning.state)
        learning.state = moved
        params, opt = learner.saved(learning)
        targets = learner.restore_target(learning)
        same = lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype)  # noqa: E731
        assert jax.tree.all(jax.tree.map(same, targets, (params, opt)))
        again = learner.prepare(config(*words), POLICY, published())
        saved = learner.Saved(3, params, opt, None, {"optimizer_steps": 1})
        learner.resume(again, saved)
        jax.tree.map(np.testing.assert_array_equal, again.state, moved)


def test_scales_of_kinds_are_resumed_by_the_advantage_that_made_them():
    words = ("--config.grpo.advantage=tmn", "--config.grpo.scale_memory=0.9")
    learning = learner.prepare(config(*words), POLICY, published())
    assert learner.saved_data(learning) == {"scales": {"advantage": "tmn", "kinds": {}}}
    learning.scales = {"em": (0.1 + 0.2, 7.3)}
    told = json.loads(json.dumps(learner.saved_data(learning)))
    saved = learner.Saved(3, *learner.saved(learning), told, {"optimizer_steps": 1})
    for name, found in (("tmn", {"em": (0.1 + 0.2, 7.3)}), ("task_std", {}), ("grpo", {})):
        again = learner.prepare(
            config(*words, f"--config.grpo.advantage={name}"), POLICY, published()
        )
        learner.resume(again, saved)
        assert again.scales == found
    assert learner.saved_data(again) == {}, "it cannot act"


def test_the_rate_follows_the_share_of_informative_groups_or_is_left_alone():
    plan, _, _ = learner.settings_of(config())
    assert plan.rate_scale(0.25) == 0.5 and plan.rate_scale(0.7) == 1
    assert dataclasses.replace(plan, full_rate_at=0.0).rate_scale(0.0) == 1


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("rollout.top_p=0.95", "rollout.top_p is 0.95.*nucleus"),
        ("rollout.group_size=1", "group_size is 1.*at least 2"),
        ("grpo.minibatches=0", "grpo.minibatches is 0"),
        ("grpo.epochs=0", "grpo.epochs is 0"),
        ("grpo.scale_memory=1.0", "grpo.scale_memory is 1.0.*below 1"),
        ("grpo.full_rate_at=1.5", "grpo.full_rate_at is 1.5"),
        ("grpo.max_skipped=0", "grpo.max_skipped is 0"),
        ("grpo.advantage=drgrpo", "did you mean 'dr_grpo'"),
        ("grpo.clip_low=1.5", "clip range"),
        ("grpo.kl_weight=-1.0", "kl_weight is -1"),
        ("grpo.entropy_weight=-0.1", "entropy_weight is -0.1"),
        ("rollout.temperature=0.0", "temperature is 0"),
    ],
)
def test_what_cannot_work_is_refused_when_the_config_is_read(word, message):
    with pytest.raises(ValueError, match=message):
        learner.settings_of(config(f"--config.{word}"))


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("grpo.tis_cap=2", "grpo.tis_cap=2.0 weighs them by how likely they are; set it to 0.0"),
        ("grpo.ess_at=0.5", "grpo.ess_at=0.5 weighs them by how likely they are; set it to 0.0"),
        ("grpo.ratio=ppo_clip", "grpo.ratio=ppo_clip weighs .*; set it to likelihood"),
    ],
)
def test_a_teachers_turns_are_weighed_by_nothing_that_asks_how_likely_they_are(word, says):
    golongrl = keys.plain(config("--config.recipe=golongrl"))
    after = configuration.load("quickstart", ["--config.recipe=imitate"], golongrl)
    assert learner.settings_of(after)[1].tis_cap == 0
    with pytest.raises(ValueError, match=f"whose turns no policy of ours sampled, and {says}"):
        learner.settings_of(config("--config.recipe=imitate", f"--config.{word}"))


# ---------------------------------------------------------------- the entropy gate


GATE = ("--config.grpo.entropy_high=2.0", "--config.grpo.entropy_low=1.0")


@pytest.fixture
def gated(monkeypatch):
    """A learner whose forward pass says an entropy, and whose steps do nothing but be seen."""
    learning = learner.prepare(config(*GATE), POLICY, published())
    told = {"entropy": 3.0, "skipped": 0, "seen": []}

    def said(config, params, one, *how):
        return forward.Told(one.behaviour_logprobs, told["entropy"] * one.weights)

    def steps(config, optimizer, settings, state, frozen, batches, scale, moved):
        told.update(seen=batches, moved=moved, scale=scale)
        return state, {"update/skipped": told["skipped"], "update/optimizer_steps": len(batches)}

    monkeypatch.setattr(learner.forward, "told", said)
    monkeypatch.setattr(learner.update, "learn", steps)
    return learning, told


def groups(finish=types.Finish.STOP):
    """Two trajectories of one update of three tokens."""
    said = types.Completion(types.tokens([7, 8, 2]), np.zeros(3, np.float32), finish, 0)
    prompt = types.Prompt(types.tokens([5]), types.tokens([6]))
    turns = (types.Turn(types.TurnKind.UPDATE, 0, prompt, said),)
    reading = types.Reading("t", 0, turns, "", types.Status.ANSWERED)
    task = types.Task("t", "?", types.TextDocument(""), ("a",), "test", "em")
    members = tuple(types.Trajectory(reading, reward, {}) for reward in (1.0, 0.0))
    return [types.Group(task, members)]


def test_the_gate_shuts_stays_and_opens_with_what_each_rollout_says(gated):
    learning, told = gated
    assert learner.saved_data(learning) == {"entropy_gate": []}
    for entropy, tokens, shut in ((3.0, 3, 1), (1.5, 3, 1), (0.5, 6, 0), (1.5, 6, 0)):
        told["entropy"] = entropy
        metrics, _ = learner.learn(learning, groups(), 1.0, 0, NAMED)
        (one,) = told["seen"]
        assert (one.weights > 0).sum() == one.denominator == tokens
        assert metrics["entropy_gate/update_shut"] == shut
        assert metrics["entropy_gate/update"] == pytest.approx(entropy)
        assert learner.saved_data(learning) == {"entropy_gate": ["update"] * shut}


def test_rates_rise_and_fall_by_rollouts_however_many_updates_each_has(gated):
    """From 25 rollouts on in a line to half at 100; 50 is a third of the way."""
    learning, told = gated
    falls = config("--config.optimizer.decay=linear", "--config.optimizer.decay_to=0.5")
    learning.rate = learner.prepare(falls, POLICY, published()).rate
    for epochs in (1, 4):
        learning.plan = dataclasses.replace(learning.plan, epochs=epochs, entropy_high=0.0)
        for version, share in ((0, 1), (25, 1), (50, 5 / 6), (100, 0.5), (200, 0.5)):
            metrics, _ = learner.learn(learning, groups(), 1.0, version, NAMED)
            assert len(told["seen"]) == epochs and told["scale"] == pytest.approx(share)
            assert metrics["update/learning_rate"] == pytest.approx(2e-3 * share)


def test_where_the_policy_stands_before_the_first_step_is_told(gated):
    """On its own proximal logprobs, if there are some; else where the sampler was, once turns age.

    That is what the ratio of trajectories needs a pass for.
    """
    learning, told = gated
    for gate, version, moved in ((2.0, 1, False), (0.0, 0, False), (0.0, 1, True)):
        learning.plan = dataclasses.replace(learning.plan, entropy_high=gate)
        learner.learn(learning, groups(), 1.0, version, NAMED)
        assert told["moved"] == moved
        assert told["seen"][0].age.max() == version


@pytest.mark.parametrize("kl", ["", "loss", "reward"])
@pytest.mark.parametrize("gate", [0.0, 2.0])
def test_a_part_whose_turns_were_all_cut_is_no_step_and_a_run_goes_on(gated, gate, kl):
    learning, told = gated
    learning.plan = dataclasses.replace(
        learning.plan, mask_truncated=True, minibatches=2, entropy_high=gate,
        kl_weight=0.1 * bool(kl), kl_in=kl or "loss",
    )  # fmt: skip
    whole, cut = groups(), groups(types.Finish.LENGTH)
    metrics, tokens = learner.learn(learning, cut + whole, 1.0, 0, NAMED)
    assert len(told["seen"]) == metrics["update/optimizer_steps"] == 1 and tokens == 9
    assert metrics["task/test/advantage_share"] == 1
    assert [len(one) for one in learning.proximal] == [0, 0]  # of the first group, both turns
    metrics, tokens = learner.learn(learning, cut, 1.0, 0, NAMED)
    assert told["seen"] == [] and metrics["update/optimizer_steps"] == tokens == 0
    assert not set(metrics) & {"logprob_gap_mean", "entropy_gate/update", "update/effective_share"}


def test_a_rollout_that_is_skipped_leaves_the_gate_and_a_checkpoint_keeps_it(gated):
    learning, told = gated
    told["skipped"] = 1
    learner.learn(learning, groups(), 1.0, 0, NAMED)
    assert learning.gate == frozenset()
    told["skipped"] = 0
    learner.learn(learning, groups(), 1.0, 0, NAMED)
    data, saved = learner.saved_data(learning), learner.saved(learning)
    again = learner.prepare(config(*GATE), POLICY, published())
    learner.resume(again, learner.Saved(1, *saved, data, {"optimizer_steps": 0}))
    assert again.gate == learning.gate == {"update"}
    plain = learner.prepare(config(), POLICY, published())
    assert learner.saved_data(plain) == {}
