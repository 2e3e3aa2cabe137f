"""Which screen suits an output: a live view, plain lines, or none.

A terminal gets a live view, a file or a pipe plain lines, and `--json` silence. Everything goes to
standard error, so that results on standard output can be piped.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO

from notepad_jax.telemetry.line_screen import LineScreen
from notepad_jax.telemetry.screen import Busy, Screen, SilentScreen
from notepad_jax.telemetry.terminal_screen import TerminalScreen


def choose(quiet: bool = False, stream: TextIO | None = None, busy: Busy = lambda: "") -> Screen:
    """Returns the screen that suits `stream` (standard error); `quiet` is for --json.

    NO_COLOR (no-color.org) means no escape sequences at all, also none that move the cursor.
    """
    stream = sys.stderr if stream is None else stream
    if quiet:
        return SilentScreen()
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if stream.isatty() and not plain:
        return TerminalScreen(stream, busy)
    return LineScreen(stream)
