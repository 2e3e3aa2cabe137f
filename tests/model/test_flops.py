"""Model FLOPs: against the parameters that there are, and by hand."""

import dataclasses
import math

import jax
import pytest
import tiny

from notepad_jax.model import flops, parameters
from notepad_jax.model.config import Experts

WORK = dict(tokens=11, pairs=40, logits=5)
UNTIED = dataclasses.replace(tiny.CONFIG, tied_embeddings=False)
EXPERTS = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))


@pytest.mark.parametrize("config", [tiny.CONFIG, UNTIED, EXPERTS])
def test_a_pass_multiplies_with_every_matrix_once(config):
    """But for the experts that a token is not sent to, and what chooses them."""
    layers = parameters.abstract_params(config)["layers"]
    sent = config.experts.per_token / config.experts.count if config.experts else 1
    stacked = sum(
        math.prod(x.shape) * (sent if "expert" in name else 1)
        for name, x in layers.items()
        if "norm" not in name and name != "router"
    )
    assert flops.forward(config, 1, 0, 0) == 2 * stacked
    assert flops.forward(config, 0, 0, 1) == 2 * config.vocab_size * config.width


def test_work_adds_up_and_learning_is_three_forward_passes():
    one, two = (flops.forward(tiny.CONFIG, k, 3 * k, 2 * k) for k in (1, 2))
    assert two == 2 * one
    assert flops.learning(tiny.CONFIG, **WORK) == 3 * flops.forward(tiny.CONFIG, **WORK)


def test_adapters_save_the_weights_own_gradient_and_nothing_of_attention():
    whole, adapted = (flops.learning(tiny.CONFIG, **WORK, adapters=n) for n in (0, 100))
    weights = flops.products(tiny.CONFIG, 11, 5)
    assert whole - adapted == weights - 3 * 2 * 100 * 11


def test_by_hand():
    """A layer: q, o 32 x 32, k, v 32 x 16, three of 32 x 48: 7,680 weights, of which three."""
    pair = 3 * 4 * 8 * 2 * 2  # layers, heads, their size, scores and values, multiply and add
    assert flops.forward(tiny.CONFIG, **WORK) == 2 * (11 * 3 * 7680 + 5 * 64 * 32) + 40 * pair
    assert flops.pair(tiny.CONFIG, tensor=2) * 2 == flops.pair(tiny.CONFIG) == pair // 2
    shapes = jax.tree.map(lambda x: x.shape, parameters.abstract_params(tiny.CONFIG)["layers"])
    assert (3, 32, 48) in shapes.values()
