"""From a config to the parts of a run: policy, tokenizer, template, rules, engine.

Every program reads the same keys through these functions, so training, evaluation and
`ask` cannot differ in how they read. What comes out are plain values.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from notepad_jax import functions
from notepad_jax.checkpoint.abstract_trees import abstract, check_shapes, placed
from notepad_jax.checkpoint.hf import adapters, huggingface
from notepad_jax.checkpoint.restore import as_stored, load_params
from notepad_jax.engine.apart import Apart
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.executor import Device, Executes, Executor
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model import lora, parameters
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh
from notepad_jax.parallel.mesh import SERVING, TRAINING
from notepad_jax.reading.memory_rules import OwnRule
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import compiled, policies, sizes
from notepad_jax.setup.config.engine import EngineKeys
from notepad_jax.setup.config.reading import ReadingKeys
from notepad_jax.setup.config.whole import Training
from notepad_jax.text import chat
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer, open_tokenizer
from notepad_jax.types import PolicySnapshot

ACTIVATIONS = ("float32", "bfloat16")
CPU = "cpu"  # the platform of devices for which bfloat16 is emulated, eight times slower

Where = Callable[[PolicyConfig], Any]  # the sharding of every parameter of a policy


@dataclasses.dataclass(frozen=True)
class LoadedPolicy:
    """A policy and its tokenizer."""

    config: PolicyConfig
    params: Any
    tokenizer: Tokenizer
    folder: Path  # Hugging Face folder: tokenizer, chat template, config.json
    name: str  # as `policies.resolved` names it again: the folder, or runs/mine@40
    stored: Any  # shapes and dtypes of `params` where they were read


@dataclasses.dataclass(frozen=True)
class Words:
    """A policy without its weights: tokenizer, config, and how these are stored."""

    tokenizer: Tokenizer
    folder: Path
    config: PolicyConfig  # as `load_policy` has it
    stored: str  # dtype that the weights are stored in, or most of them
    adapters: lora.Lora | None  # that lie beside them


# ---------------------------------------------------------------- devices


def trainers_mesh(config: Training, there: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of the trainer: `parallel.devices` of `there` (default: all), in rows.

    Raises ValueError, naming the key, if there are fewer or they cannot be split so.
    """
    there = jax.devices() if there is None else there
    count, tensor = config.parallel.devices or len(there), config.parallel.tensor
    if count > len(there):
        raise ValueError(f"parallel.devices is {count}, but there are {len(there)}; 0 takes all")
    if count % tensor:
        raise ValueError(
            f"parallel.tensor is {tensor}, which does not divide {count} devices; use a divisor"
        )
    return mesh.make(tensor, there[:count])


