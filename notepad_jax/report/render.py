"""Values and a template become a page: one environment for all pages, and one way to write.

The HTML and the prose of the pages are in `templates/`: a frame with the style sheet, the
pieces (sections, tables, readings), and one template per page. Pages are self-contained
(pictures as base64, no script, nothing fetched) and safe: whatever a template prints, be
it a policy's words or a setting's name, is bounded and rid of control characters here
(`shown`), and then escaped by jinja2. A name that has no value is an error, not a gap.
Above: `quickstart_page` and `evaluation_page`, which make the values; below: `numerals`.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from notepad_jax.eval.lengths import format_length
from notepad_jax.report import numerals
from notepad_jax.telemetry.identity import write_whole

LONGEST_TEXT = 6_000  # characters of one value that are shown

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def write(path: Path, template: str, values: Mapping[str, Any]) -> Path:
    """Writes a template of `templates/` with its values, at once or not at all; returns `path`.

    Half a surrogate pair, which a policy may write and UTF-8 cannot, becomes a question mark.
    jinja2.UndefinedError for a value that the template asks for and that is not there.
    """
    html = _ENVIRONMENT.get_template(template).render(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, html.encode("utf-8", "replace"))
    return path


def shown(value: Any) -> Any:
    """Returns what may be printed of a value; HTML made by a template stays as it is."""
    return value if isinstance(value, Markup) else shortened(str(value))


def shortened(words: str) -> str:
    """Returns the beginning of a text that is too long to show; control characters as U+FFFD."""
    hidden = len(words) - LONGEST_TEXT
    start = _CONTROL.sub("\ufffd", words[:LONGEST_TEXT])
    return f"{start} ... ({hidden:,} more characters)" if hidden > 0 else start


def _base64(data: bytes) -> Markup:
    """Returns bytes for a data URL, of any length; there is nothing to escape in base64."""
    return Markup(base64.b64encode(data).decode())


def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("notepad_jax.report"),
        autoescape=True,
        finalize=shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    for write_as in (
        numerals.percent,
        numerals.interval,
        numerals.change,
        numerals.duration,
        numerals.thousands,
        numerals.counted,
        format_length,
    ):
        made.filters[write_as.__name__] = write_as
    made.filters["base64"] = _base64
    return made


_ENVIRONMENT = _environment()
