"""Building task files: the same bytes, restarts, what is known is left out, one-line errors."""

import contextlib
import dataclasses
import json

import pytest

from notepad_jax import cli
from notepad_jax.data import formats
from notepad_jax.programs import build, subjects
from notepad_jax.reading.endpoint import bare_turn
from notepad_jax.setup import configuration, eval_jobs
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text import approximate
from notepad_jax.text.prompts import Template
from notepad_jax.types import Completion, Finish, tokens

RULER = ("build", "ruler", "--text", "noise", "--lengths", "4k,5k", "--samples", "2", "--json")


def run(out, *words):
    return cli.main([*RULER, "--out", str(out), *words])


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_all_thirteen_tasks_come_from_one_command(tmp_path, capsys):
    assert run(tmp_path) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["tasks"] == 13 * 2 * 2 and len(made["files"]) == made["written"] == 26
    for path in tmp_path.glob("*.jsonl"):
        wanted = {"4k": 4096, "5k": 5120}[path.stem.rpartition("-")[2]]
        for task, length in formats.read_any(path):
            text = "".join(task.document.pieces())
            assert length == wanted and 0.98 * wanted < approximate.count(text) <= wanted
            assert task.source == f"ruler/{path.stem.rpartition('-')[0]}"


def test_a_task_that_does_not_fit_a_length_does_not_stop_the_others(tmp_path, capsys):
    assert run(tmp_path, "--tasks", "cwe,vt", "--lengths", "260,1k") == 0
    told = capsys.readouterr()
    made = json.loads(told.out)
    assert (made["written"], made["tasks"]) == (3, 6)
    assert made["left_out"] == {"cwe of 260 tokens: a length that this task cannot have": 2}
    assert "left out: ruler/cwe cannot be 260 tokens long" in told.err
    names = sorted(path.name for path in tmp_path.glob("*.jsonl"))
    assert names == ["cwe-1k.jsonl", "vt-1k.jsonl", "vt-260.jsonl"]
    assert run(tmp_path, "--tasks", "cwe,vt", "--lengths", "260,1k") == 0  # nothing is left to do
    assert json.loads(capsys.readouterr().out)["written"] == 0


def test_questions_that_a_corpus_cannot_ask_are_said(tmp_path, capsys):
    """Nine of ten of the fullwiki kind were left out without a word."""
    context = [["Press", ["It was founded by Nora Lind."]], ["Heron", ["Herons wade."]]]
    rows = [
        {"_id": f"q{k}", "question": "Who?", "answer": "Nora Lind", "context": context,
         "supporting_facts": [["Press" if k == 1 else "Elsewhere", 0]]}
        for k in range(3)
    ]  # fmt: skip
    (path := tmp_path / "hot.json").write_text(json.dumps(rows))
    words = "build", "ruler-qa", "--hotpotqa", str(path), "--samples", "1", "--paragraphs", "2"
    assert cli.main([*words, "--out", str(tmp_path / "out")]) == 0
    said = f"left out: 2 of 3 questions of {path}: gold paragraph missing"
    assert said in capsys.readouterr().err


