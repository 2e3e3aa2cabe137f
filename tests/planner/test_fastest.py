"""The search for the fastest settings: what it finds, what it promises, and what it keeps.

By arithmetic, which needs no libtpu; where the compiler's word counts, a made-up one stands in.
"""

import copy
import dataclasses
import functools
import itertools
import json

import pytest

from configs.models import MODELS
from notepad_jax import cli, keys
from notepad_jax.planner import (
    arithmetic,
    candidates,
    chips,
    cost_analysis,
    fastest,
    figures,
    lowering,
    plan,
    planned_policy,
)
from notepad_jax.planner.fastest import Search
from notepad_jax.setup import configuration
from notepad_jax.telemetry.screen import SilentScreen
from pallas_kernels import aot
from tests import tpu_compiler

SLICE = "v5p:2x4x4"
BEFORE = "--config.grpo.row_length=16384"  # as the 7B was shipped
GB = 10**9
READ = arithmetic.read


def shipped(*words):
    return configuration.load("qwen2_5_7b", words)


def searched(config, *slices, tries=0, known=None):
    told = []
    asked = Search(config, slices or (SLICE,), fastest.PRICES, tries)
    points = fastest.search(asked, SilentScreen(), told.append, {} if known is None else known)
    assert told == points  # each was told, in order
    return points


@pytest.fixture(autouse=True, scope="module")
def planned_once():
    """Searches of the same config plan the same points: each is planned by the first one."""
    plans, known = fastest._plan, {}

    def once(asked, name, sets, policy):
        point = asked.config, name, frozenset(sets.items())
        if arithmetic.read is not READ:
            return plans(asked, name, sets, policy)
        if point not in known:
            known[point] = plans(asked, name, sets, policy)
        return copy.copy(known[point])  # whether it is the base is asked by identity

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastest, "_plan", once)
        yield


@pytest.fixture
def few(monkeypatch):
    """A small space, for what is true of any."""
    monkeypatch.setattr(candidates, "CUTS", 2)
    monkeypatch.setattr(candidates, "ROWS", (1,))


def by_arithmetic(config, point):
    changed = configuration.changed(config, point.overrides)
    return plan.run(changed, point.slice, SilentScreen(), programs=plan.ESTIMATE)


# ---------------------------------------------------------------- what it finds


@pytest.fixture(scope="module")
def found():
    return searched(shipped(BEFORE))


@pytest.mark.slow
def test_the_shipped_7b_was_15_percent_slower_than_what_is_found(found):
    """Issue 28: 488 s with rows of 16,384 on v5p:2x4x4, by its own count."""
    best, cheapest = figures.winners(found)
    before = found[0]
    assert before.sets == {} and before.seconds == pytest.approx(488, rel=0.01)
    assert best.fits and best.seconds < 0.85 * before.seconds
    assert best is cheapest  # on one slice
    assert best.dollars == pytest.approx(best.seconds / 3600 * 32 * 4.20)
    assert 0.9 < before.fill < best.fill and best.computed_tokens < 41e6 < 58e6
    assert before.computed_tokens == 58_720_256


@pytest.mark.slow
def test_a_point_says_what_plan_says_of_it(found):
    for point in found:
        made = by_arithmetic(shipped(BEFORE), point)
        assert made.fits and point.fits
        assert (made.seconds, made.hbm) == (point.seconds, point.hbm)
        assert {phase.name: phase.peak for phase in made.phases} == point.peaks
        assert made.verdict == point.verdict


@pytest.mark.slow
def test_the_shipped_7b_is_what_is_found():
    points = searched(shipped())
    best, _ = figures.winners(points)
    assert points[0].fits and points[0].seconds < 1.01 * best.seconds
    assert points[0].fill > 0.98


