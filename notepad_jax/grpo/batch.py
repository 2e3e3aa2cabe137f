"""Sequence packing (bridge two): groups of trajectories in, a `TrainBatch` of packed rows out.

Every turn is an independent context, and turns whose `Prompt.shared` is equal (members of
a group, or several questions about one document) share its tokens: they become one bundle. In
it they lie in the order of their tails, so that what two prompts begin with (a question, and
often the memory of a group's members) is written once, too. `packing` (below) puts bundles into
rows, so that the loss is exactly that of one row per turn. This file gathers the bundles, and
writes beside the packed tokens what belongs to each completion token: its weight, advantage,
logprobs, and which turn, trajectory and prompt it is of. Host code, numpy only, run once per
optimizer step. Above: `update` consumes the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax import packing
from notepad_jax.grpo import normalisers
from notepad_jax.grpo.normalisers import Normaliser
from notepad_jax.packing import PrefixWithTails
from notepad_jax.types import Group, TrainBatch, Turn, TurnKind


@dataclasses.dataclass(frozen=True)
class PackingStats:
    """Counts of one packed batch; tokens unless said otherwise."""

    turns: int
    empty_turns: int  # left out: without a completion token, or truncated where these are masked
    turn_tokens: int  # prompts and completions as if nothing were shared
    packed_tokens: int  # what the rows hold
    pairs: int  # (query, key) pairs that attention meets in them, padding's left out
    loss_tokens: int  # completion tokens
    rows: int  # padding rows included
    row_length: int

    @property
    def prefix_tokens_saved(self) -> int:
        return self.turn_tokens - self.packed_tokens

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold a token."""
        return self.packed_tokens / (self.rows * self.row_length)


@dataclasses.dataclass(frozen=True, eq=False)
class PackedBatch:
    batch: TrainBatch
    stats: PackingStats


# Of a group: for each trajectory what its turns have, [turns], or a number that is all of theirs.
Advantages = Sequence[np.ndarray | float]


class _Turn(NamedTuple):
    """One turn that has a completion, and whose it is."""

    turn: Turn
    advantage: float
    number: int  # of the turn, in the batch
    trajectory: int
    prompt: int  # of the task: members of a group share it


