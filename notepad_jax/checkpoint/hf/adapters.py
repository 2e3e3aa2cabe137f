"""Import and export of PEFT adapters: adapter_config.json and adapter_model.safetensors.

What was trained of a policy with low-rank adapters is a few megabytes beside a published model,
which users have. PEFT (and vLLM) load such a folder onto it and compute W + lora_alpha / r * B
A, with A [r, inputs] and B [outputs, r]; ours (`model.lora`) are the transposes with heads as an
axis and layers stacked. Names and foldings come from the table of the policy's family (`names`,
below) as one `Layout` a leaf, which reading (`sharded_loading`) and writing (`writing`) use in
either direction. A folder that asks for more than that product is refused by the field's name.
Above: setup.builders, which puts them beside a policy, setup.policies, and programs.export.

Source: PEFT's "checkpoint format" (huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from notepad_jax.checkpoint.hf import names, sharded_loading, storage, writing
from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.checkpoint.hf.headers import Safetensors
from notepad_jax.checkpoint.hf.names import Part
from notepad_jax.checkpoint.hf.sharded_loading import Layout
from notepad_jax.checkpoint.hf.storage import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    WEIGHTS,
    StoreProblem,
    quoted,
)
from notepad_jax.checkpoint.hf.writing import Export, FileNames, PlannedTensor
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.lora import TARGETS, Lora

KIND = FileNames(ADAPTER_WEIGHTS, ADAPTER_CONFIG)
PREFIX = "base_model.model."  # the two modules that PEFT wraps around a model


# What adapter_config.json may ask for that W + lora_alpha / r B A does not say.
OTHERS = (
    "use_rslora", "use_dora", "use_qalora", "lora_bias", "fan_in_fan_out", "modules_to_save",
    "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "layer_replication",
    "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "arrow_config",
)  # fmt: skip
# Of init_lora_weights: beginnings that leave the base as it is.
BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
ALL_LINEAR = "all-linear"  # of target_modules: every matrix of every layer
_IN_LAYER = re.compile(r"(model\.)?(layers\.)?(\d+\.)?")  # before a module's path in its layer


def layouts(config: PolicyConfig, lora: Lora) -> dict[str, Layout]:
    """Returns, for every leaf of `lora`'s adapters, the tensors of all layers that make it up.

    A of a target before B. Raises ImportProblem for a target that the policy does not have.
    """
    parts: dict[str, list[Part]] = {}
    for part in names.table(config):
        if part.path[0] == "layers" and part.path[1] in lora.targets and part.inputs:
            parts.setdefault(part.path[1], []).append(part)
    found = {}
    for target in lora.targets:
        if target not in parts:
            raise ImportProblem(f"lora.targets has {target!r}, which this policy does not have")
        modules = [part.name.removesuffix(".weight") for part in parts[target]]
        shape, split = parts[target][0].shape, parts[target][0].inputs
        into, out = shape[:split], shape[split:]
        found[f"{target}_lora_in"] = Layout(
            names=tuple(f"{PREFIX}{module}.lora_A.weight" for module in modules),
            stack=(len(modules),),
            published=(lora.rank, math.prod(into)),
            unfolded=(lora.rank, *into),
            order=(*range(1, len(into) + 1), 0),
        )
        found[f"{target}_lora_out"] = Layout(
            names=tuple(f"{PREFIX}{module}.lora_B.weight" for module in modules),
            stack=(len(modules),),
            published=(math.prod(out), lora.rank),
            unfolded=(*out, lora.rank),
            order=(len(out), *range(len(out))),
        )
    return found


# ---------------------------------------------------------------- in


@dataclasses.dataclass(frozen=True)
class Opened:
    """An open folder of adapters that fit a policy; no weight is read yet."""

    lora: Lora
    layouts: Mapping[str, Layout]
    store: Safetensors


def lie_in(folder: str | Path) -> bool:
    """Whether a local folder holds adapters and no policy."""
    there = Path(folder)
    whole = any((there / name).exists() for name in (WEIGHTS, INDEX))
    return not whole and any((there / name).exists() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS))


def base_name(folder: str | Path) -> str:
    """Returns the name of the base model, as adapter_config.json has it."""
    name = _read(folder).get("base_model_name_or_path")
    if not isinstance(name, str) or not name or not name.isprintable():
        raise StoreProblem(
            f"{storage.at(str(folder), ADAPTER_CONFIG)} says base_model_name_or_path: "
            f"{quoted(name)}; name the folder of the policy that is adapted"
        )
    return name


def read_lora(folder: str | Path, config: PolicyConfig) -> Lora:
    """Returns the LoRA configuration of adapter_config.json, for the policy of `config`.

    Raises StoreProblem for what is not computed here, each by its name.
    """
    text, at = _read(folder), storage.at(str(folder), ADAPTER_CONFIG)
    only = {"peft_type": ("LORA",), "task_type": ("CAUSAL_LM", None), "bias": ("none", None)}
    for key, known in (*only.items(), ("init_lora_weights", BEGINNINGS)):
        said = text.get(key)
        if not any(said is one or (isinstance(one, str) and said == one) for one in known):
            said_known = ", ".join(json.dumps(one) for one in known)
            raise StoreProblem(f"{at} says {key}: {quoted(said)}; adapters here have {said_known}")
    for key in OTHERS:
        if text.get(key):
            raise StoreProblem(
                f"{at} says {key}: {quoted(text[key])}, which is not computed here; adapters are "
                f"W + lora_alpha / r B A in all layers: merge them with PEFT"
            )
    rank, alpha = text.get("r"), text.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise StoreProblem(f"{at} says r: {quoted(rank)}; a rank is a whole number above 0")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise StoreProblem(f"{at} says lora_alpha: {quoted(alpha)}; it is a number above 0")
    return Lora(rank, float(alpha), _targets(text.get("target_modules"), config, at))


def open_adapters(folder: str | Path, config: PolicyConfig, base: str) -> Opened:
    """Reads adapter_config.json and the header, and compares them with the policy in `base`.

    Raises StoreProblem (a ValueError of one line) for adapters of another policy, and for files
    that are missing or damaged.
    """
    lora, where = read_lora(folder, config), str(folder)
    store = Safetensors.single(where, storage.open_kvstore(where), ADAPTER_WEIGHTS)
    found, wanted = layouts(config, lora), dict[str, tuple[int, ...]]()
    for layout in found.values():
        wanted |= dict.fromkeys(layout.names, layout.published)
    for name, shape in wanted.items():
        if name not in store.tensors:
            raise StoreProblem(
                f"{where}: tensor {quoted(name)} is missing; its {ADAPTER_CONFIG} adapts "
                f"{', '.join(lora.targets)} of all {config.layers} layers of {base}"
            )
        if store.tensors[name].shape != shape:
            raise StoreProblem(
                f"{where}: tensor {quoted(name)} has shape {store.tensors[name].shape}, and on "
                f"{base} with r={lora.rank} it has {shape}; name the policy that it was trained on "
                f"({ADAPTER_CONFIG}: base_model_name_or_path)"
            )
    for name in store.tensors:
        if name not in wanted:
            raise StoreProblem(
                f"{where}: there is a tensor {quoted(name)}, which adapters of "
                f"{', '.join(lora.targets)} on {base} do not have"
            )
    for layout in found.values():
        sharded_loading.check(store, layout)
    return Opened(lora, found, store)


def import_adapters(opened: Opened, shardings: Any) -> dict[str, Any]:
    """Reads adapters, in float32, to where `shardings` says: a tree as `lora.init` makes one."""
    there = shardings["layers"]
    return {
        "layers": {
            leaf: sharded_loading.place(opened.store, layout, there[leaf], "float32")
            for leaf, layout in opened.layouts.items()
        }
    }


def _read(folder: str | Path) -> dict[str, Any]:
    where = str(folder)
    at = storage.at(where, ADAPTER_CONFIG)
    raw = storage.read_small(where, storage.open_kvstore(where), ADAPTER_CONFIG)
    if raw is None:
        raise StoreProblem(
            f"{at} is missing; adapters are {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}: bring it, too"
        )
    return storage.parse_object(raw, at)


def _targets(said: Any, config: PolicyConfig, at: str) -> tuple[str, ...]:
    """Returns our names of target_modules, which match a module by the end of its path."""
    rows = names.FAMILIES[names.family_of(config)].rows
    modules = {
        row.path[1]: _IN_LAYER.sub("", row.name.removesuffix(".weight").format(layer=0), count=1)
        for row in rows
        if row.path[-1] in TARGETS
    }
    if said == ALL_LINEAR and set(modules) == set(TARGETS):
        return TARGETS
    if not isinstance(said, list) or not said or not all(isinstance(one, str) for one in said):
        raise StoreProblem(f"{at} says target_modules: {quoted(said)}; list the modules by name")
    found = set()
    for one in said:
        asked = f".{_IN_LAYER.sub('', one, count=1)}"
        matched = {name for name, path in modules.items() if f".{path}".endswith(asked)}
        if not matched:
            known = ", ".join(path.rpartition(".")[2] for path in modules.values())
            raise StoreProblem(
                f"{at} has {quoted(one)} among its target_modules; of a "
                f"{names.family_of(config)} {known} can be adapted"
            )
        found |= matched
    return tuple(name for name in TARGETS if name in found)


# ---------------------------------------------------------------- out


def export_adapters(
    config: PolicyConfig,
    lora: Lora,
    adapters: Mapping[str, Any],
    base: str,
    target: str | Path,
    dtype: str = "float32",
    beside: Mapping[str, bytes] | None = None,
    overwrite: bool = False,
    wrote: Callable[[int], None] = lambda size: None,
) -> Export:
    """Writes adapters as a folder or bucket that PEFT loads, all or nothing (`writing.write`).

    `adapters` is {"layers": {"q_lora_in": [L, *inputs, r], "q_lora_out": [L, r, *outputs]}} of
    every target of `lora`; leaves are arrays or `lazy_arrays.Stored`. `base` is the published model
    that they adapt, a path or a name; `beside` are files to add. Same adapters, same bytes.
    Raises ImportProblem for adapters that are not those of `lora` and `config`.
    """
    table = layouts(config, lora)
    layers = adapters.get("layers", {})
    _check(lora, table, layers)
    kind = np.dtype(dtype)
    entries = {
        name: (leaf, index)
        for leaf, layout in table.items()
        for name, index in zip(layout.names, np.ndindex(*layout.stack), strict=True)
    }

    def value(name: str) -> np.ndarray:
        leaf, index = entries[name]
        ours = np.asarray(jax.device_get(layers[leaf][index]))  # device to host
        return table[leaf].fold(ours).astype(kind)

    plan = [PlannedTensor(name, kind, table[leaf].published) for name, (leaf, _) in entries.items()]
    text = json.dumps(_config(lora, base, list(entries)), indent=2) + "\n"
    return writing.write(
        target, plan, value, {**(beside or {}), ADAPTER_CONFIG: text.encode()},
        part_bytes=sum(tensor.bytes for tensor in plan),  # PEFT reads one file
        overwrite=overwrite, wrote=lambda tensor: wrote(tensor.bytes), kind=KIND,
    )  # fmt: skip


def _check(lora: Lora, table: Mapping[str, Layout], layers: Mapping[str, Any]) -> None:
    """Raises ImportProblem if leaves are missing, too many, or have other shapes."""
    for leaf in sorted(set(table) | set(layers)):
        if leaf not in layers:
            raise ImportProblem(f"the adapters lack {leaf}, which lora.targets asks for")
        if leaf not in table:
            raise ImportProblem(f"the adapters have {leaf}; lora.targets are {lora.targets}")
        if tuple(layers[leaf].shape) != table[leaf].shape:
            raise ImportProblem(
                f"{leaf} has shape {tuple(layers[leaf].shape)}; this policy at rank {lora.rank} "
                f"has {table[leaf].shape}"
            )


def _config(lora: Lora, base: str, tensors: Sequence[str]) -> dict[str, Any]:
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": lora.rank,
        # a whole number where it is one, as PEFT declares it
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "modules_to_save": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "use_dora": False,
    }
