"""The sampling of a reading's turns, and the seeds of their noise: one for each, for all time.

Seeds are hashes of what they are for, so noise depends on no order and no company. Above:
memory_agent, and whoever makes a seed; below: rules.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib

from notepad_jax.reading.rules import Rules
from notepad_jax.types import SamplingParams, TurnKind


@dataclasses.dataclass(frozen=True)
class TurnSampling:
    """How the turns of one reading are sampled; each turn draws noise of its own."""

    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]
    seed: int  # of the reading; see `turn_seed`

    def params(
        self, rules: Rules, kind: TurnKind, turn_index: int, begun: int = 0
    ) -> SamplingParams:
        """Returns the sampling of one turn; `begun` tokens of its reply stand in its prompt."""
        limit = rules.max_memory if kind is TurnKind.UPDATE else rules.max_answer - begun
        unseeded = _unseeded(self.temperature, self.top_p, limit, self.stop_ids)
        return unseeded.seeded(turn_seed(self.seed, turn_index))


@functools.lru_cache(maxsize=256)
def _unseeded(
    temperature: float, top_p: float, limit: int, stop_ids: tuple[int, ...]
) -> SamplingParams:
    return SamplingParams(temperature, top_p, limit, stop_ids, seed=0)


def hashed_seed(*parts: int | str) -> int:
    """Returns a seed in [0, 2**63) that no other sequence of parts has (blake2b, 63 bits)."""
    return _seed_of(_hashed("\0".join(map(_marked, parts))))


def turn_seed(base_seed: int, turn_index: int) -> int:
    """Returns the seed of one turn of a reading; two turns never share noise.

    It is that of the parts "turn", base and index, of which a reading's turns share the first two.
    """
    hashed = _turns_hashed(int(base_seed)).copy()
    hashed.update(_marked(int(turn_index)).encode())
    return _seed_of(hashed)


@functools.lru_cache(maxsize=4096)
def _turns_hashed(base_seed: int) -> hashlib.blake2b:
    return _hashed(f"{_marked('turn')}\0{_marked(base_seed)}\0")


def _marked(part: int | str) -> str:
    return f"{type(part).__name__}:{part}"


def _hashed(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)


def _seed_of(hashed: hashlib.blake2b) -> int:
    return int.from_bytes(hashed.digest(), "big") >> 1
