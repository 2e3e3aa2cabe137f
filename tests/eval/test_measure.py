"""Measuring readings: what is kept of one, how it is scored, what is traced."""

import asyncio
import dataclasses
import functools

import pytest

from notepad_jax.eval.measure import REPORTED, measure
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.rollout import rewards
from notepad_jax.scoring import long_context, metrics
from notepad_jax.text.chunks import Documents
from notepad_jax.types import CompleterFailed, Evidence, Finish, Reading, Status, TurnKind
from tests import fakes
from tests.eval.reading import items, read, reader, task


class Trace(list):
    """Keeps what it is told."""

    def add(self, change: MemoryChange) -> None:
        self.append(change)

    def turn(self, turn) -> None:
        self.turns = [*getattr(self, "turns", ()), turn]


def test_a_reading_is_kept_as_its_answer_and_its_memories_go_to_a_trace():
    # The fake writes each chunk's first word into its memory, and answers with it.
    trace = Trace()
    one = task("a", "blue is blue of red ann red", evidence=(Evidence("red", 0.6),))
    (result,) = read(items(one, length=7), fakes.first_of_chunk(), trace_of=lambda item: trace)
    assert [(c.chunk, c.memory, c.tokens, c.recall) for c in trace] == [
        (0, "blue", 1, 0.0),
        (2, "red", 1, 1.0),
    ]
    assert [turn.chunk for turn in trace.turns] == [0, 1, 2, 3, 4]
    assert 0 <= trace[0].seconds <= trace[1].seconds <= result.seconds
    assert (result.answer, result.correct, result.gold) == ("red", 1.0, ("red",))
    assert (result.turns, result.tokens, result.finish) == (5, 7, Finish.STOP)
    assert (result.changes, result.recall, result.lost) == (2, 1.0, "")
    assert set(result.scores) == set(REPORTED) and set(result.scores.values()) == {1.0}


def test_where_an_answer_was_lost_is_told():
    # The memory ends as the last chunk's first word: "green" was there, and is overwritten.
    lost = task("a", "green is blue of", "green", evidence=(Evidence("green", 0.0),))
    never = task("b", "is green blue of", "green", evidence=(Evidence("green", 0.2),))
    unused = task("c", "is red green of", "red", evidence=(Evidence("green", 0.5),))
    results = read(items(lost, never, unused), fakes.first_of_chunk())
    assert [r.lost for r in results] == ["overwritten", "never written", "not used"]
    assert [r.recall for r in results] == [0.0, 0.0, 1.0]


def test_the_published_metric_pays_nothing_for_silence_or_an_answer_without_a_sign():
    silent = read(items(task("a", "red is")), fakes.empty())
    assert set(silent[0].scores.values()) == {0.0}
    # The fake answers "red". Where a box may be left out (auto), that is what was said; but
    # published evaluations look for a box, or for "the answer is".
    for contract, scores in (("plain", (1.0, 1.0)), ("auto", (1.0, 0.0)), ("boxed", (0.0, 0.0))):
        (result,) = read(items(task("a", "red is", contract=contract)), fakes.first_of_chunk())
        assert (result.scores["sub_em"], result.scores["sub_em_two_way"]) == scores


@pytest.mark.parametrize("method", ["notepad", "recent-only"])
def test_an_item_may_have_a_shorter_answer_than_the_reader_allows_and_no_longer_one(method):
    completer = fakes.empty()
    whole = fakes.rules(2).max_answer
    (plain,) = items(task("a", "red is"), method=method)
    short, long = (dataclasses.replace(plain, max_answer=n, repeat=n) for n in (1, whole + 5))
    read([plain, short, long], completer, at_once=1)
    per_reading = 2 if method == "notepad" else 1  # of one update and one answer, or the answer
    answers = completer.calls[per_reading - 1 :: per_reading]
    assert [sampling.max_new_tokens for _, sampling in answers] == [whole, 1, whole]


