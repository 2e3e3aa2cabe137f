"""The text of each token by itself: for traces, and to find where a sentence ends; as bytes, for
grammars.

Above: chunks, grammar and reading.turns; below: tokenizer.
"""

from __future__ import annotations

import re

from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.text.unwritable import byte_alphabet

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Pieces:
    """The text of each token, looked up once; control pieces by their names."""

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


def token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """Returns each id's bytes in the middle of a text; none for control pieces."""
    alphabet = byte_alphabet() if tokenizer.byte_level else {}
    found = [_bytes(piece, alphabet) for piece in tokenizer.pieces()]
    for i in tokenizer.controls.values():
        found[i] = b""
    return found


def _bytes(piece: str, alphabet: dict[str, int]) -> bytes:
    if alphabet:
        known = all(one in alphabet for one in piece)  # else it was added, as it is written
        return bytes(alphabet[one] for one in piece) if known else piece.encode()
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
