"""Everything that can be said wrongly is refused in one line, by whatever way it comes in.

wrong_inputs.txt has the cases, a line each: what is given, and a part of what is said of it.
Command lines, overrides, config files, settings of a run that goes on, rows of task files and
calls from Python: each ends with the documented exit code (from Python in a ValueError), says one
line, prints no traceback, writes nothing, and is refused before a weight is loaded. All run in
this process, and a dozen of the command lines once more in processes of their own.
"""

import contextlib
import functools
import json
import os
import random
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import notepad_jax as nj
from notepad_jax import cli, keys
from notepad_jax.programs import subjects
from notepad_jax.setup import builders, configuration
from notepad_jax.telemetry.identity import read_sealed, write_sealed
from tests import fakes, limits

ROOT = Path(__file__).parents[1]
STARTER = ROOT / "data" / "starter"
STORY = "the secret code of ann is red . bob says blue ."
FLIPS = 60  # bits of the settings of a run


def cases(section):
    """Returns (what is given, what is said) of a section; each line is one test."""
    found = []
    text = (ROOT / "tests" / "wrong_inputs.txt").read_text(encoding="utf-8")
    for line in text.split(f"\n[{section}]\n")[1].split("\n\n")[0].splitlines():
        given, arrow, said = line.rpartition(" -> ")
        assert arrow, line
        found.append((given, said))
    return found


def several(section):
    return pytest.mark.parametrize(("given", "said"), cases(section))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with what the cases name, where nobody gets as far as loading a policy."""

    def taken(*what, **how):
        pytest.fail("it was taken: somebody loads a policy")

    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "story.txt").write_text(STORY)
    (tmp_path / "given" / "empty.txt").write_text("\n")
    (tmp_path / "given" / "zeros.txt").write_text("512\n0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # beside configs
    monkeypatch.setattr(builders, "load_policy", taken)
    for variable in ("NOTEPAD_API_KEY", "NOTEPAD_CONTROL_KEY"):
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def filled(text):
    return text.replace("$STARTER", str(STARTER)).replace("$TEXT", "given/story.txt")


def refused(words, code, said, capsys):
    """The command line is refused as it should be, and the working folder is what it was."""
    before = limits.content(Path())
    try:
        ended = cli.main(words)
    except SystemExit as stop:
        ended = stop.code
    told = capsys.readouterr()
    assert (ended, told.out) == (code, ""), told.err
    assert told.err.startswith("notepad-jax") and told.err.count("\n") == 1, told.err
    assert said in told.err and "Traceback" not in told.err
    assert limits.content(Path()) == before


# ---------------------------------------------------------------- the command line


@several("exit code 2")
def test_command_lines_that_cannot_be_read(here, capsys, given, said):
    refused(shlex.split(filled(given)), 2, said, capsys)


@several("exit code 1")
def test_command_lines_that_cannot_be_meant(here, capsys, given, said):
    refused([*shlex.split(filled(given)), "--json"], 1, said, capsys)


@several("overrides")
def test_overrides_that_cannot_be_meant(here, capsys, given, said):
    words = ["train", "--json", "--name", "mine", f"--config.policy={STARTER}"]
    refused([*words, *shlex.split(f"--config.{given}")], 1, said, capsys)


@pytest.mark.parametrize("name", ["quickstart", "ruler", "starter"])
def test_no_key_takes_a_value_of_another_type(name):
    tried = 0
    for key, value in keys.flat(configuration.load(name)).items():
        if isinstance(value, str):
            continue
        wrong = "(" if isinstance(value, tuple) else "a word"
        with pytest.raises(configuration.ConfigProblem, match=key.rpartition(".")[2]) as caught:
            configuration.load(name, [f"{configuration.FLAG}{key}={wrong}"])
        assert "\n" not in str(caught.value)
        tried += 1
    assert tried > 20


@pytest.mark.slow
def test_a_process_ends_as_its_main_function_does(here):
    """The same lines and codes, of a dozen spread over the table."""
    known = [(2, *case) for case in cases("exit code 2")]
    known += [(1, *case) for case in cases("exit code 1")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}

    def ended(case):
        words = [*shlex.split(filled(case[1])), *(["--json"] if case[0] == 1 else [])]
        return case, subprocess.run(
            [sys.executable, "-m", "notepad_jax", *words],
            capture_output=True, text=True, timeout=300, env=environment,
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        for (code, given, said), done in pool.map(ended, known[:: len(known) // 12]):
            assert (done.returncode, done.stdout) == (code, ""), given
            assert done.stderr.count("\n") == 1 and said in done.stderr, given
    assert [path.name for path in here.iterdir()] == ["given"]


# ---------------------------------------------------------------- files


@several("config files")
def test_config_files(here, capsys, given, said):
    start = ["import ml_collections, configs.quickstart", "def get_config():",
             "    config = configs.quickstart.get_config()"]  # fmt: skip
    lines = given.split("; ")
    whole = given.startswith("!")  # not a body, but the file
    Path("mine.py").write_text(
        given[1:].replace("; ", "\n")
        if whole
        else "\n".join([*start, *(f"    {x}" for x in lines)])
    )
    refused(["train", "--json", "--config", "mine.py"], 1, said, capsys)


@several("recipes")
def test_recipe_files(here, capsys, given, said):
    Path("mine.py").write_text("def apply(config):\n    " + given.replace("; ", "\n    "))
    words = ["train", "--json", f"--config.policy={STARTER}", "--recipe", "mine.py"]
    refused(words, 1, said, capsys)


@several("settings of a run")
def test_settings_of_a_run_that_goes_on(here, capsys, given, said):
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.json").write_text(given)
    refused(["train", "--json", "--name", "mine", "--resume"], 1, said, capsys)


def test_no_bit_of_the_settings_flips_unnoticed(here, capsys):
    """Nor does anybody's edit, who is told to say on the command line what is to change."""
    path = Path("runs/mine/config.json")
    config = configuration.load("quickstart", [f"{configuration.FLAG}policy={STARTER}"])
    write_sealed(path, keys.plain(config))
    again = configuration.load("quickstart", (), read_sealed(path, ""))
    assert again == config
    whole, draw = path.read_bytes(), random.Random(0)
    edited = whole.replace(b'"steps": 36', b'"steps": 37')
    changed = [edited, whole.replace(b"optimizer", b"optImizer")]
    while len(changed) < FLIPS + 2:
        place = draw.randrange(len(whole))
        byte = whole[place] ^ (1 << draw.randrange(8))
        flipped = whole[:place] + bytes([byte]) + whole[place + 1 :]
        if not chr(byte).isspace() or not chr(whole[place]).isspace():
            changed.append(flipped)
    assert whole not in changed
    for content in changed:
        path.write_bytes(content)
        refused(["train", "--json", "--name", "mine", "--resume"], 1, "config.json", capsys)
    with pytest.raises(ValueError, match="config.json") as caught:
        nj.train(name="mine", resume=True, quiet=True)
    assert "\n" not in str(caught.value)


