"""Files that users have, from the command to the report: all rows, and the published scores."""

import contextlib
import dataclasses
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
import tiny
import tiny_bpe

from notepad_jax import cli
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.programs import evaluate, subjects
from notepad_jax.reading.endpoint import bare_turn
from notepad_jax.setup import configuration
from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.metrics import read_metrics
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import open_tokenizer
from notepad_jax.types import Completion, Finish, tokens

QUESTIONS = 20


class Says:
    """Answers what `say` makes of the prompt; keeps no memory. None: the request fails."""

    def __init__(self, tokenizer, say) -> None:
        self._tokenizer, self._say = tokenizer, say

    async def complete(self, prompt, sampling):
        text = self._tokenizer.decode(prompt.tokens)
        said = "" if "<piece>" in text else self._say(text.split("Question:\n")[1])
        if said is None:
            raise TimeoutError("no reply in 600 s")
        ids = [*self._tokenizer.encode(said), sampling.stop_ids[0]]
        return Completion(tokens(ids), [0.0] * len(ids), Finish.STOP, 0)


def subject(say):
    tokenizer = ApproximateTokenizer()

    @contextlib.asynccontextmanager
    async def opened(rules):
        yield Says(tokenizer, say)

    template = Template.load("chunk_first", tokenizer, bare_turn(tokenizer))
    return subjects.Subject("a fake", tokenizer, template, opened)


class Heard(SilentScreen):
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    warn = say


def run(path, folder, say, *words, screen=None):
    screen = screen or Heard()
    config = configuration.load("ruler", [f"--config.evaluate.suite={path}", *words])
    return evaluate.run(config, subject(say), folder, screen), getattr(screen, "said", [])


