"""What is there, what is held, what fits: by hand, and against the compiler's own figures."""

import contextlib
import dataclasses
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from configs.models import MODELS
from notepad_jax import cli
from notepad_jax.checkpoint.abstract_trees import placed
from notepad_jax.engine import executor, shapes
from notepad_jax.engine.scheduler import Scheduler
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import update
from notepad_jax.grpo.optimizer import make_optimizer
from notepad_jax.model import lora, parameters
from notepad_jax.parallel import mesh
from notepad_jax.parallel.mesh import SERVING
from notepad_jax.planner import lowering, machine, memory, planned_policy
from notepad_jax.planner.machine import MachineMemory
from notepad_jax.planner.memory import HeldBytes
from notepad_jax.programs import subjects
from notepad_jax.reader import Reader
from notepad_jax.setup import builders, configuration, learner, sizes
from notepad_jax.telemetry.identity import write_json
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.training import decided
from notepad_jax.types import NO_TOKENS, Prompt, SamplingParams
from tests import fakes, tiny

ROOT = Path(__file__).parents[2]
GB = 10**9
SMALL = dataclasses.replace(MODELS["Qwen2.5-0.5B"], dtype="float32")
LAPTOP = MachineMemory(16 * GB, 14 * GB)

# ---------------------------------------------------------------- what is there


def linux(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:  16000 kB\nMemFree: 1000 kB\nMemAvailable: 12000 kB\nHugePages_Total: 0\n"
FILES = {"proc__meminfo": MEMINFO}


def test_a_machine_has_what_linux_says(tmp_path):
    assert machine.of_machine(linux(tmp_path, **FILES)) == MachineMemory(16_384_000, 12_288_000)


def test_the_tightest_cgroup_counts_and_pages_of_files_can_be_had(tmp_path):
    cgroup = {
        "proc__self__cgroup": "0::/user/job\n",
        "sys__fs__cgroup__user__job__memory.max": "max\n",
        "sys__fs__cgroup__user__memory.max": "8000000\n",
        "sys__fs__cgroup__user__memory.current": "5000000\n",
        "sys__fs__cgroup__user__memory.stat": "anon 4000000\ninactive_file 1000000\n",
    }
    assert machine.of_machine(linux(tmp_path, **FILES, **cgroup)) == MachineMemory(
        8_000_000, 4_000_000
    )


def test_cgroups_of_the_first_version(tmp_path):
    cgroup = {
        "proc__self__cgroup": "5:cpu:/x\n4:memory:/box\n",
        "sys__fs__cgroup__memory__memory.limit_in_bytes": "9223372036854771712\n",
        "sys__fs__cgroup__memory__box__memory.limit_in_bytes": "3000000\n",
        "sys__fs__cgroup__memory__box__memory.usage_in_bytes": "4000000\n",
        "sys__fs__cgroup__memory__box__memory.stat": "total_inactive_file 500000\n",
    }
    assert machine.of_machine(linux(tmp_path, **FILES, **cgroup)) == MachineMemory(3_000_000, 0)


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "\n:\nMemTotal\n"])
def test_a_machine_that_does_not_say_has_no_bound(tmp_path, text):
    assert machine.of_machine(linux(tmp_path, proc__meminfo=text)) is None


def test_an_accelerator_says_itself_or_nobody_knows():
    class Device:
        platform = "tpu"

        def __init__(self, stats):
            self.memory_stats = lambda: stats

    assert machine.look(Device({"bytes_limit": 100, "bytes_in_use": 30})) == MachineMemory(100, 70)
    assert machine.look(Device(None)) is None and machine.look(Device({})) is None


# ---------------------------------------------------------------- what fits, by hand


HELD = HeldBytes({"rollout": {"weights": 30}, "update": {"weights": 30, "masters": 40}},
            frozenset({"rollout"}), page=2)  # fmt: skip


@pytest.mark.parametrize(
    "said, total, free, expected",
    [
        (0, 1000, 1000, 20),  # all that is wanted
        (0, 60, 75, 15),  # half of the whole, in pages of 2
        (0, 1000, 71, 20),  # the update has given the cache back: 30 + 40 beside 71
        (0, 1000, 69, -1),  # and here it does not fit by itself
        (30, 1000, 90, 30),  # said on purpose: 30 + 60 is just there
        (31, 1000, 90, -1),
        (2, 1000, 1000, 2),  # and fewer than would be derived
        (0, 8, 1000, 5),  # the least is more than the share
    ],
)
def test_pages_by_hand(said, total, free, expected):
    assert memory.pages(said, 20, 5, HELD, MachineMemory(total, free)) == expected


