"""Answers that take several contexts, played by hand; one context is as it always was."""

import asyncio
import dataclasses

import numpy as np
import pytest

from notepad_jax.reading import answer, memory_agent
from notepad_jax.reading.loop import Job, Reader, read_all
from notepad_jax.reading.sampling import TurnSampling, turn_seed
from notepad_jax.text.chunks import Documents
from notepad_jax.types import (
    NO_TOKENS,
    Completion,
    Finish,
    Prompt,
    Reading,
    Status,
    Task,
    TextDocument,
    TurnKind,
    tokens,
)
from tests import fakes

QUESTION = tokens([290, 291])
STOP = 2
# Contexts of 4 tokens; a second one shows the last 2 and has room for 2 more.
CHUNKED = dataclasses.replace(fakes.rules(), answer_chunks=3, carry=2)


def thinker(*thoughts):
    """Answers with the ids that follow what it sees of its own thoughts; keeps no memory."""

    def said(prompt, sampling):
        if not prompt.begun and not fakes.is_answer(prompt):
            return [300, STOP]
        begun = prompt.tail[len(prompt.tail) - prompt.begun :].tolist()
        at = thoughts.index(begun[-1]) + 1 if begun else 0
        assert list(thoughts[at - len(begun) : at]) == begun
        return list(thoughts[at:])

    return fakes.Scripted(said)


def read(completer, rules, state=None):
    state = state or memory_agent.start(QUESTION, fakes.chunks_of(tokens(range(300, 308)), 4))

    async def pairs():
        sampling = TurnSampling(1.0, 1.0, (STOP,), 7)
        reading = memory_agent.read(completer, fakes.template(), rules, state, sampling)
        return [pair async for pair in reading]

    return asyncio.run(pairs())


def test_an_answer_by_hand():
    completer = thinker(400, 401, 402, 403, 404, 405, 406, STOP)
    pairs = read(completer, CHUNKED)
    update, _, *contexts = (turn for turn, _ in pairs)
    assert [turn.kind for turn in contexts] == [TurnKind.ANSWER] * 3
    assert [turn.chunk for turn in contexts] == [2, 2, 2]  # chunks that were read
    said = [turn.completion.tokens.tolist() for turn in contexts]
    assert said == [[400, 401, 402, 403], [404, 405], [406, STOP]]
    asked = fakes.template().answer_prompt(QUESTION, tokens([300])).tokens.tolist()
    seen = [turn.prompt.tokens.tolist() for turn in contexts]
    assert seen == [asked, [*asked, 402, 403], [*asked, 404, 405]]
    assert [turn.prompt.begun for turn in contexts] == [0, 2, 2]
    assert memory_agent.answered(pairs[-1][1]).tolist() == [400, 401, 402, 403, 404, 405, 406]
    assert pairs[-1][1].memory_tokens.tolist() == [300]
    limits = [sampling.max_new_tokens for _, sampling in completer.calls]
    assert limits == [6, 6, 4, 2, 2] and CHUNKED.longest_answer == 4 + 2 + 2
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert seeds == [turn_seed(7, number) for number in range(5)]
    # Contexts begin with one prefix, with room behind it; no other hint is worth anything.
    assert all(np.array_equal(t.prompt.shared, asked[:-1]) for t in contexts)


def test_the_last_context_that_is_allowed_may_be_cut():
    pairs = read(thinker(*range(400, 420)), CHUNKED)
    assert len(pairs) == 2 + 3 and pairs[-1][0].completion.finish is Finish.LENGTH
    assert memory_agent.answered(pairs[-1][1]).tolist() == list(range(400, 408))


def test_what_is_carried_reaches_back_over_a_short_context():
    """A carry of 3 in contexts of 4: each adds one token, and shows three of the others."""
    rules = dataclasses.replace(CHUNKED, answer_chunks=4, carry=3)
    pairs = read(thinker(*range(400, 420)), rules)
    tails = [turn.prompt.tail[-3:].tolist() for turn, _ in pairs[3:]]
    assert tails == [[401, 402, 403], [402, 403, 404], [403, 404, 405]]


