"""Every row is judged when its file is opened: left out and counted, or the file is refused."""

import datetime
import json

import pyarrow
import pyarrow.parquet
import pytest
from array_record.python import array_record_module

from notepad_jax.data import admission, array_records, datasets, files, formats, parquet
from notepad_jax.data.admission import Fault, RowCounts
from notepad_jax.data.task_sources import by_source
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import Task, TextDocument

FORMS = ("jsonl", "json", "parquet", "array_record")
FAULTS = [
    ({"document": None}, admission.NO_TEXT),
    ({"document": ""}, admission.NO_TEXT),
    ({"document": " \n\t\u2028"}, admission.NO_TEXT),
    ({"question": None}, admission.NO_QUESTION),
    ({"question": " "}, admission.NO_QUESTION),
    ({"answers": None}, admission.NO_GOLD),
    ({"answers": []}, admission.NO_GOLD),
    ({"answers": ["x", " "]}, admission.NO_GOLD),
    ({"metric": "exact"}, admission.METRIC),
    ({"contract": "loud"}, admission.CONTRACT),
    ({"answers": [None]}, admission.TYPE),
    ({"length": -1}, admission.TYPE),
]


def row(number: int, **changes) -> dict:
    return {
        "id": f"t{number}", "question": f"q{number}?", "answers": ["x"], "source": "s",
        "metric": "em", "contract": "plain", "length": 5, "document": f"text {number}", **changes,
    }  # fmt: skip


def write(path, rows):
    form = path.name.rpartition(".")[2]
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    elif form == "array_record":
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for one in rows:
            writer.write(json.dumps(one).encode())
        writer.close()
    else:
        path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    return path


def read(path):
    found = RowCounts()
    return [task.id for task, _ in formats.read_any(path, on_fault=found.leave_out)], found


# ---------------------------------------------------------------- one row


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("changes, why", FAULTS)
def test_a_row_with_a_fault_is_left_out_counted_and_named(tmp_path, form, changes, why):
    """A null text of a parquet ended the run in step 5, an unknown metric when it was drawn."""
    if form == "parquet" and why is admission.TYPE and "answers" in changes:
        changes = {"answers": ["y", None]}
    path = write(
        tmp_path / f"t.{form}", [row(1), row(2, **changes), row(3), row(4, **changes), row(5)]
    )
    kept, found = read(path)
    assert kept == ["t1", "t3", "t5"]
    ((one,), where) = found.left_out, "record" if form == "array_record" else "row"
    assert (one.why, one.count, found.count) == (why, 2, 2)
    assert one.first.startswith(f"{path} {where} 2") and "\n" not in one.first
    (line,) = found.lines(kept=3)
    assert line.startswith(f"left out: 2 of 5 rows, with {why}; the first is {path} {where} 2")
    assert len(line) < 600
    with pytest.raises(Fault, match=f"t.{form} {where} 2"):  # a program can mend its file
        formats.read_any(path)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_which_no_row_is_left_is_refused_with_the_first_reason(tmp_path, form):
    path = write(tmp_path / f"t.{form}", [row(k, metric="exact") for k in (1, 2)])
    with pytest.raises(ValueError, match=f"none of the 2 rows of .*t.{form} can be used: .*exact"):
        read(path)


@pytest.mark.parametrize("form", ("jsonl", "json", "array_record"))
@pytest.mark.parametrize("key", ("document", "question"))
def test_a_key_that_stands_twice_in_a_row_leaves_it_out(tmp_path, form, key):
    good, bad = json.dumps(row(1)), json.dumps(row(2))
    bad = bad[:-1] + f', "{key}": "another one"}}'
    path = tmp_path / f"t.{form}"
    if form == "array_record":
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        writer.write(good.encode())
        writer.write(bad.encode())
        writer.close()
    else:
        path.write_text(f"[{good}, {bad}]" if form == "json" else f"{good}\n{bad}\n")
    kept, found = read(path)
    assert kept == ["t1"] and [one.why for one in found.left_out] == [admission.TWICE]
    assert f"two columns '{key}'; keep one" in found.left_out[0].first


