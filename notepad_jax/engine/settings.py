"""An engine's sizes as one frozen dataclass, from which all its launch shapes follow (`shapes`).

Everything that is checked of them is checked here, when they are made.
"""

from __future__ import annotations

import dataclasses

from notepad_jax.types import MOST_TOP_LOGPROBS
from pallas_kernels import CACHE_DTYPES

STOP_IDS = 8  # the most stop ids of a completion: they are a fixed width of every decode launch
MAY_BE_NONE = ("top_logprobs", "mask_words")


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Sizes of the engine. The KV cache holds pages * page_size tokens."""

    slots: int  # sequences that decode at the same time
    page_size: int  # tokens per page
    pages: int  # pages of the cache, per layer
    max_prompt: int  # tokens of one prompt
    max_new_tokens: int  # tokens of one completion
    steps_per_launch: int  # tokens decoded per slot between two looks of the host
    row_tokens: int  # tail tokens packed behind one copy of a prefix, per launch
    cache_dtype: str = "float32"
    top_logprobs: int = 0  # likeliest tokens that a caller may ask for beside each sampled one
    mask_words: int = 0  # int32 words of a bit for each id, for turns with a grammar; 0: none

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name not in MAY_BE_NONE and isinstance(value, int) and value < 1:
                raise ValueError(f"engine.{field.name} is {value}; it must be at least 1")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(
                f"an engine tells of {self.top_logprobs} tokens beside a sampled one; use 0 to "
                f"{MOST_TOP_LOGPROBS}"
            )
        if self.cache_dtype not in CACHE_DTYPES:
            raise ValueError(
                f"engine.cache_dtype is {self.cache_dtype!r}; use one of {', '.join(CACHE_DTYPES)}"
            )
        need = self.pages_for(self.max_prompt + self.max_new_tokens)
        if self.pages < need:
            raise ValueError(
                f"engine.pages is {self.pages}, but one context of {self.max_prompt} + "
                f"{self.max_new_tokens} tokens needs {need} pages of {self.page_size}"
            )
        if self.row_tokens < self.max_new_tokens:
            raise ValueError(
                f"engine.row_tokens is {self.row_tokens}; it must hold at least one tail and its "
                f"draft of {self.max_new_tokens} tokens"
            )

    def pages_for(self, tokens: int) -> int:
        """How many pages hold `tokens` tokens."""
        return -(-tokens // self.page_size)
