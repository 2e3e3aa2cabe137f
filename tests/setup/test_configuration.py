"""No number of a config gets further than the reading of it, unless it can be meant.

For every number of every shipped config: nan, inf, -1 and 10**30, written on the command
line, in a saved run and in a file. What a config alone cannot judge (`HELD`) is refused by
the value that is built from it before a run's folder exists; `LARGE` is accepted knowingly.
"""

import dataclasses
import functools
import importlib
import json
import math
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from notepad_jax import keys
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.reading.endpoint import EndpointCompleter
from notepad_jax.setup import configuration, learner
from notepad_jax.setup.configuration import ConfigProblem
from notepad_jax.starter.mixed import make_tasks

NAMES = ("quickstart", "ruler", "starter")
TRAINING = ("chat", "memagent", "qwen2_5_14b", "qwen2_5_7b", "qwen3_30b_a3b", "qwen3_4b")
NEVER = (math.nan, math.inf, -math.inf)
HUGE = 10**30

# Finite in float32: a poor choice, and not an impossible one.
LARGE = {
    "grpo.cap", "grpo.clip_high", "grpo.constant", "grpo.dual_clip", "grpo.entropy_weight",
    "grpo.kl_weight", "grpo.lora.alpha", "grpo.overlong_weight", "grpo.tis_cap", "endpoint.timeout",
    "optimizer.learning_rate", "optimizer.adam_learning_rate", "optimizer.eps",
    "optimizer.weight_decay", "optimizer.max_grad_norm", "guidance", "policy.rope_theta",
    "policy.rms_eps", "initial.embed", "initial.branches", "rollout.local.weight",
    "grpo.memory_weight",
}  # fmt: skip


def of_fields(kind, *sections, **more):
    """Builds a dataclass from what sections of a config have of its fields."""
    values = functools.reduce(lambda so_far, section: so_far | vars(section), sections, {})
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{key: values[key] for key in names & set(values)} | more)


# Keys (or their sections) that a value of a lower floor refuses, and what builds it.
HELD = {
    "data.questions": lambda c: make_tasks(0, **vars(c.data)),
    "rollout.group_size": learner.settings_of,
    "grpo": lambda c: of_fields(UpdateSettings, c.grpo, temperature=c.rollout.temperature),
    # 0 pages are derived, when more is known
    "engine": lambda c: of_fields(
        EngineSettings, c.engine, max_prompt=1, max_new_tokens=1, pages=c.engine.pages or 1
    ),
    "endpoint.at_once": lambda c: EndpointCompleter(
        "http://localhost", "", None, at_once=c.endpoint.at_once
    ),
}


def shipped(name):
    return importlib.import_module(f"configs.{name}").get_config()


def refusal(make):
    """Returns the one line with which `make` is refused; None if it is not."""
    try:
        make()
    except ValueError as error:
        assert "\n" not in str(error) and str(error)
        return str(error)
    return None


def expect(key, value, load):
    """`load` reads a config with `value` at `key`: refused, held, or large and known to be."""
    line = refusal(load)
    if line is not None:
        assert key.rpartition(".")[2] in line, line
        return
    assert not any(value is never for never in NEVER), f"{key} took {value}"
    holder = HELD.get(key) or HELD.get(key.partition(".")[0])
    if holder is not None and (line := refusal(lambda: holder(load()))) is not None:
        assert str(value) in line or f"{value:g}" in line, line
    else:
        assert value == HUGE and key in LARGE, f"{key} took {value}"


def keys_of(name):
    """Every number of a shipped config that has one place: not those in lists."""
    known = keys.flat(configuration.load(name))
    return [key for key in numbers(name) if key in known]


def numbers(name):
    """Every number of a shipped config, those of sections in lists, too."""
    kind = type(configuration.load(name))
    return [key for key, hint, _ in keys.leaves(kind) if hint in (int, float)]


@pytest.mark.parametrize("name", NAMES)
def test_no_override_is_taken_that_cannot_be_meant(name):
    for key in keys_of(name):
        for value in (*NEVER, -1, HUGE):
            word = f"{configuration.FLAG}{key}={value}"
            expect(key, value, functools.partial(configuration.load, name, [word]))


@pytest.mark.parametrize("name", NAMES)
def test_no_saved_value_is_taken_that_cannot_be_meant(name):
    for key in keys_of(name):
        for value in (math.nan, -1, HUGE):
            saved = value
            for word in reversed(key.split(".")):
                saved = {word: saved}
            expect(key, value, functools.partial(configuration.load, name, (), saved))


