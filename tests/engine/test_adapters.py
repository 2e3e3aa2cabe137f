"""Adapters run beside an engine's weights: what it says is what the trainer says of both."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from notepad_jax.checkpoint import handoff
from notepad_jax.engine import executor, shapes
from notepad_jax.engine.service import EngineService
from notepad_jax.model import lora, lora_merge, parameters
from notepad_jax.model.config import Experts
from notepad_jax.types import PolicySnapshot

CHOSEN = lora.Lora(2, 4.0, lora.TARGETS)
# Two behind a prefix that ends inside a page, two without one: all three kinds of launches.
PROMPTS = tiny.prompts(per_prefix=2)[2:4] + tiny.prompts(per_prefix=2)[8:]
SAMPLES = [tiny.sampling(i, (1.0, 0.0)[i % 2]) for i in range(len(PROMPTS))]


def trained(base, chosen=CHOSEN, config=tiny.CONFIG, seed=1, size=0.1):
    """(frozen, adapters) after some training: B is no longer zero."""
    frozen, fresh = lora.partition(config, base, chosen, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    draw = lambda x: x + size * jax.random.normal(next(keys), x.shape)  # noqa: E731
    return frozen, jax.tree.map(draw, fresh)


def adopted(frozen, adapters, dtype, chosen=CHOSEN, config=tiny.CONFIG):
    """What an engine that keeps weights in `dtype` gets from a hand-off."""
    base = parameters.rollout_target(config, lora.plain(frozen), dtype)
    bridge = handoff.InProcess(lora.rollout_target(config, chosen, base), frozen)
    bridge.publish(PolicySnapshot(0, adapters))
    return bridge.adopt().params


def completed(config, *policies):
    """The completions of all prompts by each policy, one adopted after the other."""

    async def go():
        done = []
        engine = tiny.executor(config=config)
        async with EngineService(engine, PolicySnapshot(0, policies[0])) as service:
            for version, params in enumerate(policies):
                if version:
                    await service.adopt(PolicySnapshot(version, params))
                pairs = zip(PROMPTS, SAMPLES, strict=True)
                done.append(await asyncio.gather(*[service.complete(p, s) for p, s in pairs]))
        return done

    return asyncio.run(go())


def ids(completions):
    return [c.tokens.tolist() for c in completions]


def worst_gap(params, completions, config=tiny.CONFIG):
    gaps = [
        tiny.trainer_logprobs(params, p, c, s.temperature, config) - c.behaviour_logprobs
        for p, c, s in zip(PROMPTS, completions, SAMPLES, strict=True)
    ]
    return np.abs(np.concatenate(gaps)).max()


@pytest.mark.slow
def test_beside_the_weights_is_the_float32_sum():
    """Tokens of prefixes, tails and decoding, sampled and greedy, are those of W + scale A B."""
    frozen, adapters = trained(tiny.params())
    whole = parameters.join(frozen, adapters)
    (beside,) = completed(tiny.CONFIG, adopted(frozen, adapters, "float32"))
    (summed,) = completed(tiny.CONFIG, lora_merge.merged(whole))
    (base,) = completed(tiny.CONFIG, tiny.params())
    assert ids(beside) == ids(summed) != ids(base)
    for a, b in zip(beside, summed, strict=True):
        np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=5e-6)
    assert worst_gap(whole, beside) < 1e-5 < 0.1 < worst_gap(tiny.params(), beside)


@pytest.mark.slow
def test_beside_int8_weights_no_adapter_is_rounded():
    """The sum of the weights multiplied out and a delta that they have no room for."""
    frozen, adapters = trained(tiny.params(), size=0.003)
    params, whole = (
        adopted(frozen, adapters, "int8"), lora_merge.merged(parameters.join(frozen, adapters)),
    )  # fmt: skip
    for name in lora.TARGETS:
        kept = params["layers"][name]
        delta = whole["layers"][name] - frozen["layers"][name]
        assert kept.values.dtype == "int8"
        assert (jnp.abs(delta) < kept.scale / 2).mean() > 0.9, name
    exact = parameters.join(tiny.multiplied_out(lora.plain(params)), lora.factors(params))
    exact["layers"]["lora_scale"] = params["layers"]["lora_scale"]
    (done,) = completed(tiny.CONFIG, params)
    (summed,) = completed(tiny.CONFIG, lora_merge.merged(exact))
    assert ids(done) == ids(summed)
    assert worst_gap(exact, done) < 1e-5
    assert worst_gap(lora.plain(exact), done) > 1e-3  # and the delta is seen


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_policy_in_bfloat16_multiplies_by_the_trainers_numbers(kept):
    """Adapters are handed over as the forward pass rounds them, whatever the base is kept in."""
    config = dataclasses.replace(tiny.CONFIG, dtype="bfloat16")
    base = jax.tree.map(lambda x: x.astype("bfloat16"), tiny.params())
    frozen, adapters = trained(base)
    params = adopted(frozen, adapters, kept, config=config)
    assert {x.dtype for x in jax.tree.leaves(lora.factors(params))} == {jnp.dtype("bfloat16")}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), adapters)
    jax.tree.map(np.testing.assert_array_equal, lora.factors(params), rounded)


@pytest.mark.slow
def test_experts_stay_as_they_are_beside_adapters_on_attention():
    config = dataclasses.replace(tiny.CONFIG, experts=Experts(4, 2, 24, True))
    chosen = lora.Lora(2, 4.0, ("q", "k", "v", "o"))
    base = parameters.init_params(config, jax.random.key(0))
    frozen, adapters = trained(base, chosen, config)
    (done,) = completed(config, adopted(frozen, adapters, "float32", chosen, config))
    assert worst_gap(parameters.join(frozen, adapters), done, config) < 1e-5


@pytest.mark.slow
def test_new_adapters_are_another_version_to_the_prefix_cache():
    """What was cached under the adapters before is not read again."""
    frozen, first = trained(tiny.params())
    second = trained(tiny.params(), seed=2)[1]
    policies = [adopted(frozen, one, "float32") for one in (first, second)]
    one_after_the_other = completed(tiny.CONFIG, *policies)
    for params, done in zip(policies, one_after_the_other, strict=True):
        (alone,) = completed(tiny.CONFIG, params)
        assert ids(done) == ids(alone)
    assert ids(one_after_the_other[0]) != ids(one_after_the_other[1])


@pytest.mark.slow
def test_several_policies_share_a_base_an_engine_and_its_launches():
    """Each request is sampled by the policy that it names, as it would be in an engine alone."""
    base = tiny.params()
    fewer = lora.Lora(3, 6.0, ("q", "o", "down"))
    first, second = (
        parameters.join(*trained(base, chosen, seed=seed))
        for seed, chosen in enumerate((CHOSEN, fewer), 1)
    )
    params = lora.several(base, [first, second])
    assert params["layers"]["k"] is base["layers"]["k"]  # one base, whoever reads with it

    async def together():
        engine = tiny.executor()
        async with EngineService(engine, PolicySnapshot(0, params)) as service:
            calls = [
                service.complete(prompt, dataclasses.replace(sample, adapters=number))
                for prompt, sample in zip(PROMPTS, SAMPLES, strict=True)
                for number in range(3)
            ]
            done = await asyncio.gather(*calls)
        return [done[number::3] for number in range(3)], sum(engine.seen.values())

    found, launches = asyncio.run(together())
    for number, policy in enumerate((base, first, second)):
        (alone,) = completed(tiny.CONFIG, policy)
        assert ids(found[number]) == ids(alone)
        assert worst_gap(policy, found[number]) < 1e-5
    assert len({str(ids(one)) for one in found}) == 3
    assert launches < 20  # three engines make more than 30: prefixes and slots of all are together


def products(config, params):
    """Matrix products in the text of each launch of an engine."""
    for shape in shapes.shapes(tiny.SETTINGS)[::4]:
        text = executor.lowered(config, tiny.SETTINGS, params, shape).as_text()
        yield text.count("stablehlo.dot_general")


@pytest.mark.slow
def test_a_launch_has_two_small_products_more_for_each_adapter_and_none_without():
    """In bfloat16; in float32 a CPU's launches are those of a policy without."""
    narrow = dataclasses.replace(tiny.CONFIG, dtype="bfloat16")
    for config, more in (narrow, 2), (tiny.CONFIG, 0):
        base = jax.tree.map(lambda x, like=config.dtype: x.astype(like), tiny.params())
        frozen, adapters = trained(base, lora.Lora(2, 4.0, ("q",)), config)
        plain = list(products(config, base))
        whole = parameters.join(frozen, adapters)
        assert list(products(config, lora.plain(whole))) == plain
        assert list(products(config, whole)) == [n + more for n in plain]
