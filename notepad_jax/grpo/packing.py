"""Bridge two: groups of trajectories in, one `TrainBatch` of packed rows out.

Every turn is an independent context, and turns whose `Prompt.shared` is equal (members of
a group, or several questions about one document) share its tokens: a *bundle* is one copy
of that prefix followed by the private tails (rest of the prompt, completion). The prefix's
`kv_end` is the end of the bundle, a tail's its own end, so no tail sees another, and the
positions of each tail continue at the prefix's length: the loss is exactly that of one row
per turn. Bundles are put into rows first-fit, the longest first. One that fits no row is
spread over several, and only then is its prefix repeated.

Host code, numpy only, run once per optimizer step over every turn of the batch: what is
done in python is one small tuple per turn, everything per token is a `repeat` or a
`concatenate` over whole rows. Below: `types`. Above: `update` consumes the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax.types import Group, TrainBatch, TurnKind


@dataclasses.dataclass(frozen=True)
class PackingStats:
    """Counts of one packed batch; tokens unless said otherwise."""

    turns: int
    empty_turns: int  # turns without a completion token: nothing to learn from, left out
    turn_tokens: int  # prompts and completions as if nothing were shared
    packed_tokens: int  # what the rows hold
    loss_tokens: int  # completion tokens, the global normaliser
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


class _Tail(NamedTuple):
    """What is private to one turn."""

    length: int  # tokens of prompt and completion
    prompt: np.ndarray
    completion: np.ndarray
    behaviour_logprobs: np.ndarray
    advantage: float  # of the trajectory
    kind: TurnKind


@dataclasses.dataclass(frozen=True, eq=False)
class _Bundle:
    prefix: np.ndarray
    tails: list[_Tail]
    lengths: list[int]  # of the tails


def pack(
    groups: Sequence[Group],
    advantages: Sequence[np.ndarray],
    row_length: int,
    share_prefixes: bool = True,
    rows_multiple: int = 1,
    length_multiple: int = 128,
) -> PackedBatch:
    """Packs all turns of all trajectories; the order of rows is a function of the input alone.

    Args:
      groups: trajectories, any number of turns each.
      advantages: for each group, one advantage per trajectory.
      row_length: the most tokens a row may hold. The array's T is the fullest row's
        length rounded up to `length_multiple`, but never more than `row_length`.
      share_prefixes: False stores every prompt whole (for tests and benchmarks).
      rows_multiple: B is rounded up to a multiple of this with rows of padding.

    Raises:
      ValueError: a turn is longer than a row, a completion's logprobs do not match its
        tokens, or there is not one completion token to learn from.
    """
    turns = list(_learnable(groups, advantages))  # (shared part, tail)
    if not turns:
        raise ValueError(
            f"{len(groups)} groups hold not one completion token; there is nothing to learn from"
        )
    rows, filled = _place(_bundles(turns, share_prefixes), row_length)
    width = min(row_length, -(-max(filled) // length_multiple) * length_multiple)
    height = -(-len(rows) // rows_multiple) * rows_multiple
    batch = _lay_out(rows, height, width)
    stats = PackingStats(
        turns=len(turns),
        empty_turns=sum(len(t.turns) for g in groups for t in g.trajectories) - len(turns),
        turn_tokens=sum(len(shared) + tail.length for shared, tail in turns),
        packed_tokens=sum(filled),
        loss_tokens=int(np.count_nonzero(batch.loss_mask)),
        rows=height,
        row_length=width,
    )
    return PackedBatch(batch, stats)


def add_reference(batch: TrainBatch, logprobs_BT: np.ndarray) -> TrainBatch:
    """Returns the batch with `logprobs_BT` (frozen policy) as its reference logprobs."""
    if logprobs_BT.shape != batch.tokens.shape:
        raise ValueError(
            f"reference logprobs are {logprobs_BT.shape}, the batch is {batch.tokens.shape}; "
            "compute them on this very batch"
        )
    return dataclasses.replace(batch, reference_logprobs=logprobs_BT.astype(np.float32))


def _learnable(
    groups: Sequence[Group], advantages: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, _Tail]]:
    """Yields (shared part, tail) of every turn that has a completion."""
    for group, advantages_G in zip(groups, advantages, strict=True):
        for trajectory, advantage in zip(group.trajectories, advantages_G.tolist(), strict=True):
            for turn in trajectory.turns:
                prompt, completion = turn.prompt, turn.completion
                tail, made, told = prompt.tail, completion.tokens, completion.behaviour_logprobs
                if len(told) != len(made):
                    reading = trajectory.reading
                    raise ValueError(
                        f"task {reading.task_id!r}, sample {reading.sample}: {len(told)} behaviour "
                        f"logprobs for {len(made)} completion tokens; the completer must report "
                        "one for each, the stop token included"
                    )
                if len(made):
                    length = len(tail) + len(made)
                    yield prompt.shared, _Tail(length, tail, made, told, advantage, turn.kind)


def _bundles(turns: Sequence[tuple[np.ndarray, _Tail]], share_prefixes: bool) -> list[_Bundle]:
    """Gathers tails with equal shared parts, in order of first appearance.

    Arrays that are the same object are recognised without reading them again.
    """
    of_object: dict[int, _Bundle] = {}
    of_content: dict[bytes, _Bundle] = {}
    bundles: list[_Bundle] = []

    def open_bundle(shared: np.ndarray) -> _Bundle:
        bundles.append(_Bundle(shared, [], []))
        return bundles[-1]

    for shared, tail in turns:
        if not share_prefixes or not len(shared):
            bundle = open_bundle(shared)
        elif id(shared) in of_object:
            bundle = of_object[id(shared)]
        else:
            content = shared.tobytes()
            bundle = of_content.get(content) or open_bundle(shared)
            of_object[id(shared)] = of_content[content] = bundle
        bundle.tails.append(tail)
        bundle.lengths.append(tail.length)
    return bundles


def _place(bundles: list[_Bundle], row_length: int) -> tuple[list[list[_Bundle]], list[int]]:
    """First-fit, the longest bundle first; returns (bundles of each row, tokens of each row).

    A bundle that fits no open row is cut: into the emptiest open row if the tails that find
    room there outweigh the repeated prefix, else into a new row.
    """
    totals = [len(b.prefix) + sum(b.lengths) for b in bundles]
    order = sorted(range(len(bundles)), key=lambda i: -totals[i])  # stable
    rows: list[list[_Bundle]] = []
    free = np.zeros(0, np.int64)  # tokens left in each row; those not opened yet have none

    for i in order:
        bundle, need = bundles[i], totals[i]
        while bundle.tails:
            if len(rows) == len(free):
                free = np.concatenate([free, np.zeros(len(rows) + 64, np.int64)])
            row = int((free >= need).argmax())
            fit = len(bundle.tails)
            if free[row] < need:  # fits nowhere whole
                row = int(free.argmax())
                fit = _fitting(bundle, int(free[row]))
                if sum(bundle.lengths[:fit]) <= len(bundle.prefix):
                    row = len(rows)
                    rows.append([])
                    free[row] = row_length
                    fit = _fitting(bundle, row_length)
            if not fit:
                longest = len(bundle.prefix) + bundle.lengths[0]
                raise ValueError(
                    f"a turn of {longest} tokens (prompt and completion) does not fit a row of "
                    f"{row_length}; raise the row length to at least {longest}"
                )
            piece = bundle
            if fit < len(bundle.tails):
                piece = _Bundle(bundle.prefix, bundle.tails[:fit], bundle.lengths[:fit])
            bundle = _Bundle(bundle.prefix, bundle.tails[fit:], bundle.lengths[fit:])
            placed = sum(piece.lengths)
            rows[row].append(piece)
            free[row] -= len(piece.prefix) + placed
            need -= placed
    return rows, (row_length - free[: len(rows)]).tolist()


def _fitting(bundle: _Bundle, room: int) -> int:
    """How many of the bundle's tails, in order, fit `room` tokens together with its prefix."""
    room -= len(bundle.prefix)
    for fit, length in enumerate(bundle.lengths):
        room -= length
        if room < 0:
            return fit
    return len(bundle.lengths)


