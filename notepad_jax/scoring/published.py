r"""Published reward functions, to the letter and with their faults: for comparison.

`memagent` is the training reward of the memory agents, the four of `memory_` are
MemoryAgentBench's evaluation. The others are GoLongRL's reward functions, under the names of ours
that mean the same: `published_pairwise` beside `pairwise`. What each does otherwise than ours is
listed in docs/evaluation.md. They judge a whole completion: thinking is there where the published
function sees it, and each finds the answer in its own way, so a task's contract does not matter to
them. Written from what the published functions do, not with their lines. Above: metrics; imports
nothing of ours but `extraction.Malformed`.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from notepad_jax.scoring.extraction import Malformed

WINDOW = 300  # characters at the end of a completion in which `memagent` looks for a box

_BOX, _OPEN_BOX, _BRACED_BOX = "\\boxed", "\\boxed ", "\\boxed{"
# In this order, one after the other: what an earlier one leaves, a later one may find.
_CLEANING = (
    ("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"),
    ("\\left", ""), ("\\right", ""), ("^{\\circ}", ""), ("^\\circ", ""), ("\\$", ""),
    ("\\%", ""), (" .", " 0."), ("{.", "{0."), (" ", ""),
)  # fmt: skip
_SIGN = "answer:"  # behind which MemoryAgentBench looks for an answer
_STATED = (r"The correct answer is \(([A-D])\)", r"The correct answer is ([A-D])")


def memagent(completion: str, answers: Sequence[str]) -> float:
    r"""1 if the box at the end of a completion holds a gold answer, as MemAgent trains.

    (verl/utils/reward_score/hotpotqa.py.) Of the last 300 characters in lower case: where a
    `\boxed` is followed by a space, what stands after the last such one up to the next dollar
    sign; else the last `\boxed{...}`, its braces balanced. Both sides are cleaned by
    `_CLEANING` and compared. Raises Malformed for no box and an unclosed one.
    """
    said = _clean(_boxed(completion[-WINDOW:].lower()))
    return float(any(said == _clean(gold.lower()) for gold in answers))


def _boxed(text: str) -> str:
    if _OPEN_BOX in text:
        return text.rpartition(_OPEN_BOX)[2].partition("$")[0]
    start = text.rfind(_BOX)
    if not text.startswith(_BRACED_BOX, max(start, 0)):
        raise Malformed("no_box")  # an \fbox is none, nor a \boxedx{...}
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if text[at] == "}" and depth == 0:
            return text[start + len(_BRACED_BOX) : at]
    raise Malformed("unclosed_box")


def _clean(text: str) -> str:
    for old, new in _CLEANING:
        text = text.replace(old, new)
    return text


# ---------------------------------------------------------------- GoLongRL: lists


def set_f1(completion: str, answers: Sequence[str]) -> float:
    """F1 of two sets of lines; a blank line between two others is a line."""
    said, gold = set(_lines(completion)), set(_gold(answers))
    common = len(said & gold)
    return 2 * common / (len(said) + len(gold)) if common else 0.0


def sub_em_lines(completion: str, answers: Sequence[str]) -> float:
    """The share of gold items that are lines, however many other lines there are."""
    said, gold = set(_lines(completion)), _gold(answers)
    return sum(item in said for item in gold) / len(gold)


def ndcg(completion: str, answers: Sequence[str]) -> float:
    """NDCG@k with k gold items, as trec_eval's; a repeated line stands where it last stood."""
    said, gold = _lines(completion), _gold(answers)
    gain = {item: len(gold) - i for i, item in enumerate(gold)}
    last = {line: i for i, line in enumerate(said)}
    ranked = sorted(last, key=last.__getitem__)[: len(gold)]
    ideal = _discounted(sorted(gain.values(), reverse=True))
    return _discounted([gain.get(line, 0) for line in ranked]) / ideal


def pairwise(completion: str, answers: Sequence[str]) -> float:
    """Gold pairs in the right order, divided by the pairs of *predicted* lines.

    So two lines in order are worth 1 whatever was asked for, and a correct list with a
    remark above it less than 1. More than 1, as repeated gold items make possible, is 0.
    """
    said, gold = _lines(completion), _gold(answers)
    if len(said) < 2 or len(gold) < 2:
        return 0.0
    last = {line: i for i, line in enumerate(said)}
    earlier: list[int] = []
    in_order = 0
    for here in (last[item] for item in gold if item in last):
        in_order += bisect.bisect_left(earlier, here)
        bisect.insort(earlier, here)
    worth = in_order / math.comb(len(said), 2)
    return worth if worth <= 1 else 0.0


def accuracy(completion: str, answers: Sequence[str]) -> float:
    """1 if the first line is the first gold answer, but for case and white space."""
    return float(_lines(completion)[0] == _gold(answers)[0])


def _lines(completion: str) -> list[str]:
    """The lines after the last `[Answer]`, or all of them; one at least."""
    sign = next((sign for sign in ("[Answer]", "[答案]") if sign in completion), "")
    area = completion.rpartition(sign)[2] if sign else completion
    return _gold(area.strip().lower().split("\n"))


