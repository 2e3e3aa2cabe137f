"""Readings over several passes and in parallel rounds, and memories of several heads."""

import asyncio
import dataclasses
import itertools
import math

import fakes
import numpy as np
import pytest

from notepad_jax.reading import memory_agent, rounds
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.types import CompleterFailed, Finish, TurnKind, tokens

SAMPLING = TurnSampling(temperature=1.0, top_p=1.0, stop_ids=(2,), seed=7)
QUESTION = tokens([310, 311])
TEMPLATE = fakes.template()
FIRST = 400  # ids from here on are facts; what is below is prose
KEEP = fakes.tokenizer().control_id("<|keep|>")
PARALLEL = Rules(8, 16, 6, 6, "overwrite_or_keep", order="parallel", passes=3)


def note_taker(pauses=lambda prompt: 1, **how):
    """Writes the facts of its memory and then those of the chunk; keeps where none is new."""

    def said(prompt, sampling):
        memory = [int(i) for i in fakes.memory_of(prompt) if i >= FIRST]
        if fakes.is_answer(prompt):
            return [*memory, sampling.stop_ids[0]]
        told = [int(i) for i in prompt.shared if i >= FIRST]
        new = [fact for fact in dict.fromkeys(told) if fact not in memory]
        return [*memory, *new, sampling.stop_ids[0]] if new else [KEEP, sampling.stop_ids[0]]

    return fakes.Scripted(said, **how)


def document(chunks, facts, size=16):
    """Chunks of prose; `facts` says which ids stand in which chunk."""
    ids = np.full((chunks, size), 300, np.int32)
    for chunk, some in facts.items():
        ids[chunk, 3 : 3 + len(some)] = some
    return [tokens(one) for one in ids]


def read(completer, state, rules=PARALLEL):
    async def run():
        reading = memory_agent.read(completer, TEMPLATE, rules, state, SAMPLING)
        return [pair async for pair in reading]

    return asyncio.run(run())


def began(chunks):
    return memory_agent.start(QUESTION, chunks)


def places(pairs):
    """Of update turns, how many there are of each (round, level)."""
    turns = [turn for turn, _ in pairs if turn.kind is TurnKind.UPDATE]
    return {
        key: len(list(some))
        for key, some in itertools.groupby(turns, lambda turn: (turn.round, turn.level))
    }


def test_a_round_reads_all_chunks_with_one_memory_and_merges_what_they_note():
    chunks = document(8, {1: [401], 4: [402, 403], 6: [404]})
    pairs = read(note_taker(), began(chunks))
    # Three notes fit one chunk, so one turn merges them; the second round finds nothing new.
    assert places(pairs) == {(0, 0): 8, (0, 1): 1, (1, 0): 8}
    memories = [state.memory_tokens.tolist() for _, state in pairs]
    assert memories == [[]] * 8 + [[401, 402, 403, 404]] * 10
    shown = {tuple(fakes.memory_of(turn.prompt)) for turn, _ in pairs[:8]}
    assert shown == {tuple(fakes.tokenizer().encode("nothing"))}
    assert [turn.chunk for turn, _ in pairs] == list(range(18))
    assert [turn.unit for turn, _ in pairs] == [*range(8), 0, *range(8), 0]
    assert [turn.size for turn, _ in pairs[:9]] == [16] * 8 + [
        6
    ]  # four facts, and what stands between three notes


@pytest.mark.parametrize(("facts", "levels"), [({}, 1), ({2: [401]}, 1), ({0: [401], 3: [402]}, 2)])
def test_one_note_is_the_memory_as_it_is_and_none_leaves_it(facts, levels):
    rules = dataclasses.replace(PARALLEL, passes=1)
    pairs = read(note_taker(), began(document(4, facts)), rules)
    assert len(places(pairs)) == levels
    assert pairs[-1][1].memory_tokens.tolist() == sorted(sum(facts.values(), []))


@pytest.mark.parametrize("slips", [(), (350,), (350, 352)])
def test_a_slip_in_a_later_round_is_read_beside_the_memory_that_it_would_replace(slips):
    wise = note_taker()

    def said(prompt, sampling):
        slip = [word for word in slips if word in prompt.shared and 401 in fakes.memory_of(prompt)]
        said_so = len(prompt.shared) == 16  # a chunk of the document, and not of notes
        return [*slip, sampling.stop_ids[0]] if slip and said_so else wise._answer(prompt, sampling)

    pairs = read(fakes.Scripted(said), began(document(4, {0: [350], 1: [401], 2: [352]})))
    assert pairs[-1][1].memory_tokens.tolist() == [401]
    assert places(pairs).get((1, 1), 0) == bool(slips)


