import dataclasses

import numpy as np
import pytest

from notepad_jax import types
from notepad_jax.grpo import advantages
from notepad_jax.grpo.batch import pack, proximal_of, with_advantages


def packed(groups, row_length=64, **options):
    return pack(groups, advantages.of_groups("dr_grpo", groups), row_length, **options)


def seen_by(batch, row, i):
    """The columns that token i of a row sees, by the definition of kv_end."""
    j = np.arange(i + 1)
    return j[i < batch.kv_end[row, : i + 1]]


def test_a_bundle_by_hand(make):
    shared = [10, 11, 12]
    first = make["turn"](shared, [20], [30, 2], [-1, -2])
    second = make["turn"](shared, [21, 22], [0, 31, 2], [-3, -4, -5], types.TurnKind.ANSWER)
    got = packed([make["group"]([[first], [second]], [1.0, 0.0])], 16, length_multiple=4)
    batch = got.batch
    np.testing.assert_array_equal(batch.tokens, [[10, 11, 12, 20, 30, 2, 21, 22, 0, 31, 2, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 0]])
    np.testing.assert_array_equal(batch.kv_end, [[11, 11, 11, 6, 6, 6, 11, 11, 11, 11, 11, 12]])
    np.testing.assert_array_equal(batch.weights, [[0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.update_turn, [[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]])
    h = 0.5
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0, 0, h, h, 0, 0, -h, -h, -h, 0]])
    np.testing.assert_array_equal(
        batch.behaviour_logprobs, [[0, 0, 0, 0, -1, -2, 0, 0, -3, -4, -5, 0]]
    )
    np.testing.assert_array_equal(batch.reference_logprobs, batch.behaviour_logprobs)
    np.testing.assert_array_equal(batch.proximal_logprobs, batch.behaviour_logprobs)
    n = -1
    np.testing.assert_array_equal(batch.turn, [[n, n, n, n, 0, 0, n, n, 1, 1, 1, n]])
    np.testing.assert_array_equal(batch.trajectory, batch.turn)
    np.testing.assert_array_equal(batch.prompt, [[n, n, n, n, 0, 0, n, n, 0, 0, 0, n]])
    assert batch.denominator == 5
    stats = got.stats
    assert (stats.turn_tokens, stats.packed_tokens, stats.prefix_tokens_saved) == (14, 11, 3)
    assert (stats.loss_tokens, stats.turns, stats.rows, stats.row_length) == (5, 2, 1, 12)
    assert stats.fill == 11 / 12
    r = np.arange(12)
    seen = (r[None] <= r[:, None]) & (r[:, None] < batch.kv_end[0][None])
    assert stats.pairs == seen[:11].sum()  # and padding's own is not in it


def test_each_turn_has_an_advantage_of_its_own_by_hand(make):
    """Two turns of one trajectory behind the same chunk, worth 2 and -3; one of another, worth 5.

    A number is that of all turns.
    """
    turns = [make["turn"]([10], [20 + k], [30 + k, 2]) for k in range(3)]
    one = make["group"]([turns[:2], turns[2:]], [1.0, 0.0])
    got = pack([one], [[np.array([2.0, -3.0]), 5.0]], 16, length_multiple=1).batch
    np.testing.assert_array_equal(got.tokens, [[10, 20, 30, 2, 21, 31, 2, 22, 32, 2]])
    np.testing.assert_array_equal(got.advantages, [[0, 0, 2, 2, 0, -3, -3, 0, 5, 5]])
    with pytest.raises(ValueError, match="shape"):  # of two turns
        pack([one], [[np.array([2.0, -3.0, 1.0]), 5.0]], 16)


