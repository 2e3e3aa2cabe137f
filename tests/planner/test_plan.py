"""A plan: what stays on a device, the verdict, the words. Beside: `test_plan_compiled`.

Long because one small made-up plan (`small`) serves verdict, advice, fit and table alike.
"""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from configs.models import MODELS
from notepad_jax import cli
from notepad_jax.checkpoint.hf import hub
from notepad_jax.engine import executor, shapes
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.parallel import mesh
from notepad_jax.planner import (
    advice,
    chips,
    cost_analysis,
    document,
    lowering,
    plan,
    plan_table,
    planned_policy,
    residents,
    subprocesses,
    workload,
)
from notepad_jax.setup import builders, configuration, learner
from notepad_jax.setup.sizes import TurnSize
from notepad_jax.telemetry.screen import SilentScreen
from pallas_kernels import aot
from tests import tpu_compiler

ROOT = Path(__file__).parents[2]
STARTER = f"--config.policy={ROOT / 'data' / 'starter'}"
STORED = ("--config.checkpoint.handoff=storage", "--config.checkpoint.every=1")


def planned_here(*words: str, name: str = "quickstart") -> lowering.PlannedRun:
    """A plan for this machine's device, as if it were a slice; nothing is compiled."""
    return lowering.plan_of(configuration.load(name, words), jax.devices()[:1])


def on(slice_name: str, *words: str) -> lowering.PlannedRun:
    return lowering.plan_of(configuration.load("qwen2_5_7b", words), aot.slice_of(slice_name))


# ---------------------------------------------------------------- what stays


def nbytes(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("rank", [0, 4])
def test_residents_are_what_a_run_has(rank):
    words = [STARTER, f"--config.grpo.lora.rank={rank}", "--config.grpo.kl_weight=0.1"]
    made = planned_here(*words)
    config = configuration.load("quickstart", words)
    policy = builders.load_policy(config.policy, config.dtype, builders.to_learn(config))
    weights = nbytes(policy.params)
    learning = learner.prepare(config, policy.config, policy.params)
    held = dict(made.residents[lowering.UPDATE])
    assert held["masters"] == held["gradient"] == nbytes(learning.state.masters)
    assert held["moments"] == nbytes(learning.state.opt_state)
    assert held.get("frozen", 0) == nbytes(learning.frozen)
    own = nbytes(learning.reference) - nbytes(learning.frozen)
    assert held["reference"] == own > 0
    # The starter computes in the dtype that it is stored in; adapters lie beside it.
    asked = builders.adopted(config, policy.config)
    assert held["weights"] == residents.bytes_of(asked)
    scale = 4 * policy.config.layers
    assert held["weights"] == weights + (nbytes(learning.state.masters) + scale if rank else 0)
    in_memory = planned_here(*words, "--config.checkpoint.handoff=memory")
    own = in_memory.residents[lowering.ROLLOUT]["weights"]  # beside the trainer's base, adapters
    assert own == (nbytes(learning.state.masters) if rank else weights)
    settings = builders.engine_settings(
        config.engine, policy.config, builders.rules(config.reading),
        builders.template(config.reading, policy),
    )  # fmt: skip
    one = nbytes(executor.Device(policy.config, settings).pages)
    assert held["cache"] == one * builders.engines(config.engine)


def test_every_program_of_an_engine_is_planned_and_each_kind_is_launched():
    made = planned_here(STARTER)
    config = configuration.load("quickstart", [STARTER])
    policy, rules = planned_policy.policy_of(config, "cpu"), builders.rules(config.reading)
    settings = builders.engine_settings(config.engine, policy.config, rules, policy.template)
    own = [program for program in made.programs if program.phase == lowering.ROLLOUT]
    assert len(own) == len(shapes.shapes(settings))
    launched = [program.name.split()[0] for program in own if program.launches]
    assert launched == ["prefix", "tails", "decode"]
    names = [program.name for program in made.programs if program.phase == lowering.UPDATE]
    assert names == ["accumulate", "apply"]  # with one optimizer step nobody asks for logprobs


def test_a_plan_needs_no_weights_and_cuts_what_it_cuts():
    words = ("--config.grpo.micro_batch_rows=1", "--config.engine.tensor=1",
             "--config.dtype=bfloat16")  # fmt: skip
    made = planned_here(*words, name="qwen2_5_7b")
    count = 7_615_616_512
    held = made.residents[lowering.UPDATE]
    assert made.counted_by == "a stand-in tokenizer"
    assert held["masters"] == held["gradient"] == 4 * count
    assert 8 * count <= held["moments"] <= 8 * count + 64
    assert held["reference"] == 2 * count and "cache" not in held and "weights" not in held
    engines = {"cache": 6144 * 128 * 28 * 2 * 4 * 128 * 2, "weights": 2 * count}
    assert engines.items() < made.residents[lowering.ROLLOUT].items()
    kept = planned_here(*words, "--config.engine.give_back=false", name="qwen2_5_7b")
    assert kept.residents[lowering.UPDATE] == held | engines
    arriving = made.residents[lowering.HANDOFF]["arriving weights"]
    assert arriving == 2 * count + 2 * 152_064 * 3584  # the copy; no two layers are as large
    stored = planned_here(*words, *STORED, name="qwen2_5_7b")
    arriving = stored.residents[lowering.HANDOFF]["arriving weights"]
    assert arriving == 4 * count + 4 * 28 * 3584 * 18_944


def test_a_policy_is_found_and_refused_as_a_run_does_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hub, "fetched", lambda name: str(ROOT / "data" / "starter"))
    (tmp_path / "mine").symlink_to(ROOT / "data" / "starter")
    for name in ("~/mine", "somebody/model"):
        config = configuration.load("quickstart", [f"--config.policy={name}"])
        assert planned_policy.policy_of(config, "cpu").counted_by == "its own tokenizer"
    for config, policy in (("quickstart", "~/mine"), ("chat", "Qwen2.5-0.5B")):  # known by name
        words = [f"policy={policy}", "reading.order=parallel", "reading.chunk_size=8"]
        made = configuration.load(config, [f"--config.{word}" for word in words])
        with pytest.raises(ValueError, match="is 8, and a parallel reading merges what its chunks"):
            planned_policy.policy_of(made, "cpu")


