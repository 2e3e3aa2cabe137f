"""Task files: what is written is read, lazily, in constant memory; what is wrong is named."""

import dataclasses
import itertools
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.data import files, long_strings
from notepad_jax.types import Evidence, Task, TaughtNote, TextDocument

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
FILLED = TEXTS.filter(str.strip)


@dataclasses.dataclass(frozen=True)
class Repeated:
    """A long document that is never one string."""

    text: str
    times: int

    def pieces(self):
        return itertools.repeat(self.text, self.times)


def task(name: str = "a", text: str = "some text", **changes) -> Task:
    task = Task(name, "what?", TextDocument(text), ("x", "y"), "test/s", "sub_em")
    return dataclasses.replace(task, **changes)


def text_of(task: Task) -> str:
    return "".join(task.document.pieces())


def without_document(task: Task) -> Task:
    return dataclasses.replace(task, document=TextDocument(""))


# ---------------------------------------------------------------- there and back


@settings(max_examples=60, deadline=None)
@given(
    FILLED,
    st.lists(TEXTS, max_size=4).filter(lambda pieces: "".join(pieces).strip()),
    st.lists(FILLED, min_size=1, max_size=3),
    st.lists(st.tuples(FILLED, st.floats(0, 1, exclude_max=True)), max_size=2),
    st.integers(0, 2**40),
)
@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_what_was_written_is_read(tmp_path_factory, kind, question, pieces, answers, facts, length):
    class Document:
        def pieces(self):
            return iter(pieces)

    path = tmp_path_factory.mktemp("files") / f"tasks.{kind}"
    evidence = tuple(Evidence(text, place) for text, place in facts)
    ours = Task("é", question, Document(), tuple(answers), "s", "em", "boxed", evidence)
    assert files.write(path, [ours], [length]) == 1
    ((theirs, told),) = files.read(path)
    assert without_document(theirs) == without_document(ours) and told == length
    assert text_of(theirs) == text_of(theirs) == "".join(pieces)


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 64])
def test_a_document_is_the_same_in_whatever_cut_it_is_read(tmp_path, monkeypatch, piece):
    text = 'a"b\\c\n\t\u0001é漢😀/\u2028 end'
    (tmp_path / "ascii.jsonl").write_text(json.dumps(row(document=text)))  # 😀 is \ud83d\ude00
    files.write(tmp_path / "plain.jsonl", [task(text=text)], [1])
    monkeypatch.setattr(long_strings, "PIECE", piece)
    for name in ("ascii.jsonl", "plain.jsonl"):
        for place in (tmp_path / name, f"file://{tmp_path / name}"):
            ((found, _),) = files.read(place)
            assert text_of(found) == text


@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_same_tasks_same_bytes_and_all_or_nothing(tmp_path, kind):
    def broken():
        yield task("a")
        raise RuntimeError("the maker failed")

    first, second = tmp_path / f"1.{kind}", tmp_path / f"2.{kind}"
    for path in (first, second):
        files.write(path, [task("a"), task("b")], itertools.repeat(7))
    assert first.read_bytes() == second.read_bytes()
    before = first.read_bytes()
    with pytest.raises(RuntimeError, match="the maker failed"):
        files.write(first, broken(), itertools.repeat(7))
    assert first.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [first.name, second.name]


