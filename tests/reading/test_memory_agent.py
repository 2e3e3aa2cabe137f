"""The reading loop: turns, memory spliced as ids, the keep marker, seeds, cancellation."""

import asyncio
import dataclasses
import pickle

import fakes
import numpy as np
import pytest

from notepad_jax.reading import memory_agent
from notepad_jax.reading.sampling import TurnSampling, hashed_seed, turn_seed
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.types import Finish, TextDocument, Tokens, TurnKind, tokens

SAMPLING = TurnSampling(temperature=1.0, top_p=1.0, stop_ids=(2,), seed=7)
QUESTION = tokens([310, 311])


def chunks(length: int, size: int = 4) -> list[Tokens]:
    return fakes.chunks_of(tokens(range(300, 300 + length)), size)


def turns_of(completer, state, rules=None, template=None):
    async def run():
        reading = memory_agent.read(
            completer, template or fakes.template(), rules or fakes.rules(), state, SAMPLING
        )
        return [pair async for pair in reading]

    return asyncio.run(run())


@pytest.mark.parametrize(("length", "updates"), [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_one_update_per_chunk_and_one_answer(length, updates):
    pairs = turns_of(fakes.empty(), memory_agent.start(QUESTION, chunks(length)))
    kinds = [turn.kind for turn, _ in pairs]
    assert kinds == [TurnKind.UPDATE] * updates + [TurnKind.ANSWER]
    assert [turn.chunk for turn, _ in pairs] == list(range(updates + 1))


def test_somebody_else_may_complete_the_answer_and_only_that():
    first, other = fakes.first_of_chunk(), fakes.empty()
    state = memory_agent.start(QUESTION, chunks(8))
    how = fakes.template(), fakes.rules(), state, SAMPLING

    async def run():
        return [turn async for turn, _ in memory_agent.read(first, *how, answering=other)]

    turns = asyncio.run(run())
    assert len(first.calls) == 2 and len(other.calls) == 1
    assert other.calls[0][0] is turns[-1].prompt and turns[-1].kind is TurnKind.ANSWER


def test_memory_is_the_completion_without_its_stop_token():
    pairs = turns_of(fakes.first_of_chunk(), memory_agent.start(QUESTION, chunks(8)))
    assert [state.memory_tokens.tolist() for _, state in pairs] == [[300], [304], [304]]
    shown = [fakes.memory_of(turn.prompt).tolist() for turn, _ in pairs]
    assert shown == [fakes.tokenizer().encode("nothing").tolist(), [300], [304]]
    assert pairs[-1][0].completion.tokens.tolist() == [304, 2]


def test_memory_is_spliced_as_ids_never_encoded_again():
    tok = fakes.tokenizer()
    odd = [int(tok.encode("r")[-1]), int(tok.encode("ed")[-1]), tok.control_id("<|memory|>")]
    assert tok.encode(tok.decode(odd)).tolist() != odd
    completer = fakes.Scripted(lambda prompt, sampling: [*odd, sampling.stop_ids[0]])
    pairs = turns_of(completer, memory_agent.start(QUESTION, chunks(8)))
    assert pairs[1][0].prompt.tail.tolist()[4:-1] == odd


def test_a_memory_cut_at_the_limit_is_used_as_it_is():
    completer = fakes.Scripted(lambda prompt, sampling: [300 + i for i in range(100)])
    pairs = turns_of(completer, memory_agent.start(QUESTION, chunks(4)))
    assert pairs[0][0].completion.finish is Finish.LENGTH
    assert pairs[0][1].memory_tokens.tolist() == [300, 301, 302, 303, 304, 305]
    assert len(pairs[1][0].completion.tokens) == fakes.rules().max_answer


def test_an_empty_completion_shows_the_no_memory_marker():
    state = memory_agent.start(QUESTION, chunks(8))
    written = dataclasses.replace(state, memory_tokens=tokens([333]))
    pairs = turns_of(fakes.empty(), written)
    assert pairs[0][1].memory_tokens.tolist() == []
    assert np.array_equal(fakes.memory_of(pairs[1][0].prompt), fakes.template().no_memory)


def test_the_keep_marker_keeps_only_where_the_rules_say_so():
    keep = fakes.tokenizer().control_id("<|keep|>")
    state = dataclasses.replace(
        memory_agent.start(QUESTION, chunks(4)), memory_tokens=tokens([333])
    )
    for update, expected in (("overwrite_or_keep", [333]), ("overwrite", [keep])):
        rules = fakes.rules(memory_update=update)
        pairs = turns_of(fakes.Scripted(lambda p, s: [keep, 2]), state, rules)
        assert pairs[0][1].memory_tokens.tolist() == expected
    longer = fakes.Scripted(lambda p, s: [keep, 300, 2])
    pairs = turns_of(longer, state, fakes.rules(memory_update="overwrite_or_keep"))
    assert pairs[0][1].memory_tokens.tolist() == [keep, 300]


def test_the_keep_rule_needs_a_marker():
    template = dataclasses.replace(fakes.template(), keep=tokens())
    with pytest.raises(ValueError, match="empty .keep. section"):
        fakes.rules(memory_update="overwrite_or_keep").check(template)


def test_memories_can_be_played_again():
    keep = fakes.tokenizer().control_id("<|keep|>")
    calls = iter([300, keep, 301, keep, 302])
    rules = fakes.rules(memory_update="overwrite_or_keep")
    pairs = turns_of(
        fakes.Scripted(lambda p, s: [next(calls), 2]),
        memory_agent.start(QUESTION, chunks(16)),
        rules,
    )
    again = memory_agent.memories(rules, fakes.template(), [turn for turn, _ in pairs])
    assert [m.tolist() for m in again] == [s.memory_tokens.tolist() for _, s in pairs]
    assert [m.tolist() for m in again] == [[300], [300], [301], [301], [301]]


def test_the_draft_is_the_memory_as_it_is():
    pairs = turns_of(fakes.first_of_chunk(), memory_agent.start(QUESTION, chunks(8)))
    prompts = [turn.prompt for turn, _ in pairs]
    assert prompts[1].draft.tolist() == [300, 2]


def test_no_two_turns_share_noise():
    completer = fakes.empty()
    turns_of(completer, memory_agent.start(QUESTION, chunks(40)))
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert len(set(seeds)) == len(seeds) == 11
    grid = {turn_seed(base, turn) for base in range(100) for turn in range(100)}
    assert len(grid) == 10_000 and all(0 <= seed < 2**63 for seed in grid)


def test_a_turns_seed_is_a_hash_of_what_it_is_for():
    for base, turn in ((0, 0), (7, 12), (2**63 - 1, 10**6), (np.int64(5), np.int32(3))):
        assert turn_seed(base, turn) == hashed_seed("turn", int(base), int(turn))
    assert turn_seed(7, 3) == 5832211181138270186  # as it was when runs were first written down


def test_while_a_memory_stands_still_its_prompts_have_the_same_arrays():
    pairs = turns_of(fakes.first_of_chunk(), memory_agent.start(QUESTION, (tokens([300]),) * 4))
    prompts = [turn.prompt for turn, _ in pairs]
    assert prompts[0].tail is not prompts[1].tail
    assert prompts[1].tail is prompts[2].tail is prompts[3].tail
    assert prompts[1].draft is prompts[2].draft
    assert pairs[0][1].memory_tokens is pairs[3][1].memory_tokens


def test_a_reading_goes_on_where_it_stood():
    start = memory_agent.start(QUESTION, chunks(16))
    whole = turns_of(fakes.appender(), start)
    middle = pickle.loads(pickle.dumps(whole[1][1]))
    rest = turns_of(fakes.appender(), middle)
    assert [t.completion.tokens.tolist() for t, _ in rest] == [
        t.completion.tokens.tolist() for t, _ in whole[2:]
    ]


def test_a_cancelled_completion_ends_the_reading():
    class Cancelling(fakes.Scripted):
        async def complete(self, prompt, sampling):
            done = await super().complete(prompt, sampling)
            return dataclasses.replace(done, finish=Finish.CANCELLED)

    ((turn, state),) = turns_of(
        Cancelling(lambda p, s: [300]), memory_agent.start(QUESTION, chunks(8))
    )
    assert turn.completion.finish is Finish.CANCELLED and len(state.memory_tokens) == 0


def test_a_streamed_document_reads_like_a_listed_one():
    tok, text = fakes.tokenizer(), "the secret code of ann is red . " * 6
    question = tok.encode("who ?")
    listed = memory_agent.start(question, fakes.chunks_of(tok.encode(text), 5))
    streamed = memory_agent.start(question, ChunkedDocument(tok, TextDocument(text), 5))
    one, two = (turns_of(fakes.appender(), state) for state in (listed, streamed))
    assert [t.prompt.tokens.tolist() for t, _ in one] == [t.prompt.tokens.tolist() for t, _ in two]


def test_contexts_are_bounded_by_the_rules():
    template, rules = fakes.template(), fakes.rules()
    limit = rules.context(template)
    completer = fakes.Scripted(lambda prompt, sampling: [300] * 100)
    for turn, _ in turns_of(completer, memory_agent.start(tokens([310] * 8), chunks(40))):
        assert len(turn.prompt.tokens) + len(turn.completion.tokens) <= limit


def test_limits_are_checked():
    with pytest.raises(ValueError, match="question has 9 tokens and the limit is 8"):
        memory_agent.encode_question(fakes.tokenizer(), "who " * 9, 8)
    with pytest.raises(ValueError, match="max_memory is 0"):
        dataclasses.replace(fakes.rules(), max_memory=0)
    with pytest.raises(ValueError, match="overwrite, overwrite_or_keep"):
        fakes.rules(memory_update="append")
