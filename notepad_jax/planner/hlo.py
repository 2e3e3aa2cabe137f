"""Memory traffic, matrix FLOPs and collectives of a program that XLA compiled, from its HLO text.

`instructions(text)` walks the optimized module from its entry, through loops (as often as they
run; once where only the data tells), calls and the costlier branch of a conditional, and gives
every instruction that becomes a kernel with the bytes it reads and writes and the FLOPs of its
matrix products. What a fusion reads of an operand through a slice or a gather is counted as
that, an update in place as the update. What lies in a TPU's VMEM is no traffic, and of a Pallas
kernel nothing is seen but what it declares (`pl.CostEstimate`). Nothing is said about caches: an
operand that two kernels read is read twice. That is right where operands are larger
than a cache, and it is what fusions are judged by. `collectives` (beside) says what devices tell
each other. Text is what every backend prints alike; jax counts the body of a loop once.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from typing import Any

_SIZES = {"pred": 1, "bf16": 2}  # others end in their bits: f32, s8, u16
_SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\](?:\{[^{}]*\})?")
VMEM = "S(1)"  # in a TPU's layouts: the array lies in the core's own memory
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all iota partition-id "
    "replica-id opt-barrier".split()
)
_VIEWS = ("bitcast", "reshape", "convert", "copy")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction, a line of a computation."""

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
    """The cost of one instruction in one run of the program."""

    instruction: Instruction
    times: int  # how often it runs
    moved: int  # bytes, all times together
    flops: int  # of matrix products, likewise
    wide: int  # of them, those with float32 operands: half the rate of bfloat16 or less
    scope: str  # the path of named scopes in the source, "" if XLA made it up


Computation = dict[str, Instruction]
_PALLAS = "tpu_custom_call", "gpu.triton", "triton_kernel_call"  # calls of Pallas kernels


def dims(type_text: str) -> list[tuple[str, list[int]]]:
    """Returns dtype and sizes of an array, or of all arrays of a tuple."""
    return [(kind, [int(n) for n in at.split(",") if n]) for kind, at in _SHAPE.findall(type_text)]


def nbytes(type_text: str) -> int:
    """Returns the bytes in HBM of an array, or of all arrays of a tuple."""
    size = lambda kind: _SIZES.get(kind) or int(kind[1:]) / 8  # noqa: E731
    outside = "".join(m[0] + " " for m in _SHAPE.finditer(type_text) if VMEM not in m[0])
    return math.ceil(sum(size(kind) * math.prod(shape) for kind, shape in dims(outside)))


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


def instructions(text: str) -> list[Cost]:
    """Returns the cost of everything that one run of the program executes.

    A loop of unknown length counts once.
    """
    computations, entry = parse(text)
    return list(_walk(computations, entry, 1))


def _walk(computations: dict[str, Computation], name: str, times: int) -> Iterator[Cost]:
    computation = computations[name]
    for one in computation.values():
        if one.op in _FREE or one.op.endswith("-done"):
            continue
        if one.op == "while":
            trips = trip_count(computations, one)
            yield from _walk(computations, one.called("body"), times * trips)
        elif one.op == "conditional":
            found = [list(_walk(computations, branch, times)) for branch in branches(one)]
            yield from max(found, key=lambda costs: sum(cost.moved for cost in costs))
        elif one.op == "call":
            yield from _walk(computations, one.called("to_apply"), times)
        elif one.op == "async-start":
            yield from _walk(computations, one.called("calls"), times)
        else:
            scope = re.search(r'op_name="([^"]*)"', one.attributes)
            cost = (times * n for n in _cost(computations, computation, one))
            yield Cost(one, times, *cost, scope.group(1) if scope else "")


def branches(one: Instruction) -> list[str]:
    """The computations that a conditional chooses from."""
    names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", one.attributes)
    listed = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
    return names + (re.findall(r"[\w.\-]+", listed.group(1)) if listed else [])


