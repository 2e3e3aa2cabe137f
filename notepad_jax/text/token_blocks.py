"""Streaming tokenization: text in blocks, so that a stream is encoded as the whole text would be.

However a text was cut on its way here, it is encoded in blocks whose borders depend on the
text alone; `encode` goes through the same blocks. A block ends before a single space
between two solid characters, which no supported model merges across (sentencepiece drops
that space and gets it back as the dummy prefix of the next block); byte-level models also
allow the start of a line and CJK punctuation. Text without such a place is cut after
`LONGEST_BLOCK` characters, the one place where ids may differ from the library's own for
the whole text. Above: sentencepiece_tokenizer and bpe_tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator

SHORTEST_BLOCK = 4_096  # characters; the first good border after these ends the block
LONGEST_BLOCK = 65_536  # characters; a block is cut here if no good border came

BORDER = re.compile(r"(?<=[\w\x21-\x7e]) (?=[\w\x21-\x7e])")
KEEPING_BORDER = re.compile(r"(?<=[\w\x21-\x7e])(?= [\w\x21-\x7e])")  # the space stays
# Byte-level models split text by a pattern first; in all of them letters end a piece before
# a space or punctuation. NFC cannot reach across.
_IN_WORDS = (
    KEEPING_BORDER.pattern
    + r"|(?<=[\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff])"
    + r"(?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
)
# In most of them a letter after line breaks starts a piece, too; in GPT-2's pattern only the
# last break of several belongs to the piece before it, so there one break must stand alone.
BYTE_LEVEL_BORDERS = (
    re.compile(_IN_WORDS + r"|(?<=\n)(?=[^\W\d_])"),
    re.compile(_IN_WORDS + r"|(?<=\S\n)(?=[^\W\d_])"),
)


def blocks(pieces: Iterable[str], border_pattern: re.Pattern[str]) -> Iterator[tuple[str, bool]]:
    """Yields (block, ends at a border); the borders depend on the joined text alone.

    What the pattern matches (a space, or nothing) belongs to neither block.
    """
    buffer: list[str] = []
    held, next_look = 0, SHORTEST_BLOCK
    for piece in pieces:
        buffer.append(piece)
        held += len(piece)
        if held < next_look:
            continue
        rest = yield from _whole_blocks("".join(buffer), border_pattern)
        buffer, held = [rest], len(rest)
        next_look = held + SHORTEST_BLOCK
    rest = yield from _whole_blocks("".join(buffer), border_pattern)
    yield rest, True


def _whole_blocks(
    text: str, border_pattern: re.Pattern[str]
) -> Generator[tuple[str, bool], None, str]:
    """Yields the blocks whose end is certain, whatever text follows; returns the rest."""
    start = 0
    while True:
        border = border_pattern.search(text, start + SHORTEST_BLOCK, start + LONGEST_BLOCK + 1)
        if border:
            yield text[start : border.start()], True
            start = border.end()
        elif len(text) - start > LONGEST_BLOCK:
            yield text[start : start + LONGEST_BLOCK], False
            start += LONGEST_BLOCK
        else:
            return text[start:]


def well_formed(text: str) -> str:
    """Returns the text with lone surrogates as '?': what UTF-8, and so a library, can hold."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")
