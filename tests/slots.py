"""An engine without a device: its cache holds hashes where keys and values lie, and tokens are
drawn from hashes.

A token's key is a hash of itself, its position, the policy, and the sum (modulo 2**64) of the
keys that it is shown: attention that weighs all alike. So a key stands for the whole context up
to and with its token, and for the weights that read it; the next token and its logprob are
hashes of the key. `Slots` computes this as launches do: from the arrays of `layout` alone, out
of pages and into pages, and what nobody has written there is noise. `HashPolicy.completion` is
the oracle: each token from its whole context, and no cache. Where a page, a place, a copy, a
position, an accepted draft or a version is wrong, so are token and logprob, and so is all that
follows. They are no exception: a turn that is played again (`engine.replay`) may compute
anything, as long as nobody sees it.

A logprob has 12 bits that the context decides, and 11 below them by which launches differ, as
on a device: their shape and who was in them. `coarse` leaves the first.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from notepad_jax.engine.executor import Executes, Executor, Sampled
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.types import Completion, Finish, Piece, PolicySnapshot, Prompt, SamplingParams

WHOLE = 2**64 - 1
CONTEXT, COMPANY = 12, 11  # bits of a logprob


@dataclasses.dataclass(frozen=True)
class HashPolicy:
    """The parameters: a number of their own, and the ids that are said, each as likely."""

    number: int
    says: tuple[int, ...]

    def key(self, seen: int, token: int, position: int) -> int:
        """What lies in the cache for a token that is shown keys of this sum."""
        return hash((self.number, seen & WHOLE, token, position)) & WHOLE

    def drawn(self, key: int, temperature: float, top_p: float, seed: int, index: int) -> int:
        """The token after the one with this key, the `index`-th of its completion."""
        noise = (temperature, top_p, seed, index) if temperature else ()
        return self.says[hash((key, *noise)) % len(self.says)]

    def logprob(self, key: int, token: int, temperature: float, company: int = 0) -> float:
        """Of a token after that key, in (-1, 0]; exact in float32."""
        bits = hash((key, token, temperature)) % 2**CONTEXT << COMPANY
        return -(bits + company % 2**COMPANY) / 2 ** (CONTEXT + COMPANY)

    def likeliest(
        self, key: int, temperature: float, wanted: int, company: int = 0
    ) -> list[tuple[int, float]]:
        """The ids with the highest logprobs after that key, at most so many as there are."""
        told = [(one, self.logprob(key, one, temperature, company)) for one in set(self.says)]
        return sorted(told, key=lambda pair: (-pair[1], pair[0]))[:wanted]

    def completion(self, prompt: Prompt, s: SamplingParams) -> Exact:
        """What an engine has to give, each token from its whole context."""
        ids, said, logprobs, top = prompt.tokens.tolist(), [], [], []
        temperature, top_p = float(np.float32(s.temperature)), float(np.float32(s.top_p))
        while len(said) < s.max_new_tokens and not (said and said[-1] in s.stop_ids):
            key, n = self._last_key([*ids, *said]), len(said)
            given = int(prompt.draft[n]) if s.scored else None
            drawn = self.drawn(key, temperature, top_p, s.seed, n)
            said.append(drawn if given is None else given)
            logprobs.append(self.logprob(key, said[-1], temperature))
            top.append(self.likeliest(key, temperature, s.top_logprobs))
        finish = Finish.STOP if said[-1] in s.stop_ids else Finish.LENGTH
        return Exact(said, coarse(logprobs), finish, [_coarse_pairs(some) for some in top])

    def _last_key(self, ids: Sequence[int]) -> int:
        seen = key = 0
        for position, token in enumerate(ids):
            key = self.key(seen, token, position)
            seen += key
        return key

    def row_keys(
        self, tokens_T: np.ndarray, positions_T: np.ndarray, kv_end_T: np.ndarray, before: int = 0
    ) -> np.ndarray:
        """The keys of a packed row whose tokens are all shown keys of the sum `before`, too."""
        keys: list[int] = []
        ends = kv_end_T.tolist()
        for i, (token, position) in enumerate(zip(tokens_T, positions_T, strict=True)):
            seen = sum(key for key, end in zip(keys, ends, strict=False) if end > i)
            keys.append(self.key(before + seen, int(token), int(position)))
        return np.array(keys, np.uint64)


class Exact(NamedTuple):
    """What a completion has to be; logprobs as `coarse` leaves them."""

    tokens: list[int]
    logprobs: list[int]
    finish: Finish
    top: list[list[tuple[int, int]]]  # of each token: the likeliest, and their logprobs


def coarse(logprobs: Sequence[float] | np.ndarray) -> list[int]:
    """What the context alone decides of logprobs."""
    return [int(-one * 2**CONTEXT) for one in np.asarray(logprobs).tolist()]


def _coarse_pairs(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(token, *coarse([logprob])) for token, logprob in pairs]


def is_right(
    completion: Completion, policy: HashPolicy, prompt: Prompt, sampling: SamplingParams
) -> bool:
    """Whether a completion is what `policy` says without a cache."""
    exact = policy.completion(prompt, sampling)
    return (
        completion.tokens.tolist() == exact.tokens
        and coarse(completion.behaviour_logprobs) == exact.logprobs
        and completion.finish is exact.finish
    )


def together(
    pieces: Sequence[Piece], policies: Mapping[int, HashPolicy], *asked: Prompt | SamplingParams
) -> Completion:
    """The completion that came in pieces of one policy, with the likeliest tokens of its own."""
    (version,) = {piece.policy_version for piece in pieces}
    top = [_coarse_pairs(some) for piece in pieces for some in piece.top]
    exact = policies[version].completion(*asked)
    assert top == (exact.top if asked[1].top_logprobs else []), (top, exact.top)
    said, logprobs = (
        np.concatenate([getattr(piece, name) for piece in pieces])
        for name in ("tokens", "behaviour_logprobs")
    )
    return Completion(said, logprobs, pieces[-1].finish, version)


def snapshot(version: int, says: tuple[int, ...]) -> PolicySnapshot:
    """A policy that is no other version's."""
    return PolicySnapshot(version, HashPolicy(version, says))


