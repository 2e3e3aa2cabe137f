"""The files of published memory agents, by hand, with the traps that the real ones have."""

import json
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.data import files, formats, long_strings, parquet, sources
from notepad_jax.data.foreign import memagent

TEXT = 'Document 1:\nParis\n"is" \\ the capital, é漢😀.\n\nDocument 2:\nLyon'
EXTRA = {"index": 3, "question": "Which city?", "num_docs": 200}


def trained(**changes) -> dict:
    good = {
        "data_source": "hotpotqa",
        "prompt": [{"role": "user", "content": "Which city?"}],
        "context": TEXT,
        "ability": "memory",
        "reward_model": {"style": "rule", "ground_truth": ["Paris"]},
        "extra_info": EXTRA,
    }
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def measured(**changes) -> dict:
    good = {"context": TEXT, "input": "Which city?", "answers": ["Paris"], "num_docs": 50}
    return {n: value for n, value in {**good, "index": 3, **changes}.items() if value is not ...}


def read(path):
    found = formats.read_any(path)
    assert ["".join(task.document.pieces()) for task, _ in found] == [TEXT] * len(found)
    return found


def written(path, rows, **layout):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **layout)
    return path


# ---------------------------------------------------------------- the three forms


def test_a_training_file_is_read_whatever_form_its_gold_answers_have(tmp_path):
    lists = [trained(), trained(reward_model={"style": "rule", "ground_truth": ["Paris", "Ile"]})]
    texts = [trained(reward_model=json.dumps({"ground_truth": gold})) for gold in ("Paris", ["a"])]
    ((one, length), (two, _)) = read(written(tmp_path / "train.parquet", lists))
    assert (one.id, one.question, one.answers) == ("train.parquet:1", "Which city?", ("Paris",))
    assert (one.source, one.metric, one.contract) == ("hotpotqa", "sub_em", "auto")
    assert length == 28 * 1024  # 200 documents: what the published figures call 28K
    assert two.id == "train.parquet:2" and two.answers == ("Paris", "Ile")  # the index repeats
    plain = [trained(reward_model={"ground_truth": "Paris"})]
    found = [
        task.answers
        for name, rows in (("json.parquet", texts), ("plain.parquet", plain))
        for task, _ in read(written(tmp_path / name, rows))
    ]
    assert found == [("Paris",), ("a",), ("Paris",)]  # a text is an answer, and not its letters


def test_an_evaluation_file_is_read_as_it_was_dumped(tmp_path):
    path = tmp_path / "eval_50.json"
    rows = [measured(), measured(answers="Paris", num_docs=6400), measured(num_docs=70, index=4)]
    for layout in ({"indent": 4, "ensure_ascii": False}, {"separators": (",", ":")}):
        path.write_text(json.dumps(rows, **layout))
        for place in (path, f"file://{path}"):
            found = read(place)
            assert [task.id for task, _ in found] == [f"eval_50.json:{n}" for n in (1, 2, 3)]
            assert {task.answers for task, _ in found} == {("Paris",)}
            assert {task.source for task, _ in found} == {"eval_50"}
            assert [length for _, length in found] == [7 * 1024, 896 * 1024, 0]
    seen = bytearray()
    assert formats.read_any(path, seen.extend)[0][0].question == "Which city?"
    assert bytes(seen) == path.read_bytes()


