"""What test_sharding runs in a process of eight fake devices: the same numbers as on one.

    python eight.py KERNELS update|sums|engine|text CASE FSDP TENSOR

Loss, gradient and steps of an update, or the tokens of engines, over the mesh (FSDP, TENSOR) with
the reference backend or the kernels themselves in interpret mode, against the reference backend
on one device. `sums` are an update's in bfloat16, over fsdp. `text` looks at what was compiled:
nobody gathers what is stacked over layers.
"""

import asyncio
import dataclasses
import re
import sys
from typing import Any

import jax
import numpy as np
import optax
import tiny

import pallas_kernels
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.service import EngineService
from notepad_jax.grpo import forward, ratios, state, update
from notepad_jax.grpo.settings import UpdateSettings
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import Experts, PolicyConfig
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place
from notepad_jax.types import PolicySnapshot, TrainBatch

DENSE = dataclasses.replace(tiny.CONFIG, layers=2, heads=8, kv_heads=4)
CASES: dict[str, PolicyConfig] = {
    "dense": DENSE,
    "untied": dataclasses.replace(DENSE, tied_embeddings=False, attention_bias=True),
    "windows": dataclasses.replace(DENSE, windows=(5, 0)),
    "experts": dataclasses.replace(
        DENSE, experts=Experts(count=8, per_token=2, feed_forward=24, normalize=True)
    ),
    "lora": DENSE,
}
ADAPTERS = lora.Lora(2, 4.0, ("q", "o", "down"))
SETTINGS = UpdateSettings(
    ratio="ppo_clip", **ratios.USUAL._asdict(), proximal="recomputed", kl="k3", kl_weight=0.1,
    entropy_weight=0.05, temperature=0.7, micro_batch_rows=8, remat=True,
)  # fmt: skip


def batch(rows: int = 16, width: int = 64) -> TrainBatch:
    """Rows with a shared prefix and two tails, ragged, some rows with nothing to learn."""
    rng = np.random.default_rng(0)
    shape = rows, width
    tokens = rng.integers(4, 60, shape).astype(np.int32)
    positions = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    kv_end = positions + 1
    weights = np.zeros(shape, np.float32)
    for row in range(rows):
        prefix, first, second = np.sort(rng.choice(np.arange(8, width), 3, replace=False))
        kv_end[row, :prefix] = second
        kv_end[row, prefix:first], kv_end[row, first:second] = first, second
        positions[row, first:second] = prefix + np.arange(second - first)
        if row % 5 != 3:
            trained = rng.random(second - prefix) < 0.5
            weights[row, prefix:second] = trained * rng.uniform(0.5, 2, second - prefix)
    real = lambda: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    whole = np.zeros(shape, np.int32)
    behaviour = real() * 0.1 - 4
    return TrainBatch(
        tokens=tokens, positions=positions, kv_end=kv_end, weights=weights, advantages=real(),
        behaviour_logprobs=behaviour, proximal_logprobs=behaviour + real() * 0.1,
        reference_logprobs=behaviour + real() * 0.1, turn=whole, trajectory=whole, prompt=whole,
        age=whole, update_turn=(weights > 0).astype(np.float32), denominator=float(weights.sum()),
    )  # fmt: skip


def laid(case: str, config: PolicyConfig, mesh: jax.sharding.Mesh) -> tuple:
    """(frozen, trained) on `mesh`, as initialised: sharpened weights multiply rounding, too."""
    drawn = parameters.init_params(config, jax.random.key(0))
    params = place.commit(drawn, parameters.shardings(config, mesh, meshes.TRAINING))
    if case != "lora":
        return {}, params
    frozen, trained = lora.partition(config, params, ADAPTERS, jax.random.key(1))
    layers = trained["layers"]  # B begins at zero, and then A has no gradient
    return frozen, {
        "layers": {
            name: place.commit(
                0.1 * jax.random.normal(jax.random.key(2), leaf.shape), leaf.sharding
            )
            for name, leaf in layers.items()
        }
    }


