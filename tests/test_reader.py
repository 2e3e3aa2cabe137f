"""Reader: one completer for many readings, from scripts, coroutines and notebooks."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import threading

import pytest

import notepad_jax as nj
from notepad_jax import cli, waiting
from notepad_jax.programs import subjects
from notepad_jax.programs.file_document import CannotRead
from notepad_jax.reader import Reader
from notepad_jax.reading.trace import Trace
from notepad_jax.setup import configuration
from tests import fakes
from tests.reading.http_server import Server, good
from tests.runs import ROOT

SMALL = (
    "--config.reading.max_memory=6",
    "--config.evaluate.chunk_size=4",
)
STORY = "the secret code of ann is red . bob says blue ."


class Counted:
    """A completer that counts how often it is opened and closed."""

    def __init__(self, completer):
        self.completer, self.opened, self.closed = completer, 0, 0

    @contextlib.asynccontextmanager
    async def open(self, rules):
        self.opened += 1
        assert rules.chunk_size == 4
        try:
            yield self.completer
        finally:
            self.closed += 1


class Given:
    """A document of a user's class."""

    def __init__(self, given):
        self.given = given

    def pieces(self):
        return self.given


@pytest.fixture
def subject(monkeypatch):
    """Readers are over a fake; returns what counts, and holds the completer of your choice."""
    counted = Counted(fakes.first_of_chunk())
    one = subjects.Subject("a fake", fakes.tokenizer(), fakes.template(), counted.open)
    monkeypatch.setattr(subjects, "named", lambda config, screen: one)
    return counted


def reader(*words) -> Reader:
    return Reader(configuration.load("quickstart", [*SMALL, *words]))


def test_readings_share_a_completer_that_closing_closes(subject, tmp_path):
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    with reader() as one:
        reading = one.read(path, "who ?")
        again = one.read(nj.TextDocument(STORY), "who ?")
        assert one.read(str(path), "who ?") == reading == again
    assert (subject.opened, subject.closed) == (1, 1)
    assert reading.answer == "bob" and not reading.truncated
    assert [(m.chunk, m.text) for m in reading.memories] == [(1, "the"), (2, "ann"), (3, "bob")]
    assert (reading.chunks, reading.tokens) == (3, 12)
    with pytest.raises(ValueError, match="this reader was closed; load another one"):
        one.read(path, "who ?")


def test_a_reading_is_appended_to_a_trace(subject, tmp_path):
    path, trace = tmp_path / "story.txt", tmp_path / "new" / "asked.jsonl"
    path.write_text(STORY)
    with reader() as one:
        for _ in range(2):
            answer = one.read(path, "who ?", trace)
        with pytest.raises(ValueError, match="story.txt is no trace: .*; name a new file"):
            one.read(path, "who ?", path)
    assert path.read_text() == STORY
    with Trace(trace) as read:
        assert len(read) == 2
        whole = read.whole(1)
    assert [(c.chunk + 1, c.memory) for c in whole.memories] == list(answer.memories)
    assert [turn.kind for turn in whole.turns] == ["update"] * 3 + ["answer"]
    said = "".join(whole.pieces[token] for token in whole.turns[-1].tokens[:-1])
    assert said.strip() == answer.answer == whole.reading["answer"]
    assert (whole.reading["source"], whole.reading["tokens"]) == ("a fake", 12)


def test_questions_may_come_out_of_a_generator(subject):
    with reader() as one:
        found = one.read_all(nj.TextDocument(STORY), (f"who {word} ?" for word in ("is", "says")))
    assert [answer.answer for answer in found] == ["bob"] * 2


@pytest.mark.parametrize("questions", ["who ?", None, 5, [5]])
def test_questions_are_texts(subject, questions):
    with reader() as one, pytest.raises(ValueError, match="questions are a list of texts"):
        one.read_all(nj.TextDocument(STORY), questions)


def test_a_trace_that_cannot_be_written_is_known_before_anything_is_read(subject, tmp_path):
    (tmp_path / "file").write_text("")
    with reader() as one, pytest.raises(ValueError, match="file.*; name a new file, or one that"):
        one.read(nj.TextDocument(STORY), "who ?", tmp_path / "file" / "asked.jsonl")


def test_in_a_running_loop_as_in_a_notebook_and_several_at_once(subject):
    async def cell():
        one = reader()
        plain = one.read(nj.TextDocument(STORY), "who ?")
        many = await asyncio.gather(
            *(one.aread(nj.TextDocument(STORY), f"who {word} ?") for word in ("is", "says", "of"))
        )
        one.close()
        return [plain, *many]

    answers = asyncio.run(cell())
    assert [answer.answer for answer in answers] == ["bob"] * 4
    assert subject.opened == 1
    assert subject.completer.running == 0