def test_a_long_document_is_written_and_read_in_constant_memory(tmp_path):
    document = Repeated('A "long" document of 3.5 million tokens.\n' * 400, 1000)  # 16.4 MB
    path = tmp_path / "long.jsonl"
    tracemalloc.start()
    files.write(path, [task(document=document), task("b")], [3_500_000, 1])
    pairs = files.read(path)
    size = sum(map(len, pairs[0][0].document.pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size == 41 * 400 * 1000 and pairs[0][1] == 3_500_000
    assert text_of(pairs[1][0]) == "some text"
    # Measured 4.2 MB: a few copies of a block of 1 MB.
    assert peak < 8 << 20 < path.stat().st_size


def test_a_hundred_long_documents_are_read_at_once_in_little_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    files.write(path, [task(document=Repeated("many words \n" * 1000, 400))], [1])  # 5 MB
    ((found, _),) = files.read(path)
    tracemalloc.start()
    readings = [found.document.pieces() for _ in range(100)]
    sizes = [sum(len(next(reading)) for reading in readings) for _ in range(5)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(sizes)) <= 2 and sizes[0] > 100 * 60_000
    assert peak < 100 * 4 * long_strings.PIECE  # measured 13 MB; the texts have 480


def test_a_script_of_good_notes_comes_back_as_it_was(tmp_path):
    script = (TaughtNote("Ann is red.", "red"), TaughtNote("Bob is\nblue.", 'red, "blue"'))
    path = tmp_path / "t.jsonl"
    files.write(path, [dataclasses.replace(task(), script=script), task("b")], [1, 1])
    (one, _), (two, _) = files.read(path)
    assert one.script == script and two.script == ()


# ---------------------------------------------------------------- rows by other hands


def row(**changes) -> dict:
    good = {
        "id": "a", "question": "q?", "answers": ["x"], "source": "s", "metric": "em",
        "contract": "plain", "length": 5, "evidence": [["x", 0.5]], "document": "text",
    }  # fmt: skip
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def test_the_order_of_columns_and_spaces_does_not_matter(tmp_path):
    first = json.dumps(dict(reversed(row(question='a "document": "b" c').items())))
    second = json.dumps(row(id="b", contract=..., length=..., evidence=...), separators=(",", ":"))
    third = json.dumps(row(id="c")).replace('"document": ', '"document" :\t')
    path = tmp_path / "t.jsonl"
    path.write_text(f"\n{first}\r\n\n{second}\n{third}")
    (one, _), (two, length), (three, _) = files.read(path)
    assert text_of(one) == text_of(two) == text_of(three) == "text"
    assert one.question == 'a "document": "b" c'
    assert (two.contract, two.evidence, length) == ("plain", (), 0)


BAD_ROWS = [
    (row(document=...), "has no column 'document' or 'context'; it has id, question"),
    (row(question=...), "has no column 'question'"),
    (row(answers=...), "has no column 'answers'; it has"),
    (row(document=""), "has an empty document"),
    (row(document=" \n\t"), "has an empty document"),
    (row(document=5), "'document' must be a text"),
    (row(answers=[]), "has no gold answer"),
    (row(answers=""), "'answers' must be a list of strings, it is ''"),
    (row(answers=[1]), "'answers' must be a list of strings"),
    (row(id=7), "'id' must be a text, it is 7"),
    (row(source=""), "'source' must be a text"),
    (row(contract=None), "'contract' must be a text"),
    (row(length=2.5), "'length' must be a number of tokens"),
    (row(length=-1), "'length' must be a number of tokens"),
    (row(length=True), "'length' must be a number of tokens"),
    (row(evidence=[["x", 1.0]]), "'evidence' must be a list of"),
    (row(evidence=[["x"]]), "'evidence' must be a list of"),
    (row(evidence=[["x", 0.1], [" ", 0.1]]), "has evidence without a word; give the words"),
    (row(evidence={"x": 0}), "'evidence' must be a list of"),
    (row(note_script=[["x"]]), "'note_script' must be a list of"),
    (row(note_script=[["x", 1]]), "'note_script' must be a list of"),
    (row(note_script="x"), "'note_script' must be a list of"),
]


@pytest.mark.parametrize("bad, message", BAD_ROWS)
def test_a_bad_row_is_named_in_one_line(tmp_path, bad, message):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row(id="first")) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=f"t.jsonl row 2.*{message}") as caught:
        files.read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


GOOD = json.dumps(row()).encode()


