"""What tests of generated documents measure with: token counters, and what writing one holds."""

import tracemalloc
from collections.abc import Callable, Iterable

import tokenizers

from notepad_jax.types import Document


def bpe(texts: Iterable[str], pieces: int) -> Callable[[str], int]:
    """A counter of byte-level BPE's tokens, which splits as GPT-2 does, learnt from texts."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=pieces, show_progress=False)
    made.train_from_iterator(texts, trainer)
    return lambda text: len(made.encode(text).ids)


def written(document: Document) -> tuple[int, int]:
    """The characters of a document, and the most bytes that were held while it was written."""
    tracemalloc.start()
    characters = sum(map(len, document.pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return characters, peak
