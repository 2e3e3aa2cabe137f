"""Progress of a live reader's bundle: finished turns, saved beside it and replayed after a kill.

What was said by a version stays said by it: a reader that goes on with the document, after a kill,
is answered with these turns and reads the rest by the version that it has (`fleet_live`). A turn is
known by the seed of its noise, if prompt and sampling are the same. Not `engine.replay`, which
repeats launches so that every bit is that of a reader that was not killed: of a live document no
such bits are promised. Above: fleet_live.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from typing import Any

import numpy as np

from notepad_jax.checkpoint.objects import sealed, unsealed
from notepad_jax.types import Completer, Completion, Finish, Prompt, SamplingParams, tokens

IDS, LOGPROBS = "<i4", "<f4"  # as they are written, on any machine


@dataclasses.dataclass
class Progress:
    """The turns of one bundle, by seed: what was asked, and what was said."""

    header: dict[str, str]  # whose they are
    turns: dict[int, tuple[str, Completion]] = dataclasses.field(default_factory=dict)
    put: int = 0  # turns that are put beside

    def encoded(self) -> bytes:
        """The object's content: one line, and its SHA-256 in a second."""
        turns = [_told(seed, *turn) for seed, turn in list(self.turns.items())]
        return sealed({"header": self.header, "turns": turns})


def begun(header: dict[str, str], content: bytes | None) -> Progress:
    """Returns the progress that was `encoded`; an empty one for what is damaged, or another's."""
    try:
        said = unsealed(content or b"")
    except ValueError:
        return Progress(header)
    if said["header"] != header:
        return Progress(header)
    turns = {seed: (asked, _completion(rest)) for seed, asked, *rest in said["turns"]}
    return Progress(header, turns, len(turns))


@dataclasses.dataclass(frozen=True)
class Remembered:
    """A `Completer` that replays turns that have ended, and records those that end."""

    inner: Completer
    progress: Progress

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Completion:
        """Returns a turn's completion: the recorded one, or the completer's."""
        asked = _asked(prompt, sampling)
        known = self.progress.turns.get(sampling.seed)
        if known is not None and known[0] == asked:
            return known[1]
        said = await self.inner.complete(prompt, sampling)
        if said.finish is not Finish.CANCELLED:
            self.progress.turns[sampling.seed] = asked, said
        return said


def _asked(prompt: Prompt, sampling: SamplingParams) -> str:
    digest = hashlib.blake2b(prompt.shared.tobytes() + prompt.tail.tobytes(), digest_size=12)
    s = sampling
    how = (len(prompt.shared), s.temperature, s.top_p, s.max_new_tokens, s.stop_ids)
    digest.update(repr(how).encode())
    return digest.hexdigest()


def _told(seed: int, asked: str, said: Completion) -> list[Any]:
    logprobs = said.behaviour_logprobs
    return [
        seed, asked, said.policy_version, said.finish.value, _text(said.tokens, IDS),
        _text(logprobs, LOGPROBS),
    ]  # fmt: skip


def _completion(rest: list[Any]) -> Completion:
    version, finish, ids, logprobs = rest
    logprobs = _array(logprobs, LOGPROBS)
    return Completion(tokens(_array(ids, IDS)), logprobs, Finish(finish), version)


def _text(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode("ascii")


def _array(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).astype(dtype[1:])