def test_one_context_is_the_turn_that_it_was():
    """The prompts, hints and sampling of a reading without this file: the template's own."""
    pairs = read(completer := thinker(*range(400, 420)), fakes.rules())
    assert [turn.kind for turn, _ in pairs] == [TurnKind.UPDATE] * 2 + [TurnKind.ANSWER]
    (asked, sampling), turn = completer.calls[-1], pairs[-1][0]
    wanted = fakes.template().answer_prompt(QUESTION, tokens([300]))
    for name in ("shared", "tail", "draft"):
        assert np.array_equal(getattr(asked, name), getattr(wanted, name))
    assert asked.begun == 0 and sampling.max_new_tokens == 4
    assert sampling.seed == turn_seed(7, 2) and turn.completion.tokens.tolist() == [
        400, 401, 402, 403]  # fmt: skip


def test_a_reading_goes_on_at_every_turn_as_if_it_had_never_stopped():
    thoughts = (400, 401, 402, 403, 404, 405, 406, STOP)
    whole = read(thinker(*thoughts), CHUNKED)
    for stopped, (_, state) in enumerate(whole[:-1]):
        completer = thinker(*thoughts)
        rest = read(completer, CHUNKED, state)
        assert len(rest) == len(whole) - stopped - 1
        for (mine, after), (theirs, wanted) in zip(rest, whole[stopped + 1 :], strict=True):
            assert mine.kind is theirs.kind and mine.chunk == theirs.chunk
            assert np.array_equal(mine.prompt.tokens, theirs.prompt.tokens)
            assert np.array_equal(mine.completion.tokens, theirs.completion.tokens)
            assert np.array_equal(*map(memory_agent.answered, (after, wanted)))
        seeds = [sampling.seed for _, sampling in completer.calls]
        assert seeds == [turn_seed(7, n) for n in range(stopped + 1, len(whole))]


def test_memories_can_be_played_again_over_the_contexts_of_an_answer():
    pairs = read(thinker(*range(400, 420)), CHUNKED)
    again = memory_agent.memories(CHUNKED, fakes.template(), [turn for turn, _ in pairs])
    assert [memory.tolist() for memory in again] == [[300]] * 5


def test_a_cancelled_context_ends_the_reading():
    class Cancelling:
        async def complete(self, prompt, sampling):
            if prompt.begun:
                return Completion(NO_TOKENS, np.zeros(0, np.float32), Finish.CANCELLED, 0)
            return fakes.completion([400, 401, 402, 403], sampling)

    turns = read(Cancelling(), CHUNKED)
    assert turns[-1][0].completion.finish is Finish.CANCELLED and len(turns) == 4
    assert memory_agent.answered(turns[-1][1]).tolist() == [400, 401, 402, 403]


def test_nothing_written_is_asked_again_without_a_beginning():
    """A server may cut a reply before it said a word."""
    asked = Prompt(tokens([5]), tokens([6]))
    after = answer.advance(answer.start(asked), NO_TOKENS, 2)
    assert answer.prompt(after) is asked and after.contexts == 1


# ---------------------------------------------------------------- the loop


def ended(completer, rules, shown=None, max_answer=None):
    tokenizer = fakes.tokenizer()
    reader = Reader(
        completer, tokenizer, fakes.template(), rules,
        TurnSampling(1.0, 1.0, (STOP,), 0), Documents(tokenizer, 4),
    )  # fmt: skip
    task = Task("a", "who ?", TextDocument("the code of ann is red ."), ("red",), "test", "em")
    seen = []

    class Seen:
        def turn(self, turn, memory):
            seen.append(turn)

    jobs = [Job(task, 1, shown, max_answer)]
    (end,) = asyncio.run(read_all(jobs, reader, lambda i: Seen(), lambda i, watcher, end: end))
    return end, seen


