"""Formatting for a terminal: texts made harmless, numbers made short.

Above: the screens, and cli for what it prints.
"""

from __future__ import annotations

from collections.abc import Mapping

Value = float | int | str

# Of a text from a file or a policy a terminal obeys these; all but the first two may do harm.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160), *range(0xD800, 0xE000))}
CONTROLS |= {ord("\n"): "\n", ord("\t"): "\t"}


def harmless(text: str) -> str:
    """Returns a text for the terminal: control characters and lone surrogates as U+FFFD."""
    return text.translate(CONTROLS)


def on_one_line(text: str) -> str:
    """Returns a text with its line ends, and spaces around them, as one space each."""
    return " ".join(filter(None, map(str.strip, text.splitlines())))


def show(value: Value) -> str:
    """Returns a number as text: 4 significant digits, or the integer."""
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def show_all(values: Mapping[str, Value]) -> str:
    """Returns values with their names, on one line."""
    return "  ".join(f"{name} {show(value)}" for name, value in values.items())
