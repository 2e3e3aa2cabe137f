"""Fakes whose arithmetic a reader can check in the head, for tests of every package.

`tokenizer_path(folder)` builds a tiny sentencepiece model; the completers below answer a
`Prompt` without any network: `Echo` copies, `Oracle` knows, `Empty` stops at once. None
of them imports jax.
"""

from __future__ import annotations

import asyncio
import functools
import pathlib
import tempfile
from collections.abc import Callable

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from notepad_jax.reading.rules import Rules
from notepad_jax.text.prompts import Template
from notepad_jax.text.sentencepiece_tokenizer import SentencePieceTokenizer
from notepad_jax.types import Completion, Finish, Prompt, SamplingParams, Tokens, tokens

CONTROLS = (
    "<|end|>",
    "<|question|>",
    "<|memory|>",
    "<|write|>",
    "<|answer|>",
    "<|keep|>",
    "<|im_start|>",
    "<|im_end|>",
)
WORDS = "nothing the secret code of is ann bob cleo red green blue says who ? .".split()


def tokenizer_path(
    folder: pathlib.Path,
    words: tuple[str, ...] = tuple(WORDS),
    dummy_prefix: bool = True,
    strip_spaces: bool = True,
    control_as_user_defined: bool = False,
) -> pathlib.Path:
    """Writes a model with one piece per word, letters, bytes, and the control pieces."""
    model = sentencepiece_model_pb2.ModelProto()
    kinds = model.SentencePiece
    special = kinds.USER_DEFINED if control_as_user_defined else kinds.CONTROL
    pieces = [("<pad>", kinds.CONTROL, 0.0), ("<unk>", kinds.UNKNOWN, 0.0)]
    pieces += [(name, special, 0.0) for name in CONTROLS]
    pieces += [(f"<0x{byte:02X}>", kinds.BYTE, 0.0) for byte in range(256)]
    pieces += [("\u2581" + word, kinds.NORMAL, -1.0) for word in words]
    pieces += [(c, kinds.NORMAL, -10.0) for c in "\u2581abcdefghijklmnopqrstuvwxyz.,"]
    for text, kind, score in pieces:
        model.pieces.add(piece=text, type=kind, score=score)
    model.trainer_spec.model_type = model.trainer_spec.UNIGRAM
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.unk_id, model.trainer_spec.pad_id = 1, 0
    model.trainer_spec.bos_id = model.trainer_spec.eos_id = -1
    model.trainer_spec.vocab_size = len(pieces)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = strip_spaces
    model.normalizer_spec.escape_whitespaces = True
    path = folder / f"fake_{dummy_prefix:d}{strip_spaces:d}{control_as_user_defined:d}.model"
    path.write_bytes(model.SerializeToString())
    return path


@functools.cache
def tokenizer() -> SentencePieceTokenizer:
    """The tiny tokenizer, built once per test run."""
    with tempfile.TemporaryDirectory() as folder:
        return SentencePieceTokenizer(tokenizer_path(pathlib.Path(folder)))


def template(name: str = "question_last") -> Template:
    """A shipped template in the tiny tokenizer's ids."""
    return Template.load(name, tokenizer())


def rules(chunk_size: int = 4, memory_update: str = "overwrite") -> Rules:
    """Small limits: question 8, memory 6, answer 4 tokens."""
    return Rules(
        max_question=8,
        chunk_size=chunk_size,
        max_memory=6,
        max_answer=4,
        memory_update=memory_update,
    )


def chunks_of(ids: Tokens, chunk_size: int) -> list[Tokens]:
    """The definition of a document's chunks: its ids, sliced."""
    return [ids[i : i + chunk_size] for i in range(0, len(ids), chunk_size)]


