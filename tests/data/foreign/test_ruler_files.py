"""RULER's rows as they are: hand-written fixtures in NVIDIA's format, and its scorer's formula."""

import json
from pathlib import Path

import pytest

from notepad_jax.data import formats
from notepad_jax.data.foreign import ruler_files
from notepad_jax.scoring import metrics

FIXTURES = Path(__file__).parent / "fixtures" / "ruler" / "512" / "data"
NAMES = ("niah_single_1", "niah_multivalue", "vt", "cwe", "fwe", "qa_1")


def read(name: str):
    return ruler_files.read(FIXTURES / name / "validation.jsonl")


def rows(name: str) -> list[dict]:
    lines = (FIXTURES / name / "validation.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_an_input_is_lost(name):
    for (task, length), row in zip(read(name), rows(name), strict=True):
        document = "".join(task.document.pieces())
        question = task.question.removesuffix(row.get("answer_prefix", "").strip()).strip()
        joined = document + "\n" + question
        # The question's line lost its "Question:", the rest is there word for word.
        assert joined.split() == [
            word
            for place, word in enumerate(row["input"].split())
            if not (word == "Question:" and place == _last(row["input"].split(), "Question:"))
        ]
        assert task.answers == tuple(row["outputs"]) and task.source == f"ruler/{name}"
        assert length == 512  # the folder's name: what the file was made for


def _last(words: list[str], wanted: str) -> int:
    return max((place for place, word in enumerate(words) if word == wanted), default=-1)


def test_a_one_shot_example_stays_in_the_document():
    ((task, _),) = read("cwe")
    assert (
        task.question == "Which 2 words are the most common? Answer: The 2 most common words are:"
    )
    assert "Question: Which 2 words are the most common? Answer: plum, otter" in "".join(
        task.document.pieces()
    )


def test_older_rows_and_newer_rows_give_the_same_task(tmp_path):
    newer = rows("niah_single_1")[0]
    older = {name: newer[name] for name in ("index", "outputs", "length")}
    older["input"] = newer["input"] + newer["answer_prefix"]
    found = []
    for name, row in (("older", older), ("newer", newer)):
        path = tmp_path / name / "niah_single_1.jsonl"
        path.parent.mkdir()
        path.write_text(json.dumps(row))
        ((task, length),) = ruler_files.read(path)
        found.append((task.question, list(task.document.pieces()), task.answers, task.id, length))
    assert found[0] == found[1]
    assert found[0][-1] == newer["length"] == 211  # where no folder names one


# ---------------------------------------------------------------- scores


def oracle(prediction: str, references: list[str], part: bool) -> float:
    """RULER's scores of one sample, written from their definition: is a reference in it?"""
    found = [reference.lower() in prediction.lower() for reference in references]
    return float(any(found)) if part else sum(found) / len(found)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_rulers_own_formula(name):
    said = [
        "", "4821907", "it is 5512098.", "7730146 and 5512098", "kqx, plm; tro", "KQX KQX PLM",
        "Canal\nFERN", "kaxufbiwelozomit", "in the year 1893, I think", "18 93", "none of them",
    ]  # fmt: skip
    part = name.startswith("qa")
    differing = set()
    for (task, _), row in zip(read(name), rows(name), strict=True):
        assert task.metric == ("ruler_part" if part else "ruler_all")
        for prediction in [*said, ", ".join(row["outputs"])]:
            expected = oracle(prediction, row["outputs"], part)
            score = metrics.score(prediction, task.answers, task.metric, task.contract)
            assert score.value == pytest.approx(expected, abs=1e-12)
            differing.add(expected)
    assert {0.0, 1.0} <= differing  # the predictions tell right from wrong


# ---------------------------------------------------------------- which file is which


def test_the_task_and_the_length_are_told_by_the_path(tmp_path):
    row = json.dumps(rows("vt")[0])
    for name, source, length in (
        ("4096/data/vt/validation.jsonl", "ruler/vt", 4096),
        ("2/8192/niah_multikey_3.jsonl", "ruler/niah_multikey_3", 8192),
        ("x/qa_2/test.jsonl", "ruler/qa_2", 140),  # the row's own
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(row)
        ((task, told),) = formats.read_any(path)
        assert (task.source, told) == (source, length)
        assert formats.read_any(f"file://{path}")[0][0].question == task.question
    path = tmp_path / "mine.jsonl"
    path.write_text(row)
    with pytest.raises(ValueError, match="mine.jsonl: neither .* begins with one of niah, vt"):
        ruler_files.read(path)


GOOD = {"index": 0, "input": "text\nwhat?", "outputs": ["x"], "length": 3}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"input": ...}, "has no column 'input'; it has index, outputs, length"),
        ({"outputs": ...}, "has no column 'outputs'"),
        ({"outputs": []}, "has no gold answer: 'outputs' is empty"),
        ({"outputs": [None]}, "'outputs' must be a list of texts"),
        ({"outputs": [" "]}, "'outputs' must be a list of texts"),
        ({"input": ""}, "has an empty 'input'"),
        ({"input": 5}, "has an empty 'input'"),
        ({"input": "one line"}, "'input' has no line break"),
        ({"length": "3"}, "'length' must be a number of tokens"),
    ],
)
def test_a_bad_row_is_one_line_with_file_and_row(tmp_path, change, message):
    path = tmp_path / "vt.jsonl"
    bad = {name: value for name, value in {**GOOD, **change}.items() if value is not ...}
    path.write_text(json.dumps({**GOOD, "index": 9}) + "\n" + json.dumps(bad))
    with pytest.raises(ValueError, match=f"vt.jsonl row 2.*{message}") as caught:
        ruler_files.read(path)
    assert "\n" not in str(caught.value)


def test_rows_of_other_data_sets_are_recognised(tmp_path):
    path = tmp_path / "t.jsonl"
    for row, name in (
        ({"data_source": "EM", "reward_model": {}}, "GoLongRL"),
        ({"id": "1", "question": "q", "supporting_facts": {}}, "HotpotQA"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=f"t.jsonl has rows of {name}"):
            formats.read_any(path)
    path.write_text('{"other": 1}')
    with pytest.raises(
        ValueError, match="t.jsonl row 1 has no column 'document' or 'context'; it has other"
    ):
        formats.read_any(path)