def file_of(name, key, value):
    """Reads a file that has `value` at `key`; in a list of sections, in the last of them."""
    config = place = json.loads(shipped(name).to_json())
    section, _, leaf = key.rpartition(".")
    for word in section.split(".") if section else ():
        place = place[word][-1] if isinstance(place[word], list) else place[word]
    place[leaf] = value
    return configuration.changed(ConfigDict(config), [])


@pytest.mark.parametrize("name", NAMES)
def test_no_file_is_taken_whose_numbers_cannot_be_meant(name):
    for key in numbers(name):
        for value in (math.nan, -1, HUGE):
            expect(key, value, functools.partial(file_of, name, key, value))


@pytest.mark.parametrize("name", [*NAMES, "qwen2_5_14b", "qwen3_4b", "qwen3_30b_a3b", "memagent"])
def test_shipped_configs_are_taken(name):
    assert refusal(lambda: configuration.load(name)) is None
    assert keys.flat(configuration.load(name)).keys() >= keys.flat(shipped(name).to_dict()).keys()


def test_published_batches_are_those_of_their_launchers():
    """run_memory_7B.sh and run_memory_14B.sh of MemAgent@76b7a65, lines 28, 38, 45 and 47."""
    for name, questions, of_a_step in (("qwen2_5_7b", 128, 8), ("qwen2_5_14b", 256, 16)):
        config = configuration.load(name)
        assert (config.rollout.documents, config.rollout.group_size) == (questions, 16)
        assert config.rollout.documents / config.grpo.minibatches == of_a_step
        assert config.optimizer.learning_rate == 1e-6


def test_a_config_for_training_that_lacks_a_key_is_told_which(tmp_path):
    lacking = tmp_path / "mine.py"
    lacking.write_text(
        "import configs.quickstart\n"
        "def get_config():\n"
        "    config = configs.quickstart.get_config()\n"
        "    del config.grpo.ratio\n"
        "    del config.engine['tensor']\n"
        "    return config\n"
    )
    said = refusal(lambda: configuration.load(str(lacking)))
    assert "mine.py has no key" in said and "grpo.ratio" in said and "engine.tensor" in said
    whole = [name for name in TRAINING if refusal(lambda name=name: configuration.load(name))]
    assert whole == []


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["config.step = 3", "return config"], "no config key 'step'; did you mean steps?"),
        (["config.data.tokns = 9", "return config"], "did you mean data.tokens?"),
        (["config.data.tokns", "return config"], "cannot be run at line 4: AttributeError"),
        (["config.steps = 'many'", "return config"], "cannot be run at line 4: TypeError"),
        (["return ml_collections.ConfigDict({**config, 'steps': 'many'})"],
         "steps needs a whole number, and got 'many'"),
        (["config.steps = 2"], "gives nothing where a ConfigDict belongs; get_config() ends with"),
        (["return dict(config)"], "gives a dict where a ConfigDict belongs"),
        (["return 1 / 0"], "cannot be run at line 4: ZeroDivisionError: division by zero"),
        (["raise SystemError('one\\ntwo')"], "cannot be run at line 4: SystemError: one"),
        (["config.grpo = 3", "return config"], "'grpo'"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_one_line(tmp_path, lines, said):
    own = tmp_path / "mine.py"
    start = ["import ml_collections, configs.quickstart", "def get_config():",
             "    config = configs.quickstart.get_config()"]  # fmt: skip
    own.write_text("\n".join([*start, *(f"    {line}" for line in lines)]))
    line = refusal(lambda: configuration.load(str(own)))
    assert line is not None and line.startswith(str(own)) and said in line


def test_a_config_that_lacks_a_section_is_refused_by_what_goes_by_it():
    whole = configuration.load("quickstart")
    for section, command in (("data", "train"), ("data", "plan"), ("evaluate", "quickstart")):
        lacking = dataclasses.replace(whole, **{section: None})
        said = refusal(lambda one=lacking, by=command: configuration.check_use(one, by))
        assert f"no section {section}, which {command} goes by" in said


def test_a_file_may_have_dataclasses_of_its_own(tmp_path):
    own = tmp_path / "mine_beside.py"
    own.write_text(
        "from __future__ import annotations\nimport dataclasses\n"
        "@dataclasses.dataclass\nclass Words:\n    text: str = ''\n"
        "from configs.quickstart import get_config\n"
    )
    assert configuration.load(str(own)) == configuration.load("quickstart")


def test_a_config_from_python_is_looked_at_as_a_file_is():
    config = shipped("quickstart")
    config.step = 3
    line = refusal(lambda: configuration.changed(config, []))
    assert line == "this config: there is no config key 'step'; did you mean steps?"
    assert configuration.changed(shipped("quickstart"), ["--config.steps=3"]).steps == 3


def test_a_saved_key_that_is_not_known_is_named_and_a_lent_one_left_out():
    saved = {"optImizer": {"learning_rate": 1e-3}}
    line = refusal(lambda: configuration.load("quickstart", (), saved))
    assert "'optImizer.learning_rate'; did you mean optimizer.learning_rate?" in line
    assert "config.json" in line
    lent = {"steps": 3, "endpoint": {"url": "http://there"}}
    assert configuration.load("quickstart", (), None, lent).steps == 3
    assert configuration.load("quickstart", (), {"steps": 2}, lent).steps == 2


def test_a_key_that_an_earlier_version_saved_is_passed_over():
    saved = {"engine": {"read_ahead": False, "slots": 3}}
    assert configuration.load("quickstart", (), saved).engine.slots == 3


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_in_the_shipped_config_of_its_kind(name):
    """With its usual value: people look there."""
    known = {key for key, *_ in keys.leaves(type(configuration.load(name)))} - {"recipe"}
    lists = {key for key in known if key.startswith("lessons.")}
    said = keys.flat(shipped(name).to_dict()).keys() - {"lessons"}
    assert known - lists == said - {"recipe"}


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("rollout.max_rounds=0", "rollout.max_rounds is 0; it must be at least 1 and at most 2147"),
        ("data.two_hop=1.5", "data.two_hop is 1.5; it must be at least 0 and at most 1"),
        ("seed=4294967296", "seed is 4294967296; it must be at least 0 and at most 4294967295"),
        (f"steps={10**99}", "steps is a number of 329 bits; it must be"),
        ("optimizer.learning_rate=nan", "optimizer.learning_rate is nan; it must be"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate is 0.0; it must be above 0"),
        ("evaluate.temperature=-1", "in section evaluate: temperature is -1.0; it must be 0 (gre"),
        ("reading.max_memory=0", "in section reading: max_memory is 0; it must be at least 1 to"),
        ("grpo.lora.targets=q,x", "in section grpo.lora: lora.targets has 'x'; there are q, k"),
    ],
)
def test_the_line_names_key_value_and_range(word, line):
    said = refusal(lambda: configuration.load("quickstart", [configuration.FLAG + word]))
    assert (said or "").startswith(line or "") and bool(said) == bool(line)


