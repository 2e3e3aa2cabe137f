"""Task files are known by their bytes, and questions that are too long before any step."""

import dataclasses
import hashlib
import itertools
import json
import shutil

import pytest
from array_record.python import array_record_module

from notepad_jax.data import files, formats, task_sources
from notepad_jax.data.records import generated, of_files
from notepad_jax.data.task_sources import LongQuestions, by_source, without_long_questions
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import Task, TextDocument

KINDS = ("jsonl", "array_record")


def words(text: str) -> int:
    return len(text.split())


def tasks(source: str, count: int, **changes) -> list[Task]:
    """Tasks whose k-th question has k + 1 words."""
    return [
        dataclasses.replace(
            Task(f"{source}{k}", " ".join(["why"] * (k + 1)), TextDocument(f"text {k}"), ("x",),
                 source, "em"),
            **changes,
        )
        for k in range(count)
    ]  # fmt: skip


def written(path, *found: Task):
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, found, itertools.repeat(1))
    return path


def opened(*paths):
    return by_source(paths, SilentScreen())


def stream(*paths, seed=3, limit=None, weights=None):
    sources = opened(*paths)
    if limit is not None:
        sources, _ = without_long_questions(sources, words, limit, weights or {}, SilentScreen())
    return of_files(sources, seed, weights)


def saved(records):
    """The identity as a checkpoint brings it back."""
    return json.loads(json.dumps(records.identity))


def refusal(records, identity) -> str:
    with pytest.raises(ValueError) as caught:
        records.check(identity)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Watched(SilentScreen):
    """Writes down the bars that were begun, and how far they came."""

    def __init__(self) -> None:
        self.bars: list[list] = []

    def bar(self, label, total, unit=""):
        self.bars.append([label, total, unit, 0])
        return self

    def advance(self, amount=1, **shown) -> None:
        self.bars[-1][3] += amount