_PAD, _CONTEXT, _UPDATE, _ANSWER = range(4)  # what a run of tokens in a row is


def _lay_out(rows: list[list[_Bundle]], height: int, width: int) -> TrainBatch:
    """Writes the rows as runs of tokens: a value per run, repeated over the run's length."""
    pieces: list[np.ndarray] = []  # token arrays, in packed order
    behaviour: list[np.ndarray] = []  # of completions, in packed order
    runs: list[tuple[int, int, int, int]] = []  # (length, first position, kv_end, what)
    advantages: list[float] = []  # of each run
    padding = np.zeros(width, np.int32)

    for row in rows:
        at = 0
        for bundle in row:
            begin, prefix = at, len(bundle.prefix)
            if prefix:
                at += prefix
                pieces.append(bundle.prefix)
                runs.append((prefix, 0, begin + prefix + sum(bundle.lengths), _CONTEXT))
                advantages.append(0.0)
            for length, prompt, made, told, advantage, kind in bundle.tails:
                at += length
                pieces += (prompt, made)
                behaviour.append(told)
                what = _UPDATE if kind is TurnKind.UPDATE else _ANSWER
                runs.append((len(prompt), prefix, at, _CONTEXT))
                runs.append((len(made), prefix + len(prompt), at, what))
                advantages += (0.0, advantage)
        if at < width:
            pieces.append(padding[at:])
            runs.append((width - at, 0, 0, _PAD))
            advantages.append(0.0)
    for _ in range(height - len(rows)):
        pieces.append(padding)
        runs.append((width, 0, 0, _PAD))
        advantages.append(0.0)

    length_R, first_R, kv_end_R, what_R = np.array(runs, np.int64).T
    begin_R = np.cumsum(length_R) - length_R
    shape = (height, width)

    def spread(values_R: np.ndarray, dtype: type) -> np.ndarray:
        return np.repeat(values_R.astype(dtype), length_R).reshape(shape)

    place_BT = np.arange(height * width, dtype=np.int32).reshape(shape)
    kv_end_BT = spread(kv_end_R, np.int32)
    own_end_BT = np.broadcast_to(np.arange(1, width + 1, dtype=np.int32), shape)
    loss_mask_BT = spread(what_R >= _UPDATE, np.float32)
    behaviour_BT = np.zeros(shape, np.float32)
    behaviour_BT[loss_mask_BT > 0] = np.concatenate(behaviour)
    return TrainBatch(
        tokens=np.concatenate(pieces).astype(np.int32, copy=False).reshape(shape),
        positions=place_BT - spread(begin_R - first_R, np.int32),
        kv_end=np.where(kv_end_BT > 0, kv_end_BT, own_end_BT),
        loss_mask=loss_mask_BT,
        advantages=spread(np.array(advantages), np.float32),
        behaviour_logprobs=behaviour_BT,
        reference_logprobs=behaviour_BT.copy(),
        update_turn=spread(what_R == _UPDATE, np.float32),
    )
