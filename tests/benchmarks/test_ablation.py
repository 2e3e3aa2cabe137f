"""The comparison of algorithms: its plan, what it does not do twice, its table and its page."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from benchmarks import ablation, ablation_page
from notepad_jax import keys
from notepad_jax.setup import configuration
from notepad_jax.telemetry.identity import write_json

ROOT = Path(__file__).parents[2]


NAMES = [variant.name for variant in ablation.VARIANTS]


def result(variant, seed, scores, words=(), rate=1.0):
    """A run of three validations that ended at the last of `scores`."""
    of = dict.fromkeys(ablation_page.KINDS, scores[-1])
    return {
        "variant": variant,
        "rate": rate,
        "updates": 1,
        "seed": seed,
        "words": list(words),
        "training_cpu_seconds": 50.0 + seed,
        "curve": [[4 * k, score] for k, score in enumerate(scores)],
        "reward": [],
        "final": {"512": {"all": scores[-1], **of}, "4096": {"all": 0.25, **of}},
    }


def planned(out, names, seeds, rate=1.0, steps=0):
    chosen = ablation.variants(names)
    return ablation.plan(out, chosen, seeds, steps, dict.fromkeys(NAMES, rate))


def test_the_plan_is_every_variant_from_every_seed_and_one_change_each(tmp_path):
    runs = planned(tmp_path, [], [0, 1, 2])
    assert len({run.folder for run in runs}) == len(runs) == 3 * len(ablation.VARIANTS)
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    usual = keys.flat(ablation.config_of(runs[0], "starter"))
    rates = {"optimizer.learning_rate", "optimizer.adam_learning_rate"}
    for run in runs:
        if run.variant.updates > 1:
            continue  # recipes: below
        own = keys.flat(ablation.config_of(run, "starter"))
        changed = {key for key in own if own[key] != usual[key]} - {"seed"}
        assert changed == {word.partition("=")[0] for word in run.variant.words}
        assert all(own[key] == usual[key] for key in rates)
    assert {"dr_grpo", "grpo", "tmn_reweight", "curriculum"} <= {run.variant.name for run in runs}
    assert usual["data.kinds"] == ("exact", "list", "count", "order")


def test_every_recipe_is_compared_at_a_rate_that_its_updates_share(tmp_path):
    runs = [run for run in planned(tmp_path, [], [0], rate=2.0) if run.variant.updates > 1]
    shipped = (ROOT / "configs" / "recipes").glob("*.py")
    # What is imitated has a script, and the ablation's documents have none.
    others = ("__init__", "imitate")
    names = sorted(f"recipe {path.stem}" for path in shipped if path.stem not in others)
    assert sorted(run.variant.name for run in runs) == names
    usual = configuration.load("mix").optimizer.learning_rate
    for run in runs:
        config = ablation.config_of(run, "starter")
        assert run.variant.name == f"recipe {config.recipe}"
        assert config.grpo.minibatches * config.grpo.epochs == 4
        assert config.optimizer.learning_rate * 4 == pytest.approx(2 * usual)


def test_fewer_steps_end_their_rate_with_them(tmp_path):
    (run,) = planned(tmp_path, ["grpo"], [3], steps=6)
    config = ablation.config_of(run, "starter")
    assert (config.steps, config.optimizer.decay_steps, config.seed) == (6, 6, 3)
    assert config.optimizer.decay_from == 2
    assert config.grpo.advantage == "grpo" and config.policy == "starter"


def test_the_rate_of_the_highest_curve_is_taken_where_all_were_tried(tmp_path):
    tried = ablation.trials(tmp_path, ablation.variants(["dr_grpo", "grpo"]), 0)
    assert {run.seed for run in tried} == {ablation.TRIAL}
    assert [run.rate for run in tried] == 2 * list(ablation.RATES)
    for run, last in zip(tried, (0.9, 0.5, 0.7, 0.9, 0.9), strict=False):
        found = result(run.variant.name, run.seed, [0.2, last, last], run.words, run.rate)
        write_json(run.folder / ablation.RESULT, found)
    assert ablation.best_rates(tried) == {"dr_grpo": 1.0}  # of grpo one trial is missing
    (run,) = ablation.plan(tmp_path, ablation.variants([]), [0], 0, ablation.best_rates(tried))
    assert run.name == "dr_grpo-x1-0"


def test_what_is_done_is_not_done_again_and_other_settings_are_refused(tmp_path, capsys):
    done, other = planned(tmp_path, ["dr_grpo", "grpo"], [0])
    write_json(done.folder / ablation.RESULT, result("dr_grpo", 0, [0.5], done.words))
    write_json(other.folder / ablation.RESULT, result("grpo", 0, [0.5], ["seed=0"]))
    for run in ablation.trials(tmp_path, ablation.variants(["dr_grpo", "grpo"]), 0):
        found = result(run.variant.name, run.seed, [run.rate == 1.0], run.words, run.rate)
        write_json(run.folder / ablation.RESULT, found)
    assert done.result()["seed"] == 0
    words = ["--out", str(tmp_path), "--seeds", "0"]
    ablation.main([*words, "--only", "dr_grpo", "--plan"])
    assert "dr_grpo-x1-0                 done  seed=0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ablation.main([*words, "--only", "grpo", "--plan"])
    assert "grpo-x1-0 was run with seed=0, and is now wanted with seed" in capsys.readouterr().err


def test_what_is_not_done_is_a_process_each_and_a_failure_says_where_its_log_is(
    tmp_path, monkeypatch, capsys
):
    called = []

    def child(words, log):
        called.append(words)
        if "--one" in words:
            said = dict(zip(words[1::2], words[2::2], strict=False))
            (variant,) = ablation.variants([said["--one"]])
            seed, rate = int(said["--seeds"]), float(said["--rate"])
            run = ablation.run_of(tmp_path, variant, rate, seed, 0)
            found = result(variant.name, seed, [0.25, rate / 4], run.words, rate)
            write_json(run.folder / ablation.RESULT, found)

    with monkeypatch.context() as patch:
        patch.setattr(ablation, "child", child)
        words = ["--out", str(tmp_path), "--seeds", "0-1"]
        words += ["--only", "dr_grpo,recipe gspo", "--json"]
        ablation.main(words)
        assert len(called) == 1 + 2 * 3 + 4 and called[0][:2] == ["notepad_jax", "warmup"]
        said = capsys.readouterr()
        found = json.loads(said.out)
        assert [one["variant"] for one in found["runs"]] == 2 * ["dr_grpo", "recipe gspo"]
        assert {one["rate"] for one in found["runs"]} == {4.0} and len(found["trials"]) == 6
        assert "recipe_gspo-x4-1: 100.0%  (4 of 4; about 0 minutes left)" in said.err
        (tmp_path / ablation.STARTER).mkdir()
        (tmp_path / ablation.STARTER / "config.json").touch()
        ablation.main(words)
        assert len(called) == 11

    def fails(words, log):
        called.append(words)
        time.sleep(0.05)  # as a run, it takes longer than to hear that another one failed
        raise SystemExit("no")

    called.clear()
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="^no$"):
        patch.setattr(ablation, "child", fails)
        ablation.run_all(planned(tmp_path, ["grpo"], range(9)), [], 1)
    assert len(called) < 9  # at most one more had begun
    with pytest.raises(SystemExit, match="ended with 1; .*wrong.log says why"):
        ablation.child(["no_such_module"], tmp_path / "wrong.log")
    assert "no_such_module" in (tmp_path / "wrong.log").read_text()


@pytest.mark.parametrize(
    "words, problem",
    [
        (["--only", "gpro"], "there is no variant 'gpro'; use some of dr_grpo, grpo"),
        (["--seeds", "two"], "--seeds is 'two'; write 0-2, or 0,2,5"),
        (["--seeds", "7-9"], "--seeds has 9, from which rates are chosen; take others"),
    ],
)
def test_what_cannot_be_planned_is_refused(words, problem, capsys):
    with pytest.raises(SystemExit):
        ablation.main([*words, "--plan"])
    assert problem in capsys.readouterr().err


# ---------------------------------------------------------------- table and page


def test_the_mean_height_of_a_curve():
    assert ablation_page.area([(0, 0.5), (10, 1.0), (40, 1.0)]) == pytest.approx(37.5 / 40)
    assert ablation_page.area([(0, 0.5)]) == 0.5


def test_the_table_has_means_and_the_least_and_largest_seed():
    found = [result("grpo", 0, [0.2, 0.4]), result("grpo", 1, [0.4, 0.8]), result("x", 0, [0, 1])]
    found[0]["training_cpu_seconds"] = found[2]["training_cpu_seconds"] = None  # it was resumed
    head, _, first, second = ablation_page.table(found).splitlines()
    cells = [cell.strip() for cell in first.strip("|").split("|")]
    assert cells[:5] == ["`grpo`", "x 1", "2", "51", "45.0 (30.0-60.0)"]
    assert second.split("|")[4].strip() == "-"
    assert cells[5:] == ["60.0 (40.0-80.0)", "25.0 (25.0-25.0)"]
    assert head.count("|") == first.count("|") == second.count("|")
    head, _, first, second = ablation_page.table_of_kinds(found).splitlines()
    assert "| exact, 512 | list, 512 |" in head and "order, 4K" in head
    assert first.split("|")[2].strip() == "60.0" and second.split("|")[2].strip() == "100.0"


def test_the_trials_stand_side_by_side():
    tried = [result("a", 9, [0.2, 0.4], rate=0.5), result("a", 9, [0.4, 0.8], rate=2.0)]
    assert ablation_page.table_of_rates([*tried, result("b", 9, [0, 1], rate=2.0)]) == (
        "| algorithm | x 0.5 | x 2 |\n| --- | --- | --- |\n"
        "| `a` | 30.0, 25.0 | 60.0, 25.0 |\n| `b` | - | 50.0, 25.0 |"
    )


def test_curves_are_means_in_a_band_and_land_in_the_page(tmp_path):
    found = [result("a", 0, [0.2, 0.4]), result("a", 1, [0.4, 0.8]), result("b", 0, [0.5, 0.5])]
    (one,) = ablation_page.charts(found, {"First": ["a", "b", "c"], "Second": ["c"]})
    line = one.lines[0]
    assert (one.title, [x.label for x in one.lines]) == ("First", ["a", "b"])
    assert line.y == pytest.approx([30, 60]) and line.low == pytest.approx([20, 40])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- ablation: begin -->\nold\n<!-- ablation: end -->\nafter\n")
    for _ in range(2):  # the second time over the first
        ablation_page.put(page, found, found, {"First": ["a", "b"]})
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    assert text.count("| `a` |") == 3 and ablation_page.PICTURE in text
    assert "First" in (tmp_path / ablation_page.PICTURE).read_text()
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no place for results; write a line"):
        ablation_page.put(page, found, found, {})


def test_the_page_of_results_has_its_place_and_a_command_that_there_is():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = text[text.index("## The algorithms side by side") :]
    words = text.split("```")[1].split()
    assert words[:3] == ["python", "-m", "benchmarks.ablation"]
    assert ablation.options().parse_args(words[3:]).page == Path("docs/results.md")
    for option in ("--only", "--seeds", "--steps", "--jobs", "--plan"):
        assert f"`{option}`" in text and option in ablation.options().format_help()
    begin, end = (f"<!-- {ablation_page.MARK}: {which} -->" for which in ("begin", "end"))
    assert 0 < text.index(begin) < text.index(end)
