"""A folder of adapters is a policy: found, read, trained on and exported, its base elsewhere."""

import asyncio
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from notepad_jax import cli, functions, keys
from notepad_jax.checkpoint import lazy_arrays
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.hf.adapters import export_adapters
from notepad_jax.model import lora, lora_merge, parameters
from notepad_jax.planner import planned_policy
from notepad_jax.programs import beside, convert, export, serve
from notepad_jax.setup import builders, configuration, learner, policies
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import train
from notepad_jax.types import Prompt, SamplingParams, tokens
from tests import limits, tiny
from tests.runs import SMALL, policy_folder, run

CONFIG = dataclasses.replace(
    tiny.CONFIG, vocab_size=608, valid_vocab=600, layers=1, tied_embeddings=True
)
CHOSEN = lora.Lora(2, 3.0, ("q", "down"))
OUT = ("q_lora_out", "down_lora_out")
SCREEN = SilentScreen()
WORDS = (
    "--config.policy=data/habits", "--config.grpo.lora.rank=2", "--config.grpo.lora.alpha=3",
    "--config.grpo.lora.targets=('q', 'down')",
)  # fmt: skip


def spread(reading):
    """A reward that a random policy is given, now and then."""
    return len(reading.answer) % 7 / 6


def some(seed=0, chosen=CHOSEN, config=CONFIG):
    """Adapters after some training: B is no longer zero."""
    rng = np.random.default_rng(seed)
    fresh = jax.eval_shape(lambda: lora.init(config, chosen, jax.random.key(0)))
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32) / 8, fresh)


def summed(adapters, config=CONFIG):
    return lora_merge.merged(lora.adapted(config, tiny.params(0, config), CHOSEN, adapters))


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def near(found, wanted):
    """As weights that numpy added up are to those that XLA did."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, wanted)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Adapters in data/habits on policies/base, a Hugging Face folder; policies/mine imported."""
    folder = tmp_path_factory.mktemp("built")
    base = policy_folder(CONFIG, folder / "policies" / "base")
    convert.import_hf(str(base), folder / "policies" / "mine", SCREEN)
    export_adapters(CONFIG, CHOSEN, some(), "policies/base", folder / "data" / "habits")
    return folder


