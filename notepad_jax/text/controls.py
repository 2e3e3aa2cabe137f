"""Control pieces (special tokens), which only a template or the policy writes, never a document.

How they are recognised and looked up. Above: the tokenizers, which keep them out of
ordinary text, and model_folder.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

STOP_PIECES = ("<|end|>", "<|im_end|>", "<end_of_turn>", "</s>")  # the first known one stops
CONTROL_LOOK = re.compile(r"<\|[^<>|\s]+\|>")  # a piece that looks so is always control


def control_id(controls: Mapping[str, int], name: str, path: pathlib.Path) -> int:
    """Returns the id of `name`; ValueError naming the tokenizer's file if there is none."""
    if name not in controls:
        some = ", ".join([*controls][:12]) + (", ..." if len(controls) > 12 else "")
        raise ValueError(f"{path} has no control piece {name!r}; it has {some or 'none'}")
    return controls[name]


def usual_stops(controls: Mapping[str, int]) -> list[int]:
    """Returns the ids of the known stop pieces among `controls`, the likeliest first."""
    return [controls[name] for name in STOP_PIECES if name in controls]
