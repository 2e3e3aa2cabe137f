"""Choices put together: parts, KL off the reward, the effective share, what is refused or idle."""

import dataclasses

import numpy as np
import pytest

from notepad_jax.grpo import advantages, algorithm, ratios, shares
from notepad_jax.grpo.algorithm import Algorithm
from notepad_jax.grpo.ratios import Limits
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.setup import configuration

HOW = Algorithm(
    advantage="dr_grpo", normaliser="token_mean", constant=0.0, mask_truncated=False, kl_weight=0.0,
    kl_in="loss", minibatches=1, epochs=1, row_length=384, full_rate_at=0.0, ess_at=0.0,
    entropy_high=0.0, entropy_low=0.0, max_skipped=3, local_weight=0.5, scale_memory=0.0,
    memory_weight=1.0,
)  # fmt: skip
SETTINGS = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.0,
    entropy_weight=0.0, temperature=1.0, micro_batch_rows=1, remat=False,
)  # fmt: skip


def having(**changed):
    mine = {name: value for name, value in changed.items() if hasattr(HOW, name)}
    theirs = {name: value for name, value in changed.items() if name not in mine}
    return dataclasses.replace(HOW, **mine), dataclasses.replace(SETTINGS, **theirs)


def never(one):
    pytest.fail("nobody needs these logprobs")


def test_groups_are_cut_in_order_into_parts_of_nearly_one_size():
    cut = lambda count, parts: [(s.start, s.stop) for s in algorithm.parts_of(count, parts)]  # noqa: E731
    assert cut(5, 2) == [(0, 2), (2, 5)]
    assert cut(3, 16) == [(0, 1), (1, 2), (2, 3)]
    assert cut(8, 1) == [(0, 8)]


def test_logprobs_are_computed_once_a_part_and_only_where_they_are_needed(make):
    groups = make["random_groups"](3, groups=3)
    made, stats = algorithm.batches(*having(), groups, never, never)
    assert len(made) == len(stats) == 1
    seen = []

    def now(one):
        seen.append(one)
        return one.weights * -3

    for changed in (dict(minibatches=3), dict(minibatches=3, epochs=2), dict(tis_cap=2.0)):
        seen.clear()
        made, _ = algorithm.batches(*having(**changed), groups, now, never)
        assert len(made) == len(seen) == changed.get("minibatches", 1)
        assert all((one.proximal_logprobs == one.weights * -3).all() for one in made)


def test_a_part_s_advantages_come_from_the_whole_batch(make):
    groups = make["random_groups"](3, groups=2)
    louder = [dataclasses.replace(one, judged=9 * one.judged) for one in groups[0].trajectories]
    groups[0] = dataclasses.replace(groups[0], trajectories=tuple(louder))
    made, _ = algorithm.batches(
        *having(advantage="batch_std", minibatches=2), groups, lambda one: one.weights, never
    )
    expected = advantages.of_groups("batch_std", groups)
    for one, values in zip(made, expected, strict=True):
        assert set(one.advantages[one.weights > 0]) == set(values.astype(np.float32))


def test_kl_off_the_reward_moves_advantages_by_hand(make):
    """Two trajectories of 2 and 3 tokens, each token 0.5 above the reference: k1 is 1 and 1.5."""
    turn = make["turn"]
    group = make["group"]([[turn([5], [6], [7, 2])], [turn([5], [6], [7, 8, 2])]], [1.0, 0.0])
    how, settings = having(kl_in="reward", kl_weight=0.1, kl="k1")
    (one,), _ = algorithm.batches(
        how, settings, [group], never, lambda one: one.proximal_logprobs - 0.5 * one.weights
    )
    first, second = 1 - 0.1 * 1.0, 0 - 0.1 * 1.5
    expected = {0: (first - second) / 2, 1: (second - first) / 2}
    for number, value in expected.items():
        np.testing.assert_allclose(one.advantages[one.trajectory == number], value, rtol=1e-5)
    assert not one.advantages[one.trajectory < 0].any()


def test_the_effective_share_counts_turns_by_their_weights(make):
    """Weights of 1, 1, 1, 1 are 4 of 4; of 3, 1, 0, 0 they are 16 / 10 of 4."""
    turn = make["turn"]
    groups = [make["group"]([[turn([5], [6], [7, 2])] for _ in range(4)], [1.0, 0, 0, 0])]
    made = lambda off: algorithm.batches(  # noqa: E731
        *having(ess_at=0.5), groups,
        lambda one: one.behaviour_logprobs + one.weights * np.asarray(off)[one.turn] / 2, never,
    )[0]  # fmt: skip
    assert shares.effective_share(made([0.3] * 4)) == pytest.approx(1)
    share = shares.effective_share(made([np.log(3), 0, -15, -15]))
    assert share == pytest.approx(0.4, rel=1e-4)
    how, _ = having(ess_at=0.5)
    assert how.rate_scale(1.0, share) == pytest.approx(0.8**0.5, rel=1e-4)
    assert how.rate_scale(1.0, 0.7) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(normaliser="tokenmean"), "did you mean 'token_mean'"),
        (dict(normaliser="constant"), "grpo.constant is 0"),
        (dict(kl_in="both"), "use 'loss' or 'reward'"),
        (dict(ratio="gppo"), "did you mean 'gspo'"),
        (dict(kl="k4"), "no estimate of KL"),
        (dict(cap=0.5), "cap is 0.5"),
        (dict(tis_cap=0.5), "tis_cap is 0.5"),
        (dict(tis_cap=5.0, tis_low=2.0), "grpo.tis_low is 2.0; it must be 0 .off. or at most 1"),
        (dict(tis_veto=1e-4), "grpo.tis_veto is 0.0001 and grpo.tis_cap 0, which corrects nothing"),
        (dict(dual_clip=1.1), "dual_clip > 1 . clip_high, or 0 for none"),
        (dict(proximal="kept"), "use 'recomputed' or 'interpolated'"),
        (dict(entropy_high=1.0), "need 0 < entropy_low <= entropy_high"),
        (dict(entropy_high=1.0, entropy_low=1.5), "entropy_low 1.5"),
    ],
)
def test_what_is_no_choice_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        having(**changed)


