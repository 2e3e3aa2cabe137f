"""Small JSON files that a folder is known by: written whole or not at all, named when damaged."""

import pytest

from notepad_jax.telemetry.identity import read_json, settle, write_json
from tests import limits

DAMAGED = [
    (b"", "is empty"),
    (b'{"seed": 1, "gr', "is cut off, or no JSON"),
    (b'{"seed": 1}}', "is cut off, or no JSON"),
    (b"[" * 100_000, "is cut off, or no JSON"),
    (b"\x00" * 100, "is cut off, or no JSON"),
    (b'{"text": "caf\xe9"}', "is not UTF-8"),
    (b"[1, 2]", "holds no JSON object"),
    (b"null", "holds no JSON object"),
]


@pytest.mark.parametrize("content, says", DAMAGED)
def test_a_damaged_file_is_named_with_the_mend_and_left_as_it_is(tmp_path, content, says):
    path = tmp_path / "identity.json"
    path.write_bytes(content)
    for use in (read_json, lambda path, mend: settle(path, {"seed": 1}, mend)):
        with pytest.raises(ValueError) as refused:
            use(path, "begin anew")
        assert str(refused.value) == f"{path} {says}; begin anew"
    assert path.read_bytes() == content


def test_a_file_that_is_not_there_is_named_too(tmp_path):
    with pytest.raises(ValueError, match=r"none.json cannot be read \(No such file.*\); mend it"):
        read_json(tmp_path / "none.json", "mend it")


def test_a_full_disk_leaves_the_old_file_and_no_half_of_a_new_one(tmp_path):
    path = tmp_path / "config.json"
    write_json(path, {"seed": 1})
    for size in (0, 1, 100):
        with limits.largest_file(size), pytest.raises(OSError):
            write_json(path, {"seed": 2, "text": "x" * 100})
    assert read_json(path, "") == {"seed": 1}
    assert list(tmp_path.iterdir()) == [path]