def test_a_trajectory_s_advantage_is_the_case_where_its_turns_have_the_same(make):
    groups = make["random_groups"](4)
    plain = advantages.of_groups("dr_grpo", groups)
    turns = [advantages.of_turns(*pair) for pair in zip(groups, plain, strict=True)]
    one, other = pack(groups, plain, 384).batch, pack(groups, turns, 384).batch
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_every_token_has_its_turn_s_advantage_wherever_it_lies(make, mask_truncated):
    """Also after they were exchanged, and where turns that were cut are left out."""
    rng, groups = np.random.default_rng(1), make["random_groups"](6)
    groups[0] = cut_some(groups[0])
    draw = lambda: [[rng.normal(size=len(m.turns)) for m in g.trajectories] for g in groups]  # noqa: E731
    first, second = draw(), draw()
    for length, share in ((64, True), (384, True), (64, False)):
        got = pack(groups, first, length, share, mask_truncated=mask_truncated).batch
        after = with_advantages(got, groups, second, mask_truncated)
        for one, values in ((got, first), (after, second)):
            expected = [
                (turn.completion.tokens.tolist(), np.float32(value))
                for group, its in zip(groups, values, strict=True)
                for member, own in zip(group.trajectories, its, strict=True)
                for turn, cut, value in zip(member.turns, member.reading.cut, own, strict=True)
                if not (mask_truncated and cut)
            ]
            for number, (ids, value) in enumerate(expected):
                here = one.turn == number
                assert one.tokens[here].tolist() == ids and set(one.advantages[here]) == {value}
            assert one.turn.max() == len(expected) - 1 and not one.advantages[one.turn < 0].any()


def cut_some(group):
    """The group with the first update of every second member cut at its limit."""
    changed = []
    for k, member in enumerate(group.trajectories):
        first, *rest = member.turns
        finish = types.Finish.LENGTH if k % 2 else types.Finish.STOP
        first = dataclasses.replace(
            first, completion=dataclasses.replace(first.completion, finish=finish)
        )
        reading = dataclasses.replace(member.reading, turns=(first, *rest))
        changed.append(dataclasses.replace(member, reading=reading))
    return dataclasses.replace(group, trajectories=tuple(changed))


def test_what_prompts_begin_with_is_written_once_by_hand(make):
    """A tree: question 5 6, then memory 7 of two members and 8 of one, then the cue 9.

    Tails in order are 5 6 7 9 (twice) and 5 6 8 9: the second has 3 tokens in common with the
    first, its last one being its own, and the third has 2 with the second.
    """
    turns = [make["turn"]([1], [5, 6, m, 9], [c, 2]) for m, c in ((7, 30), (8, 31), (7, 32))]
    got = packed([make["group"]([[t] for t in turns], [1.0, 0.0, 0.0])], 16, length_multiple=1)
    batch = got.batch
    np.testing.assert_array_equal(
        batch.tokens, [[1, 5, 6, 7, 9, 30, 2, 9, 32, 2, 8, 9, 31, 2]]
    )  # fmt: skip
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 3, 4, 5, 6]])
    np.testing.assert_array_equal(
        batch.kv_end, [[14, 14, 14, 10, 7, 7, 7, 10, 10, 10, 14, 14, 14, 14]]
    )
    n = -1
    np.testing.assert_array_equal(batch.turn, [[n, n, n, n, n, 0, 0, n, 2, 2, n, n, 1, 1]])
    assert (got.stats.turn_tokens, got.stats.packed_tokens) == (21, 14)


def _sizes(ids):
    """Tokens of each id 0, 1, ...; every id occurs, and -1 is nobody's."""
    return np.bincount(ids[ids >= 0]).tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("row_length", [35, 64, 200])
