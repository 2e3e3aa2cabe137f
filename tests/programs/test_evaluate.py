"""The whole evaluation with readers that can be predicted: right, silent, guessing, killed."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import signal
import types

import pytest
import tiny
import tiny_bpe

import notepad_jax as nj
from notepad_jax import cli
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.eval import summary
from notepad_jax.programs import evaluate, subjects
from notepad_jax.reading.endpoint import bare_turn
from notepad_jax.scoring import metrics
from notepad_jax.setup import configuration, eval_jobs
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import counter, open_tokenizer
from notepad_jax.types import Completion, Finish, tokens
from tests import limits

SMALL = (
    "--config.evaluate.suite=ruler",
    "--config.evaluate.lengths=1k,2k",
    "--config.evaluate.samples=3",
    "--config.evaluate.repeats=2",
    "--config.evaluate.chunk_size=500",
    "--config.evaluate.train_length=1k",
    "--config.sources.text=noise",
)


BEGINNING = 60  # characters
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def silence(question, note, seed):
    return ""


def config_of(*words):
    return configuration.load("ruler", [*SMALL, *words])


class Agent:
    """Answers with `say(question, note, seed)`; its note is how the document began.

    Knows nothing else. At turn `killed_at` somebody presses Ctrl-C.
    """

    def __init__(self, tokenizer, say, killed_at=None):
        self._tokenizer, self._say, self._killed_at = tokenizer, say, killed_at
        self.calls = 0

    async def complete(self, prompt, sampling):
        self.calls += 1
        if self.calls == self._killed_at:
            signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        text = self._tokenizer.decode(prompt.tokens)
        note = text.partition("<note>\n")[2].partition("\n</note>")[0]
        shown = "<piece>\n" if "<piece>" in text else "<text>\n"
        began = text.partition(shown)[2][:BEGINNING].strip()
        if "<piece>" in text:
            said = began if note.startswith("(the note is") else note
        else:
            said = self._say(_question(text), note or began, sampling.seed)
        ids = [*self._tokenizer.encode(said), sampling.stop_ids[0]]
        return Completion(tokens(ids), [0.0] * len(ids), Finish.STOP, 0)


def _question(text):
    return text.split("Question:\n")[1].split("\n\n")[0]


def subject(say, killed_at=None):
    tokenizer = ApproximateTokenizer()
    agent = Agent(tokenizer, say, killed_at)

    @contextlib.asynccontextmanager
    async def opened(rules):
        yield agent

    template = Template.load("chunk_first", tokenizer, bare_turn(tokenizer))
    return subjects.Subject("a fake", tokenizer, template, opened)


def oracle(config):
    """Knows every gold answer by the question and how the document began."""
    count = counter(ApproximateTokenizer())
    lengths = map(evaluate.parse_length, config.evaluate.lengths)
    tasks = eval_jobs.tasks_of(config, list(lengths), count, SilentScreen())
    gold = {}
    for task in itertools.chain(*tasks.values()):
        wanted = task.answers if task.metric in metrics.ALL_WANTED else task.answers[:1]
        began = next(iter(task.document.pieces()))[:BEGINNING].strip()
        said = "\\boxed{" + "\n".join(wanted) + "}"
        if task.metric == "graphwalks":
            said = f"Final Answer: [{', '.join(wanted)}]"
        gold[task.question, began] = said
    return lambda question, note, seed: gold[question, note]


def run(config, reader, folder):
    return evaluate.run(config, reader, folder, SilentScreen())


@pytest.mark.slow
@pytest.mark.parametrize(
    "suite",
    ["ruler", "ruler-qa", "memory", "babilong", "graphwalks", "mrcr", "oolong", "nolima"],
)
def test_who_knows_everything_scores_100_and_who_says_nothing_0(tmp_path, suite):
    config = config_of(f"--config.evaluate.suite={suite}", "--config.evaluate.lengths=4k")
    if suite == "babilong":  # asks the same of several documents, which begin alike in noise
        config = config_of("--config.evaluate.suite=babilong", "--config.evaluate.lengths=4k",
                           "--config.sources.text=stdlib")  # fmt: skip
    known = run(config, subject(oracle(config)), tmp_path / "oracle")
    silent = run(config, subject(silence), tmp_path / "silent")
    assert {s.accuracy.mean for s in known.by_task} == {1.0}
    assert {s.accuracy.mean for s in silent.by_task} == {0.0}
    assert "Every reading gave an answer" not in silent.report.read_text()
    assert "with an answer that was empty" in silent.report.read_text()
    assert all(s.n == 6 and s.questions == 3 and not s.unanswered for s in known.by_task)
    tasks = {"ruler": 13, "ruler-qa": 1, "memory": 7, "babilong": 13, "graphwalks": 2,
             "mrcr": 3, "oolong": 10, "nolima": 4}[suite]  # fmt: skip
    assert len(known.by_task) == len(silent.by_task) == tasks


def test_a_fair_coin_gets_its_interval(tmp_path):
    config = config_of(
        "--config.evaluate.tasks=vt", "--config.evaluate.lengths=1k",
        "--config.evaluate.samples=400", "--config.evaluate.repeats=1",
    )  # fmt: skip
    right = oracle(config)
    coin = subject(lambda *asked: right(*asked) if asked[-1] % 2 else "")
    (found,) = run(config, coin, tmp_path / "coin").by_length
    heads = round(400 * found.accuracy.mean)
    assert 160 <= heads <= 240  # four standard deviations of ten
    assert found.accuracy == summary.share([1.0] * heads + [0.0] * (400 - heads))
    assert found.accuracy.low < 0.5 < found.accuracy.high or abs(heads - 200) > 18


@pytest.fixture
def ctrl_c():
    """Ctrl-C as in a terminal: a process begun in the background inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_killed_evaluation_goes_on_and_reports_the_same(tmp_path, ctrl_c):
    config = config_of("--config.evaluate.tasks=vt,niah_single_1,niah_multivalue",
                       "--config.evaluate.methods=notepad,recent-only")  # fmt: skip
    right = oracle(config)
    coin = lambda *asked: right(*asked) if asked[-1] % 2 else "no idea"  # noqa: E731
    run(config, subject(coin), tmp_path / "whole")
    for killed_at in (3, 40, 5):
        with pytest.raises(KeyboardInterrupt):
            run(config, subject(coin, killed_at), tmp_path / "parts")
    run(config, subject(coin), tmp_path / "parts")
    whole, parts = (tmp_path / name / "report.json" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    found = json.loads(whole.read_text())["by_task"]
    assert len(found) == 2 * 3 * 2 and not any(s["unanswered"] for s in found)
    lines = (tmp_path / "parts" / "readings.jsonl").read_text().splitlines()
    assert len(lines) == 3 * 2 * 3 * 2 * 2  # tasks, lengths, samples, repeats, methods


def test_everything_a_run_promises_is_there(tmp_path):
    config = config_of("--config.evaluate.tasks=vt")
    outcome = run(config, subject(oracle(config)), tmp_path / "run")
    assert {"config.json", "readings.jsonl", "report.json", "report.html",
            "accuracy.svg"} <= {path.name for path in outcome.folder.iterdir()}  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run/readings.jsonl").open()]
    assert {"chunk", "memory", "tokens", "seconds", "recall"} <= lines[0]["memories"][0].keys()
    readings = [line["reading"] for line in lines]
    assert max(r["turns"] for r in readings) == 6  # 2,048 tokens in chunks of 500, the answer
    assert all(r["changes"] == 1 and not r["failed"] for r in readings)
    page = outcome.report.read_text()
    assert "ruler/vt" in page and "<b>date</b>" in page and "<b>hardware</b>" in page
    assert "notepad-jax eval --name run --resume --lengths 1k,2k,8k" in page
    assert "100.0%" in evaluate.text(outcome)


def test_going_on_with_longer_documents_reports_the_usual_lengths_too(tmp_path):
    usual = ("--config.evaluate.lengths=", "--config.evaluate.usual_lengths=1k,2k")
    config = config_of("--config.evaluate.tasks=vt", *usual)
    page = run(config, subject(silence), tmp_path / "run").report.read_text()
    assert "notepad-jax eval --name run --resume --lengths 1k,2k,8k" in page


def test_readers_of_two_kinds_are_not_mixed_in_one_run(tmp_path):
    run(config_of("--config.evaluate.tasks=vt"), subject(silence), tmp_path)
    other = config_of("--config.evaluate.tasks=vt", "--config.reading.max_memory=64")
    with pytest.raises(ValueError, match="reading.max_memory = 1024, and now it is 64"):
        run(other, subject(silence), tmp_path)
    more = config_of(
        "--config.evaluate.tasks=vt,niah_single_2", "--config.evaluate.lengths=1k,2k,4k"
    )
    assert len(run(more, subject(silence), tmp_path).by_task) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--config.evaluate.tasks=vtt",), "suite ruler has no task 'vtt'; its tasks are niah"),
        (("--config.evaluate.suite=rulr",), r"there is no suite 'rulr' .*; did you mean ruler\?"),
        (("--config.evaluate.methods=guess",), "evaluate.methods has 'guess'; use one of notepad"),
        (("--config.evaluate.lengths=8x",), "'8x' is no length"),
        (("--config.evaluate.at_once=0",), "evaluate.at_once is 0; it must be at least 1"),
        (("--config.evaluate.lengths=", "--config.evaluate.usual_lengths="), "lengths is empty"),
        (("--config.evaluate.suite=synthetic",), "in the starter's language"),
        (("--config.evaluate.tasks=vt", "--config.reading.max_question=3"), "vt.* limit is 3"),
        (("--config.evaluate.samples=-1",), "evaluate.samples is -1; it must be at least 0"),
        (("--config.evaluate.train_length=long",), "'long' is no length"),
        (("--config.evaluate.temperature=0",), "2 repeats at temperature 0 would"),
        (("--config.evaluate.suite=ruler-qa", "--config.evaluate.tasks=squad"), "with --squad"),
        (("--config.sources.text=/nowhere",), "/nowhere"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(tmp_path, words, message):
    with pytest.raises(ValueError, match=message) as caught:
        run(config_of(*words), subject(silence), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def refusing(word, say):
    """A subject whose completer refuses every prompt that holds a word."""
    inner = subject(say)

    class Refusing:
        def __init__(self, completer):
            self._completer = completer

        async def complete(self, prompt, sampling):
            if word in inner.tokenizer.decode(prompt.tokens):
                raise RuntimeError("refused")
            return await self._completer.complete(prompt, sampling)

    @contextlib.asynccontextmanager
    async def opened(rules):
        async with inner.opened(rules) as completer:
            yield Refusing(completer)

    return dataclasses.replace(inner, opened=opened)


def test_what_fails_is_a_result_and_stops_nothing_and_all_failing_stops(tmp_path):
    config = config_of(
        "--config.evaluate.tasks=vt", "--config.evaluate.methods=full-context,notepad"
    )
    right = oracle(config)
    for _ in range(2):  # all of full-context fails, in the second run as the only ones left
        outcome = run(config, refusing("<text>", right), tmp_path / "some")
        shares = {(s.method, s.length): (s.accuracy.mean, s.unanswered) for s in outcome.by_length}
        assert shares == {
            ("full-context", 1024): (0.0, 6), ("full-context", 2048): (0.0, 6),
            ("notepad", 1024): (1.0, 0), ("notepad", 2048): (1.0, 0),
        }  # fmt: skip
        assert outcome.failed == 12
        assert "12 readings failed" in evaluate.text(outcome)
    with pytest.raises(RuntimeError, match="refused"):
        run(config, refusing("e", right), tmp_path / "all")
    config = dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, context=64))
    with pytest.raises(RuntimeError, match="refused"):  # where full-context never got to ask
        run(config, refusing("e", right), tmp_path / "unfit")


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path):
    config = config_of("--config.evaluate.tasks=vt")
    run(config, subject(silence), tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ValueError, match="begin a run of another name"):
        run(config_of("--config.evaluate.tasks=vt", "--config.seed=5"), subject(silence), tmp_path)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_run_is_written_down_with_its_step_and_goes_on_when_it_has_a_newer_one(tmp_path):
    at_step_0 = dataclasses.replace(
        subject(silence), name="runs/mine@0", policy=types.SimpleNamespace(config=tiny.CONFIG)
    )
    words = ("--config.evaluate.tasks=vt", "--config.evaluate.lengths=1k")
    first = run(config_of("--config.policy=runs/mine", *words), at_step_0, tmp_path / "run")
    assert "notepad-jax ask --policy runs/mine@0 FILE" in first.report.read_text()
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["policy"] == "runs/mine@0"  # what --resume asks for
    again = config_of(f"--config.policy={saved['policy']}", *words)
    assert run(again, at_step_0, tmp_path / "run").by_task == first.by_task


