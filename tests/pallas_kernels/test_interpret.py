"""Interpreted kernels under remat and over several CPU devices: what sharded tests rest on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import jax, jax.numpy as jnp, layouts, numpy as np
import pallas_kernels
from jax.sharding import PartitionSpec as P
from pallas_kernels.interpret import interpret_mode

assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
rng = np.random.default_rng(0)
T, N, K, H = 136, 2, 1, 64
q, k, v = (jnp.asarray(rng.normal(size=(4, T, n, H)), jnp.float32) for n in (N, K, K))
kv_end = jnp.asarray(np.stack([layouts.kv_end(rng, T) for _ in range(4)]))
# Not the mean square: a query that sees one key has no gradient but the rounding of d_out . v less
# d_out . out, and there d_out is v: 64 terms of one sign, whose order would decide (4.5e-6 of the
# largest dk without AVX-512, with these .8e-6).
drawn = jnp.asarray(rng.normal(size=q.shape), jnp.float32)

def shard(q, k, v, kv_end):
    blocks = pallas_kernels.packed_schedule(kv_end, T, head_size=H, dtype=q.dtype)
    layer = lambda q, _: (pallas_kernels.packed_attention(q, k, v, blocks)[0], None)
    layer = jax.checkpoint(layer, policy=pallas_kernels.SAVE_ATTENTION)
    return jax.lax.scan(layer, q, jnp.arange(2))[0]

def loss(q, k, v):
    rows = jax.shard_map(
        shard, mesh=mesh, in_specs=(P("rows"),) * 4, out_specs=P("rows"), check_vma=False
    )
    return (rows(q, k, v, kv_end) * drawn).mean()

step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
want = step(q, k, v)
with pallas_kernels.using("interpret"):
    got = step(q, k, v)
for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=2e-6 * float(abs(b).max()))

os.environ["PJRT_NPROC"] = "4"  # as many threads as devices hang
try:
    interpret_mode(True)
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_gradients_under_remat_over_four_devices_are_the_reference_s():
    here = Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PJRT_NPROC": "8",
        "PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 CPU devices need 8 threads and have 4; set PJRT_NPROC=8" in done.stdout
