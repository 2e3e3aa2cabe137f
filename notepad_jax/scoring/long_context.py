"""The scorers of five benchmarks of long context: MRCR, OOLONG, NoLiMa, GraphWalks and BABILong.

Written from what the published functions do, not with their lines: OpenAI's grader of MRCR (its
dataset's card), `synth_process_response` of abertsch72/oolong, metric "contains" of
adobe-research/NoLiMa, the port of GraphWalks' grading in NVIDIA's NeMo Gym, babilong/metrics.py of
booydar/babilong. They get the answer that the task's contract finds; where a metric cannot tell an
answer's type from the gold answer, there is one name for each type. What they do otherwise than
the published ones is listed in docs/evaluation.md, and below. Above: metrics; below: extraction.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from notepad_jax.scoring.extraction import Malformed

PREFIX = 10  # characters with which an answer of MRCR has to begin
FAR_TOO_LONG = 10  # times the gold answer: the ratio could only be below 2 / 11, and costs much
SHORT = 20  # characters: OOLONG takes an answer of fewer as it is

_COMPARISONS = ("more common", "less common", "same frequency")  # in OOLONG's order
_BOLD = str.maketrans("", "", "*[]")
_DATE = re.compile(r"[A-Za-z0-9\s,./'-]+")
_COMPACT = re.compile(r"\b(\d{4})(\d\d)(\d\d)\b")
_DATE_PART = re.compile(r"[A-Za-z]+|\d+")
_MONTHS = {
    name: number
    for number, month in enumerate(
        "january february march april may june july august september october november december"
        .split(), start=1,
    )
    for name in (month, month[:3])
} | {"sept": 9}  # fmt: skip
_SILENT = frozenset(
    "st nd rd th of on at and monday tuesday wednesday thursday friday saturday sunday "
    "mon tue wed thu fri sat sun".split()
)  # words of a date that say nothing about which


def mrcr(prediction: str, answers: Sequence[str]) -> float:
    """Ratio of matching characters, for an answer that begins with the gold one's prefix.

    The prefix is the first PREFIX characters of a gold answer and counts no further: 2 M / T
    with M characters in difflib's matching blocks and T in both rests (`SequenceMatcher.ratio`).
    White space before it is let pass. Without it, and FAR_TOO_LONG, 0.
    """
    return max(_copied(prediction.lstrip(), gold) for gold in answers)


def _copied(said: str, gold: str) -> float:
    prefix, rest = gold[:PREFIX], gold[PREFIX:]
    if not said.startswith(prefix) or len(said) > FAR_TOO_LONG * len(gold):
        return 0.0
    return difflib.SequenceMatcher(None, said.removeprefix(prefix), rest).ratio()


def contains(prediction: str, answers: Sequence[str]) -> float:
    """1 if a gold answer occurs in the prediction, in its case, glued to what it may be."""
    return float(any(gold in prediction for gold in answers))


def oolong(prediction: str, answers: Sequence[str]) -> float:
    """1 if what stands after the last colon is a gold label, user, month or comparison."""
    said = _after_the_colon(prediction)
    return float(any(_equal(said, gold) for gold in answers))


def oolong_number(prediction: str, answers: Sequence[str]) -> float:
    """.75 ** |said - gold| for the whole number after the last colon; 0 where there is none."""
    said = _after_the_colon(prediction)
    return max(float(_equal(said, gold)) or _near(said, gold) for gold in answers)


def oolong_date(prediction: str, answers: Sequence[str]) -> float:
    """1 if the date after the last colon is a gold one, in any usual way of writing a date."""
    said = _after_the_colon(prediction)
    day = _date(said)
    return float(any(_equal(said, gold) or (day and day == _date(gold)) for gold in answers))


def _after_the_colon(text: str) -> str:
    """The answer: what stands after the last colon, or without one a short text or last word."""
    before, colon, last = text.rpartition(":")
    if not colon:
        return text if len(text) < SHORT else "".join(text.split()[-1:])
    said = last.strip().translate(_BOLD)
    if len(said) < SHORT:
        return said
    return next((words for words in _COMPARISONS if words in said), said)


def _equal(said: str, gold: str) -> bool:
    return said == gold or (said in _COMPARISONS and said in gold)


def _near(said: str, gold: str) -> float:
    try:
        return 0.75 ** abs(int(gold) - int(said))
    except (ValueError, OverflowError):  # no numbers, or too far apart for a float
        return 0.0


def _date(text: str) -> datetime.date | None:
    """The day that a text names by year, month and day; None for anything else."""
    if not _DATE.fullmatch(text):
        return None
    parts = _DATE_PART.findall(_COMPACT.sub(r"\1-\2-\3", text.lower()))
    telling = [part for part in parts if part not in _SILENT]
    months = [_MONTHS[part] for part in telling if part in _MONTHS]
    numbers = [int(part) for part in telling if part.isdecimal() and len(part) <= 4]
    if len(telling) != 3 or len(numbers) + len(months) != 3 or len(months) > 1:
        return None
    return _day(numbers, months[0] if months else 0)


def _day(numbers: Sequence[int], month: int) -> datetime.date | None:
    """Year first or last; without a month's name the American order, or the one that is left."""
    year, *rest = numbers if numbers[0] > 31 else (numbers[-1], *numbers[:-1])
    if not month and len(rest) == 2:
        month = rest.pop(0)
        if month > 12 and numbers[0] <= 31:
            month, rest = rest[0], [month]
    try:
        return datetime.date(year, month, rest[0])
    except ValueError:
        return None


# ---------------------------------------------------------------- GraphWalks: nodes
#
# The last line is `Final Answer: [a, b]`. Names are compared as they are written, quotes and case
# included, and white space behind the answer is no line. (The lines on the data set's card leave
# "Final Answer: [" in the first name, which no node is called.) Not as there: an item "[]" is no
# item, since that is how an empty gold answer is written.

EMPTY = "[]"  # the gold answer where no node is right: a task has at least one answer
_SIGN = re.compile(r"Final Answer:\s*\[")


def graphwalks(prediction: str, answers: Sequence[str]) -> float:
    """F1 of the nodes in the last line's list and the gold ones; 1 where both are none.

    Raises Malformed for a last line without such a list.
    """
    said, gold = set(_listed(prediction)) - {EMPTY}, set(answers) - {EMPTY}
    if not said and not gold:
        return 1.0
    return 2 * len(said & gold) / (len(said) + len(gold))


def _listed(prediction: str) -> list[str]:
    line = prediction.strip().rpartition("\n")[2]
    sign, end = _SIGN.search(line), line.rfind("]")
    if sign is None or end < sign.end():
        raise Malformed("no_final_answer")
    items = map(str.strip, line[sign.end() : end].split(","))
    return [item for item in items if item]


# ---------------------------------------------------------------- BABILong: labels
#
# Of an answer in lower case the first sentence counts, up to a full stop and to where a model
# begins an example of its own. It is right if the labels in it, less those that stand in the
# question, are exactly those of the gold answer. A label counts wherever its letters stand ("know"
# says no), as published. Not as published: a label within a longer one is none, so that "none" does
# not say one, too, which made it wrong always; and the question ends with its first question mark,
# behind which ours says how to answer.

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


def babilong(labels: Labels, prediction: str, answers: Sequence[str], question: str = "") -> float:
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


BABILONG: Mapping[str, Callable[..., float]] = {
    name: functools.partial(babilong, labels) for name, labels in LABELS.items()
}
