"""The turns of a reading for its trace, token by token: the exact prompts, and what was said.

A prompt is kept in its two parts. Members of a group share the first, which holds the chunk, so
only one of them has it and the others say who. Which text a token is stands beside the turns,
for the tokens that occur: a trace can be looked at where nobody has the tokenizer. Above:
rollout.archive; beside: trace, whose lines these become.
"""

from __future__ import annotations

from collections.abc import Iterable

from notepad_jax.reading.trace import Kept, Spool, TurnRecord
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Turn

PLACES = 4  # of a logprob, after the point


class Pieces:
    """Which text each token is, looked up once; control pieces by their names."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._before = [int(i) for i in tokenizer.encode("a")]
        self._cut = len(tokenizer.decode(self._before))
        self._known = {i: name for name, i in tokenizer.controls.items()}

    def __getitem__(self, token: int) -> str:
        """Returns the text of a token in the middle of a text, its space included.

        Of a token that is a part of a character that is U+FFFD.
        """
        if token not in self._known:
            after = self._tokenizer.decode([*self._before, token])
            self._known[token] = after[self._cut :]
        return self._known[token]


def kept(turns: Iterable[Turn], pieces: Pieces, shared_of: int | None = None) -> Kept:
    """Returns the turns for `TraceFile.add`.

    `shared_of` is the number of the reading, of the same group, that has the shared parts of
    the prompts; None: they are kept here.
    """
    spool, found = Spool(), set()
    for turn in turns:
        record = TurnRecord(
            chunk=turn.chunk,
            kind=turn.kind.value,
            version=turn.completion.policy_version,
            finish=turn.completion.finish.value,
            shared=turn.prompt.shared.tolist() if shared_of is None else (),
            shared_of=shared_of,
            tail=turn.prompt.tail.tolist(),
            tokens=turn.completion.tokens.tolist(),
            logprobs=[round(float(x), PLACES) for x in turn.completion.behaviour_logprobs],
        )
        found.update(record.shared, record.tail, record.tokens)
        spool.add(record)
    return Kept(spool, {token: pieces[token] for token in sorted(found)})
