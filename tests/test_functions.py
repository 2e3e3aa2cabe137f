"""Functions are known by their names, lent for the time of a call."""

import functools
import os
import sys
import threading

import pytest

from notepad_jax import functions


def mine():
    return "mine"


class Called:
    def __call__(self):
        return "an object"


def test_names_of_functions_lambdas_and_objects():
    first, second = (lambda: 1), (lambda: 2)
    with functions.lending([mine, first, second, Called()]) as names:
        assert names[0] == f"{__name__}:mine"
        assert len(set(names)) == 4 and names[2] == f"{names[1]}#2"
        assert [functions.named(name, "key")() for name in names] == ["mine", 1, 2, "an object"]
        with functions.lending([mine]) as again:
            assert again == names[:1] and functions.lent(names[1]) is first
        seen = []
        other = threading.Thread(target=lambda: seen.append(functions.lent(names[0])))
        other.start()
        other.join()
        assert seen == [None]  # each thread has its own
    assert functions.lent(names[0]) is None
    with pytest.raises(ValueError, match="'no function' is no function"):
        functions.lending(["no function"]).__enter__()


@pytest.mark.parametrize("function", [functools.partial(int, "7"), Called(), Called().__call__])
def test_what_its_name_does_not_find_again_is_not_taken_for_something_else(function):
    with functions.lending([function]) as (name,):
        assert functions.named(name, "key") is function
    with pytest.raises(ValueError, match="a function of a script or a notebook: go on from there"):
        functions.named(name, "key")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("math:sqrt", None),
        ("math:no", "math has no no"),
        ("math:pi", "no function but 3.14"),
        ("no_such_module:f", "cannot be imported: ModuleNotFoundError"),
        ("__main__:f", "a function of a script or a notebook"),
        ("m:<lambda>", "a function of a script or a notebook"),
    ],
)
def test_names_that_a_config_holds(name, says):
    if says is None:
        assert functions.named(name, "key")(4) == 2
        return
    with pytest.raises(ValueError, match=f"key is '{name}', .*{says}|{says}"):
        functions.named(name, "key")


OF_MINE = (
    "from __future__ import annotations\nimport dataclasses\n"
    "@dataclasses.dataclass\nclass Words:\n    text: str = ''\n"
    "def mine():\n    return Words('mine').text\n"
)


def test_a_file_of_ones_own_may_do_as_any_module_does(tmp_path):
    path = tmp_path / "of_mine.py"
    path.write_text(OF_MINE)
    assert functions.named(f"{path}:mine", "key")() == "mine"
    for last, said in (
        ("import math\nmath.no", "AttributeError"),
        ("raise SystemExit(0)", "SystemExit"),
    ):
        other = tmp_path / f"{said.lower()}.py"  # python may know the first by its time and size
        other.write_text(OF_MINE + last)
        with pytest.raises(ValueError, match=f"which cannot be imported: {said}"):
            functions.named(f"{other}:mine", "key")
        assert other.stem not in sys.modules  # half of it


def test_a_file_of_ones_own_is_run_once_and_again_when_it_was_changed(tmp_path):
    path = tmp_path / "of_mine_once.py"
    path.write_text(OF_MINE)
    first = functions.named(f"{path}:mine", "key")
    assert functions.named(f"{path}:mine", "key") is first
    os.utime(path, ns=(1, 1))
    assert functions.named(f"{path}:mine", "key") is not first