def test_a_metric_that_looks_at_the_question_is_shown_it(monkeypatch):
    judge = functools.partial(long_context.babilong, ("ann", "red"))
    monkeypatch.setitem(metrics._JUDGES, "named", judge)
    monkeypatch.setitem(long_context.BABILONG, "named", judge)
    said = fakes.tokenizer().encode("code of ann is red").tolist()
    completer = fakes.Scripted(lambda asked, sampling: [*said, 2])
    for question, correct in (("code of ann ?", 1.0), ("code of bob ?", 0.0)):
        one = dataclasses.replace(task("a", "red is", "red"), question=question, metric="named")
        how = reader(completer)
        how = dataclasses.replace(how, rules=dataclasses.replace(how.rules, max_answer=6))
        (result,) = asyncio.run(measure(items(one), how))
        assert (result.answer, result.correct) == ("code of ann is red", correct)


def test_an_answer_of_several_contexts_is_scored_whole_and_its_turns_are_told_apart():
    said = fakes.tokenizer().encode("code of ann is red").tolist()

    def say(asked, sampling):
        if not asked.begun:
            return said if fakes.is_answer(asked) else [2]
        return [*said[said.index(asked.tail[-1]) + 1 :], 2]

    how = reader(fakes.Scripted(say))
    rules = dataclasses.replace(how.rules, max_answer=3, answer_chunks=4, carry=1)
    whole, (one,) = dataclasses.replace(how, rules=rules), items(task("a", "red is ann of", "red"))
    limited = dataclasses.replace(one, repeat=1, max_answer=3)
    for item, answer, turns in ((one, "code of ann is red", 2 + 3), (limited, "code of ann", 3)):
        (result,) = asyncio.run(measure([item], whole))
        assert (result.answer, result.turns) == (answer, turns)
        assert result.turns - result.answer_turns == 2  # chunks
        assert result.scores["sub_em"] == (answer != "code of ann")


def test_results_come_in_the_order_of_items_whatever_runs_at_once():
    planned = items(task("c", "red is"), task("b", "blue is ann of red who"), task("a", "green is"))
    for at_once in (1, 3):
        ended = []
        results = read(planned, fakes.first_of_chunk(), at_once=at_once, on_result=ended.append)
        assert [(r.task_id, r.answer) for r in results] == [
            ("c", "red"),
            ("b", "red"),
            ("a", "green"),
        ]
        assert sorted(r.task_id for r in ended) == ["a", "b", "c"]


def test_readings_never_share_noise_and_repeats_are_readings():
    completer = fakes.empty()
    both = (task("a", "red is ann of"), task("b", "red is ann of"))
    planned = items(*both, repeats=2) + items(*both, length=9) + items(*both, method="recent-only")
    read(planned, completer)
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert len(set(seeds)) == len(seeds) == 6 * 3 + 2


def test_progress_tells_turns_readings_and_hits():
    told = []
    planned = items(task("a", "red is"), task("b", "blue is"))
    read(planned, fakes.first_of_chunk(), told.append)
    assert (told[-1].turns, told[-1].done, told[-1].total, told[-1].correct) == (4, 2, 2, 1.0)


class Failing:
    """Answers like `first_of_chunk`, but fails on update turns whose chunk begins with `word`."""

    def __init__(self, word: str) -> None:
        self._inner, self._id = fakes.first_of_chunk(), fakes.tokenizer().encode(word)[0]

    async def complete(self, prompt, sampling):
        if not fakes.is_answer(prompt) and prompt.shared[0] == self._id:
            raise RuntimeError("the engine is gone")
        return await self._inner.complete(prompt, sampling)


def test_a_failed_reading_counts_as_wrong_and_says_why():
    right, failed = read(items(task("a", "red is"), task("b", "ann is")), Failing("ann"))
    assert (right.correct, failed.correct, right.failed, failed.failed) == (1.0, 0.0, False, True)
    assert failed.problem == "RuntimeError: the engine is gone"
    assert failed.finish is Finish.CANCELLED and set(failed.scores.values()) == {0.0}


def test_failures_are_told_as_they_come():
    told = []
    planned = items(task("a", "ann is"), task("b", "ann of"))
    results = read(planned, Failing("ann"), on_failure=told.append)
    assert all(result.failed for result in results)
    assert [str(failure) for failure in told] == ["the engine is gone"] * 2


