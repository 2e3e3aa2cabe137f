"""Adapters alone, as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

What was trained of a policy with low-rank adapters is a few megabytes beside a published model
that everybody has. PEFT (and vLLM) load such a folder onto that model and compute
W + lora_alpha / r * B A, with A [r, inputs] and B [outputs, r]; ours (`model.lora`) are the
transposes with heads as an axis and layers stacked. Names and foldings come from the table of
the policy's family (`names`, below), files are written by `writing`. Above: `convert`.

Source: PEFT's "checkpoint format" (huggingface.co/docs/peft/developer_guides/checkpoint).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from notepad_jax.checkpoint.hf import names, writing
from notepad_jax.checkpoint.hf.fields import ImportProblem
from notepad_jax.checkpoint.hf.names import Part
from notepad_jax.checkpoint.hf.storage import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from notepad_jax.checkpoint.hf.writing import Kind, Planned, Written
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.lora import Lora

KIND = Kind(ADAPTER_WEIGHTS, ADAPTER_CONFIG)
PREFIX = "base_model.model."  # the two modules that PEFT wraps around a model


@dataclasses.dataclass(frozen=True)
class _Factor:
    """One tensor of the export: A or B of one layer's matrix."""

    name: str
    leaf: str  # of our layers
    index: tuple[int, ...]
    shape: tuple[int, ...]  # ours, of that entry
    rows: int  # of ours when folded to a matrix; the export is its transpose


def export_adapters(
    config: PolicyConfig,
    lora: Lora,
    adapters: Mapping[str, Any],
    base: str,
    target: str | Path,
    dtype: str = "float32",
    overwrite: bool = False,
    wrote: Callable[[int], None] = lambda size: None,
) -> Written:
    """Writes adapters as a folder or bucket that PEFT loads, all or nothing (`writing.write`).

    `adapters` is {"layers": {"q_lora_in": [L, *inputs, r], "q_lora_out": [L, r, *outputs]}} of
    every target of `lora`; leaves are arrays or `stored.Stored`. `base` is the published model
    that they adapt, a path or a name. Same adapters, same bytes. Raises ImportProblem for
    adapters that are not those of `lora` and `config`.
    """
    factors = {factor.name: factor for factor in _factors(config, lora)}
    layers = adapters.get("layers", {})
    _check(config, lora, factors, layers)
    kind = np.dtype(dtype)

    def value(name: str) -> np.ndarray:
        factor = factors[name]
        ours = np.asarray(jax.device_get(layers[factor.leaf][factor.index]))  # device to host
        return np.ascontiguousarray(ours.reshape(factor.rows, -1).T).astype(kind)

    plan = [
        Planned(name, kind, (math.prod(factor.shape) // factor.rows, factor.rows))
        for name, factor in factors.items()
    ]
    text = json.dumps(_config(lora, base, factors), indent=2) + "\n"
    return writing.write(
        target, plan, value, {ADAPTER_CONFIG: text.encode()},
        part_bytes=sum(tensor.bytes for tensor in plan),  # PEFT reads one file
        overwrite=overwrite, wrote=lambda tensor: wrote(tensor.bytes), kind=KIND,
    )  # fmt: skip


def _factors(config: PolicyConfig, lora: Lora) -> list[_Factor]:
    """Returns A of all layers, then B of all layers, for each target."""
    parts: dict[str, list[Part]] = {}
    for part in names.table(config):
        if part.path[0] == "layers" and part.path[1] in lora.targets and part.inputs:
            parts.setdefault(part.path[1], []).append(part)
    found = []
    for target in lora.targets:
        if target not in parts:
            raise ImportProblem(f"lora.targets has {target!r}, which this policy does not have")
        into = [_in(target, part, lora.rank) for part in parts[target]]
        found += into + [_out(target, part, lora.rank) for part in parts[target]]
    return found


def _in(target: str, part: Part, rank: int) -> _Factor:
    inputs = part.shape[: part.inputs]
    name = f"{PREFIX}{part.name.removesuffix('.weight')}.lora_A.weight"
    return _Factor(name, f"{target}_lora_in", part.index, (*inputs, rank), math.prod(inputs))


def _out(target: str, part: Part, rank: int) -> _Factor:
    outputs = part.shape[part.inputs :]
    name = f"{PREFIX}{part.name.removesuffix('.weight')}.lora_B.weight"
    return _Factor(name, f"{target}_lora_out", part.index, (rank, *outputs), rank)


def _check(
    config: PolicyConfig, lora: Lora, factors: Mapping[str, _Factor], layers: Mapping[str, Any]
) -> None:
    """Raises ImportProblem if leaves are missing, too many, or have other shapes."""
    wanted = {factor.leaf: (config.layers, *factor.shape) for factor in factors.values()}
    for leaf in sorted(set(wanted) | set(layers)):
        if leaf not in layers:
            raise ImportProblem(f"the adapters lack {leaf}, which lora.targets asks for")
        if leaf not in wanted:
            raise ImportProblem(f"the adapters have {leaf}; lora.targets are {lora.targets}")
        if tuple(layers[leaf].shape) != wanted[leaf]:
            raise ImportProblem(
                f"{leaf} has shape {tuple(layers[leaf].shape)}; this policy at rank {lora.rank} "
                f"has {wanted[leaf]}"
            )


def _config(lora: Lora, base: str, factors: Mapping[str, _Factor]) -> dict[str, Any]:
    modules = {name.split(".lora_")[0].rpartition(".")[2] for name in factors}
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