@pytest.mark.parametrize("form", ("jsonl", "json"))
def test_a_key_of_the_same_name_in_another_object_is_not_the_text(tmp_path, form):
    """Written by hand, before the text: the row was left out as one without a text."""
    inside = {"": "", "a": [{"document": "k{"}, ["}"]], "metadata": {"context": 'q"'}, "b": {}}
    rows = [{"extra": inside, **row(1)}, {"extra": {"context": "k"}, **row(2)}]
    tasks = [task for task, _ in formats.read_any(write(tmp_path / f"t.{form}", rows))]
    assert ["".join(task.document.pieces()) for task in tasks] == ["text 1", "text 2"]
    assert [task.extra for task in tasks] == [inside, {"context": "k"}]


def test_rows_of_rulers_scripts_and_of_published_agents_are_judged_alike(tmp_path):
    good = {"index": 0, "input": "text\nwhat?", "outputs": ["x"], "length": 9}
    path = tmp_path / "vt" / "validation.jsonl"
    path.parent.mkdir()
    rows = [good, good | {"outputs": []}, good | {"input": None}]
    path.write_text("\n".join([*map(json.dumps, rows), '{"input": "a\\nb?", "input": "c\\nd?"}']))
    kept, found = read(path)
    assert len(kept) == 1
    reasons = [one.why for one in found.left_out]
    assert reasons == [admission.NO_GOLD, admission.NO_TEXT, admission.TWICE]
    rows = [{"context": "Rome", "input": q, "answers": a, "num_docs": 50}
            for q, a in (("q", ["x"]), (" ", ["x"]), ("q", [" "]), ("q", None))]  # fmt: skip
    kept, found = read(write(tmp_path / "eval_50.json", rows))
    assert kept == ["eval_50.json:1"]
    assert {one.why: one.count for one in found.left_out} == {
        admission.NO_QUESTION: 1, admission.NO_GOLD: 2,
    }  # fmt: skip


def test_what_json_cannot_hold_leaves_a_row_of_a_table_out(tmp_path):
    """A date in `extra` was a traceback of `build`, and of the step whose reward was handed it."""
    rows = [row(1, extra={"when": None}), row(2, extra={"when": datetime.date(2026, 1, 2)})]
    kept, found = read(write(tmp_path / "t.parquet", rows))
    assert kept == ["t1"] and [one.why for one in found.left_out] == [admission.TYPE]
    assert "t.parquet row 2: 'extra' must be numbers and texts" in found.left_out[0].first


def test_nulls_of_a_table_and_of_an_unused_text_say_nothing(tmp_path):
    rows = [row(1, metric=None, contract=None, id=None, length=None, source=None), row(2)]
    (task, length), _ = formats.read_any(write(tmp_path / "t.parquet", rows))
    assert (task.id, task.source, task.metric, task.contract, length) == (
        "t.parquet:1", "t", "sub_em", "auto", 0,
    )  # fmt: skip
    rows = [row(1, document=None, context="the text")]
    ((task, _),) = formats.read_any(write(tmp_path / "t.jsonl", rows))
    assert "".join(task.document.pieces()) == "the text"


# ---------------------------------------------------------------- the whole file


@pytest.mark.parametrize("between", ("", "\n", ",", " {} "))
def test_a_second_array_in_a_file_is_refused(tmp_path, between):
    """3 of 9 rows were read, and nothing was said."""
    path = tmp_path / "t.json"
    first, second = ([row(k) for k in ks] for ks in ((1, 2, 3), range(4, 10)))
    path.write_text(json.dumps(first) + between + json.dumps(second))
    with pytest.raises(ValueError, match="t.json goes on after its array of 3 rows, with .*jsonl"):
        read(path)
    path.write_text(json.dumps(first) + "\n \n")
    assert len(read(path)[0]) == 3


def test_two_columns_of_one_name_are_refused(tmp_path):
    """They were a KeyError."""
    columns = {**row(1), "answers": ["x"]}
    for twice in ("question", "document", "answers"):
        table = pyarrow.Table.from_pylist([columns])
        table = table.append_column(twice, table.column(twice))
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(ValueError, match=f"t.parquet has two columns '{twice}'; keep one"):
            read(tmp_path / "t.parquet")
    write(tmp_path / "t.parquet", [row(1, context="another text")])
    with pytest.raises(ValueError, match="has two columns of texts, document and context"):
        read(tmp_path / "t.parquet")


