"""Hugging Face folders: config.json, safetensors, tokenizer.model, read and written.

One table of names, `TABLE`, says for every parameter what the published checkpoints call
it and how its axes are folded there; import and export are the two directions of reading
it. Published linear layers are [out, in] matrices, ours keep heads as an axis and put the
inputs first. Supported are the dense Qwen2, Qwen3 and Llama decoders. Shapes come from
`model.parameters`, so a wrong tensor is found before anything is computed with it.
Tensors are memory-mapped and taken one at a time, which is what a streaming importer for
large models will build on.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import abstract_params

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
TOKENIZER = "tokenizer.model"

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = tuple(str(dtype) for dtype in DTYPES.values())


class ImportProblem(ValueError):
    """A folder that is not a policy we can read; the message names what is wrong in it."""


@dataclasses.dataclass(frozen=True)
class Name:
    """One row of the table: a parameter of ours and its published name.

    `inputs` is the number of leading axes (the layer axis not counted) that a linear layer
    consumes; the published matrix is [outputs folded, inputs folded]. None: stored as it
    is, folded to a vector for biases.
    """

    ours: tuple[str, ...]
    theirs: str  # {layer} marks one tensor per layer
    inputs: int | None = None


_L = "model.layers.{layer}."
TABLE = (
    Name(("embed",), "model.embed_tokens.weight"),
    Name(("layers", "attn_norm"), _L + "input_layernorm.weight"),
    Name(("layers", "q"), _L + "self_attn.q_proj.weight", inputs=1),
    Name(("layers", "k"), _L + "self_attn.k_proj.weight", inputs=1),
    Name(("layers", "v"), _L + "self_attn.v_proj.weight", inputs=1),
    Name(("layers", "o"), _L + "self_attn.o_proj.weight", inputs=2),
    Name(("layers", "q_norm"), _L + "self_attn.q_norm.weight"),
    Name(("layers", "k_norm"), _L + "self_attn.k_norm.weight"),
    Name(("layers", "q_bias"), _L + "self_attn.q_proj.bias"),
    Name(("layers", "k_bias"), _L + "self_attn.k_proj.bias"),
    Name(("layers", "v_bias"), _L + "self_attn.v_proj.bias"),
    Name(("layers", "mlp_norm"), _L + "post_attention_layernorm.weight"),
    Name(("layers", "gate"), _L + "mlp.gate_proj.weight", inputs=1),
    Name(("layers", "up"), _L + "mlp.up_proj.weight", inputs=1),
    Name(("layers", "down"), _L + "mlp.down_proj.weight", inputs=1),
    Name(("final_norm",), "model.norm.weight"),
    Name(("unembed",), "lm_head.weight", inputs=1),
)


def published_shape(name: Name, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the published shape of one tensor (one layer of ours, of shape `shape`)."""
    if name.inputs is None:
        bias = name.theirs.endswith(".bias")
        return (int(np.prod(shape)),) if bias else shape
    return (int(np.prod(shape[name.inputs :])), int(np.prod(shape[: name.inputs])))


def to_published(name: Name, leaf: np.ndarray) -> np.ndarray:
    """Folds one parameter (of one layer) into its published shape."""
    shape = published_shape(name, leaf.shape)
    if name.inputs is None:
        return np.ascontiguousarray(leaf.reshape(shape))
    return np.ascontiguousarray(leaf.reshape(shape[::-1]).T)