class Scripted:
    """Asks a function for each completion's ids; keeps all calls. The base of the others.

    Yields to the loop `pauses` times before answering, so that readings interleave.
    Logprobs are -1 each; a stop token at the end makes the finish STOP, else LENGTH.
    """

    def __init__(
        self, answer: Callable[[Prompt, SamplingParams], list[int]], pauses: int = 1
    ) -> None:
        self._answer = answer
        self._pauses = pauses
        self.version = 0
        self.running = 0
        self.calls: list[tuple[Prompt, SamplingParams]] = []

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        self.calls.append((prompt, sampling))
        self.running += 1
        try:
            for _ in range(self._pauses):
                await asyncio.sleep(0)
            return completion(self._answer(prompt, sampling), sampling, self.version)
        finally:
            self.running -= 1


def completion(ids: list[int], sampling: SamplingParams, version: int = 0) -> Completion:
    """Makes a completion of `ids`, cut at the sampling's limit."""
    ids = ids[: sampling.max_new_tokens]
    stopped = bool(ids) and ids[-1] in sampling.stop_ids
    finish = Finish.STOP if stopped else Finish.LENGTH
    return Completion(tokens(ids), np.full(len(ids), -1.0, np.float32), finish, version)


def empty() -> Scripted:
    """Always stops at once: no memory, no answer."""
    return Scripted(lambda prompt, sampling: [sampling.stop_ids[0]])


def first_of_chunk() -> Scripted:
    """Writes the chunk's first token into its memory; answers with its memory.

    For `question_last`: an update prompt's shared part is the chunk and one control piece.
    """

    def answer(prompt: Prompt, sampling: SamplingParams) -> list[int]:
        said = memory_of(prompt) if is_answer(prompt) else prompt.shared[:1]
        return [*map(int, said), sampling.stop_ids[0]]

    return Scripted(answer)


def appender() -> Scripted:
    """Adds each chunk's last token to its memory, so the memory tells the turns apart."""

    def answer(prompt: Prompt, sampling: SamplingParams) -> list[int]:
        memory = [int(i) for i in memory_of(prompt)]
        if is_answer(prompt):
            return [*memory, sampling.stop_ids[0]]
        return [*memory, int(prompt.shared[-2]), sampling.stop_ids[0]]

    return Scripted(answer)


def oracle(gold: dict[str, str]) -> Scripted:
    """Answers each question (its text) with the gold text; the memory stays as it is."""

    def answer(prompt: Prompt, sampling: SamplingParams) -> list[int]:
        if not is_answer(prompt):
            return [*map(int, memory_of(prompt)), sampling.stop_ids[0]]
        said = gold[tokenizer().decode(_between(prompt, "<|question|>", "<|memory|>"))]
        return [*map(int, tokenizer().encode(said)), sampling.stop_ids[0]]

    return Scripted(answer)


def coin(right: str, wrong: str) -> Scripted:
    """Answers `right` when the turn's seed is even, else `wrong`: informative groups."""

    def answer(prompt: Prompt, sampling: SamplingParams) -> list[int]:
        if not is_answer(prompt):
            return [sampling.stop_ids[0]]
        said = wrong if sampling.seed % 2 else right
        return [*map(int, tokenizer().encode(said)), sampling.stop_ids[0]]

    return Scripted(answer)


def is_answer(prompt: Prompt) -> bool:
    """Whether a `question_last` prompt is an answer turn's."""
    return int(prompt.tail[-1]) == tokenizer().control_id("<|answer|>")


def memory_of(prompt: Prompt) -> Tokens:
    """The memory that a `question_last` prompt shows."""
    return _between(prompt, "<|memory|>", "<|answer|>" if is_answer(prompt) else "<|write|>")


def _between(prompt: Prompt, opening: str, closing: str) -> Tokens:
    ids = list(prompt.tokens)
    end = len(ids) - 1 - ids[::-1].index(tokenizer().control_id(closing))
    start = end - 1 - ids[:end][::-1].index(tokenizer().control_id(opening))
    return tokens(ids[start + 1 : end])