def learnt(case: str, config: PolicyConfig, mesh: jax.sharding.Mesh) -> tuple:
    """(loss, gradient, masters after two steps, logprobs, metrics)."""
    frozen, trained = laid(case, config, mesh)
    one = batch()
    loss, gradient = update.loss_and_gradient(config, SETTINGS, trained, frozen, one)
    params = parameters.join(frozen, trained)
    logprobs = forward.told(config, params, one, SETTINGS.temperature, 8).logprobs
    optimizer = optax.adamw(1e-3)
    began = state.start(trained, optimizer)
    where = jax.tree.map(lambda x: x.sharding, began)
    ended, metrics = update.learn(config, optimizer, SETTINGS, began, frozen, [one, one])
    # Nothing moved between the steps, or it would have been compiled and copied anew.
    assert jax.tree.map(lambda x: x.sharding, ended) == where
    assert update._accumulate._cache_size() == update._apply._cache_size() == len(SEEN)
    return loss, gradient, ended.masters, logprobs, metrics


def close(found, wanted, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-6))


def check_update(case: str, config: PolicyConfig, mesh: jax.sharding.Mesh) -> None:
    SEEN.append(meshes.one())
    with pallas_kernels.using("reference"):
        one = learnt(case, config, meshes.one())
    SEEN.append(mesh)
    many = learnt(case, config, mesh)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    close(many[1], one[1], 3e-5)
    np.testing.assert_allclose(many[3], one[3], atol=2e-5)
    for name, value in one[4].items():
        np.testing.assert_allclose(many[4][name], value, rtol=1e-3, atol=1e-6, err_msg=name)
    assert one[4].keys() == many[4].keys() and one[4]["update/skipped"] == 0
    assert ("moe_load_max" in one[4]) == (case == "experts")


def stepped(
    case: str, config: PolicyConfig, mesh: jax.sharding.Mesh, rows: int, at: Any
) -> tuple:  # fmt: skip
    """(loss, gradient, how masters moved, state) of one step from the state `at`, all numpy."""
    settings = dataclasses.replace(SETTINGS, micro_batch_rows=rows)
    frozen, trained = laid(case, config, mesh)
    optimizer = optax.adamw(1e-3)
    began = state.start(trained, optimizer)
    if at is not None:
        began = place.commit(at, jax.tree.map(lambda x: x.sharding, began))
    before = jax.tree.map(np.array, began.masters)
    loss, gradient = update.loss_and_gradient(config, settings, began.masters, frozen, batch())
    ended, _ = update.learn(config, optimizer, settings, began, frozen, [batch()])
    ended = jax.tree.map(np.array, ended)
    moved = jax.tree.map(np.subtract, ended.masters, before)
    return float(loss), jax.tree.map(np.array, gradient), moved, ended


def check_sums(case: str, config: PolicyConfig, mesh: jax.sharding.Mesh) -> None:
    """Two steps in bfloat16 on all rows of devices and on one row: sums over fsdp alone differ.

    One row of devices (of a mesh of eight rows it is one device) is given as many rows of the
    batch at a time as each row of many gets, so that a token's activations are rounded alike:
    one that falls to the other side moves a gradient by percents. What is left is the order of
    float32 sums: 4e-7 of a leaf's gradient, more in Adam's step where a gradient is small. Sums
    in bfloat16 are off by 1e-3 and more. The second step begins where the first ended on one row:
    of masters that differ by 1e-8 a few are cast to other bfloat16 numbers.
    """
    config, at = dataclasses.replace(config, dtype="bfloat16"), None
    for _ in range(2):
        each = SETTINGS.micro_batch_rows // mesh.shape["fsdp"]
        loss, gradient, moved, ended = stepped(case, config, meshes.row(mesh, 0), each, at)
        found = stepped(case, config, mesh, SETTINGS.micro_batch_rows, at)
        np.testing.assert_allclose(found[0], loss, rtol=1e-6)
        gaps = jax.tree.map(off, found[1], gradient)
        assert max(jax.tree.leaves(gaps)) < 1e-5, gaps
        gaps = jax.tree.map(off, found[2], moved)
        assert max(jax.tree.leaves(gaps)) < 3e-4, gaps
        at = ended


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """The difference's root mean square over that of `wanted`."""
    return float(np.linalg.norm(np.float64(found) - wanted) / np.linalg.norm(np.float64(wanted)))


def drawn(case: str, config: PolicyConfig, seed: int) -> parameters.Params:
    """A policy, with adapters beside its base where the case has some."""
    params = tiny.params(seed, config=config)
    if case != "lora":
        return params
    frozen, fresh = lora.partition(config, params, ADAPTERS, jax.random.key(seed))
    keys = iter(jax.random.split(jax.random.key(seed), 99))
    adapters = jax.tree.map(lambda x: 0.1 * jax.random.normal(next(keys), x.shape), fresh)
    return parameters.join(frozen, adapters)


