"""Device memory traffic and matrix work of a program that XLA has compiled, read out of its text.

`instructions(text)` walks the optimized module from its entry, through loops (as often as they
run; `rounds` where only the data tells), calls and the costlier branch of a conditional, and gives
every instruction that becomes a kernel with the bytes it reads and writes and the FLOPs of its
matrix products. What a fusion reads of an operand through a slice or a gather is counted as
that, an update in place as the update. Nothing is said about caches: an operand that two
kernels read is read twice. That is right where operands are larger than a cache, and it is
what fusions are judged by.

Above: `compiled`, which makes the text. Text is what every backend prints alike; jax gives a
program compiled for a device that is not here no cost analysis.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_SIZES = {"pred": 1, "bf16": 2}  # others end in their bits: f32, s8, u16
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all iota partition-id "
    "replica-id opt-barrier".split()
)
_VIEWS = ("bitcast", "reshape", "convert", "copy")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    op: str
    operands: tuple[str, ...]
    inner: str  # what stands between the parentheses
    attributes: str  # what follows them
    root: bool

    def called(self, key: str) -> str:
        return re.search(key + r"=%?([\w.\-]+)", self.attributes).group(1)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one instruction costs in one run of the program."""

    instruction: Instruction
    times: int  # how often it runs
    moved: int  # bytes, all times together
    flops: int  # of matrix products, likewise
    wide: int  # of them, those with float32 operands: half the rate of bfloat16 or less
    scope: str  # the path of named scopes in the source, "" if XLA made it up


Computation = dict[str, Instruction]


def dims(type_text: str) -> list[tuple[str, list[int]]]:
    return [(kind, [int(n) for n in at.split(",") if n]) for kind, at in _SHAPE.findall(type_text)]


def nbytes(type_text: str) -> int:
    """Bytes of an array, or of all arrays of a tuple."""
    size = lambda kind: _SIZES.get(kind) or int(kind[1:]) // 8  # noqa: E731
    return sum(size(kind) * math.prod(shape) for kind, shape in dims(type_text))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the module's computations by name, and the entry's name."""
    found: dict[str, Computation] = {}
    current, entry = {}, ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if head:
            current = found.setdefault(head.group(2), {})
            entry = head.group(2) if head.group(1) else entry
            continue
        body = re.match(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$", line)
        if body:
            made = _instruction(bool(body.group(1)), body.group(2), body.group(3))
            current[made.name] = made
    if not entry:
        raise ValueError("this text has no ENTRY computation; give it compiled.as_text()")
    return found, entry


def _instruction(root: bool, name: str, rest: str) -> Instruction:
    at = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:at], rest[at + 1 :].lstrip()
    begin = rest.index("(")
    end = _closing(rest, begin)
    inner = rest[begin + 1 : end]
    operands = tuple(re.findall(r"%([\w.\-]+)", inner))
    return Instruction(name, kind, rest[:begin], operands, inner, rest[end + 1 :], root)


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"a parenthesis is not closed in {text[:80]!r}")


def instructions(text: str, rounds: Mapping[str, int] | None = None) -> list[Cost]:
    """Returns the cost of everything that one run of the program executes.

    A loop of unknown length runs as often as `rounds` says of a named scope that it is in;
    once if of none.
    """
    computations, entry = parse(text)
    return list(_walk(computations, entry, 1, rounds or {}))


def _walk(
    computations: dict[str, Computation], name: str, times: int, rounds: Mapping[str, int]
) -> Iterator[Cost]:
    computation = computations[name]
    for one in computation.values():
        if one.op in _FREE or one.op.endswith("-done"):
            continue
        if one.op == "while":
            known = re.search(r'known_trip_count":\{"n":"(\d+)"', one.attributes)
            told = [n for scope, n in rounds.items() if scope in one.attributes]
            trips = int(known.group(1)) if known else math.prod(told)
            yield from _walk(computations, one.called("body"), times * trips, rounds)
        elif one.op == "conditional":
            names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", one.attributes)
            listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
            names += re.findall(r"[\w.\-]+", listed.group(1)) if listed else []
            branches = [list(_walk(computations, branch, times, rounds)) for branch in names]
            yield from max(branches, key=lambda costs: sum(cost.moved for cost in costs))
        elif one.op == "call":
            yield from _walk(computations, one.called("to_apply"), times, rounds)
        else:
            scope = re.search(r'op_name="([^"]*)"', one.attributes)
            cost = (times * n for n in _cost(computations, computation, one))
            yield Cost(one, times, *cost, scope.group(1) if scope else "")


def _cost(
    computations: dict[str, Computation], computation: Computation, one: Instruction
) -> tuple[int, int, int]:
    """Bytes, FLOPs and FLOPs of float32 products of one execution."""
    if one.op == "fusion":
        inside = computations[one.called("calls")]
        products = [_dot_flops(inside, i) for i in inside.values() if i.op == "dot"]
        return _fusion_bytes(inside, one), *map(sum, zip((0, 0), *products, strict=True))
    if one.op in ("dynamic-slice", "slice", "gather"):
        return 2 * nbytes(one.type), 0, 0
    if one.op == "dynamic-update-slice":
        return 2 * nbytes(computation[one.operands[1]].type), 0, 0
    written = one.type
    if one.op == "custom-call":  # the int8 part of its tuple is scratch of the library
        written = re.sub(r"s8\[\d+\]", "", written)
    read = sum(nbytes(computation[name].type) for name in one.operands if name in computation)
    flops = _dot_flops(computation, one) if one.op in ("dot", "custom-call") else (0, 0)
    return nbytes(written) + read, *flops


def _dot_flops(computation: Computation, one: Instruction) -> tuple[int, int]:
    """2 x outputs x contracted sizes, of a `dot` or of the library call that replaced it.

    Returns (FLOPs, the same if the operands are float32, else 0).
    """
    form = r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)"
    contracted = re.search(form, one.attributes)
    if not contracted:
        return 0, 0
    (kind, left), (_, out) = dims(computation[one.operands[0]].type)[0], dims(one.type)[0]
    inner = math.prod(left[int(n)] for n in re.findall(r"\d+", contracted[1]))
    flops = 2 * math.prod(out) * inner
    return flops, flops if kind == "f32" else 0


def _fusion_bytes(inside: Computation, fusion: Instruction) -> int:
    users = collections.defaultdict(list)
    for one in inside.values():
        for name in one.operands:
            users[name].append(one)

    def source(name: str) -> Instruction:
        one = inside[name]
        return source(one.operands[0]) if one.op in _VIEWS and one.operands else one

    def read(name: str) -> int:
        whole, total = nbytes(inside[name].type), 0
        for user in users[name]:
            if user.op in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += nbytes(user.type)
            elif user.op in ("bitcast", "reshape"):
                total += read(user.name)
            else:
                return whole
        return min(whole, total)

    total, updated = 0, set()
    root = next(one for one in inside.values() if one.root)
    for name in root.operands if root.op == "tuple" else (root.name,):
        made = source(name)
        if made.op in ("dynamic-update-slice", "scatter"):  # in place: only the update is written
            total += nbytes(inside[made.operands[1 if made.op != "scatter" else 2]].type)
            updated.add(source(made.operands[0]).name)
        else:
            total += nbytes(inside[name].type)
    parameters = {int(one.inner): one.name for one in inside.values() if one.op == "parameter"}
    return total + sum(read(name) for name in parameters.values() if name not in updated)
