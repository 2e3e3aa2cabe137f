"""Every kernel of ours compiles, forward and backward, for every TPU, at real shapes.

The programs are those that `benchmarks.kernels` measures, at the shapes of Qwen2.5-7B. No
TPU is needed. Interpret mode accepts what the compiler refuses (unaligned DMAs, blocks that
overflow VMEM), so these tests and the numeric ones need each other.
"""

import dataclasses
import re

import jax
import pytest

from benchmarks.kernels.ours import OURS
from benchmarks.kernels.programs import MODELS, Model, Program
from pallas_kernels import Pages, aot
from tests import tpu_compiler

pytestmark = tpu_compiler.MARKS

MODEL = MODELS["qwen2.5-7b"]


def compiled(name: str, model: Model, chip: str) -> tuple[Program, jax.stages.Compiled]:
    program = OURS[name](model, chip)
    return program, aot.compile_for(chip, program.function, *program.avals, donate=program.donate)


def bytes_of(tree: object) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("chip", aot.TOPOLOGIES)
@pytest.mark.parametrize("name", OURS)
def test_compiles_at_real_shapes_in_little_memory(name: str, chip: str) -> None:
    program, result = compiled(name, MODEL, chip)
    for part in program.parts:  # the kernel itself, not some fallback
        assert re.search(part.pattern, result.as_text()), part.pattern
    memory = result.memory_analysis()
    # Less than anything that must not be there: a second cache, scores, logits.
    assert memory.temp_size_in_bytes < 200 * 2**20
    # The cache is updated in place.
    assert memory.alias_size_in_bytes >= bytes_of([program.avals[i] for i in program.donate])


def test_a_mixed_call_of_an_int8_cache_compiles() -> None:
    program = OURS["paged-mixed"](MODEL, "v5e")
    avals = list(program.avals)
    avals[3] = jax.eval_shape(lambda: Pages.zeros(1, 512, MODEL.K, 128, MODEL.H, "int8"))
    result = aot.compile_for("v5e", program.function, *avals, donate=program.donate)
    assert result.memory_analysis().alias_size_in_bytes >= bytes_of(avals[3])


# The oldest chip has the fewest vector instructions: what compiles there compiles elsewhere.
@pytest.mark.parametrize("name", ["packed", "paged-mixed", "paged-decode"])
@pytest.mark.parametrize(
    "change",
    [dict(H=64), dict(H=256, dtype="float32")],
    ids=["head-64", "head-256-float32"],
)
def test_compiles_for_other_heads_and_dtypes(name: str, change: dict) -> None:
    compiled(name, dataclasses.replace(MODEL, **change), "v5e")


def test_an_unknown_chip_is_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ValueError, match="'v4' is not one of v5e, v5p, v6e, tpu7x"):
        aot.devices("v4")


def test_a_slice_has_the_devices_and_hosts_of_its_name() -> None:
    counted = {}
    for name in ("v5p:1x1x1", "v5p:2x4x4", "v5p:4x4x8", "v6e:2x4", "v5e:4x4", "tpu7x:2x2x1"):
        devices = aot.slice_of(name)
        counted[name] = len(devices), len({device.process_index for device in devices})
    assert counted == {
        "v5p:1x1x1": (1, 1),
        "v5p:2x4x4": (32, 8),
        "v5p:4x4x8": (128, 32),
        "v6e:2x4": (8, 1),  # the one slice whose host has eight chips
        "v5e:4x4": (16, 4),
        "tpu7x:2x2x1": (8, 1),  # two cores a chip
    }
