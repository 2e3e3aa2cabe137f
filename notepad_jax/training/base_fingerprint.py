"""The fingerprint of the policy that a run began with: digests of its content.

The reference of a KL and the base of adapters are no part of a checkpoint: a resumed run loads
them again from the policy's folder, where something else may lie by now. So every checkpoint
names them by `content`, and `compare` refuses another one. Above: train; below: builders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import jax

from notepad_jax.checkpoint.checksums import checksum
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.setup.builders import LoadedPolicy
from notepad_jax.text import tokenizer


def content(policy: LoadedPolicy) -> dict[str, str]:
    """Returns the policy's `folder`, and digests of its `weights`, `tokenizer` and `config`.

    Of the weights as they are stored, whatever they lie in here, and of the bytes of the files
    that it has of the others.
    """
    stored = jax.tree.map(lambda x, like: x.astype(like.dtype), policy.params, policy.stored)
    files = huggingface.companions(policy.folder)
    words = {name: files.pop(name) for name in tokenizer.FILES if name in files}
    files[huggingface.CONFIG] = (policy.folder / huggingface.CONFIG).read_bytes()
    return {
        "folder": policy.name,
        "weights": checksum(stored),
        "tokenizer": _digest(words),
        "config": _digest(files),
    }


def compare(began: Mapping[str, str], now: Mapping[str, str], run: Path) -> None:
    """Raises ValueError, naming what differs, unless `now` is what the run began with."""
    others = [name for name in ("weights", "tokenizer", "config") if began.get(name) != now[name]]
    if others:
        raise ValueError(
            f"{run} began with the policy in {began.get('folder', 'an unnamed folder')}; not the "
            f"same in {now['folder']}: {', '.join(others)}; put back what it began with, or say "
            f"where it lies (--policy), or begin another run"
        )


def _digest(files: Mapping[str, bytes]) -> str:
    told = [(name, hashlib.sha256(files[name]).hexdigest()) for name in sorted(files)]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]
