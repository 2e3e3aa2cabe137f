"""GraphWalks' task generator: a list of edges, a breadth-first search, the parents of a node.

GraphWalks (OpenAI, 2025) gives a directed graph, one edge a line, names of ten hexadecimal digits,
and asks for the nodes at exactly some depth from a node (`bfs`), or for those with an edge to one
(`parents`). The whole document is edges here, too. What is asked for lies in a small graph of its
own, drawn by the seed and the same at every length: levels of up to three nodes, each reached
from the level before it, edges back, and edges on from the last level. Around it stand edges
among nodes that no edge of the small graph's upper levels leads to; the k-th is a function of the
seed and k, so a document of 3.5M tokens never exists as one string. Some of these lead into the
small graph, so that it does not stand apart.

Evidence: the far end of each edge that the answer rests on (of `parents`, the near one), at that
edge. A search of depth d takes d readings by nature, where the edges stand in no order; a memory
that is written in one has to hold whatever may matter later. Below: recipe; above: suites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from notepad_jax.scoring.long_context import EMPTY
from notepad_jax.tasks import recipe
from notepad_jax.tasks.draws import Cast, SampleDraws
from notepad_jax.tasks.haystack import Count, Haystack
from notepad_jax.tasks.recipe import Fact
from notepad_jax.types import Task

DEEPEST = 4  # of a search
WIDEST = 3  # nodes of a level
MOST = 6  # parents of a node
NOTHING_THERE = 1 / 8  # share of the questions whose answer is empty

_OWN = 16  # nodes that are kept for what is asked about; the others' numbers begin here
_SECOND = 0.3  # share of the nodes of a level that two nodes of the last one lead to
_EDGES_A_NODE = 4  # around it, on average
_FEW = 16  # nodes around it, at the beginning of a document
_INTO = 1 / 32  # share of the edges around it that lead into it
_SQUARE = 2**20  # names of two halves: as many nodes as one of them has

Edge = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class SmallGraph:
    """A small graph and what is asked of it; nodes are numbers, the asked one is 0."""

    edges: Sequence[Edge]  # those that the answer rests on
    others: Sequence[Edge]
    answer: Sequence[int]
    operation: str  # with {node}


def make_task(name: str, seed: int, length: int, haystack: Haystack, count: Count) -> Task:
    """Makes one sample: a document of `length` tokens by `count`, and its question.

    As in `ruler.make_task`; of `haystack` nothing is used. The last gap, too short for an edge,
    is closed with bland sentences.

    Raises Unreachable, naming the task and the length, where the length cannot be reached;
    ValueError for an unknown task, a negative seed, or a `count` that is not additive.
    """
    if name not in NAMES:
        raise ValueError(f"there is no task {name!r} of GraphWalks; there are {', '.join(NAMES)}")
    sample = recipe.sample(f"graphwalks/{name}", seed, length, haystack, count)
    cast, around = sample.cast, Around(sample.draws)
    walk = _WALKS[name](cast)
    facts = _facts(cast, around, walk, name == "parents")
    document, evidence = recipe.hide_among(
        sample.task, facts, around.written, length, count, parted="\n"
    )
    return Task(
        id=f"graphwalks-{name}-{length}-{seed}",
        question=_question(walk.operation.format(node=around.named([0])[0])),
        document=document,
        answers=tuple(around.named(walk.answer)) or (EMPTY,),
        source=sample.task,
        metric="graphwalks",
        evidence=evidence,
    )


def _question(operation: str) -> str:
    return (
        f"The text lists the edges of a directed graph, one a line. {operation} "
        "End your answer with one line of this form: Final Answer: [node1, node2, node3]. "
        "If there is no such node, end it with: Final Answer: []"
    )


@dataclasses.dataclass(frozen=True)
class Around:
    """The edges around the small graph, and the names of all nodes, by number."""

    draws: SampleDraws

    def named(self, nodes: Sequence[int] | np.ndarray) -> list[str]:
        """Ten hexadecimal digits each, never the same for two nodes."""
        numbers = np.asarray(nodes, np.int64)
        halves = [self.draws.shuffle(purpose, _SQUARE).at(numbers).tolist() for purpose in (9, 10)]
        return [f"{high:05x}{low:05x}" for high, low in zip(*halves, strict=True)]

    def written(self, start: int, stop: int) -> list[str]:
        """The lines of the edges start to stop, of which there is no last."""
        ends = self.ends(np.arange(start, stop))
        return [line(a, b) for a, b in zip(*map(self.named, ends), strict=True)]

    def ends(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns int64 [n] and [n]: the nodes from which and to which the edges lead.

        Both are among the first k/4 + 16 for the k-th edge, so that every part of a document
        has new nodes and old ones.
        """
        noise = self.draws.shuffle(11, 2**32)
        shares = [noise.at(3 * edges + i) / 2**32 for i in range(3)]
        so_far = edges // _EDGES_A_NODE + _FEW
        near, far = (_OWN + (share * so_far).astype(np.int64) for share in shares[:2])
        own = 1 + (shares[1] * (_OWN - 1)).astype(np.int64)  # never into the asked one
        return near, np.where(shares[2] < _INTO, own, far)


