"""The engine's counters: tokens, turns, rounds and seconds since they were last taken."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class EngineStats:
    """Counts since the last `take_stats`; tokens and seconds."""

    prefix_tokens: int = 0  # prefilled as shared prefixes
    prefix_tokens_saved: int = 0  # shared prompt tokens that were already cached
    tail_tokens: int = 0  # of private tails: prefilled, or one decoded; drafts not counted
    draft_tokens: int = 0  # completion tokens that came from verified drafts
    decode_tokens: int = 0  # completion tokens that were decoded one by one
    pairs: int = 0  # (query, key) pairs of attention, in prefixes and in turns that ended
    turns: int = 0
    rounds: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
