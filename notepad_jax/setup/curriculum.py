"""A curriculum on chunks: short documents first, longer ones from a step on.

What a step reads depends on the steps that lie behind it (the version of the policy), and on
nothing else: a run that goes on is at the stage where it was. Which questions are asked does not
change with the stage. Above: task_stream, which makes or cuts the documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

KEY = "tasks.curriculum"  # of a config: ("4@0", "8@50")


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """A curriculum's stages: (steps done before it, most chunks of a document; 0: no limit)."""

    stages: tuple[tuple[int, int], ...] = ()

    def at(self, step: int) -> int:
        """Returns how many chunks a document has at most when `step` steps are done; 0: any."""
        return next((chunks for begin, chunks in reversed(self.stages) if begin <= step), 0)

    @property
    def shortest(self) -> int:
        """Chunks of the shortest stage; 0 where no stage has a limit."""
        return min((chunks for _, chunks in self.stages if chunks), default=0)

    @property
    def longest(self) -> int:
        """Chunks of the longest stage; 0 where one has no limit."""
        limits = [chunks for _, chunks in self.stages]
        return max(limits) if limits and all(limits) else 0


def parsed(words: Sequence[str]) -> Curriculum:
    """Reads ("4@0", "8@50"); ValueError for what is no stage, or stages out of order."""
    stages = []
    for word in words:
        chunks, _, step = str(word).partition("@")
        if not (chunks.strip().isdecimal() and step.strip().isdecimal()):
            raise ValueError(
                f"{KEY} has {word!r}; write CHUNKS@STEP in whole numbers, as 4@0 (0 chunks: no "
                f"limit)"
            )
        stages.append((int(step), int(chunks)))
    if stages and stages[0][0]:
        raise ValueError(
            f"{KEY} begins at step {stages[0][0]}; say what is read before it: CHUNKS@0"
        )
    for (first, _), (then, _) in zip(stages, stages[1:], strict=False):
        if then <= first:
            raise ValueError(f"{KEY} has step {then} behind step {first}; put them in order")
    return Curriculum(tuple(stages))


def told(step: int, chunks: int) -> str:
    """Returns the log line that a stage begins with `step`."""
    most = f"at most {chunks:,} chunk{'s' * (chunks > 1)}" if chunks else "any number of chunks"
    return f"from step {step:,} on, documents have {most} ({KEY})"
