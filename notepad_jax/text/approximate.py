"""A rule-based tokenizer for models without one at hand: text cut about as BPE cuts it.

An endpoint takes text and gives text, and yet chunks, memories and limits are counted in
tokens. `ApproximateTokenizer` counts them within a few percent on English prose: a word
with its space is one piece, a very long one two, digits go in threes, Chinese and Japanese
by the character. On the docstrings of Python's standard library a piece of ours has 4.16
characters; one of cl100k and o200k (OpenAI) has 4.4, one of DeepSeek V3 has 4.3. In other
languages it can be off by half.

Every string comes back as it went in, lone surrogates too. Ids of single characters are
their code points; longer pieces get theirs on first sight, so ids mean something only to
the object that gave them: **never write them to a file**, and never train on them. A
document cannot become a special token, because there is none but the stop id, which no
text has. Used with reading.endpoint, and `count` as the ruler for documents of a wanted length;
the neighbour `tokenizer` has the protocol and the real ones.
"""

from __future__ import annotations

import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from notepad_jax.text.controls import CONTROL_LOOK
from notepad_jax.types import Tokens, tokens

STOP = 0x110000  # the first id that is no code point
FIRST_PIECE = STOP + 1
MAX_PIECES = 1 << 20  # pieces that are given an id, some 200 MB; later ones are spelled out
BLOCK = 65_536  # characters that are cut at a time

# Every alternative is a run of limited length that ends at the first character that does not
# fit, and looks no further; so all pieces of a buffer but the last are as in the whole text.
# The last alternative takes what is left by the character: CJK, symbols, marks, surrogates.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_PIECE = re.compile(
    r" ?[A-Za-z]{1,10}"
    r"|[0-9]{1,3}"
    r"| ?[!-/:-@\[-`{-~]{1,3}"  # ASCII punctuation
    rf"| ?(?:(?![A-Za-z{_CJK}])[^\W\d_]){{1,4}}"  # letters of other alphabets
    r"|[\r\n]{1,32}|[ \t]{1,32}"
    r"|[\s\S]"
)
_SPELLED = -1  # in the table's answer: this piece has no id and is written by the character


def count(text: str) -> int:
    """Returns how many pieces the text is cut into, in tokens; remembers nothing.

    Equals `len(encode(text))` while a tokenizer knows less than MAX_PIECES pieces.
    """
    return sum(map(len, _cut([text])))


class ApproximateTokenizer:
    """A `tokenizer.Tokenizer` that cuts text by rule and numbers the pieces as they come.

    `vocab_size` is the bound below which all ids stay, whatever is read; it is no size of
    an embedding. The table of pieces grows with what is read up to MAX_PIECES; a piece
    once numbered keeps its id, and one that came too late is spelled ever after. So a text
    has the same ids for as long as the object lives.
    """

    path = pathlib.Path("approximate")  # for messages: there is no file
    vocab_size: int = FIRST_PIECE + MAX_PIECES
    stop_ids: tuple[int, ...] = (STOP,)
    controls: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._ids = _Table(MAX_PIECES)

    def encode(self, text: str) -> Tokens:
        """Returns the ids of the text's pieces, int32 [n]."""
        return tokens(np.concatenate([tokens(), *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        some BLOCKs of characters are held, and one piece.
        """
        for block in _cut(pieces):
            yield tokens(self._numbered(block))

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; the stop id vanishes, unknown ids become U+FFFD."""
        known = self._ids.pieces
        return "".join([known.get(i) or _character(i) for i in map(int, ids)])

    def control_id(self, name: str) -> int:
        """Raises ValueError: there is no control piece, the endpoint writes its own."""
        raise ValueError(
            f"there is no control piece {name!r} in the approximate tokenizer: an endpoint writes "
            "its own turn markers; load the template with endpoint.bare_turn(tokenizer)"
        )

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we wrote; ValueError where it has a control piece `<|name|>`."""
        for name in CONTROL_LOOK.findall(text):
            self.control_id(name)
        return self.encode(text)

    def _numbered(self, block: list[str]) -> np.ndarray:
        ids = np.fromiter(map(self._ids.__getitem__, block), np.int32, len(block))
        if len(ids) and ids.min() == _SPELLED:
            spelled = zip(block, ids.tolist(), strict=True)
            every = [map(ord, piece) if i == _SPELLED else (i,) for piece, i in spelled]
            return np.fromiter(itertools.chain.from_iterable(every), np.int32)
        return ids


class _Table(dict[str, int]):
    """Piece -> id, and back in `pieces`; a miss numbers the piece while there is room.

    Safe where several threads encode: a lost race leaves an id that is never used.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._free = itertools.count(FIRST_PIECE)
        self.pieces: dict[int, str] = {}

    def __missing__(self, piece: str) -> int:
        if len(piece) == 1:
            return self.setdefault(piece, ord(piece))
        if len(self.pieces) >= self._room:
            return _SPELLED
        i = next(self._free)
        self.pieces[i] = piece  # before another thread can see the id
        return self.setdefault(piece, i)


def _character(i: int) -> str:
    if 0 <= i < STOP:
        return chr(i)
    return "" if i == STOP else "\ufffd"


def _cut(pieces: Iterable[str]) -> Iterator[list[str]]:
    """Yields the pieces of the joined text in lists that are never empty."""
    last = ""
    for block in _blocks(pieces):
        found = _PIECE.findall(last + block)
        last = found.pop()  # may be longer as more text comes; the others are decided
        if found:
            yield found
    if last:
        yield [last]


def _blocks(pieces: Iterable[str]) -> Iterator[str]:
    """Yields the same text in strings of BLOCK characters up to about twice as many."""
    waiting: list[str] = []
    held = 0
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            part = piece[start : start + BLOCK]
            waiting.append(part)
            held += len(part)
            if held >= BLOCK:
                yield "".join(waiting)
                waiting, held = [], 0
    if held:
        yield "".join(waiting)
