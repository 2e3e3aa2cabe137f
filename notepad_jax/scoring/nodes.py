"""Answers that are sets of nodes: GraphWalks' F1 over the last line, `Final Answer: [a, b]`.

As the data set's card and its port to NVIDIA's NeMo Gym do it: names are compared as they are
written, quotes and case included. Where the two differ: white space behind the answer is no line
(as in the port), and brackets within the brackets are taken off (as on the card, whose own lines
leave "Final Answer: [" in the first name, which no node is called). Used by metrics.
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
    said, gold = set(_listed(prediction)), set(answers) - {EMPTY}
    if not said and not gold:
        return 1.0
    return 2 * len(said & gold) / (len(said) + len(gold))


def _listed(prediction: str) -> list[str]:
    line = prediction.strip().rpartition("\n")[2]
    sign, end = _SIGN.search(line), line.rfind("]")
    if sign is None or end < sign.end():
        raise Malformed("no_final_answer")
    items = line[sign.end() : end].strip("[]").split(",")
    return [item.strip() for item in items if item.strip()]
