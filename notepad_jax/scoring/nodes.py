"""The metric of node sets: GraphWalks' F1 over the last line, `Final Answer: [a, b]`.

As the port of the data set's grading in NVIDIA's NeMo Gym does it: names are compared as they are
written, quotes and case included, and white space behind the answer is no line. (The lines on the
data set's card leave "Final Answer: [" in the first name, which no node is called.) Not as there:
an item "[]" is no item, since that is how an empty gold answer is written. Used by metrics.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from notepad_jax.scoring.extraction import Malformed

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