def by_hand(path):
    """Twenty rows as a person writes them: two columns have two names."""
    rows = [
        {"question": f"code of number {k} ?", "answers": [f"c{k}"], "document": f"c{k} " * (9 * k)}
        if k % 2
        else {
            "context": f"number {k} has c{k} . " * 50,
            "question": f"who is {k} ?",
            "answers": "x",
        }
        for k in range(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_twenty_rows_by_hand_are_twenty_answers_without_any_option(tmp_path):
    path = by_hand(tmp_path / "mine.jsonl")
    made, said = run(path, tmp_path / "run", lambda asked: "it is \\boxed{x} ")
    assert sum(s.n for s in made.by_length) == QUESTIONS and len(made.by_length) > 2
    assert sum(s.n * s.accuracy.mean for s in made.by_length) == pytest.approx(QUESTIONS / 2)
    assert any("20 rows of" in line and "questions by length" in line for line in said)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert sum(summary["n"] for summary in report["by_length"]) == QUESTIONS


def test_a_question_over_the_limit_is_left_out_and_said(tmp_path):
    """One of five hundred ended the evaluation of all; training leaves such rows out, too."""
    path, limit = by_hand(tmp_path / "mine.jsonl"), "--config.reading.max_question=40"
    long = {"question": "why ? " * 40, "answers": "x", "document": "x"}
    path.write_text(path.read_text() + json.dumps(long))
    made, said = run(path, tmp_path / "run", lambda asked: "\\boxed{x}", limit)
    assert sum(s.n for s in made.by_length) == QUESTIONS
    (line,) = (line for line in said if line.startswith("left out: "))
    assert "1 of 21 rows, with a question that is too long; the first is task 'mine" in line
    path.write_text(json.dumps(long))
    with pytest.raises(ValueError, match="none of the 1 rows of .* the limit is 40"):
        run(path, tmp_path / "other", lambda asked: "", limit)


def test_the_turns_that_are_counted_are_those_that_were_made(tmp_path):
    """However long a file says that its documents are, and whatever ends a reading."""
    rows = [{"document": "word " * 30 * k, "question": "q", "answers": ["a"], "length": 4096}
            for k in range(1, 5)]  # fmt: skip
    (path := tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    screen = LineScreen(io.StringIO())
    made, _ = run(
        path, tmp_path / "run", lambda asked: "\\boxed{a}", "--config.evaluate.chunk_size=64",
        screen=screen,
    )  # fmt: skip
    (summary,) = made.by_length
    assert 4 < summary.turns < 20
    assert f"eval 4K: {summary.turns}/{summary.turns} turns" in screen._stream.getvalue()


def test_a_published_evaluation_file_needs_nothing_but_its_name_and_failures_are_wrong(tmp_path):
    rows = [
        {"context": "Document 1:\nRome", "input": f"q{k}", "answers": ["Rome"], "index": 0,
         "num_docs": 200}
        for k in range(8)
    ]  # fmt: skip
    (path := tmp_path / "eval_200.json").write_text(json.dumps(rows, indent=4))
    made, _ = run(
        path, tmp_path / "run", lambda asked: None if asked.startswith("q3") else "\\boxed{rome}"
    )
    (summary,) = made.by_length
    assert (summary.length, summary.n, made.failed) == (28 * 1024, 8, 1)
    assert summary.accuracy.mean == 7 / 8 and summary.unanswered == 1
    assert "1 readings failed and count as wrong; again with" in evaluate.text(made)


def test_files_of_benchmarks_are_read_as_downloaded_and_what_a_model_judges_is_said(tmp_path):
    choices = {f"choice_{letter}": letter.lower() for letter in "ABCD"}
    asked = {
        "question": "who ?",
        "answer": "A",
        "question_id": "q",
        "question_type": "multi-session",
    }
    said_in_it = [{"role": "user", "content": "it was A ."}]
    (tmp_path / "one.json").write_text(json.dumps([{**asked, **choices, "context": "A " * 50}]))
    (tmp_path / "two.json").write_text(
        json.dumps([{
            **asked, "question_date": "today", "haystack_dates": ["May"],
            "haystack_sessions": [said_in_it],
        }])
    )  # fmt: skip
    many = {"context": "A " * 90, "questions": ["who ?", "what ?"], "answers": [["A"], ["B"]]}
    rows = [{**many, "metadata": {"source": "detective_qa"}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "three.parquet")
    asked = repr({"abstention": [{"question": "who ?", "ideal_response": "A"}]})
    rows = [{"conversation_id": "1", "chat": [said_in_it], "probing_questions": asked}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "four.parquet")
    made, said = run(tmp_path, tmp_path / "run", lambda asked: "A ")
    assert sum(s.n for s in made.by_length) == 5
    assert sum(s.n * s.accuracy.mean for s in made.by_length) == pytest.approx(4)
    told = [line for line in said if "is judged by a model as published" in line]
    assert [line.split()[0] for line in sorted(told)] == ["BEAM", "LongMemEval"]


def test_rows_that_have_none_of_the_lengths_asked_for_are_told(tmp_path):
    path = by_hand(tmp_path / "mine.jsonl")
    made, said = run(
        path, tmp_path / "run", lambda asked: "", "--config.evaluate.lengths=64,128",
    )  # fmt: skip
    left = QUESTIONS - sum(s.n for s in made.by_length)
    assert left and any(f"{left} of 20 rows are left out" in line for line in said)


def test_a_published_file_is_built_into_one_of_ours(tmp_path, capsys):
    rows = [
        {"context": "Rome", "input": f"q{k}", "answers": ["Rome"], "num_docs": 50} for k in range(3)
    ]
    (path := tmp_path / "eval_50.json").write_text(json.dumps(rows))
    for form in ("jsonl", "array_record"):
        out = tmp_path / form
        assert cli.main(["build", str(path), "--out", str(out), "--form", form, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["tasks"] == 3
        made, _ = run(out, tmp_path / f"run-{form}", lambda asked: "rome")
        assert [(s.length, s.n, s.accuracy.mean) for s in made.by_length] == [(7168, 3, 1.0)]
    for missing, message in (("no.json", "no.json is missing"), ("rulr", "there is no suite 'rul")):
        assert cli.main(["build", missing, "--out", str(tmp_path / "x")]) == 1
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------- training


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMALL = (
    "dtype=float32", "steps=1", "rollout.documents=2", "rollout.group_size=2",
    "rollout.max_rounds=1", "reading.max_memory=16", "reading.max_answer=8",
    "grpo.minibatches=1", "grpo.micro_batch_rows=1", "grpo.row_length=1024", "grpo.kl_weight=0.0",
    "grpo.remat=False", "reading.chunk_size=128", "parallel.devices=1", "engine.tensor=1",
    "engine.slots=4", "engine.page_size=32", "engine.pages=128", "engine.row_tokens=768",
    "engine.steps_per_launch=4", "engine.cache_dtype=float32", "checkpoint.rollout_dtype=float32",
)  # fmt: skip


def chat_model(folder):
    words_only = tiny_bpe.folder(folder / "tokenizer", chat_template=CHAT)
    vocabulary = open_tokenizer(words_only).vocab_size
    model = dataclasses.replace(tiny.CONFIG, vocab_size=vocabulary, valid_vocab=vocabulary)
    beside = {path.name: path.read_bytes() for path in words_only.iterdir()}
    return huggingface.export_params(model, tiny.params(0, model), folder / "policy", beside)


@pytest.mark.slow
def test_the_published_recipe_trains_on_a_published_file_and_on_rows_by_hand(tmp_path, monkeypatch):
    """At toy size: a random chat model, whose answers earn nothing; all of the path is real."""
    rows = [
        {"data_source": "hotpotqa", "prompt": [{"role": "user", "content": f"Who is {k}?"}],
         "context": "Document 1:\nNobody knows. " * 20, "ability": "memory",
         "reward_model": {"style": "rule", "ground_truth": ["x"]},
         "extra_info": {"index": 0, "question": f"Who is {k}?", "num_docs": 200}}
        for k in range(8)
    ]  # fmt: skip
    published = tmp_path / "hotpotqa_train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), published)
    policy = chat_model(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, path in (("a", published), ("b", by_hand(tmp_path / "mine.jsonl"))):
        said = [f"policy={policy}", f"tasks.files={path}", *SMALL]
        words = ["train", "--config", "memagent", "--name", name]
        assert cli.main([*words, *(f"--config.{word}" for word in said)]) == 0
        (step,) = read_metrics(tmp_path / "runs" / name)
        assert step["groups/sampled"] >= 2 and step["data/draws"] >= 2


# ---------------------------------------------------------------- NVIDIA's scores


NAMES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2",
    "niah_multikey_3", "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
REPLIES = (
    "4821907",
    "It is 4821907; and 99",
    "NOWHERE\x01kqx",
    "Kqx\tplm",
    "",
    "482 1907",
    "a 99.",
)


def string_match(replies: list[str], references: list[list[str]], part: bool) -> float:
    """RULER's scores of a file, as evaluate.py computes them (`string_match_all`, `_part`)."""
    shares = []
    for reply, golds in zip(replies, references, strict=True):
        reply = "".join("\n" if c < " " else c for c in reply.strip()).strip().lower()
        there = [gold.lower() in reply for gold in golds]
        shares.append(float(any(there)) if part else sum(there) / len(there))
    return round(100 * sum(shares) / len(shares), 2)


def test_scores_of_all_13_tasks_are_nvidias_on_files_whose_index_repeats(tmp_path):
    """niah.py writes the place of the answer into `index`: -1 where it is not found."""
    golds = [["4821907", "99"], ["Kqx"], ["plm", "KQX", "4821907"], ["99", "nowhere"]]
    expected, replies = {}, {}
    for place, name in enumerate(NAMES):
        rows, said = [], []
        for k in range(9):
            gold = golds[(k + place) % 4]
            question = f"What of {name} number {k}?"
            rows.append({"index": (-1, 17)[k % 2], "input": f"A text.\n{question}",
                         "outputs": gold, "length": 4000 + k, "answer_prefix": " Answer:",
                         "token_position_answer": 3})  # fmt: skip
            said.append(REPLIES[(k * (place + 1)) % len(REPLIES)])
            replies[question] = said[-1]
        path = tmp_path / "suite" / "4096" / "data" / name / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        expected[f"ruler/{name}"] = string_match(
            said, [row["outputs"] for row in rows], name.startswith("qa")
        )
    made, _ = run(
        tmp_path / "suite", tmp_path / "run",
        lambda asked: replies[asked.partition(" Answer:")[0]],
    )  # fmt: skip
    assert {s.source: round(100 * s.accuracy.mean, 2) for s in made.by_task} == expected
    assert {(s.length, s.n) for s in made.by_task} == {(4096, 9)}
    assert len(set(expected.values())) > 6  # the replies tell tasks apart