def line(near: str, far: str) -> str:
    return f"{near} -> {far}"


def _facts(cast: Cast, around: Around, walk: SmallGraph, backwards: bool) -> list[Fact]:
    edges = [*walk.edges, *walk.others]
    nears, fars = (around.named(ends) for ends in zip(*edges, strict=True))
    facts = []
    for i, (near, far) in enumerate(zip(nears, fars, strict=True)):
        shown = (near if backwards else far) if i < len(walk.edges) else ""
        facts.append(Fact(cast.depth(), line(near, far), shown))
    return facts


def _search(cast: Cast) -> SmallGraph:
    """Levels of new nodes; edges back, which shorten no way, and on from the asked level."""
    depth = cast.between(1, DEEPEST)
    reached = cast.between(0, depth - 1) if cast.rng.random() < NOTHING_THERE else depth
    levels, edges = [[0]], []
    for _ in range(reached):
        first = levels[-1][-1] + 1
        levels.append(list(range(first, first + cast.between(1, WIDEST))))
        edges += _down(cast, levels[-2], levels[-1])
    others = [(_outside(cast), 0), *(_back(cast, levels) for _ in range(2 if reached else 0))]
    found = levels[depth] if reached == depth else []
    others += [(node, _outside(cast)) for node in found]
    edge = "one edge" if depth == 1 else f"{depth} edges"
    operation = (
        f"Perform a breadth-first search from node {{node}} and find the nodes at depth {depth}, "
        f"no more and no less: those whose shortest way from it has {edge}."
    )
    return SmallGraph(edges, others, found, operation)


def _down(cast: Cast, above: Sequence[int], below: Sequence[int]) -> list[Edge]:
    edges = []
    for node in below:
        nears = cast.rng.permutation(above).tolist()
        edges += [(near, node) for near in nears[: 1 + (cast.rng.random() < _SECOND)]]
    return edges


def _back(cast: Cast, levels: Sequence[Sequence[int]]) -> Edge:
    """From a level to itself or one above."""
    low = cast.between(1, len(levels) - 1)
    ends = (levels[low], levels[cast.between(0, low)])
    near, far = (level[cast.between(0, len(level) - 1)] for level in ends)
    return near, far


def _outside(cast: Cast) -> int:
    return _OWN + cast.between(0, _FEW - 1)


def _parents(cast: Cast) -> SmallGraph:
    """Nodes that lead to the asked one, some also elsewhere, and nodes that it leads to."""
    found = [] if cast.rng.random() < NOTHING_THERE else range(1, 1 + cast.between(1, MOST))
    children = range(1 + MOST, 1 + MOST + cast.between(1, WIDEST))
    others = [(0, child) for child in children]
    others += [(node, _outside(cast)) for node in found if cast.rng.random() < 0.5]
    operation = (
        "Find the parents of node {node}: the nodes that have an edge to it, without it itself."
    )
    return SmallGraph([(node, 0) for node in found], others, found, operation)


_WALKS: Mapping[str, Callable[[Cast], SmallGraph]] = {"bfs": _search, "parents": _parents}
NAMES = tuple(_WALKS)