@pytest.mark.parametrize(
    "content, message",
    [
        (GOOD[:-3], r"row 1 is cut short inside its document \(byte \d+ of the file\)"),
        (GOOD[:-1], "row 1 is not JSON"),
        (GOOD[:40], "row 1 is not JSON"),
        (GOOD + b"x", "row 1 is not JSON: Extra data"),
        (GOOD.replace(b"text", b"te\nxt"), "row 1 is cut short"),
        (GOOD.replace(b"text", b"te\x01xt"), "a raw control character"),
        (GOOD.replace(b"text", b"te\\qxt"), "a wrong escape"),
        (GOOD.replace(b"text", b"\\ud83d alone"), "half a surrogate pair"),
        # The document begins at byte 152 of this row.
        (GOOD.replace(b"text", b"\xc3"), r"row 1 is not UTF-8 \(byte 152 of the file\)"),
        (GOOD.replace(b"q?", b"\xff"), "row 1 is not UTF-8"),
        (GOOD + b"\n" + GOOD, "row 2 has the id 'a' of row 1"),
        (GOOD[:-1] + b', "id": "b"}', "row 1 has two columns 'id'"),
        (GOOD[:-1] + b', "document": "again"}', "row 1 has two columns 'document'"),
        (b'{"a": {"document": "nested"}}', "row 1 has no column 'document' or 'context'; it has a"),
        (b"[1, 2]", "row 1 is list, not an object"),
        (b"[" * 100_000, "row 1 is not JSON: nested too deeply"),
        (b"", "has no tasks"),
        (b"\n\n", "has no tasks"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"t.jsonl.*{message}") as caught:
        files.read(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "t.jsonl"
    whole = b"\n".join(json.dumps(row(id=name, document='é\n"x" 😀 \\')).encode() for name in "ab")
    at = data.draw(st.integers(0, len(whole)))
    until = data.draw(st.integers(at, min(len(whole), at + 40)))
    put = data.draw(st.binary(max_size=6) | st.sampled_from([b'"', b"\\", b"\n", b"{", b"\\ud83d"]))
    path.write_bytes(whole[:at] + put + whole[until:])
    try:
        pairs = files.read(path)
    except ValueError as problem:
        assert str(path) in str(problem) and "\n" not in str(problem)
    else:
        assert all(text_of(task).strip() for task, _ in pairs)


def test_a_long_row_without_a_document_costs_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(long_strings, "METADATA_LIMIT", 2 << 20)
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"id": "' + b"x" * (20 << 20))
    tracemalloc.start()
    with pytest.raises(ValueError, match="no .document. within 2,097,152 bytes"):
        files.read(path)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()


def test_a_file_that_changed_since_is_not_read_as_something_else(tmp_path):
    path = tmp_path / "t.jsonl"
    files.write(path, [task(text="first words " * 99)], [1])
    ((found, _),) = files.read(path)
    for content in (b'"' * 5000, b"\xff" * 5000, b"\\x" * 2500, b"short"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="changed after it was opened|cut short"):
            text_of(found)


# ---------------------------------------------------------------- what is not written


@pytest.mark.parametrize(
    "tasks, lengths, message",
    [
        ([task("a"), task("a")], [1, 1], "two tasks have the id 'a'"),
        ([task("a"), task("b")], [1], r"more tasks than lengths \(1\)"),
        ([task(text=" \n")], [1], "task 'a' has an empty document"),
        ([task(text="\ud83d")], [1], "task 'a' holds half a surrogate pair"),
        ([task(question="")], [1], "task 'a' has a blank question"),
    ],
)
def test_what_no_reader_would_take_is_not_written(tmp_path, tasks, lengths, message):
    path = tmp_path / "t.jsonl"
    with pytest.raises(ValueError, match=message):
        files.write(path, tasks, lengths)
    assert not list(tmp_path.iterdir())


def test_other_paths_are_refused(tmp_path):
    with pytest.raises(ValueError, match="must end in .jsonl or .array_record"):
        files.write(tmp_path / "t.txt", [task()], [1])
    with pytest.raises(ValueError, match="on a local disk"):
        files.write("gs://bucket/t.jsonl", [task()], [1])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/t.jsonl cannot be written: "):
        files.write(tmp_path / "file" / "t.jsonl", [task()], [1])
    with pytest.raises(ValueError, match="t.jsonl is missing"):
        files.read(tmp_path / "t.jsonl")


# ---------------------------------------------------------------- ArrayRecord


def test_array_records_are_read_by_number(tmp_path):
    path = tmp_path / "t.array_record"
    files.write(path, [task(str(i), f"text {i}") for i in range(20)], range(20))
    found = files.read(path)
    assert [pair[0].id for pair in found] == [str(i) for i in range(20)]
    assert text_of(found[-1][0]) == "text 19" and found[7][1] == 7
    with pytest.raises(IndexError, match="has 20 tasks"):
        found[20]


def test_a_broken_array_record_is_one_line(tmp_path):
    path = tmp_path / "t.array_record"
    files.write(path, [task(str(i), "text " * 9999) for i in range(9)], itertools.repeat(1))
    whole = path.read_bytes()
    broken = [whole[: len(whole) // 2], b"x" * 10, b"y" * (1 << 17), whole[:200] + bytes(1 << 17)]
    for content in broken:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="t.array_record") as caught:
            list(files.read(path))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="none.array_record is missing"):
        files.read(tmp_path / "none.array_record")