def test_a_stopped_build_goes_on_to_the_same_bytes(tmp_path, capsys):
    run(tmp_path / "whole", "--tasks", "vt,qa_2")
    run(tmp_path / "parts", "--tasks", "vt")
    (tmp_path / "parts" / "vt-4k.jsonl").unlink()
    capsys.readouterr()
    run(tmp_path / "parts", "--tasks", "vt,qa_2")
    assert json.loads(capsys.readouterr().out)["written"] == 3
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_paragraphs_that_are_said_twice_are_one_file(tmp_path, capsys):
    words = ["build", "ruler-qa", "--samples", "2", "--out", str(tmp_path), "--json"]
    assert cli.main([*words, "--paragraphs", "5,5"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["written"], made["tasks"], len(made["files"])) == (1, 2, 1)


def test_lengths_that_look_alike_have_files_of_their_own(tmp_path, capsys):
    run(tmp_path, "--tasks", "vt", "--lengths", "4k")
    run(tmp_path, "--tasks", "vt", "--lengths", "4000")
    assert sorted(p.name for p in tmp_path.glob("*.jsonl")) == ["vt-4000.jsonl", "vt-4k.jsonl"]


def test_a_folder_in_which_nothing_was_built_may_be_begun_anew(tmp_path, capsys):
    assert run(tmp_path, "--tasks", "vt", "--lengths", "10") == 1
    assert run(tmp_path, "--tasks", "vt", "--seed", "3") == 0


def test_a_file_of_the_users_own_is_not_taken_for_what_was_begun(tmp_path, capsys):
    (tmp_path / "build.json").write_text('{"mine": 1}')
    assert run(tmp_path, "--tasks", "vt", "--form", "cvs") != 0
    assert run(tmp_path, "--tasks", "vt") == 1
    assert "was made with form = None" in capsys.readouterr().err
    assert (tmp_path / "build.json").read_text() == '{"mine": 1}'


def test_another_seed_makes_other_documents_and_not_in_the_same_folder(tmp_path, capsys):
    run(tmp_path / "one", "--tasks", "vt")
    assert run(tmp_path / "two", "--tasks", "vt", "--seed", "1") == 0
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert one["vt-4k.jsonl"] != two["vt-4k.jsonl"]
    assert run(tmp_path / "one", "--tasks", "vt", "--seed", "1") == 1
    assert (
        "was made with seed = 0, and now it is 1; choose another --out" in capsys.readouterr().err
    )


def test_a_built_file_is_a_suite(tmp_path):
    run(tmp_path / "built", "--tasks", "vt,niah_single_1")
    words = [
        f"--config.evaluate.suite={tmp_path / 'built'}",
        "--config.evaluate.lengths=4k",
        "--config.evaluate.samples=1",
    ]
    config = configuration.load("ruler", words)
    tasks = eval_jobs.tasks_of(config, [4096], approximate.count, SilentScreen())
    assert sorted(task.source for task in tasks[4096]) == ["ruler/niah_single_1", "ruler/vt"]
    with pytest.raises(ValueError, match="no document of 1,024 tokens; they have 4,096, 5,120"):
        eval_jobs.tasks_of(config, [1024], approximate.count, SilentScreen())


class KnowsSome:
    """Answers questions rightly whose number its caller says it knows."""

    def __init__(self, tokenizer, known):
        self._tokenizer, self._known = tokenizer, known

    async def complete(self, prompt, sampling):
        text = self._tokenizer.decode(prompt.tokens)
        question = text.split("Question:\n")[1].split("\n\n")[0]
        said = "\\boxed{" + self._known.get(question, "no idea") + "}"
        ids = [*self._tokenizer.encode(said), sampling.stop_ids[0]]
        return Completion(tokens(ids), [0.0] * len(ids), Finish.STOP, 0)


def knower(known):
    tokenizer = approximate.ApproximateTokenizer()

    @contextlib.asynccontextmanager
    async def opened(rules):
        yield KnowsSome(tokenizer, known)

    template = Template.load("chunk_first", tokenizer, bare_turn(tokenizer))
    return subjects.Subject("a fake", tokenizer, template, opened)


def test_questions_that_a_reader_knows_are_left_out(tmp_path):
    config = configuration.load(
        "ruler", ["--config.evaluate.suite=ruler-qa", "--config.evaluate.samples=4"]
    )
    size = [build.Size(5, build.PARAGRAPHS)]
    build.build(config, tmp_path / "all", "jsonl", size, None, SilentScreen())
    everything = [t for t, _ in formats.read_any(tmp_path / "all" / "multi_hop-5paragraphs.jsonl")]
    known = {task.question: task.answers[0] for task in everything[1:3]}
    made = build.build(config, tmp_path / "left", "jsonl", size, knower(known), SilentScreen())
    left = formats.read_any(tmp_path / "left" / "multi_hop-5paragraphs.jsonl")
    assert made.left_out == {"multi_hop: known to a fake": 2} and len(left) == 4
    assert [t.question for t, _ in left[:2]] == [everything[0].question, everything[3].question]
    for task, length in left:  # paragraphs are counted in tokens
        assert length == approximate.count("".join(task.document.pieces()))


def test_questions_without_a_reply_are_not_taken_for_unknown(tmp_path):
    class Gone(KnowsSome):
        async def complete(self, prompt, sampling):
            raise RuntimeError("the server is gone")

    subject = knower({})

    @contextlib.asynccontextmanager
    async def opened(rules):
        yield Gone(subject.tokenizer, {})

    config = configuration.load(
        "ruler", ["--config.evaluate.suite=ruler-qa", "--config.evaluate.samples=4"]
    )
    gone = dataclasses.replace(subject, opened=opened)
    size = [build.Size(5, build.PARAGRAPHS)]
    with pytest.raises(ValueError, match="256 of 256 questions got no answer"):
        build.build(config, tmp_path, "jsonl", size, gone, SilentScreen())


def test_golongrl_rows_are_converted(tmp_path, capsys):
    row = {
        "data_source": "selection",
        "prompt": [{"role": "user", "content": "Ada lives in Oslo.\n\nWhere? A Rome B Oslo"}],
        "reward_model": {"ground_truth": "B"},
        "extra_info": {"reward_mode": "selection", "question": "Where? A Rome B Oslo"},
    }
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    out = str(tmp_path / "out")
    assert cli.main(["build", "golongrl", "--rows", str(rows), "--out", out, "--json"]) == 0
    ((task, _),) = formats.read_any(tmp_path / "out" / "golongrl.jsonl")
    assert (task.metric, task.answers) == ("choice", ("B",))
    assert "".join(task.document.pieces()) == "Ada lives in Oslo."
    broken = row | {"reward_model": {"ground_truth": "not a table"},
                    "extra_info": row["extra_info"] | {"reward_mode": "iou"},
                    "data_source": "tables"}  # fmt: skip
    rows.write_text(json.dumps(broken) + "\n" + json.dumps(row) + "\n")
    capsys.readouterr()
    assert cli.main(["build", "golongrl", "--rows", str(rows), "--out", out + "1", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["left_out"] == {"gold answers that row_iou gives nothing for": 1}
    assert made["tasks"] == 1
    rows.write_text("{}\n")
    assert cli.main(["build", "golongrl", "--rows", str(rows), "--out", out + "2"]) == 1
    assert "rows.jsonl row 1" in capsys.readouterr().err
    assert not (tmp_path / "out2" / "golongrl.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "vtt"), "suite ruler has no task 'vtt'"),
        (("--tasks", "cwe,vt", "--lengths", "20"), "ruler/vt cannot be 20 tokens long"),
        (("--lengths", "many"), "'many' is no length"),
        (("--samples=-1",), "evaluate.samples is -1; it must be at least 0"),
        (("--form", "csv"), "there is no form 'csv'; use jsonl or array_record"),
        (("--tokenizer", "/nowhere"), "/nowhere has neither a tokenizer.json"),
        (("--text", "/nowhere"), "/nowhere"),
        (("--squad", "/nowhere.json"), "/nowhere.json"),
        (("--paragraphs", "50"), "--paragraphs is for the suite ruler-qa"),
        (("--rows", "x.jsonl"), "the suite golongrl is made from --rows FILE"),
        (("--drop-known",), "give --policy FOLDER or --endpoint URL"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, capsys, words, message):
    assert run(tmp_path / "out", *words) == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error and "Traceback" not in error