def test_what_does_not_go_together_is_told_with_the_reason():
    (said,) = algorithm.problems(*having(kl="k1", kl_weight=0.1))
    assert "pulls nowhere" in said
    assert not list(algorithm.problems(*having(kl="k1", kl_weight=0.1, kl_in="reward")))
    gate = dict(entropy_high=1.0, entropy_low=0.5)
    for changed, key in (
        (dict(ess_at=0.5), "grpo.ess_at"),
        (gate, "grpo.entropy_high"),
        (dict(ratio="gspo_trajectory"), "grpo.ratio='gspo_trajectory'"),
    ):
        (said,) = algorithm.problems(*having(proximal="interpolated", **changed))
        assert key in said and "'recomputed'" in said
        assert not list(algorithm.problems(*having(**changed)))
    assert not list(algorithm.problems(*having(proximal="interpolated", tis_cap=2.0)))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        (dict(ratio="gspo"), "'gspo' cannot act: with one optimizer step"),
        (dict(clip_high=0.28), "clip_low=0.2, clip_high=0.28 cannot act: with one optimizer step"),
        (dict(clip_high=0.28, epochs=2), None),
        (dict(ratio="gspo", minibatches=4), None),
        (dict(ratio="gspo_trajectory"), "'gspo_trajectory' cannot act"),
        # A correction's denominator is the policy itself: the ratio is 1, however old the turns.
        (dict(ratio="cispo", tis_cap=2.0), "'cispo' cannot act"),
        (dict(ratio="cispo", tis_cap=2.0, minibatches=2), None),
        (dict(ratio="cispo", cap=8.0, minibatches=2), None),
        (dict(ratio="cispo", clip_high=0.28, minibatches=2), "grpo.clip_high cannot act"),
        (dict(ratio="gspo", clip_low=3e-4, tis_cap=2.0, minibatches=2), None),
        (dict(ratio="gspo", dual_clip=9.0, minibatches=2), None),
        (dict(ratio="cispo", dual_clip=9.0, minibatches=2), "'cispo' does not look at it"),
        (dict(tis_cap=5.0, tis_low=0.5, tis_veto=1e-4, off_policy_at=0.1), None),
        (dict(cap=8.0), "grpo.cap cannot act: grpo.ratio='ppo_clip' does not look at it"),
        (dict(proximal="interpolated"), "every turn is the newest policy's"),
        (dict(entropy_low=0.5), "grpo.entropy_low cannot act"),
        (dict(entropy_high=1.0, entropy_low=0.5), None),
        (dict(kl_in="reward"), "kl_weight is 0"),
        (dict(constant=100.0), "grpo.constant cannot act"),
        (dict(scale_memory=0.9), "scale_memory cannot act: grpo.advantage='dr_grpo' has no scale"),
        (dict(scale_memory=0.9, advantage="tmn"), None),
    ],
)
def test_what_cannot_act_says_so(changed, says):
    said = list(algorithm.idle(*having(**changed)))
    assert (says in said[0]) if says else not said


def test_the_usual_limits_are_those_of_the_configs():
    grpo = configuration.load("quickstart").grpo
    assert ratios.USUAL._asdict() == {name: getattr(grpo, name) for name in Limits._fields}
    assert set(ratios.LOOKS_AT) == set(ratios.RATIOS)


def test_what_old_turns_let_act():
    idle = lambda stale, **changed: list(algorithm.idle(*having(**changed), stale))  # noqa: E731
    assert not idle(1, ratio="gspo") and not idle(1, proximal="interpolated")
    assert idle(1, ratio="gspo", tis_cap=2.0) and idle(1, ratio="gspo", proximal="interpolated")


def test_forward_passes_are_counted_for_the_plan():
    passes = lambda parts=1, **changed: having(**changed)[0].forwards(having(**changed)[1], parts)  # noqa: E731
    assert passes() == 0 and passes(tis_cap=2.0, kl_weight=0.1) == 2
    assert passes(4, minibatches=4, epochs=2) == 4
    assert passes(4, minibatches=4, epochs=2, ratio="gspo_trajectory") == 4 + 7
    assert passes(4, minibatches=4, epochs=2, proximal="interpolated") == 0


def test_a_scale_by_kind_says_where_there_is_one_kind(make):
    groups = make["random_groups"](3)
    (said,) = algorithm.idle_on("tmn", groups)
    assert "one kind here (em)" in said
    assert not list(algorithm.idle_on("dr_grpo", groups))