@pytest.mark.parametrize(
    "name, slices",
    [
        ("qwen2_5_7b", ("v5p:2x4x4",)),
        ("memagent", ("v5p:2x4x4",)),
        ("qwen2_5_14b", ("v5p:4x4x4",)),
        ("qwen3_4b", ("v5p:2x2x4", "v6e:4x4")),
        ("qwen3_30b_a3b", ("v5p:4x4x4",)),
    ],
)
def test_shipped_configs_fit_the_slices_that_they_name(name, slices):
    for slice_name in slices:
        made = plan.run(configuration.load(name), slice_name, SilentScreen(), None, plan.ESTIMATE)
        assert made.fits and max(phase.peak for phase in made.phases) < 0.9 * made.hbm


def test_a_mixture_of_30b_fits_64_chips_of_v6e():
    """Issue 28: its hand-off alone took 46.9 of 33.6 GB a chip."""
    config = configuration.load("qwen3_30b_a3b")
    made = plan.run(config, "v6e:8x8", SilentScreen(), None, plan.ESTIMATE)
    peaks = {phase.name: phase.peak for phase in made.phases}
    assert made.fits and peaks["hand-off"] < 23e9 < peaks["rollout"] < made.hbm


def test_parts_that_are_counted_apart_add_up_to_the_whole():
    """Updates and engines are planned one beside the other's first; their sum is the plan's."""
    config = shipped(BEFORE)
    asked = Search(config, (SLICE,), fastest.PRICES, 0)
    guesses = fastest._guesses(asked, SLICE, planned_policy.policy_of(config, "tpu"))
    for guess in guesses[:: len(guesses) // 6]:
        made = fastest._plan(asked, SLICE, guess.sets, planned_policy.policy_of(config, "tpu"))
        assert guess.seconds == pytest.approx(made.seconds)
        for phase in made.phases:
            assert guess.stays[phase.name] + guess.beside[phase.name] == phase.peak
            assert guess.stays[phase.name] == sum(phase.residents.values())


@pytest.mark.slow
def test_what_it_finds_is_the_best_of_all_that_is_tried():
    """Every combination planned whole, on a chip so small that most of them do not fit."""
    config = configuration.changed(
        shipped(BEFORE), ["--config.rollout.documents=16", "--config.engine.pages=5864"]
    )
    policy = planned_policy.policy_of(config, "tpu")
    trainers = candidates.of_trainer(config, "v5e:8x8", policy)
    engines = candidates.of_engine(config, "v5e:8x8", policy)
    asked = Search(config, ("v5e:8x8",), fastest.PRICES, 0)
    every = [
        made
        for t, e in itertools.product(trainers, engines)
        if (made := fastest._plan(asked, "v5e:8x8", t | e, policy))
    ]
    fitting = [made for made in every if made.fits]
    assert 0 < len(fitting) < len(every) / 2
    best, _ = figures.winners(searched(config, "v5e:8x8"))
    least = min(made.seconds for made in fitting)
    assert best.fits and least <= best.seconds <= (1 + fastest.MEMORY) * least


PLANTED = {
    "parallel.tensor": 2, "grpo.micro_batch_rows": 32, "grpo.row_length": 22528,
    "grpo.remat": False, "engine.tensor": 2,
}  # fmt: skip


@pytest.mark.slow
def test_a_planted_optimum_is_found(monkeypatch):
    """Whatever seconds depend on: with one point made fastest, it is that one."""
    truly, asked = arithmetic.read, []

    def read(program, made, chip):
        one = truly(program, made, chip)
        learns = program.phase == lowering.UPDATE
        is_it = made.engine.shape["tensor"] == PLANTED["engine.tensor"]
        if learns:
            is_it = (
                made.trainer.shape["tensor"], made.remat, made.update.rows_at_once,
                made.update.row_length,
            ) == (2, False, 32, 22528)  # fmt: skip
        asked.append(is_it)
        return dataclasses.replace(one, compute_seconds=0.0 if is_it else 1e3, beside=0)

    monkeypatch.setattr(arithmetic, "read", read)
    best, _ = figures.winners(searched(shipped(BEFORE)))
    known = keys.flat(shipped(BEFORE))
    assert {**{key: known[key] for key in PLANTED}, **best.sets} == PLANTED
    assert any(asked) and not all(asked)


@pytest.mark.slow
def test_the_cheapest_slice_is_another_than_the_fastest():
    points = searched(shipped(), "v6e:4x4", "v6e:8x8")
    best, cheapest = figures.winners(points)
    assert best.slice == "v6e:8x8" and cheapest.slice == "v6e:4x4"
    assert cheapest.dollars < best.dollars and best.seconds < cheapest.seconds
    said = figures.text(points)
    assert "fastest: " in said and "cheapest: " in said and "by arithmetic alone" in said


# ---------------------------------------------------------------- the compiler's word


@pytest.fixture
def compiler(monkeypatch):
    """One that finds `needs` times the temporaries of updates that were counted."""
    compiled = []
    run = plan.run

    def made_up(config, name, screen, known=None, programs=plan.ALL, policy=None, documents=True):
        if programs == plan.ESTIMATE:
            return run(config, name, screen, programs=programs, policy=policy)
        compiled.append((config.parallel.tensor, config.grpo.remat, config.grpo.row_length))
        made = _estimated(run, config, name)
        factor = made_up.needs(config)
        phases = tuple(
            dataclasses.replace(
                phase, peak=int(stays + factor * (phase.peak - stays)), seconds=phase.seconds
            )
            for phase in made.phases
            for stays in [sum(phase.residents.values())]
        )
        fits = all(phase.peak <= made.hbm for phase in phases)
        made = dataclasses.replace(made, phases=phases, fits=fits, compiled=True)
        if not fits:
            raise plan.DoesNotFit(made)
        return made

    made_up.compiled, made_up.needs = compiled, lambda config: 1.0
    monkeypatch.setattr(plan, "run", made_up)
    return made_up


def _estimated(run, config, name):
    try:
        return run(config, name, SilentScreen(), programs=plan.ESTIMATE)
    except plan.DoesNotFit as problem:
        return problem.plan


def test_only_what_is_worth_it_is_compiled(compiler):
    points = searched(shipped(BEFORE), tries=4)
    best, _ = figures.winners(points)
    # As it is; the best; and of other families none, since none is better by arithmetic.
    assert compiler.compiled == [(1, True, 16384), (1, True, 39424)]
    assert best.compiled and best.sets == {"grpo.row_length": 39424}


def test_what_the_compiler_refuses_is_not_found_and_corrects_its_family(compiler):
    compiler.needs = lambda config: 1.0 if config.parallel.tensor > 1 else 4.0
    points = searched(shipped(BEFORE), tries=6)
    refused = [point for point in points if not point.fits]
    assert refused and all(point.compiled for point in refused)
    best, _ = figures.winners(points)
    assert best.fits and best.compiled and best.sets["parallel.tensor"] == 2
    # Four times 34 GB are too much of a row of 39,424; what then fits by arithmetic is tried next.
    ones = [length for tensor, _, length in compiler.compiled[1:] if tensor == 1]
    assert ones[0] == 39424 and all(length < 30000 for length in ones[1:])


def test_what_a_kernel_refuses_is_passed_over(compiler):
    def needs(config):
        if config.parallel.tensor == 1 and config.grpo.row_length == 39424:
            raise ValueError("a block list does not fit scalar memory")
        return 1.0

    compiler.needs = needs
    best, _ = figures.winners(searched(shipped(BEFORE), tries=2))
    assert best.compiled and best.fits and best.sets["grpo.row_length"] != 39424


def test_no_more_than_so_many_are_compiled_and_nothing_unfit_is_found(compiler):
    compiler.needs = lambda config: 100.0
    points = searched(shipped(BEFORE), tries=2)
    assert len(compiler.compiled) == 3  # and what it was
    unfit = [point for point in points if point.compiled]
    assert not any(point.fits for point in unfit)
    with pytest.raises(ValueError, match="nothing that was compiled fits"):
        figures.winners(points)
    assert "nothing that was compiled fits" in figures.text(points)


# ---------------------------------------------------------------- arithmetic beside the compiler

# (config, slice, changes): peak of the update in GB and seconds of a step at least, as libtpu
# 0.0.42 had them with gradients summed in float32 (docs/performance.md).
COMPILED = [
    ("qwen2_5_7b", "v5p:2x4x4", (), 38.2, 380.8),
    (
        "qwen2_5_7b", "v6e:8x8",
        ("--config.parallel.tensor=2", "--config.engine.tensor=2"), 24.4, 164.6,
    ),
    (
        "qwen2_5_7b", "v5e:8x8",
        ("--config.parallel.tensor=4", "--config.grpo.micro_batch_rows=16",
         "--config.grpo.row_length=22528", "--config.engine.pages=5864"), 13.8, 628.9,
    ),
]  # fmt: skip


@pytest.mark.parametrize("name, slice_name, words, peak, seconds", COMPILED)
def test_arithmetic_is_near_what_was_compiled(name, slice_name, words, peak, seconds):
    config = configuration.load(name, words)
    made = plan.run(config, slice_name, SilentScreen(), programs=plan.ESTIMATE)
    counted = next(phase.peak for phase in made.phases if phase.name == lowering.UPDATE)
    assert counted / GB == pytest.approx(peak, rel=0.13)
    assert made.seconds == pytest.approx(seconds, rel=0.12)


def test_what_an_update_keeps_by_hand():
    """Qwen2.5-7B, bfloat16: 28 layers of 3,584 (input) + 3,584 (attention), and one's way back."""
    policy = MODELS["Qwen2.5-7B-Instruct"]
    alive = 10 * 3584 + 10 * 3584 + 6.5 * 18_944
    assert arithmetic.kept(policy, 1, True) == 2 * (28 * 2 * 3584 + alive)
    cut = 10 * 3584 + (10 * 3584 + 6.5 * 18_944) / 4
    assert arithmetic.kept(policy, 4, True) == 2 * (28 * (3584 + 3584 / 4) + cut)
    assert arithmetic.kept(policy, 1, False) > 10 * arithmetic.kept(policy, 1, True)


# ---------------------------------------------------------------- the command


def said(*words):
    return cli.main(["plan", "--config", "qwen2_5_7b", BEFORE, "--estimate", *words])


def test_a_line_of_json_for_each_point_and_the_same_in_a_file(tmp_path, capsys):
    out = tmp_path / "found.jsonl"
    assert said("--tpu", SLICE, "--fastest", "--json", "--out", str(out)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(line)[0] for line in lines[-2:]] == ["fastest", "cheapest"]
    points = [line["point"] for line in lines[:-2]]
    assert points[0]["sets"] == {} and lines[-2]["fastest"] in points
    assert [json.loads(line)["point"] for line in out.read_text().splitlines()] == points
    # The point that was found, named to `plan`: the same seconds.
    words = [f"--config.{key}={value}" for key, value in lines[-2]["fastest"]["sets"].items()]
    assert said("--tpu", SLICE, "--json", *words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["seconds"] == lines[-2]["fastest"]["seconds"] and not made["compiled"]


def test_an_estimate_is_a_plan_without_libtpu(capsys, monkeypatch):
    monkeypatch.setattr(aot, "missing_compiler", lambda: "pip install 'notepad-jax[aot]'")
    aot.slice_of.cache_clear()
    assert said("--tpu", SLICE) == 0
    shown = capsys.readouterr().out
    assert "estimate, by arithmetic" in shown and "(compiled" not in shown
    assert shown.strip().splitlines()[-1].endswith("(an estimate: nothing was compiled)")
    words = ["plan", "--config", "qwen2_5_7b", BEFORE, "--tpu", SLICE]
    assert cli.main([*words, "--fastest"]) == 0  # arithmetic alone, unasked
    assert "by arithmetic alone" in capsys.readouterr().out
    assert cli.main(words) == 1
    assert "or say --estimate, which compiles nothing" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_found(capsys, monkeypatch):
    tell = fastest._point

    def stopped(made, sets, asked):
        if sets:
            raise KeyboardInterrupt
        return tell(made, sets, asked)

    monkeypatch.setattr(fastest, "_point", stopped)
    assert said("--tpu", SLICE, "--fastest") == 130
    out, err = capsys.readouterr()
    assert out.startswith(figures.HEAD) and "fastest: at least 48" in out
    assert "notepad-jax: stopped" in err


@pytest.mark.parametrize(
    "words, says",
    [
        (("--tpu", "v5p:3x3x3"), "there is no slice 'v5p:3x3x3'"),
        (("--tpu", "v5p:2x4x4,v9"), "'v9' names no TPU"),
        (("--tpu", SLICE, "--price", "v5p"), "--price 'v5p' is not CHIP=DOLLARS"),
        (("--tpu", SLICE, "--price", "v5p=-1"), "--price 'v5p=-1' is not CHIP=DOLLARS"),
        (("--tpu", SLICE, "--tries", "-1"), "--tries is -1; use 0"),
        (("--tpu", SLICE, "--fit"), "leave out --fit"),
        (("--tpu", "v5e:1x1"), "fits v5e:1x1; name larger slices"),
    ],
)
def test_what_cannot_be_searched_is_one_line(few, capsys, words, says):
    assert said("--fastest", *words) == 1
    err = capsys.readouterr().err.strip()
    assert says in err and "\n" not in err


def test_a_chip_stands_for_its_slices_and_prices_can_be_said(few):
    assert fastest.slices("v6e:4x4,v6e:8x8,v6e:4x4") == ("v6e:4x4", "v6e:8x8")
    every = fastest.slices("v5p")
    assert every[0] == "v5p:1x1x1" and every[-1] == "v5p:4x8x8" and SLICE in every
    assert fastest.prices(["tpu7x=12", "v5p=2.1"]) == fastest.PRICES | {"tpu7x": 12.0, "v5p": 2.1}
    points = searched(shipped(BEFORE), "tpu7x:2x4x4")
    assert all(point.dollars is None for point in points)
    assert figures.winners(points)[1] is None and "$" not in figures.text(points)[len("x") * 200 :]


def test_what_was_compiled_outlives_the_process_that_did(tmp_path):
    path = tmp_path / "not" / "there" / "kept.jsonl"
    read = cost_analysis._failed("")
    one = dataclasses.replace(read, beside=7, sent={"all-gather": 1.5}, compute_seconds=0.25)
    kept = cost_analysis.CostCache(path)
    kept.add({"point": {"slice": SLICE}})
    kept["a"] = one
    kept["b"] = read
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:30])  # killed while it wrote a third
    again = cost_analysis.CostCache(path)
    assert dict(again) == {"a": one, "b": read}
    again["c"] = one
    assert list(cost_analysis.CostCache(path)) == ["a", "b", "c"]


# ---------------------------------------------------------------- stand-ins for devices


@tpu_compiler.needed
@pytest.mark.parametrize(
    "name", ["v5p:2x4x4", "v5p:1x1x1", "v6e:8x8", "v5e:2x4", "v5e:2x2", "tpu7x:2x2x2", "v6e:1x1"]
)
def test_stand_ins_are_as_many_on_as_many_hosts_as_devices(name):
    there, stands = aot.slice_of(name), aot.sketch_of(name)
    counted = functools.partial(_hosts, key=lambda device: device.process_index)
    assert counted(there) == counted(stands)
    config = shipped(BEFORE, "--config.grpo.micro_batch_rows=64", "--config.engine.tensor=1")
    real, made = lowering.plan_of(config, there), cost_analysis.ProgramSource(config, name).sketch()
    assert made.residents == real.residents and made.update == real.update
    assert (made.hosts, made.engines, made.devices) == (real.hosts, real.engines, real.devices)
    assert name.partition(":")[0] in chips.CHIPS


def _hosts(devices, key):
    return sorted(len(list(own)) for _, own in itertools.groupby(sorted(devices, key=key), key))
