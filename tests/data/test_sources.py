"""Bytes, lines and rows: the same from a disk and from a bucket's driver; errors in one line."""

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.data import sources, tables


def remote(path) -> str:
    """The same file through tensorstore's key-value store, as a gs:// URL would be."""
    return f"file://{path}"


@pytest.mark.parametrize("place", [str, remote])
@pytest.mark.parametrize("size", [1, 3, 10, 11, 100])
def test_blocks_are_the_file_whatever_their_size(tmp_path, place, size):
    path = tmp_path / "ten"
    path.write_bytes(b"0123456789")
    assert b"".join(sources.blocks(place(path), size=size)) == b"0123456789"
    assert b"".join(sources.blocks(place(path), 2, 7, size)) == b"23456"
    assert b"".join(sources.blocks(place(path), 10, size=size)) == b""
    assert all(len(block) <= size for block in sources.blocks(place(path), size=size))


@pytest.mark.parametrize("place", [str, remote])
def test_a_file_that_is_missing_or_short_is_named(tmp_path, place):
    with pytest.raises(ValueError, match=r"none is missing$"):
        list(sources.blocks(place(tmp_path / "none")))
    path = tmp_path / "short"
    path.write_bytes(b"0123")
    with pytest.raises(ValueError, match=r"short ends at byte 4, before 9; it is cut short"):
        list(sources.blocks(place(path), 0, 9))


def test_an_unknown_kind_of_url_is_one_line():
    with pytest.raises(ValueError, match="zz://bucket/x cannot be opened") as caught:
        sources.read("zz://bucket/x")
    assert "\n" not in str(caught.value)


def test_lines_carry_their_number_and_byte(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    path.write_bytes("é1\n\nlast".encode())
    expected = [(1, 0, "é1".encode()), (2, 4, b""), (3, 5, b"last")]
    assert list(sources.open_lines(path)) == expected
    monkeypatch.setattr(sources.blocks, "__defaults__", (0, None, 2, None))  # blocks of two bytes
    assert list(sources.open_lines(path)) == expected


def test_a_line_without_end_costs_no_memory(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * (12 << 20))
    tracemalloc.start()
    with pytest.raises(ValueError, match="line 1 is longer than 4,194,304 bytes"):
        list(sources.open_lines(path, 4 << 20))
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


# ---------------------------------------------------------------- rows


TABLE = [
    {"text": 'é\n"x"', "n": [1, {"a": None}]},
    {"text": "", "n": [2.5]},
    {"text": "z", "n": []},
]


def test_the_three_forms_of_a_table_have_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    plain = [{"text": row["text"], "n": [str(row["n"])]} for row in TABLE]
    (tmp_path / "t.json").write_text(json.dumps(plain, indent=1))
    (tmp_path / "t.jsonl").write_text("\n\n".join(map(json.dumps, plain)))
    parquet.write_table(pyarrow.Table.from_pylist(plain), tmp_path / "t.parquet")
    for name in ("t.json", "t.jsonl", "t.parquet"):
        assert [row for _, row in tables.rows(tmp_path / name)] == plain
    assert [number for number, _ in tables.rows(tmp_path / "t.json")] == [1, 2, 3]
    assert [number for number, _ in tables.rows(tmp_path / "t.jsonl")] == [1, 3, 5]  # an editor's


def test_an_array_is_parsed_in_any_cut(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(TABLE, ensure_ascii=False))
    monkeypatch.setattr(sources, "BLOCK", 1)
    for size in (1, 2, 7):
        monkeypatch.setattr(sources.blocks, "__defaults__", (0, None, size, None))
        assert [row for _, row in tables.rows(path)] == TABLE


def test_a_long_array_costs_a_block_and_not_the_file(tmp_path):
    path = tmp_path / "big.json"
    row = json.dumps({"text": "word " * 200})
    with open(path, "w") as file:
        file.write("[" + ",\n".join([row] * 12_000) + "]")  # 12 MB
    tracemalloc.start()
    assert sum(1 for _ in tables.rows(path)) == 12_000
    assert tracemalloc.get_traced_memory()[1] < 6 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", b'[{"a": 1}, {"a": ', "row 2 is not JSON: .*cut short"),
        ("a.json", b'[{"a": 1}', "the array does not end"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "after row 1 comes neither"),
        ("a.json", b'{"a": 1}', "does not begin with"),
        ("a.json", b'[{"a": "\xff"}]', r"row 1 is not UTF-8 \(byte 8 of the file\)"),
        ("a.json", b"[1]", "row 1 is int, not an object"),
        ("a.json", b"[" * 100_000, "row 1 is nested too deeply"),
        ("a.jsonl", b'{"a": 1}\n{"a": ', "line 2 is not JSON: .*cut short"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}', r"line 2 is not UTF-8 \(byte 16\)"),
        ("a.jsonl", b"[" * 100_000, "line 1 is nested too deeply"),
        ("a.jsonl", b'{"a": ' + b"1" * 5000 + b"}", "line 1 cannot be read: Exceeds the limit"),
        ("a.jsonl", b"7", "row 1 is int, not an object"),
        ("a.csv", b"a,b", "ends in none of .jsonl, .json and .parquet"),
    ],
)
def test_a_broken_table_is_one_line_with_file_and_row(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}") as caught:
        list(tables.rows(tmp_path / name))
    assert "\n" not in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_array_is_read_or_refused_in_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("damaged") / "t.json"
    whole = json.dumps(TABLE, ensure_ascii=False).encode()
    at = data.draw(st.integers(0, len(whole)))
    until = data.draw(st.integers(at, len(whole)))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=4)) + whole[until:])
    try:
        assert all(isinstance(row, dict) for _, row in tables.rows(path))
    except ValueError as problem:
        assert str(path) in str(problem) and "\n" not in str(problem)


def test_a_parquet_cut_short_is_one_line(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    whole = tmp_path / "whole.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"a": "x" * 99}] * 99), whole)
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(whole.read_bytes()[:200])
    for path in (cut, tmp_path / "none.parquet", f"file://{cut}"):
        with pytest.raises(
            ValueError, match="download it again|is missing|copy the file"
        ) as caught:
            list(tables.rows(path))
        assert "\n" not in str(caught.value)
