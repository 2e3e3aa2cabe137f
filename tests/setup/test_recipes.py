"""Published algorithms as changes of any config: found, applied in order, kept by the run."""

import importlib
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from notepad_jax import cli, keys
from notepad_jax.commands import train
from notepad_jax.commands.parser import build_parser
from notepad_jax.setup import configuration, learner, settings
from notepad_jax.setup.configuration import FLAG, ConfigProblem

ROOT = Path(__file__).parents[2]
NAMES = configuration.recipes()
TRAINING = ("quickstart", "chat", "memagent", "qwen2_5_14b", "qwen2_5_7b")
DERIVED = "?"


def loaded(*words, name="quickstart", saved=None):
    return configuration.load(name, [FLAG + word for word in words], saved)


def assigned(recipe):
    """What `apply` sets whatever stood there: {key: value}, DERIVED for what follows from sizes."""

    def marked(value, k):
        if isinstance(value, bool):
            return bool(k)
        if isinstance(value, int | float):
            return type(value)(1001 + 99 * k)
        return f"?{k}" if isinstance(value, str) else (f"?{k}",)

    before, after = [], []
    for k in (0, 1):
        values = {key: marked(value, k) for key, value in keys.flat(loaded()).items()}
        config = ConfigDict(configuration._nested(values))
        before.append(keys.flat(config.to_dict()))
        configuration._function(
            configuration._find(recipe, configuration.RECIPE), "recipe", "apply"
        )(config)
        after.append(keys.flat(config.to_dict()))
    assert set(before[0]) == set(after[0])
    changed = {key for key in before[0] for k in (0, 1) if before[k][key] != after[k][key]}
    same = {key: after[0][key] for key in changed if after[0][key] == after[1][key]}
    return {key: same.get(key, DERIVED) for key in changed}


def listed():
    """The same, out of the table in docs/algorithms.md."""
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = page.partition("| `--recipe` |")[2].partition("\n\n")[0]
    found = {}
    for row in table.splitlines()[2:]:
        name, *choices, further = (re.search("`([^`]+)`", cell)[1] for cell in row.split("|")[1:6])
        said = dict(zip(("advantage", "ratio", "normaliser"), choices, strict=True))
        said |= dict(word.split("=") for word in further.split())
        found[name] = {key if "." in key else f"grpo.{key}": value for key, value in said.items()}
    return found


def as_listed(value):
    """A value as one writes it behind --config.KEY=."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:g}" if isinstance(value, int | float) else value


def said(recipe):
    """{key: (value, where it stands)} of a recipe's file."""
    return importlib.import_module(f"configs.recipes.{recipe}").SAID


CODE = r"[\w.-]+/[\w.-]+@[0-9a-f]{40}:[\w./-]+#\d+(,\d+)* \w+.*"
PAPER = r"arXiv:\d{4}\.\d{5}, (section|eq\.|table) [\d.]*\d.*"


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_sets_what_its_sources_say_and_nothing_else(name):
    """Every key has its place, and every value that is no function of sizes comes from there."""
    sources = said(name)
    values = {key: DERIVED if one.value is None else one.value for key, one in sources.items()}
    assert assigned(name) == values
    for key, one in sources.items():
        assert re.fullmatch(f"{CODE}|{PAPER}|ours: .+", one.at), (key, one.at)
        assert name == "imitate" or not one.at.startswith("ours"), "it is published"


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("RECIPE_SOURCES"), reason="needs clones, as owner/name")
@pytest.mark.parametrize("name", NAMES)
def test_the_lines_that_are_named_say_so(name):
    """In $RECIPE_SOURCES/owner/name: the names stand there, and a number at a line's end is it."""
    units = {"grpo.overlong_weight": 2}  # of rewards from -1 to 1
    for key, (value, at) in said(name).items():
        if not re.fullmatch(CODE, at):
            continue
        place, _, words = at.partition(" ")
        where, _, numbers = place.partition("#")
        repository, _, file = where.partition("@")
        text = subprocess.run(
            ["git", "-C", f"{os.environ['RECIPE_SOURCES']}/{repository}", "show", file],
            check=True, capture_output=True, text=True,
        ).stdout.splitlines()  # fmt: skip
        lines = [text[int(number) - 1] for number in numbers.split(",")]
        assert all(word in " ".join(lines) for word in words.split()), (key, lines)
        told = re.search(r"[=: ]([\d.]+(e-?\d+)?)\s*([\\,#].*)?$", lines[0])
        if told and len(lines) == 1 and value is not None:
            assert float(told[1]) == value * units.get(key, 1), (key, lines)


