"""What a training run writes, in every precision and by every hand-off."""

import jax
import numpy as np
import pytest

from notepad_jax.checkpoint import lazy_arrays, restore
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.setup import builders
from notepad_jax.telemetry.metrics import read_metrics
from tests.runs import ROOT, WRITTEN, run


def test_a_run_writes_what_people_look_for(uninterrupted):
    names = {path.name for path in uninterrupted.iterdir()}
    assert {"config.json", *WRITTEN, "timings.jsonl"} <= names
    metrics = read_metrics(uninterrupted)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert m["rollout/prefix_tokens_saved"] > 5 * m["rollout/prefix_tokens"]
        assert 0 <= m["reward"] <= 1 and 4 <= m["groups/sampled"] <= 4 * m["groups/rounds"]
        kinds = {name.split("/")[2] for name in m if name.startswith("task/synthetic/")}
        assert sum(m[f"task/synthetic/{kind}/groups"] for kind in kinds) == m["groups/sampled"]
    learnt = [m for m in metrics if m["groups/kept"]]
    assert learnt, "no group carried a signal; choose another seed for this test"
    for m in learnt:
        assert m["logprob_gap_max"] < 2e-5  # the sampler reports what the trainer computes
        assert m["ratio_mean"] == pytest.approx(1, abs=1e-5) == m["ratio_effective"]
        assert m["rollout/age_max"] == 0 == m["clip_share_update"] == m["clip_share_answer"]
        shares = [value for name, value in m.items() if name.endswith("/advantage_share")]
        assert sum(shares) == pytest.approx(1) and 0 < m["advantage_share_update"] < 1
        assert m["update/prefix_tokens_saved"] > 0
        assert m["update/learning_rate"] == pytest.approx(2e-3)
    (events,) = (uninterrupted / "tensorboard").iterdir()
    for name in (b"update/learning_rate", b"reading/text_summary", b"**last memory**"):
        assert name in events.read_bytes()


def test_the_handoff_in_memory_gives_the_same_metrics(uninterrupted, tmp_path):
    run(tmp_path / "run", "--config.checkpoint.handoff=memory", "--config.checkpoint.every=4")
    assert read_metrics(tmp_path / "run") == read_metrics(uninterrupted)


def test_handoff_through_storage_needs_every_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="every is 2, but handoff='storage'"):
        run(tmp_path / "run", "--config.checkpoint.every=2")


@pytest.mark.slow
def test_a_kl_to_the_starting_policy_is_measured(tmp_path):
    metrics = run(tmp_path / "run", "--config.grpo.kl_weight=0.1", "--config.steps=3")
    assert [m["kl"] for m in metrics if m["groups/kept"]][-1] > 0


