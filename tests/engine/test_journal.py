"""The file of a rollout that has not ended: every bit comes back, and no other bit."""

import subprocess
import sys

import numpy as np
import pytest

from notepad_jax.engine import journal
from notepad_jax.engine.replay import Given
from tests import limits

HEADER = {"step": 3, "settings": {"seed": 0, "lengths": ["2k"], "rate": 0.1}}


def given(seed):
    rng = np.random.default_rng(seed)
    pieces = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 4)))
    ids = rng.integers(0, 2**31 - 1, sum(pieces), dtype=np.int32)
    logprobs = -rng.exponential(size=sum(pieces)).astype(np.float32)
    return Given(f"{seed:024x}", ids, logprobs, pieces)


def turns(first, count):
    return {seed * 2**55 + 1: given(seed) for seed in range(first, first + count)}


TURNS = turns(0, 6)


def assert_same(found, expected):
    assert list(found) == list(expected)
    for seed, turn in found.items():
        was = expected[seed]
        assert (turn.asked, turn.pieces) == (was.asked, was.pieces)
        for mine, theirs in ((turn.tokens, was.tokens), (turn.logprobs, was.logprobs)):
            assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()


def appended(path, *segments):
    journal.begin(path, HEADER, segments[0])
    for segment in segments[1:]:
        journal.append(path, segment)
    return path.read_bytes()


@pytest.mark.parametrize("sizes", [(6,), (0,), (0, 6), (2, 1, 3), (0, 1, 1, 1, 1, 1, 1)])
def test_what_was_written_comes_back_bit_by_bit_in_whatever_segments(sizes, tmp_path, monkeypatch):
    path, every, segments = tmp_path / "journal.jsonl", {}, []
    for size in sizes:
        segments.append(turns(len(every), size))
        every |= segments[-1]
    appended(path, *segments)
    header, found = journal.read(path)
    assert header == HEADER
    assert_same(found, every)
    monkeypatch.setattr(journal, "TOGETHER", 4)  # turns a line
    header, found = journal.decoded(journal.encoded(HEADER, every))
    assert header == HEADER
    assert_same(found, every)


def test_a_file_that_is_begun_is_that_of_an_object(tmp_path):
    assert appended(tmp_path / "j", TURNS) == journal.encoded(HEADER, TURNS)
    assert journal.decoded((tmp_path / "j").read_bytes())[0] == HEADER


def test_a_segment_that_was_cut_anywhere_is_as_if_it_had_never_begun(tmp_path):
    path = tmp_path / "journal.jsonl"
    whole = [appended(path, *segments) for segments in (
        ({},), ({}, turns(0, 2)), ({}, turns(0, 2), turns(2, 3)))]  # fmt: skip
    ends = list(map(len, whole))
    for size in range(ends[-1] + 1):
        path.write_bytes(whole[-1][:size])
        if size < ends[0]:
            with pytest.raises(ValueError, match="is cut off"):
                journal.read(path)
        else:
            expected = turns(0, {0: 0, 1: 2, 2: 5}[sum(size >= end for end in ends[1:])])
            assert_same(journal.read(path)[1], expected)
        if size in ends:
            assert_same(journal.decoded(whole[-1][:size])[1], expected)
        else:  # an object is whole
            with pytest.raises(ValueError, match="the turns are cut off"):
                journal.decoded(whole[-1][:size])
            with pytest.raises(ValueError, match="does not end with a whole segment"):
                journal.append(path, TURNS)


def test_no_byte_of_a_whole_segment_is_changed_unnoticed(tmp_path):
    path = tmp_path / "journal.jsonl"
    content = appended(path, {}, turns(0, 2), turns(2, 1), turns(3, 3))
    seals = [line for line in content.splitlines(True) if line.startswith(journal.SEAL)]
    assert len(seals) == 4
    last = content.index(seals[-1])
    lines = content.splitlines(True)
    broken = [content + b"\n", content * 2, content + b"{}\n", b"", content + seals[0]]
    broken += [b"".join(lines[:n] + lines[n + 1 :]) for n in range(len(lines) - 1)]
    rng = np.random.default_rng(0)
    for at in [*rng.integers(0, last, 200), *range(last, len(content) - 1)]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        broken.append(bytes(flipped))
    broken += [b"[]\n", b"\xff\n", b'{"turns": 1}\n', b"[" * 100_000]
    for wrong in broken:
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="journal.jsonl is cut off, or has other") as refused:
            journal.read(path)
        assert "\n" not in str(refused.value)
        with pytest.raises(ValueError, match="the turns are cut off, or have other bytes"):
            journal.decoded(wrong)


def test_a_file_that_cannot_be_read_is_said_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be read .No such file"):
        journal.read(tmp_path / "journal.jsonl")


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal.begin(path, HEADER)
    before = path.read_bytes()
    for write in (lambda: journal.begin(path, HEADER, TURNS), lambda: journal.append(path, TURNS)):
        with limits.largest_file(600), pytest.raises(OSError):
            write()
        assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


KILLED = """
import sys
from pathlib import Path
from notepad_jax.engine import journal
from tests.engine.test_journal import HEADER, turns
journal.begin(Path(sys.argv[1]), HEADER)
print("ready", flush=True)
for number in range(10**6):
    journal.append(Path(sys.argv[1]), turns(number * 20, 20))
"""


@pytest.mark.slow
def test_a_killed_writer_leaves_all_segments_but_the_last(tmp_path):
    path = tmp_path / "journal.jsonl"
    for least in (1, 20_000, 90_000):
        words = [sys.executable, "-c", KILLED, str(path)]
        writer = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "ready\n"
        while path.stat().st_size < least:
            assert writer.poll() is None
        writer.kill()
        writer.communicate(timeout=60)
        found = journal.read(path)[1]
        assert len(found) % 20 == 0
        assert_same(found, turns(0, len(found)))
        assert path.read_bytes().startswith(journal.encoded(HEADER, {}))
