"""The trace page of one very long reading: its size, and how soon a browser shows it.

    python -m benchmarks.trace_page [--turns 5000] [--words 700] [--json]

A memory of so many words that changes in every turn, written as a trace file; then its page;
then Chromium, where there is one, opens the first turn and goes to the last and the middle
one. A time is from the command to the browser until the turn stands there, data loaded, so it
has the browser's polling in it (some 20 ms). Expected on two cores
of an AMD EPYC: 17.5 MB in 137 files, made in 2.5 s, the first turn shown in 0.15 s.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from notepad_jax.programs import traces
from notepad_jax.reading.trace import MemoryChange, Spool, TraceFile
from notepad_jax.telemetry.screen import SilentScreen
from tests.support.chromium import CHROMIUM, Browser


def write(path: Path, turns: int, words: int) -> None:
    """Writes one reading whose memory of `words` words changes a little in every turn."""
    spool = Spool()
    for k in range(turns - 1):
        text = " ".join(f"w{(k // 7 + j) % 997}" for j in range(words))
        spool.add(MemoryChange(k, f"turn {k} {text}", words + 2, k * 0.1))
    reading = {"question": "which ?", "answer": "red", "gold": ["red"], "turns": turns}
    with TraceFile(path) as file:
        file.add(reading, spool)


def opened(page: Path, turns: int, profile: Path) -> dict[str, float]:
    """Returns seconds until a turn is shown: the first, then the last and the middle one."""
    found = {}
    with Browser(profile) as browser:
        browser.open(page.resolve().as_uri() + "#turn=1")  # the browser itself is warm
        browser.wait("document.querySelector('#detail .question')")
        browser.open("about:blank")
        for name, turn in (("first", 1), ("last", turns), ("middle", turns // 2)):
            began = time.perf_counter()
            if name == "first":
                browser.open(page.resolve().as_uri() + "#turn=1")
            else:
                browser.ask(f"location.hash = '#turn={turn}'")
            browser.wait(
                "document.querySelector('#detail .top .dim')?.innerText"
                f".startsWith('turn {turn:,} ')"
            )
            found[f"{name}_shown_seconds"] = time.perf_counter() - began
        found["elements"] = browser.ask("document.querySelectorAll('*').length")
        found["heap_mb"] = browser.ask("performance.memory.usedJSHeapSize / 1e6")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5000)
    parser.add_argument("--words", type=int, default=700)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        told = measured(Path(folder), arguments.turns, arguments.words)
    if arguments.json:
        print(json.dumps(told, indent=1))
        return
    for name, value in told.items():
        print(f"{name:>20}  {value:,.3g}" if isinstance(value, float) else f"{name:>20}  {value:,}")


def measured(folder: Path, turns: int, words: int) -> dict[str, float]:
    """Returns what was measured; what a browser shows only where there is one."""
    trace = folder / "long.jsonl"
    write(trace, turns, words)
    made = traces.run([str(trace)], None, SilentScreen())
    data = Path(made.page).parent / "data"
    told = {
        "turns": made.turns,
        "trace_mb": trace.stat().st_size / 1e6,
        "page_mb": made.bytes / 1e6,
        "files": made.files,
        "largest_file_kb": max(file.stat().st_size for file in data.iterdir()) / 1e3,
        "made_seconds": made.seconds,
    }
    return told | (opened(Path(made.page), turns, folder / "profile") if CHROMIUM else {})


if __name__ == "__main__":
    main()