@pytest.mark.slow
def test_the_engine_may_keep_its_weights_in_bfloat16(tmp_path):
    """Half the bytes, other roundings: the gap to the trainer grows, and is reported."""
    metrics = run(
        tmp_path / "run", "--config.steps=2", "--config.checkpoint.rollout_dtype=bfloat16"
    )
    gaps = [m["logprob_gap_max"] for m in metrics if m["groups/kept"]]
    assert gaps and 1e-4 < max(gaps) < 0.5
    known = "use one of 'float32', 'bfloat16', 'int8'"
    with pytest.raises(ValueError, match=f"rollout_dtype is 'int4'; {known}"):
        run(tmp_path / "other", "--config.checkpoint.rollout_dtype=int4")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The starter as models are published: bfloat16, in its files and in config.json."""
    policy = builders.load_policy(ROOT / "data" / "starter")
    folder = tmp_path_factory.mktemp("published") / "hf"
    beside = huggingface.companions(policy.folder)
    huggingface.export(policy.config, policy.params, folder, "bfloat16", beside)
    return folder


@pytest.mark.slow
def test_a_published_bfloat16_policy_trains_at_the_published_rate(published, tmp_path):
    words = (
        f"--config.policy={published}",
        "--config.dtype=bfloat16",
        "--config.optimizer.kind=adamw",
        "--config.optimizer.learning_rate=1e-6",
        "--config.checkpoint.handoff=memory",
    )
    metrics = run(tmp_path / "run", *words)
    learnt = [m for m in metrics if m["groups/kept"]]
    assert learnt, "no group carried a signal; choose another seed for this test"
    for m in learnt:
        assert m["update/learning_rate"] == pytest.approx(1e-6)
        assert m["update/changed_share"] > 0.5  # what no completion saw gets no gradient
        assert m["update/applied_over_asked"] == pytest.approx(1, abs=0.05)
        assert m["logprob_gap_max"] < 0.3  # sampler and trainer: the same bits, other sums
    step = tmp_path / "run" / "checkpoints" / "4"
    kinds = {leaf.dtype for leaf in jax.tree.leaves(restore.as_stored(step.parent, 4))}
    assert kinds == {np.dtype("float32")}  # masters, not what the engine computes with


INT8 = "--config.checkpoint.rollout_dtype=int8"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("int8") / "run"
    run(folder, "--config.steps=2", INT8)
    return folder


@pytest.mark.slow
def test_the_engine_may_keep_its_weights_in_int8(quantised):
    """A coarser sampler still: the gap is what the importance ratio corrects, and is reported."""
    metrics = [m for m in read_metrics(quantised) if m["groups/kept"]]
    assert metrics, "no group carried a signal; choose another seed for this test"
    assert all(1e-3 < m["logprob_gap_max"] < 0.3 for m in metrics)
    assert all(m["ratio_mean"] == pytest.approx(1, abs=0.05) for m in metrics)


@pytest.mark.slow
def test_int8_weights_are_the_same_by_memory_by_storage_and_after_resuming(quantised, tmp_path):
    """Checkpoints hold what the trainer holds, and quantising is a function of it."""
    whole = read_metrics(quantised)
    words = ("--config.steps=2", INT8, "--config.checkpoint.handoff=memory")
    assert run(tmp_path / "memory", *words) == whole
    run(tmp_path / "half", "--config.steps=1", INT8)
    assert run(tmp_path / "half", "--config.steps=2", INT8, resume=True) == whole


@pytest.mark.slow
def test_adapters_train_resume_and_are_saved_beside_their_base(tmp_path):
    """The base is saved once, the adapters move, and a run cut in two is the whole run, whichever
    way its policies go to the engine."""
    words = (
        "--config.grpo.lora.rank=4",
        "--config.optimizer.kind=adamw",
        "--config.grpo.minibatches=2",  # and several optimizer steps a rollout
        "--config.grpo.epochs=2",
    )
    whole = run(tmp_path / "whole", *words)
    learnt = [m for m in whole if m["groups/kept"] > 1]
    assert learnt and all(m["update/optimizer_steps"] == 4 for m in learnt)
    assert max(m["ratio_max"] for m in learnt) > 1  # later steps move off the proximal policy
    assert any(m.get("update_norm", 0) > 0 for m in whole)
    assert all(m["logprob_gap_max"] < 2e-5 for m in whole if m["groups/kept"])
    first = min(i for i, m in enumerate(whole) if m["groups/kept"])  # nothing was learnt before
    assert not any("rollout/delta_seen" in m for m in whole[: first + 1])
    assert all(m["rollout/delta_seen"] == 1 for m in whole[first + 1 :])
    folder = tmp_path / "whole" / "checkpoints"
    own = set(lazy_arrays.open_tree(folder / str(len(whole)))["layers"])
    base = set(restore.as_stored(folder / "base", 0)["layers"])
    assert own and all("_lora_" in name for name in own) and not own & base
    assert set(restore.as_stored(folder, len(whole))["layers"]) == own | base
    in_memory = (*words, "--config.checkpoint.handoff=memory", "--config.engine.give_back=true")
    run(tmp_path / "half", *in_memory, "--config.steps=2")
    assert run(tmp_path / "half", *in_memory, resume=True) == whole
    with pytest.raises(ValueError, match="lora.targets has 'x'"):
        run(tmp_path / "bad", *words, '--config.grpo.lora.targets=("x",)')


@pytest.mark.slow
def test_updates_that_are_not_finite_stop_the_run_at_the_last_good_step(tmp_path):
    words = ("--config.optimizer.kind=adamw", "--config.optimizer.learning_rate=1e38",
             "--config.engine.give_back=true")  # fmt: skip
    message = r"last 2 rollouts was finite.*grpo.max_skipped is 2.*last good step is \d+, kept"
    with pytest.raises(ValueError, match=message) as stopped:
        run(tmp_path / "run", *words, "--config.grpo.max_skipped=2", "--config.steps=30")
    good = int(str(stopped.value).partition("step is ")[2].partition(",")[0])
    metrics = read_metrics(tmp_path / "run")
    assert [m["step"] for m in metrics if m.get("update/skipped")] == [good + 1, good + 2]
    steps = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdigit()]
    assert max(steps) == good  # nothing newer hides it
    went_on = run(tmp_path / "run", words[0], f"--config.steps={good + 2}", resume=True)
    assert [m["step"] for m in went_on] == list(range(1, good + 3))
    assert not any(m.get("update/skipped", 0) for m in went_on)
