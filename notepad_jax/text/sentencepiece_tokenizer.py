"""A sentencepiece model whose special pieces never come out of a document.

They become control pieces, which its encoder never produces; a check at load says no to a
model that cannot be streamed. A neighbour of bpe_tokenizer, opened by `tokenizer`; below:
token_blocks, controls and sentencepiece.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from notepad_jax.text.controls import CONTROL_LOOK, STOP_PIECES, control_id, usual_stops
from notepad_jax.text.model_folder import present
from notepad_jax.text.token_blocks import BORDER, blocks, well_formed
from notepad_jax.types import Tokens, tokens


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
        self.controls: Mapping[str, int] = {
            piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == kinds.CONTROL
        }
        self._control_split = re.compile(
            "(" + "|".join(sorted(map(re.escape, self.controls), reverse=True)) + ")"
        )
        self.path, self.byte_level = pathlib.Path(path), False
        self.vocab_size: int = len(model.pieces)
        stops = usual_stops(self.controls)
        if not stops:
            raise ValueError(
                f"{path} has none of the stop pieces {', '.join(STOP_PIECES)} as a control piece; "
                "name the one it uses in `special`, or train the model with one"
            )
        self.stop_ids: tuple[int, ...] = tuple(stops[:1])

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a special token."""
        return tokens(np.concatenate([tokens(), *self.encode_pieces([text])]))

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of a text that arrives in pieces, block by block.

        The concatenation equals `encode("".join(pieces))` wherever the pieces were cut;
        at most `LONGEST_BLOCK` characters and one piece are held at a time.
        """
        processor = self._whole
        for block, ends_at_space in blocks(pieces, BORDER):
            ids = np.array(processor.encode(well_formed(block)), np.int32)
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

    def pieces(self) -> list[str]:
        """Returns the vocabulary: the piece of each id."""
        return [self._whole.id_to_piece(i) for i in range(self.vocab_size)]

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""
        return control_id(self.controls, name, self.path)

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we wrote ourselves: control pieces in it are honoured.

        Raises ValueError where `<|name|>` is not a control piece of this model.
        """
        for name in CONTROL_LOOK.findall(text):
            self.control_id(name)
        parts = [tokens()]
        for part in self._control_split.split(text):
            known = part in self.controls
            parts.append(tokens([self.controls[part]]) if known else self.encode(part))
        return tokens(np.concatenate(parts))


def _load_model(path: pathlib.Path) -> sentencepiece_model_pb2.ModelProto:
    model = sentencepiece_model_pb2.ModelProto()
    present(path)
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
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    for piece in model.pieces:
        if piece.type == kinds.UNKNOWN:
            continue  # without one no text can be encoded; bytes stand for what is unknown
        if piece.piece in special or CONTROL_LOOK.fullmatch(piece.piece):
            piece.type = kinds.CONTROL


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
