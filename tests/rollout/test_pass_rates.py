"""Tasks that are answered well retire, half of a source at most, and that is remembered."""

import dataclasses
import json

from notepad_jax.rollout import pass_rates
from notepad_jax.rollout.pass_rates import PassRates
from tests.rollout.made import group

A = [("a", number) for number in range(4)]


def test_a_rate_is_of_all_readings_of_a_task():
    rates = PassRates().after([(A[0], group(1, 1, 0, 1))], 0.9, {"a": 4})
    assert rates.known == {A[0]: (3.0, 4)} and not rates.retired
    rates = rates.after([(A[0], group(1, 1, 1, 1))] * 4, 0.9, {"a": 4})  # 19 of 20
    assert rates.known == {A[0]: (19.0, 20)} and rates.retired == {A[0]}
    exactly = PassRates().after([(A[1], group(*[1] * 9, 0))], 0.9, {"a": 4})
    assert exactly.retired == {A[1]}


def test_of_no_source_more_than_half_retires_and_what_is_kept_may_fall_again():
    right, half = group(1, 1), group(1, 0)
    tasks = {"a": 4, "b": 1}
    rates = PassRates().after([(key, right) for key in (*A[:3], ("b", 0))], 0.9, tasks)
    assert rates.retired == {A[0], A[1]} and rates.kept == {A[2], ("b", 0)}
    rates = rates.after([(A[2], half)], 0.9, tasks)
    assert rates.retired == {A[0], A[1]} and rates.kept == {("b", 0)}


def test_what_lengths_took_off_says_nothing_of_a_task():
    shaped = group(1, 1)
    cut = (dataclasses.replace(one, shaping=-0.1) for one in shaped.trajectories)
    shaped = dataclasses.replace(shaped, trajectories=tuple(cut))
    assert PassRates().after([(A[0], shaped)], 1.0, {"a": 2}).retired == {A[0]}


def test_they_come_back_from_json_as_they_were():
    rates = PassRates().after(
        [
            (A[0], group(1, 1)),
            (("b", 7), group(0.1, 0.2)),
            (A[1], group(1, 1)),
            (A[2], group(1, 1)),
        ],
        0.9,
        {"a": 4, "b": 9},
    )
    assert rates.kept and rates.retired
    assert pass_rates.decoded(json.loads(json.dumps(rates.encoded()))) == rates
    assert pass_rates.decoded({}) == PassRates()
