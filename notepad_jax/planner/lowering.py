"""Lowers the programs that a run of a config would launch on a slice that is not here.

Everything is abstract: shapes, dtypes and places, made by the functions that a run makes its arrays
with, so what is compiled is what would run. A device's memory is two things, and they must not be
counted twice: *residents* (masters, moments, gradient, the engine's weights, the cache), which
stay, and what a program needs beside those that it is given. A policy that is not at hand is a
`planned_policy`. Above: `plan`; below: `planned_policy`, `residents`, `builders`, `workload`, and
the programs' own `lowered`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from notepad_jax.checkpoint.abstract_trees import as_published, placed
from notepad_jax.engine import apart, executor, shapes
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import micro_batches, state, update
from notepad_jax.grpo.algorithm import Algorithm
from notepad_jax.grpo.optimizer import make_optimizer
from notepad_jax.model import flops, lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel.mesh import TRAINING
from notepad_jax.planner import workload
from notepad_jax.planner.planned_policy import PlannedPolicy, policy_of
from notepad_jax.planner.residents import bytes_of, on_the_way, shared
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import builders, learner, sizes
from notepad_jax.setup.config.learning import AdapterKeys
from notepad_jax.setup.config.whole import Training

ROLLOUT, UPDATE, HANDOFF = "rollout", "update", "hand-off"
PHASES = (ROLLOUT, UPDATE, HANDOFF)
# Attention's products of a query and key: scores and values; and once more each, with the
# gradients of both sides, in the two kernels of the backward pass. Remat keeps what it gave.
FORWARD, BACKWARD = flops.ATTENTION, 7


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one launch of a program on a device."""

    tokens: int  # that go through all layers; decoding's of all its steps
    logits: int  # that meet the vocabulary; likewise
    steps: int = 1  # times that the weights are read


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile, and its launches in a step; figures are of one device."""

    name: str
    phase: str
    lower: Callable[[], jax.stages.Lowered]
    holds: frozenset[str]  # the residents among its arguments
    launches: float  # in a step, at its limits; 0: compiled, but such a step needs another shape
    kernel_flops: float  # of attention in one launch, which the compiled text does not tell
    kernel_bytes: float
    work: Work


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run on a slice, planned: its meshes, residents and programs."""

    model: str
    counted_by: str  # the tokenizer that the prompts' lengths are counted by
    policy: PolicyConfig
    remat: bool
    devices: int
    hosts: int
    trainer: Mesh
    engine: Mesh  # of one of them
    engines: int
    residents: Mapping[str, Mapping[str, int]]  # phase -> name -> bytes of a device
    programs: tuple[Program, ...]
    reading: workload.RolloutWork
    rollout: workload.RolloutLaunches
    update: workload.Update
    rules: Rules
    settings: EngineSettings


def plan_of(
    config: Training, there: Sequence[Any], host: Sequence[Any] | None = None,
    policy: PlannedPolicy | None = None,
) -> PlannedRun:  # fmt: skip
    """Returns what a run of `config` would launch on the devices `there`; compiles nothing.

    Engines are planned on `host`, the devices of one host (default: the first one's of `there`).
    `policy` is that of `config`, where the caller has found it (default: `policy_of`).
    Raises ValueError, in the words of a run, for what cannot work: a mesh that does not divide
    devices, heads, rows or the vocabulary, or sizes that do not fit each other.
    """
    policy = policy_of(config, there[0].platform) if policy is None else policy
    rules = builders.rules(config.reading)
    config = sizes.settled(config, policy.template, rules)
    plan, settings, optimizer_settings = learner.settings_of(config)
    trainer = builders.trainers_mesh(config, there)
    micro_batches.check_parts(settings.micro_batch_rows, trainer.shape["fsdp"])
    first = [device for device in there if device.process_index == there[0].process_index]
    side_by_side = builders.engines_mesh(config.engine, first if host is None else host)
    engine = meshes.row(side_by_side, 0)
    hosts = len({device.process_index for device in there})
    beside = builders.engines(config.engine, first if host is None else host)
    engines, sharing = hosts * beside, beside // side_by_side.shape["fsdp"]
    engine_settings = builders.engine_settings(config.engine, policy.config, rules, policy.template)
    reading = workload.readings(config, policy.template)
    rollout = workload.rollout(reading, engine_settings, engines, config.engine.use_drafts)
    updates = workload.update(
        reading, plan.row_length, settings.micro_batch_rows, trainer.shape["fsdp"],
        plan.minibatches, plan.epochs,
    )  # fmt: skip
    frozen, trained = _partitions(config.grpo.lora, policy, trainer)
    optimizer = make_optimizer(optimizer_settings)
    weights = builders.adopted(config, policy.config, engine)
    learning = _Learning(policy.config, optimizer, settings, frozen, trained, trainer)
    return PlannedRun(
        model=policy.name,
        counted_by=policy.counted_by,
        policy=policy.config,
        remat=settings.remat,
        devices=len(there),
        hosts=hosts,
        trainer=trainer,
        engine=engine,
        engines=engines,
        residents=_residents(config, learning, weights, engine_settings, engine, sharing),
        programs=(
            *_engine_programs(policy.config, engine_settings, weights, engine, rollout),
            *_update_programs(learning, plan, updates),
        ),
        reading=reading,
        rollout=rollout,
        update=updates,
        rules=rules,
        settings=engine_settings,
    )


