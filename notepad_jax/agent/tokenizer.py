"""Text to token ids and back, through a sentencepiece model.

Two promises live here. A document can never become a special token, even if it spells
one: `encode` produces ordinary pieces only, and control pieces such as `<|end|>` come
from template text (`encode_template`) or from the policy. And a stream is encoded exactly
as the whole text would be, however it was cut on its way here: text is encoded in blocks
whose borders depend on the text alone, and `encode` goes through the same blocks.

A block ends before a single space between two solid characters, which sentencepiece
never merges across; the next block drops that space and gets it back as the dummy
prefix. Text without such a space (scripts written without spaces, binary rubbish) is cut
after `LONGEST_BLOCK` characters, the one place where ids may differ from sentencepiece's
own for the whole text. Used by prompts and chunking; below are sentencepiece and numpy.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from notepad_jax.types import Tokens, tokens

SHORTEST_BLOCK = 4_096  # characters; the first good border after these ends the block
LONGEST_BLOCK = 65_536  # characters; a block is cut here if no good border came
STOP_PIECES = ("<|end|>", "<|im_end|>", "<end_of_turn>", "</s>")  # the first known one stops

_BORDER = re.compile(r"(?<=[\w\x21-\x7e]) (?=[\w\x21-\x7e])")
_CONTROL_LOOK = re.compile(r"<\|[^<>|\s]+\|>")  # a piece that looks so is always control


class SentencePieceTokenizer:
    """A sentencepiece model that keeps special pieces out of ordinary text.

    `special` names further pieces that must never come from text; every piece that looks
    like `<|name|>` is special whatever its type in the model file.
    Raises ValueError for a missing or broken model, or one that cannot be streamed.
    """

    def __init__(self, path: str | pathlib.Path, special: Sequence[str] = ()) -> None:
        model = _load_model(pathlib.Path(path))
        _make_control(model, special)
        _check_streamable(model, path)
        self._whole = _processor(model)
        self._after_space = _processor(model, add_dummy_prefix=True)
        self._mid_word = _processor(model, add_dummy_prefix=False, remove_extra_whitespaces=False)
        kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
        self._controls = {
            piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == kinds.CONTROL
        }
        self._control_split = re.compile(
            "(" + "|".join(sorted(map(re.escape, self._controls), reverse=True)) + ")"
        )
        self.path = pathlib.Path(path)
        self.vocab_size: int = len(model.pieces)
        stops = [self._controls[name] for name in STOP_PIECES if name in self._controls]
        if not stops:
            raise ValueError(
                f"{path} has none of the stop pieces {', '.join(STOP_PIECES)} as a control piece; "
                "name the one it uses in `special`, or train the model with one"
            )
        self.stop_ids: tuple[int, ...] = tuple(stops[:1])

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a special token."""
        return tokens(np.concatenate([_NONE, *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        at most `LONGEST_BLOCK` characters and one piece are held at a time.
        """
        processor = self._whole
        for block, ends_at_space in _blocks(pieces):
            ids = _encode(processor, block)
            if not ends_at_space:
                processor = self._mid_word
            elif len(ids) or processor is not self._whole:
                processor = self._after_space  # else nothing came out: this is still the start
            if len(ids):
                yield tokens(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of `ids`; special tokens vanish, ids outside the model are unknown."""
        known = (int(i) if 0 <= i < self.vocab_size else self._whole.unk_id() for i in ids)
        return self._whole.decode(list(known))

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""
        if name not in self._controls:
            raise ValueError(
                f"{self.path} has no control piece {name!r}; it has {', '.join(self._controls)}"
            )
        return self._controls[name]

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we wrote ourselves: control pieces in it are honoured.

        Raises ValueError where `<|name|>` is not a control piece of this model.
        """
        for name in _CONTROL_LOOK.findall(text):
            self.control_id(name)
        parts = [_NONE]
        for part in self._control_split.split(text):
            known = part in self._controls
            parts.append(tokens([self._controls[part]]) if known else self.encode(part))
        return tokens(np.concatenate(parts))


_NONE = tokens()


def _load_model(path: pathlib.Path) -> sentencepiece_model_pb2.ModelProto:
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"there is no tokenizer at {path}; give a sentencepiece .model") from None
    except Exception as error:  # protobuf's DecodeError has moved between versions
        raise ValueError(f"{path} is not a sentencepiece model: {error}") from error
    if not model.pieces:
        raise ValueError(f"{path} is not a sentencepiece model: it has no pieces")
    return model


def _make_control(model: sentencepiece_model_pb2.ModelProto, special: Sequence[str]) -> None:
    """Turns special-looking ordinary or user-defined pieces into control pieces, in place."""
    known = {piece.piece for piece in model.pieces}
    for name in special:
        if name not in known:
            raise ValueError(f"special piece {name!r} is not in the tokenizer's vocabulary")
    for piece in model.pieces:
        if piece.piece in special or _CONTROL_LOOK.fullmatch(piece.piece):
            piece.type = sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL


def _check_streamable(model: sentencepiece_model_pb2.ModelProto, path: object) -> None:
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError(f"{path} puts the space after the word; such models cannot be streamed")
    for piece in model.pieces:
        if "\u2581" in piece.piece.lstrip("\u2581"):
            raise ValueError(
                f"{path} has the piece {piece.piece!r} that spans words; "
                "such models cannot be streamed (train with split_by_whitespace)"
            )


def _processor(
    model: sentencepiece_model_pb2.ModelProto, **normaliser: bool
) -> sentencepiece.SentencePieceProcessor:
    copy = sentencepiece_model_pb2.ModelProto()
    copy.CopyFrom(model)
    for name, value in normaliser.items():
        setattr(copy.normalizer_spec, name, value)
    return sentencepiece.SentencePieceProcessor(model_proto=copy.SerializeToString())


def _encode(processor: sentencepiece.SentencePieceProcessor, text: str) -> np.ndarray:
    if not text.isascii():  # lone surrogates are not text; they become '?'
        text = text.encode("utf-8", "replace").decode("utf-8")
    return np.array(processor.encode(text), np.int32)


def _blocks(pieces: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yields (block, ends at a space); the borders depend on the joined text alone.

    The space itself belongs to neither block.
    """
    buffer: list[str] = []
    held, next_look = 0, SHORTEST_BLOCK
    for piece in pieces:
        buffer.append(piece)
        held += len(piece)
        if held < next_look:
            continue
        text, start = "".join(buffer), 0
        while True:
            border = _BORDER.search(text, start + SHORTEST_BLOCK, start + LONGEST_BLOCK + 1)
            if border:
                yield text[start : border.start()], True
                start = border.end()
            elif len(text) - start > LONGEST_BLOCK:
                yield text[start : start + LONGEST_BLOCK], False
                start += LONGEST_BLOCK
            else:
                break
        buffer, held = [text[start:]], len(text) - start
        next_look = held + SHORTEST_BLOCK
    yield from _last_blocks("".join(buffer))


def _last_blocks(text: str) -> Iterator[tuple[str, bool]]:
    start = 0
    while border := _BORDER.search(text, start + SHORTEST_BLOCK, start + LONGEST_BLOCK + 1):
        yield text[start : border.start()], True
        start = border.end()
    yield text[start:], True
