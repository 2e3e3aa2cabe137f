"""The pictures of a parallel reading: every turn has its place, and every line ends somewhere."""

import dataclasses

import pytest

from notepad_jax.report import reading_tree
from notepad_jax.report.reading_tree import MOST
from tests.report.made_traces import turn


def record(chunk, unit=0, level=0, round_=0, noted=True, reads=(), kind="update"):
    return dataclasses.replace(
        turn(chunk, kind), unit=unit, level=level, round=round_, noted=noted, reads=reads
    )


# Two facts. Chunks 1 and 3 note one each, the merge keeps the second alone; nothing is new later.
TURNS = [
    record(0),
    record(1, 1, noted=False),
    record(2, 2),
    record(3, 0, level=1, reads=(0, 2)),
    *(record(4 + k, k, round_=1, noted=False, reads=(3,)) for k in range(3)),
    record(7, kind="answer", noted=False, reads=(3,)),
]
HELD = ["10", "", "01", "01", "", "", "", ""]


def cells(picture, *names):
    return [[tuple(cell[name] for name in names) for cell in one] for one in picture["levels"]]


def test_a_round_has_its_levels_and_who_read_whom():
    first, second = reading_tree.pictures(TURNS, HELD)
    assert cells(first, "first", "last", "unit", "notes") == [
        [(0, 0, 0, 1), (1, 1, 1, 0), (2, 2, 2, 1)], [(3, 3, 0, 1)],
    ]  # fmt: skip
    assert first["lines"] == ((0, 0, 0), (0, 2, 0)) and first["memory"] == (1, 0)
    assert cells(second, "first", "notes") == [[(4, 0), (5, 0), (6, 0)]]
    assert second["lines"] == () and second["memory"] is None  # it is the first round's


def test_a_note_that_nobody_read_says_what_an_earlier_one_says():
    said = [dataclasses.replace(TURNS[3], reads=(0,)), *TURNS[4:]]
    first, _ = reading_tree.pictures([*TURNS[:3], *said], HELD)
    assert cells(first, "notes", "same") == [[(1, 0), (0, 0), (1, 1)], [(1, 0)]]
    # A level that never ended was read by nobody yet.
    (first,) = reading_tree.pictures(TURNS[:3], HELD[:3])
    assert cells(first, "notes", "same") == [[(1, 0), (0, 0), (1, 0)]]


def test_facts_are_lost_where_they_were_shown_and_not_written():
    first, second = reading_tree.pictures(TURNS, HELD)
    assert cells(first, "holds", "lost") == [[(1, 0), (0, 0), (1, 0)], [(1, 1)]]
    assert cells(second, "holds", "lost") == [[(0, 0)] * 3]  # what stays is not lost
    # A merge that writes nothing loses all that it was shown.
    silent = [*TURNS[:3], dataclasses.replace(TURNS[3], noted=False)]
    (only,) = reading_tree.pictures(silent, HELD[:4])
    assert cells(only, "holds", "lost")[1] == [(0, 2)] and only["memory"] is None


@pytest.mark.parametrize("chunks", [1, MOST, MOST + 1, 2_000, 7_001])
def test_a_level_of_thousands_is_cells_of_neighbours(chunks):
    noting = {chunks // 2, chunks - 1}
    turns = [record(k, k, noted=k in noting) for k in range(chunks)]
    turns.append(record(chunks, level=1, reads=tuple(sorted(noting))))
    (picture,) = reading_tree.pictures(turns, ["1" if one.noted else "" for one in turns])
    level, (top,) = picture["levels"]
    assert len(level) <= MOST
    covered = [k for cell in level for k in range(cell["first"], cell["last"] + 1)]
    assert covered == list(range(chunks)) and top["first"] == chunks
    assert sum(cell["notes"] for cell in level) == len(noting)
    for cell in level:  # a press goes to the note, if there is one
        inside = [k for k in sorted(noting) if cell["first"] <= k <= cell["last"]]
        assert cell["opens"] == (inside[0] if inside else cell["first"])
    for below, cell, above in picture["lines"]:
        assert below == 0 and above == 0 and level[cell]["notes"]


def test_a_round_in_which_nobody_noted_anything_is_drawn_and_a_serial_reading_is_not():
    (picture,) = reading_tree.pictures([record(k, k, noted=False) for k in range(4)], [""] * 4)
    assert picture["memory"] is None and cells(picture, "notes") == [[(0,)] * 4]
    assert reading_tree.pictures([turn(0), turn(1, "answer")], ["", ""]) == []
    assert reading_tree.pictures([], []) == []
