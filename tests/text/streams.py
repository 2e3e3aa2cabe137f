"""Texts cut anywhere and encoded as streams, for the tests of both tokenizers."""

from notepad_jax.text.tokenizer import Tokenizer


def cut(text: str, places: list[int]) -> list[str]:
    borders = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def stream(tok: Tokenizer, pieces: list[str]) -> list[int]:
    return [int(i) for ids in tok.encode_pieces(pieces) for i in ids]