@dataclasses.dataclass(frozen=True)
class _Learning:
    config: PolicyConfig
    optimizer: Any
    settings: Any
    frozen: Any
    trained: Any
    mesh: Mesh


def _partitions(settings: AdapterKeys, policy: PlannedPolicy, mesh: Mesh) -> tuple[Any, Any]:
    """(frozen, trained), as `learner.partition` has them, abstract."""
    config = policy.config
    whole = parameters.abstract_params(config, policy.stored)
    base = placed(whole, parameters.shardings(config, mesh, TRAINING))
    chosen = settings.wanted
    if chosen is None:
        return {}, base
    return lora.abstract(config, chosen, base)


# ---------------------------------------------------------------- memory that stays


def _residents(
    config: Training, learning: _Learning, weights: Any, settings: EngineSettings, engine: Mesh,
    sharing: int,
) -> Mapping[str, Mapping[str, int]]:  # fmt: skip
    """What lies on a device of trainer and of `sharing` engines in each phase, by name."""
    states = state.abstract(learning.trained, learning.optimizer)
    always = {
        "masters": bytes_of(states.masters),
        "moments": bytes_of(states.opt_state),
        "frozen": bytes_of(learning.frozen),
        "reference": bytes_of(learning.trained, learning.config.dtype)
        if config.grpo.kl_weight
        else 0,
        "weights": bytes_of(weights) - shared(config, learning.frozen, weights),
        "weights apart": apart.copied_bytes(learning.config, weights, engine),
        "cache": sharing * executor.cache_bytes(learning.config, settings, engine),
    }
    # What is trained arrives. Through storage it arrives as it was saved, in float32, and is cast
    # leaf by leaf; in memory a few layers of a leaf are on the way.
    new = parameters.without(weights, learning.frozen)
    saved = jax.tree.leaves(as_published(new))
    if config.checkpoint.handoff == "storage":
        arriving = bytes_of(saved, "float32") + max(bytes_of(x, "float32") for x in saved)
    else:
        arriving = bytes_of(new) + max(map(on_the_way, saved))
    # Matrices apart are made anew of what is new, beside those of the version before.
    remade = not learning.frozen or apart.added(learning.config, weights, engine)
    if remade or config.engine.give_back:
        arriving += always["weights apart"]
    kept = bytes_of(learning.frozen)  # at most, for the one time that it is saved
    # Of what lies beside an engine between two rollouts.
    own = always["weights"] - bytes_of(new)
    given_back = {"cache": 0, "weights": own, "weights apart": 0}
    between = always | (given_back if config.engine.give_back else {})
    phases = {
        ROLLOUT: always,
        UPDATE: between | {"gradient": always["masters"]},
        HANDOFF: between | {"base, saved once": kept, "arriving weights": arriving},
    }
    return {
        phase: {name: size for name, size in held.items() if size} for phase, held in phases.items()
    }


