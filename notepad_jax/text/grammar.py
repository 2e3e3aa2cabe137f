"""Constrained decoding by JSON schemas: masks of the tokens that a completion may go on with.

llguidance compiles the schema and walks it by bytes; this is the one module that imports it, and
only the server asks for it (extra `structured`: it needs neither torch nor a network). A
completion may end exactly where its text is whole: then, and only then, stop tokens are allowed.
Above: programs.serve; below: pieces and llguidance.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Sequence

import llguidance
import numpy as np

from notepad_jax.text.pieces import token_bytes
from notepad_jax.text.tokenizer import Tokenizer

KEPT = 64  # schemas
# A model that is unsure would write white space for ever; json.dumps writes so.
HOW = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

log = logging.getLogger("notepad_jax.serve")


class Grammars:
    """A compiler of JSON schemas for a tokenizer, with a cache."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._vocabulary = _Vocabulary(tokenizer)
        self._compiled = functools.lru_cache(KEPT)(self._compile)

    def json(self, schema: str) -> SchemaGrammar:
        """Returns the grammar of a JSON schema, given as JSON; ValueError, in a line, for one that
        cannot be followed."""
        return self._compiled(schema)

    def _compile(self, schema: str) -> SchemaGrammar:
        made = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=HOW)
        matcher = llguidance.LLMatcher(self._vocabulary.opened, made, log_level=0)
        if matcher.is_error():
            raise ValueError(" ".join(matcher.get_error().partition("<backtrace>")[0].split()))
        return SchemaGrammar(schema, _Shared(matcher))


@dataclasses.dataclass(frozen=True)
class SchemaGrammar:
    """A `types.Grammar`: the texts that a schema allows, written in one way."""

    schema: str
    _shared: _Shared = dataclasses.field(compare=False, repr=False)

    def matcher(self, stop_ids: Sequence[int]) -> SchemaMatcher:
        """Returns the matcher of one completion, which ends with a stop id."""
        return SchemaMatcher(self._shared.copy(), stop_ids)


class SchemaMatcher:
    """The state of one completion in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: Sequence[int]) -> None:
        self._matcher, self._stops = matcher, tuple(stop_ids)

    def allowed(self) -> np.ndarray:
        """Returns a bit for every id of the tokenizer, int32 [ceil(V / 32)], the lowest first.

        Where nothing may follow, and where the grammar failed, a completion ends.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32).copy()
        if self._matcher.is_error():
            log.error("a grammar failed: %s", self._matcher.get_error().partition("\n")[0])
            bits[:] = 0
        ends = self._matcher.is_accepting()
        stops = np.array(self._stops, np.int64)
        words, places = stops // 32, np.left_shift(np.uint32(1), (stops % 32).astype(np.uint32))
        masks = bits.view(np.uint32)
        np.bitwise_and.at(masks, words, ~places)
        if ends or not bits.any():
            np.bitwise_or.at(masks, words, places)
        return bits

    def take(self, token: int) -> None:
        """Advances the state by a token that was allowed."""
        if token not in self._stops:
            self._matcher.consume_token(token)


class _Shared:
    """A matcher that has seen nothing, which engines copy from their threads."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher, self._one = matcher, threading.Lock()

    def copy(self) -> llguidance.LLMatcher:
        with self._one:
            return self._matcher.deep_copy()


class _Vocabulary:
    """A tokenizer as llguidance asks for one."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = token_bytes(tokenizer)
        self.eos_token_id = tokenizer.stop_ids[0]
        self.special_token_ids = [i for i, one in enumerate(self.tokens) if not one]
        names = {i: name for name, i in tokenizer.controls.items()}
        for i in self.special_token_ids:
            self.tokens[i] = names.get(i, f"<|id {i}|>").encode()
        special = {*self.special_token_ids}
        self._ids = {one: i for i, one in enumerate(self.tokens) if i not in special}
        self._longest = max(map(len, self._ids))

    @functools.cached_property
    def opened(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(self, n_vocab=len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns tokens that write exactly these bytes: the tokenizer's own, where they do."""
        raw = text.encode() if isinstance(text, str) else text
        own = self._tokenizer.encode(raw.decode("utf-8", "replace")).tolist()
        if b"".join(self.tokens[i] for i in own) == raw:
            return own
        found = []
        while raw:
            sizes = range(min(len(raw), self._longest), 0, -1)
            size = next((n for n in sizes if raw[:n] in self._ids), 0)
            if not size:  # a byte that the tokenizer has no piece for
                break
            found.append(self._ids[raw[:size]])
            raw = raw[size:]
        return found
