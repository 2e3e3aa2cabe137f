"""Turn-level credit: what each update turn added to the facts that it was shown, or lost of them.

A turn is shown the memory and, where it merges notes, those notes; it leaves a memory, or a note.
Its gain is the share of the task's facts in what it leaves, less the share in what it was shown:
above 0 for a fact that came in from the document, below for one that was dropped on the way, in a
serial reading and in every round and level of a parallel one. Of one serial pass the gains add up
to the recall of the last memory. Facts are the task's evidence; where a task has none, its
gold answers (ReMemR1's step reward is the gain in words of these). Pure, given a decoder. Above:
rollout.rewards, which has it as a reward of memories; below: memory_agent and scoring.recall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.scoring import metrics
from notepad_jax.scoring.recall import Recall
from notepad_jax.text.prompts import Template
from notepad_jax.types import Action, Evidence, MemoryState, Task, Tokens, Turn, TurnKind

Decode = Callable[[Tokens], str]
GAIN = "recall_gain"  # what a config calls it


def gains(
    rules: Rules, template: Template, decode: Decode, turns: Sequence[Turn], task: Task
) -> tuple[float, ...]:
    """Returns the gain of each update turn of a whole reading, from -1 to 1, in their order.

    Raises ValueError for evidence without words.
    """
    facts = _Facts(task)
    return tuple(
        facts.share([left(rules, turn, before.memory_tokens, after.memory_tokens)], decode)
        - facts.share(shown(before), decode)
        for turn, before, after in memory_agent.played(rules, template, turns)
        if turn.kind is TurnKind.UPDATE
    )


def shown(before: MemoryState) -> list[Tokens]:
    """Returns the memory and the notes that the turn after a state is shown; not the document."""
    notes = [before.chunks[before.next_chunk]] if before.round.level > 0 else []
    return [before.memory_tokens, *notes]


def left(rules: Rules, turn: Turn, before: Tokens, after: Tokens) -> Tokens:
    """Returns the note that an update turn wrote, where notes are merged, else the memory after it.

    `before` and `after` are memories. A turn that had nothing to note leaves the memory that it was
    shown.
    """
    if not rounds.merges(rules, turn.level):
        return after
    said = memory_agent.written(turn.completion)
    return said if turn.action is Action.WRITE and len(said) else before


class _Facts:
    """What is looked for in the notes of a reading of one task."""

    def __init__(self, task: Task) -> None:
        golds = (Evidence(gold, 0.0) for gold in task.answers if metrics.normalise(gold))
        self._recall = Recall(task.evidence or tuple(golds))
        self._any = not task.evidence and task.metric not in metrics.ALL_WANTED

    def share(self, texts: Sequence[Tokens], decode: Decode) -> float:
        """Returns the share of the facts that stand in any text; of golds, one may do for all."""
        held = [any(of_one) for of_one in zip(*(self._held(decode(t)) for t in texts), strict=True)]
        if self._any:
            return float(any(held))
        return sum(held) / max(1, len(held))

    def _held(self, text: str) -> tuple[bool, ...]:
        self._recall.see(text)
        return self._recall.held
