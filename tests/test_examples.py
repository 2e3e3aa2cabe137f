"""Every example and the notebook run as they stand, in a folder with the data of the checkout."""

import ast
import asyncio
import inspect
import json
import runpy
import sys
from pathlib import Path

import pytest

import notepad_jax as nj

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SAYS = {
    "read": ["after chunk 4: Lakeside obeys Fulk", "right: ('Fulk',)", "worth 1.0"],
    "many_questions": ["Selma: saffron", "Hanna: quartz"],
    "train_on_rows": ["reward [", "20 questions at 512 tokens: ", "runs/train/exported"],
    "own_functions": [
        "step 1: reward ",
        "step 2: reward ",
        "ruler of Paula ? ",
        "right and short: ",
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder, with the checkout's data and examples."""
    for name in ("data", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "rows", raising=False)
    return tmp_path


def test_no_example_is_forgotten_and_the_one_of_rows_is_as_short_as_it_is_said_to_be():
    others = ("rows", "loop")  # the second: tests/test_loop.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, *others}
    code = ast.parse((EXAMPLES / "train_on_rows.py").read_text())
    lines = {number for node in ast.walk(code) if (number := getattr(node, "lineno", 0))}
    assert len(lines) < 25


def test_the_rewards_of_the_example_are_worth_what_they_say(folder):
    """A recall reward and a penalty for memories that compress little are ten lines of a user's."""
    mine = runpy.run_path("examples/own_functions.py")
    row = {"question": "code of Ada ?", "answers": ["amber"]}

    def reading(answer, *memories, facts=2):
        made = [
            nj.MemoryRecord(text, size, size + 1, False, 8, held) for text, size, held in memories
        ]
        return nj.ReadingRecord(answer, row, tuple(made), 2, "answered", ("x",) * facts, 0)

    facts = reading("amber", ("amber", 2, (True, False)), ("amber Basil", 4, (True, True)))
    plain = reading("jade", ("amber", 2, ()), ("jade", 4, ()), facts=0)
    assert mine["recalled"](facts) == [0.5, 1.0, 1.0]
    assert mine["recalled"](plain) == [1.0, 0.0, 0.0]
    assert mine["compressed"](facts) == 1 - 0.5 * (2 / 8 + 4 / 8) / 2
    assert mine["compressed"](plain) == 0.0 and mine["compressed"](reading("amber")) == 1.0
    assert mine["brief"](facts) == 1.0 and mine["shortest"]([facts, plain]) == [1.0, 1.0]
    assert asyncio.run(mine["asked"](facts)) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(folder, name, capsys):
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    said = capsys.readouterr().out
    assert [words for words in SAYS[name] if words not in said] == []
    if name == "own_functions":
        assert "step 3" not in said


@pytest.mark.slow
def test_the_notebook_runs_in_a_running_loop(folder):
    """As a kernel does it: cell by cell in one namespace, while the thread's loop runs."""
    cells = json.loads((EXAMPLES / "read_and_train.ipynb").read_text())["cells"]
    space: dict = {"__name__": "__main__"}

    async def kernel():
        for number, cell in enumerate(cells):
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
                code = compile(source, f"cell {number}", "exec", flags=flags)
                left = eval(code, space)
                if inspect.isawaitable(left):
                    await left

    asyncio.run(kernel())
    assert space["reading"].answer == "Fulk"
    assert space["answers"] == ["eagle", "juniper", "dagger"]
    assert len(space["rewards"]) == 2 and space["score"] in (0.0, 1.0)
