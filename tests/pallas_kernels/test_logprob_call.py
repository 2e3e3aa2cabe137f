"""The call of the token logprob kernels: over a mesh, and what it refuses before it compiles."""

import dataclasses
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.logprob import Sizes, fit_sizes, token_logprob

# ---------------------------------------------------------------- a vocabulary over a mesh

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels import reference
from pallas_kernels.logprob import Sizes, token_logprob

P, SIZES = jax.sharding.PartitionSpec, Sizes(16, 128, 16, 128, 16, 128)
T, D, V, VALID = 32, 24, 520, 380  # the last of four shards of 130 has no valid id
rng = np.random.default_rng(0)
x, w, c = (rng.normal(size=s).astype(np.float32) for s in ((T, D), (D, V), (3, T)))
labels = rng.integers(0, VALID, T).astype(np.int32)
labels[:6] = 0, 129, 130, 259, 260, VALID - 1

def run(function):
    def loss(x, w):
        results = function(x, w)
        return sum((a * b).sum() for a, b in zip(c, results)), results
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, w)

settings = dict(temperature=0.7, valid_vocab=VALID)
expected = run(lambda x, w: reference.token_logprob(x, w, labels, **settings))
cases = [
    ((1, 4), "tensor", False),  # vocab-parallel
    ((2, 2), "tensor", True),  # and data-parallel
    ((4, 1), None, False),  # data-parallel: the weights whole on every shard
]
kernel = functools.partial(token_logprob, sizes=SIZES, interpret=True)
for function in (kernel, reference.token_logprob):
    for shape, axis, transposed in cases:
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh(shape, ("data", "tensor"), axis_types=auto)
        spec = P("tensor", None) if transposed else P(None, axis)
        how = settings | dict(axis_name=axis, transposed=transposed)
        sharded = jax.shard_map(
            lambda x, w, labels: function(x, w, labels, **how),
            mesh=mesh, in_specs=(P("data"), spec, P("data")), out_specs=P("data"),
        )
        found = run(lambda x, w: sharded(x, w.T if transposed else w, labels))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5 * float(abs(b).max()), rtol=0)

mesh = jax.make_mesh((4,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
untracked = jax.shard_map(
    lambda x, w: token_logprob(x, w, labels, axis_name="tensor", **settings),
    mesh=mesh, in_specs=(P(), P(None, "tensor")), out_specs=P(), check_vma=False,
)
try:
    untracked(x, w)
except ValueError as error:
    assert "check_vma=True" in str(error)
else:
    raise AssertionError("an untracked axis was accepted")
"""


@pytest.mark.slow
def test_sharded_over_four_devices():
    """Every shard returns the full answer; gradients are neither missing nor doubled."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PJRT_NPROC": "8"}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, check=True, env=os.environ | flags, timeout=300)


# ---------------------------------------------------------------- what is refused

TOKENS, WIDTH, VOCAB = 20, 24, 300
BASE = Sizes(*tuning.logprob_blocks("bfloat16"))
ARGUMENTS = dict(
    x_TD=np.zeros((TOKENS, WIDTH), np.float32),
    w=np.zeros((WIDTH, VOCAB), np.float32),
    labels_T=np.zeros(TOKENS, np.int32),
    temperature=0.7,
    valid_vocab=VOCAB,
)


@pytest.mark.parametrize(
    "changes, both_numbers",
    [
        (dict(temperature=0.0), "temperature is 0.0"),
        (dict(w=np.zeros((WIDTH + 1, VOCAB), np.float32)), "24 wide, the output matrix 25"),
        (dict(transposed=True), "24 wide, the output matrix 300"),
        (dict(labels_T=np.zeros(TOKENS - 1, np.int32)), "19 labels for 20 tokens"),
        (dict(valid_vocab=VOCAB + 1), "301 valid ids in a vocabulary of 300"),
        (dict(valid_vocab=0), "0 valid ids in a vocabulary of 300"),
        (dict(x_TD=np.zeros((0, WIDTH), np.float32), labels_T=np.zeros(0, np.int32)), "0 tokens"),
        (dict(x_TD=np.zeros((TOKENS, WIDTH), np.float16)), "float16, need bfloat16 or float32"),
        (dict(sizes=dataclasses.replace(BASE, tokens=24)), "24 tokens: need a multiple of 16"),
        (
            dict(sizes=dataclasses.replace(BASE, dx_tokens=272)),
            "272 tokens: .* of 256 above",
        ),
        (dict(sizes=dataclasses.replace(BASE, dw_vocab=100)), "100 ids: need a multiple of 128"),
        (
            dict(sizes=dataclasses.replace(BASE, tokens=1 << 20)),
            "VMEM; kernels have 58720256",
        ),
    ],
)
def test_refused_before_compilation(changes, both_numbers):
    arguments = {
        name: jnp.asarray(a) if isinstance(a, np.ndarray) else a
        for name, a in (ARGUMENTS | changes).items()
    }
    with pytest.raises(ValueError, match=both_numbers):
        token_logprob(**arguments)


def test_sizes_shrink_until_a_wide_model_fits():
    assert fit_sizes(3584, 2, 2) == fit_sizes(4096, 2, 4) == BASE
    wide = fit_sizes(16384, 2, 4)
    assert wide.tokens < BASE.tokens and wide.dw_vocab < BASE.dw_vocab
    with pytest.raises(ValueError, match="16 tokens x 128 ids need .* kernels have 50331648"):
        fit_sizes(1_000_000, 4, 4)
