"""Turns of a live document, kept beside it: said once, whoever goes on."""

import asyncio
import dataclasses

import numpy as np

from notepad_jax.training.fleet_live import Progress, Remembered, progress_of
from notepad_jax.types import Completion, Finish, Prompt, SamplingParams, tokens

HEADER = {"terms": "t", "bundle": "3-0"}
ASKED = Prompt(tokens([1, 2]), tokens([3]))
HOW = SamplingParams(1.0, 1.0, 4, (9,), seed=2**62)


class Says:
    """Says 7 and 9, and counts."""

    def __init__(self, version, finish=Finish.STOP):
        self.version, self.finish, self.times = version, finish, 0

    async def complete(self, prompt, sampling):
        self.times += 1
        logprobs = np.float32([-0.1, -1 / 3])
        return Completion(tokens([7, 9]), logprobs, self.finish, self.version)


def said(completer, progress, prompt=ASKED, how=HOW):
    return asyncio.run(Remembered(completer, progress).complete(prompt, how))


def test_a_turn_that_ended_is_given_again_as_its_version_said_it():
    first = said(Says(3), before := Progress(HEADER))
    later, after = Says(5), progress_of(HEADER, before.encoded())
    again = said(later, after)
    assert later.times == 0 and after.put == 1 and again.policy_version == 3
    assert again.finish is first.finish and again.tokens.tolist() == [7, 9]
    assert again.behaviour_logprobs.tobytes() == first.behaviour_logprobs.tobytes()
    assert progress_of(HEADER, after.encoded()).encoded() == before.encoded()


def test_what_is_asked_otherwise_is_asked_anew():
    said(Says(3), before := Progress(HEADER))
    others = [
        (Prompt(tokens([1]), tokens([2, 3])), HOW),
        (Prompt(tokens([1, 2]), tokens([4])), HOW),
        (ASKED, dataclasses.replace(HOW, seed=5)),
        (ASKED, dataclasses.replace(HOW, temperature=0.5)),
    ]
    for prompt, how in others:
        later = Says(5)
        there = progress_of(HEADER, before.encoded())
        assert said(later, there, prompt, how).policy_version == 5 and later.times == 1
    said(Says(3, Finish.CANCELLED), none := Progress(HEADER))
    assert not none.turns


def test_what_is_damaged_or_of_another_bundle_is_read_anew():
    said(Says(3), before := Progress(HEADER))
    content = before.encoded()
    for there in (None, b"", content[:-9], content.replace(b"3-0", b"3-1")):
        assert progress_of(HEADER, there) == Progress(HEADER)
    assert progress_of({**HEADER, "terms": "others"}, content).put == 0
