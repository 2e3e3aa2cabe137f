"""Replay of a stopped rollout: finished turns are given again without being computed.

`Replay` stands between the service and its executor. Going on with a rollout that was stopped,
it answers for every turn that had ended; the service and its scheduler do exactly what they did
the first time, and so do all counts, because they cannot tell. A launch in which every turn is
known is not made. One with an unknown turn in it is made whole, with all its turns in it, and the
known ones keep what they were given before. That is what makes a run that goes on equal to one
that was never stopped, in every bit: a launch of other members has another shape, which adds
up in another order, and the last bits of a logprob are others.

So a turn that had not ended at the stop is begun again, in the launches it was in: nothing of
the cache is kept. Prefixes are read again as they were, since any turn may still need them.
A turn is known by the seed of its noise, which no other turn of a run has, if prompt and
sampling are the same. Above: training.partial_rollout, and `journal`, which keeps turns in a file;
below: executor.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from notepad_jax.engine.executor import Executes, Sampled
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.engine.scheduler import Context
from notepad_jax.types import SamplingParams


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """The recorded completion of a turn that has ended."""

    asked: str  # digest of the prompt and of how it was sampled
    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n]
    pieces: tuple[int, ...]  # tokens of each launch; their sum is n


@dataclasses.dataclass(eq=False)
class _Open:
    """A turn that runs."""

    asked: str
    known: Given | None
    pieces: list[Sampled] = dataclasses.field(default_factory=list)

    def known_piece(self) -> Sampled | None:
        """What the next launch gave it the first time; None if it had not ended."""
        if self.known is None:
            return None
        number = len(self.pieces)
        first = sum(self.known.pieces[:number])
        here = slice(first, first + self.known.pieces[number])
        return Sampled(self.known.tokens[here].tolist(), self.known.logprobs[here].tolist())

    def given(self) -> Given:
        """What the turn got, now that it has ended."""
        if self.known is not None:
            return self.known
        return Given(
            self.asked,
            np.array([token for piece in self.pieces for token in piece.tokens], np.int32),
            np.array([one for piece in self.pieces for one in piece.logprobs], np.float32),
            tuple(len(piece.tokens) for piece in self.pieces),
        )


class Replay:
    """An executor (`executor.Executes`) that records and replays the turns of a rollout.

    `ended` is told of each turn that ends here and was not known, in the thread of the launch.
    """

    def __init__(self, executor: Executes, ended: Callable[[int, Given], None] = lambda *_: None):
        self.settings = executor.settings
        self._ended = ended
        self.turns: dict[int, Given] = {}  # of this rollout, by seed: ended here, or known
        self.replayed = 0  # turns that were known when they were asked for
        self._executor = executor
        self._open: dict[Context, _Open] = {}

    def begin(self, known: Mapping[int, Given]) -> None:
        """Begins a rollout of which the turns `known` have ended before; forgets the last one."""
        self.turns, self.replayed = dict(known), 0
        self._open.clear()  # of turns that were cancelled

    def rest(self) -> None:
        """Frees the KV cache until the next launch."""
        self._executor.rest()

    def weights(self, params: Any) -> Any:
        """Returns a policy's parameters as the launches are to be given them."""
        return self._executor.weights(params)

    def read(self, params: Any, prefixes: Sequence[CachedPrefix]) -> None:
        """Prefills shared prefixes into their pages."""
        self._executor.read(params, prefixes)

    def start(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]:
        """Prefills the tails of admitted turns, unless all of them are known."""
        for context in contexts:
            asked = digest(context.shared, context.tail, context.sampling)
            known = self.turns.get(context.sampling.seed)
            if known is not None and known.asked != asked:
                known = None
            self.replayed += known is not None
            self._open[context] = _Open(asked, known)
        return self._launched(self._executor.start, params, contexts)

    def decode(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]:
        """Decodes some tokens in every slot, unless all turns are known."""
        return self._launched(self._executor.decode, params, contexts)

    def _launched(
        self, launch: Callable[..., Sequence[Sampled]], params: Any, contexts: Sequence[Context]
    ) -> Sequence[Sampled]:
        turns = [self._open[context] for context in contexts]
        sampled = [turn.known_piece() for turn in turns]
        if not all(sampled):
            new = launch(params, contexts)
            sampled = [one or other for one, other in zip(sampled, new, strict=True)]
        for context, turn, piece in zip(contexts, turns, sampled, strict=True):
            turn.pieces.append(piece)
            if piece.ends(context):
                seed = context.sampling.seed
                self.turns[seed] = turn.given()
                del self._open[context]
                if turn.known is None:
                    self._ended(seed, self.turns[seed])
        return sampled


class Replays:
    """The replays of all engines of a process, as one; `ended` as of a `Replay`."""

    def __init__(self, ended: Callable[[int, Given], None] = lambda *_: None) -> None:
        self.each: list[Replay] = []
        self._ended, self._known = ended, 0

    def around(self, executor: Executes) -> Replay:
        """Returns the executor through which an engine has to run."""
        self.each.append(Replay(executor, self._ended))
        return self.each[-1]

    def begin(self, known: Mapping[int, Given]) -> None:
        """Begins a rollout on all replays: a turn comes to the same engine every time."""
        self._known = len(known)
        for one in self.each:
            one.begin(known)

    @property
    def turns(self) -> Mapping[int, Given]:
        """The turns of this rollout that have ended, by seed."""
        # Copied first, and at once: another thread may ask while turns end.
        every = [dict(one.turns) for one in self.each]
        return {seed: given for turns in every for seed, given in turns.items()}

    @property
    def ended(self) -> int:
        """How many `turns` are, without a copy of them."""
        # Each was given all that were known.
        return sum(len(one.turns) for one in self.each) - self._known * (len(self.each) - 1)

    @property
    def replayed(self) -> int:
        """Turns that were known when they were asked for."""
        return sum(one.replayed for one in self.each)


def digest(shared: np.ndarray, tail: np.ndarray, s: SamplingParams) -> str:
    """A digest of what is asked: the prompt's ids, and all of the sampling but its seed."""
    made = hashlib.blake2b(shared.tobytes() + tail.tobytes(), digest_size=12)
    words = (len(shared), s.temperature, s.top_p, s.max_new_tokens, s.stop_ids)
    made.update(repr(words).encode())
    return made.hexdigest()
