"""The tokenizer protocol, text to token ids and back, and how a tokenizer is opened.

Two promises, the same for every implementation. A document can never become a special
token, even if it spells one: `encode` produces ordinary pieces only, and control pieces
such as `<|im_end|>` come from template text (`encode_template`) or from the policy. And a
stream is encoded exactly as the whole text would be (`token_blocks`). Above: prompts, chat
and chunks; below: sentencepiece_tokenizer and bpe_tokenizer. The neighbour `approximate`
is for models whose tokenizer is not at hand.
"""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from notepad_jax.text.bpe_tokenizer import HuggingFaceTokenizer, added_to_unigram
from notepad_jax.text.model_folder import present
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from notepad_jax.types import Tokens

# What an export has to copy so that the new folder opens as the old one did.
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class Tokenizer(Protocol):
    """The interface of a tokenizer: what the rest of the project needs of one."""

    path: pathlib.Path
    vocab_size: int  # ids at or above this exist in no text; the policy must mask them
    stop_ids: tuple[int, ...]  # a completion ends with any of these; the first is the usual one
    controls: Mapping[str, int]  # the pieces that no document can become
    byte_level: bool  # pieces are written in GPT-2's alphabet of bytes, else with U+2581 and <0xNN>

    def encode(self, text: str) -> Tokens:
        """Returns the ordinary pieces of `text`, int32 [n]; never a control piece."""

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[Tokens]:
        """Yields the ids of `"".join(pieces)`, block by block, wherever the pieces were cut."""

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of any ids; control pieces vanish."""

    def pieces(self) -> list[str]:
        """Returns the vocabulary: the piece of each id, "" where there is none."""

    def control_id(self, name: str) -> int:
        """Returns the id of the control piece `name`; ValueError if there is none."""

    def encode_template(self, text: str) -> Tokens:
        """Encodes text that we wrote: control pieces in it are honoured, unknown ones refused."""


def counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Returns the function that counts a text's tokens."""
    return lambda text: len(tokenizer.encode(text))


def open_tokenizer(
    folder: str | pathlib.Path, say: Callable[[str], None] = warnings.warn
) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder, by the files that are there.

    tokenizer.json wins over tokenizer.model: only it holds tokens that were added later. Where
    it is not BPE (the starter's, for other programs) the model beside it is opened, with the
    tokens that were added as control pieces. `say` is told, in a line, what characters it cannot
    write. Raises ValueError if there is neither, or if the one that is there cannot be used.
    """
    folder = pathlib.Path(folder)
    ours, model = folder / "tokenizer.json", folder / "tokenizer.model"
    if present(ours):
        added = added_to_unigram(ours) if present(model) else None
        return HuggingFaceTokenizer(folder, say) if added is None else _of_model(model, added, ours)
    if present(model):
        return SentencePieceTokenizer(model)
    mend = "copy the one that belongs to the model there"
    if present(folder / "vocab.json"):
        mend = (
            "vocab.json alone is not read; AutoTokenizer.from_pretrained(folder)"
            ".save_pretrained(folder) of transformers writes a tokenizer.json"
        )
    raise ValueError(
        f"{folder} has neither a tokenizer.json (Hugging Face tokenizers) nor a tokenizer.model "
        f"(sentencepiece); {mend}"
    )


def _of_model(
    model: pathlib.Path, added: Mapping[str, int], beside: pathlib.Path
) -> SentencePieceTokenizer:
    """Opens a sentencepiece model that a tokenizer.json `beside` it repeats."""
    opened = SentencePieceTokenizer(model, [*added])
    for name, i in added.items():
        if opened.controls.get(name, i) != i:
            raise ValueError(
                f"{beside} gives {name!r} the id {i}, and {model} {opened.controls[name]}; they "
                f"belong to two models, remove the wrong one"
            )
    return opened
