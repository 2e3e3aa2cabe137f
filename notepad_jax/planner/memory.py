"""Memory check of a command on its devices, and the size of its paged cache.

An engine's cache is most of what a command holds, and a config cannot know the machine. So before a
weight is loaded everything is added up in bytes: what stays (weights, masters and moments, cache:
exact, from shapes) and what a program needs beside it while it runs (an upper bound, from the
shapes of launch and update). `engine.pages=0` becomes as many pages as all slots need, at most half
of the whole memory and no more than is free; a number that the user stated and that does not fit is
refused, with all numbers and the mend. Fewer pages make turns wait, never fail. Above:
programs.subjects, programs.serve and training.decided; below: `lowering`, `residents`,
`planned_policy` and `machine`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from notepad_jax import keys
from notepad_jax.checkpoint.abstract_trees import placed
from notepad_jax.engine import apart, executor, launches, shapes
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo.update import BESIDE
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh as meshes
from notepad_jax.planner import lowering, planned_policy, residents
from notepad_jax.planner.lowering import ROLLOUT, UPDATE, PlannedRun
from notepad_jax.planner.machine import Look, MachineMemory, look
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import builders
from notepad_jax.setup.config.engine import EngineKeys
from notepad_jax.setup.config.whole import Config
from notepad_jax.text.prompts import Template
from pallas_kernels.dispatch import logprob_block

SHARE = 0.5  # of a device's whole memory, that a derived cache may take
PROCESS = 1_200_000_000  # bytes of a process beside its arrays: interpreter, compiler, programs
READING = "reading"  # the only phase of a command that does not train
COMPARING = "comparing of bases"  # before that, where several policies are served on one


# ---------------------------------------------------------------- what is held


@dataclasses.dataclass(frozen=True)
class HeldBytes:
    """Bytes of a device by phase and name, without the cache, and where the cache lies too."""

    phases: Mapping[str, Mapping[str, int]]
    cached: frozenset[str]  # phases
    page: int  # bytes of one page of every engine on the device


def of_engines(
    policy: PolicyConfig, engine: EngineKeys, settings: EngineSettings, stored: str,
    adapters: lora.Lora | None, others: Sequence[lora.Lora] = (),
) -> HeldBytes:  # fmt: skip
    """Returns the bytes of engines that only read; `stored` is the dtype that the weights lie in.

    Policies with `others` share the base. Each is read whole before it is known that they do, and
    what was read of its adapters stays beside all of them together.
    """
    there = builders.engines_mesh(engine)
    base = placed(parameters.abstract_params(policy, stored), builders.to_read(engine)(policy))
    whole = residents.bytes_of(base)

    def of(one: lora.Lora) -> int:
        return residents.bytes_of(lora.abstract(policy, one, base)[1])

    own = of(adapters) if adapters else 0
    theirs = [of(one) for one in others]
    # Of several policies none's adapters are added in.
    alone = adapters and not others
    read = parameters.join(*lora.abstract(policy, adapters, base)) if alone else base
    sharing = builders.engines(engine) // there.shape["fsdp"]
    held = {"weights": whole + own, "launches": sharing * launch(policy, settings)}
    if apart_bytes := apart.copied_bytes(policy, read, meshes.row(there, 0)):
        held["weights apart"] = apart_bytes
    process = _process(there.devices.flat[0])
    phases = {READING: held | process}
    if theirs:
        phases[READING]["other policies"] = own + 2 * sum(theirs)
        another = {"weights": whole + own, "other policies": whole + sum(theirs)}
        phases[COMPARING] = another | process
    return HeldBytes(
        phases, frozenset({READING}), sharing * _page(policy, settings, meshes.row(there, 0))
    )


def of_training(config: Config, made: PlannedRun, settings: EngineSettings) -> HeldBytes:
    """Returns the bytes of a run's trainer and engines."""
    there, host = made.trainer.devices.flat[0], builders.engines_mesh(config.engine)
    sharing = builders.engines(config.engine) // host.shape["fsdp"]
    beside = BESIDE if made.trainer.size == 1 and there.platform == builders.CPU else 1
    phases = {
        name: {what: size for what, size in held.items() if what != "cache"} | _process(there)
        for name, held in made.residents.items()
    }
    phases[ROLLOUT]["launches"] = sharing * launch(made.policy, settings)
    masters = phases[UPDATE]["masters"]
    # Each of the totals that grow beside each other, and the gradient that is added to it; or
    # the step itself: the mean gradient, the update, new masters and how far they moved.
    phases[UPDATE]["gradient"] = max(4 * beside, 11) * masters // 2
    phases[UPDATE]["its programs"] = beside * update(config, made)
    cached = {name for name, held in made.residents.items() if "cache" in held}
    page = sharing * _page(made.policy, settings, made.engine)
    return HeldBytes(phases, frozenset(cached), page)