def test_the_table_says_what_the_files_do():
    told = {
        name: {key: as_listed(value) for key, value in assigned(name).items()} for name in NAMES
    }
    assert listed() == told


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_goes_with_every_config_for_training(name):
    for base in TRAINING:
        config = loaded(f"recipe={name}", name=base)
        assert config.recipe == name
        learner.settings_of(config)  # no choice that another refuses
        was, now = (keys.flat(c) for c in (loaded(name=base), config))
        changed = {key for key in was if was[key] != now[key]} - {"recipe"}
        assert {key.partition(".")[0] for key in changed} <= {"grpo", "rollout", "tasks", "reading"}


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_opens_with_a_command_that_there_is(name):
    text = (ROOT / "configs" / "recipes" / f"{name}.py").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (notepad-jax (?:.*\\\n)*.*)$", text, re.MULTILINE)
    _, *words = shlex.split(command.replace("\\\n", " "))
    arguments, overrides = cli.parsed(words)
    assert arguments.recipe == name and arguments.run is train.run
    config = cli.config_name(arguments, {})
    configuration.load(config, cli.shorthand(arguments, config) + overrides)
    assert re.search(r"\bMeasured\s+here:", text)


def test_overrides_win_over_a_recipe_whatever_their_order():
    for words in (["grpo.clip_high=0.25", "recipe=dapo"], ["recipe=dapo", "grpo.clip_high=0.25"]):
        config = loaded(*words)
        assert (config.grpo.clip_high, config.grpo.minibatches) == (0.25, 16)


def test_a_caller_from_python_names_it_among_the_changes():
    config = settings.loaded("chat", {"recipe": "gspo", "grpo": {"minibatches": 2}})
    assert (config.recipe, config.grpo.ratio, config.grpo.minibatches) == ("gspo", "gspo", 2)
    assert settings.loaded(config, {"steps": 3}).grpo.minibatches == 2  # not applied again


def test_a_recipe_sees_the_sizes_that_are_asked_for():
    """8 chunks of 256 tokens, memories of 8 and an answer of 4; then 4 chunks and memories of 6."""
    assert loaded("recipe=dr_grpo").grpo.constant == 8 * 8 + 4
    assert loaded("recipe=dapo", "reading.max_answer=40").grpo.overlong_window == 1  # memories of 8
    long = ("reading.max_answer=40", "reading.max_memory=100")
    assert loaded("recipe=dapo", *long).grpo.overlong_window == 8
    found = loaded("recipe=dr_grpo", "reading.max_memory=6", "reading.chunk_size=512")
    assert found.grpo.constant == 4 * 6 + 4
    files = ("tasks.files=train.jsonl", "recipe=dr_grpo")  # of 40,000 tokens in chunks of 5,000
    assert loaded(*files, name="memagent").grpo.constant == 8 * 1024 + 1024


def test_a_run_that_goes_on_has_its_recipe(tmp_path):
    began = loaded("recipe=dapo", "grpo.clip_high=0.3", "grpo.minibatches=2")
    saved = keys.plain(began)
    assert loaded(saved=saved) == began
    again = loaded("recipe=gspo", saved=saved)
    assert (again.recipe, again.grpo.ratio, again.grpo.minibatches) == ("gspo", "gspo", 4)
    del saved["recipe"]  # of a run before there were any
    assert loaded(saved=saved).recipe == ""


