"""A line whose bytes have changed is known to have changed, whichever they are."""

import json

import pytest

from notepad_jax.reading.trace import MemoryChange, Spool, Trace, TraceFile
from notepad_jax.telemetry import lines

VALUES = [{"step": step, "reward": step / 7, "text": "ä\n"} for step in range(3)]


def written(path, count=3):
    path.write_bytes(b"".join(map(lines.sealed, VALUES[:count])))
    return path


def read(path):
    return [found for _, _, found in lines.lines(path)]


def test_what_was_written_is_read_without_the_digest(tmp_path):
    path = written(tmp_path / "x.jsonl")
    assert read(path) == VALUES
    assert [json.loads(line)["digest"] for line in path.open()]
    assert read(tmp_path / "nothing.jsonl") == []


def test_every_changed_byte_is_known(tmp_path):
    """But for the last newline: without that a line was never finished."""
    whole = written(tmp_path / "x.jsonl").read_bytes()
    changed = tmp_path / "changed.jsonl"
    for at in range(len(whole)):
        for bit in (0, 5):
            other = bytearray(whole)
            other[at] ^= 1 << bit
            changed.write_bytes(other)
            if at == len(whole) - 1:
                assert read(changed) == VALUES[:2]
            else:
                assert None in read(changed), (at, bit)


def test_lines_of_an_earlier_version_are_read_before_others_and_not_behind(tmp_path):
    path = tmp_path / "x.jsonl"
    old = (json.dumps({"step": 9, "x": 0.1234567890123456}) + "\n").encode()
    path.write_bytes(old + lines.sealed(VALUES[0]))
    assert read(path) == [{"step": 9, "x": 0.1234567890123456}, VALUES[0]]
    path.write_bytes(lines.sealed(VALUES[0]) + old)
    assert read(path) == [VALUES[0], None]


def test_every_changed_byte_of_a_reading_is_known(tmp_path):
    path, changed = tmp_path / "readings.jsonl", tmp_path / "changed.jsonl"
    with TraceFile(path) as file:
        for number in range(2):
            file.add({"step": number}, Spool([MemoryChange(0, "né", 2)]))
    whole = path.read_bytes()
    with Trace(path) as trace:
        assert [trace.whole(n).reading for n in range(2)] == [{"step": 0}, {"step": 1}]
    for at in range(len(whole) - 1):
        other = bytearray(whole)
        other[at] ^= 1
        changed.write_bytes(other)
        with Trace(changed) as trace, pytest.raises(ValueError, match=r"line \d of .* is "):
            for number in range(2):
                trace.whole(number)


def test_a_damaged_reading_stays_and_is_said_and_what_is_not_wanted_goes(tmp_path):
    path = tmp_path / "readings.jsonl"
    with TraceFile(path) as file:
        for number in range(5):
            file.add({"step": number}, Spool())
    whole = path.read_bytes().splitlines(keepends=True)
    damaged = [line.replace(b"step", b"stop") if n in (1, 3) else line for n, line in
               enumerate(whole)]  # fmt: skip
    path.write_bytes(b"".join(damaged))
    with TraceFile(path) as file:
        (said,) = file.drop_from(lambda reading: reading["step"] >= 4)
        assert str(said).startswith(f"line 2 of {path} is damaged")
    assert path.read_bytes() == b"".join(damaged[:3])  # whose the fourth was nobody knows