WORDS = tuple(fakes.tokenizer().encode("the secret code of ann is red .").tolist())


def test_what_is_judged_is_all_that_was_written():
    end, seen = ended(thinker(*WORDS, STOP), dataclasses.replace(CHUNKED, answer_chunks=4))
    assert (end.answer, end.finish) == ("the secret code of ann is red .", Finish.STOP)
    assert [turn.kind for turn in seen].count(TurnKind.ANSWER) == 4


def test_an_excerpt_is_answered_in_contexts_too_and_keeps_its_shared_part():
    shown = tokens([310, 311, 312])
    end, seen = ended(thinker(*WORDS, STOP), CHUNKED, lambda: shown)
    assert end.answer == "the secret code of ann is red ." and end.finish is Finish.LENGTH
    assert len(seen) == 3 and end.tokens == 3
    assert all(turn.prompt.shared.tolist() == shown.tolist() for turn in seen)


@pytest.mark.parametrize(
    ("limit", "contexts", "longest"),
    [(1, 1, 1), (4, 1, 4), (5, 1, 4), (6, 2, 6), (7, 2, 6), (8, 3, 8), (100, 3, 8)],
)
def test_a_task_s_limit_is_of_the_whole_answer(limit, contexts, longest):
    rules = CHUNKED.within(limit)
    assert (rules.answer_chunks, rules.longest_answer) == (contexts, longest)
    end, seen = ended(thinker(*WORDS * 3), CHUNKED, max_answer=limit)
    said = [t.completion.tokens for t in seen if t.kind is TurnKind.ANSWER]
    assert (len(said), sum(map(len, said))) == (contexts, longest)


@pytest.mark.parametrize(
    ("chunks", "carry", "says"),
    [
        (0, 0, "answer_chunks is 0; an answer takes at least 1 context"),
        (1, 2, "carry is 2, but an answer has one context .*set carry to 0, or answer_chunks to 2"),
        (2, 0, "carry is 0, .*use at least 1 and less than max_answer"),
        (2, 4, r"carry is 4, .*\(max_answer is 4\).*use at least 1 and less than max_answer"),
        (2, -1, "carry is -1, .*use at least 1"),
        (1, -1, "carry is -1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_mend(chunks, carry, says):
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(fakes.rules(), answer_chunks=chunks, carry=carry)


def test_no_context_is_longer_than_the_rules_say():
    rules = dataclasses.replace(CHUNKED, answer_chunks=5, carry=3)
    pairs = read(thinker(*range(400, 430)), rules)
    sizes = [len(t.prompt.tokens) + len(t.completion.tokens) for t, _ in pairs]
    assert max(sizes) <= rules.context(fakes.template())
    longest = fakes.template().longest_prompt(8, 4, 6, rules.carry)
    assert max(len(turn.prompt.tokens) for turn, _ in pairs) <= longest


def test_which_turns_were_cut():
    """Status and masks look at the last context; a memory that was cut was always cut."""
    pairs = read(thinker(*range(400, 430)), CHUNKED)
    turns = tuple(turn for turn, _ in pairs)
    assert Reading("a", 0, turns, "", Status.TRUNCATED).cut == (False,) * 4 + (True,)
    stopped = tuple(turn for turn, _ in read(thinker(400, 401, 402, 403, 404, STOP), CHUNKED))
    assert Reading("a", 0, stopped, "", Status.ANSWERED).cut == (False,) * 4
    long = fakes.Scripted(lambda prompt, sampling: list(range(300, 320)))
    turns = tuple(turn for turn, _ in read(long, fakes.rules()))
    assert Reading("a", 0, turns, "", Status.TRUNCATED).cut == (True, True, True)
    assert Reading("a", 0, (), "", Status.TRUNCATED).cut == ()
