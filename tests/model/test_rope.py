"""Rotary frequencies and their scalings."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from notepad_jax.model import rope
from notepad_jax.model.layers import rope_angles


def test_linear_scaling_divides_positions():
    positions = jnp.arange(40)[None]
    want = rope_angles(positions[:, :10], 8, 1e4)
    got = rope_angles(positions[:, ::4], 8, 1e4, rope.Linear(4.0))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


def test_llama3_and_yarn_keep_fast_pairs_and_slow_down_slow_ones():
    plain, _ = rope.frequencies(128, 5e5)
    for scaling in (rope.Llama3(8.0, 1.0, 4.0, 8192), rope.Yarn(8.0, 8192, 1.2)):
        scaled, loudness = rope.frequencies(128, 5e5, scaling)
        ratio = plain / scaled
        np.testing.assert_allclose([ratio[0], ratio[-1]], [1.0, 8.0], rtol=1e-6)
        assert (np.diff(ratio) > -1e-5).all() and ((ratio > 1.01) & (ratio < 7.9)).any()
        assert loudness == (1.2 if isinstance(scaling, rope.Yarn) else 1.0)
    assert rope.yarn_attention_factor(math.e) == pytest.approx(1.1)