def check_engine(case: str, config: PolicyConfig, mesh: jax.sharding.Mesh) -> None:
    """Tokens of engines side by side, one on each row of `mesh`, also of a policy they adopt."""
    policies = [drawn(case, config, seed) for seed in range(2)]
    prompts = tiny.prompts(per_prefix=1)

    def laid(version: int, there: jax.sharding.Mesh) -> PolicySnapshot:
        where = parameters.shardings(config, there, meshes.SERVING)
        shardings = lora.shardings(policies[version], where)
        return PolicySnapshot(version, place.commit(policies[version], shardings))

    async def one(version: int) -> list:
        service = EngineService(tiny.executor(config=config), laid(version, meshes.one()))
        async with service:
            return await asyncio.gather(
                *[service.complete(p, tiny.sampling(i)) for i, p in enumerate(prompts)]
            )

    async def many() -> list:
        count = mesh.shape["fsdp"]
        executors = [
            tiny.executor(config=config, mesh=meshes.row(mesh, row)) for row in range(count)
        ]
        before = [executor.device.pages.data.sharding for executor in executors]
        assert len({device for where in before for device in where.device_set}) == mesh.size
        nobody = PolicySnapshot(0, None)
        engines = Engines([EngineService(executor, nobody) for executor in executors], mesh)
        engines.start_with(laid(0, mesh))
        found = []

        async def some(number: int, service: EngineService) -> list:
            mine = range(number, len(prompts), count)
            return await asyncio.gather(
                *[service.complete(prompts[i], tiny.sampling(i)) for i in mine]
            )

        lowering = {name for name in sys.modules if "mlir" in name}
        async with engines:
            for version in range(2):
                if version:
                    await engines.adopt(laid(version, mesh), drain=True)
                shares = await engines.each(some)
                found.append([shares[i % count][i // count] for i in range(len(prompts))])
        assert [executor.device.pages.data.sharding for executor in executors] == before
        held = executors[0].device.pages.data.addressable_shards[0].data.shape[2]
        assert held == config.kv_heads // mesh.shape["tensor"]
        assert engines.take_stats().turns == 2 * len(prompts)
        # What one thread imports of MLIR, another that lowers may stumble over.
        assert {name for name in sys.modules if "mlir" in name} == lowering
        return found

    with pallas_kernels.using("reference"):
        wanted = [asyncio.run(one(version)) for version in range(2)]
    for version, done in enumerate(asyncio.run(many())):
        for a, b in zip(wanted[version], done, strict=True):
            assert b.policy_version == version and a.tokens.tolist() == b.tokens.tolist()
            # Sharpened weights (`tiny.params`) multiply the rounding of sums in another order.
            np.testing.assert_allclose(a.behaviour_logprobs, b.behaviour_logprobs, atol=3e-5)


def check_text(config: PolicyConfig, mesh: jax.sharding.Mesh) -> None:
    """No device holds, or gathers, a whole parameter of all layers, or moments of one."""
    _, trained = laid("dense", config, mesh)
    optimizer = optax.adamw(1e-3)
    for leaf in jax.tree.leaves(state.abstract(trained, optimizer).opt_state):
        shared = leaf.size // np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=int)
        assert leaf.size < 1000 or shared == mesh.size, leaf
    programs = update.lowered(config, optimizer, SETTINGS, trained, {}, 64, 100)
    whole = {leaf.shape for leaf in jax.tree.leaves(trained["layers"])}
    for name in ("accumulate", "apply"):
        text = programs[name].compile().as_text()
        gathered = [
            tuple(map(int, shape.split(",")))
            for shape in re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", text)
        ]
        assert (name == "apply") or gathered  # layer by layer, they are
        assert not whole.intersection(gathered), (name, whole.intersection(gathered))


SEEN: list[jax.sharding.Mesh] = []

if __name__ == "__main__":
    kernels, what, case, fsdp, tensor = *sys.argv[1:4], *map(int, sys.argv[4:6])
    assert len(jax.devices()) == fsdp * tensor == 8
    pallas_kernels.use(kernels)
    if what == "text":
        check_text(CASES[case], meshes.make(tensor))
    elif what == "update":
        check_update(case, CASES[case], meshes.make(tensor))
    elif what == "sums":
        check_sums(case, CASES[case], meshes.make(tensor))
    else:
        check_engine(case, CASES[case], meshes.make(tensor))
    print("agreed")