def test_no_training_goes_on_with_an_evaluation(tmp_path, monkeypatch, capsys):
    run(config_of("--config.evaluate.tasks=vt"), subject(silence), tmp_path / "runs" / "x")
    monkeypatch.chdir(tmp_path)
    for command in ("train", "quickstart"):
        assert cli.main([command, "--name", "x", "--resume"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
        assert "an evaluation's, which `eval --name x --resume` goes on with" in said
    with pytest.raises(ValueError, match="an evaluation's"):
        nj.train(name="x", resume=True)


def test_a_disk_that_fills_up_loses_no_reading_and_the_report_is_the_same(tmp_path):
    config = config_of("--config.evaluate.tasks=vt,niah_single_1")
    reader = subject(lambda *asked: str(asked[-1]))
    run(config, reader, tmp_path / "whole")
    report = (tmp_path / "whole" / "report.json").read_bytes()
    lines = (tmp_path / "whole" / "readings.jsonl").stat().st_size
    largest = (tmp_path / "whole" / "report.html").stat().st_size
    for size in (100, 4_000, lines // 2, lines - 5, largest - 5):
        folder = tmp_path / str(size)
        with limits.largest_file(size), pytest.raises(OSError, match="File too large"):
            run(config, reader, folder)
        assert folder.exists() == (size >= 4_000)  # the settings alone are no run
        run(config, reader, folder)
        assert (folder / "report.json").read_bytes() == report


def test_what_a_finished_evaluation_has_outlives_a_full_disk(tmp_path):
    config = config_of("--config.evaluate.tasks=vt", "--config.evaluate.lengths=1k")
    run(config, subject(silence), tmp_path)
    before = limits.content(tmp_path)
    with limits.largest_file(10), pytest.raises(OSError, match="File too large"):
        run(config_of("--config.evaluate.tasks=vt"), subject(silence), tmp_path)
    assert {
        name: text[: len(before[name])] for name, text in limits.content(tmp_path).items()
    } == before


def test_without_a_reader_both_ways_to_name_one_are_told():
    with pytest.raises(ValueError, match="give --policy FOLDER or --endpoint URL"):
        subjects.named(config_of(), SilentScreen())


@pytest.mark.slow
def test_our_engine_reads_a_suite_by_every_method_and_only_what_is_missing(tmp_path):
    """A random chat model: what it says is nonsense, but every part of the path is real."""
    words_only = tiny_bpe.folder(tmp_path / "tokenizer", chat_template=CHAT)
    vocabulary = open_tokenizer(words_only).vocab_size
    model = dataclasses.replace(tiny.CONFIG, vocab_size=vocabulary, valid_vocab=vocabulary)
    beside = {path.name: path.read_bytes() for path in words_only.iterdir()}
    folder = huggingface.export_params(model, tiny.params(0, model), tmp_path / "policy", beside)
    words = (
        f"--config.policy={folder}", "--config.evaluate.tasks=niah_single_1",
        "--config.evaluate.methods=notepad,full-context,truncate-middle,recent-only",
        "--config.evaluate.context=600", "--config.reading.max_question=200",
        "--config.reading.max_memory=16", "--config.reading.max_answer=8",
        "--config.engine.slots=8", "--config.engine.page_size=32", "--config.engine.pages=512",
        "--config.engine.cache_dtype=float32", "--config.evaluate.repeats=1",
        "--config.evaluate.samples=2",
    )  # fmt: skip
    first = config_of(*words, "--config.evaluate.lengths=1k")
    run(first, subjects.named(first, SilentScreen()), tmp_path / "run")
    both = config_of(*words, "--config.evaluate.lengths=1k,2k")
    outcome = run(both, subjects.named(both, SilentScreen()), tmp_path / "run")
    turns = {(s.method, s.length): s.turns for s in outcome.by_length}
    assert turns == {
        ("notepad", 1024): 2 * 4, ("notepad", 2048): 2 * 6,  # chunks of 500, and the answer
        ("full-context", 1024): 0, ("full-context", 2048): 0,  # 600 tokens do not hold them
        ("truncate-middle", 1024): 2, ("truncate-middle", 2048): 2,
        ("recent-only", 1024): 2, ("recent-only", 2048): 2,
    }  # fmt: skip
    lines = (tmp_path / "run" / "readings.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 4 * 2 and not any(
        json.loads(line)["reading"]["failed"] for line in lines
    )
