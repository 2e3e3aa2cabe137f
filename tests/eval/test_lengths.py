"""Lengths as people write them."""

import pytest

from notepad_jax.eval.lengths import format_length, parse_length


@pytest.mark.parametrize(
    ("text", "length"),
    [("512", 512), ("8k", 8192), ("1M", 1048576), ("3.5m", 3670016), (" 0.5k ", 512)],
)
def test_lengths_are_read_as_people_write_them(text, length):
    assert parse_length(text) == length


@pytest.mark.parametrize("text", ["", "k", "8kb", "-1", "0", "1e3", "8 000"])
def test_other_lengths_are_refused(text):
    with pytest.raises(ValueError, match="length"):
        parse_length(text)


def test_lengths_are_written_as_people_read_them():
    pairs = {5: "5", 2048: "2K", 28672: "28K", 131072: "128K", 1000000: "1M", 1835008: "1.75M"}
    pairs |= {3670016: "3.5M", 3502080: "3.5M", 3500000: "3.5M", 100000: "100K", 262144: "256K"}
    assert {n: format_length(n) for n in pairs} == pairs
