"""The metric of label answers: BABILong's, which looks for the few words a task can ask for.

Of an answer in lower case the first sentence counts, up to a full stop and to where a model begins
an example of its own. It is right if the labels in it, less those that stand in the question, are
exactly those of the gold answer (babilong/metrics.py of booydar/babilong, written anew from what it
does). A label counts wherever its letters stand ("know" says no), as published. Not as published: a
label within a longer one is none, so that "none" does not say one, too, which made it wrong
always; and the question ends with its first question mark, behind which ours says how to answer.
Used by metrics; imports nothing of ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

Labels = tuple[str, ...]

LABELS: Mapping[str, Labels] = {
    "babilong_places": ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office"),
    "babilong_gifts": ("apple", "bill", "football", "fred", "jeff", "mary", "milk"),
    "babilong_yes_no": ("no", "yes"),
    "babilong_maybe": ("maybe", "no", "yes"),
    "babilong_numbers": ("none", "one", "three", "two"),
    "babilong_things": ("apple", "football", "milk", "nothing"),
}
_ENDS = (".", "<context>", "<example>")
_SHORTEST_LIST = 4  # characters: a shorter answer with a comma in it is one label


def judge(labels: Labels, prediction: str, answers: Sequence[str], question: str = "") -> float:
    """1 if the prediction says the labels of a gold answer ("milk", "apple,milk") and no other."""
    said = prediction.lower()
    for end in _ENDS:
        said = said.partition(end)[0]
    asked = question.lower().partition("?")[0]
    found = _found(labels, said) - _found(labels, asked)
    return float(any(found == _wanted(gold.lower()) for gold in answers))


def _found(labels: Iterable[str], text: str) -> set[str]:
    found = set()
    for label in sorted(labels, key=len, reverse=True):
        if label in text:
            found.add(label)
            text = text.replace(label, " ")
    return found


def _wanted(gold: str) -> set[str]:
    return set(gold.split(",")) if len(gold) >= _SHORTEST_LIST else {gold}


METRICS: Mapping[str, Callable[..., float]] = {
    name: functools.partial(judge, labels) for name, labels in LABELS.items()
}
