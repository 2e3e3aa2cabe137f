"""Plans by the real TPU compiler: what a large run launches lowers, a small one compiles whole."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import pallas_kernels
from notepad_jax import cli
from notepad_jax.model import parameters
from notepad_jax.planner import lowering, planned_policy
from notepad_jax.setup import configuration
from pallas_kernels import aot
from tests import tpu_compiler

ROOT = Path(__file__).parents[2]
STARTER = f"--config.policy={ROOT / 'data' / 'starter'}"

pytestmark = tpu_compiler.MARKS

LARGE = [
    ("Qwen2.5-7B-Instruct", "v5e:8x8", 1, 1, ()),
    ("Qwen2.5-7B-Instruct", "v5p:2x4x4", 1, 4, ()),
    ("Qwen2.5-7B-Instruct", "v6e:8x8", 4, 4, ()),
    ("Qwen2.5-14B-Instruct", "v5p:4x4x4", 2, 4, ()),
    ("Qwen3-30B-A3B", "v5p:4x4x4", 4, 4, ()),
    ("Qwen3-4B", "v6e:4x4", 1, 4, ("--config.grpo.lora.rank=16",)),
]


@pytest.mark.parametrize("model, slice_name, tensor, engine, words", LARGE)
def test_what_a_large_run_launches_most_lowers(model, slice_name, tensor, engine, words):
    """Shapes, shardings and kernels of published sizes; the compiler's part is the next test."""
    devices = len(aot.slice_of(slice_name))
    words = [
        f"--config.policy={model}", f"--config.parallel.tensor={tensor}",
        f"--config.grpo.micro_batch_rows={devices // tensor}", f"--config.engine.tensor={engine}",
        *words,
    ]  # fmt: skip
    config = configuration.load("qwen2_5_7b", words)
    made = lowering.plan_of(config, aot.slice_of(slice_name), aot.host_of(slice_name))
    with pallas_kernels.using("pallas"):
        names = [program.name for program in made.programs if program.launches and program.lower()]
    assert len(names) == 6 and len(made.programs) > 20
    held = made.residents[lowering.UPDATE]
    assert held["masters"] < 4.2 * parameters.count(made.policy) / devices or "frozen" in held


SMALL = {
    "layers": 2, "width": 512, "heads": 4, "kv_heads": 4, "feed_forward": 1024,
    "vocab_size": 4096, "valid_vocab": 4096,
}  # fmt: skip


@pytest.mark.parametrize(("slice_name", "smaller"), [("v5p:2x2x1", SMALL), ("v5p:2x4x4", {})])
def test_no_gradient_is_summed_over_devices_in_bfloat16(slice_name, smaller):
    """All that devices add up of a bfloat16 policy's update, cut over fsdp alone; the second is
    configs/qwen2_5_7b.py as it is."""
    devices = aot.slice_of(slice_name)
    words = [f"--config.grpo.micro_batch_rows={len(devices)}"]
    config = configuration.load("qwen2_5_7b", words)
    policy = planned_policy.policy_of(config, "tpu")
    policy = dataclasses.replace(policy, config=dataclasses.replace(policy.config, **smaller))
    assert policy.config.dtype == "bfloat16" and config.parallel.tensor == 1
    made = lowering.plan_of(config, devices, aot.host_of(slice_name), policy)
    (accumulate,) = (program for program in made.programs if program.name == "accumulate")
    with pallas_kernels.using("pallas"), aot.nothing_kept():
        text = accumulate.lower().compile().as_text()
    summed = list(added_up(text))
    assert not [one for one in summed if "bf16[" in one]
    # All leaves: norms and biases by the layer, matrices in whatever parts the compiler chose.
    assert len(re.findall(r"f32\[[\d,]{3,}\]", " ".join(summed))) >= 12


def added_up(text):
    """The shapes that devices add up: reductions, and the rings that were made of them.

    Where the compiler adds matrices up while it multiplies them it passes partial sums on, from
    neighbour to neighbour: there a permutation of the backward pass is a part of a sum.
    """
    for line in text.splitlines():
        kinds = "all-reduce|reduce-scatter|collective-permute"
        found = re.search(rf" = (.*?) ({kinds})(?:-start)?\(", line)
        if found and (found[2] != "collective-permute" or "transpose(jvp" in line):
            yield found[1]


def test_the_starter_is_planned_whole(capsys):
    words = [
        "plan", "--json", "--config", "quickstart", "--tpu", "v5e:1x1", STARTER,
        "--config.engine.slots=1", "--config.engine.row_tokens=64",
        "--config.reading.chunk_size=32", "--config.grpo.row_length=512",
        "--config.grpo.micro_batch_rows=4", "--config.grpo.lora.rank=0",
    ]  # fmt: skip
    assert cli.main(words) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["fits"] and made["hbm"] == int(15.75 * 2**30)
    by_name = {one["name"]: one for one in made["programs"]}
    assert by_name["accumulate"]["flops"] > 1e9 and by_name["apply"]["moved"] > 1e6
    update = next(phase for phase in made["phases"] if phase["name"] == "update")
    assert update["peak"] > sum(update["residents"].values())
    # A cache of 134 MB: neither reads a prefix nor decodes with a second copy of it.
    reading = [one for one in made["programs"] if one["phase"] == "rollout"]
    kinds = dict.fromkeys(one["name"].split()[0] for one in reading)
    assert list(kinds) == ["prefix", "tails", "decode"]
    assert all(0 < one["beside"] < 2**25 for one in (reading[0], reading[-1]))
