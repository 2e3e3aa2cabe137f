"""Files as suites: every row is read, in bands that the file alone decides; one-line errors."""

import itertools
import json

import pytest

from notepad_jax.data import files
from notepad_jax.tasks import file_suite
from notepad_jax.types import Task, TextDocument

RULER = {"index": -1, "input": "text\nwhat?", "outputs": ["x"], "length": 999}


def words(text: str) -> int:
    return len(text.split())


def task(name: str, length: int = 5, source: str = "mine") -> Task:
    return Task(name, "what?", TextDocument("word " * length), ("x",), source, "em")


def read(path, lengths=(), wanted=(), samples=0):
    return file_suite.read(str(path), lengths, wanted, samples, words)


def sizes(found) -> dict[int, int]:
    return {length: len(tasks) for length, tasks in found.tasks.items()}


def ruler(path, rows: int):
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([json.dumps(RULER)] * rows))


# ---------------------------------------------------------------- which rows, which bands


def test_every_row_is_read_and_measured_where_nobody_said_its_length(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [dict(question="q", answers="x", document="word " * n) for n in (3, 4, 5, 100, 130)]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read(path)
    # 4 and 130 words are 4 and, by no more than 2%, 128.
    assert sizes(found) == {4: 2, 8: 1, 128: 2} and (found.rows, found.elsewhere) == (5, 0)


@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
@pytest.mark.parametrize("length", [0, 7168])
def test_rows_about_one_text_share_its_document_which_is_counted_once(tmp_path, kind, length):
    """Every row was about a document of its own: tokenised, read and counted as one."""
    path, counted = tmp_path / f"mine.{kind}", []
    rows = [task(str(k), length=3 + k % 2) for k in range(6)]
    files.write(path, rows, itertools.repeat(length))

    def count(text: str) -> int:
        counted.append(text)
        return words(text)

    every = file_suite.read(str(path), (), (), 0, count).tasks.values()
    documents = {id(one.document): one.document for own in every for one in own}
    assert sorted(len("".join(d.pieces()).split()) for d in documents.values()) == [3, 4]
    assert len(counted) == (0 if length else 2)


@pytest.mark.parametrize("length", [0, 7168])
def test_a_document_with_many_questions_is_read_for_the_first(tmp_path, monkeypatch, length):
    class Counted:
        reads = 0

        def pieces(self):
            self.reads += 1
            yield "word " * 5

    document = Counted()
    tasks = [Task(str(k), "what?", document, ("x",), "mine", "em") for k in range(20)]
    monkeypatch.setattr(
        file_suite.formats, "read_any", lambda *_, **__: [(t, length) for t in tasks]
    )
    read(tmp_path / "mine.jsonl")
    assert document.reads == (1 if length else 2)  # compared, and counted


@pytest.mark.parametrize("kind", ["jsonl", "array_record"])
def test_a_file_that_was_made_for_one_length_is_a_band_of_it(tmp_path, kind):
    path = tmp_path / f"vt-7k.{kind}"
    files.write(path, [task(str(k)) for k in range(9)], itertools.repeat(7168))
    found = read(path)
    assert sizes(found) == {7168: 9} == sizes(read(path, [7168]))
    texts = ["".join(task.document.pieces()) for task in found.tasks[7168]]
    assert texts == ["word " * 5] * 9


def test_a_file_made_by_paragraphs_keeps_all_of_its_rows(tmp_path):
    """Half of them were dropped without a word: they are a little longer than was asked for."""
    path = tmp_path / "hotpotqa-200paragraphs.jsonl"
    lengths = [25_900, 27_000, 28_000, 28_672, 29_500, 30_200, 31_400]
    files.write(path, [task(str(k)) for k in range(7)], lengths)
    assert sizes(read(path)) == {32_768: 7} and sizes(read(path, [28_672])) == {28_672: 7}


def test_what_has_none_of_the_lengths_is_counted_and_the_nearest_is_taken(tmp_path):
    path = tmp_path / "t.jsonl"
    files.write(path, [task(str(k)) for k in range(4)], [1000, 7168, 8192, 9000])
    found = read(path, [7168, 8192])
    assert sizes(found) == {7168: 1, 8192: 2} and (found.rows, found.elsewhere) == (4, 1)
    with pytest.raises(ValueError, match="no document of 512 tokens; they have 1,024, 8,192, 16,3"):
        read(path, [512])


def test_samples_are_the_first_of_each_task_and_length(tmp_path):
    tasks = [task(f"{source}{k}", source=source) for source in ("a", "b") for k in range(5)]
    files.write(tmp_path / "t.jsonl", tasks, [*[512] * 5, *[1024] * 5])
    found = read(tmp_path / "t.jsonl", samples=2)
    assert [t.id for t in found.tasks[512]] == ["a0", "a1"] and sizes(found)[1024] == 2
    assert sizes(read(tmp_path / "t.jsonl", wanted=["b"])) == {1024: 5}


def test_bands_do_not_depend_on_what_else_is_read(tmp_path):
    """Going on with more tasks, a reading is found by its length."""
    tasks = [task("a", source="a"), task("b", source="b"), task("c", source="b")]
    files.write(tmp_path / "t.jsonl", tasks, [700, 7168, 7168])
    assert sizes(read(tmp_path / "t.jsonl", wanted=["b"])) == {8192: 2}
    assert sizes(read(tmp_path / "t.jsonl")) == {1024: 1, 8192: 2}


# ---------------------------------------------------------------- folders


def test_rows_of_a_folder_are_named_by_file_and_number(tmp_path):
    """Two models' files of one task have the same names, and NVIDIA's `index` repeats."""
    for model in ("llama", "qwen"):
        ruler(tmp_path / model / "4096" / "data" / "niah_single_1" / "validation.jsonl", 2)
        ruler(tmp_path / model / "4096" / "pred" / "niah_single_1.jsonl", 1)  # not asked again
    (tmp_path / "build.json").write_text('{"suite": "ruler"}')
    (tmp_path / "unknown-vt.json").write_text("[1, 2]")
    (mine := tmp_path / "mine.json").write_text(
        json.dumps([{"question": "q", "answers": ["x"], "context": "a b"}])
    )
    found = read(tmp_path)
    place = "4096/data/niah_single_1/validation.jsonl"
    assert [t.id for t in found.tasks[4096]] == [
        f"llama/{place}:1", f"llama/{place}:2", f"qwen/{place}:1", f"qwen/{place}:2"
    ]  # fmt: skip
    assert [t.id for t in found.tasks[2]] == ["mine.json:1"]
    assert [t.id for t in read(mine).tasks[2]] == ["mine.json:1"]


def test_a_folder_reads_every_file_that_is_read_by_itself(tmp_path):
    """Capitals in a name, and the mark that some editors put first, left a file out unsaid."""
    row = json.dumps({"question": "q", "answers": ["x"], "context": "a b"})
    (tmp_path / "MINE.JSONL").write_text(row)
    (tmp_path / "marked.json").write_text(f"[{row}]", encoding="utf-8-sig")
    (tmp_path / "folder.json").mkdir()  # opening it was a traceback
    assert [t.id for t in read(tmp_path).tasks[2]] == ["MINE.JSONL:1", "marked.json:1"]
    (gone := tmp_path / "gone.json").symlink_to(tmp_path / "moved.json")
    with pytest.raises(ValueError, match=f"{gone} is missing"):
        read(tmp_path)


def test_a_damaged_file_of_another_task_does_not_stop_the_one_asked_for(tmp_path):
    ruler(tmp_path / "4096" / "data" / "vt" / "validation.jsonl", 2)
    ruler(bad := tmp_path / "4096" / "data" / "cwe" / "validation.jsonl", 1)
    bad.write_text(bad.read_text()[:-5])
    found = read(tmp_path, wanted=["vt"])
    assert sizes(found) == {4096: 2} and len(found.damaged) == 1
    assert f"{bad} line 1 is not JSON" in found.damaged[0]
    for wanted in (["cwe"], ["ruler/cwe"], ["vt", "cwe"], []):
        with pytest.raises(ValueError, match="cwe/validation.jsonl line 1 is not JSON"):
            read(tmp_path, wanted=wanted)
    with pytest.raises(ValueError, match="has no task of fwe; not read: .*cwe"):
        read(tmp_path, wanted=["fwe"])


def test_two_tasks_of_one_id_at_one_length_are_named_with_their_files(tmp_path):
    for name in ("a", "b"):
        files.write(tmp_path / f"{name}.jsonl", [task("same")], [512])
    with pytest.raises(ValueError, match="b.jsonl has task 'same', and so has .*a.jsonl; rename"):
        read(tmp_path)
    with pytest.raises(ValueError, match="holds no files of tasks"):
        (tmp_path / "empty").mkdir()
        read(tmp_path / "empty")
