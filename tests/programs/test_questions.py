"""Several questions about one document: answered as if alone, over chunks that are read once."""

import asyncio
import json

import pytest

import notepad_jax as nj
from notepad_jax import cli
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.programs import questions, subjects
from notepad_jax.programs.file_document import CannotRead
from notepad_jax.programs.subjects import Subject
from notepad_jax.reader import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.reading.trace import Trace
from notepad_jax.setup import configuration
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import CompleterFailed
from tests import fakes, slots

SETTINGS = EngineSettings(
    slots=8, page_size=8, pages=400, max_prompt=96, max_new_tokens=12, steps_per_launch=2,
    row_tokens=256,
)  # fmt: skip
STORY = "".join(  # 16 tokens each
    f"the secret code of {who} is red . bob says blue . who is cleo . "
    for who in ("ann", "bob", "cleo")
)
ASKED = ("who ?", "code of ann ?", "bob says ?")
SAYS = (
    *(int(i) for i in fakes.tokenizer().encode("the secret code of is ann bob red")),
    *fakes.template().stop_ids,
)
SAMPLING = TurnSampling(1.0, 1.0, fakes.template().stop_ids, 5)
SMALL = ("--config.reading.max_memory=6", "--config.evaluate.chunk_size=16")
SMALL += ("--config.reading.max_answer=4",)


def subject(template="question_last", opened=None):
    return Subject("a fake", fakes.tokenizer(), fakes.template(template), opened)


def read(asked, trace=None, screen=None, template="question_last"):
    """Returns the answers, and how many tokens were prefilled as shared prefixes."""

    async def run():
        snapshot = slots.snapshot(3, SAYS)
        async with EngineService(slots.executor(SETTINGS), snapshot) as service:
            found = await questions.ask_all(
                service, subject(template), fakes.rules(16), SAMPLING, nj.TextDocument(STORY),
                asked, screen or SilentScreen(), trace,
            )  # fmt: skip
            return found, service.stats.prefix_tokens

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_each_is_answered_as_if_it_were_alone():
    together, _ = read(ASKED)
    assert together == [read([question])[0][0] for question in ASKED]
    assert len({answer.memories for answer in together}) == len(ASKED)


@pytest.mark.parametrize("count", [1, 8, 64])
def test_the_document_is_prefilled_once_for_all_of_them(count):
    _, prefilled = read([ASKED[k % 3] for k in range(count)])
    assert prefilled == len(fakes.tokenizer().encode(STORY))


def test_a_template_that_cannot_share_says_so():
    class Heard(SilentScreen):
        said = ""

        def warn(self, text):
            self.said += text

    settings = EngineSettings(8, 64, 400, 700, 12, 2, 1024)
    screens = Heard(), Heard()

    async def run():
        async with EngineService(slots.executor(settings), slots.snapshot(3, SAYS)) as service:
            for screen, asked in zip(screens, (ASKED, ASKED[:1]), strict=True):
                await questions.ask_all(
                    service, subject("chunk_first"), fakes.rules(16), SAMPLING,
                    nj.TextDocument(STORY), asked, screen,
                )  # fmt: skip

    asyncio.run(asyncio.wait_for(run(), 20))
    assert "read anew for each of 3 questions" in screens[0].said and not screens[1].said


def test_a_trace_has_them_in_their_order(tmp_path):
    found, _ = read(ASKED, tmp_path / "trace.jsonl")
    with Trace(tmp_path / "trace.jsonl") as trace:
        told = [reading for _, reading in trace.readings()]
    assert [one["question"] for one in told] == list(ASKED)
    assert [one["answer"] for one in told] == [answer.answer for answer in found]


def test_a_failure_is_raised_as_it_is():
    class Broken:
        async def complete(self, prompt, sampling):
            raise CompleterFailed("the device is gone")

    with pytest.raises(CompleterFailed, match="the device is gone"):
        asyncio.run(
            questions.ask_all(
                Broken(), subject(), fakes.rules(16), SAMPLING, nj.TextDocument(STORY), ASKED,
                SilentScreen(),
            )
        )  # fmt: skip


@pytest.fixture
def path(tmp_path, monkeypatch):
    def opened(rules):
        return EngineService(slots.executor(SETTINGS), slots.snapshot(3, SAYS))

    monkeypatch.setattr(subjects, "named", lambda config, screen: subject(opened=opened))
    (tmp_path / "story.txt").write_text(STORY)
    (tmp_path / "asked.txt").write_text("\n".join((ASKED[0], "", f"  {ASKED[1]} ")) + "\n")
    return tmp_path / "story.txt"


def test_a_file_of_questions_from_the_command_line_and_python(path, capsys):
    words = ["ask", *SMALL, str(path)]
    assert cli.main([*words, "--questions", str(path.with_name("asked.txt")), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["question"] for one in told] == list(ASKED[:2])
    with Reader(configuration.load("quickstart", SMALL)) as reader:
        found = reader.read_all(path, ASKED[:2])
        assert found == [reader.read(path, question) for question in ASKED[:2]]
    assert [one["answer"] for one in told] == [answer.answer for answer in found]
    assert cli.main([*words, "--questions", str(path.with_name("asked.txt"))]) == 0
    out = capsys.readouterr().out
    assert out.count("(read 48 tokens in 3 chunks") == 2 and all(q in out for q in ASKED[:2])


def test_what_cannot_be_asked_is_one_line(path, capsys):
    words = ["ask", *SMALL, str(path)]
    for more, says in (
        ([], "one of the arguments question --questions is required"),
        (["who ?", "--questions", "asked.txt"], "not allowed with argument question"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main([*words, *more])
        assert stopped.value.code == 2 and says in capsys.readouterr().err
    with pytest.raises(CannotRead, match=r"missing.txt: No such file"):
        questions.of_file(path.with_name("missing.txt"))
    path.with_name("empty.txt").write_text(" \n\n")
    with pytest.raises(CannotRead, match="has no question; write one a line"):
        questions.of_file(path.with_name("empty.txt"))
    path.with_name("bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(CannotRead, match="is no UTF-8 text"):
        questions.of_file(path.with_name("bytes.txt"))
    path.with_name("marked.txt").write_bytes(b"\xef\xbb\xbfwho ?\r\nwhere ?\r\n")
    assert questions.of_file(path.with_name("marked.txt")) == ["who ?", "where ?"]
    with pytest.raises(ValueError, match=r"^'ann ann .*: the question has 12 tokens"):
        read(["who ?", "ann " * 12])
    with Reader(configuration.load("quickstart", SMALL)) as reader:
        with pytest.raises(ValueError, match="questions are a list of texts"):
            reader.read_all(path, "who ?")
