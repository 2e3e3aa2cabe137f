"""Evidence recall: which of the facts an answer rests on the memory held, after each chunk.

A task may say by which words a memory is known to have kept a fact (`Task.evidence`). Fed
with every memory of a reading, `Recall` tells the share of facts in the last one and,
where the answer was wrong, which turn of fate lost it. A fact is present if it stands in
the memory as whole words after SQuAD's normalisation, the rule of scoring's `sub_em`; so
a memory that says the same in other words is not given credit, and one that repeats the
words in a wrong statement is. Beside: metrics; fed by eval.measure and by rollout.local.
"""

from __future__ import annotations

from collections.abc import Sequence

from notepad_jax.scoring.metrics import needle, normalise, stands_in
from notepad_jax.types import Evidence

NEVER_WRITTEN = "never written"  # some fact was in no memory
OVERWRITTEN = "overwritten"  # every fact was in a memory, and the last one lacks some
NOT_USED = "not used"  # the last memory has every fact, and the answer is wrong all the same
FATES = (NEVER_WRITTEN, OVERWRITTEN, NOT_USED)


class Recall:
    """Evidence recall of one reading: its facts, looked for in each memory as it is written.

    Costs one normalisation of the memory per call and one search per fact, whatever came
    before; keeps two flags per fact. Raises ValueError for evidence without a
    word in it, which would be found nowhere or everywhere.
    """

    def __init__(self, evidence: Sequence[Evidence]) -> None:
        for fact in evidence:
            if not fact.text.strip():
                raise ValueError(
                    f"the evidence at place {fact.place} has no text to look for; "
                    "give the words by which a memory that kept it is known"
                )
        self._facts = tuple(needle(fact.text) for fact in evidence)
        self._seen = [False] * len(self._facts)  # in any memory so far
        self._held = [False] * len(self._facts)  # in the last memory

    def see(self, memory: str) -> None:
        """Takes the text that the memory became."""
        self._held = self._seen_in(memory)

    def note(self, text: str) -> None:
        """Takes the text that a turn of a parallel reading wrote, which is no memory yet."""
        self._seen_in(text)

    def _seen_in(self, text: str) -> list[bool]:
        """Returns which facts stand in a text, and remembers that they were written."""
        said = normalise(text)
        found = [stands_in(fact, said if bare else text) for fact, bare in self._facts]
        self._seen = [a or b for a, b in zip(self._seen, found, strict=True)]
        return found

    @property
    def held(self) -> tuple[bool, ...]:
        """Whether each fact stands in the last memory, in the order of the evidence."""
        return tuple(self._held)

    @property
    def final(self) -> float | None:
        """The share of the facts in the last memory, in [0, 1]; None without evidence."""
        if not self._facts:
            return None
        return sum(self._held) / len(self._held)

    @property
    def captured(self) -> float | None:
        """The share of the facts that were written at any time; None without evidence.

        Capture as against retention, what of it is in the last memory: long documents cost a
        memory the second, hardly the first (MHM 2026, arXiv 2607.01523).
        """
        return sum(self._seen) / len(self._seen) if self._facts else None

    def fate(self, correct: bool) -> str:
        """Returns where a wrong answer was lost, one of FATES; "" if right or unknowable.

        A fact that was never written outweighs one that was overwritten.
        """
        if correct or not self._facts:
            return ""
        if not all(self._seen):
            return NEVER_WRITTEN
        return NOT_USED if all(self._held) else OVERWRITTEN
