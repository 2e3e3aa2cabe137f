"""Rows of a program as a task file: whoever holds them, the same rows are the same bytes."""

import json

import numpy as np
import pytest

from notepad_jax.data import datasets, files, formats
from notepad_jax.types import Task, TextDocument

ROWS = [
    {"question": "who ?", "document": "ann and bob", "answers": ["ann", "bob"]},
    {"question": "where ?", "context": "in rome", "answer": "rome", "level": 3, "hint": None},
    {
        "id": "mine", "question": "when ?", "document": "now", "answers": ("now",),
        "source": "clock", "metric": "em", "level": np.int64(4), "scores": np.array([0.5, 1.0]),
    },
]  # fmt: skip


class Source:
    """Random access, as grain's sources and Hugging Face's datasets have it; no iteration."""

    __iter__ = None

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        self.asked.append(number)
        return dict(self.rows[number])


def read(path):
    return [task for task, _ in files.read(path)]


def test_lists_generators_and_random_access_give_one_file(tmp_path):
    source = Source(ROWS)
    held = [ROWS, (dict(row) for row in ROWS), source]
    for number, dataset in enumerate(held):
        assert datasets.write(dataset, tmp_path / str(number) / "dataset.jsonl") == 3
    assert source.asked == [0, 1, 2]
    first, *others = [(tmp_path / str(n) / "dataset.jsonl").read_bytes() for n in range(3)]
    assert others == [first, first]


def test_what_a_row_leaves_out_and_what_is_kept_for_a_reward(tmp_path):
    datasets.write(ROWS, tmp_path / "dataset.jsonl")
    one, two, three = read(tmp_path / "dataset.jsonl")
    assert (one.id, one.source, one.metric, one.contract) == (
        "dataset.jsonl:1", "dataset", "sub_em", "auto",
    )  # fmt: skip
    assert "".join(one.document.pieces()) == "ann and bob" and one.extra == {}
    assert two.answers == ("rome",) and two.extra == {"level": 3, "hint": None}
    assert (three.id, three.source, three.metric, three.contract) == (
        "mine", "clock", "em", "plain",
    )  # fmt: skip
    assert three.extra == {"level": 4, "scores": [0.5, 1.0]}


def test_keys_below_a_column_may_be_called_as_the_text_is(tmp_path):
    """Readers find a text by its key's bytes, wherever the key stands."""
    rows = [
        ROWS[0] | {"passages": [{"document": "one"}, {"context": "two"}]},
        {"question": "who ?", "answers": "ann", "context": 'ann said "document": "x"'},
    ]
    datasets.write(rows, tmp_path / "dataset.jsonl")
    one, two = read(tmp_path / "dataset.jsonl")
    assert one.extra == {"passages": [{"document": "one"}, {"context": "two"}]}
    assert "".join(two.document.pieces()) == 'ann said "document": "x"'


def test_further_columns_are_no_sign_of_another_data_set(tmp_path):
    """`load_dataset("hotpot_qa")` with a text beside it was told to be made into tasks first."""
    for name in (
        "supporting_facts", "paragraphs", "answer_start", "reward_model", "haystack_dates",
        "hypothesis", "ideal_response", "input",
    ):  # fmt: skip
        path = tmp_path / name / "dataset.jsonl"
        datasets.write([ROWS[0] | {name: ["x"]}], path)
        ((task, _),) = formats.read_any(path)
        assert task.extra == {name: ["x"]}
        (tmp_path / "hand.jsonl").write_text(json.dumps(ROWS[0] | {name: ["x"]}))
        ((task, _),) = formats.read_any(tmp_path / "hand.jsonl")
        assert "".join(task.document.pieces()) == "ann and bob"


def test_tasks_are_rows_too(tmp_path):
    task = Task("t", "who ?", TextDocument("ann"), ("ann",), "own", "em", extra={"level": 2})
    datasets.write([task], tmp_path / "dataset.jsonl")
    (found,) = read(tmp_path / "dataset.jsonl")
    assert (found.id, found.extra, found.source) == ("t", {"level": 2}, "own")


@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ([], "the dataset has no rows"),
        (5, "the dataset is of type int; give rows, a list of them"),
        ({"train": ROWS}, "the dataset is a mapping of train; give one"),
        (["who ?"], "row 1 of the dataset is of type str, and no mapping of columns: 'who"),
        ([*ROWS, {"question": "who ?"}], "row 4 of the dataset has no text under 'document' or"),
        ([ROWS[0] | {"document": " "}], "row 1 of the dataset has no text under 'document'"),
        ([ROWS[0] | {"answers": []}], "row 1 of the dataset has no gold answer"),
        ([ROWS[0] | {"answers": [5]}], "row 1 of the dataset: 'answers' must be a list of strings"),
        ([ROWS[0] | {"question": None}], "row 1 of the dataset has no column 'question'"),
        ([ROWS[2], ROWS[2]], "row 2 of the dataset has the id 'mine', as row 1"),
        (
            [ROWS[0] | {"image": object()}],
            "JSON cannot hold the column 'image' of type object",
        ),
        (type("Table", (), {"iterrows": 1})(), "is a table; give its rows: table.to_dict"),
    ],
)
def test_what_is_no_row_is_named_and_leaves_no_file(tmp_path, dataset, says):
    with pytest.raises(ValueError, match=says) as said:
        datasets.write(dataset, tmp_path / "dataset.jsonl")
    assert "\n" not in str(said.value)
    assert not list(tmp_path.iterdir())


def test_a_run_goes_on_with_the_same_rows_only(tmp_path):
    path = tmp_path / "dataset.jsonl"
    with pytest.raises(ValueError, match="this run did not begin with rows that a program gave"):
        datasets.settle(ROWS, path)
    datasets.write(ROWS, path)
    before = path.read_bytes()
    assert datasets.settle(iter(ROWS), path) == 3
    changed = [ROWS[0], ROWS[1] | {"answer": "milan"}, ROWS[2]]
    for other, number in ((changed, 2), (ROWS[:2], 3), ([*ROWS, ROWS[0]], 4), (ROWS[::-1], 1)):
        with pytest.raises(ValueError, match=f"^row {number} is not the one that .*dataset.jsonl"):
            datasets.settle(other, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_extra_columns_of_a_file_written_by_hand(tmp_path):
    path = tmp_path / "hand.jsonl"
    row = {"id": "1", "question": "q", "answers": ["a"], "source": "s", "metric": "em"}
    path.write_text(json.dumps(row | {"extra": [1], "document": "text"}) + "\n")
    with pytest.raises(ValueError, match="row 1: 'extra' must be an object with columns"):
        files.read(path)