def trip_count(computations: dict[str, Computation], loop: Instruction) -> int:
    """How often a loop runs: by the compiler's note, by the constant its condition compares with
    (then at most so often), or once where only the data tells."""
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    condition = computations[loop.called("condition")]
    for one in condition.values():
        if one.op != "compare" or "direction=LT" not in one.attributes:
            continue
        counter, bound = (condition[name] for name in one.operands)
        if bound.op == "constant" and bound.inner.isdigit():
            return -(-int(bound.inner) // _step(computations[loop.called("body")], counter))
    return 1


def _step(body: Computation, counter: Instruction) -> int:
    """What a loop's body adds to its counter: 2 where the compiler unrolled it, or 1."""
    index = re.search(r"index=(\d+)", counter.attributes)
    root = next(one for one in body.values() if one.root)
    if index is None or root.op != "tuple":
        return 1
    added = body[root.operands[int(index[1])]]
    if added.op != "add":
        return 1
    steps = [body[name].inner for name in added.operands if body[name].op == "constant"]
    return int(steps[0]) if steps and steps[0].isdigit() else 1


def _cost(
    computations: dict[str, Computation], computation: Computation, one: Instruction
) -> tuple[int, int, int]:
    """Bytes, FLOPs and FLOPs of float32 products of one execution."""
    if one.op == "fusion":
        inside = computations[one.called("calls")]
        return _fusion_bytes(computations, inside, one), *_products(computations, inside)
    if one.op in ("dynamic-slice", "slice", "gather"):
        return 2 * nbytes(one.type), 0, 0
    if one.op == "dynamic-update-slice":
        return 2 * nbytes(computation[one.operands[1]].type), 0, 0
    written = one.type
    if one.op == "custom-call":  # the int8 part of its tuple is scratch of the library
        written = re.sub(r"s8\[\d+\]", "", written)
    read = sum(nbytes(computation[name].type) for name in one.operands if name in computation)
    if any(
        name in one.attributes for name in _PALLAS
    ):  # a Pallas kernel: it reads what its grid asks for
        declared = re.search(r'"cost_estimate":(\{[^{}]*\})', one.attributes)
        told = json.loads(declared[1]) if declared else {}
        return int(told.get("bytes_accessed", 0)), int(told.get("flops", 0)), 0
    return nbytes(written) + read, *_flops(computation, one)


def _products(computations: dict[str, Computation], inside: Computation) -> tuple[int, int]:
    """FLOPs of the products in a fusion, and in the fusions that it holds."""
    found = [(0, 0)]
    for one in inside.values():
        if one.op == "fusion":
            found.append(_products(computations, computations[one.called("calls")]))
        else:
            found.append(_flops(inside, one))
    return tuple(map(sum, zip(*found, strict=True)))


def _flops(computation: Computation, one: Instruction) -> tuple[int, int]:
    if one.op == "convolution":
        return _convolution_flops(computation, one)
    return _dot_flops(computation, one) if one.op in ("dot", "custom-call") else (0, 0)


def _convolution_flops(computation: Computation, one: Instruction) -> tuple[int, int]:
    """2 x pairs of an input and a weight that meet; a TPU's matrix products are convolutions.

    A dimension that both operands have in common becomes a window that meets one place only, so
    padding must not be counted.
    """
    (kind, left), (_, right) = (dims(computation[name].type)[0] for name in one.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", _inside(one.attributes, "window={")))
    out = dims(one.type)[0][1]
    size = lambda at, letter, label: at[label.index(letter)]  # noqa: E731
    pairs = size(out, "b", labels[3]) * size(right, "i", labels[2]) * size(right, "o", labels[2])
    for digit in (letter for letter in labels[2] if letter.isdigit()):
        taps, places = (size(*pair) for pair in (
            (right, digit, labels[2]), (out, digit, labels[3])
        ))  # fmt: skip
        reach = size(left, digit, labels[1])
        part = lambda key, default: window.get(key, "x".join([default] * 9)).split("x")[int(digit)]  # noqa: B023, E731
        stride, wide, sparse = (int(part(k, "1")) for k in ("stride", "lhs_dilate", "rhs_dilate"))
        before = int(part("pad", "0_0").split("_")[0])
        pairs *= sum(
            0 <= at <= (reach - 1) * wide and at % wide == 0
            for place in range(places)
            for at in range(
                place * stride - before, place * stride - before + taps * sparse, sparse
            )
        )
    return 2 * pairs, 2 * pairs if kind == "f32" else 0


def _inside(text: str, opening: str) -> str:
    at = text.find(opening)
    return "" if at < 0 else text[at + len(opening) : text.index("}", at)]


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


def _fusion_bytes(
    computations: dict[str, Computation], inside: Computation, fusion: Instruction
) -> int:
    users = _users(inside)

    def source(name: str) -> Instruction:
        one = inside[name]
        return source(one.operands[0]) if one.op in _VIEWS and one.operands else one

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
    return total + sum(
        _read(computations, inside, users, name)
        for name in parameters.values()
        if name not in updated
    )


def _users(inside: Computation) -> dict[str, list[Instruction]]:
    users = collections.defaultdict(list)
    for one in inside.values():
        for name in one.operands:
            users[name].append(one)
    return users


def _read(computations: dict[str, Computation], inside: Computation, users: Any, name: str) -> int:
    """Bytes that a fusion reads of its parameter `name`: the parts that it cuts out, or all."""
    whole, total = nbytes(inside[name].type), 0
    for user in users[name]:
        if user.op in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
            total += nbytes(user.type)
        elif user.op in ("bitcast", "reshape"):
            total += _read(computations, inside, users, user.name)
        elif user.op == "fusion":
            deeper = computations[user.called("calls")]
            given = str(user.operands.index(name))
            into = next(i for i in deeper.values() if i.op == "parameter" and i.inner == given)
            total += _read(computations, deeper, _users(deeper), into.name)
        else:
            return whole
    return min(whole, total)