def test_a_completer_that_is_broken_ends_the_measurement():
    """Nobody would be answered any more: the rest was scored as wrong."""

    class Broken:
        async def complete(self, prompt, sampling):
            raise CompleterFailed("the engine failed: a launch did")

    with pytest.raises(CompleterFailed, match="a launch did"):
        read(items(task("a", "red is"), task("b", "blue is")), Broken())


def test_mistakes_are_named_before_anything_is_read():
    with pytest.raises(ValueError, match="two tasks of length 4 are called 'a'"):
        read(items(task("a", "red"), task("a", "red")), fakes.empty())


def test_evidence_without_words_is_named_with_its_task():
    with pytest.raises(ValueError, match="task 'a': the evidence at place 0.5 has no text"):
        read(items(task("a", "red", evidence=(Evidence(" ", 0.5),))), fakes.empty())


def test_a_question_that_is_too_long_is_named():
    from dataclasses import replace

    long = replace(task("a", "red"), question="is " * 9)
    with pytest.raises(ValueError, match="task 'a': the question has 9 tokens and the limit is 8"):
        read(items(long), fakes.empty())


def test_methods_of_one_turn_see_what_fits():
    # Context 4: the whole of `short`; of `long` its ends, or its end, or nothing.
    short, long = task("s", "red is ann of"), task("l", "ann is blue of green red who")
    seen = {}
    for method in ("full-context", "truncate-middle", "recent-only"):
        completer = fakes.empty()
        results = read(items(short, long, method=method), completer)
        seen[method] = [fakes.tokenizer().decode(p.shared) for p, _ in completer.calls]
        assert [r.turns for r in results] == [1, 0 if method == "full-context" else 1]
    assert seen == {
        "full-context": ["red is ann of"],
        "truncate-middle": ["red is ann of", "ann is red who"],
        "recent-only": ["red is ann of", "of green red who"],
    }


def test_a_document_that_does_not_fit_is_a_wrong_answer_and_no_failure():
    long = task("l", "ann is blue of green red who")
    (result,) = read(items(long, method="full-context"), fakes.empty())
    assert result.problem.startswith("the document has 7 tokens and a prompt may show 4 of it")
    assert (result.correct, result.failed, result.finish) == (0.0, False, Finish.CANCELLED)


# ---------------------------------------------------------------- documents that are shared


@dataclasses.dataclass
class Counted:
    """A document of blocks that a tokenizer encodes one by one; may break off in between."""

    blocks: int
    breaks_after: int | None = None
    opened: int = 0

    def pieces(self):
        self.opened += 1
        for number in range(self.blocks):
            if number == self.breaks_after:
                raise ValueError("row 3 changed after it was opened")
            yield "red green blue is " * 300  # 1,200 tokens, more than a block


def read_shared(document, questions, completer, at_once, chunk_size=300):
    tasks = [
        dataclasses.replace(task(f"q{k}", ""), document=document, question=question)
        for k, question in enumerate(questions)
    ]
    one = reader(completer, chunk_size, at_once)
    one = dataclasses.replace(one, chunks_of=Documents(one.tokenizer, chunk_size))
    return asyncio.run(measure(items(*tasks), one))


def test_a_read_error_fails_every_reading_of_the_document():
    """Who came second took it for the document's end, and answered on what there was."""
    document = Counted(blocks=5, breaks_after=3)
    results = read_shared(document, ["who ?"] * 4, fakes.first_of_chunk(), at_once=4)
    assert [result.problem for result in results] == [
        "ValueError: row 3 changed after it was opened"
    ] * 4
    assert all(result.failed and result.finish is Finish.CANCELLED for result in results)
    assert document.opened == 1