def test_what_is_free_bounds_what_is_derived():
    held = HeldBytes({"reading": {"weights": 30}}, frozenset({"reading"}), page=2)
    assert memory.pages(0, 20, 5, held, MachineMemory(1000, 50)) == 10
    assert memory.pages(0, 20, 5, held, MachineMemory(1000, 40)) == 5
    assert memory.pages(0, 20, 5, held, MachineMemory(1000, 39)) == -1


def test_policies_on_one_base_are_counted_each_and_all_together():
    config = configuration.load("chat", LAPTOPS)
    rules, template = builders.rules(config.reading), fakes.template()
    settings = builders.engine_settings(config.engine, SMALL, rules, template)

    def phases(own, *others):
        one = memory.of_engines(SMALL, config.engine, settings, "bfloat16", own, others)
        assert one.cached == {memory.READING}
        return one.phases

    def adapters(rank):
        """A [inputs, r] and B [r, outputs] of q and o, float32, in all layers."""
        q, width = SMALL.heads * SMALL.head_size, SMALL.width
        return 4 * SMALL.layers * rank * 2 * (q + width)

    alone = phases(None)[memory.READING]["weights"]
    ranks = [lora.Lora(rank, 16.0, ("q", "o")) for rank in (4, 8, 16)]
    of_scales = 3 * 4 * SMALL.layers
    found = phases(*ranks)
    assert set(found) == {memory.READING, memory.COMPARING}
    assert found[memory.READING]["weights"] == pytest.approx(alone + adapters(4), abs=of_scales)
    beside = adapters(4) + 2 * (adapters(8) + adapters(16))
    assert found[memory.READING]["other policies"] == pytest.approx(beside, abs=3 * of_scales)
    whole = alone + adapters(8) + adapters(16)
    assert found[memory.COMPARING]["other policies"] == pytest.approx(whole, abs=2 * of_scales)


def test_adapters_that_a_cpu_adds_in_are_a_copy_of_what_they_adapt():
    config, adapted = configuration.load("chat", LAPTOPS), lora.Lora(4, 16.0, ("q", "o"))
    settings = builders.engine_settings(
        config.engine, SMALL, builders.rules(config.reading), fakes.template()
    )

    def apart(stored, *others):
        held = memory.of_engines(SMALL, config.engine, settings, stored, adapted, others)
        return held.phases[memory.READING].get("weights apart", 0)

    two = 2 * 4 * SMALL.layers * SMALL.width * SMALL.heads * SMALL.head_size
    assert apart("float32") == two
    assert apart("bfloat16") == apart("float32", lora.Lora(8, 16.0, ("q",))) == 0


# ---------------------------------------------------------------- the configs on a laptop


def words_of(policy) -> builders.Words:
    return builders.Words(fakes.tokenizer(), Path("Qwen2.5-0.5B"), policy, "bfloat16", None)


def fitted(name: str, *words: str, see=LAPTOP, policy=SMALL, said=None, others=()):
    """(config with its pages, the bytes of its worst phase), of who trains or only reads."""
    config = configuration.load(name, words)
    say = (said if said is not None else []).append
    rules, template, know = builders.rules(config.reading), fakes.template(), words_of(policy)
    if config.grpo:
        config = sizes.settled(config, template, rules)
        config = memory.to_train(config, know, template, rules, say, lambda device: see)
    else:
        rules = subjects._longest(config)
        config = memory.to_read(
            config, know, template, rules, say, None, lambda device: see, others
        )
    return config


def held_of(config, policy=SMALL) -> HeldBytes:
    rules, template = builders.rules(config.reading), fakes.template()
    settings = builders.engine_settings(config.engine, policy, rules, template)
    if not config.grpo:
        return memory.of_engines(policy, config.engine, settings, "float32", None)
    about = planned_policy.PlannedPolicy("", "", policy, "float32", template)
    made = lowering.plan_of(config, jax.devices(), jax.local_devices(), about)
    return memory.of_training(config, made, settings)


LAPTOPS = ("--config.engine.per_cpu=1", "--config.engine.tensor=1", "--config.parallel.devices=1")


@pytest.mark.parametrize("name", ["chat", "ruler"])
def test_a_half_billion_policy_fits_a_laptop(name):
    config = fitted(name)
    held = held_of(config)
    for phase, one in held.phases.items():
        cache = config.engine.pages * held.page if phase in held.cached else 0
        assert sum(one.values()) + cache <= LAPTOP.free, phase


@pytest.mark.parametrize(
    "name", ["quickstart", "mix", "memagent", "qwen2_5_7b", "qwen3_4b", "qwen2_5_14b"]
)
def test_what_is_for_slices_or_for_the_starter_is_refused_and_not_killed(name):
    """Rows that keep every layer's activations, all weights trained, micro-batches of a slice."""
    with pytest.raises(ValueError, match=r"Qwen2.5-0.5B does not fit: [\d.]+ GB in the update"):
        fitted(name, *LAPTOPS)


