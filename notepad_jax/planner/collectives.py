"""The collectives of a compiled program, read out of its HLO text.

`collectives(text)` lists every all-gather, reduce-scatter, all-reduce, all-to-all and
collective-permute that one run executes, in whatever fusion or asynchronous pair the compiler
hid it, with its payload, how often it runs, and over how many devices. Beside: `hlo`, which
walks the text. Above: modules that plan for a slice.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from notepad_jax.planner import hlo

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program, and how often it runs."""

    kind: str  # of KINDS
    bytes: int  # of the whole array as a device has it before or after, whichever is larger
    group: int  # devices that take part together; 0 if the text does not say: all of them
    times: int  # in one run

    def sent(self, devices: int) -> float:
        """Bytes that a device sends in one run, by a ring; `devices` are those of the program.

        All but its own part of the array once, for an all-reduce twice.
        """
        n = self.group or devices
        if self.kind == "collective-permute":
            return float(self.times * self.bytes)
        share = (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        return self.times * self.bytes * share


def collectives(text: str) -> list[Collective]:
    """Returns the collectives of one run of the program, in order; equal ones are added up.

    Loops are counted as `hlo.instructions` counts them. Raises ValueError as it does.
    """
    computations, entry = hlo.parse(text)
    added: dict[tuple, int] = {}
    for one in _walk(computations, entry, 1):
        key = one.kind, one.bytes, one.group
        added[key] = added.get(key, 0) + one.times
    return [Collective(*key, times) for key, times in added.items()]


def _walk(computations: dict[str, hlo.Computation], name: str, times: int) -> Iterator[Collective]:
    for one in computations[name].values():
        kind = one.op.removesuffix("-start")
        if kind in KINDS:
            yield _collective(computations, computations[name], one, kind, times)
        elif one.op == "while":
            trips = hlo.trip_count(computations, one)
            yield from _walk(computations, one.called("body"), times * trips)
        elif one.op == "fusion":
            inside = _walk(computations, one.called("calls"), times)
            scattered = _is_scattered(computations[one.called("calls")])
            yield from (_scattered(found) if scattered else found for found in inside)
        elif one.op == "async-start":
            yield from _walk(computations, one.called("calls"), times)
        elif one.op == "call":
            yield from _walk(computations, one.called("to_apply"), times)
        elif one.op == "conditional":
            branches = [list(_walk(computations, b, times)) for b in hlo.branches(one)]
            yield from max(branches, key=lambda b: sum(c.bytes * c.times for c in b))


def _is_scattered(inside: hlo.Computation) -> bool:
    """Whether a fusion adds up and keeps a slice: so TPU compilers write a reduce-scatter.

    Its emitter then sends every device its own part alone, once round the ring. An all-reduce
    that is sliced by another instruction is one, and sends all twice.
    """
    summed = {one.name for one in inside.values() if one.op == "all-reduce"}
    readers = [one for one in inside.values() if summed.intersection(one.operands)]
    return bool(readers) and all(one.op in ("dynamic-slice", "slice") for one in readers)


def _scattered(found: Collective) -> Collective:
    kind = "reduce-scatter" if found.kind == "all-reduce" else found.kind
    return dataclasses.replace(found, kind=kind)


def _collective(
    computations: dict[str, hlo.Computation],
    computation: hlo.Computation,
    one: hlo.Instruction,
    kind: str,
    times: int,
) -> Collective:
    before = sum(_all_bytes(computation[name].type) for name in one.operands)
    after = _all_bytes(one.type)
    if one.op.endswith("-start"):
        after -= before  # its tuple holds the operands, too
    size = before if kind == "all-reduce" else max(before, after)
    return Collective(kind, size, _group(one.attributes), times)


def _group(attributes: str) -> int:
    """Devices of a group, in any of three spellings: a list of lists, folded, or mesh axes."""
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    if folded := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(folded[1])
    if meshed := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"('\w+')=(\d+)", meshed[1]))
        axes = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", meshed[2])  # a whole axis, or a part
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    return 0


def _all_bytes(type_text: str) -> int:
    """Bytes wherever they lie: a collective's operands may be in VMEM."""
    return hlo.nbytes(type_text.replace(hlo.VMEM, ""))