def test_lines_with_metadata_are_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    context = {"context": TEXT, "ground_truth": ["Paris"]}
    rows = [
        {"prompt": "Which city?", "label": "no", "metadata": context},
        {"label": "Paris", "metadata": {"context": TEXT}, "prompt": trained()["prompt"]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = read(path)
    assert [task.answers for task, _ in found] == [("Paris",), ("Paris",)]
    assert {task.question for task, _ in found} == {"Which city?"}


def test_published_lengths_belong_to_published_numbers_of_documents_alone():
    assert memagent.published_length(50) == 7168 and memagent.published_length(25600) == 3670016
    for other in (0, 49, 150, 51200, True, None, "50", 50.0):
        assert memagent.published_length(other) == 0


# ---------------------------------------------------------------- rows by hand


def test_rows_by_hand_need_a_question_answers_and_a_text(tmp_path):
    rows = [
        {"question": "q?", "answers": ["x", "y"], "document": TEXT},
        {"context": TEXT, "answers": "x", "question": "q?"},
        {"question": "q?", "answer": "x", "document": TEXT, "id": "own", "metric": "em"},
    ]
    # An editor of Windows puts a mark first and ends lines in two characters.
    lines = "\r\n\r\n".join(map(json.dumps, rows))
    (tmp_path / "mine.jsonl").write_text(lines, encoding="utf-8-sig", newline="")
    (tmp_path / "mine.json").write_text(json.dumps(rows, indent=1), encoding="utf-8-sig")
    for name, numbers in (("mine.jsonl", (1, 3)), ("mine.json", (1, 2))):
        one, two, three = (task for task, _ in read(tmp_path / name))
        assert [one.id, two.id, three.id] == [*(f"{name}:{n}" for n in numbers), "own"]
        assert (one.source, one.metric, one.contract) == ("mine", "sub_em", "auto")
        assert (three.metric, three.contract) == ("em", "plain")
        assert (one.answers, two.answers, three.answers) == (("x", "y"), ("x",), ("x",))
    assert files.write(tmp_path / "ours.jsonl", [one, two, three], [1, 1, 1]) == 3


BAD = [
    ("jsonl", trained(prompt=[{"role": "system", "content": "x"}], extra_info={}), "'prompt' must"),
    ("jsonl", trained(reward_model="{"), "'reward_model' must be an object or its JSON, it is '{'"),
    ("jsonl", trained(reward_model=[1]), "'reward_model' must be an object, it is"),
    ("jsonl", trained(reward_model={}), "has no gold answer: none of 'answers', 'reward_model'"),
    ("jsonl", trained(reward_model={"ground_truth": [" "]}), "gold answer: 'ground_truth' is emp"),
    ("jsonl", trained(context=" "), "has an empty document"),
    ("json", measured(context=...), "has no column 'document' or 'context'; it has input, answers"),
    ("json", measured(context=["a"]), "'context' must be a text, it is"),
    ("json", measured(context=""), "has an empty document"),
    ("json", measured(input=" "), "'input' must hold the question"),
    ("json", measured(answers=[]), "has no gold answer: 'answers' is empty"),
    ("json", measured(answers=[{}]), "'answers' must be a text or texts"),
    ("json", measured(document="x"), "has two texts, 'document' and 'context'; keep one"),
    ("json", {"a": {"context": "x"}, "input": "q"}, "'document' or 'context'; it has a, input"),
]


@pytest.mark.parametrize("form, bad, message", BAD)
def test_a_bad_row_is_one_line_with_file_and_number(tmp_path, form, bad, message):
    path = tmp_path / f"t.{form}"
    good = measured() if form == "json" else trained()
    rows = [good, bad, good]
    path.write_text(json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=f"t.{form} row 2.*{message}") as caught:
        formats.read_any(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_other_data_sets_are_refused_with_the_way_to_convert_them(tmp_path):
    squad = {
        "id": "1",
        "question": "q",
        "context": "c",
        "answers": {"text": [], "answer_start": []},
    }
    (tmp_path / "t.jsonl").write_text(json.dumps(squad))
    (tmp_path / "t.json").write_text(json.dumps([{"_id": "1", "supporting_facts": []}]))
    written(tmp_path / "t.parquet", [trained(context=...)])
    answered = {"text": ["a"], "answer_start": [0]}
    written(tmp_path / "hub.parquet", [squad | {"answers": answered}])
    for name, whose, option in (
        ("t.jsonl", "SQuAD", "ruler-qa --squad"), ("t.json", "HotpotQA", "ruler-qa --hotpotqa"),
        ("hub.parquet", "SQuAD", "ruler-qa --squad"),
        ("t.parquet", "GoLongRL", "golongrl --rows"),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=f"rows of {whose}.*: notepad-jax build {option} .*{name}"
        ):
            formats.read_any(tmp_path / name)
    with pytest.raises(
        ValueError, match="t.csv is no file of tasks; its name must end in .jsonl, "
    ):
        formats.read_any(tmp_path / "t.csv")


# ---------------------------------------------------------------- large files


def test_a_large_evaluation_file_costs_a_block_and_not_the_file(tmp_path):
    path = tmp_path / "eval_6400.json"
    text = 'Document 1:\nMany "words" é\n' * 40_000
    with open(path, "w") as file:
        rows = (json.dumps(measured(context=text, index=k), ensure_ascii=k % 2) for k in range(12))
        file.write("[" + next(rows) + "".join(f",\n    {row}" for row in rows) + "]\n")  # 15 MB
    tracemalloc.start()
    found = formats.read_any(path)
    size = sum(map(len, found[-1][0].document.pieces()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 12 and size == len(text)
    assert peak < 8 << 20 < path.stat().st_size / 1.5


@pytest.mark.parametrize("block", [1, 3, 7])
def test_an_array_is_the_same_in_whatever_blocks_it_comes(tmp_path, monkeypatch, block):
    path = tmp_path / "eval_50.json"
    path.write_text(json.dumps([measured(), measured(index=4)], indent=4, ensure_ascii=False))
    monkeypatch.setattr(sources.blocks, "__defaults__", (0, None, block, None))
    monkeypatch.setattr(long_strings, "PIECE", block)
    assert len(read(path)) == 2


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_evaluation_file_is_read_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "eval_50.json"
    whole = json.dumps([measured(), measured(index=4)], indent=1, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(whole)))
    until = data.draw(st.integers(at, min(len(whole), at + 60)))
    put = data.draw(st.binary(max_size=6) | st.sampled_from([b'"', b"\\", b"}", b"{", b"]", b","]))
    path.write_bytes(whole[:at] + put + whole[until:])
    try:
        found = formats.read_any(path)
    except ValueError as problem:
        assert str(path) in str(problem) and "\n" not in str(problem)
    else:
        assert all("".join(task.document.pieces()).strip() for task, _ in found)


def numbered(count: int) -> list[dict]:
    return [trained(context=f"text {k} é漢😀 " + "words " * k) for k in range(count)]


@pytest.mark.parametrize("place", [str, "file://{}".format])
@pytest.mark.parametrize("largest", [1, parquet.LARGEST_GROUP])
def test_a_parquet_gives_its_texts_in_any_order(tmp_path, monkeypatch, largest, place):
    """By row groups where these are small; what is one large one is unpacked first."""
    monkeypatch.setattr(parquet, "LARGEST_GROUP", largest)
    monkeypatch.setattr(parquet, "PIECE", 5)
    rows = numbered(50)
    path = written(tmp_path / "t.parquet", rows, row_group_size=7)
    seen = bytearray()
    found = formats.read_any(place(path), seen.extend)
    assert bytes(seen) == path.read_bytes()
    for number in (49, 0, 13, 14, 6, 7, 48):
        assert "".join(found[number][0].document.pieces()) == rows[number]["context"]


def test_a_large_parquet_of_one_group_costs_little_memory(tmp_path, monkeypatch):
    """As pandas writes it: 20 MB of text, decoded as a whole where columns have no buffer."""
    monkeypatch.setattr(parquet, "LARGEST_GROUP", 1 << 20)
    rows = [trained(context=f"{k} " + "words " * 33_000) for k in range(100)]
    path = written(tmp_path / "t.parquet", rows)
    del rows
    pool = pyarrow.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    found = formats.read_any(path)
    held = pool.bytes_allocated() - before
    assert "".join(found[99][0].document.pieces()).startswith("99 words")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 4 << 20 and peak < 12 << 20  # a batch of 16 texts is 3 MB


def test_a_text_that_many_rows_of_a_parquet_share_is_held_once(tmp_path):
    text = "words " * 170_000
    path = written(tmp_path / "t.parquet", [trained(context=text) for _ in range(100)])
    pool = pyarrow.default_memory_pool()
    found, before = formats.read_any(path), pool.bytes_allocated()
    assert "".join(found[99][0].document.pieces()) == text
    assert pool.bytes_allocated() - before < 8 << 20


@pytest.mark.parametrize("largest", [1, parquet.LARGEST_GROUP])
def test_an_empty_text_of_a_parquet_is_named(tmp_path, monkeypatch, largest):
    monkeypatch.setattr(parquet, "LARGEST_GROUP", largest)
    path = written(tmp_path / "t.parquet", [trained(), trained(context=" "), trained(context=None)])
    with pytest.raises(ValueError, match="t.parquet row 2 has an empty 'context'; remove the row"):
        list(formats.read_any(path)[1][0].document.pieces())


def test_a_disk_without_room_for_an_unpacked_file_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "LARGEST_GROUP", 1)
    monkeypatch.setattr(parquet.shutil, "disk_usage", lambda folder: type("U", (), {"free": 0}))
    path = written(tmp_path / "t.parquet", [trained()])
    with pytest.raises(ValueError, match="has to be unpacked.*make room, or set TMPDIR"):
        formats.read_any(path)


def test_a_parquet_without_texts_is_one_line(tmp_path):
    for row, message in (
        ({"question": "q", "answers": ["x"]}, "has no column 'document' or 'context'; it has qu"),
        ({"question": "q", "answers": ["x"], "context": [1]}, "column 'context' must hold texts"),
    ):
        path = written(tmp_path / "t.parquet", [row])
        with pytest.raises(ValueError, match=message):
            formats.read_any(path)