def test_what_was_killed_on_a_laptop_is_refused_and_its_mend_works():
    said = "--config.engine.pages=4608"  # 128 tokens of 24,576 bytes each
    with pytest.raises(ValueError) as problem:
        fitted("ruler", said)
    told = str(problem.value)
    assert "cache (4,608 pages) 14.5" in told and "weights 2.0" in told and "\n" not in told
    assert "14.0 of 16.0 GB of memory are free" in told
    pages = int(told.rpartition("--config.engine.pages=")[2].split()[0])
    assert fitted("ruler", f"--config.engine.pages={pages}").engine.pages == pages
    with pytest.raises(ValueError, match="does not fit"):
        fitted("ruler", f"--config.engine.pages={pages + 1}")


def test_all_weights_of_half_a_billion_are_refused_with_adapters_as_the_mend():
    with pytest.raises(ValueError, match=r"in the update .*masters .*try --config.grpo.lora.rank"):
        fitted("chat", "--config.grpo.lora.rank=0")


def test_less_memory_is_fewer_pages_and_said_and_never_too_few_for_a_turn():
    said: list[str] = []
    whole = fitted("ruler", see=MachineMemory(64 * GB, 60 * GB)).engine.pages
    fewer = fitted("ruler", see=MachineMemory(64 * GB, 5 * GB), said=said).engine.pages
    assert fewer < whole and "5.0 of 64.0 GB of memory are free" in said[0]
    with pytest.raises(ValueError, match=r"does not fit: .* free some, or try "):
        fitted("ruler", see=MachineMemory(64 * GB, 3 * GB))


def test_a_second_base_that_is_only_compared_needs_its_room_too():
    see, other = MachineMemory(64 * GB, 6 * GB), lora.Lora(16, 16.0, lora.TARGETS)
    assert fitted("ruler", see=MachineMemory(64 * GB, 5 * GB)).engine.pages > 0
    with pytest.raises(ValueError, match=r"GB in the comparing of bases \(.*other policies 2.0"):
        fitted("ruler", see=MachineMemory(64 * GB, 5 * GB), others=[other])
    assert 0 < fitted("ruler", see=see, others=[other]).engine.pages


def test_engines_that_share_a_machine_are_counted():
    one, two = (fitted("chat", f"--config.engine.per_cpu={n}") for n in (1, 2))
    assert held_of(two).page == 2 * held_of(one).page
    launches = [held_of(config).phases["rollout"]["launches"] for config in (one, two)]
    assert launches[1] == 2 * launches[0]


def test_who_does_not_know_takes_what_was_asked_for():
    endless = MachineMemory(10**15, 10**15)
    assert fitted("ruler", see=None).engine.pages == fitted("ruler", see=endless).engine.pages


# ---------------------------------------------------------------- a run keeps what was decided


def run_config(*words: str):
    return configuration.load("quickstart", ["--config.engine.pages=0", *words])


def decide(config, folder, resume, free):
    words = builders.words(config.policy, config.dtype)
    return decided.kept(config, folder, words, resume, SilentScreen(), lambda d: free)


def tightest(config, folder) -> tuple[MachineMemory, int]:
    """The least memory, in steps of 5 MB, in which a run begins, and its pages."""
    for free in range(memory.PROCESS, 2 * memory.PROCESS, 5_000_000):
        with contextlib.suppress(ValueError):
            there = MachineMemory(16 * GB, free)
            return there, decide(config, folder, False, there).engine.pages
    raise AssertionError("nothing is enough")


def test_a_run_goes_on_with_the_pages_that_it_began_with(tmp_path):
    config = run_config()
    begun = decide(config, tmp_path, False, MachineMemory(16 * GB, 14 * GB)).engine.pages
    tight, anew = tightest(config, tmp_path / "other")
    assert anew < begun
    assert decide(config, tmp_path, True, MachineMemory(16 * GB, 8 * GB)).engine.pages == begun
    said = decide(run_config("--config.engine.pages=100"), tmp_path, True, LAPTOP)
    assert said.engine.pages == 100
    with pytest.raises(ValueError, match=r"use --config.engine.pages=\d+ or fewer"):
        decide(config, tmp_path, True, tight)


