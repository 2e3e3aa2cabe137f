"""Held out means held out: no twin and no document on both sides, whatever else is in the files."""

import dataclasses
import itertools
import json
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.data import admission, files, held_out
from notepad_jax.data.records import of_files
from notepad_jax.data.task_sources import TaskFile, TaskSources, by_source
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.types import Task, TextDocument


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A text in the pieces that a file gives it in."""

    parts: tuple[str, ...]

    def pieces(self):
        return iter(self.parts)


def stored(tasks: dict[str, list[Task]]) -> TaskSources:
    pairs = {name: [(task, 1) for task in own] for name, own in tasks.items()}
    return TaskSources(pairs, {name: (TaskFile(name, name),) for name in tasks})


def row(question: int, document: str, answer: str = "x", spaced: bool = False) -> Task:
    text = " " + document.replace(" ", "\n ") + "\n" if spaced else document
    said = f"what is  {question} ? " if spaced else f"what is {question} ?"
    return Task("", said, TextDocument(text), (f"{answer} " if spaced else answer,), "s", "em")


def words(task: Task):
    return " ".join(task.question.split()), tuple(sorted(gold.strip() for gold in task.answers))


def text(task: Task) -> str:
    return " ".join("".join(task.document.pieces()).split())


def split(tasks: dict[str, list[Task]], share: float = 0.5):
    """Returns (drawn, held out), by id; None where nothing would be left on a side."""
    try:
        kept, held = held_out.split(stored(tasks), share, {}, SilentScreen())
    except ValueError as problem:
        assert "validation.split" in str(problem) and "\n" not in str(problem)
        return None
    return tuple(
        {task.id: task for pairs in side.values() for task, _ in pairs}
        for side in (kept.tasks, held)
    )


@st.composite
def sources(draw) -> dict[str, list[Task]]:
    """A few sources of rows that share documents and questions, some in other white space."""
    made: dict[str, list[Task]] = {}
    numbers = st.integers(0, 5)
    for name in draw(st.lists(st.sampled_from("abc"), min_size=1, unique=True)):
        found = draw(st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=9))
        made[name] = [
            dataclasses.replace(row(q, f"text number {d}", spaced=s), id=f"{name}{k}", source=name)
            for k, (q, d, s) in enumerate(found)
        ]
    return made


@settings(max_examples=60, deadline=None)
@given(sources(), st.sampled_from([0.2, 0.5, 0.8]))
def test_no_twin_and_no_document_is_on_both_sides(tasks, share):
    found = split(tasks, share)
    if found is None:
        return
    drawn, held = found
    assert held and not set(map(words, drawn.values())) & set(map(words, held.values()))
    assert not set(map(text, drawn.values())) & set(map(text, held.values()))
    every = {task.id: task for own in tasks.values() for task in own}
    withheld = every.keys() - drawn.keys() - held.keys()  # they ask what is held out
    assert {words(every[one]) for one in withheld} <= set(map(words, held.values()))


@settings(max_examples=60, deadline=None)
@given(sources(), sources(), st.randoms())
def test_a_side_follows_neither_from_order_nor_from_what_else_there_is(tasks, more, random):
    if (before := split(tasks)) is None:
        return
    others = {
        f"more {name}": [dataclasses.replace(task, id=f"more {task.id}") for task in own]
        for name, own in more.items()
    }
    shuffled = {name: random.sample(own, len(own)) for name, own in reversed(tasks.items())}
    assert split(shuffled) == before
    if (after := split({**shuffled, **others})) is None:
        return
    (drawn, held), (drawn_now, held_now) = before, after
    assert held.keys() <= held_now.keys() and not held.keys() & drawn_now.keys()
    assert not drawn.keys() & held_now.keys()  # what was trained on never becomes held out


def test_rows_that_stand_in_two_sources_are_on_one_side(tmp_path):
    """Each source held out its own lowest share: 4 of 104 rows were on both sides."""
    rows = [dataclasses.replace(row(k, f"text {k} " * 9), id=str(k)) for k in range(104)]
    for name, own in (("a", rows), ("b", rows[::3]), ("c", rows[1::5])):
        again = [dataclasses.replace(task, id=f"{name}{task.id}", source=name) for task in own]
        files.write(tmp_path / f"{name}.jsonl", again, itertools.repeat(9))
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    opened = by_source(paths, SilentScreen())
    for share in (0.05, 0.1, 0.3):
        kept, held = held_out.split(opened, share, {}, SilentScreen())
        asked, read = (
            {task.question for pairs in side.values() for task, _ in pairs}
            for side in (kept.tasks, held)
        )
        assert read and not asked & read and len(asked | read) == 104
        assert kept.held_out == {name: len(pairs) for name, pairs in held.items()}
        assert kept.withheld == {}
    records = of_files(kept, 0)
    assert not {records.at(k)[0].question for k in range(400)} & read
    # The share is one of documents: 31 of 104 are expected, and 9.4 is two deviations.
    assert abs(len(read) - 31) < 10


def test_a_question_that_is_held_out_with_another_document_is_withheld_and_counted():
    tasks = {"a": [row(k % 20, f"text {k}") for k in range(60)]}
    tasks["a"] = [dataclasses.replace(task, id=str(k)) for k, task in enumerate(tasks["a"])]
    kept, held = held_out.split(stored(tasks), 0.2, {}, SilentScreen())
    lost = 60 - len(kept.tasks["a"]) - len(held["a"])
    assert kept.withheld == {"a": lost} and lost > 0


def test_where_nothing_would_be_left_on_a_side_it_is_said_with_numbers():
    book = {"book": [dataclasses.replace(row(k, "the book"), id=str(k)) for k in range(40)]}
    says = []
    for share in (0.0001, 0.9999):
        with pytest.raises(ValueError, match="name held-out tasks of their own") as refused:
            held_out.split(stored(book), share, {}, SilentScreen())
        says.append(str(refused.value))
    assert "holds out none of the 1 documents" in says[0] and "stay on one side" in says[0]
    assert "(validation.split_by=questions)" in says[0]
    assert "source 'book' has 40 tasks about 1 documents, of which 40 tasks would" in says[1]
    few = {"a": [dataclasses.replace(row(k, f"text {k}"), id=str(k)) for k in range(9)]}
    with pytest.raises(ValueError, match=r"from validation.split=(0\.\d+) on one is") as refused:
        held_out.split(stored(few), 1e-6, {}, SilentScreen())
    least = float(str(refused.value).partition("from validation.split=")[2].split()[0])
    assert len(held_out.split(stored(few), least, {}, SilentScreen())[1]["a"]) == 1


def test_questions_may_be_held_out_of_few_documents_and_what_is_shared_is_counted():
    book = {"book": [dataclasses.replace(row(k, "the book"), id=str(k)) for k in range(40)]}
    book["book"].append(dataclasses.replace(row(7, "the book", spaced=True), id="twin"))
    kept, held = held_out.split(stored(book), 0.3, {}, SilentScreen(), held_out.QUESTIONS)
    sides = [{task.id for task, _ in side["book"]} for side in (kept.tasks, held)]
    assert sides[0] | sides[1] == {task.id for task in book["book"]}
    assert not sides[0] & sides[1] and not any(len(side & {"7", "twin"}) == 1 for side in sides)
    assert kept.shared == len(sides[1]) > 3 and kept.held_out_by == "questions"


def test_a_run_does_not_go_on_with_another_split_or_an_older_kind_of_one():
    tasks = {"a": [dataclasses.replace(row(k, f"text {k}"), id=str(k)) for k in range(20)]}
    whole = of_files(stored(tasks), 0)
    parted = of_files(held_out.split(stored(tasks), 0.3, {}, SilentScreen())[0], 0)
    parted.check(parted.identity)
    for now, then in ((whole, parted), (parted, whole)):
        with pytest.raises(ValueError, match="resume with the validation.split of the saved run"):
            now.check(then.identity)
    older = {name: value for name, value in parted.identity.items() if name != "held_out_by"}
    with pytest.raises(ValueError, match="held tasks out in another way; begin a new run"):
        parted.check(older)
    with pytest.raises(ValueError, match="resume with validation.split_by=questions"):
        parted.check({**parted.identity, "held_out_by": "questions"})


# ---------------------------------------------------------------- what a document is known by

LETTERS = "ab \n\u00e9e\u0301\u0323\u1112\u1161\u11ab\u2028漢\t"  # accents and jamo compose
TEXTS = st.text(st.sampled_from(LETTERS), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.lists(TEXTS, max_size=6))
def test_a_document_is_known_by_its_words_however_it_is_cut(parts):
    whole = " ".join(unicodedata.normalize("NFC", "".join(parts)).split())
    assert held_out.document_key(Pieces(tuple(parts))) == held_out.document_key(TextDocument(whole))


def test_white_space_and_composition_do_not_count_and_case_does():
    one = held_out.document_key(TextDocument("Caf\u00e9 au lait."))
    assert one == held_out.document_key(TextDocument(" Cafe\u0301\n\tau lait. "))
    assert one != held_out.document_key(TextDocument("caf\u00e9 au lait."))
    assert one != held_out.document_key(TextDocument("Caf\u00e9 aulait."))
    task = row(1, "text")
    assert held_out.rank(task) == held_out.rank(row(1, "other", spaced=True))
    assert held_out.rank(task) != held_out.rank(row(1, "text", "y"))


def test_a_text_without_white_space_is_never_held_as_a_whole():
    many = Pieces(("\u0301" * 5000,) * 50)
    assert held_out.document_key(many) == held_out.document_key(many)


def test_hashes_of_large_files_are_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setattr(admission, "LARGE", 0)
    tasks = [dataclasses.replace(row(k, f"text {k}"), id=str(k)) for k in range(9)]
    files.write(tmp_path / "a.jsonl", tasks, itertools.repeat(1))
    opened = by_source([tmp_path / "a.jsonl"], SilentScreen())
    first = held_out.documents(opened, ["s"], SilentScreen())["s"].tolist()
    with monkeypatch.context() as patched:
        patched.setattr(held_out, "document_key", lambda document: 1 / 0)
        assert held_out.documents(opened, ["s"], SilentScreen())["s"].tolist() == first
    for entry in (tmp_path / "caches" / "notepad_jax" / "rows").iterdir():
        entry.write_text("{")  # damaged: found out again
    assert held_out.documents(opened, ["s"], SilentScreen())["s"].tolist() == first
    assert json.loads(json.dumps(first)) == [held_out.document_key(t.document) for t in tasks]
