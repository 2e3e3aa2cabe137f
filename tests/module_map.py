"""docs/modules.md, made from what every file says of itself: `make docs`.

A Python file says it in the first sentence of its docstring, any other in that of its first
comment. tests/programs/test_documentation.py compares the page with what this makes.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "modules.md"
# From the ground floor up, as in docs/architecture.md.
ROOMS = (
    *("scoring", "telemetry", "parallel", "text", "data", "starter", "model", "reading", "tasks"),
    *("engine", "checkpoint", "grpo", "rollout", "eval", "report", "serve"),
    *("setup", "planner", "training", "programs", "commands"),
)
KINDS = (".py", ".txt", ".html", ".css", ".svg", ".js", ".sh", ".example")
# A file of data alone cannot say what it is.
DATA = {"words.txt": "English words for `cwe` and `fwe`, of our own writing."}
HEAD = """\
# Every file, and what it is for

Made by `make docs` from the files' own first sentences; how the rooms stand to
one another is in [architecture.md](architecture.md). Read `types.py` first, then follow one of
[the walks](architecture.md#walks).
"""


def page() -> str:
    """Returns the text of the page."""
    rooms = [ROOT / "notepad_jax" / room for room in ROOMS]
    parts = [HEAD, *_section(ROOT / "notepad_jax", deep=False)]
    for room in (*rooms, ROOT / "pallas_kernels", ROOT / "launch"):
        parts += _section(room)
    return "\n".join(parts)


def _section(folder: Path, deep: bool = True) -> list[str]:
    """Returns a heading and a line a file, sub-rooms behind; without them where not `deep`."""
    inside = sorted(path for path in folder.iterdir() if path.suffix in KINDS)
    files = [path for path in inside if path.name != "__init__.py"]
    where = f"`{folder.relative_to(ROOT)}/`"
    own = folder / "__init__.py"
    title = f"{where}: {first_sentence(own).removesuffix('.')}" if own.exists() else where
    lines = [f"## {title}", "", *(f"- `{one.name}`: {first_sentence(one)}" for one in files), ""]
    if deep:
        for sub in sorted(path for path in folder.iterdir() if path.is_dir()):
            if any(path.suffix in KINDS for path in sub.iterdir()):
                lines += ["#" + line if line.startswith("## ") else line for line in _section(sub)]
    return lines


def first_sentence(path: Path) -> str:
    """Returns what a file says of itself. Raises ValueError for one that says nothing."""
    if path.name in DATA:
        return DATA[path.name]
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    elif path.suffix in (".html", ".svg"):
        said = _found(r"\{#(.*?)-?#\}", text)
    elif path.suffix == ".css":
        said = _found(r"/\*(.*?)\*/", text)
    elif path.suffix == ".js":
        said = _found(r"((?://.*\n)+)", text)
    elif path.suffix == ".txt":
        said = _found(r"(?:# )?(.*?)(?:\n\n|\Z)", text)
    else:
        text = re.sub(r"^(#!|# shellcheck ).*\n", "", text, flags=re.MULTILINE)
        said = _found(r"((?:#.*\n)+)", text)
    said = re.sub(r"^(//|#) ?", "", said, flags=re.MULTILINE)
    found = re.match(r"(.+?[.?])(\s|$)", " ".join(said.split()))
    if found is None or len(found[1]) > 250:
        raise ValueError(f"{path} does not begin with a sentence on what it is")
    return found[1]


def _found(pattern: str, text: str) -> str:
    found = re.match(pattern, text, re.DOTALL)
    return found[1] if found else ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