@pytest.mark.parametrize(
    ("saved", "line"),
    [
        ({"steps": 7.5}, "steps needs a whole number, and got 7.5"),
        ({"steps": None}, "steps needs a whole number, and got None"),
        ({"steps": True}, "steps needs a whole number, and got True"),
        ({"evaluate": {"lengths": 3}}, "evaluate.lengths needs a list of texts, and got 3"),
        ({"grpo": {"clip_low": "x"}}, "grpo.clip_low needs a number, and got 'x'"),
    ],
)
def test_a_saved_value_of_another_type_is_named(saved, line):
    said = refusal(lambda: configuration.load("quickstart", (), saved))
    assert said is not None and said.startswith(line)


def test_a_file_may_not_write_words_where_numbers_belong():
    for value in ("many", None, True, 2.5):
        with pytest.raises(ConfigProblem, match=f"steps needs a whole number, and got {value!r}"):
            file_of("quickstart", "steps", value)


def test_an_optimizer_with_keys_of_another_time_is_one_line():
    config = shipped("quickstart")
    config.optimizer.nesterov = True
    line = refusal(lambda: configuration.changed(config, []))
    assert "there is no config key 'optimizer.nesterov'" in line


def test_what_was_read_is_frozen():
    config = configuration.load("quickstart")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.grpo.clip_low = 0.1
    other = keys.changed(config, {"grpo.clip_low": 0.1, "steps": 2})
    assert (other.grpo.clip_low, other.steps, other.grpo.clip_high) == (0.1, 2, 0.2)
    assert (config.grpo.clip_low, config.steps) == (0.2, 36)


def test_the_starter_is_found_wherever_one_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = configuration.load("quickstart").policy
    assert (Path(found) / "model.safetensors").is_file()
    assert configuration.load("quickstart", ["--config.policy=data/starter/"]).policy == found
    assert configuration.load("quickstart", ["--config.policy=data/other"]).policy == "data/other"
    (tmp_path / "data" / "starter").mkdir(parents=True)
    assert configuration.load("quickstart").policy == "data/starter"  # one's own comes first