def engines_mesh(engine: EngineKeys, there: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of a host's engines: `engine.replicas` rows of `engine.tensor` devices each.

    They are the first of `there` (default: this host's). Raises ValueError, naming the key, if
    there are not as many.
    """
    there = jax.local_devices() if there is None else there
    if engine.tensor > len(there):
        raise ValueError(
            f"engine.tensor is {engine.tensor}, but this host has {len(there)} devices; an engine "
            f"lives on one host"
        )
    most = len(there) // engine.tensor
    if engine.replicas > most:
        raise ValueError(
            f"engine.replicas is {engine.replicas}, but this host's {len(there)} devices have "
            f"room for {most}, of {engine.tensor} each; 0 takes as many as there is room for"
        )
    return mesh.make(engine.tensor, there[: engine.tensor * (engine.replicas or most)])


def engines(engine: EngineKeys, there: Sequence[jax.Device] | None = None) -> int:
    """Returns how many engines a host has: one for each row of `engines_mesh`, on CPUs `per_cpu`.

    A CPU is one device however many cores it has, and what a small policy launches keeps one of
    them busy. Engines that share it run side by side, and what one has compiled, all have.
    """
    rows = engines_mesh(engine, there)
    shared = engine.per_cpu if rows.devices.flat[0].platform == CPU else 1
    return rows.shape["fsdp"] * shared


def to_learn(config: Training) -> Where:
    """Returns the trainer's sharding of parameters: cut over both axes of its mesh."""
    learns = trainers_mesh(config)
    return lambda policy: parameters.shardings(policy, learns, TRAINING)


def to_read(engine: EngineKeys) -> Where:
    """Returns the engines' sharding of parameters: heads over the devices of each, no gathers."""
    reads = engines_mesh(engine)
    return lambda policy: parameters.shardings(policy, reads, SERVING)


def on_one(policy: PolicyConfig) -> Any:
    """Returns the sharding of parameters that lie on this process's first device."""
    return parameters.shardings(policy, mesh.one(), SERVING)


def adopted(config: Training, policy: PolicyConfig, reads: Mesh | None = None) -> Any:
    """Returns what engines on the mesh `reads`, or this host's, ask a hand-off for.

    That is dtypes and shardings of their weights, with the config's adapters beside them. Raises
    ValueError as `rollout_dtype` does.
    """
    cut = parameters.shardings(policy, reads or engines_mesh(config.engine), SERVING)
    whole = placed(parameters.abstract_params(policy), cut)
    base = parameters.rollout_target(policy, whole, rollout_dtype(config, policy))
    chosen = config.grpo.lora.wanted
    return base if chosen is None else lora.rollout_target(policy, chosen, base)


def rollout_dtype(config: Training, policy: PolicyConfig) -> str:
    """Returns the dtype of a run's engines' weights.

    Raises ValueError for a `checkpoint.rollout_dtype` that nothing keeps weights in.
    """
    dtype = config.checkpoint.rollout_dtype or policy.dtype
    if dtype not in parameters.ROLLOUT_DTYPES:
        known = ", ".join(map(repr, parameters.ROLLOUT_DTYPES))
        raise ValueError(f"checkpoint.rollout_dtype is {dtype!r}; use one of {known}")
    return dtype


# ---------------------------------------------------------------- the policy


def load_policy(
    name: str | Path, activations: str = "", where: Where = on_one,
    say: Callable[[str], None] = warnings.warn,
) -> LoadedPolicy:  # fmt: skip
    """Reads config, weights and tokenizer of what `policies.resolved` finds under a name.

    Every device reads its own slices of the weights, and `where` says which (`to_learn`,
    `to_read`). They are as stored, but for CPUs that compute in float32, where they lie in it.
    Adapters are float32, beside their base (`lora.adapted`): so they are read with, and gone on
    with. `activations` is what a config says of `dtype` (`computes_in`).
    """
    compiled.keep()  # for callers from Python, without a command line
    found = policies.resolved(name, say)
    folder = policies.folder_of(found)
    tokenizer, config = open_tokenizer(folder, say), huggingface.import_config(folder)
    named, config = config.dtype, _read_as(config, activations, tokenizer, where)
    if named not in ACTIVATIONS and not activations and config.dtype == "bfloat16":
        say(
            f"{name} is {named}, and is computed in bfloat16, which has fewer digits; with "
            f"--config.dtype=float32 all are kept"
        )
    wide = widened(config, _platform(where(config)))
    if found.steps is not None:
        stored = as_stored(found.steps, found.step)
        there = f"{found.steps}/{found.step}"
        check_shapes(lora.plain(stored), parameters.abstract_params(config), there)
        kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, wide or x.dtype), stored)
        target = placed(kept, lora.shardings(kept, where(config)))
        params, _ = load_params(found.steps, found.step, target)
    else:
        _, store = huggingface.open_policy(folder)
        stored = huggingface.as_stored(config, store)
        params = huggingface.import_params(config, store, where(config), wide)
    if found.adapters:
        params = _adapted(found.adapters, folder, config, params)
        stored = parameters.join(abstract(params), stored)
    return LoadedPolicy(config, params, tokenizer, Path(folder), found.name, stored)


def _adapted(name: str, base: str, config: PolicyConfig, params: Any) -> Any:
    """Returns the policy in `base` with the adapters in the folder `name`, in float32."""
    opened = adapters.open_adapters(name, config, base)
    _, wanted = lora.abstract(config, opened.lora, params)
    found = adapters.import_adapters(opened, jax.tree.map(lambda x: x.sharding, wanted))
    return lora.adapted(config, params, opened.lora, found)


def widened(config: PolicyConfig, platform: str) -> str | None:
    """Returns the dtype that weights are read into, where that is not the one they are stored in.

    CPUs that compute in float32 have them in it: XLA would widen the whole policy anew in every
    launch, beside what is stored.
    """
    return "float32" if platform == CPU and config.dtype == "float32" else None


def _platform(shardings: Any) -> str:
    return next(iter(jax.tree.leaves(shardings)[0].device_set)).platform


def words(name: str, activations: str = "", where: Where = on_one) -> Words:
    """Returns what `load_policy` of the same does, but for the weights, which it does not read."""
    found = policies.resolved(name, lambda line: None, ())
    folder = policies.folder_of(found)
    tokenizer = open_tokenizer(folder, lambda line: None)
    config = huggingface.import_config(folder)
    stored = config.dtype
    if found.steps is not None:
        leaves = jax.tree.leaves(as_stored(found.steps, found.step))
        stored = str(max(leaves, key=lambda leaf: leaf.size).dtype)
    config = _read_as(config, activations, tokenizer, where)
    return Words(tokenizer, Path(folder), config, stored, policies.adapted(name))