@pytest.fixture
def here(built, tmp_path, monkeypatch):
    shutil.copytree(built, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def say(folder, **said):
    """Changes adapter_config.json."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


def test_the_base_is_found_and_read_with_the_adapters_beside_it(here, monkeypatch):
    """An absolute path, or one from the working folder, the adapters, or where theirs was made."""
    habits, wanted = here / "data" / "habits", lora.adapted(
        CONFIG, tiny.params(0, CONFIG), CHOSEN, some()
    )  # fmt: skip
    (here / "elsewhere").mkdir()
    for base, cwd, name in (
        ("policies/base", here, "data/habits"), ("policies/mine", here, "data/habits"),
        (str(here / "policies" / "base"), here / "elsewhere", str(habits)),
        ("../../policies/mine", here / "elsewhere", "../data/habits"),
        ("policies/base", here / "elsewhere", str(habits)),
    ):  # fmt: skip
        monkeypatch.chdir(cwd)
        say(habits, base_model_name_or_path=base)
        policy = builders.load_policy(name)
        same(policy.params, wanted)
        assert policy.name == name and policy.config.valid_vocab == 600
        assert policy.folder.samefile(here / "policies" / base.rpartition("/")[2])
        words = builders.words(name)
        assert words.folder.samefile(policy.folder) and words.adapters == CHOSEN
    assert lora.of(policy.params) == policies.adapted(name) == CHOSEN
    assert policies.adapted(policy.folder) is None


def test_adapters_are_float32_whatever_the_policy_computes_in(here):
    """They are rounded where they are multiplied, and a base in bfloat16 stays as it is."""
    huggingface.export(
        CONFIG, tiny.params(0, CONFIG), "half", "bfloat16",
        huggingface.companions("policies/base"),
    )  # fmt: skip
    export_adapters(CONFIG, CHOSEN, some(), "half", "data/half", "bfloat16")
    base, ours = jax.tree.map(lambda x: x.astype("bfloat16"), (tiny.params(0, CONFIG), some()))
    for dtype in ("float32", "bfloat16"):
        found = builders.load_policy("data/half", dtype).params
        same(lora.factors(found), jax.tree.map(lambda x: x.astype("float32"), ours))
        # On a CPU the base is read into the float32 that it computes in.
        assert found["layers"]["q"].dtype == found["layers"]["k"].dtype == dtype
        same(lora.plain(found), jax.tree.map(lambda x, to=dtype: x.astype(to), base))


def test_what_is_not_there_is_one_line(here):
    habits = here / "data" / "habits"

    def refused(says, name="data/habits", load=policies.resolved):
        with pytest.raises(ValueError, match=says) as raised:
            load(name)
        assert "\n" not in str(raised.value)
        shutil.copytree(here / "kept", habits, dirs_exist_ok=True)

    shutil.copytree(habits, here / "kept")
    for base in ("policies/gone", "Org/Model-1B", "gs://bucket/model"):
        say(habits, base_model_name_or_path=base)
        refused(f"data/habits holds adapters of '{base}' .*no such folder; bring .*SRC {base}")
    for base in (None, "", 3, "a\x00b"):
        say(habits, base_model_name_or_path=base)
        refused("says base_model_name_or_path: .*name the folder of the policy")
    say(habits, base_model_name_or_path="kept")
    refused("holds adapters of kept, which are adapters as well; merge those")
    (here / "runs" / "one").mkdir(parents=True)
    shutil.copytree("policies/mine/checkpoints", "runs/one/checkpoints")
    (here / "runs" / "one" / "config.json").write_text('{"policy": "policies/base"}')
    say(habits, base_model_name_or_path="runs/one")
    refused("holds adapters of runs/one, which is a run: its newest step changes; export")
    refused("data/habits has no finished checkpoint", "data/habits@3")
    (habits / "adapter_config.json").unlink()
    refused("habits/adapter_config.json is missing; adapters are")
    (habits / "adapter_model.safetensors").unlink()
    refused("habits/adapter_model.safetensors is missing", load=builders.load_policy)
    policy_folder(dataclasses.replace(CONFIG, width=64), here / "other")
    say(habits, base_model_name_or_path="other")
    refused("and on other with r=2 it has .*name the policy that it was", load=builders.load_policy)
    assert cli.main(["eval", "--json", "--policy", "data/habits@best"]) == 1


def test_a_whole_policy_beside_adapters_is_a_policy(here):
    """As some write what they trained: the folder's own weights are the ones that are read."""
    shutil.copytree("data/habits", "policies/base", dirs_exist_ok=True)
    same(builders.load_policy("policies/base").params, tiny.params(0, CONFIG))


def test_exports_are_whole_or_adapters_once_more(here, capsys):
    for base, name in (("policies/base", "a"), ("policies/mine", "b")):
        say(here / "data" / "habits", base_model_name_or_path=base)
        assert cli.main(["export-hf", "data/habits", name, "--dtype", "float32"]) == 0
        told = capsys.readouterr()
        assert f"{name}: data/habits as a qwen3, " in told.out
        assert "left what they add with a relative error of" in told.err
        assert "--dtype" not in told.err
        config, params = huggingface.import_policy(name)
        assert config.valid_vocab == 600 or base == "policies/base"
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, summed(some())
        )
        assert builders.load_policy(name).tokenizer.vocab_size == 600
    words = ["export-hf", "data/habits", "c", "--adapters", "--dtype", "bfloat16"]
    assert cli.main([*words, "--base", "policies/base"]) == 0
    text = json.loads((here / "c" / "adapter_config.json").read_text())
    assert text["base_model_name_or_path"] == "policies/base"
    half = jax.tree.map(lambda x: x.astype("bfloat16").astype(np.float32), some())
    same(lora_merge.merged(builders.load_policy("c").params), summed(half))
    # What is not said of the dtype is bfloat16, which has no room for a small delta.
    small = {"layers": some()["layers"] | {n: 1e-4 * some()["layers"][n] for n in OUT}}
    export_adapters(CONFIG, CHOSEN, small, "policies/base", here / "small")
    capsys.readouterr()
    assert cli.main(["export-hf", "small", "e", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["delta_lost"] > 0.9
    assert "relative error of" in told.err
    assert "use --dtype float32, or --adapters, which writes them alone" in told.err
    assert cli.main(["export-hf", "policies/mine", "f", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["delta_lost"] is None and "relative error" not in told.err
    assert cli.main(["export-hf", "data/habits", "d", "--base", "x"]) == 1
    assert "--base is what adapters belong on; say --adapters" in capsys.readouterr().err
    assert cli.main(["export-hf", "data/habits", "data", "--overwrite"]) == 1
    assert "data holds the source" in capsys.readouterr().err


def test_what_an_export_is_read_with_is_never_replaced(here, capsys):
    """Nor by adapters that name it as their base: nothing could be read with them any more."""
    run = here / "runs" / "one"
    shutil.copytree("policies/mine/checkpoints", run / "checkpoints")
    (run / "config.json").write_text('{"policy": "policies/base"}')
    shutil.copytree("policies/base", "policies/like")
    before = limits.content(here)
    for words, says in (
        (["runs/one", "policies/base"], "policies/base is the source; choose another"),
        (["runs/one", "policies/base", "--adapters"], "policies/base is the source"),
        (["data/habits", "policies/base", "--adapters"], "policies/base is the source"),
        (["runs/one", "policies/like", "--like", "policies/like"], "policies/like is the source"),
        (["data/habits", "policies/like", "--adapters", "--base", "policies/like"],
         "policies/like is the source"),
    ):  # fmt: skip
        assert cli.main(["export-hf", *words, "--overwrite", "--json"]) == 1
        assert says in capsys.readouterr().err
        assert limits.content(here) == before
    assert cli.main(["export-hf", "runs/one@0", "x", "--step", "0", "--json"]) == 1
    assert "runs/one@0@0: the step of runs/one is said twice; say one" in capsys.readouterr().err


def settings(*words):
    return configuration.load("quickstart", [*SMALL, *WORDS, *words])


def merged_of(learning):
    return lora_merge.merged(parameters.join(learning.frozen, learning.state.masters))


def test_training_goes_on_with_them_and_the_reference_is_where_it_began(here):
    loaded = builders.load_policy("data/habits")
    config = settings("--config.grpo.kl_weight=0.1", "--config.optimizer.decay=none")
    learning = learner.prepare(config, loaded.config, loaded.params)
    same(learning.state.masters, some())
    same(merged_of(learning), summed(some()))
    learning.state = dataclasses.replace(
        learning.state, masters=jax.tree.map(lambda x: x + 1, learning.state.masters)
    )
    same(lora_merge.merged(learning.reference), summed(some()))
    moved = jax.tree.map(lambda x: x + 1, some())
    same(merged_of(learning), summed(moved))
    # All weights are trained of the sum, in float32.
    whole = settings("--config.grpo.lora.rank=0", "--config.optimizer.decay=none")
    learning = learner.prepare(whole, loaded.config, builders.load_policy("data/habits").params)
    assert learning.frozen == {}
    same(learning.state.masters, summed(some()))


def test_other_adapters_are_refused_before_any_weight_is_read(here, capsys, monkeypatch):
    monkeypatch.setattr(builders, "load_policy", None)
    said = "has adapters with grpo.lora.rank=2 grpo.lora.alpha=3 grpo.lora.targets=q,down, and "
    for words in (["train", "--name", "x"], ["quickstart", "--name", "x"]):
        assert cli.main([*words, "--json", "--config.policy=data/habits"]) == 1
        err = capsys.readouterr().err
        assert said in err and "train all weights (grpo.lora.rank=0)" in err
    with pytest.raises(ValueError, match="has adapters with grpo.lora.rank=2"):
        planned_policy.policy_of(settings("--config.grpo.lora.rank=4"), "tpu")
    told = planned_policy.policy_of(settings(), "tpu")
    assert told.name == "data/habits" and told.counted_by == "its own tokenizer"
    # What the message says can be said.
    config = settings("--config.grpo.lora.targets=q,down")
    assert config.grpo.lora.wanted == CHOSEN


def moved(folder, *words):
    """A run of one step that did not learn: what is trained moved by 1/64, and was saved."""
    config = settings("--config.optimizer.decay=none", *words)
    folder.mkdir(parents=True)
    began = train.prepare(config, folder, SCREEN, False, None)
    (folder / "config.json").write_text(json.dumps(keys.plain(config)))
    learning = began.learner
    learning.state = jax.tree.map(lambda x: x + x.dtype.type(1 / 64), learning.state)
    meta = {"start": began.start, "policy": dataclasses.asdict(learning.config)}
    saved = learner.saved(learning)
    began.checkpoints.save(1, *saved, {}, meta | {"optimizer_steps": 1})


def check_chain(here, *words):
    """A run in runs/one from data/habits ends in adapters of the same base, at its weights."""
    said = json.loads((here / "runs" / "one" / "config.json").read_text())
    assert said["policy"] == "data/habits"
    found = policies.resolved("runs/one")
    assert policies.folder_of(found) == policies.base_of(found) == "policies/base"
    first = lazy_arrays.open_tree(f"{found.steps}/0")
    same(jax.tree.map(lambda leaf: leaf[()], first), some())
    assert cli.main(["export-hf", "runs/one", "data/more", "--adapters"]) == 0
    text = json.loads((here / "data" / "more" / "adapter_config.json").read_text())
    assert text["base_model_name_or_path"] == "policies/base"
    wanted = builders.load_policy("runs/one").params
    same(builders.load_policy("data/more").params, wanted)
    assert cli.main(["export-hf", "runs/one", "whole", "--dtype", "float32"]) == 0
    near(builders.load_policy("whole").params, lora_merge.merged(wanted))
    more = builders.load_policy("data/more").params
    same(lora.plain(more), tiny.params(0, CONFIG))
    apart = np.abs(more["layers"]["q_lora_out"] - some()["layers"]["q_lora_out"])
    assert lora.of(more) == CHOSEN and 1e-4 < apart.max() < 0.1
    # Resuming notices other adapters under the same name, which would be another reference.
    shutil.rmtree("data/habits")
    shutil.copytree("data/more", "data/habits")
    with pytest.raises(ValueError, match="in data/habits; not the same in data/habits: weights;"):
        train.prepare(settings(*words), here / "runs" / "one", SCREEN, True, None)


def test_a_chain_of_runs_ends_in_one_set_of_adapters_on_the_same_base(here):
    moved(here / "runs" / "one")
    check_chain(here, "--config.optimizer.decay=none")


@pytest.mark.slow
def test_a_chain_of_runs_that_learn_does(here):
    with functions.lending([spread]) as (name,):
        words = ("--config.steps=1", f"--config.tasks.reward={name}")
        (learnt,) = run(here / "runs" / "one", *WORDS, *words)
        assert learnt["update/optimizer_steps"] == 1
        check_chain(here, *words)


@pytest.mark.slow
def test_a_run_goes_on_with_another_runs_adapters_on_the_same_base(here):
    moved(here / "runs" / "one")
    moved(here / "runs" / "two", "--config.policy=runs/one@1")
    one, two = (lazy_arrays.open_tree(f"runs/{run}/checkpoints/1") for run in ("one", "two"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[()] + 1 / 64, b[()]), one, two)
    found = policies.resolved("runs/two")
    assert policies.base_of(found) == "policies/base" and policies.adapted("runs/two") == CHOSEN
    export.export_adapters("runs/two", "out", SCREEN)
    same(builders.load_policy("out").params, builders.load_policy("runs/two").params)
    with pytest.raises(ValueError, match="has adapters with .*lora.rank=2 .*export-hf, --dtype fl"):
        planned_policy.policy_of(
            settings("--config.policy=runs/one@1", "--config.grpo.lora.rank=4"), "tpu"
        )


@pytest.mark.slow
def test_adapters_trained_on_a_runs_weights_name_no_other_base(here):
    moved(here / "runs" / "one", "--config.grpo.lora.rank=0")
    assert not (here / "runs" / "one" / "checkpoints" / "base").exists()
    moved(here / "runs" / "two", "--config.policy=runs/one@1")
    with pytest.raises(ValueError, match="on the weights of runs/one@1, which is a run: export"):
        export.export_adapters("runs/two", "out", SCREEN)
    assert cli.main(["export-hf", "runs/one", "first", "--dtype", "float32"]) == 0
    export.export_adapters("runs/two", "out", SCREEN, base="first")
    same(builders.load_policy("out").params, builders.load_policy("runs/two").params)


# ---------------------------------------------------------------- many on one base

SERVED = (
    "--config.policy=policies/base", "--config.engine.slots=8", "--config.engine.row_tokens=0",
    "--config.engine.pages=64", "--config.engine.replicas=1", "--config.engine.per_cpu=1",
    "--config.serve.max_prompt=64", "--config.serve.max_completion=8",
)  # fmt: skip


def opened(*adapters):
    """What `serve` opens of the base with `adapters` beside it."""
    config = configuration.load("quickstart", SERVED)
    others = beside.named(config, adapters, "base")
    policy = builders.load_policy(config.policy, config.dtype, builders.to_read(config.engine))
    weights = serve.ServedWeights(config, policy, SCREEN)
    policy, others = beside.adapted(config, policy, others, SCREEN)
    return policy, *serve.opened(config, policy, "base", weights, others)


@pytest.mark.slow
def test_several_are_served_from_one_base_and_each_says_what_it_says_alone(here):
    fewer = lora.Lora(3, 6.0, ("o",))
    export_adapters(CONFIG, fewer, some(1, fewer), "policies/base", here / "data" / "fewer")
    prompt = Prompt(tokens(range(10, 30)), tokens([7]))
    sampling = SamplingParams(0.0, 1.0, 8, (), 0)

    async def said(engines, served):
        async with engines:
            done = []
            for one in served:
                with one.seat() as seat:
                    done.append(seat.complete(prompt, sampling))
            return [(c.tokens.tolist(), c.behaviour_logprobs) for c in await asyncio.gather(*done)]

    policy, engines, served = opened("habits=data/habits", "fewer=data/fewer")
    every = (served, *served.beside)
    assert [one.ids[1] for one in every] == ["base:notepad", "habits:notepad", "fewer:notepad"]
    together = asyncio.run(said(engines, every))
    base = builders.load_policy("policies/base").params
    held = sum(x.nbytes for x in jax.tree.leaves(policy.params))
    assert held < 1.5 * sum(x.nbytes for x in jax.tree.leaves(base))
    for one, found, place in zip(
        every, together, ("policies/base", "data/habits", "data/fewer"), strict=True
    ):
        config = configuration.load("quickstart", (*SERVED[1:], f"--config.policy={place}"))
        alone = builders.load_policy(place)
        assert one.fingerprint() == beside.fingerprint_of(alone)
        weights = serve.ServedWeights(config, alone, SCREEN)
        ids, logprobs = asyncio.run(said(*_first(serve.opened(config, alone, "x", weights))))[0]
        assert found[0] == ids
        np.testing.assert_allclose(found[1], logprobs, atol=1e-5)
    assert len({str(ids) for ids, _ in together}) == 3


def _first(pair):
    engines, served = pair
    return engines, [served]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["habits"], "--adapters habits: write NAME=POLICY"),
        (["base=data/habits"], "there is another model base"),
        (["a=data/habits", "a=data/habits"], "there is another model a"),
        (["a=policies/mine"], "policies/mine has no adapters"),
        (["a=data/other"], "data/other has its adapters on another base than policies/base"),
    ],
)
def test_what_cannot_lie_beside_a_policy_is_one_line(here, words, says):
    policy_folder(CONFIG, here / "policies" / "other", seed=5)
    export_adapters(CONFIG, CHOSEN, some(), "policies/other", here / "data" / "other")
    with pytest.raises(ValueError, match=says):
        opened(*words)
