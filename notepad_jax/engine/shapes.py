"""The static shapes of all launches: a handful, known from the engine's settings alone.

Every shape is a program to compile, and every place of a shape that holds nothing is computed
all the same. So there are few shapes, and what a launch does not need is not in them: the
unit of prefill is one packed row (several prefixes one after the other, or many tails behind
one prefix), page tables have one width since attention only walks the pages that are full,
and tokens are sampled in blocks, as many as there are. What is left are a few row widths, and
a few decode batches: a power of four of slots, or all, in rows of 1, 4 or 8 that share a prefix
(each more shape is seconds of compiling, and an idle slot costs little; on GPUs each is ten
seconds and an idle slot next to nothing, so there are all slots, a sixteenth, and so on, in rows
of 1 or 8).

`cover` chooses the widths for the rows of a round, `decode_shape` a decode batch: by what
they cost. Above: `layout` fills them, `programs.warm_up` compiles exactly these.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import pallas_kernels
from notepad_jax.engine.settings import EngineSettings

OVERHEAD = 48  # what a launch costs before it computes anything, in tokens (CPU: 24 to 150)


@dataclasses.dataclass(frozen=True)
class PrefixRow:
    """A prefill of one packed row of whole prefixes, each from a page's first token on."""

    tokens: int


@dataclasses.dataclass(frozen=True)
class TailRow:
    """A prefill of one packed row of tails behind one cached prefix, or behind none."""

    tokens: int


@dataclasses.dataclass(frozen=True)
class Decode:
    """A decode batch: B slots, in R rows of M places that share a prefix each."""

    slots: int
    rows: int
    members: int

    @property
    def cost(self) -> float:
        """In slots: a row is read once for all its members, and idle places cost little."""
        return self.slots + self.rows * (1 + self.members / 8)


Shape = PrefixRow | TailRow | Decode


def prefix_pages(settings: EngineSettings) -> int:
    """Pages of the longest prefix: the width of every table of shared pages."""
    return settings.pages_for(settings.max_prompt)


def private_pages(settings: EngineSettings) -> int:
    """Pages of the longest private part: the width of every table of private pages."""
    return settings.pages_for(settings.max_prompt + settings.max_new_tokens)


def prefix_widths(settings: EngineSettings) -> tuple[int, ...]:
    """Row widths for prefixes, in whole pages, ascending."""
    Z = settings.page_size
    parts = _parts(prefix_pages(settings) * Z)
    return tuple(sorted({settings.pages_for(part) * Z for part in parts}))


def tail_widths(settings: EngineSettings) -> tuple[int, ...]:
    """Row widths for tails, ascending; the widest holds `row_tokens`."""
    return tuple(sorted({-(-part // 8) * 8 for part in _parts(settings.row_tokens)}))


def _parts(longest: int) -> list[int]:
    """The whole, then powers of two (down to a sixteenth) and near it half as much again.

    Attention walks whole blocks (of 128 tokens on CPUs and TPUs): a row of 264 pays for 384. A
    chunk is a power of two of tokens in most runs, and the longest prompt a little more.
    """
    parts = [longest]
    for power in (2**k for k in range(5, longest.bit_length())):
        parts += [power] if longest / 17 <= power < longest else []
        parts += [power * 3 // 2] if longest * 0.4 <= power * 3 // 2 <= longest * 0.8 else []
    return parts


def decode_shapes(settings: EngineSettings) -> tuple[Decode, ...]:
    """The decode batches, ascending; the last ones have all slots."""
    return _decode_shapes(settings.slots, pallas_kernels.on_gpu())


@functools.cache
def _decode_shapes(wanted: int, on_gpu: bool) -> tuple[Decode, ...]:
    most = 1 << (wanted - 1).bit_length()
    if on_gpu:
        sizes, together = [most >> k for k in (12, 8, 4, 0) if most >> k], (1, 8)
    else:
        sizes = [4**k for k in range(wanted.bit_length()) if 4**k < most] + [most]
        together = (1, 4, 8)  # slots of a row that read a shared prefix
    return tuple(Decode(slots, slots // m, m) for slots in sizes for m in together if m <= slots)


def shapes(settings: EngineSettings) -> tuple[Shape, ...]:
    """All shapes that an engine of these settings ever launches."""
    return (
        *map(PrefixRow, prefix_widths(settings)),
        *map(TailRow, tail_widths(settings)),
        *decode_shapes(settings),
    )


def cover(lengths: Sequence[int], widths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Packs pieces of these lengths into rows: (width, which pieces) of each.

    The row with the least padding first; but from where one row of no more tokens holds all that
    is left, it is that row. Pieces stay in order within a row. None may be longer than the
    widest row.
    """
    rows = _densest_first(lengths, widths)
    for first in range(len(rows)):
        rest = sorted(i for _, taken in rows[first:] for i in taken)
        enough = min((w for w in widths if w >= sum(lengths[i] for i in rest)), default=None)
        if enough is not None and enough <= sum(width for width, _ in rows[first:]):
            return [*rows[:first], (enough, rest)]
    return rows


def _densest_first(lengths: Sequence[int], widths: Sequence[int]) -> list[tuple[int, list[int]]]:
    left, rows = list(range(len(lengths))), []
    while left:
        choices = [(width, _fitting(lengths, left, width)) for width in widths]
        width, taken = max(choices, key=lambda c: sum(lengths[i] for i in c[1]) / (c[0] + OVERHEAD))
        assert taken, f"no row of {max(widths)} holds a piece of {lengths[left[0]]} tokens"
        rows.append((width, taken))
        gone = set(taken)
        left = [i for i in left if i not in gone]
    return rows


def _fitting(lengths: Sequence[int], left: Sequence[int], room: int) -> list[int]:
    taken = []
    for i in left:
        if lengths[i] <= room:
            room -= lengths[i]
            taken.append(i)
    return taken


def decode_shape(settings: EngineSettings, groups: Sequence[int]) -> Decode:
    """The cheapest decode batch for running slots, given how many share each prefix."""
    slots = sum(groups)
    return min(
        (
            shape
            for shape in decode_shapes(settings)
            if shape.slots >= slots and shape.rows >= sum(-(-n // shape.members) for n in groups)
        ),
        key=lambda shape: shape.cost,
    )
