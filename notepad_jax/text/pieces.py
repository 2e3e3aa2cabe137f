"""Which text each token is, by itself: for traces, and to see where a sentence ends.

Above: chunks and reading.turns; below: tokenizer.
"""

from __future__ import annotations

from notepad_jax.text.tokenizer import Tokenizer


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