@tpu_compiler.needed
def test_a_slice_cuts_what_is_learnt_over_all_and_what_reads_over_a_host():
    made = on("v5p:2x4x4")
    count = 7_615_616_512
    held = made.residents[lowering.ROLLOUT]
    assert (made.devices, made.hosts, made.engines) == (32, 8, 8)
    assert 4 * count / 32 <= held["masters"] < 4.1 * count / 32  # norms and biases are whole
    assert 2 * count / 4 <= held["weights"] < 2.01 * count / 4
    assert held["cache"] == 6144 * 128 * 28 * 2 * 4 * 128 * 2 // 4


@tpu_compiler.needed
@pytest.mark.parametrize(
    "slice_name, words, says",
    [
        ("v5e:8x8", (), "grpo.micro_batch_rows is 32, which 64 devices cannot share"),
        ("v5p:2x4x4", ("--config.parallel.tensor=3",), "parallel.tensor is 3"),
        ("v5p:2x4x4", ("--config.engine.tensor=8",), "engine.tensor is 8, but this host has 4"),
        ("v5p:2x4x4", ("--config.engine.replicas=2",), "have room for 1, of 4 each"),
        ("v5p:2x4x4", ("--config.parallel.tensor=8",), "cannot be split over tensor=8"),
        ("v5p:2x2x1", ("--config.parallel.devices=5",), "parallel.devices is 5, but there are 4"),
        ("v5p:2x4x4", ("--config.grpo.row_length=4096",), "grpo.row_length is"),
        ("v5p:2x4x4", ("--config.engine.pages=16",), "engine.pages is 16"),
        ("v5p:2x4x4", ("--config.policy=GPT-9",), "none of the published models"),
    ],
)
def test_what_cannot_run_there_is_one_line(capsys, slice_name, words, says):
    assert cli.main(["plan", "--json", "--tpu", slice_name, *words]) == 1
    said = capsys.readouterr().err.strip()
    assert says in said and "\n" not in said


def test_a_slice_that_does_not_exist_is_one_line(capsys):
    assert cli.main(["plan", "--json", "--tpu", "v5p:3x3x3"]) == 1
    assert "there is no slice 'v5p:3x3x3'" in capsys.readouterr().err


def test_without_libtpu_one_line_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(aot, "missing_compiler", lambda: "pip install 'notepad-jax[aot]'")
    aot.slice_of.cache_clear()
    assert cli.main(["plan", "--json", "--tpu", "v5p:2x2x1"]) == 1
    assert "pip install" in capsys.readouterr().err


# ---------------------------------------------------------------- the verdict

GB = 10**9


