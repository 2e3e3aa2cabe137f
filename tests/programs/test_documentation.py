"""What the documentation lists is what there is."""

import re
from pathlib import Path

import pytest

from notepad_jax.programs import configuration

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_module_map_has_a_line_for_every_file_and_no_other():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    told = re.findall(r"^- `([\w/]+\.(?:py|txt|html|css))`: \S", page, re.MULTILINE)
    there = {
        str(path.relative_to(ROOT))
        for folder in ("notepad_jax", "pallas_kernels")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".txt", ".html", ".css") and path.name != "__init__.py"
    }
    assert len(told) == len(set(told))
    assert set(told) == there


def test_every_test_file_that_is_said_to_hold_a_promise_exists():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert named and [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("name", ["quickstart", "qwen2_5_7b", "ruler", "starter"])
def test_every_config_key_is_explained(name):
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    keys = configuration.flat(configuration.load(name))
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_no_config_key_is_explained_that_is_not_there():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    first_cells = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    told = {key for cell in first_cells for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)?)`", cell)}
    known = {key for name in ("quickstart", "ruler", "starter") for key in
             configuration.flat(configuration.load(name))}  # fmt: skip
    assert told - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page):
    for target, anchor in re.findall(
        r"(?<!!)\[[^\]]*\]\((?!http)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")
    ):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, f"{page.name} links to {target}#{anchor}"