# ---------------------------------------------------------------- programs


def _engine_programs(
    config: PolicyConfig,
    settings: EngineSettings,
    weights: Any,
    mesh: Mesh,
    rollout: workload.RolloutLaunches,
) -> list[Program]:
    """A program for every shape of an engine; of each kind one is what full turns launch."""
    tensor = mesh.shape["tensor"]
    full = {
        shapes.PrefixRow(shapes.prefix_widths(settings)[-1]),
        shapes.TailRow(shapes.tail_widths(settings)[-1]),
        rollout.decode_shape,
    }
    pair = flops.pair(config, tensor)
    cached = executor.cache_bytes(config, settings, mesh) / settings.pages / settings.page_size
    made = []
    for shape in shapes.shapes(settings):
        launches, kernel, moved = 0.0, 0.0, 0.0
        if isinstance(shape, shapes.Decode):
            written = settings.steps_per_launch * shape.slots
            work = Work(written, written, settings.steps_per_launch)
        else:  # of a row's logits only those at a tail's end are wanted
            work = Work(shape.tokens, 0)
        if shape not in full:
            pass
        elif isinstance(shape, shapes.PrefixRow):
            launches, kernel = rollout.prefix_launches, FORWARD * pair * rollout.prefix_pairs
        elif isinstance(shape, shapes.TailRow):
            launches, kernel = rollout.tail_launches, FORWARD * pair * rollout.tail_pairs
        else:
            launches, steps = rollout.decode_launches, settings.steps_per_launch * shape.slots
            kernel = FORWARD * pair * steps * (rollout.shared + rollout.private)
            read = shape.rows * rollout.shared + shape.slots * rollout.private
            moved = cached * settings.steps_per_launch * read
        made.append(
            Program(
                name=name_of(shape),
                phase=ROLLOUT,
                lower=lambda shape=shape: executor.lowered(config, settings, weights, shape, mesh),
                holds=frozenset({"weights", "cache"}),
                launches=launches,
                kernel_flops=kernel,
                kernel_bytes=moved,
                work=work,
            )
        )
    return made


def name_of(shape: shapes.Shape) -> str:
    """Returns what a launch of this shape is called in a plan."""
    if isinstance(shape, shapes.PrefixRow):
        return f"prefix {shape.tokens}"
    if isinstance(shape, shapes.TailRow):
        return f"tails {shape.tokens}"
    return f"decode {shape.slots} as {shape.rows}x{shape.members}"


def _update_programs(
    learning: _Learning, plan: Algorithm, updates: workload.Update
) -> list[Program]:
    made: dict[str, jax.stages.Lowered] = {}

    def lowered(name: str) -> jax.stages.Lowered:
        if not made:
            made.update(
                update.lowered(
                    learning.config, learning.optimizer, learning.settings, learning.trained,
                    learning.frozen, plan.row_length, updates.most,
                )
            )  # fmt: skip
        return made[name]

    c, mesh = learning.config, learning.mesh
    rows = learning.settings.micro_batch_rows // mesh.shape["fsdp"]
    pair = flops.pair(c, mesh.shape["tensor"]) * rows * updates.pairs
    many = updates.micro_batches * updates.optimizer_steps
    # Of the trainer's policy, and of the reference, whose program differs in its weights' dtype.
    passes = plan.forwards(learning.settings, updates.optimizer_steps // plan.epochs)
    whole = Work(rows * plan.row_length, micro_batches.bucket(updates.most))
    known = {
        "accumulate": (("masters", "frozen", "gradient"), many, FORWARD + BACKWARD),
        "apply": (("masters", "moments", "gradient"), updates.optimizer_steps, 0),
        "logprobs": (("masters", "frozen"), updates.micro_batches * passes, FORWARD),
    }
    return [
        Program(
            name=name,
            phase=UPDATE,
            lower=lambda name=name: lowered(name),
            holds=frozenset(holds),
            launches=launches,
            kernel_flops=products * pair,
            kernel_bytes=0.0,
            work=whole if products else Work(0, 0),
        )
        for name, (holds, launches, products) in known.items()
        if launches
    ]
