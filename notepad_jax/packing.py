"""Packs prefixes and tails into rows of fixed width, with their attention mask and positions.

The one packer of the project: `grpo.batch` packs a batch's turns with it, the engine packs
what it prefills. A *bundle* is a prefix and the tails that continue it, each in a context of
its own. A tail may begin as the one before it does: what they have in `common` is written once,
so a bundle is a tree whose leaves are the tails in their order. `first_fit` says which row each
bundle (or piece of one) goes to, from lengths alone; `lay_out` writes the rows. The mask is
one int32 a token: token i sees token j of its row iff j <= i < kv_end[j], so a token's `kv_end` is
the end of the last tail that it is part of, padding's its own index + 1. Positions are RoPE's:
every tail continues at its prefix's end.

Pure numpy on the host: what is done in python is a small tuple a tail, everything per token is
a `repeat` or a `concatenate` over all rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax.types import NO_TOKENS, Tokens

Run = tuple[int, int, int]  # (length, first position, kv_end) of tokens; kv_end 0 is padding


class RowPiece(NamedTuple):
    """Some of a bundle's tails behind a copy of its prefix: what lies in one row."""

    bundle: int  # which of the bundles
    first: int  # its tails first:last
    last: int


class PrefixWithTails(NamedTuple):
    """Tokens of a piece: a prefix, then tails that see the prefix and themselves."""

    prefix: Tokens = NO_TOKENS
    tails: Sequence[Tokens] = ()
    start: int = 0  # position of the first token: how many tokens of a cache precede it
    common: Sequence[int] = ()  # of each tail, tokens that the tail before it has; () is none

    @property
    def tokens(self) -> int:
        """How many tokens it is written with."""
        return len(self.prefix) + sum(map(len, self.tails)) - sum(self.common)


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows: three arrays of one shape [R, T], and where things lie in them."""

    tokens: np.ndarray  # int32
    positions: np.ndarray  # int32
    kv_end: np.ndarray  # int32, in 1..T
    ends: np.ndarray  # int64: flat index in [R, T] of what follows each tail's last token, in order
    used: int  # tokens that are not padding


def triangle(tokens: int) -> int:
    """Returns the (query, key) pairs of so many tokens that see themselves and all before."""
    return tokens * (tokens + 1) // 2


def first_fit(
    prefixes: Sequence[int],
    tails: Sequence[Sequence[int]],
    row_length: int,
    common: Sequence[Sequence[int]] = (),
) -> list[list[RowPiece]]:
    """Returns the pieces of each row, from lengths; the longest bundle is placed first.

    A bundle that fits no open row is cut: into the emptiest open row if the tails that find
    room there outweigh the repeated prefix, else into a new row. So those whose prefixes are
    far shorter (by powers of two) come after all others: cutting them repeats little, and they
    fill what is left. A function of the input alone.

    Args:
      prefixes: tokens of each bundle's prefix; 0 is none.
      tails: tokens of each bundle's tails; a bundle without tails is its prefix.
      common: of each tail, how many of its tokens the tail before it has, too; () is none. They
        cost nothing, but in the first tail of a piece.
    Raises:
      ValueError: a prefix with one tail does not fit a row.
    """
    common = common or [[0] * len(own) for own in tails]
    totals = [
        prefix + _cost(own, shared, 0, len(own))
        for prefix, own, shared in zip(prefixes, tails, common, strict=True)
    ]
    rows: list[list[RowPiece]] = []
    free = np.zeros(64, np.int64)  # tokens left in each row; those not opened yet have none

    def open_row() -> int:
        nonlocal free
        if len(rows) == len(free):
            free = np.concatenate([free, np.zeros(len(free), np.int64)])
        free[len(rows)] = row_length
        rows.append([])
        return len(rows) - 1

    for bundle in sorted(range(len(totals)), key=lambda i: (-prefixes[i].bit_length(), -totals[i])):
        prefix, own, shared = prefixes[bundle], tails[bundle], common[bundle]
        need, first = totals[bundle], 0
        while True:
            row, last = int((free >= need).argmax()), len(own)
            if free[row] < need:  # fits nowhere whole
                row = int(free.argmax())
                last = _fitting(own, shared, first, int(free[row]) - prefix)
                if _cost(own, shared, first, last) <= prefix:
                    row = open_row()
                    last = _fitting(own, shared, first, row_length - prefix)
            placed = prefix + _cost(own, shared, first, last)
            if placed > free[row] or (last == first and len(own)):
                longest = prefix + (own[first] if len(own) else 0)
                raise ValueError(
                    f"{longest} tokens that must lie in one row (a prefix and one tail) do not "
                    f"fit a row of {row_length}; raise the row length to at least {longest}"
                )
            rows[row].append(RowPiece(bundle, first, last))
            free[row] -= placed
            first = last
            if first == len(own):
                break
            need += prefix - placed + shared[first]
    return rows


def in_common(tails: Sequence[Tokens]) -> list[int]:
    """Returns how many first tokens each tail has in common with the one before it.

    The most where tails are sorted. A tail's last token is always its own.
    """
    return [0, *(_alike(one[:-1], other) for other, one in itertools.pairwise(tails))]


def _alike(one: Tokens, other: Tokens) -> int:
    """Returns how many tokens both begin with."""
    n = min(len(one), len(other))
    differ = one[:n] != other[:n]
    return int(differ.argmax()) if differ.any() else n


def _cost(lengths: Sequence[int], common: Sequence[int], first: int, last: int) -> int:
    """Returns the tokens that the tails first:last are written with, in a piece of their own."""
    return sum(lengths[first:last]) - sum(common[first + 1 : last])


def _fitting(lengths: Sequence[int], common: Sequence[int], first: int, room: int) -> int:
    """Returns the end of the longest run of tails from `first` that fits `room` tokens."""
    for last in range(first, len(lengths)):
        room -= lengths[last] - (common[last] if last > first else 0)
        if room < 0:
            return last
    return len(lengths)


def lay_out(rows: Sequence[Sequence[PrefixWithTails]], height: int, width: int) -> Rows:
    """Writes rows of pieces as arrays [height, width]; what is left over is padding.

    Raises ValueError if there are more rows than `height`, or a row is longer than `width`.
    """
    if len(rows) > height:
        raise ValueError(f"{len(rows)} rows do not fit {height}; lay out as many as there are")
    pieces: list[Tokens] = []  # in packed order
    runs: list[Run] = []
    ends: list[int] = []
    padding, used = np.zeros(width, np.int32), 0

    for number, row in enumerate(rows):
        at = 0
        for bundle in row:
            common = bundle.common or [0] * len(bundle.tails)
            written = [tail[same:] for tail, same in zip(bundle.tails, common, strict=True)]
            begin = at + len(bundle.prefix)
            own_ends = list(itertools.accumulate(map(len, written), initial=begin))[1:]
            at = own_ends[-1] if own_ends else begin
            if len(bundle.prefix):
                pieces.append(bundle.prefix)
                runs.append((len(bundle.prefix), bundle.start, at))
            runs += _runs(bundle, common, own_ends)
            pieces += written
            ends += [number * width + end for end in own_ends]
        if at > width:
            raise ValueError(f"a row of {at} tokens does not fit a width of {width}")
        used += at
        pieces.append(padding[at:])
        runs.append((width - at, 0, 0))
    runs.append(((height - len(rows)) * width, 0, 0))
    pieces += [padding] * (height - len(rows))

    length_R, first_R, kv_end_R = np.array(runs, np.int64).T
    begin_R = np.cumsum(length_R) - length_R
    shape = (height, width)
    at_RT = np.arange(height * width).reshape(shape)
    own_end_RT = np.broadcast_to(np.arange(1, width + 1, dtype=np.int32), shape)
    kv_end_RT = np.repeat(kv_end_R.astype(np.int32), length_R).reshape(shape)
    positions_RT = at_RT - np.repeat(begin_R - first_R, length_R).reshape(shape)
    real_RT = kv_end_RT > 0
    return Rows(
        tokens=np.concatenate(pieces).astype(np.int32, copy=False).reshape(shape),
        positions=np.where(real_RT, positions_RT, 0).astype(np.int32),
        kv_end=np.where(real_RT, kv_end_RT, own_end_RT),
        ends=np.array(ends, np.int64),
        used=used,
    )


def _runs(bundle: PrefixWithTails, common: Sequence[int], ends: Sequence[int]) -> list[Run]:
    """Returns the runs of a piece's tails, in order; `ends` is where each tail ends in its row.

    Walked backwards: `seen` says until where a tail's tokens are seen by tails behind it, as
    (so many of its first tokens, end), fewest first. All others are seen to the tail's own end.
    """
    begin = bundle.start + len(bundle.prefix)
    out: list[Run] = []
    seen: list[tuple[int, int]] = []
    for tail, same, end in zip(bundle.tails[::-1], common[::-1], ends[::-1], strict=True):
        own, done = [], same
        for tokens, until in [*seen, (len(tail), end)]:
            if tokens > done:
                own.append((tokens - done, begin + done, until))
                done = tokens
        out += reversed(own)
        # The tail before this one has `same` tokens of it, and no more of any that follows.
        cut = [until for tokens, until in seen if tokens >= same]
        seen = [one for one in seen if one[0] < same]
        if same:
            seen.append((same, (cut or [end])[0]))
    return out[::-1]