def test_ctrl_c_ends_a_reading_and_the_next_one_is_answered(subject, monkeypatch):
    held, interrupt = [], threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT])

    class Endless:
        async def complete(self, prompt, sampling):
            held.append("begun")
            interrupt.start()
            try:
                await asyncio.sleep(60)
            finally:
                held.append("cancelled")

    usual, subject.completer = subject.completer, Endless()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with reader() as one:
            with pytest.raises(KeyboardInterrupt):
                one.read(nj.TextDocument(STORY), "who ?")
            assert held == ["begun", "cancelled"]
            Endless.complete = lambda self, *turn: usual.complete(*turn)
            assert one.read(nj.TextDocument(STORY), "who ?").answer == "bob"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reading_that_its_coroutine_gives_up_is_cancelled(subject):
    ended = []

    class Endless:
        async def complete(self, prompt, sampling):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

    subject.completer = Endless()

    async def given_up():
        with reader() as one:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(one.aread(nj.TextDocument(STORY), "who ?"), 0.1)

    asyncio.run(given_up())
    assert ended


def test_a_reader_that_nobody_holds_lets_its_engine_go(subject):
    one = reader()
    one.read(nj.TextDocument(STORY), "who ?")
    del one
    gc.collect()
    assert subject.closed == 1
    assert not [t for t in threading.enumerate() if t.name == "notepad_jax loop"]


@pytest.mark.parametrize(
    ("document", "question", "error", "says"),
    [
        ("missing.txt", "who ?", CannotRead, "there is no file 'missing.txt'; a text in memory"),
        (
            "Ann ruled. " * 99,
            "who ?",
            CannotRead,
            r"'(Ann ruled. ){5}Ann r'...; .*TextDocument.text",
        ),
        ("~5 dollars", "who ?", CannotRead, "there is no file '~5 dollars'"),
        ("one\ntwo\0", "who ?", CannotRead, "there is no file 'one two"),
        (nj.TextDocument(STORY), None, ValueError, "a question is a text, .* of type NoneType"),
        (nj.TextDocument(""), "who ?", CannotRead, "the document is empty"),
        (nj.TextDocument(STORY), " ", ValueError, "the question is empty"),
        (nj.TextDocument(STORY), "\n \n", ValueError, "the question is empty"),
        (nj.TextDocument(STORY), "who ? " * 9, ValueError, "18 tokens and the limit is 8"),
        (nj.TextDocument, "who ?", ValueError, "this is of type type; for a text"),
        (Given(None), "who ?", ValueError, "yields its text, and this returned None"),
        (Given([STORY, 5]), "who ?", ValueError, "yields texts, and this yielded 5"),
        (5, "who ?", ValueError, "this is of type int; for a text give notepad_jax.TextDocument"),
    ],
)
def test_what_cannot_be_read_is_one_line(subject, document, question, error, says):
    with reader() as one, pytest.raises(error, match=says) as said:
        one.read(document, question)
    assert "\n" not in str(said.value)


async def later(now):
    pass


@pytest.mark.parametrize("on_progress", [5, later, lambda: None])
def test_who_cannot_be_told_of_progress_is_one_line(subject, on_progress):
    with reader() as one, pytest.raises(ValueError, match="on_progress is .*give a function of"):
        one.read(nj.TextDocument(STORY), "who ?", on_progress=on_progress)
    assert not subject.opened


def test_a_memory_rule_of_mine(subject, monkeypatch):
    seen = []
    named = subjects.named
    monkeypatch.setattr(subjects, "named", lambda *what: seen.append(what[0]) or named(*what))

    def both(memory, written):
        return f"{memory} {written}"

    starter = str(ROOT / "data" / "starter")
    with Reader.load(starter, memory_update=both, changes={"evaluate": {"chunk_size": 4}}) as one:
        assert seen[0].reading.memory_update == f"{__name__}:{both.__qualname__}"
        assert one.read(nj.TextDocument(STORY), "who ?").answer == "the ann bob"


def test_what_cannot_be_loaded_is_one_line(tmp_path):
    for source, step, says in (
        (tmp_path / "nothing", None, "there is no folder"),
        ("http://localhost:1/v1", "best", "is a server, which has no step best"),
        (ROOT / "data" / "starter", 3, "has no finished checkpoint"),
    ):
        with pytest.raises(ValueError, match=says) as said:
            Reader.load(source, step=step)
        assert "\n" not in str(said.value)


@pytest.fixture
def server():
    """An OpenAI-compatible server in a thread of its own, which knows one word."""
    with waiting.Loop() as elsewhere:
        serving = Server(lambda request: good("red") if request.body else (200, MODELS))
        elsewhere.run(serving.__aenter__())
        yield serving
        elsewhere.run(serving.__aexit__())


MODELS = {"data": [{"id": "the only one"}]}


def test_an_endpoint_reads_too_and_so_it_does_for_ask(server, tmp_path, capsys):
    with Reader.load(server.url) as one:
        told: list[nj.Progress] = []
        reading = one.read(nj.TextDocument(STORY), "who ?", on_progress=told.append)
    assert [(now.kind.value, now.text) for now in told if now.ended] == [
        ("update", "red"),
        ("answer", "red"),
    ]
    assert reading.answer == "red" and [m.text for m in reading.memories] == ["red"]
    assert {request.body.get("model") for request in server.requests} == {None, "the only one"}
    path = tmp_path / "story.txt"
    path.write_text(STORY)
    assert cli.main(["ask", "--endpoint", server.url, "--json", str(path), "who ?"]) == 0
    assert json.loads(capsys.readouterr().out)["memories"] == [[1, "red"]]