def write(path, *lines):
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_a_file_of_the_user_s_is_a_recipe(tmp_path):
    mine = write(
        tmp_path / "mine.py", "def apply(config):", "    config.grpo.advantage = 'rloo'",
        "    config.tasks.weights = ('a=2',)",
    )  # fmt: skip
    config = loaded(f"recipe={mine}")
    assert (config.grpo.advantage, config.tasks.weights) == ("rloo", ("a=2",))
    assert config.recipe == mine
    Path(mine).unlink()  # its values stay
    assert loaded(saved=keys.plain(config)).grpo.advantage == "rloo"
    assert loaded("recipe=configs/recipes/dapo.py").recipe == "dapo"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            ["def apply(config):", "    config.grpo.cliphigh = 1"],
            "'grpo.cliphigh'; did you mean",
        ),
        (
            ["def apply(config):", "    config.grpo.clip_high = 'a'"],
            "at line 2: TypeError: Could not",
        ),
        (["def apply(config):", "    return config"], "returns something; it changes the config"),
        (["def apply(config):", "    config.steps = -3"], "steps is -3; it must be at least 1"),
        (["def appply(config):", "    pass"], "has no function apply(); a recipe file needs one"),
        (["def apply(config:"], "cannot be run at line 1: SyntaxError"),
        (["import nobody_has_this"], "at line 1: ModuleNotFoundError: No module"),
    ],
)
def test_a_file_that_cannot_be_a_recipe_is_one_line(tmp_path, lines, said):
    with pytest.raises(ConfigProblem, match=re.escape(said)) as problem:
        loaded(f"recipe={write(tmp_path / 'mine.py', *lines)}")
    assert "\n" not in str(problem.value)


def test_a_recipe_that_there_is_not_is_told_from_one_that_comes_near(tmp_path, capsys):
    with pytest.raises(ConfigProblem, match="there is no recipe dapoo; did you mean dapo?"):
        loaded("recipe=dapoo")
    with pytest.raises(ConfigProblem, match=f"there is no recipe x; there are {', '.join(NAMES)}"):
        loaded("recipe=x")
    note = write(tmp_path / "note.md", "dapo")
    with pytest.raises(ConfigProblem, match=r"note.md is no Python file; a recipe is one"):
        loaded(f"recipe={note}")
    with pytest.raises(ConfigProblem, match="two recipes are asked for .dapo, logo., and each"):
        loaded("recipe=dapo", "recipe=logo")
    with pytest.raises(SystemExit):
        cli.main(["train", "--recipe", "dapo", "--recipe", "logo"])
    assert "--recipe is said twice, dapo and logo; say one" in capsys.readouterr().err
    assert cli.main(["train", "--config", "ruler", "--recipe", "dapo"]) == 1
    assert "which config ruler does not have; it is for training" in capsys.readouterr().err


def test_a_config_file_calls_a_recipe_and_does_not_name_it(tmp_path):
    opening = ["from configs import quickstart", "from configs.recipes import dapo"]
    made = [*opening, "def get_config():", "    config = quickstart.get_config()"]
    calling = write(
        tmp_path / "calling.py", *made, "    dapo.apply(config)", "    config.grpo.clip_high = 0.3",
        "    return config",
    )  # fmt: skip
    config = configuration.load(calling)
    assert (config.grpo.clip_high, config.grpo.minibatches) == (0.3, 16)
    naming = write(tmp_path / "naming.py", *made, "    config.recipe = 'dapo'", "    return config")
    with pytest.raises(ConfigProblem, match="naming.py sets recipe='dapo', which --recipe alone"):
        configuration.load(naming)
    own = ConfigDict(configuration._nested(keys.flat(loaded())))
    own.recipe = "dapo"
    with pytest.raises(ConfigProblem, match="this config sets recipe='dapo'"):
        configuration.changed(own, [])
    assert configuration.changed(loaded("recipe=gspo"), [f"{FLAG}steps=3"]).recipe == "gspo"


def test_help_names_the_recipes(capsys):
    for command in ("train", "quickstart", "plan"):
        with pytest.raises(SystemExit):
            build_parser(command).parse_args([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert all(name in said for name in NAMES) and "apply(config)" in said