def fact(name, phase, peak, beside=GB, **more) -> cost_analysis.Facts:
    fields = dict(
        launches=2.0, arguments=GB, refused="", failed="", flops=1e12, moved=1e9,
        sent={"all-gather": 5e8}, compute_seconds=0.2, memory_seconds=0.1, link_seconds=0.05,
        seconds=0.3, limit="compute",
    )  # fmt: skip
    return cost_analysis.Facts(name=name, phase=phase, peak=peak, beside=beside, **(fields | more))


def test_a_phase_needs_its_largest_program_and_never_less_than_what_stays():
    own = [fact("a", "update", 5 * GB), fact("b", "update", 9 * GB, seconds=0.9, limit="links")]
    phase = plan._phase("update", {"masters": 3 * GB}, own)
    assert (phase.largest, phase.peak) == ("b", 9 * GB)
    assert phase.seconds == pytest.approx(2 * 0.3 + 2 * 0.9)
    assert phase.limit == "b, links" and phase.flops == 4e12
    nothing = plan._phase("hand-off", {"masters": 3 * GB, "arriving": 4 * GB}, [])
    assert (nothing.largest, nothing.peak, nothing.seconds) == ("", 7 * GB, 0)


class Compiled:
    """What jax gives of a compiled program: 3 of arguments, 1 of them donated, 2 beside."""

    def compile(self):
        return self

    def memory_analysis(self):
        sizes = dict(argument=3 * GB, output=GB + GB // 2, alias=GB, temp=GB, generated_code=0)
        names = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
        return type("Memory", (), names)

    def as_text(self):
        return (
            "ENTRY %main (x: bf16[100,100]) -> bf16[400,100] {\n"
            "  %x = bf16[100,100] parameter(0)\n"
            "  ROOT %all = bf16[400,100] all-gather(%x), replica_groups={{0,1,2,3}}\n}\n"
        )


def program(**more) -> lowering.Program:
    fields = dict(
        name="accumulate", phase=lowering.UPDATE, lower=lambda: None, launches=1.0,
        holds=frozenset({"masters"}), kernel_flops=459e12, kernel_bytes=0.0,
        work=lowering.Work(100, 10),
    )  # fmt: skip
    return lowering.Program(**(fields | more))


@pytest.fixture
def small(monkeypatch) -> lowering.PlannedRun:
    """A run that has 2 GB of masters and 4 of cache on each device, and no engine's programs."""
    monkeypatch.setattr(document, "documents", lambda made, chip: ())
    there = mesh.one()
    turn = TurnSize(100, 10, 10)
    made = lowering.PlannedRun(
        model="small", counted_by="hand", policy=MODELS["Qwen2.5-7B-Instruct"],
        remat=True, devices=4, hosts=1, trainer=there, engine=there, engines=1,
        residents={
            lowering.ROLLOUT: {"masters": 2 * GB, "weights": GB, "cache": 4 * GB},
            lowering.UPDATE: {"masters": 2 * GB, "weights": GB, "cache": 4 * GB, "gradient": GB},
            lowering.HANDOFF: {"masters": 2 * GB, "weights": GB, "arriving weights": 2 * GB},
        },
        programs=(), reading=workload.RolloutWork(4, 2, 3, turn, (turn,)),
        rollout=None, update=workload.Update(2, 3, 100, 1000, 6, 600, 800, 1.5, 8192, 2),
        rules=None, settings=EngineSettings(8, 16, 1024, 100, 10, 4, 100),
    )  # fmt: skip
    return made


def test_what_a_program_is_given_is_not_counted_twice(small):
    chip = chips.CHIPS["v5p"]
    read = cost_analysis.read(Compiled(), 4, chip)
    one = cost_analysis.placed(program(), read, small, chip)
    # Arguments 3 (the masters in them), 1.5 beside; weights, cache and gradient: 6 more.
    assert (one.arguments, one.beside, one.peak) == (3 * GB, GB + GB // 2, 10.5 * GB)
    assert one.sent == {"all-gather": 3 / 4 * 400 * 100 * 2}
    assert one.compute_seconds == 1.0 and one.limit == "compute"  # a device is two cores
    assert one.link_seconds == 3 / 4 * 80_000 / 600e9
    assert one.seconds == one.compute_seconds + one.memory_seconds  # links run beside


@pytest.mark.parametrize(
    "said, peak, beside",
    [
        ("the total memory required for HLO temporaries (4.50G) exceeds available HBM", 8e9, 4.5),
        ("Ran out of memory in memory space hbm. Used 12.50G of 10.00G hbm", 6e9, 12.5),
        ("no words that are known", 8e9, 0),
    ],
)
def test_a_program_that_the_compiler_refuses_is_told_in_its_words(small, said, peak, beside):
    class Refusing:
        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: " + said)

    chip = chips.CHIPS["v5p"]
    one = cost_analysis.placed(program(), cost_analysis.read(Refusing(), 4, chip), small, chip)
    assert said in one.refused and one.beside == int(beside * 2**30)
    assert one.peak == int(peak) + one.beside  # 8 stay; "used" counts the 2 of its arguments


def changes_of(small, peaks, hbm, *words):
    config = configuration.load("quickstart", words)
    found = advice.Found(peaks, 2 * GB, hbm)
    return {" ".join(c.sets): c for c in advice.changes(config, small, found, "v5p:2x2x1")}


def test_advice_says_what_alone_is_enough(small):
    peaks = {lowering.ROLLOUT: 9 * GB, lowering.UPDATE: 12 * GB, lowering.HANDOFF: 5 * GB}
    words = ("--config.grpo.micro_batch_rows=4", "--config.engine.cache_dtype=float32")
    found = changes_of(small, peaks, 10.6 * GB, *words)
    # Four rows a device become one: three quarters of the temporaries.
    rows = found["grpo.micro_batch_rows"]
    assert (rows.sets, rows.saves) == ({"grpo.micro_batch_rows": 1}, int(1.5 * GB))
    assert rows.enough and rows.result == advice.SAME
    assert found["grpo.remat"].enough
    assert found["engine.cache_dtype"].saves == 2 * GB
    pages = found["engine.pages"]
    assert 0 < pages.sets["engine.pages"] < 1024 * (1 - 1.4 / 4)
    assert "checkpoint.handoff" not in found  # it helps another phase than the worst
    # What a config leaves to be derived can be less, too.
    derived = (*words, "--config.engine.pages=0", "--config.grpo.row_length=0")
    found = changes_of(small, peaks, 10.6 * GB, *derived)
    assert found["engine.pages"] == pages
    assert found["grpo.row_length"].sets == {"grpo.row_length": 4096}


def test_what_keeps_the_numbers_is_advised_before_what_rounds_them(small):
    """Also where only rounding would do alone: then what keeps them does together."""
    peaks = {lowering.ROLLOUT: 9 * GB, lowering.UPDATE: 12 * GB, lowering.HANDOFF: 5 * GB}
    words = (
        "--config.grpo.micro_batch_rows=4", "--config.grpo.row_length=8192",
        "--config.grpo.remat=true", "--config.grpo.lora.rank=0", "--config.engine.tensor=4",
        "--config.engine.give_back=true", "--config.checkpoint.rollout_dtype=float32",
        "--config.parallel.devices=0",
    )  # fmt: skip
    for hbm in (11 * GB, 10.2 * GB):
        found = list(changes_of(small, peaks, hbm, *words).values())
        assert [c.result for c in found] == sorted(
            (c.result for c in found), key=advice.RESULTS.index
        )
        for result in advice.RESULTS:  # and of equals what is enough alone
            enough = [c.enough for c in found if c.result == result]
            assert enough == sorted(enough, reverse=True)
        results = {key: c.result for c in found for key in c.sets}
        assert results["checkpoint.rollout_dtype"] == advice.ROUNDED
        assert results["grpo.lora.rank"] == advice.OTHER
    assert not any(c.enough for c in found if c.result == advice.SAME and c.sets)
    worst = plan.Phase("update", {}, "", 12 * GB, 0.0, 0.0, "")
    said = plan._verdict("v5p:2x2x1", worst, int(10.2 * GB), False, (), found)
    assert "no single change does, together they save" in said
    assert "grpo.micro_batch_rows" in said and "rollout_dtype" not in said and "lora" not in said
    # Two devices to a row: as many rows on each as before, and no more than heads allow.
    wider = dataclasses.replace(small, trainer=four())
    found = changes_of(wider, peaks, 11 * GB, *words)["parallel.tensor grpo.micro_batch_rows"]
    assert found.overrides == ["--config.parallel.tensor=2", "--config.grpo.micro_batch_rows=2"]


def four():
    """A trainer's mesh of four devices, each with a row."""
    return mesh.make(1, aot.sketch_of("v5p:2x2x1"))


def test_advice_for_a_hand_off_and_for_a_larger_slice(small):
    peaks = {lowering.ROLLOUT: 3 * GB, lowering.UPDATE: 3 * GB, lowering.HANDOFF: 11 * GB}
    found = changes_of(small, peaks, 10 * GB, "--config.parallel.devices=0")
    assert found["checkpoint.handoff"].saves == GB
    larger = found[""]
    assert (larger.words, larger.enough) == ("--tpu v5p:2x2x2", True)


def test_a_plan_that_does_not_fit_is_printed_and_ends_with_1(small, capsys, monkeypatch):
    one = fact("accumulate", lowering.UPDATE, 12 * GB, beside=2 * GB)
    monkeypatch.setattr(cost_analysis.ProgramSource, "made", lambda source: small)
    monkeypatch.setattr(cost_analysis, "compiled", lambda *_: (one,))
    assert cli.main(["plan", "--json", "--config", "quickstart", "--tpu", "v5p:2x2x1"]) == 0
    fitting = json.loads(capsys.readouterr().out)
    assert fitting["fits"] and fitting["verdict"].startswith("fits v5p:2x2x1: 12.0 of 102.8 GB")
    tight = dataclasses.replace(chips.CHIPS["v5p"], hbm_size=int(10.5 * GB))
    monkeypatch.setitem(chips.CHIPS, "v5p", tight)
    assert cli.main(["plan", "--json", "--config", "quickstart", "--tpu", "v5p:2x2x1"]) == 1
    out, err = capsys.readouterr()
    assert not json.loads(out)["fits"]
    assert "12.0 of 10.5 GB a device in the update, 1.5 GB too much; " in err
    assert err.strip().count("\n") == 0 and "would do (estimate)" in err
    assert cli.main(["plan", "--config", "quickstart", "--tpu", "v5p:2x2x1"]) == 1
    shown = capsys.readouterr().out
    for word in ("exact", "compiled", "estimate", "alone enough", "all-gather 0.500", "masters"):
        assert word in shown


def test_what_could_not_be_compiled_is_named_and_nothing_is_promised(small, capsys, monkeypatch):
    one = fact("accumulate", lowering.UPDATE, 12 * GB)
    crashed = fact("decode", lowering.ROLLOUT, 9 * GB, beside=0, failed="the compiler crashed")
    monkeypatch.setattr(cost_analysis.ProgramSource, "made", lambda source: small)
    monkeypatch.setattr(cost_analysis, "compiled", lambda *_: (one, crashed))
    assert cli.main(["plan", "--config", "quickstart", "--tpu", "v5p:2x2x1"]) == 1
    out, err = capsys.readouterr()
    assert "  decode                  not compiled: the compiler crashed\n" in out
    assert "not known whether it fits v5p:2x2x1: decode could not be compiled" in err
    assert "without, it needs 12.0 of 102.8 GB a device in the update" in err
    tight = dataclasses.replace(chips.CHIPS["v5p"], hbm_size=int(10.5 * GB))
    monkeypatch.setitem(chips.CHIPS, "v5p", tight)
    assert cli.main(["plan", "--config", "quickstart", "--tpu", "v5p:2x2x1"]) == 1
    assert "does not fit v5p:2x2x1: 12.0 of 10.5 GB" in capsys.readouterr().err


def test_a_program_that_the_compiler_cannot_make_is_told_in_its_words():
    class Failing:
        def compile(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\n  device_id 4 of 4")

    one = cost_analysis.read(Failing(), 4, chips.CHIPS["v6e"])
    assert one.failed == "the compiler gave up: INTERNAL: RET_CHECK failure device_id 4 of 4"
    assert (one.refused, one.beside) == ("", 0)


@pytest.mark.parametrize(
    "died, says",
    [
        (
            subprocesses.Died(-9, ""),
            r"v5p:2x2x1 was killed \(SIGKILL\): .* more memory .*end other",
        ),
        (
            subprocesses.Died(-6, "F0000 overflow"),
            r"libtpu .*crashed .*SIGABRT: F0000 overflow.*its own",
        ),
    ],
)
def test_a_compiler_that_died_is_a_line_and_the_killed_are_tried_again(
    small, monkeypatch, died, says
):
    asked = []

    def run(begin, items, workers, known, done):
        asked.append((items, workers))
        return {
            item: died if item == 1 else cost_analysis.read(Compiled(), 4, begin.chip)
            for item in items
        }

    monkeypatch.setattr(subprocesses, "run", run)
    monkeypatch.setattr(cost_analysis.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cost_analysis, "version", lambda name: "0.0.42")  # which need not be there
    names = ("a", "b", "c")
    phases = (lowering.ROLLOUT, lowering.ROLLOUT, lowering.UPDATE)
    made = dataclasses.replace(
        small, programs=tuple(program(name=n, phase=p) for n, p in zip(names, phases, strict=True))
    )
    found = cost_analysis.compiled(
        cost_analysis.ProgramSource(None, "v5p:2x2x1"), made, range(3), SilentScreen(), {}
    )
    assert [one.name for one in found] == ["a", "b", "c"]
    assert re.search(says, found[1].failed) and not found[0].failed
    # The update's first; what was killed once more, alone.
    assert asked == [([2, 0, 1], 2), *([([1], 1)] if died.killed else [])]


def test_fit_changes_what_keeps_the_result_first_and_says_so(small, capsys, monkeypatch):
    asked = []

    def compiled(source, made, wanted, screen, known):
        rows = made.update.micro_batches
        asked.append((rows, [made.programs[item].name for item in wanted]))
        return tuple(
            fact(made.programs[item].name, lowering.UPDATE, (8 + rows) * GB, beside=rows * GB)
            for item in wanted
        )

    def made(source):
        rows = source.config.grpo.micro_batch_rows
        update = dataclasses.replace(small.update, micro_batches=rows)
        programs = (program(name="narrow", launches=0.0), program())
        return dataclasses.replace(small, update=update, programs=programs)

    monkeypatch.setattr(cost_analysis.ProgramSource, "made", made)
    monkeypatch.setattr(cost_analysis, "compiled", compiled)
    tight = dataclasses.replace(chips.CHIPS["v5p"], hbm_size=int(9.5 * GB))
    monkeypatch.setitem(chips.CHIPS, "v5p", tight)
    words = ["plan", "--config", "quickstart", "--tpu", "v5p:2x2x1", "--fit",
             "--config.engine.cache_dtype=int8", "--config.grpo.remat=true",
             "--config.grpo.micro_batch_rows=4", "--config.grpo.row_length=512",
             "--config.engine.tensor=4", "--config.engine.give_back=true"]  # fmt: skip
    assert cli.main(words) == 0
    out, err = capsys.readouterr()
    assert out.strip().endswith("in the update, with --config.grpo.micro_batch_rows=1")
    assert "does not fit v5p:2x2x1: 12.0 of 9.5 GB" in err and "trying" in err
    # Before anything is compiled, what stays; all programs only of what was found.
    both = ["narrow", "accumulate"]
    assert asked == [(4, []), (4, both[1:]), (1, []), (1, both[1:]), (1, both)]
    tight = dataclasses.replace(tight, hbm_size=GB)
    monkeypatch.setitem(chips.CHIPS, "v5p", tight)
    asked.clear()
    assert cli.main([*words, "--json"]) == 1
    assert not any(names for _, names in asked)  # what stays is too much: nothing is compiled


def test_the_table_holds_what_the_plan_holds(small):
    one = fact("accumulate", lowering.UPDATE, 12 * GB, beside=2 * GB)
    refused = fact("apply", lowering.UPDATE, 12 * GB, refused="no room for 4 G")
    phases = tuple(plan._phase(n, small.residents[n], [one, refused]) for n in lowering.PHASES)
    made = plan.SlicePlan(
        slice="v5p:2x2x1", model="small", parameters=2 * GB, prompts_counted_by="hand", devices=4,
        hosts=1, trainer="4 x 1", engines=1, engine_tensor=1, hbm=100 * GB, phases=phases,
        compiled=True, programs=(one, refused), left_out=21, step=plan._step(small), seconds=1.0,
        fits=True,
        verdict="fits", advice=(),
        documents=(document.DocumentTime(2**20, 210, 16 * GB, False, 290.4, 21.2, 20.6, 5),),
    )  # fmt: skip
    lines = plan_table.text(made).splitlines()
    assert lines[0] == "small, 2.00 billion parameters, on v5p:2x2x1: 4 devices, 1 host(s)"
    assert next(line for line in lines if line.startswith("  cache")).split() == [
        "cache", "4.00", "4.00",
    ]  # fmt: skip
    assert any("refused by the compiler: no room for 4 G" in line for line in lines)
    assert lines[3].startswith("an update computes 1,600 tokens, 75.0% of them real (1,200)")
    assert "a shared prefix is written 1.50 times" in lines[3]
    assert any("21 narrower ones were not compiled" in line for line in lines)
    (row,) = (line for line in lines if line.startswith("   1,048,576"))
    assert row.split() == "1,048,576 210 16.0 no 290 s 21 s 21 s 5 instead of 210".split()
    assert lines[-1] == "fits"
