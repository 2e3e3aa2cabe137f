"""The turns of a reading for its trace, token by token: exact prompts and completions.

A prompt is kept in its two parts. Members of a group share the first, which holds the chunk, so
only one of them has it and the others say which. Which text a token is stands beside the turns,
for the tokens that occur: a trace can be looked at where there is no tokenizer. Above:
rollout.archive, eval.readings and programs.ask; beside: trace, whose lines these become; below:
sources.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sources import Sources
from notepad_jax.reading.trace import Kept, Spool, TurnRecord
from notepad_jax.text.pieces import Pieces
from notepad_jax.text.prompts import Template
from notepad_jax.types import Turn

PLACES = 4  # of a logprob, after the point


class Turns:
    """A recorder of the turns of a reading, as they come, from its first.

    `rules` and `template` are those that it is read by.
    """

    def __init__(self, pieces: Pieces, rules: Rules, template: Template) -> None:
        self._pieces, self._sources = pieces, Sources(rules, template)
        self._spool, self._found = Spool(), set()

    def add(
        self, turn: Turn, proximal: Sequence[float] | np.ndarray = (), shared_of: int | None = None
    ) -> None:
        """Appends a turn, with the trainer's logprobs where they are known.

        `shared_of` is the number of the reading, of the same group, that has the shared part of
        the prompt; None: it is kept here.
        """
        source = self._sources.add(turn)
        record = TurnRecord(
            chunk=turn.chunk,
            kind=turn.kind.value,
            version=turn.completion.policy_version,
            finish=turn.completion.finish.value,
            shared=turn.prompt.shared.tolist() if shared_of is None else (),
            shared_of=shared_of,
            tail=turn.prompt.tail.tolist(),
            tokens=turn.completion.tokens.tolist(),
            logprobs=_rounded(turn.completion.behaviour_logprobs),
            proximal=_rounded(proximal),
            level=turn.level,
            round=turn.round,
            unit=turn.unit,
            noted=source.noted,
            reads=source.reads,
        )
        self._found.update(record.shared, record.tail, record.tokens)
        self._spool.add(record)

    def kept(self) -> Kept:
        """Returns all that was added, for `TraceFile.add`, once."""
        return Kept(self._spool, {token: self._pieces[token] for token in sorted(self._found)})


def _rounded(logprobs: Sequence[float] | np.ndarray) -> list[float]:
    return [round(float(x), PLACES) for x in logprobs]