# ---------------------------------------------------------------- the same files by their bytes


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_is_refused_by_the_files_name(tmp_path, kind):
    """Same ids, same number of tasks: the stream went on with other documents and answers."""
    path = written(tmp_path / f"a.{kind}", *tasks("a", 4))
    other = written(tmp_path / f"b.{kind}", *tasks("b", 4))
    records = stream(path, other)
    state = saved(records)
    stream(path, other).check(state)
    good = tasks("a", 4)
    for changed in (
        [*good[:2], dataclasses.replace(good[2], document=TextDocument("texT 2")), good[3]],
        [*good[:3], dataclasses.replace(good[3], answers=("y",))],
        [good[1], good[0], *good[2:]],
        [*good, *tasks("a", 5)[4:]],
    ):
        written(path, *changed)
        message = refusal(stream(path, other), state)
        assert f"{path} (source 'a')" in message and "its bytes or its ids differ" in message
    written(path, *good)
    stream(path, other).check(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_moved_is_the_same(tmp_path, kind):
    state = saved(stream(written(tmp_path / f"a.{kind}", *tasks("a", 4))))
    (tmp_path / "elsewhere").mkdir()
    shutil.move(tmp_path / f"a.{kind}", tmp_path / "elsewhere")
    stream(tmp_path / "elsewhere" / f"a.{kind}").check(state)


def test_the_digest_is_that_of_the_bytes_and_ids_from_a_disk_or_a_bucket(tmp_path):
    path = written(tmp_path / "a.jsonl", *tasks("a", 3))
    expected = hashlib.sha256(path.read_bytes() + b'"a0""a1""a2"').hexdigest()[:32]
    for place in (path, f"file://{path}"):
        ((file,),) = opened(place).files.values()
        assert file.digest == expected and file.path == str(place)


def test_every_form_shows_each_byte_once_while_it_is_read(tmp_path):
    ruler = tmp_path / "vt" / "validation.jsonl"
    ruler.parent.mkdir()
    rows = [{"index": k, "input": "text\nwhat?", "outputs": ["x"], "length": 9} for k in range(5)]
    ruler.write_text("\n".join(map(json.dumps, rows)))
    for path in (ruler, *(written(tmp_path / f"a.{kind}", *tasks("a", 9)) for kind in KINDS)):
        seen = bytearray()
        formats.read_any(path, seen.extend)
        assert bytes(seen) == path.read_bytes()


def test_a_published_file_with_a_column_beside_stays_one(tmp_path):
    row = {"index": 0, "input": "text\nwhat?", "outputs": ["x"], "length": 9, "extra": {"k": 1}}
    path = tmp_path / "niah_single_1.jsonl"
    path.write_text(json.dumps(row))
    assert len(formats.read_any(path)) == 1


def test_ruler_files_whose_path_tells_other_ids_are_others(tmp_path):
    row = json.dumps({"index": 0, "input": "text\nwhat?", "outputs": ["x"], "length": 9})
    states = []
    for length in ("1024", "2048", "elsewhere/2048"):
        path = tmp_path / length / "vt" / "validation.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(row)
        states.append((stream(path), saved(stream(path))))
    assert "its ids differ" in refusal(states[0][0], states[1][1])
    states[2][0].check(states[1][1])


def test_files_of_one_source_are_compared_in_their_order(tmp_path):
    one = written(tmp_path / "1.jsonl", *tasks("a", 2))
    two = written(tmp_path / "2.jsonl", *tasks("a", 4)[2:])
    state = saved(stream(one, two))
    assert "stand in another order" in refusal(stream(two, one), state)
    assert "has 1 files, and had 2" in refusal(stream(one), state)
    other = written(tmp_path / "3.jsonl", *tasks("b", 2))
    both = saved(stream(one, other))
    stream(other, one).check(both)  # no source's tasks stand otherwise
    assert "saved with weights" in refusal(stream(one), both)
    written(other, *tasks("b", 3))  # of weight 0: never drawn, never compared
    stream(one, other, weights={"b": 0}).check(saved(stream(one)))


def test_files_and_generated_documents_are_told_apart(tmp_path):
    ours = stream(written(tmp_path / "a.jsonl", *tasks("a", 2)))
    made = generated(lambda seed: tuple(tasks("a", 1)), 3)
    assert "draws generated documents, and this one draws tasks out of files" in refusal(
        ours, saved(made)
    )
    assert "draws tasks out of files, and this one draws generated" in refusal(made, saved(ours))
    assert "begin a new run" in refusal(ours, {**ours.identity, "files": "77aa"})


# ---------------------------------------------------------------- questions that are too long


@pytest.mark.parametrize("kind", KINDS)
def test_long_questions_are_left_out_and_told_and_the_others_keep_their_order(tmp_path, kind):
    a = written(tmp_path / f"a.{kind}", *tasks("a", 9))
    b = written(tmp_path / f"b.{kind}", *tasks("b", 3))
    kept, report = without_long_questions(opened(a, b), words, 4, {}, SilentScreen())
    assert report == (LongQuestions("a", count=5, total=9, longest_id="a8", longest=9),)
    assert [task.id for task, _ in kept.tasks["a"]] == ["a0", "a1", "a2", "a3"]
    assert [task.id for task, _ in kept.tasks["b"]] == ["b0", "b1", "b2"]
    with pytest.raises(IndexError):
        kept.tasks["a"][4]
    drawn = {of_files(kept, 0).at(ordinal)[0].id for ordinal in range(40)}
    assert drawn == {"a0", "a1", "a2", "a3", "b0", "b1", "b2"}


def test_a_limit_that_leaves_nothing_of_a_source_is_refused(tmp_path):
    long = written(tmp_path / "a.jsonl", *tasks("a", 2, question="who said what and when ?"))
    short = written(tmp_path / "b.jsonl", *tasks("b", 2))
    sources = opened(long, short)
    message = r"all 2 questions of source 'a' have more than 3 tokens \(the longest, task 'a0', 6\)"
    with pytest.raises(ValueError, match=message):
        without_long_questions(sources, words, 3, {}, SilentScreen())
    kept, report = without_long_questions(sources, words, 3, {"a": 0}, SilentScreen())
    assert report == () and of_files(kept, 0, {"a": 0}).at(0)[0].source == "b"
    with pytest.raises(ValueError, match="no source 'z' to weigh"):
        without_long_questions(sources, words, 3, {"z": 1}, SilentScreen())


def test_another_limit_is_another_stream_only_where_it_leaves_out_others(tmp_path):
    path = written(tmp_path / "a.jsonl", *tasks("a", 9))
    state = saved(stream(path, limit=4))
    stream(path, limit=4).check(state)
    message = refusal(stream(path, limit=6), state)
    assert (
        "more than 4 tokens left out (a 5), and the run leaves out those of more than 6 (a 3)"
        in (message)
    )
    assert "reading.max_question" in message
    stream(path, limit=50).check(saved(stream(path, limit=9)))


@pytest.mark.parametrize("kind", KINDS)
def test_whoever_waits_sees_a_bar_and_nobody_else(tmp_path, monkeypatch, kind):
    path, screen = written(tmp_path / f"a.{kind}", *tasks("a", 5)), Watched()
    without_long_questions(by_source([path], screen), words, 3, {}, screen)
    assert screen.bars == []
    monkeypatch.setattr(task_sources, "PATIENCE", -1.0)
    without_long_questions(by_source([path], screen), words, 3, {}, screen)
    size = path.stat().st_size
    assert screen.bars == [
        [f"opening a.{kind}", size, "bytes", size],
        ["questions of a", 5, "tasks", 5],
    ]


# ---------------------------------------------------------------- rows that were mended


@pytest.mark.parametrize("kind", KINDS)
def test_mended_rows_are_taken_where_somebody_says_so(tmp_path, kind):
    path = written(tmp_path / f"a.{kind}", *tasks("a", 4))
    state = saved(stream(path))
    good = tasks("a", 4)
    mend = dataclasses.replace(good[2], document=TextDocument("mended"), answers=("y",))
    written(path, *good[:2], mend, good[3])
    now = stream(path)
    assert "if its rows were mended where they stand, with --mended" in refusal(now, state)
    now.check(state, mended=True)
    whole = {now.at(ordinal)[0].id: now.at(ordinal)[0] for ordinal in range(4)}
    assert "".join(whole["a2"].document.pieces()) == "mended"
    for other in ([*good, *tasks("a", 5)[4:]], good[:3]):
        written(path, *other)
        with pytest.raises(ValueError, match="none may come, go or change sides") as refused:
            stream(path).check(state, mended=True)
        assert f"{len(other)} tasks to draw from, and had 4" in str(refused.value)
    written(path, good[1], good[0], *good[2:])
    if kind == "jsonl":  # of records only their number is known
        with pytest.raises(ValueError, match="they are others or in another order"):
            stream(path).check(state, mended=True)
    older = {name: value for name, value in state.items() if name != "tasks"}
    with pytest.raises(ValueError, match="a version that did not take down which tasks"):
        stream(path).check(older, mended=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_was_left_out_stays_so_when_it_is_mended(tmp_path, kind):
    """Every ordinal keeps its row: with one row more the stream would be another."""
    good = tasks("a", 5)
    path = written(tmp_path / f"a.{kind}", *good)
    whole = path.read_bytes()
    faulty = whole.replace(b'"a1", "question": "why why"', b'"a1", "question": "       "')
    assert faulty != whole or kind == "array_record"
    if kind == "array_record":
        path = written(tmp_path / "b.jsonl", *good)
        rows = path.read_text().splitlines()
        rows[1] = rows[1].replace("why why", "       ")
        writer = array_record_module.ArrayRecordWriter(str(tmp_path / f"a.{kind}"), "group_size:1")
        for row in rows:
            writer.write(row.encode())
        writer.close()
        path = tmp_path / f"a.{kind}"
    else:
        path.write_bytes(faulty)
    first = by_source([path], SilentScreen(), lambda fault: None)
    (file,) = first.files["a"]
    assert (file.rows, file.left_out) == (5, (1,))
    state = saved(of_files(first, 3))
    written(path, *good)
    again = by_source([path], SilentScreen(), lambda fault: None, [file.left_out])
    assert again.files["a"][0].left_out == (1,)
    of_files(again, 3).check(state, mended=True)
    drawn = [of_files(again, 3).at(ordinal)[0].id for ordinal in range(8)]
    assert drawn == [of_files(first, 3).at(ordinal)[0].id for ordinal in range(8)]
    assert "a1" not in drawn