@pytest.mark.parametrize("seed", range(4))
def test_every_trained_token_sees_exactly_its_own_turn(make, seed, row_length, share):
    groups = make["random_groups"](seed, groups=3, samples=5, alike=seed % 2 == 1)
    batch = packed(groups, row_length, share_prefixes=share, rows_multiple=4).batch
    wanted = sorted(
        (tuple(t.prompt.tokens) + tuple(t.completion.tokens[: n + 1]), np.float32(a),
         t.completion.behaviour_logprobs[n], t.kind is types.TurnKind.UPDATE)
        for g, advantage in zip(groups, advantages.of_groups("dr_grpo", groups), strict=True)
        for trajectory, a in zip(g.trajectories, advantage, strict=True)
        for t in trajectory.turns
        for n in range(len(t.completion.tokens))
    )  # fmt: skip
    found = []
    for row, i in zip(*np.nonzero(batch.weights), strict=True):
        columns = seen_by(batch, row, i)
        np.testing.assert_array_equal(batch.positions[row, columns], np.arange(len(columns)))
        # the hidden state that predicts token i is that of i - 1, in the same context
        np.testing.assert_array_equal(seen_by(batch, row, i - 1), columns[:-1])
        where = (row, i)
        values = (batch.advantages[where], batch.behaviour_logprobs[where])
        found.append((tuple(batch.tokens[row, columns]), *values, batch.update_turn[where] == 1))
    assert sorted(found) == wanted
    sizes = {name: _sizes(getattr(batch, name)) for name in ("turn", "trajectory", "prompt")}
    told = [[t.turns for t in g.trajectories] for g in groups]
    length = lambda turns: sum(len(t.completion.tokens) for t in turns)  # noqa: E731
    assert sizes["turn"] == [length([t]) for g in told for turns in g for t in turns]
    assert sizes["trajectory"] == [length(turns) for g in told for turns in g]
    assert sizes["prompt"] == [sum(map(length, g)) for g in told]
    assert batch.tokens.shape[0] % 4 == 0
    assert (batch.kv_end > np.arange(batch.tokens.shape[1])).all()
    assert batch.kv_end.max() <= batch.tokens.shape[1]


@pytest.mark.parametrize("row_length, share", [(35, True), (200, True), (64, False)])
def test_what_the_trainer_computed_is_given_back_by_turn(make, row_length, share):
    groups = make["random_groups"](3, groups=3, samples=5)
    one = packed(groups, row_length, share_prefixes=share).batch
    one = dataclasses.replace(one, proximal_logprobs=one.proximal_logprobs - 1)
    for first in (groups[:1], groups):
        turns = [turn for group in first for t in group.trajectories for turn in t.turns]
        for found, turn in zip(proximal_of(one, first, False), turns, strict=True):
            np.testing.assert_array_equal(found, turn.completion.behaviour_logprobs - 1)


def test_of_a_turn_that_teaches_nothing_the_trainer_computed_nothing(make):
    cut = make["turn"]([10], [20], [30, 31], [-1, -2])
    cut = dataclasses.replace(
        cut, completion=dataclasses.replace(cut.completion, finish=types.Finish.LENGTH)
    )
    other = make["turn"]([10], [21], [31, 2], [-3, -4])
    groups = [make["group"]([[cut], [other]], [1.0, 0.0])]
    one = packed(groups, mask_truncated=True).batch
    found = [logprobs.tolist() for logprobs in proximal_of(one, groups, True)]
    assert found == [[], [-3, -4]]


def test_equal_prefixes_are_found_across_turns_and_groups_by_content(make):
    a = make["group"]([[make["turn"]([7, 8], [1], [2])] * 2] * 2, [1.0, 0.0])
    b = make["group"]([[make["turn"](np.array([7, 8]), [1], [2])] * 3] * 2, [1.0, 0.0])
    stats = packed([a, b]).stats
    assert stats.turns == 10
    assert stats.prefix_tokens_saved == 9 * 2


def test_a_bundle_longer_than_a_row_is_split_and_its_prefix_repeated(make):
    turns = [[make["turn"](np.arange(10), [1], [5, 2])] for _ in range(8)]  # 10 + 8 * 3
    got = packed([make["group"](turns, [1.0, 0.0] * 4)], 22, length_multiple=2)
    assert got.batch.tokens.shape == (2, 22)
    assert got.stats.packed_tokens == 2 * (10 + 4 * 3)
    assert got.stats.loss_tokens == 16