def _gold(answers: Sequence[str]) -> list[str]:
    return [" ".join(answer.lower().split()) for answer in answers]


def _discounted(gains: Sequence[int]) -> float:
    return math.fsum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


# ---------------------------------------------------------------- GoLongRL: the others


def em(completion: str, answers: Sequence[str]) -> float:
    """1 if all that stands after the thinking is a gold answer, but for white space around."""
    said = _after_thinking(completion).strip()
    return float(any(said == gold.strip() for gold in answers))


def choice(completion: str, answers: Sequence[str]) -> float:
    """1 if the first "The correct answer is (B)", or else "... is B", names the gold letter.

    A to D alone, in these words and this case. Raises Malformed("no_letter") without them.
    """
    said = _letter(_after_thinking(completion))
    if not said:
        raise Malformed("no_letter")
    return float(any(said in (gold, _letter(gold)) for gold in answers))


def row_iou(completion: str, answers: Sequence[str]) -> float:
    """Multiset Jaccard of the rows of two JSON objects with `data`; cells by Python's `str`.

    So 1, 1.0 and "1.0" are three cells where they stand in lists, and case counts. The table
    is what the first `<answer>...</answer>` holds, thinking included, or all of the text.
    """
    _, opened, behind = completion.partition("<answer>")
    said = _rows(behind.partition("</answer>")[0] if opened else completion)
    if not isinstance(said, list):
        raise Malformed("no_table")
    golds = (rows for rows in map(_rows, answers) if isinstance(rows, list))
    return max((_jaccard(said, rows) for rows in golds), default=0.0)


def _after_thinking(completion: str) -> str:
    return completion.rpartition("</think>")[2]


def _letter(text: str) -> str:
    text = text.replace("*", "")
    found = filter(None, (re.search(pattern, text) for pattern in _STATED))
    return next((match[1] for match in found), "")


def _rows(text: str) -> Any:
    try:
        table = json.loads(text.strip())
    except (ValueError, RecursionError):
        return []
    return table.get("data", []) if isinstance(table, Mapping) else []


def _jaccard(said: list[Any], gold: list[Any]) -> float:
    ours, theirs = Counter(map(_row, said)), Counter(map(_row, gold))
    common = (ours & theirs).total()
    union = len(said) + len(gold) - common
    return common / union if union else 0.0


def _row(row: Any) -> Hashable:
    return tuple(map(str, row)) if isinstance(row, list) else str(row)


# ---------------------------------------------------------------- MemoryAgentBench


def memory_em(completion: str, answers: Sequence[str], line_only: bool = False) -> float:
    """1 if the completion, or the line with its answer, is a gold one, both normalised as SQuAD's.

    (utils/eval_other_utils.py, `exact_match`.) `line_only`: the line alone, as for its data sets
    of labels and events.
    """
    said = _ways(completion, line_only)
    return float(any(way == _squad(gold) for way in said for gold in answers))


def memory_sub_em(completion: str, answers: Sequence[str], line_only: bool = False) -> float:
    """As `memory_em` (`substring_exact_match`), but a gold answer may be any part of it."""
    said = _ways(completion, line_only)
    return float(any(_squad(gold) in way for way in said for gold in answers))


def _ways(completion: str, line_only: bool) -> list[str]:
    line = _line(completion)
    return [_squad(line)] if line_only else [_squad(completion), _squad(line)]


def _line(completion: str) -> str:
    """The rest of the line behind the first "Answer:", or without one the first line."""
    sign = re.search(_SIGN, completion, re.IGNORECASE)
    line = completion[sign.end() if sign else 0 :].partition("\n")[0].strip()
    return line[len(_SIGN) :].strip() if line.lower().startswith(_SIGN) else line


def _squad(text: str) -> str:
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


# What others published for what a metric of ours judges. `accuracy` has no twin: we read it as
# `choice` or `normalised_em`, as the gold answer is.
TWINS: Mapping[str, str] = {
    "boxed": "memagent",
    "em": "published_em",
    "choice": "published_choice",
    "set_f1": "published_set_f1",
    "row_iou": "published_row_iou",
    "sub_em_lines": "published_sub_em_lines",
    "ndcg": "published_ndcg",
    "pairwise": "published_pairwise",
}
METRICS: Mapping[str, Callable[[str, Sequence[str]], float]] = {
    "memagent": memagent,
    "published_em": em,
    "published_choice": choice,
    "published_set_f1": set_f1,
    "published_row_iou": row_iou,
    "published_sub_em_lines": sub_em_lines,
    "published_ndcg": ndcg,
    "published_pairwise": pairwise,
    "published_accuracy": accuracy,
    "published_memory_em": memory_em,
    "published_memory_em_line": functools.partial(memory_em, line_only=True),
    "published_memory_sub_em": memory_sub_em,
    "published_memory_sub_em_line": functools.partial(memory_sub_em, line_only=True),
}
ALL_WANTED = frozenset(TWINS[name] for name in ("set_f1", "sub_em_lines", "ndcg", "pairwise"))
