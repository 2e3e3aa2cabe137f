"""The nouns refuse what they cannot mean."""

import dataclasses
import math

import pytest

from notepad_jax.types import COLDEST, HOTTEST, SamplingParams

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1, stop_ids=(), seed=0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 10**30])
@pytest.mark.parametrize("name", ["temperature", "top_p", "max_new_tokens", "seed"])
def test_sampling_refuses_numbers_out_of_range_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}; it must be"):
        dataclasses.replace(SAMPLING, **{name: value})


@pytest.mark.parametrize("change", [dict(temperature=1e-5), dict(top_p=0.0), dict(top_p=1e-46)])
def test_sampling_refuses_what_a_device_cannot_tell_from_nothing(change):
    with pytest.raises(ValueError, match="it must be"):
        dataclasses.replace(SAMPLING, **change)


@pytest.mark.parametrize("temperature", [0, 0.0, COLDEST, 1, HOTTEST])
def test_sampling_takes_every_temperature_in_range(temperature):
    assert dataclasses.replace(SAMPLING, temperature=temperature).temperature == temperature


def test_another_seed_changes_nothing_else_and_is_checked():
    seeds = dataclasses.replace(SAMPLING, stop_ids=(2, 3), temperature=0.5)
    assert seeds.seeded(7) == dataclasses.replace(seeds, seed=7) and seeds.seed == 0
    for wrong in (-1, 2**63):
        with pytest.raises(ValueError, match=f"seed is {wrong}; it must be"):
            seeds.seeded(wrong)
