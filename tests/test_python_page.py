"""The Python of README and docs/python.md runs as it stands, from top to bottom."""

import re
from pathlib import Path

import pytest

import notepad_jax as nj

ROOT = Path(__file__).parents[1]


def blocks(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data").symlink_to(ROOT / "data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page: str) -> dict:
    space: dict = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page}, block {number}", "exec"), space)
    return space


def test_every_public_name_is_explained():
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in nj.__all__ if name not in page and name != "Trained"] == []


@pytest.mark.slow
def test_the_blocks_of_readme_run(folder, capsys):
    assert blocks("README.md")
    run("README.md")
    assert capsys.readouterr().out == "amber\n"


@pytest.mark.slow
def test_the_blocks_of_the_page_run(folder):
    space = run("docs/python.md")
    assert space["run"].metrics and (folder / "runs/exported/model.safetensors").is_file()