def test_what_a_cut_bundles_tails_begin_with_is_repeated_too(make):
    turns = [[make["turn"]([1, 2], [3, 4, 5, 6], [7, 2])] for _ in range(6)]  # 2 + 3 + 6 * 3
    got = packed([make["group"](turns, [1.0, 0.0] * 3)], 14, length_multiple=2)
    assert got.batch.tokens.shape == (2, 14)
    assert got.stats.packed_tokens == 2 * (2 + 3 + 3 * 3)


def test_what_has_a_short_prefix_fills_the_rows_of_others(make):
    """Two chunks of 10 with two tails of 3 each, and 14 answers of 2 behind a 1.

    Together the answers are longer than a chunk and its tails, and still come last.
    """
    chunks = [make["turn"](np.arange(k, k + 10), [1], [5, 2]) for k in (0, 20)]
    answers = [make["turn"]([60], [k], [2]) for k in range(30, 37)]
    groups = [make["group"]([[turn], [turn]], [1.0, 0.0]) for turn in (*chunks, *answers)]
    got = packed(groups, 31, length_multiple=1)
    assert got.batch.tokens.shape == (2, 31) and got.stats.packed_tokens == 2 * 16 + 2 * 15


def test_a_turn_that_fits_no_row_names_both_numbers(make):
    long = make["turn"](np.arange(10), [1] * 5, [2] * 6)
    with pytest.raises(ValueError, match=r"21 tokens .* row of 20.*at least 21"):
        packed([make["group"]([[long], [long]], [1.0, 0.0])], 20)


def test_logprobs_that_do_not_match_the_tokens_are_an_error(make):
    wrong = make["turn"]([1], [2], [3, 4], [-1.0])
    with pytest.raises(ValueError, match="1 behaviour logprobs for 2"):
        packed([make["group"]([[wrong], [wrong]], [1.0, 0.0])])


def test_empty_completions_are_left_out_and_counted(make):
    turns = [make["turn"]([1], [2], [3]), make["turn"]([1], [2], [])]
    stats = packed([make["group"]([turns, turns], [1.0, 0.0])]).stats
    assert (stats.turns, stats.empty_turns, stats.loss_tokens) == (2, 2, 2)
    with pytest.raises(ValueError, match="nothing to learn from"):
        packed([make["group"]([turns[1:], turns[1:]], [1.0, 0.0])])


def test_padding_rows_hold_nothing(make):
    batch = packed(make["random_groups"](0, groups=1), 200, rows_multiple=8).batch
    empty = batch.weights.sum(axis=1) == 0
    assert batch.tokens.shape[0] == 8 and empty.sum() == 7
    width = batch.tokens.shape[1]
    np.testing.assert_array_equal(batch.kv_end[empty], np.tile(np.arange(1, width + 1), (7, 1)))
    assert not batch.advantages[empty].any() and not batch.tokens[empty].any()


def test_row_length_is_rounded_up_but_never_over_the_bound(make):
    groups = make["random_groups"](0, groups=1)
    longest = packed(groups, 1000, length_multiple=1).batch.tokens.shape[1]
    assert packed(groups, 1000).batch.tokens.shape[1] == -(-longest // 128) * 128
    assert packed(groups, longest).batch.tokens.shape[1] == longest


def test_the_same_groups_pack_the_same_way(make):
    a, b = (packed(make["random_groups"](3), 64).batch for _ in range(2))
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name))


def test_dtypes_and_shapes(make):
    batch = packed(make["random_groups"](0), 64).batch
    whole_numbers = {"tokens", "positions", "kv_end", "turn", "trajectory", "prompt", "age"}
    for field in dataclasses.fields(batch):
        if field.name == "denominator":
            continue
        array = getattr(batch, field.name)
        whole = field.name in whole_numbers
        assert array.dtype == (np.int32 if whole else np.float32), field.name
        assert array.shape == batch.tokens.shape


def test_a_step_of_160_readings_fills_its_rows(make):
    groups = make["random_groups"](0, groups=20, samples=8, turns=8, prefix=(250, 260))
    advantage = advantages.of_groups("dr_grpo", groups)
    got = pack(groups, advantage, 1024)
    assert got.stats.turns == 160 * 9
    assert got.stats.fill > 0.7
