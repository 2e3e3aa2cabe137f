"""Downloads from the Hugging Face Hub by model id, `Qwen/Qwen2.5-0.5B-Instruct`: fetched once.

It lies in the Hub's own cache (HF_HOME) afterwards, where it is found without a network, too.
Above: setup.policies.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_OURS = ("runs", "policies", "data")  # a name that begins so is a folder, or a mistake
_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
# Mistral's repositories hold all weights twice, and some have checkpoints in folders.
_OTHERS = ("consolidated*", "*/*")


def is_id(name: str) -> bool:
    """Whether `name` may be a model's id: of that form, and neither a folder nor in one."""
    owner = name.partition("/")[0]
    return (
        bool(_ID.fullmatch(name)) and owner not in (*_OURS, ".", "..") and not Path(owner).exists()
    )


@functools.cache
def fetched(name: str) -> str:
    """Returns the folder with the files of a model that a policy needs; downloads what is missing.

    Raises ValueError, in one line that says how else, where the Hub has no such model, does not
    show it, or cannot be asked while the cache has nothing of it.
    """
    try:
        return huggingface_hub.snapshot_download(
            name, allow_patterns=list(_FILES), ignore_patterns=list(_OTHERS)
        )
    except (OSError, HfHubHTTPError) as problem:
        said = str(problem).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"there is no folder {name}, and as a model of the Hub it cannot be fetched: {said}. "
            f"Where there is a network: hf download {name} --local-dir policies/"
            f"{name.rpartition('/')[2]} (hf auth login, if it asks who you are); then name that "
            f"folder"
        ) from None
