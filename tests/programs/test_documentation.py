"""What the documentation lists is what there is."""

import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest

from notepad_jax import cli, keys
from notepad_jax.commands.parser import build_parser
from notepad_jax.setup import configuration
from notepad_jax.setup.config.whole import Starter, Suites, Training
from tests import key_tables, module_map

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_page_of_modules_is_what_the_files_say():
    assert module_map.PAGE.read_text(encoding="utf-8") == module_map.page(), "say make docs"


def test_a_file_that_does_not_say_what_it_is_is_named(tmp_path):
    (tmp_path / "silent.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"silent\.py does not begin with a sentence"):
        module_map.first_sentence(tmp_path / "silent.py")


def test_every_test_file_that_is_said_to_hold_a_promise_exists():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)`", page)
    assert named and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_tables_of_keys_are_those_of_the_fields():
    """And every key of every kind of config stands in one."""
    page = key_tables.page()
    assert page == key_tables.PAGE.read_text(encoding="utf-8"), "say make docs"
    every = {key for kind in (Training, Suites, Starter) for key, *_ in keys.leaves(kind)}
    assert [key for key in sorted(every) if f"`{key}`" not in page] == []


def test_every_number_that_is_explained_is_one_that_a_run_may_write():
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    table = page.partition("## What a run tells of it")[2].partition("## What looks sick")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    told = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "notepad_jax").rglob("*.py")]
    code = "\n".join(files)
    ends = {name: re.split("SOURCE|NAME|LENGTH", name) for name in told}
    made = r"entropy_gate/(update|answer)(_shut)?"  # put together of two words there
    missing = [
        name
        for name, parts in ends.items()
        if not all(part.strip("/_") in code for part in parts) and not re.fullmatch(made, name)
    ]
    assert len(told) > 80 and missing == []


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


def test_what_is_said_of_mistakes_is_what_the_page_says(tmp_path, monkeypatch, capsys):
    """And both ways to write an override are one."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(--[^`]+)` \| `([^`]+)`(?: \(exit code (\d)\))? \|$", page, re.M)
    assert len(rows) >= 8
    monkeypatch.chdir(tmp_path)
    for words, said, code in rows:
        ways = {words, words.replace("=", " ", 1) if words.startswith("--config.") else words}
        for way in ways:
            try:
                ended = cli.main(["train", "--json", *shlex.split(way)])
            except SystemExit as stop:
                ended = stop.code
            assert ended == int(code or 1) and said in capsys.readouterr().err, way


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of a page, also those within lists, in a language ("" for commands)."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for said, block in found if said == language]


@pytest.mark.parametrize(("page", "least"), [("evaluation.md", 4), ("algorithms.md", 2)])
def test_commands_of_a_page_have_options_and_keys_that_there_are(
    page, least, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("my_recipe.py").write_text("def apply(config):\n    pass\n")  # one's own
    lines = "".join(blocks(page, "")).replace("\\\n", " ").splitlines()
    assert len(lines) >= least
    for line in lines:
        program, *words = shlex.split(line)
        if words[:2] == ["-m", "benchmarks.exits"]:  # whose last words are eval's
            program, words = "notepad-jax", ["eval", *words[words.index("--") + 1 :]]
        assert program == "notepad-jax"
        arguments, rest = build_parser(words[0]).parse_known_args(words)
        overrides = [word for word in rest if word.startswith(configuration.FLAG)]
        assert rest == overrides, line
        name = cli.config_name(arguments, {})
        configuration.load(name, [*cli.shorthand(arguments, name), *overrides])


def test_the_published_questions_are_put_first(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.chdir(tmp_path)
    rows = [{"extra_info": {"index": index, "question": "?"}} for index in (4, 1)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), "hotpotqa_dev.parquet")
    Path("hotpot_dev_distractor_v1.json").write_text(json.dumps(list("abcdef")))
    (block,) = blocks("evaluation.md", "python")
    exec(compile(block, "evaluation.md", "exec"), {})
    assert json.loads(Path("hotpot_dev_reordered.json").read_text()) == list("ebacdf")
