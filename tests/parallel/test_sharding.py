"""Laid out over four devices, the same numbers come out. One process, so one subprocess."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from notepad_jax.parallel import mesh, rules

PROGRAM = """
import asyncio
import jax, numpy as np
import tiny
from notepad_jax.engine.service import EngineService
from notepad_jax.model import attention, logprobs, parameters, policy
from notepad_jax.parallel import mesh as meshes, place, rules
from notepad_jax.types import PolicySnapshot

assert len(jax.devices()) == 4
config = tiny.CONFIG
params = tiny.params(config=config)
mesh = meshes.make(tensor=2)
assert dict(mesh.shape) == {"fsdp": 2, "tensor": 2}

def spread(params, table):
    return place.commit(params, parameters.shardings(config, mesh, table))

def loss(params):
    tokens = jax.numpy.arange(4, 52).reshape(2, 24)
    attend = attention.packed(config, jax.numpy.full((2, 24), 24, np.int32))
    positions = jax.numpy.broadcast_to(jax.numpy.arange(24), (2, 24))
    hidden, _, _ = policy.forward(config, params, tokens, positions, attend)
    # A loss on the hidden states themselves would be mostly rounding: their norm is fixed.
    before, labels = hidden[:, :-1].reshape(-1, config.width), tokens[:, 1:].reshape(-1)
    return logprobs.token_logprobs(config, params, before, labels, 1.0)[0].mean()

# As initialised: tiny.params() is sharpened, which multiplies rounding, too.
drawn = parameters.init_params(config, jax.random.key(0))
value, gradient = jax.value_and_grad(loss)(drawn)
sharded = spread(drawn, rules.TRAINING)
spec = jax.sharding.PartitionSpec(None, "fsdp", "tensor", None)
assert sharded["layers"]["q"].sharding.spec == spec
assert sharded["layers"]["q"].addressable_shards[0].data.shape == (3, 16, 2, 8)
v, g = jax.jit(jax.value_and_grad(loss))(sharded)
np.testing.assert_allclose(v, value, rtol=1e-5)
for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(g), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5 * float(abs(a).max()))

prompts = tiny.prompts(per_prefix=1)
async def complete(params, mesh=None):
    executor = tiny.executor(config=config, mesh=mesh)
    async with EngineService(executor, PolicySnapshot(0, params)) as service:
        return await asyncio.gather(
            *[service.complete(p, tiny.sampling(i)) for i, p in enumerate(prompts)]
        )

one = asyncio.run(complete(params))
many = asyncio.run(complete(spread(params, rules.SERVING), mesh))
for a, b in zip(one, many, strict=True):
    assert a.tokens.tolist() == b.tokens.tolist()
    np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=1e-5)
print("agreed")
"""


def test_four_devices_agree_with_one():
    tests = Path(__file__).parents[1]
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}",
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout.strip().endswith("agreed"), done.stderr[-3000:]


def test_devices_that_cannot_be_split():
    with pytest.raises(ValueError, match="cannot be split into tensor groups of 3"):
        mesh.make(tensor=3)


def test_a_dimension_that_does_not_divide_is_named_with_both_numbers():
    class Pair:
        shape = {"fsdp": 1, "tensor": 4}

    with pytest.raises(ValueError, match="6 heads cannot be split over tensor=4"):
        rules.sharding(Pair(), ("heads",), (6,), rules.TRAINING)
    with pytest.raises(ValueError, match="'head' has no rule"):
        rules.sharding(Pair(), ("head",), (8,), rules.TRAINING)
