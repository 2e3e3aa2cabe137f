"""Accuracy by length: what is kept of a reading, how it is scored, how shares are told."""

import asyncio

import pytest

from notepad_jax.agent.chunking import ChunkList
from notepad_jax.agent.memory_agent import TurnSampling
from notepad_jax.eval import lengths
from notepad_jax.eval.lengths import MemoryChange, format_length, parse_length
from notepad_jax.types import Finish, Task, TextDocument
from tests import fakes


def task(name: str, words: str, answer: str = "red") -> Task:
    return Task(name, "code of ann ?", TextDocument(words), (answer,), "test", "em")


def measure(tasks_by_length, completer, chunk_size=2, on_progress=lambda progress: None, at_once=9):
    tokenizer = fakes.tokenizer()
    sampling = TurnSampling(0.0, 1.0, tuple(tokenizer.stop_ids), 7)
    return asyncio.run(
        lengths.measure(
            tasks_by_length,
            completer,
            tokenizer,
            fakes.template(),
            fakes.rules(chunk_size),
            sampling,
            chunks_of=lambda t: ChunkList(tokenizer.encode(t.document.text), chunk_size),
            on_progress=on_progress,
            at_once=at_once,
        )
    )


def test_a_reading_is_kept_as_its_answer_and_its_memory_changes():
    # The fake writes each chunk's first word into its memory, and answers with it.
    (result,) = measure({7: [task("a", "blue is blue of red ann red")]}, fakes.first_of_chunk())
    assert result.memory_changes == (MemoryChange(0, "blue"), MemoryChange(2, "red"))
    assert (result.answer, result.correct, result.gold) == ("red", 1.0, ("red",))
    assert (result.turns, result.tokens, result.finish) == (5, 7, Finish.STOP)
    assert result.scores == {"em": 1.0, "normalised_em": 1.0, "token_f1": 1.0, "sub_em": 1.0}


def test_results_come_by_length_in_the_given_order_whatever_runs_at_once():
    tasks = {6: [task("c", "red is"), task("b", "blue is")], 2: [task("a", "green is")]}
    for at_once in (1, 3):
        results = measure(tasks, fakes.first_of_chunk(), at_once=at_once)
        assert [(r.length, r.task_id, r.answer) for r in results] == [
            (2, "a", "green"),
            (6, "c", "red"),
            (6, "b", "blue"),
        ]


def test_readings_never_share_noise():
    completer = fakes.empty()
    measure({4: [task("a", "red is ann of"), task("b", "red is ann of")]}, completer)
    seeds = [sampling.seed for _, sampling in completer.calls]
    assert len(set(seeds)) == len(seeds) == 6


def test_progress_tells_turns_readings_and_hits():
    told = []
    tasks = {4: [task("a", "red is"), task("b", "blue is")]}
    measure(tasks, fakes.first_of_chunk(), on_progress=told.append)
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
    right, failed = measure({2: [task("a", "red is"), task("b", "ann is")]}, Failing("ann"))
    assert (right.correct, failed.correct) == (1.0, 0.0)
    assert failed.problem == "RuntimeError: the engine is gone"
    (summary,) = lengths.summarise([right, failed])
    assert (summary.n, summary.failed, summary.accuracy.mean) == (2, 1, 0.5)


def test_when_every_reading_fails_the_failure_is_raised():
    with pytest.raises(RuntimeError, match="the engine is gone"):
        measure({2: [task("a", "ann is"), task("b", "ann of")]}, Failing("ann"))


def test_mistakes_are_named_before_anything_is_read():
    with pytest.raises(ValueError, match="two tasks of length 2 are called 'a'"):
        measure({2: [task("a", "red"), task("a", "red")]}, fakes.empty())
    odd = Task("a", "code ?", TextDocument("red"), ("red",), "test", "bleu")
    with pytest.raises(ValueError, match="metric 'bleu'; there are: em"):
        measure({2: [odd]}, fakes.empty())


def test_a_share_has_wilsons_interval():
    # Wilson 1927 for 8 of 10, by hand: z2 = 3.8414588, centre (.8 + z2/20) / (1 + z2/10)
    # = .99207294 / 1.38414588 = .71674, half = sqrt(.016 z2 + z2**2/400) / 1.38414588
    # = sqrt(.06146334 + .03689202) / 1.38414588 = .22658.
    found = lengths.share([1.0] * 8 + [0.0] * 2)
    assert (found.mean, found.low, found.high) == pytest.approx((0.8, 0.49016, 0.94332), abs=1e-5)
    assert lengths.share([1.0] * 64).low == pytest.approx(64 / (64 + 3.8414588))
    assert lengths.share([]) == lengths.Share(0.0, 0.0, 1.0)


def test_a_summary_adds_up():
    tasks = {2: [task("a", "red is"), task("b", "blue is")], 5: [task("c", "red is ann of red")]}
    two, five = lengths.summarise(measure(tasks, fakes.first_of_chunk()))
    assert (two.length, two.n, two.accuracy.mean, two.turns, two.tokens) == (2, 2, 0.5, 4, 4)
    assert (five.length, five.n, five.turns, five.tokens) == (5, 1, 4, 5)
    assert 0 < two.seconds < 60 and two.scores["em"].mean == 0.5


@pytest.mark.parametrize(
    ("text", "length"),
    [("512", 512), ("8k", 8192), ("1M", 1048576), ("3.5m", 3670016), (" 0.5k ", 512)],
)
def test_lengths_are_read_as_people_write_them(text, length):
    assert parse_length(text) == length


@pytest.mark.parametrize("text", ["", "k", "8kb", "-1", "0", "1e3", "8 000"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="length"):
        parse_length(text)


def test_lengths_are_written_as_people_read_them():
    pairs = {5: "5", 2048: "2K", 28672: "28K", 131072: "128K", 1000000: "1M", 1835008: "1.75M"}
    pairs |= {3670016: "3.5M", 3502080: "3.5M", 3500000: "3.5M", 100000: "100K", 262144: "256K"}
    assert {n: format_length(n) for n in pairs} == pairs
