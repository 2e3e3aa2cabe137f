"""What is told of a reading while it is made, and that telling changes none of it.

The executor is arithmetic: a token follows from a turn's seed and its place, a logprob from who
else is in the launch.
"""

import asyncio
import dataclasses
import fcntl
import json
import os
import re
import threading

import pytest

import notepad_jax as nj
from notepad_jax import cli
from notepad_jax.commands import ask as command
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.programs import ask, ask_progress, subjects
from notepad_jax.programs.subjects import Subject
from notepad_jax.reader import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.trace import TraceFile
from notepad_jax.setup import configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import TurnKind
from tests import fakes, slots

SETTINGS = EngineSettings(
    slots=4, page_size=8, pages=24, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip
STORY = "the secret code of ann is red . bob says blue . who is cleo ?"  # 15 tokens
WORDS = [int(i) for i in fakes.tokenizer().encode("the secret code of is ann bob red")]
SAYS = (*WORDS, *fakes.template().stop_ids)


class Whole:
    """A completer that does not tell of anything before it has ended."""

    def __init__(self, completer):
        self.complete = completer.complete


def read(streams: bool, at_once: int, tmp_path, told=lambda now: None):
    """Returns the answers, the turns of their traces, and the launches that they took."""
    executor = slots.Watched(slots.executor(SETTINGS))
    subject = Subject("a fake", fakes.tokenizer(), fakes.template(), None)

    async def one(service, number):
        trace = tmp_path / f"{streams}{at_once}{number}.jsonl"
        found = await ask.ask(
            service if streams else Whole(service), subject, fakes.rules(),
            TurnSampling(1.0, 1.0, fakes.template().stop_ids, number), nj.TextDocument(STORY),
            "who ?", SilentScreen(), trace, told,
        )  # fmt: skip
        return found, trace.read_text().splitlines()

    async def everybody():
        async with EngineService(executor, slots.snapshot(3, SAYS)) as service:
            return await asyncio.gather(*(one(service, number) for number in range(at_once)))

    return asyncio.run(asyncio.wait_for(everybody(), 20)), executor.launches


@pytest.mark.parametrize("at_once", [1, 3, 6])
def test_who_watches_changes_no_token_no_logprob_and_no_launch(at_once, tmp_path):
    told = []
    watched = read(True, at_once, tmp_path, told.append)
    assert watched == read(False, at_once, tmp_path)
    (line,) = watched[0][0][1]
    assert '"turns": 5' in line and "logprobs" in line  # they are compared, too
    ends = {len(now.text.split()) for now in told if now.ended}
    assert len(ends) > 1 and len(told) > 18 * at_once


def test_what_is_told_of_a_reading_by_hand(tmp_path):
    told: list[ask_progress.Progress] = []
    (((answer, _),), _) = read(True, 1, tmp_path, told.append)
    updates = [now for now in told if now.kind is TurnKind.UPDATE]
    begun = [now for now in updates if not now.text and not now.ended]
    # The prompt asks for the next chunk already, so the end is seen when the last one begins.
    assert [(now.chunk, now.chunks, now.exact) for now in begun][-1] == (4, 4, True)
    assert [now.chunk for now in begun] == [1, 2, 3, 4]
    for before, now in zip(told, told[1:], strict=False):
        assert now.text.startswith(before.text) or before.ended
    ended = [now for now in told if now.ended]
    assert [now.kind for now in ended] == [TurnKind.UPDATE] * 4 + [TurnKind.ANSWER]
    assert [now.text.strip() for now in ended][-1] == answer.answer
    memories = {memory.chunk: memory.text for memory in answer.memories}
    assert {now.chunk: now.text.strip() for now in ended[:4]} == memories
    assert max(sum(now.chunk == k and bool(now.text) for now in updates) for k in (1, 2, 3, 4)) > 2


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A story; a fake reads it for `ask` and `Reader`."""

    def opened(rules):
        return EngineService(slots.executor(SETTINGS), slots.snapshot(3, tuple(WORDS)))

    one = Subject("a fake", fakes.tokenizer(), fakes.template(), opened)
    monkeypatch.setattr(subjects, "named", lambda config, screen: one)
    (tmp_path / "story.txt").write_text(STORY)
    return tmp_path / "story.txt"


SMALL = ("--config.reading.max_memory=6", "--config.evaluate.chunk_size=4")
SMALL += ("--config.reading.max_answer=4",)


def test_a_log_has_one_line_a_turn_and_standard_output_the_answer_once(path, capsys):
    assert cli.main(["ask", *SMALL, str(path), "who ?", "--json"]) == 0
    quiet = capsys.readouterr()
    answer = json.loads(quiet.out)["answer"]
    assert quiet.err == "" and answer
    assert cli.main(["ask", *SMALL, str(path), "who ?"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == answer and out.count(answer) == 1
    lines = err.splitlines()
    assert len(lines) == 5 and lines[-1].startswith("answer, ") and answer not in lines[-1]
    for number, line in enumerate(lines[:-1], 1):
        assert re.match(rf"chunk {number} of 4, \d tokens in \d+\.\d s: \S", line), line


def test_a_pipe_is_read_from_its_beginning(path, tmp_path, capsys):
    """What was taken out of it is gone."""
    assert cli.main(["ask", *SMALL, str(path), "who ?", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(STORY,))
    writer.start()
    assert cli.main(["ask", *SMALL, str(pipe), "who ?", "--json"]) == 0
    writer.join()
    assert json.loads(capsys.readouterr().out)["tokens"] == plain["tokens"] > 12


def test_who_watches_may_end_a_reading_and_the_next_one_is_made(path):
    def enough(now):
        raise LookupError(f"enough after {now.chunk}")

    with Reader(configuration.load("quickstart", SMALL)) as reader:
        with pytest.raises(LookupError, match="enough after 1"):
            reader.read(path, "who ?", on_progress=enough)
        told: list[nj.Progress] = []
        assert reader.read(path, "who ?", on_progress=told.append) == reader.read(path, "who ?")
    assert told[-1].ended and told[-1].kind is TurnKind.ANSWER


def test_chunks_are_estimated_until_the_end_of_a_file_was_seen(tmp_path, path):
    path.write_text(STORY * 20_000)  # 1.2 MB, of which a quarter is tokenised at first
    told = []

    def some(now):
        told.append(now)
        if now.chunk == 3:
            raise LookupError

    with Reader(configuration.load("quickstart", SMALL)) as reader, pytest.raises(LookupError):
        reader.read(path, "who ?", on_progress=some)
    tokens = len(fakes.tokenizer().encode(STORY * 20_000))
    assert not told[-1].exact and told[-1].chunks == pytest.approx(tokens / 4, rel=0.05)


def asked(completer, rules, *trace):
    return asyncio.run(
        ask.ask(
            completer, Subject("a fake", fakes.tokenizer(), fakes.template(), None), rules,
            TurnSampling(1.0, 1.0, (2,), 0), nj.TextDocument(STORY), "who ?", SilentScreen(),
            *trace,
        )
    )  # fmt: skip


@pytest.mark.parametrize("order", ["parallel", "mixed"])
def test_notes_that_were_merged_are_of_the_whole_document(order):
    rules = dataclasses.replace(fakes.rules(chunk_size=5), max_memory=2, order=order)
    answer = asked(fakes.first_of_chunk(), rules)
    assert answer.chunks == 4 and {memory.chunk for memory in answer.memories} == {4}


def test_who_asks_appends_alone(tmp_path, monkeypatch):
    """Whoever opened a trace while a line is written would cut its beginning off."""
    trace, tried = tmp_path / "new" / "asked.jsonl", []

    class Watched(TraceFile):
        def add(self, *what):
            with trace.open("ab") as other, pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tried.append(super().add(*what))

    monkeypatch.setattr(ask, "TraceFile", Watched)
    still = fakes.Scripted(lambda prompt, sampling: [WORDS[0], 2])
    for _ in range(2):
        asked(still, fakes.rules(), trace)
    assert tried == [0, 1]


def test_who_leaves_early_says_so_and_counts_what_was_read():
    rules = dataclasses.replace(fakes.rules(), exit_after=1)
    still = fakes.Scripted(lambda prompt, sampling: [WORDS[0], 2])
    answer = asked(still, rules)
    assert (answer.chunks, answer.tokens, answer.early) == (2, 8, True)
    assert "(read 8 tokens in 2 chunks, and left the rest; " in command._told(answer)
    cut = dataclasses.replace(answer, truncated=True)
    assert ", the answer was cut at reading.max_answer; " in command._told(cut)