def _read_as(
    config: PolicyConfig, activations: str, tokenizer: Tokenizer, where: Where
) -> PolicyConfig:
    """Returns the config of a policy with what it computes in and the ids that it is read with."""
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{tokenizer.path} has {tokenizer.vocab_size} ids and the policy's embedding "
            f"{config.vocab_size} rows; this tokenizer belongs to another policy"
        )
    dtype = computes_in(activations, config, _platform(where(config)))
    return dataclasses.replace(config, valid_vocab=tokenizer.vocab_size, dtype=dtype)


def computes_in(said: str, policy: PolicyConfig, platform: str) -> str:
    """Returns the dtype that a policy computes in, of what a config says of `dtype`.

    "" is what suits the machine: float32 on CPUs, however the policy is stored; on others, what
    its config.json names, or bfloat16 where nothing computes in that. Whatever else says "" of a
    dtype (`engine.cache_dtype`, `checkpoint.rollout_dtype`) means this one. Raises ValueError for
    one that nothing computes in.
    """
    if said not in ("", *ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"dtype is {said!r}; use one of {known}, or '' for what suits the machine")
    named = policy.dtype if policy.dtype in ACTIVATIONS else "bfloat16"
    return said or ("float32" if platform == CPU else named)


def template(reading: ReadingKeys, policy: LoadedPolicy | Words) -> Template:
    """Returns the prompts of a reading, in the turn markers of the model or of the file.

    ValueError for a template that cannot serve it.
    """
    frame = None
    if reading.chat == "model" and chat.has_template(policy.folder):
        frame = chat.frame(chat.ChatTemplate.read(policy.folder), policy.tokenizer)
    made = Template.load(reading.template, policy.tokenizer, frame)
    rules(reading).check(made)
    return made


def rules(reading: ReadingKeys, tokenizer: Tokenizer | None = None) -> Rules:
    """Returns the limits of a reading from a config's `reading` section.

    Without a tokenizer they are limits alone: a memory rule of the user's is not looked for.
    """
    name, own = reading.memory_update, None
    if ":" in name and tokenizer is not None:
        own = OwnRule(name, functions.named(name, "reading.memory_update"), tokenizer)
    return reading.rules(own)


def engine_settings(
    engine: EngineKeys, policy: PolicyConfig, reading: Rules, template: Template
) -> EngineSettings:
    """Returns the sizes of an engine for `reading`; ValueError for one that is too small."""
    memory = reading.most_memory(template)
    longest = max(
        template.longest_prompt(reading.max_question, reading.chunk_size, memory, reading.carry),
        engine.max_prompt,
    )
    answer, turns = max(reading.max_memory, reading.max_answer), sizes.turns(template, reading)
    return EngineSettings(
        slots=engine.slots,
        page_size=engine.page_size,
        pages=sizes.pages(engine, turns, longest, answer),
        max_prompt=longest,
        max_new_tokens=answer,
        steps_per_launch=engine.steps_per_launch,
        row_tokens=sizes.row_tokens(engine, turns),
        cache_dtype=engine.cache_dtype or policy.dtype,
    )


def service(
    engine: EngineKeys, policy: LoadedPolicy, reading: Rules, template: Template,
    snapshot: PolicySnapshot, around: Callable[[Executes], Executes] = lambda executor: executor,
    settings: EngineSettings | None = None,
) -> EngineService | Engines:  # fmt: skip
    """Builds the engines for `reading`, each on a mesh of its own; they run `around` executors.

    `snapshot` lies where `to_read` says; `settings` are sizes other than `engine_settings`.
    """
    settings = settings or engine_settings(engine, policy.config, reading, template)
    there = engines_mesh(engine)

    def one(number: int, policy_there: PolicySnapshot) -> EngineService:
        device = Device(policy.config, settings, rows[number % len(rows)])
        return EngineService(
            around(Executor(settings, device)),
            policy_there,
            share_prefixes=engine.share_prefixes,
            use_drafts=engine.use_drafts,
        )

    rows = [Apart(policy.config, mesh.row(there, row)) for row in range(there.shape["fsdp"])]
    count = engines(engine)
    if count == 1:
        return one(0, snapshot)
    nobody = PolicySnapshot(snapshot.version, None)
    made = Engines([one(number, nobody) for number in range(count)], there)
    if snapshot.params is not None:
        made.start_with(snapshot)
    return made
