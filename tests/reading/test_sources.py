"""Whose notes a merge read, by the turns alone, is what its prompt holds."""

import asyncio
import dataclasses

import fakes
import numpy as np
import pytest

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.turns import Source, Sources
from notepad_jax.types import Finish, TurnKind, tokens

SAMPLING = TurnSampling(temperature=1.0, top_p=1.0, stop_ids=(2,), seed=7)
KEEP = fakes.tokenizer().control_id("<|keep|>")
PARALLEL = Rules(8, 16, 6, 6, "overwrite_or_keep", order="parallel", passes=3)


def read(answer, chunks, rules=PARALLEL, template=None):
    state = memory_agent.start(tokens([310, 311]), [tokens([300] * 16)] * chunks)

    async def run():
        reads = memory_agent.read(
            fakes.Scripted(answer), template or fakes.template(), rules, state, SAMPLING
        )
        return [pair async for pair in reads]

    return asyncio.run(run())


def whim(seed):
    """Writes few different notes, some twice, some cut, the memory again, nothing, or keeps."""
    rng = np.random.default_rng(seed)
    sparse = rng.random()

    def said(prompt, sampling):
        if rng.random() < sparse:
            return [KEEP, 2] if rng.random() < 0.7 else [2]
        if rng.random() < 0.2:
            return [*(int(i) for i in fakes.memory_of(prompt)), 2][: sampling.max_new_tokens]
        note = [400 + int(i) for i in rng.integers(0, 3, rng.integers(1, 7))]
        return note if len(note) == 6 else [*note, 2]

    return said


def shown(pairs, chunks):
    """Yields of each turn the chunk and the memory that `memory_agent` had it read."""
    state = memory_agent.start(tokens(), [tokens()] * chunks)
    for turn, after in pairs:
        update = turn.kind is TurnKind.UPDATE
        yield turn, state.chunks[state.next_chunk] if update else None, state.memory_tokens
        state = after


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("between", [[], [7, 8]])
def test_a_merge_read_the_notes_that_are_in_its_chunk(seed, between):
    template = dataclasses.replace(fakes.template(), between=tokens(between))
    chunks = int(np.random.default_rng(seed).integers(1, 40))
    pairs = read(whim(seed), chunks, template=template)
    sources, said = Sources(PARALLEL, template), {}
    for turn, chunk, memory in shown(pairs, chunks):
        source = sources.add(turn)
        said[turn.chunk] = memory_agent.written(turn.completion)
        notes = [said[k] for k in source.reads]
        if turn.level:
            assert rounds.joined(notes, tokens(between)).tolist() == chunk.tolist()
            assert {(t.round, t.level) for t, _ in pairs if t.chunk in source.reads} == {
                (turn.round, turn.level - 1)
            }
        else:
            assert rounds.joined(notes, tokens()).tolist() == memory.tolist()


def test_a_note_is_what_is_new_and_each_is_read_once():
    notes = [[401], [KEEP], [401], [402, 403], []]

    def said(prompt, sampling):
        return [*(notes.pop(0) if notes else [409]), 2]

    sources = Sources(PARALLEL, fakes.template())
    found = [sources.add(turn) for turn, _ in read(said, 5)]
    wrote = [Source(one) for one in (True, False, True, True, False)]
    assert found[:6] == [*wrote, Source(True, (0, 3))]
    # The second round reads the memory that the merge wrote, and says it again: nothing new.
    assert found[6:] == [Source(False, (5,))] * 6


def test_a_cancelled_turn_has_written_nothing_and_a_serial_reading_has_no_notes():
    (turn, _), *_ = read(lambda prompt, sampling: [401, 2], 1)
    cut = dataclasses.replace(turn.completion, finish=Finish.CANCELLED)
    sources = Sources(PARALLEL, fakes.template())
    assert sources.add(dataclasses.replace(turn, completion=cut)) == Source(False)
    serial = Sources(dataclasses.replace(PARALLEL, order="serial"), fakes.template())
    assert serial.add(turn) == Source(None)


def test_a_merge_alone_is_one_whose_notes_nobody_saw():
    """One that was written again is kept without the turns below it."""
    merges = [turn for turn, _ in read(whim(3), 12) if turn.level]
    assert Sources(PARALLEL, fakes.template()).add(merges[-1]).reads == ()


@pytest.mark.parametrize("seed", range(20))
def test_a_mixed_reading_that_asks_for_rounds_reads_what_is_said_too(seed):
    template = dataclasses.replace(fakes.template(), again=tokens([401]), end=tokens([399]))
    rules = dataclasses.replace(PARALLEL, order="mixed", again=True)
    chunks = int(np.random.default_rng(seed).integers(1, 30))
    pairs = read(whim(seed), chunks, rules, template)
    sources, said = Sources(rules, template), {}
    for turn, chunk, memory in shown(pairs, chunks):
        source = sources.add(turn)
        said[turn.chunk] = memory_agent.written(turn.completion)
        held = chunk if turn.level > 0 else memory
        notes = [said[k] for k in source.reads]
        assert rounds.joined(notes, template.between).tolist() == held.tolist()
