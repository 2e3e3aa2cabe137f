"""MemoryAgentBench's rows, by hand: many questions about one text, judged by source."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from notepad_jax.data import formats, task_sources
from notepad_jax.scoring import metrics
from notepad_jax.tasks import file_suite
from notepad_jax.telemetry.screen import SilentScreen

TEXT = "1. The mill is in Ghent. 2. The mill is in Bruges. " * 20


def row(source="factconsolidation_sh_6k", **changes) -> dict:
    good = {
        "context": TEXT,
        "questions": ["Where is the mill?", "Which town is last?"],
        "answers": [["Bruges", "Brugge"], ["Bruges"]],
        "metadata": {"source": source, "qa_pair_ids": ["a_no0", "a_no1"]},
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def written(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    return path


@pytest.mark.parametrize("name", ["Conflict_Resolution.parquet", "rows.json"])
def test_a_row_becomes_a_task_for_each_question_about_one_document(tmp_path, name):
    found = formats.read_any(written(tmp_path / name, [row(), row()]))
    tasks = [task for task, _ in found]
    assert [task.id for task in tasks] == [f"{name}:{r}-{q}" for r in (1, 2) for q in (1, 2)]
    one, two, other, _ = tasks
    assert one.document is two.document and one.document is not other.document
    assert "".join(one.document.pieces()) == TEXT
    assert (one.answers, two.answers) == (("Bruges", "Brugge"), ("Bruges",))
    assert one.source == "memory_agent_bench/factconsolidation_sh_6k"
    assert two.extra == {"qa_pair_id": "a_no1"}
    assert two.question.startswith("Which town is last?\nWhere facts contradict")


def test_a_text_of_many_questions_is_counted_once(tmp_path):
    path, texts = written(tmp_path / "rows.json", [row()]), []
    found = file_suite.read(str(path), (), (), 0, lambda text: texts.append(text) or len(text))
    assert "".join(texts) == TEXT and len(found.tasks[1024]) == 2


def test_a_metric_is_that_of_the_source(tmp_path):
    names = {
        "ruler_qa1_197K": "published_memory_sub_em", "eventqa_full": "published_memory_sub_em_line",
        "icl_trec_fine_6296shot_balance": "published_memory_em_line", "infbench_sum_eng": "rouge_l",
        "detective_qa": "published_memory_em", "longmemeval_s*": "published_memory_sub_em",
    }  # fmt: skip
    found = formats.read_any(written(tmp_path / "rows.json", [row(name) for name in names]))
    assert [task.metric for task, _ in found[::2]] == [*names.values()]


def test_a_question_with_a_fault_is_left_out_alone(tmp_path):
    answers = [[], ["Bruges"]]
    path = written(tmp_path / "rows.json", [row(), row(answers=answers), row("recsys_redial_full")])
    left_out = []
    found = formats.read_any(path, on_fault=left_out.append)
    assert [task.id for task, _ in found] == ["rows.json:1-1", "rows.json:1-2", "rows.json:2-2"]
    assert [fault.place for fault in left_out] == [2, 4]
    again = task_sources.by_source([path], SilentScreen(), left_out.append, [[2, 4]])
    assert sum(map(len, again.tasks.values())) == 3


@pytest.mark.parametrize(
    "metric, said, worth",
    [
        ("published_memory_em", "The Bruges.", 1), ("published_memory_em", "In Bruges", 0),
        ("published_memory_em", "I think so\nanswer: Bruges!\nor Ghent", 1),
        ("published_memory_em", "Answer: Answer: bruges", 1),
        ("published_memory_em_line", "\nBruges", 0), ("published_memory_em", "\nBruges", 1),
        ("published_memory_sub_em", "from Brugesland", 1),
        ("published_memory_sub_em", "Ghent\nBruges", 1),
        ("published_memory_sub_em_line", "Ghent\nBruges", 0),
        ("published_memory_sub_em_line", "Answer: near Bruges\nGhent", 1),
    ],
)  # fmt: skip
def test_answers_are_worth_what_the_published_functions_give(metric, said, worth):
    assert metrics.METRICS[metric](said, ["Bruges"]) == worth


BAD = [
    (row(answers=[["x"]]), "has 2 questions and 1 answers; it needs as many"),
    (row(questions=["q", 3]), "question 2 must be a text, it is 3"),
    (row(answers=[["x"], 5]), "question 2: its answers must be a text or texts, they are 5"),
    (row(metadata={}), "has no text 'source' in its 'metadata'; give the published rows"),
    (row("chess"), "is of 'chess'; known are ruler_qa, eventqa"),
    (row("recsys_redial_full"), "gold answers are numbers of films in a file of its own"),
    (row(context=""), "has an empty document"),
]


@pytest.mark.parametrize("bad, message", BAD)
def test_a_bad_row_is_one_line_with_file_and_number(tmp_path, bad, message):
    path = written(tmp_path / "t.json", [row(), bad])
    with pytest.raises(ValueError, match=f"t.json row 2.*{message}") as caught:
        formats.read_any(path)
    assert "\n" not in str(caught.value)
