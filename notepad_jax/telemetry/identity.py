"""What a folder was made from: written down once, and compared when somebody goes on there.

Going on with other settings would mix two things that look alike. Used for the readings of
an evaluation and for built task files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def settle(path: Path, identity: Mapping[str, Any], mend: str) -> None:
    """Writes `identity` (JSON values) to `path`, or makes sure that it stands there already.

    Raises ValueError naming the first value that differs, with both and the mend.
    """
    ours = json.loads(json.dumps(identity))
    if not path.is_file():
        write_json(path, ours)
        return
    theirs = json.loads(path.read_text(encoding="utf-8"))
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ValueError(
                f"{path.parent} was made with {name} = {theirs.get(name)!r}, and now it is "
                f"{ours.get(name)!r}; {mend}"
            )


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file at once or not at all; makes its folder. Other objects become text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(temporary, path)
