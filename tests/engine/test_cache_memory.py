"""Launches use cache and weights where they lie: compiled for a TPU, none makes a second one.

XLA chooses a layout for every array; a scatter or a gather that it would rather have turned
round costs a copy of the whole cache, twice, and nothing but the compiler says so. The cache is
as large as Qwen2.5-7B's on one chip, of few layers; the rest of the policy is small, since it
is not looked at.
"""

import dataclasses

import jax
import numpy as np
import pytest

import pallas_kernels
from configs.models import MODELS
from notepad_jax.checkpoint.abstract_trees import placed
from notepad_jax.engine import executor
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.engine.shapes import Decode, TailRow, shapes
from notepad_jax.model import parameters
from notepad_jax.parallel import mesh
from pallas_kernels import aot
from tests import tpu_compiler

pytestmark = tpu_compiler.MARKS

LAYERS = 4
CONFIG = dataclasses.replace(
    MODELS["Qwen2.5-7B-Instruct"],
    layers=LAYERS, width=256, feed_forward=256, vocab_size=512, valid_vocab=512,
)  # fmt: skip
SETTINGS = EngineSettings(
    slots=8, page_size=128, pages=2304, max_prompt=2048, max_new_tokens=512, steps_per_launch=4,
    row_tokens=2048,
)  # fmt: skip


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)  # without the sharding on a CPU


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_temporaries_are_small_beside_the_cache(dtype: str) -> None:
    """Of the launch that reads prefixes, copies pages and writes single tokens."""
    settings = dataclasses.replace(SETTINGS, cache_dtype=dtype)
    params = parameters.abstract_params(CONFIG, "bfloat16")
    with pallas_kernels.using("pallas"), aot.targeting("v5p"):
        launch, (config, *arguments) = executor.arguments_of(
            CONFIG, settings, params, TailRow(2048), mesh.one()
        )
        params, pages, row = jax.tree.map(abstract, arguments)
        memory = launch.trace(config, params, pages, row).lower().compile().memory_analysis()
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes >= cache
    # Less than half of one layer of it: what there is are the row's own arrays.
    assert memory.temp_size_in_bytes < cache / LAYERS / 2


def test_weights_lie_as_the_compiler_wants_them_on_tpu7x() -> None:
    """A decode launch holds no copy of the stacked weights; it had one of nearly all of them."""
    config = dataclasses.replace(
        MODELS["Qwen2.5-7B-Instruct"], layers=2, vocab_size=4096, valid_vocab=4096
    )
    settings = dataclasses.replace(SETTINGS, pages=64, cache_dtype="bfloat16")
    chips = np.array(aot.host_of("tpu7x:2x2x1")[:4]).reshape(1, 4)
    there = jax.sharding.Mesh(chips, mesh.AXES)
    params = placed(
        parameters.abstract_params(config, "bfloat16"),
        parameters.shardings(config, there, mesh.SERVING),
    )
    shape = next(one for one in reversed(shapes(settings)) if isinstance(one, Decode))
    with pallas_kernels.using("pallas"), aot.nothing_kept():
        made = executor.lowered(config, settings, params, shape, there).compile()
    layer = sum(x.size * 2 for x in jax.tree.leaves(params["layers"])) / config.layers / 4
    # Of two layers it was 227 MB, and is 3.
    assert made.memory_analysis().temp_size_in_bytes < layer / 4
