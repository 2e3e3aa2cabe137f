"""Rendering of pages: one jinja2 environment for all templates, and atomic writes.

The HTML and the prose of the pages are in `templates/`: a frame with the style sheets and the
one script, the pieces (sections, tables, charts, readings), and one template per page. Pages
are self-contained and safe: whatever a template prints, be it a policy's words or a setting's
name, is bounded and rid of control characters here (`shown`), and then escaped by jinja2; and
the page's own policy tells a browser to fetch nothing and to run no script but the one whose
hash it names. A name that has no value is an error, not a gap. `picture` writes charts as an
SVG file in the same way. Above: the pages, which make the values; below: `numerals`, `chart`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from notepad_jax.eval.lengths import format_length
from notepad_jax.report import numerals
from notepad_jax.report.chart import Chart
from notepad_jax.telemetry.identity import write_whole

LONGEST_TEXT = 6_000  # characters of one value that are shown
LONGEST_MEMORY = 1_500  # of a memory, of which there are many on a page
SCRIPT, NOTICE_SCRIPT = "page.js", "notice.js"
# The script of a trace's page, in the order in which its files need one another.
TRACE_SCRIPTS = (
    "trace_data.js", "texts.js", "trace_list.js", "trace_lists.js", "trace_turn.js",
    "trace_tree.js", "trace_peers.js", "trace_page.js",
)  # fmt: skip
# That of the server's page, likewise.
READING_SCRIPTS = ("texts.js", "reading_api.js", "reading_cards.js", "reading_page.js")

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
# What `visible` of texts.js shows by its name, too.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff"
    "\ufff9-\ufffb]"
)


def write(path: Path, template: str, values: Mapping[str, Any]) -> Path:
    """Writes a template of `templates/` with its values, at once or not at all; returns `path`.

    Half a surrogate pair, which a policy may write and UTF-8 cannot, becomes a question mark.
    jinja2.UndefinedError for a value that the template asks for and that is not there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, rendered(template, values))
    return path


def rendered(template: str, values: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a rendered template, as `write` writes them."""
    return _ENVIRONMENT.get_template(template).render(values).encode("utf-8", "replace")


def picture(path: Path, charts: Sequence[Chart], columns: int = 3) -> Path:
    """Writes charts of one size, `columns` in a row, as one SVG file; returns `path`.

    At once or not at all. It has a light and a dark scheme, and shows nothing under a pointer.
    """
    gap, columns = 12.0, min(columns, len(charts))
    width, height = charts[0].width + gap, charts[0].height + gap
    placed = [
        (chart, gap + k % columns * width, gap + k // columns * height)
        for k, chart in enumerate(charts)
    ]
    rows = -(-len(charts) // columns)
    size = {"width": gap + columns * width, "height": gap + rows * height}
    return write(path, "picture.svg", {"placed": placed, **size})


def shown(value: Any) -> Any:
    """Returns a value made safe to print, bounded and clean; a template's HTML stays as it is."""
    return value if isinstance(value, Markup) else shortened(str(value))


def shortened(words: str, longest: int = LONGEST_TEXT) -> str:
    """Returns the beginning of a text that is too long to show; control characters as U+FFFD."""
    hidden = len(words) - longest
    start = _CONTROL.sub("\ufffd", words[:longest])
    return f"{start} ... ({hidden:,} more characters)" if hidden > 0 else start


def visible(words: str) -> str:
    """Returns a title or a name with all that is unseen, or turns the writing, by its name."""
    return _UNSEEN.sub(lambda found: f"⟨{ord(found[0]):02X}⟩", words)


def _memory(words: str) -> str:
    return shortened(words, LONGEST_MEMORY)


def _stops(chart: Chart) -> Markup:
    """What the script of the page reads of a chart: JSON as the value of an attribute."""
    stops = json.dumps(chart.stops(), separators=(",", ":"))
    return Markup(escape(_CONTROL.sub("\ufffd", stops)))


def _hash(script: str) -> str:
    """Returns what a policy calls a script by (CSP level 2): of its text between its tags."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


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
    made.filters["memory"], made.filters["visible"] = _memory, visible
    made.filters["stops"] = _stops
    # A script of the package, as it is: its hash must be that of its bytes.
    script, notice = _source(made, SCRIPT), _source(made, NOTICE_SCRIPT)
    trace, reading = (
        "".join(_source(made, name) for name in names) for names in (TRACE_SCRIPTS, READING_SCRIPTS)
    )
    made.globals.update(
        zip=zip, script=Markup(script), script_hash=_hash(script), trace_script=Markup(trace),
        trace_hash=_hash(trace), reading_script=Markup(reading), reading_hash=_hash(reading),
        notice_script=Markup(notice), notice_hash=_hash(notice),
    )  # fmt: skip
    return made


def _source(made: Environment, name: str) -> str:
    source, _, _ = made.loader.get_source(made, name)
    return source


_ENVIRONMENT = _environment()