def _process(device: jax.Device) -> dict[str, int]:
    return {"the process": PROCESS} if device.platform == builders.CPU else {}


def _page(policy: PolicyConfig, settings: EngineSettings, row: jax.sharding.Mesh) -> int:
    pages = settings.pages_for(settings.max_prompt + settings.max_new_tokens)
    one = dataclasses.replace(settings, pages=pages)
    return executor.cache_bytes(policy, one, row) // one.pages


def launch(policy: PolicyConfig, settings: EngineSettings) -> int:
    """An upper bound for what a launch of an engine takes beside its arguments, in bytes.

    Keys and values of its tokens in all layers, and one layer's activations or the logits of
    what is sampled at once with what sampling makes of them. Held against the compiler's own
    figures in tests/planner/test_memory.py.
    """
    tokens = max(shapes.prefix_widths(settings)[-1], shapes.tail_widths(settings)[-1])
    sampled = max(launches.SAMPLED, shapes.decode_shapes(settings)[-1].slots)
    size = jnp.dtype(policy.dtype).itemsize
    kept = 2 * policy.layers * policy.kv_heads * policy.head_size * size * tokens
    return kept + max(_layer(policy, tokens), 6 * 4 * sampled * policy.vocab_size)


def update(config: Config, made: PlannedRun) -> int:
    """An upper bound for what a micro-batch takes beside masters and gradient, in bytes.

    What layers keep for the way back (with `grpo.remat` their inputs alone), one layer's way
    back, and a block of logits four times: itself, its exponentials, and their gradients.
    """
    policy, rows = made.policy, config.grpo.micro_batch_rows // made.trainer.shape["fsdp"]
    tokens, tensor = rows * config.grpo.row_length, made.trainer.shape["tensor"]
    if config.grpo.remat:
        kept = 4 * policy.layers * policy.width * tokens
    else:
        kept = policy.layers * _layer(policy, tokens) // tensor
    block = min(logprob_block(policy.vocab_size // tensor), max(1, made.update.most))
    logits = 4 * 4 * block * policy.vocab_size // tensor
    return kept + 2 * _layer(policy, tokens) // tensor + logits


def _layer(policy: PolicyConfig, tokens: int) -> int:
    moe = policy.experts
    wide = moe.feed_forward * moe.per_token if moe else policy.feed_forward
    heads = policy.heads * policy.head_size
    return 4 * tokens * (4 * wide + 8 * policy.width + 8 * heads)


# ---------------------------------------------------------------- what fits


def to_read(
    config: Config, words: builders.Words, template: Template, rules: Rules,
    say: Callable[[str], None], settings: EngineSettings | None = None, see: Look = look,
    others: Sequence[lora.Lora] = (),
) -> Config:  # fmt: skip
    """Returns the config with as many `engine.pages` as engines that only read may have.

    `rules` are those of the longest readings, and `settings` sizes other than theirs
    (`serve`'s), as are adapters of `others` on the same base. `say` is told where memory that is
    short has made them fewer. Raises ValueError, in one line, for what does not fit.
    """
    wanted = settings or builders.engine_settings(config.engine, words.config, rules, template)
    device = builders.engines_mesh(config.engine).devices.flat[0]
    _check_kernels(config, device)
    stored = builders.widened(words.config, device.platform) or words.stored
    held = of_engines(words.config, config.engine, wanted, stored, words.adapters, others)
    return _with_pages(config, wanted, held, see(device), say, words)


def processes(
    engine: EngineKeys, policy: builders.LoadedPolicy, rules: Rules, template: Template,
    see: Look = look,
) -> int:  # fmt: skip
    """Returns how many processes may read at once, each with one of a CPU's engines.

    As many as there are engines, if all fit beside this process; otherwise 0, also where this is
    no CPU or each engine has devices of its own. `rules` are those of the longest readings.
    """
    number, there = builders.engines(engine), builders.engines_mesh(engine).devices
    if there.size > 1 or there.flat[0].platform != builders.CPU:
        return 0
    alone = dataclasses.replace(engine, per_cpu=1)
    settings = builders.engine_settings(alone, policy.config, rules, template)
    stored = str(max(jax.tree.leaves(lora.plain(policy.params)), key=lambda x: x.size).dtype)
    one = of_engines(policy.config, alone, settings, stored, lora.of(policy.params))
    each = sum(one.phases[READING].values()) + settings.pages * one.page
    memory = see(there.flat[0])
    return 0 if memory and memory.free < number * each else number


def to_train(
    config: Config, words: builders.Words, template: Template, rules: Rules,
    say: Callable[[str], None], see: Look = look,
) -> Config:  # fmt: skip
    """As `to_read`, for a run that learns, whose `config` has its rows settled (`sizes`)."""
    wanted = builders.engine_settings(config.engine, words.config, rules, template)
    device = builders.trainers_mesh(config).devices.flat[0]
    _check_kernels(config, device)
    stored = builders.widened(words.config, device.platform) or words.stored
    policy = planned_policy.PlannedPolicy(str(words.folder), "", words.config, stored, template)
    made = lowering.plan_of(config, jax.devices(), jax.local_devices(), policy)
    held = of_training(config, made, wanted)
    return _with_pages(config, wanted, held, see(device), say, words)


# Kernels, the platform that they are compiled for, and what runs the same anywhere.
_COMPILED = {"pallas": ("tpu", "interpret"), "triton": ("gpu", "triton-interpret")}


def _check_kernels(config: Config, device: jax.Device) -> None:
    """Raises ValueError for kernels that are compiled for another kind of device."""
    platform, instead = _COMPILED.get(config.kernels, (device.platform, ""))
    if platform != device.platform:
        raise ValueError(
            f"kernels={config.kernels} are compiled for a {platform.upper()}, and this is a "
            f"{device.platform.upper()}; leave kernels=auto, or check them with kernels={instead}, "
            f"which is slow"
        )


def least_pages(settings: EngineSettings) -> int:
    """Pages with which every turn runs when it is alone, its prefix shared: that has a last page
    of its own, of which the turn has a copy."""
    private = settings.page_size + 1 + settings.max_new_tokens
    return settings.pages_for(settings.max_prompt) + settings.pages_for(private)


def _with_pages(
    config: Config, wanted: EngineSettings, held: HeldBytes, memory: MachineMemory | None,
    say: Callable[[str], None], words: builders.Words,
) -> Config:  # fmt: skip
    said, number, least = config.engine.pages, wanted.pages, least_pages(wanted)
    if memory is not None:
        number = pages(said, wanted.pages, least, held, memory)
        if number < 0:
            raise ValueError(_refusal(config, least, held, memory, words.folder.name))
        if not said and number < min(wanted.pages, share(held, memory)):
            say(
                f"the cache has {number:,} pages of the {wanted.pages:,} that all engine.slots "
                f"would fill: {_gb(memory.free)} of {_gb(memory.total)} GB of memory are free"
            )
    return keys.changed(config, {"engine.pages": number})


def share(held: HeldBytes, memory: MachineMemory) -> int:
    """Pages of a derived cache, at most: it depends on the machine and not on the moment."""
    return int(SHARE * memory.total) // held.page


def pages(said: int, wanted: int, least: int, held: HeldBytes, memory: MachineMemory) -> int:
    """Returns the pages of every engine; -1 where what is `said`, or even the `least`, is too much.

    `said` 0 derives them: what is `wanted`, at most `SHARE` of the memory and what is free.
    """
    room = room_of(held, memory)
    if room < (said or least):
        return -1
    return said or max(least, min(wanted, share(held, memory), room))


def room_of(held: HeldBytes, memory: MachineMemory) -> int:
    """How many pages are free beside what is held; -1 where that alone is too much."""
    free = {name: memory.free - sum(one.values()) for name, one in held.phases.items()}
    if min(free.values()) < 0:
        return -1
    return min(free[name] for name in held.cached) // held.page


def _refusal(
    config: Config, least: int, held: HeldBytes, memory: MachineMemory, policy: str
) -> str:
    number, room = config.engine.pages or least, room_of(held, memory)
    every = {
        name: {**one, f"cache ({number:,} pages)": number * held.page}
        if name in held.cached
        else dict(one)
        for name, one in held.phases.items()
    }
    phase, worst = max(every.items(), key=lambda item: sum(item[1].values()))
    parts_of_it = ", ".join(
        f"{name} {_gb(size)}" for name, size in sorted(worst.items(), key=lambda x: -x[1]) if size
    )
    return (
        f"{policy} does not fit: {_gb(sum(worst.values()))} GB in the {phase} ({parts_of_it}), and "
        f"{_gb(memory.free)} of {_gb(memory.total)} GB of memory are free; "
        f"{_mend(config, least, room)}"
    )


def _mend(config: Config, least: int, room: int) -> str:
    if room >= least:
        return f"use --config.engine.pages={room} or fewer"
    ways = []
    if config.grpo:
        g = config.grpo
        ways += [] if g.lora.rank else ["--config.grpo.lora.rank=16 (adapters)"]
        ways += [] if g.remat else ["--config.grpo.remat=true"]
        ways += [] if g.micro_batch_rows == 1 else ["a smaller grpo.micro_batch_rows"]
    ways += [] if config.engine.per_cpu == 1 else ["--config.engine.per_cpu=1"]
    ways += ["shorter readings (reading.chunk_size, evaluate.chunk_size)", "a smaller policy"]
    return f"free some, or try {', '.join(ways)}"


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"
