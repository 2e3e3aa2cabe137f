"""The file of a rollout that was stopped: every bit comes back, and no other bit."""

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


TURNS = {seed * 2**55 + 1: given(seed) for seed in range(6)}


def test_what_was_written_comes_back_bit_by_bit(tmp_path):
    path = tmp_path / "journal.jsonl"
    for turns in (TURNS, {}):
        journal.write(path, HEADER, turns)
        header, found = journal.read(path)
        assert header == HEADER and list(found) == list(turns)
        for seed, turn in found.items():
            was = turns[seed]
            assert (turn.asked, turn.pieces) == (was.asked, was.pieces)
            for mine, theirs in ((turn.tokens, was.tokens), (turn.logprobs, was.logprobs)):
                assert mine.dtype == theirs.dtype and mine.tobytes() == theirs.tobytes()


def test_no_byte_is_lost_or_changed_unnoticed(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal.write(path, HEADER, TURNS)
    content = path.read_bytes()
    rng = np.random.default_rng(0)
    broken = [content[:n] for n in (0, 1, *rng.integers(2, len(content), 40), len(content) - 1)]
    broken += [content + b"\n", content + content.splitlines(True)[1], content * 2]
    for at in rng.integers(0, len(content), 200):
        flipped = bytearray(content)
        flipped[at] ^= 1 << int(rng.integers(0, 8))
        broken.append(bytes(flipped))
    broken += [b"[]\n", b"\xff\n", b'{"turns": 1}\n', b"[" * 100_000]
    for wrong in broken:
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="journal.jsonl is cut off, or has other") as refused:
            journal.read(path)
        assert "\n" not in str(refused.value)


def test_a_file_that_cannot_be_read_is_said_in_a_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be read .No such file"):
        journal.read(tmp_path / "journal.jsonl")


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal.write(path, HEADER, {})
    before = path.read_bytes()
    with limits.largest_file(600), pytest.raises(OSError):
        journal.write(path, HEADER, TURNS)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