def test_a_text_that_is_not_unicode_is_found_before_any_step(tmp_path):
    good = pyarrow.Table.from_pylist([row(1), row(2)])
    broken = pyarrow.array([b"text", b"\xff\xfe"]).view(pyarrow.string())
    place = good.schema.get_field_index("document")
    pyarrow.parquet.write_table(good.set_column(place, "document", broken), tmp_path / "t.parquet")
    with pytest.raises(ValueError, match="t.parquet is no whole parquet file .*UTF") as refused:
        read(tmp_path / "t.parquet")
    assert "\n" not in str(refused.value)


def test_records_of_one_id_are_refused(tmp_path):
    path = write(tmp_path / "t.array_record", [row(1), row(2), row(1)])
    with pytest.raises(ValueError, match="record 3 has the id 't1' of record 1; ids must differ"):
        read(path)


# ---------------------------------------------------------------- files opened for training


def test_rows_left_out_are_part_of_what_a_file_is_known_by(tmp_path):
    paths = [write(tmp_path / f"{k}.array_record", [row(1), row(2, metric=metric), row(3)])
             for k, metric in enumerate(("em", "exact"))]  # fmt: skip
    found = RowCounts()
    opened = by_source(paths, SilentScreen(), found.leave_out)
    assert [len(opened.tasks[name]) for name in "01"] == [3, 2] and found.count == 1
    assert [task.id for task, _ in opened.tasks["1"]] == ["t1", "t3"]


@pytest.mark.parametrize("form, check", [("parquet", "blank"), ("array_record", "__getitem__")])
def test_a_large_file_is_not_checked_twice(tmp_path, monkeypatch, form, check):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    path = write(tmp_path / f"t.{form}", [row(k, document=f"text {k}" if k % 4 else "")
                                          for k in range(9)])  # fmt: skip
    owner = parquet.Texts if form == "parquet" else array_records.ArrayRecords
    whole, asked = getattr(owner, check), []

    def watched(self, *words):
        asked.append(words)
        return whole(self, *words)

    monkeypatch.setattr(owner, check, watched)

    def opened():
        asked.clear()
        found = RowCounts()
        kept = by_source([path], SilentScreen(), found.leave_out).tasks
        assert [len(own) for own in kept.values()] == [6]
        assert found.left_out[0].first.startswith(f"{path} ") and found.count == 3
        return len(asked)

    small = opened()
    assert small == opened()  # a small one is, and nothing is written
    assert not (tmp_path / "caches").exists()
    monkeypatch.setattr(admission, "LARGE", 1)
    opened()
    assert opened() < small
    path.rename(path.with_name(f"moved.{form}"))
    path = path.with_name(f"moved.{form}")
    assert opened() < small  # known by its bytes
    write(path, [row(k, document="" if 0 < k < 4 else "text") for k in range(9)])
    assert opened() == small  # others


# ---------------------------------------------------------------- rows of a program


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"metric": "exact"}, "row 2 of the dataset: there is no metric 'exact'; use one of em"),
        ({"contract": "loud", "metric": "em"}, "row 2 of the dataset: there is no contract 'loud'"),
        ({"answers": [" "]}, "row 2 of the dataset has a blank gold answer"),
        ({"question": "\n"}, "row 2 of the dataset has a blank question"),
    ],
)
def test_a_program_is_told_of_its_first_row_with_a_fault(tmp_path, changes, says):
    good = {"question": "q?", "answers": ["x"], "document": "text"}
    with pytest.raises(ValueError, match=says):
        datasets.write([good, good | changes], tmp_path / "dataset.jsonl")
    task = Task("t", "q?", TextDocument("text"), ("x",), "s", "exact")
    with pytest.raises(ValueError, match="row 1 of the dataset: there is no metric 'exact'"):
        datasets.write([task], tmp_path / "dataset.jsonl")
    with pytest.raises(ValueError, match="task 't': there is no metric 'exact'"):
        files.write(tmp_path / "rows.jsonl", [task], [1])
    assert not list(tmp_path.iterdir())