def pack(
    groups: Sequence[Group],
    advantages: Sequence[Advantages],
    row_length: int,
    share_prefixes: bool = True,
    rows_multiple: int = 1,
    length_multiple: int = 128,
    normaliser: Normaliser = normalisers.token_mean,
    constant: float = 1.0,
    mask_truncated: bool = False,
    version: int | None = None,
) -> PackedBatch:
    """Packs all turns of all trajectories; the order of rows is a function of the input alone.

    Args:
      groups: trajectories, any number of turns each.
      advantages: for each group, one per turn of each trajectory (`Advantages`).
      row_length: the most tokens a row may hold. The array's T is the fullest row's
        length rounded up to `length_multiple`, but never more than `row_length`.
      share_prefixes: False stores every prompt whole (for tests and benchmarks).
      rows_multiple: B is rounded up to a multiple of this with rows of padding.
      normaliser: weights of the completion tokens, and the batch's denominator.
      constant: of the normaliser `constant`, completion tokens of a trajectory.
      mask_truncated: leave out turns that were cut at their limit (`Reading.cut`: not those that
        another context goes on from), as if they had never been sampled.
      version: of the policy that will learn; None: each turn's own, all are of age 0.

    Raises:
      ValueError: a turn is longer than a row, a completion's logprobs do not match its
        tokens, or there is not one completion token to learn from.
    """
    turns = list(_learnable(groups, advantages, mask_truncated))
    if not turns:
        raise ValueError(
            f"{len(groups)} groups hold not one completion token; there is nothing to learn from"
        )
    bundles = _bundles(turns, share_prefixes)
    common = [_in_common(members) for members in bundles]
    prefixes = [len(members[0].turn.prompt.shared) for members in bundles]
    lengths = [[_private(member.turn) for member in members] for members in bundles]
    rows = packing.first_fit(prefixes, lengths, row_length, common)
    placed = [member for row in rows for b, i, j in row for member in bundles[b][i:j]]
    pieces = [[_piece(bundles[b][i:j], common[b][i:j]) for b, i, j in row] for row in rows]
    fullest = max(sum(piece.tokens for piece in row) for row in pieces)
    width = min(row_length, -(-fullest // length_multiple) * length_multiple)
    height = -(-len(rows) // rows_multiple) * rows_multiple
    written = packing.lay_out(pieces, height, width)
    stats = PackingStats(
        turns=len(turns),
        empty_turns=sum(len(t.turns) for g in groups for t in g.trajectories) - len(turns),
        turn_tokens=sum(len(t.turn.prompt.shared) + _private(t.turn) for t in turns),
        packed_tokens=written.used,
        pairs=int((written.kv_end - np.arange(width)).sum()) - (height * width - written.used),
        loss_tokens=sum(len(t.turn.completion.tokens) for t in turns),
        rows=height,
        row_length=width,
    )
    return PackedBatch(_with_labels(written, placed, normaliser, constant, version), stats)


def teach(groups: Sequence[Group], mask_truncated: bool) -> bool:
    """Whether the groups hold a completion token that is learnt from."""
    return any(_learnt(groups, mask_truncated))


def with_advantages(
    batch: TrainBatch, groups: Sequence[Group], advantages: Sequence[Advantages],
    mask_truncated: bool,
) -> TrainBatch:  # fmt: skip
    """Returns the batch with other advantages, as `pack` takes them, of the groups it was given."""
    flat_U = np.array([one.advantage for one in _learnable(groups, advantages, mask_truncated)])
    found_BT = np.where(batch.turn >= 0, flat_U[batch.turn], 0).astype(np.float32)
    return dataclasses.replace(batch, advantages=found_BT)


def without(
    batch: TrainBatch, out_BT: np.ndarray, normaliser: Normaliser, constant: float
) -> TrainBatch | None:
    """Returns the batch with the tokens `out_BT` masked out of the loss; None if none are left.

    They weigh nothing and count in no denominator; as context of others they stay.
    """
    on_BT = (batch.weights > 0) & ~out_BT
    if not on_BT.any():
        return None
    ids = (each[on_BT] for each in (batch.turn, batch.trajectory, batch.prompt))
    weights_BT = np.zeros_like(batch.weights)
    weights_BT[on_BT], denominator = normaliser(*ids, constant)
    return dataclasses.replace(batch, weights=weights_BT, denominator=denominator)


def proximal_of(
    batch: TrainBatch | None, groups: Sequence[Group], mask_truncated: bool
) -> list[np.ndarray]:
    """Returns the proximal logprobs of every turn of `groups`, the batch's first ones, in order.

    Each float32 [completion tokens], empty for a turn that nothing is learnt from. No batch is
    needed where that is so of all of them.
    """
    learnt = list(_learnt(groups, mask_truncated))
    if not any(learnt):
        return [np.zeros(0, np.float32) for _ in learnt]
    turn_N, values_N = batch.turn.reshape(-1), batch.proximal_logprobs.reshape(-1)
    # Only completion tokens have a turn, and a completion lies in one piece.
    places = np.flatnonzero((turn_N >= 0) & (turn_N < sum(learnt)))
    by_turn = places[np.argsort(turn_N[places], kind="stable")]
    ends = np.cumsum(np.bincount(turn_N[by_turn], minlength=sum(learnt)))
    pieces = iter(np.split(values_N[by_turn], ends[:-1]))
    return [next(pieces) if one else np.zeros(0, np.float32) for one in learnt]


def _private(turn: Turn) -> int:
    """Tokens of a turn behind its shared part: rest of the prompt, completion."""
    return len(turn.prompt.tail) + len(turn.completion.tokens)


def _piece(members: Sequence[_Turn], common: Sequence[int]) -> PrefixWithTails:
    tails = [np.concatenate([m.turn.prompt.tail, m.turn.completion.tokens]) for m in members]
    return PrefixWithTails(members[0].turn.prompt.shared, tails, common=[0, *common[1:]])


def _in_common(members: Sequence[_Turn]) -> list[int]:
    """What prompts' tails begin alike with; their last tokens predict what is learnt from."""
    return packing.in_common([member.turn.prompt.tail for member in members])


def _learnable(
    groups: Sequence[Group], advantages: Sequence[Advantages], mask_truncated: bool
) -> Iterator[_Turn]:
    """Yields every turn that is learnt from, with its ids; trajectories count through."""
    number = trajectories = 0
    for prompt, (group, its) in enumerate(zip(groups, advantages, strict=True)):
        for trajectory, own in zip(group.trajectories, its, strict=True):
            own = np.broadcast_to(own, len(trajectory.turns)).tolist()
            for turn, cut, advantage in zip(
                trajectory.turns, trajectory.reading.cut, own, strict=True
            ):
                completion = turn.completion
                made, told = len(completion.tokens), len(completion.behaviour_logprobs)
                if made != told:
                    reading = trajectory.reading
                    raise ValueError(
                        f"task {reading.task_id!r}, sample {reading.sample}: {told} behaviour "
                        f"logprobs for {made} completion tokens; the completer must report "
                        "one for each, the stop token included"
                    )
                if _teaches(turn, mask_truncated and cut):
                    yield _Turn(turn, advantage, number, trajectories, prompt)
                    number += 1
            trajectories += 1


def _learnt(groups: Sequence[Group], mask_truncated: bool) -> Iterator[bool]:
    """Yields of every turn whether it is learnt from."""
    for reading in (one.reading for group in groups for one in group.trajectories):
        for turn, cut in zip(reading.turns, reading.cut, strict=True):
            yield _teaches(turn, mask_truncated and cut)


def _teaches(turn: Turn, masked: bool) -> bool:
    return bool(len(turn.completion.tokens)) and not masked


def _bundles(turns: Sequence[_Turn], share_prefixes: bool) -> list[list[_Turn]]:
    """Gathers turns with equal shared parts (none is one, too), in order of first appearance.

    In a bundle they are sorted by the tails of their prompts, so that neighbours begin alike.
    Arrays that are the same object are recognised without reading them again.
    """
    if not share_prefixes:
        return [[member] for member in turns]
    of_object: dict[int, list[_Turn]] = {}
    of_content: dict[bytes, list[_Turn]] = {}
    for member in turns:
        shared = member.turn.prompt.shared
        bundle = of_object.get(id(shared))
        if bundle is None:
            bundle = of_object[id(shared)] = of_content.setdefault(shared.tobytes(), [])
        bundle.append(member)
    return [sorted(bundle, key=_by_tail) for bundle in of_content.values()]


def _by_tail(member: _Turn) -> bytes:
    """A key that sorts tails as their tokens do: ids are not negative."""
    return member.turn.prompt.tail.astype(">u4").tobytes()


def _with_labels(
    rows: packing.Rows, placed: Sequence[_Turn], normaliser: Normaliser, constant: float,
    version: int | None,
) -> TrainBatch:  # fmt: skip
    """Writes what belongs to completion tokens: a value a turn, spread over its completion."""
    made_X = np.array([len(m.turn.completion.tokens) for m in placed])
    at_N = np.repeat(rows.ends - np.cumsum(made_X), made_X) + np.arange(made_X.sum())

    def spread(values_X: Sequence[float], dtype: type, elsewhere: float = 0) -> np.ndarray:
        out_BT = np.full(rows.tokens.shape, elsewhere, dtype)
        out_BT.reshape(-1)[at_N] = np.repeat(np.asarray(values_X, dtype), made_X)
        return out_BT

    ids = ([getattr(m, name) for m in placed] for name in ("number", "trajectory", "prompt"))
    weights_N, denominator = normaliser(*(np.repeat(ids_X, made_X) for ids_X in ids), constant)
    weights_BT = np.zeros(rows.tokens.shape, np.float32)
    weights_BT.reshape(-1)[at_N] = weights_N
    written_X = [m.turn.completion.policy_version for m in placed]
    ages_X = [0 if version is None else version - one for one in written_X]
    behaviour_BT = np.zeros(rows.tokens.shape, np.float32)
    behaviour_BT.reshape(-1)[at_N] = np.concatenate(
        [m.turn.completion.behaviour_logprobs for m in placed]
    )
    return TrainBatch(
        tokens=rows.tokens,
        positions=rows.positions,
        kv_end=rows.kv_end,
        weights=weights_BT,
        advantages=spread([m.advantage for m in placed], np.float32),
        behaviour_logprobs=behaviour_BT,
        proximal_logprobs=behaviour_BT.copy(),
        reference_logprobs=behaviour_BT.copy(),
        turn=spread([m.number for m in placed], np.int32, -1),
        trajectory=spread([m.trajectory for m in placed], np.int32, -1),
        prompt=spread([m.prompt for m in placed], np.int32, -1),
        age=spread(ages_X, np.int32),
        update_turn=spread([m.turn.kind is TurnKind.UPDATE for m in placed], np.float32),
        denominator=denominator,
    )