def test_a_run_goes_on_in_the_dtype_that_it_began_in(tmp_path):
    found = {"dtype": "bfloat16", "engine.cache_dtype": "bfloat16", "engine.pages": 64}
    write_json(tmp_path / decided.FILE, found)
    config = decide(run_config(), tmp_path, True, LAPTOP)
    assert (config.dtype, config.engine.cache_dtype) == ("bfloat16", "bfloat16")
    config = decide(run_config("--config.dtype=float32"), tmp_path, True, LAPTOP)
    assert config.dtype == "float32"


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_damaged_record_is_named(tmp_path, text):
    (tmp_path / decided.FILE).write_text(text)
    with pytest.raises(ValueError, match=r"machine.json .*; remove it, and the machine decides"):
        decide(run_config(), tmp_path, True, LAPTOP)


# ---------------------------------------------------------------- against the compiler


WIDE = dataclasses.replace(tiny.CONFIG, vocab_size=8192, valid_vocab=8192, width=256, layers=4,
                           heads=4, kv_heads=2, head_size=64, feed_forward=768)  # fmt: skip


@pytest.mark.slow
def test_a_launch_takes_no_more_than_is_counted():
    config = configuration.load("chat", ["--config.engine.slots=16"])
    rules, template = builders.rules(config.reading), fakes.template()
    settings = builders.engine_settings(config.engine, WIDE, rules, template)
    there = mesh.one()
    params = placed(parameters.abstract_params(WIDE), parameters.shardings(WIDE, there, SERVING))
    for shape in (shapes.PrefixRow(shapes.prefix_widths(settings)[-1]),
                  shapes.TailRow(shapes.tail_widths(settings)[-1]),
                  shapes.decode_shapes(settings)[-1]):  # fmt: skip
        made = executor.lowered(WIDE, settings, params, shape, there).compile()
        assert made.memory_analysis().temp_size_in_bytes <= memory.launch(WIDE, settings)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["true", "false"])
def test_a_micro_batch_takes_no_more_than_is_counted(remat):
    config = configuration.load("chat", [f"--config.grpo.remat={remat}"])
    rules, template = builders.rules(config.reading), fakes.template()
    config = sizes.settled(config, template, rules)
    about = planned_policy.PlannedPolicy("", "", WIDE, "float32", template)
    made = lowering.plan_of(config, jax.devices()[:1], jax.devices()[:1], about)
    plan, settings, optimizer = learner.settings_of(config)
    frozen, trained = lowering._partitions(config.grpo.lora, about, made.trainer)
    lowered = update.lowered(
        WIDE, make_optimizer(optimizer), settings, trained, frozen, plan.row_length,
        made.update.most,
    )  # fmt: skip
    taken = lowered["accumulate"].compile().memory_analysis().temp_size_in_bytes
    assert taken <= memory.update(config, made) <= 2.5 * taken


@hypothesis.given(
    st.integers(1, 40), st.integers(2, 300), st.integers(1, 90), st.floats(0, 1), st.integers(1, 9)
)
def test_with_the_least_pages_every_turn_is_admitted_with_its_prefix_shared(
    page, prompt, most, part, slots
):
    sized = EngineSettings(slots, page, 10**6, prompt, most, 1, prompt + most)
    sized = dataclasses.replace(sized, pages=memory.least_pages(sized))
    shared = min(prompt - 1, int(part * prompt))
    ids = np.arange(prompt, dtype=np.int32)
    asked = Prompt(ids[:shared], ids[shared:], NO_TOKENS)
    scheduler = Scheduler(sized, 0)
    context = scheduler.submit(asked, SamplingParams(1.0, 1.0, most, (), 0))
    assert len(context.shared) == (shared if shared >= page else 0)
    assert scheduler.admit().contexts == (context,)


@pytest.mark.parametrize(
    "words",
    [
        ["ask", str(ROOT / "README.md"), "who ?"],
        ["eval", "--name", "one", "--suite", "synthetic"],
        ["train", "--name", "one"],
        ["quickstart", "--name", "one"],
        ["serve", "--port", "0"],
    ],
)
def test_every_command_refuses_before_a_weight_is_loaded(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builders, "load_policy", lambda *_: pytest.fail("a weight was loaded"))
    policy = f"--config.policy={ROOT / 'data' / 'starter'}"
    assert cli.main([*words, policy, "--config.engine.pages=2000000000"]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "starter does not fit: " in last and "cache (2,000,000,000 pages)" in last
    assert "use --config.engine.pages=" in last
    assert not list(tmp_path.glob("runs/*"))  # nothing came of it


def test_python_refuses_in_the_same_words(monkeypatch):
    monkeypatch.setattr(builders, "load_policy", lambda *_: pytest.fail("a weight was loaded"))
    with pytest.raises(ValueError, match="starter does not fit: "):
        Reader.load(ROOT / "data" / "starter", changes={"engine.pages": 2_000_000_000})