class Slots:
    """The cache and its launches; see `executor.Launches`. Letters are those of `launches`."""

    def __init__(self, settings: EngineSettings):
        self.settings, self.shares = settings, 0  # pages copied for tails that begin alike
        self._noise = np.random.default_rng(0)
        self.rest()

    def rest(self) -> None:
        self._keys_PZ = self._anything(self.settings.pages, self.settings.page_size)

    def weights(self, params: HashPolicy) -> HashPolicy:
        return params

    def read_prefixes(self, params: HashPolicy, row) -> None:
        Z, keys_T = self.settings.page_size, params.row_keys(*_row(row))
        target_T = (row.table[0][:, None] * Z + np.arange(Z)).ravel()
        self._write(keys_T, target_T)

    def start_tails(self, params: HashPolicy, row, wanted: int) -> list[np.ndarray]:
        prefix = self._keys_PZ[row.table[0]].ravel()[: row.length[0]]
        keys_T = params.row_keys(*_row(row), _sum(prefix))
        self._write(keys_T, row.target)
        self._copy(row.copies)
        pages = row.table[0, : self.settings.pages_for(int(row.length[0]))]
        self.shares += np.isin(row.copies.source[: row.copies.count], pages, invert=True).sum()
        company = _company(row.tokens.shape, row.draws.seed)
        next_T = np.roll(row.tokens[0], -1)
        drawn = [
            self._drawn(params, int(keys_T[at]), row.draws, x, 0, company, wanted, int(next_T[at]))
            for x, at in enumerate(row.sample_at[: row.samples].tolist())
        ]
        out = self._outputs((len(next_T),), following=True)
        for x, values in enumerate(drawn):
            for array, value in zip(out, values, strict=True):
                array[x] = value
        return out

    def generate(self, params: HashPolicy, tables, slots, wanted: int) -> list[np.ndarray]:
        self._copy(slots.copies)
        company = _company(tables.members_RM.shape, slots.draws.seed)
        steps, B = self.settings.steps_per_launch, len(slots.token)
        token_B, remaining_B = slots.token.tolist(), slots.remaining.tolist()
        made_B = np.zeros(B, np.int32)
        out = self._outputs((B, steps))
        for step in range(steps):
            written = [self._decoded(params, tables, slots, b, int(made_B[b]), token_B[b])
                       for b in range(B) if remaining_B[b] > 0]  # fmt: skip
            _check_apart([place for _, place, _ in written])
            for b, _, key in written:
                new, *more = self._drawn(params, key, slots.draws, b, step, company, wanted)
                for array, value in zip(out, (new, *more), strict=True):
                    array[b, step] = value
                token_B[b], made_B[b] = new, made_B[b] + 1
                remaining_B[b] = 0 if new in slots.stop_ids[b] else remaining_B[b] - 1
        return [*out[:2], made_B, *out[2:]]

    # ------------------------------------------------------------ what a launch is made of

    def _decoded(self, params, tables, slots, b: int, made: int, token: int):
        """Writes a slot's newest token; returns (slot, where it lies, its key)."""
        r, m = divmod(int(tables.place_B[b]), tables.members_RM.shape[1])
        assert tables.members_RM[r, m] == b, f"slot {b} reads at the place of another"
        Z, private = self.settings.page_size, int(slots.private_len[b]) + made
        shared = self._keys_PZ[tables.shared_RP[r]].ravel()[: tables.shared_lens_R[r]]
        own = self._keys_PZ[tables.private_BQ[b, : private // Z + 1]].ravel()[:private]
        key = params.key(_sum(shared) + _sum(own), token, int(slots.position[b]) + made)
        place = int(tables.private_BQ[b, private // Z]), private % Z
        self._keys_PZ[place] = key
        return b, place, key

    def _drawn(
        self, params, key: int, draws, x: int, step: int, company: int, wanted: int, *following: int
    ) -> list:
        """What is told of the token after a key, in the order of `_outputs`."""
        temperature, top_p = float(draws.temperature[x]), float(draws.top_p[x])
        (high, low), index = draws.seed[x].tolist(), int(draws.index[x]) + step
        token = params.drawn(key, temperature, top_p, high << 32 | low, index)

        def logprob(one: int) -> float:
            return params.logprob(key, one, temperature, company)

        told = [token, logprob(token)]
        if most := self.settings.top_logprobs:
            likeliest = params.likeliest(key, temperature, min(wanted, most), company)
            likeliest += [(0, -np.inf)] * (most - len(likeliest))
            told += [*zip(*likeliest, strict=True), *map(logprob, following)]
        return told

    def _outputs(self, shape: tuple[int, ...], following: bool = False) -> list[np.ndarray]:
        most, kinds = self.settings.top_logprobs, (np.int32, np.float32)
        shapes = (shape, (*shape, most)) if most else (shape,)
        out = [np.zeros(one, kind) for one in shapes for kind in kinds]
        return [*out, np.zeros(shape, np.float32)] if most and following else out

    def _copy(self, copies) -> None:
        pairs = zip(copies.source, copies.target, copies.tokens, strict=True)
        for source, target, tokens in itertools.islice(pairs, int(copies.count)):
            self._keys_PZ[target, :tokens] = self._keys_PZ[source, :tokens]

    def _write(self, keys_T: np.ndarray, target_T: np.ndarray) -> None:
        """Writes at flat indices; those past the cache's end are nobody's."""
        inside = target_T < self._keys_PZ.size
        _check_apart(target_T[inside].tolist())
        self._keys_PZ.reshape(-1)[target_T[inside]] = keys_T[inside]

    def _anything(self, *shape: int) -> np.ndarray:
        return self._noise.integers(0, WHOLE, shape, np.uint64, endpoint=True)


def _row(row) -> tuple[np.ndarray, ...]:
    return row.tokens[0], row.positions[0], row.kv_end[0]


def _sum(keys: np.ndarray) -> int:
    return int(keys.sum(dtype=np.uint64))


def _company(shape: tuple[int, ...], seeds: np.ndarray) -> int:
    return hash((*shape, *seeds.ravel().tolist()))


def _check_apart(places: list) -> None:
    assert len(set(places)) == len(places), f"two tokens are written at one place of {places}"


def executor(settings: EngineSettings) -> Executor:
    """An executor over slots."""
    return Executor(settings, Slots(settings))


class Watched:
    """An executor whose calls are written down; see `executor.Runs`.

    `launches` has of each what it is called, and the prefixes or the seeds of the turns in it.
    `before` is called ahead of each with its number, from 0 on, and may raise.
    """

    def __init__(self, executor: Executes, before: Callable[[int], None] = lambda number: None):
        self.settings, self.launches, self.rests = executor.settings, [], 0
        self._executor, self._before = executor, before

    def rest(self) -> None:
        self.rests += 1
        self._executor.rest()

    def weights(self, params):
        return self._executor.weights(params)

    def read(self, params, prefixes) -> None:
        self._note("read", [prefix.tokens.tolist() for prefix in prefixes])
        self._executor.read(params, prefixes)

    def start(self, params, contexts) -> Sequence[Sampled]:
        self._note("start", [context.sampling.seed for context in contexts])
        return self._executor.start(params, contexts)

    def decode(self, params, contexts) -> Sequence[Sampled]:
        if contexts:
            self._note("decode", [context.sampling.seed for context in contexts])
        return self._executor.decode(params, contexts)

    def _note(self, kind: str, who: list) -> None:
        self._before(len(self.launches))
        self.launches.append((kind, who))
