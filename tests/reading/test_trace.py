"""The trace file: nothing lost, nothing twice, whatever a kill or a full disk left behind."""

import json

import pytest

from notepad_jax.reading.trace import IN_MEMORY, MemoryChange, Spool, TraceFile

CHANGES = [MemoryChange(0, "red", 1, 0.5, 0.0), MemoryChange(7, "half a pair \ud800", 4)]


def written(path, count=3):
    with TraceFile(path) as file:
        for number in range(count):
            assert file.add({"name": number}, Spool(CHANGES[: number % 3])) == number
    return path


def names(file):
    return [(number, reading["name"]) for number, reading in file.readings()]


def test_readings_and_memories_come_back(tmp_path):
    path = written(tmp_path / "new" / "readings.jsonl")
    with TraceFile(path) as file:
        assert names(file) == [(0, 0), (1, 1), (2, 2)]
        assert [list(file.memories(n)) for n in (2, 0, 1)] == [CHANGES, [], CHANGES[:1]]
        assert file.add({"name": 3}, Spool(CHANGES)) == 3
        assert list(file.memories(3)) == CHANGES
    line = json.loads(path.read_text().splitlines()[1])
    assert line["memories"][0] == {
        "chunk": 0, "memory": "red", "tokens": 1, "seconds": 0.5, "recall": 0.0
    }  # fmt: skip


def test_a_line_that_a_kill_cut_is_gone(tmp_path):
    path = written(tmp_path / "readings.jsonl")
    whole = path.read_bytes()
    ends = [k + 1 for k, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with TraceFile(path) as file:
            assert len(file) == sum(end <= cut for end in ends)
            file.add({"name": "next"}, Spool(CHANGES))
            assert names(file)[-1][1] == "next" and list(file.memories(len(file) - 1)) == CHANGES


def test_what_a_full_disk_cut_off_is_taken_back(tmp_path):
    path = written(tmp_path / "readings.jsonl")
    before = path.read_bytes()
    with TraceFile(path) as file:
        full = _Full(file._written, room=40)
        file._written = full
        with pytest.raises(OSError, match="No space left"):
            file.add({"name": 3}, Spool(CHANGES * 100))
        assert path.read_bytes() == before and len(file) == 3
        full.room = 10**6
        file.add({"name": 3}, Spool(CHANGES))
        assert names(file)[-1] == (3, 3) and list(file.memories(3)) == CHANGES


class _Full:
    """A file on a disk with little room: a write stops where it ends, as the system's does."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        self.room -= (n := min(len(data), self.room))
        return self.file.write(data[:n])

    def truncate(self, size):
        return self.file.truncate(size)

    def close(self):
        self.file.close()


def test_who_goes_on_drops_what_is_written_anew(tmp_path):
    path = written(tmp_path / "readings.jsonl", 6)
    with TraceFile(path) as file:
        file.drop_from(lambda reading: reading["name"] >= 4)
        assert names(file) == [(n, n) for n in range(4)]
        file.add({"name": 9}, Spool())
    with TraceFile(path) as file:
        assert [name for _, name in names(file)] == [0, 1, 2, 3, 9]
        file.drop_from(lambda reading: False)
        assert len(file) == 5


def test_a_line_that_is_no_reading_is_named(tmp_path):
    for wrong in ("{}", "[1]", '{"reading": 3, "memories": []}', "{"):
        (tmp_path / "readings.jsonl").write_text(wrong + "\n")
        with TraceFile(tmp_path / "readings.jsonl") as file:
            with pytest.raises(ValueError, match="line 1 of .*readings.jsonl is no reading of"):
                list(file.readings())


def test_a_memory_that_never_rests_is_not_held(tmp_path):
    spool = Spool()
    for chunk in range(2000):
        spool.add(MemoryChange(chunk, "x" * 20, 5))
    assert spool.file.tell() > IN_MEMORY and spool.file._rolled
    with TraceFile(tmp_path / "readings.jsonl") as file:
        file.add({"name": 0}, spool)
        assert [change.chunk for change in file.memories(0)] == list(range(2000))