def test_a_document_of_one_chunk_and_of_none():
    (update, after), (answer, _) = read(
        note_taker(), began(document(1, {0: [401]})), dataclasses.replace(PARALLEL, passes=1)
    )
    assert after.memory_tokens.tolist() == [401] and answer.kind is TurnKind.ANSWER
    assert [turn.kind for turn, _ in read(note_taker(), began([]))] == [TurnKind.ANSWER]


def hoarder():
    """Writes as much as it may at every turn: the memory and all facts, cut at the limit."""

    def said(prompt, sampling):
        if fakes.is_answer(prompt):
            return [sampling.stop_ids[0]]
        facts = [int(i) for i in prompt.shared if i >= FIRST]
        return (facts * 6)[: sampling.max_new_tokens]

    return fakes.Scripted(said)


@pytest.mark.parametrize("chunks", [2, 3, 17, 400])
def test_whoever_notes_everything_still_has_bounded_contexts_and_a_logarithm_of_levels(chunks):
    rules = dataclasses.replace(PARALLEL, passes=1)
    pairs = read(hoarder(), began(document(chunks, {k: [FIRST + k] for k in range(chunks)})), rules)
    longest = max(len(t.prompt.tokens) + len(t.completion.tokens) for t, _ in pairs)
    assert longest <= rules.context(TEMPLATE)
    counts = list(places(pairs).values())
    assert counts[0] == chunks and counts[-1] == 1
    assert len(counts) <= 1 + math.ceil(math.log2(chunks))
    assert all(above <= -(-below // 2) for below, above in itertools.pairwise(counts))


def test_whoever_says_nothing_by_the_memory_again_or_by_nothing_ends_as_well():
    rules = Rules(8, 16, 6, 6, "overwrite", order="parallel", passes=3)

    def same(prompt, sampling):
        shown = [int(i) for i in fakes.memory_of(prompt) if i >= FIRST]
        return [*shown, sampling.stop_ids[0]]

    state = dataclasses.replace(began(document(3, {})), memory_tokens=tokens([401]))
    first = dataclasses.replace(state.round, began=state.memory_tokens)
    pairs = read(fakes.Scripted(same), dataclasses.replace(state, round=first), rules)
    assert places(pairs) == {(0, 0): 3} and pairs[-1][1].memory_tokens.tolist() == [401]


def test_turns_of_a_level_are_under_way_together_and_no_more_than_are_meant(monkeypatch):
    monkeypatch.setattr(memory_agent, "ABREAST", 5)
    most = 0

    class Watched(fakes.Scripted):
        async def complete(self, prompt, sampling):
            nonlocal most
            most = max(most, self.running + 1)
            return await super().complete(prompt, sampling)

    taker = note_taker()
    pairs = read(Watched(taker._answer, pauses=3), began(document(12, {5: [401], 9: [402]})))
    assert most == 5
    assert texts(pairs) == texts(read(note_taker(), began(document(12, {5: [401], 9: [402]}))))


def texts(pairs):
    return [
        (t.round, t.level, t.chunk, t.prompt.tokens.tolist(), t.completion.tokens.tolist())
        for t, _ in pairs
    ]


def test_seeds_are_each_turns_own():
    taker = note_taker()
    read(taker, began(document(6, {0: [401], 1: [402], 5: [403]})))
    seeds = [sampling.seed for _, sampling in taker.calls]
    assert len(set(seeds)) == len(seeds) == 6 + 1 + 6 + 1


@pytest.mark.parametrize("order", ["serial", "parallel"])
def test_a_reading_goes_on_from_any_turn_and_is_played_again(order):
    rules = dataclasses.replace(PARALLEL, order=order)
    chunks = document(7, {0: [401, 402], 3: [403], 6: [404]})
    pairs = read(note_taker(), began(chunks), rules)
    for k, (_, state) in enumerate(pairs[:-1]):
        assert texts(read(note_taker(), state, rules)) == texts(pairs[k + 1 :])
    again = memory_agent.memories(rules, TEMPLATE, [turn for turn, _ in pairs])
    assert [m.tolist() for m in again] == [state.memory_tokens.tolist() for _, state in pairs]


def test_what_is_under_way_is_cancelled_with_the_reading():
    taker = note_taker(pauses=100)

    async def run():
        reading = memory_agent.read(taker, TEMPLATE, PARALLEL, began(document(9, {})), SAMPLING)
        first = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert taker.running == 9
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert taker.running == 0

    asyncio.run(run())


def test_a_failure_of_one_turn_is_the_readings():
    def said(prompt, sampling):
        if FIRST in prompt.shared:
            raise CompleterFailed("broken")
        return [KEEP, sampling.stop_ids[0]]

    failing = fakes.Scripted(said)
    with pytest.raises(CompleterFailed, match="broken"):
        read(failing, began(document(5, {3: [FIRST]})))
    assert failing.running == 0


def test_a_cancelled_completion_ends_it():
    class Cancels(fakes.Scripted):
        async def complete(self, prompt, sampling):
            made = await super().complete(prompt, sampling)
            return dataclasses.replace(made, finish=Finish.CANCELLED)

    pairs = read(Cancels(lambda prompt, sampling: [KEEP, 2]), began(document(4, {})))
    assert len(pairs) == 1


# ---------------------------------------------------------------- serial passes


def test_a_second_pass_begins_with_the_memory_of_the_first():
    rules = Rules(8, 16, 6, 6, "overwrite_or_keep", passes=3)
    pairs = read(note_taker(), began(document(3, {0: [401], 2: [402]})), rules)
    # The second pass finds nothing, so there is no third.
    assert places(pairs) == {(0, 0): 3, (1, 0): 3}
    assert [s.memory_tokens.tolist() for _, s in pairs] == [[401]] * 2 + [[401, 402]] * 5
    assert fakes.memory_of(pairs[3][0].prompt).tolist() == [401, 402]


def test_passes_end_at_their_number():
    rules = Rules(8, 16, 6, 6, "overwrite", passes=2)
    pairs = read(fakes.appender(), began([tokens([300 + k] * 2) for k in range(2)]), rules)
    assert places(pairs) == {(0, 0): 2, (1, 0): 2} and pairs[-1][0].chunk == 4


# ---------------------------------------------------------------- packing and heads


@pytest.mark.parametrize("between", [[], [7]])
def test_notes_are_packed_whole_in_order_and_two_at_a_time_or_more(between):
    rng, between = np.random.default_rng(0), tokens(between)
    for _ in range(200):
        limit = int(rng.integers(1, 9))
        size = int(rng.integers(2 * limit + len(between), 40))
        sizes = rng.integers(1, limit + 1, rng.integers(1, 30))
        notes = [tokens(rng.integers(10, 99, n)) for n in sizes]
        chunks = rounds.packed(notes, size, between)
        assert all(0 < len(chunk) <= size for chunk in chunks)
        assert len(chunks) <= -(-len(notes) // 2)
        told = [i for chunk in chunks for i in chunk if i not in between]
        assert told == [i for note in notes for i in note]


def test_the_least_recently_written_head_is_overwritten_and_all_are_shown():
    rules = Rules(8, 16, 6, 6, "heads", heads=2)
    facts = {0: [401], 1: [402], 3: [403]}

    def only_new(prompt, sampling):
        told = [int(i) for i in prompt.shared if i >= FIRST]
        return [*(told or [KEEP]), sampling.stop_ids[0]]

    pairs = read(fakes.Scripted(only_new), began(document(4, facts)), rules)
    found = [state.memory_tokens.tolist() for _, state in pairs]
    dot = int(TEMPLATE.between[0])
    two, three = [402, dot, 401], [403, dot, 402]
    assert found == [[401], two, two, three, three]
    again = memory_agent.memories(rules, TEMPLATE, [turn for turn, _ in pairs])
    assert [m.tolist() for m in again] == found


def test_heads_count_in_the_longest_context():
    one, four = Rules(8, 4, 99, 4, "overwrite"), Rules(8, 4, 99, 4, "heads", heads=4)
    template = fakes.template("chunk_first")
    more = 3 * (99 + len(template.between))
    assert four.context(template) == one.context(template) + more
    assert len(template.between) > 0


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (dict(passes=0), "passes is 0; a document is read at least once"),
        (dict(order="random"), "order is 'random'; use one of serial, parallel"),
        (dict(heads=3), "heads is 3 and memory_update is 'overwrite'"),
        (dict(memory_update="heads"), "heads is 1 and memory_update is 'heads'"),
        (dict(order="parallel", memory_update="heads", heads=2), "takes one chunk after another"),
        (dict(order="parallel", memory_update=lambda *_: tokens()), "a rule of yours"),
    ],
)
def test_rules_that_cannot_be(how, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(fakes.rules(), **how)


def test_a_chunk_must_have_room_for_two_notes():
    rules = Rules(8, 11, 6, 6, "overwrite", order="parallel")
    with pytest.raises(ValueError, match="reading.chunk_size is 11, and .* that is 13 tokens"):
        rules.check(TEMPLATE)
    dataclasses.replace(rules, chunk_size=13).check(TEMPLATE)
