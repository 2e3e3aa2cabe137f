"""The tables of docs/configuration.md, made from the fields of a config: `make docs`.

A field says its unit and what it means (`notepad_jax.keys`), the shipped file of its kind what it
usually is. tests/programs/test_documentation.py compares the page with what this makes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import marks
from notepad_jax import keys
from notepad_jax.setup import configuration
from notepad_jax.setup.config.asking import SuiteKeys
from notepad_jax.setup.config.whole import Starter, Suites, Training

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = "| key | type, unit | usually | meaning and consequence |\n|---|---|---|---|"
ELSEWHERE = {"optimizer", "seed", "steps"}  # of a starter: in the tables above
Rows = Iterable[tuple[str, keys.Key]]


def page() -> str:
    """Returns the text of the page, its tables made anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"<!-- (\w+): begin -->", text):
        text = marks.placed(PAGE, text, name, table(name))
    return text


def table(name: str) -> str:
    """Returns the rows of a section of a training config, or of `top`, `suites` or `starter`."""
    if name == "starter":
        return _table(_of(Starter, lambda key: key.partition(".")[0] not in ELSEWHERE), "starter")
    if name == "suites":
        own = {f"evaluate.{field}" for field in SuiteKeys.__annotations__}
        sections = ("endpoint", "sources")
        return _table(
            _of(Suites, lambda key: key in own or key.partition(".")[0] in sections), "ruler"
        )
    if name == "top":
        return _table(_of(Training, lambda key: "." not in key), "quickstart")
    return _table(_of(Training, lambda key: key.startswith(f"{name}.")), "quickstart")


def _of(kind: type, wanted: Any) -> Iterator[tuple[str, keys.Key]]:
    return ((key, said) for key, _, said in keys.leaves(kind) if wanted(key))


def _table(rows: Rows, config: str) -> str:
    usual = keys.flat(configuration._made(configuration._find(config)).to_dict())
    together: list[tuple[list[str], keys.Key]] = []
    for key, said in rows:
        if said.about:
            together.append(([key], said))
        else:
            together[-1][0].append(key)
    return "\n".join([HEAD, *(_row(names, said, usual) for names, said in together)])


def _row(names: list[str], said: keys.Key, usual: Mapping[str, Any]) -> str:
    values = list(dict.fromkeys(_shown(usual[name]) for name in names if name in usual))
    named = ", ".join(f"`{name}`" for name in names)
    return f"| {named} | {said.unit} | {', '.join(values)} | {said.about} |"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"`{value}`" if value else '`""`'
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
