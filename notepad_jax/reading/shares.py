"""Load balancing by length: the longest document first, to the part that has least.

The engine with the longest document ends last, and others wait. So shares are dealt as Graham did
(LPT, 1969), a third above the best at most, and within a share the longest is read first. Where
no length is known all are equal, and then it is by turns. Which share a document is in changes
when it is read and where, and nothing of what is said: noise goes by the reading. Above: loop
(engines of a process), training.rollouts and training.validation (processes).
"""

from __future__ import annotations

from collections.abc import Sequence

from notepad_jax.types import Document, Task

# Which of several completers read a document, by its id, for a later call: its chunks may be there
# still. It holds on to the documents, so that no other has their id.
Homes = dict[int, tuple[Document, int]]


def deal(lengths: Sequence[int], parts: int, loads: Sequence[int] = ()) -> list[list[int]]:
    """Returns the indices of each part's lengths, each index once, a part's longest first.

    Graham's longest processing time first (SIAM J. Appl. Math. 17, 1969): the fullest part has at
    most 4/3 of what is possible. `loads` is what each part has already, in the unit of the
    lengths; (): nothing. Equal lengths keep their order, and are dealt by turns. Raises ValueError
    for less than one part.
    """
    if parts < 1:
        raise ValueError(f"there are {parts} parts to deal to; it must be at least 1")
    full = list(loads) or [0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        part = min(range(parts), key=lambda part: (full[part], len(dealt[part])))
        dealt[part].append(index)
        full[part] += lengths[index]
    return dealt


def by_document(tasks: Sequence[Task]) -> list[list[int]]:
    """Returns the indices of the tasks about each document object, in the order they come in."""
    about: dict[int, list[int]] = {}
    for index, task in enumerate(tasks):
        about.setdefault(id(task.document), []).append(index)
    return list(about.values())


def whole_documents(
    tasks: Sequence[Task], work: Sequence[int], parts: int, homes: Homes | None = None
) -> list[list[int]]:
    """Returns the indices of each part's tasks: those about one document object stay together.

    `work` is what each task costs, in any unit. A document goes where `homes` says, or where
    `deal` puts it, which is written there; a part's largest documents come first.
    """
    homes = {} if homes is None else homes
    about = {id(tasks[indices[0]].document): indices for indices in by_document(tasks)}
    costs = {key: sum(work[index] for index in indices) for key, indices in about.items()}
    loads, new = [0] * parts, [key for key in about if key not in homes]
    for key in about.keys() & homes.keys():
        loads[homes[key][1]] += costs[key]
    for part, dealt in enumerate(deal([costs[key] for key in new], parts, loads)):
        for key in (new[number] for number in dealt):
            homes[key] = tasks[about[key][0]].document, part
    shares: list[list[int]] = [[] for _ in range(parts)]
    for key in sorted(about, key=lambda key: -costs[key]):
        shares[homes[key][1]].extend(about[key])
    return shares