@several("rows")
def test_rows(here, capsys, given, said):
    Path("given/rows.jsonl").write_text(f"{given}\n")
    words = ["--json", f"--config.policy={STARTER}", "--config.tasks.files=given/rows.jsonl"]
    refused(["train", *words], 1, said, capsys)
    refused(["build", "given/rows.jsonl", "--json", "--out", "made"], 1, said, capsys)
    try:
        row = json.loads(given)
    except ValueError:
        return
    if given.count('"question"') < 2 and given.count('"document"') < 2:  # one that Python can hold
        with pytest.raises(ValueError) as caught:
            nj.train(dataset=[row], policy=STARTER, quiet=True)
        assert "\n" not in str(caught.value) and not Path("runs").exists()


# ---------------------------------------------------------------- Python


class Reads:
    """A reader over a fake, made when somebody reads."""

    def __getattr__(self, name):
        return getattr(nj.Reader(configuration.load("quickstart")), name)


@several("Python")
def test_python_calls(here, monkeypatch, capsys, given, said):
    before = limits.content(Path())
    if given.startswith("reader."):

        @contextlib.asynccontextmanager
        async def opened(rules):
            yield fakes.first_of_chunk()

        one = subjects.Subject("a fake", fakes.tokenizer(), fakes.template(), opened)
        monkeypatch.setattr(subjects, "named", lambda *what: one)
    names = {
        "nj": nj, "reader": Reads(), "STARTER": str(STARTER), "Path": Path, "nan": float("nan"),
        "train": functools.partial(nj.train, policy=STARTER, quiet=True),
        "evaluate": functools.partial(nj.evaluate, quiet=True),
        "export": functools.partial(nj.export_hf, quiet=True),
        "ROW": {"question": "who ?", "document": STORY, "answers": "red"},
    }  # fmt: skip
    with pytest.raises(ValueError) as caught:
        eval(given, names)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert limits.content(Path()) == before and capsys.readouterr().err == ""


def test_there_are_300_of_them():
    sections = ("exit code 2", "exit code 1", "overrides", "config files", "recipes",
                "settings of a run", "rows", "Python")  # fmt: skip
    listed = [case for section in sections for case in cases(section)]
    assert len(listed) == len(set(listed)) >= 300