def test_readings_at_uneven_pace_tokenise_their_document_once():
    """One that lagged by more than 262,144 tokens began the document again."""
    who = int(fakes.tokenizer().encode("who")[0])

    class Uneven:
        """Answers those who ask "who ?" ten times as slowly."""

        inner = fakes.first_of_chunk()

        async def complete(self, prompt, sampling):
            for _ in range(20 * (who in prompt.tokens)):
                await asyncio.sleep(0)
            return await self.inner.complete(prompt, sampling)

    document = Counted(blocks=300)
    asked = ("code of ann ?", "who ?", "code of bob ?")
    results = read_shared(document, asked, Uneven(), at_once=3, chunk_size=3000)
    assert {result.tokens for result in results} == {360_000} and document.opened == 1


def test_a_judge_takes_the_place_of_the_metric_and_sees_the_whole_reading():
    """Readings are judged together, in the order in which they end; results stay in theirs."""
    evidence = (Evidence("red", 0.6),)
    planned = items(task("a", "blue is blue of red ann red", evidence=evidence), repeats=2)
    seen, both_there, ended = {}, asyncio.Event(), []

    async def judge(one, record):
        seen[record.sample] = record
        if len(seen) == 2:
            both_there.set()
        await both_there.wait()
        return 0.25 + record.sample / 2

    results = read(planned, fakes.first_of_chunk(), on_result=ended.append, judge=judge)
    assert [r.correct for r in results] == [0.25, 0.75] and len(ended) == 2
    assert [r.scores["em"] for r in results] == [1.0, 1.0], "the metrics stay beside"
    assert (seen[1].answer, seen[1].status, seen[1].row["id"]) == ("red", "answered", "a")
    assert [(m.text, m.chunk_tokens, m.held) for m in seen[1].memories] == [
        ("blue", 2, (False,)), ("blue", 2, (False,)), ("red", 2, (True,)), ("red", 1, (True,)),
    ]  # fmt: skip


def test_a_judge_sees_no_memory_where_a_method_has_none():
    async def judge(one, record):
        assert record.memories == () and record.turns == 1 and record.answer_tokens == 1
        return 0.5

    planned = items(task("a", "red is"), method="recent-only")
    assert [r.correct for r in read(planned, fakes.empty(), judge=judge)] == [0.5]


def test_a_reading_that_failed_is_not_judged_and_one_that_cannot_be_judged_ends_all():
    class Broken(fakes.Scripted):
        async def complete(self, prompt, sampling):
            if not self.calls:
                self.calls.append((prompt, sampling))
                raise OSError("gone")
            return await super().complete(prompt, sampling)

    async def judge(one, record):
        if one.id == "c":
            raise ValueError("the reward mine raised")
        return 0.5

    two = items(task("a", "red is"), task("b", "red is"))
    results = read(two, Broken(lambda prompt, sampling: [2]), judge=judge, at_once=1)
    assert [(r.failed, r.correct) for r in results] == [(True, 0.0), (False, 0.5)]
    with pytest.raises(ValueError, match="^the reward mine raised$"):
        read([*two, *items(task("c", "red is"))], fakes.empty(), judge=judge)


def test_a_judge_of_a_reading_in_rounds_sees_the_notes_as_in_training():
    evidence = (Evidence("red", 0.0), Evidence("ann", 0.5))
    one = task("a", "red is blue of " * 5 + "ann is blue of " * 5, evidence=evidence)
    with_rounds = reader(fakes.first_of_chunk(), 16)
    rules = dataclasses.replace(with_rounds.rules, order="parallel", passes=2)
    with_rounds, trace, seen = dataclasses.replace(with_rounds, rules=rules), Trace(), []

    async def judge(item, record):
        seen.append(record)
        return 1.0

    asyncio.run(measure(items(one), with_rounds, judge=judge, trace_of=lambda item: trace))
    assert {turn.level for turn in trace.turns} == {0, 1}
    sizes = tuple(turn.size for turn in trace.turns if turn.kind is TurnKind.UPDATE)
    reading = Reading("a", 0, tuple(trace.turns), seen[0].answer, Status.ANSWERED, sizes)
    shown = rewards.Shown(with_rounds.tokenizer, with_rounds.template, rules)
    assert [shown.record(reading, one)] == seen
    assert len({memory.text for memory in seen[0].memories if not memory.level}) > 1
