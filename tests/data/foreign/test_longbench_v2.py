"""LongBench v2's rows, by hand: a letter, its choices in the question, the text in its file."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from notepad_jax.data import datasets, formats
from notepad_jax.scoring import metrics

TEXT = "The depot opens at six.\nIts gate is green. " * 9


def row(**changes) -> dict:
    good = {
        "_id": "r1", "domain": "Long Notes", "sub_domain": "Depots", "difficulty": "hard",
        "length": "short", "question": "Which gate?", "choice_A": "red", "choice_B": " green ",
        "choice_C": "blue", "choice_D": "none", "answer": "B", "context": TEXT,
    }  # fmt: skip
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def written(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows, indent=2))
    return path


@pytest.mark.parametrize("name", ["data.json", "train.parquet"])
def test_a_row_is_a_question_with_its_choices_about_a_text_in_its_file(tmp_path, name):
    found = formats.read_any(written(tmp_path / name, [row(), row(_id="r2", answer="D")]))
    (one, length), (two, _) = found
    assert (one.id, two.id, one.source, length) == ("r1", "r2", "longbench_v2/hard", 0)
    assert one.question.split("\n")[:3] == ["Which gate?", "(A) red", "(B) green"]
    assert "".join(one.document.pieces()) == TEXT and one.extra["length"] == "short"
    assert (one.answers, two.answers, one.metric) == (("B",), ("D",), "choice")
    for said, worth in (("The correct answer is (B)", 1), ("The correct answer is (A)", 0)):
        for metric in (one.metric, "published_choice"):
            assert metrics.score(said, one.answers, metric, one.contract).value == worth


def test_rows_of_a_program_keep_their_choices(tmp_path):
    datasets.write([row()], tmp_path / "given.jsonl")
    ((task, _),) = formats.read_any(tmp_path / "given.jsonl")
    assert "(D) none" in task.question and task.answers == ("B",)


BAD = [
    (row(answer="E"), "'answer' must be one of A, B, C, D, it is 'E'"),
    (row(answer=...), "'answer' must be one of A, B, C, D, it is None"),
    (row(choice_C=...), "has no column 'choice_C'; it has _id"),
    (row(choice_D=""), "'choice_D' must be a text, it is ''"),
    (row(question=3), "'question' must be a text, it is 3"),
    (row(context=" "), "has an empty document"),
]


@pytest.mark.parametrize("bad, message", BAD)
def test_a_bad_row_is_one_line_with_file_and_number(tmp_path, bad, message):
    path = written(tmp_path / "data.json", [row(), bad])
    with pytest.raises(ValueError, match=f"data.json row 2.*{message}"):
        formats.read_any(path)
    left_out = []
    assert len(formats.read_any(path, on_fault=left_out.append)) == 1
    assert [fault.place for fault in left_out] == [1]