def from_published(name: Name, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Unfolds a published tensor into our `shape` (of one layer)."""
    return (tensor if name.inputs is None else tensor.T).reshape(shape)


def _rows(config: PolicyConfig) -> Iterator[tuple[Name, tuple[int, ...]]]:
    """Yields the rows of the table that `config` has, with our full shapes."""
    tree = abstract_params(config)
    for name in TABLE:
        node = tree
        for key in name.ours:
            node = node.get(key) if node is not None else None
        if node is not None:
            yield name, node.shape


# ---------------------------------------------------------------- config.json


ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
}


def write_config(config: PolicyConfig, dtype: str) -> dict[str, Any]:
    """Returns the config.json of `config`, in the spelling of transformers 4.

    `valid_vocab_size` is ours: rows of the embedding at or above it belong to no token.
    """
    if config.qk_norm and config.attention_bias:
        raise ImportProblem(
            "a policy with both qk_norm and attention_bias has no Hugging Face architecture; "
            "Qwen3 has the first, Qwen2 the second"
        )
    kind = "qwen3" if config.qk_norm else "qwen2" if config.attention_bias else "llama"
    written = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "valid_vocab_size": config.valid_vocab,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if kind != "qwen2":
        written["attention_bias"] = False  # of Qwen2 the biases are a fixed part
    return written


def read_config(text: Mapping[str, Any], where: str = CONFIG) -> PolicyConfig:
    """Reads a config.json in either spelling (`rope_theta` or `rope_parameters`, `torch_dtype`
    or `dtype`). Raises ImportProblem for what our decoder does not compute."""
    kind = text.get("model_type")
    if kind not in ARCHITECTURES:
        raise ImportProblem(
            f"{where}: architecture {kind!r} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))} (dense)"
        )

    def need(key: str) -> Any:
        if key not in text:
            raise ImportProblem(f"{where}: {key!r} is missing")
        return text[key]

    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    act = text.get("hidden_act", "silu")
    refused = {
        f"rope type {rope_type!r} (only 'default')": rope_type != "default",
        f"hidden_act {act!r} (only 'silu')": act != "silu",
        "a sliding window": bool(text.get("use_sliding_window")),
        "attention_bias": kind != "qwen2" and bool(text.get("attention_bias")),
        "mlp_bias": bool(text.get("mlp_bias")),
    }
    for what, asked in refused.items():
        if asked:
            raise ImportProblem(f"{where} asks for {what}, which this decoder does not compute")
    heads, vocab = int(need("num_attention_heads")), int(need("vocab_size"))
    dtype = text.get("torch_dtype") or text.get("dtype") or "float32"
    if dtype not in DTYPE_NAMES:
        raise ImportProblem(f"{where}: dtype {dtype!r}; supported are {', '.join(DTYPE_NAMES)}")
    return PolicyConfig(
        vocab_size=vocab,
        width=int(need("hidden_size")),
        layers=int(need("num_hidden_layers")),
        heads=heads,
        kv_heads=int(text.get("num_key_value_heads") or heads),
        head_size=int(text.get("head_dim") or need("hidden_size") // heads),
        feed_forward=int(need("intermediate_size")),
        rope_theta=float(rope.get("rope_theta") or text.get("rope_theta") or 10_000.0),
        rms_eps=float(text.get("rms_norm_eps", 1e-6)),
        qk_norm=kind == "qwen3",
        attention_bias=kind == "qwen2",
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        valid_vocab=int(text.get("valid_vocab_size", vocab)),
        dtype=dtype,
    )


# ---------------------------------------------------------------- export


def export_params(
    config: PolicyConfig,
    params: Any,
    folder: str | Path,
    tokenizer_path: str | Path | None = None,
) -> Path:
    """Writes `params` (arrays of any sharding) as a Hugging Face folder; returns its path.

    The tokenizer's sentencepiece model is copied to tokenizer.model. Everything is written
    into a temporary folder beside the target, which then takes its name: a reader sees the
    old export or the new one, never half of one. Same weights, same bytes.
    """
    folder = Path(folder).absolute()
    if folder.exists() and any(folder.iterdir()) and not (folder / CONFIG).exists():
        raise ImportProblem(f"{folder} exists and is no exported policy; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        tensors = dict(_published(config, params))
        dtype = str(next(iter(tensors.values())).dtype)
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps(write_config(config, dtype), indent=2) + "\n"
        (temporary / CONFIG).write_text(text)
        if tokenizer_path is not None:
            shutil.copyfile(tokenizer_path, temporary / TOKENIZER)
        temporary.chmod(0o755)  # mkdtemp's are private, and so is what safetensors writes
        (temporary / WEIGHTS).chmod(0o644)
        _take_name(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _published(config: PolicyConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor under its published name, one at a time."""
    for name, shape in _rows(config):
        leaf = params
        for key in name.ours:
            leaf = leaf[key]
        leaf = np.asarray(jax.device_get(leaf))  # device to host, one parameter at a time
        if leaf.shape != shape:
            raise ImportProblem(f"{'/'.join(name.ours)} has shape {leaf.shape}, not {shape}")
        if name.ours[0] != "layers":
            yield name.theirs, to_published(name, leaf)
            continue
        for layer in range(config.layers):
            yield name.theirs.format(layer=layer), to_published(name, leaf[layer])


def _take_name(temporary: Path, folder: Path) -> None:
    """Renames `temporary` to `folder`, replacing what is there."""
    old = temporary.with_name(temporary.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- import


@dataclasses.dataclass(frozen=True)
class Located:
    """Where one published tensor lies."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    def read(self) -> np.ndarray:
        """Maps the tensor; nothing is read from disk before it is looked at."""
        flat = np.memmap(self.file, np.uint8, "r", self.start, (self.stop - self.start,))
        return flat.view(DTYPES[self.dtype]).reshape(self.shape)


def locate(folder: Path) -> dict[str, Located]:
    """Returns where every tensor of a folder lies; reads headers only."""
    if (folder / INDEX).exists():
        files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    else:
        files = [WEIGHTS]
    found: dict[str, Located] = {}
    for file in files:
        path = folder / file
        if not path.exists():
            old = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {old[0]} is a pickle, which is not read: convert it" if old else ""
            raise ImportProblem(f"{path} is missing{hint}")
        found |= _header(path)
    return found


def _header(path: Path) -> dict[str, Located]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size:
            raise ImportProblem(f"{path} is cut short: {size} bytes, its header alone has {length}")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise ImportProblem(f"{path} is not a safetensors file") from None
    header.pop("__metadata__", None)
    located = {}
    for name, entry in header.items():
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop > size:
            raise ImportProblem(f"{path} is cut short: {name} ends at byte {stop} of {size}")
        if entry["dtype"] not in DTYPES:
            raise ImportProblem(f"{path}: {name} is {entry['dtype']}; read are {list(DTYPES)}")
        located[name] = Located(path, entry["dtype"], tuple(entry["shape"]), start, stop)
    return located


def import_config(folder: str | Path) -> PolicyConfig:
    """Reads the sizes of the policy in `folder`."""
    path = Path(folder) / CONFIG
    if not path.exists():
        raise ImportProblem(f"{path} is missing; a policy folder has {CONFIG} and {WEIGHTS}")
    try:
        text = json.loads(path.read_text())
    except ValueError as problem:
        raise ImportProblem(f"{path} is not JSON: {problem}") from None
    return read_config(text, str(path))


def import_policy(folder: str | Path) -> tuple[PolicyConfig, dict[str, Any]]:
    """Reads a folder; returns the config and a tree of numpy arrays in the stored dtype.

    `valid_vocab` is the size of the embedding unless the folder was exported by us: lower it
    to the tokenizer's size with `dataclasses.replace`. Raises ImportProblem.
    """
    config = import_config(folder)
    located = locate(Path(folder))
    params: dict[str, Any] = {"layers": {}}
    for name, shape in _rows(config):
        if name.ours[0] == "layers":
            parts = [
                _tensor(located, name, name.theirs.format(layer=layer), shape[1:])
                for layer in range(config.layers)
            ]
            params["layers"][name.ours[1]] = np.stack(parts)
        else:
            params[name.ours[0]] = np.array(_tensor(located, name, name.theirs, shape))
    _refuse_unknown(located, config, folder)
    return config, params


def _tensor(
    located: Mapping[str, Located], name: Name, theirs: str, shape: tuple[int, ...]
) -> np.ndarray:
    if theirs not in located:
        raise ImportProblem(f"tensor {theirs!r} is missing from the folder's {WEIGHTS}")
    found, expected = located[theirs], published_shape(name, shape)
    if found.shape != expected:
        raise ImportProblem(
            f"tensor {theirs!r} in {found.file} has shape {found.shape}, "
            f"its {CONFIG} asks for {expected}"
        )
    return from_published(name, found.read(), shape)


def _refuse_unknown(located: Mapping[str, Located], config: PolicyConfig, folder: Any) -> None:
    """Raises ImportProblem for weights that our decoder would leave out of its sums."""
    known = {"lm_head.weight"}  # some tied checkpoints store the embedding twice
    for name, _ in _rows(config):
        known |= {name.theirs.format(layer=layer) for layer in range(config.layers)}
    for theirs in located:
        if theirs not in known and not theirs.endswith("rotary_emb.inv_freq"):
            raise ImportProblem(f"{folder} has a tensor {theirs!r}, which this decoder lacks")
