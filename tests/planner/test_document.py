"""How long one document takes on an engine: by hand, and that a plan says it."""

import dataclasses
import math

import jax
import pytest

from notepad_jax.engine import executor, shapes
from notepad_jax.parallel import mesh
from notepad_jax.planner import chips, document, lowering, planned_policy
from notepad_jax.setup import configuration

CHIP = chips.CHIPS["v5p"]


@pytest.fixture(scope="module")
def made():
    """The shipped policy on one device, in chunks of 256 tokens with memories of 8."""
    config = configuration.load("quickstart", ["--config.engine.pages=600"])
    there = jax.devices()[:1]
    return lowering.plan_of(config, there, policy=planned_policy.policy_of(config, "cpu"))


def test_levels_by_hand():
    assert list(document._levels(700, 4)) == [175, 44, 11, 3, 1]
    assert list(document._levels(2, 4)) == [1]
    assert list(document._levels(1, 4)) == []


def test_a_document_by_hand(made):
    # 4,096 chunks, of which a turn merges 256 // 8 = 32 notes: 128, 4 and 1 turns more.
    costs = document._Costs(chunk=2.0, alone=10.0, together=0.5)
    one = document._document(2**20, made, costs)
    assert (one.chunks, one.chain) == (4096, 4)
    assert one.serial == 4096 * 12.0
    assert one.parallel == one.again == (4096 + 128 + 4 + 1) * 2.5
    page = executor.cache_bytes(made.policy, made.settings, mesh.one()) // made.settings.pages
    pages = made.settings.pages_for(made.reading.update.shared)
    assert one.keys == 4096 * pages * page and not one.kept
    # Where all its keys stay, a further round computes no chunk again; its merges it does.
    roomy = dataclasses.replace(
        made, settings=dataclasses.replace(made.settings, pages=4096 * pages)
    )
    again = document._document(2**20, roomy, costs)
    assert again.kept and again.parallel == one.parallel
    assert again.again == 4096 * 0.5 + (128 + 4 + 1) * 2.5


def test_costs_are_those_of_launches(made):
    costs = document._costs(made, CHIP)
    assert 0 < costs.together < costs.alone and costs.chunk > 0
    launches = math.ceil(made.reading.update.completion / made.settings.steps_per_launch)
    names = {program.name for program in made.programs}
    assert lowering.name_of(shapes.decode_shape(made.settings, (1,))) in names
    assert costs.alone > launches * 1e-9
    serial, *_ = document.documents(made, CHIP)
    assert serial.serial > serial.parallel and serial.chain < serial.chunks
