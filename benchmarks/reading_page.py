"""The server's page to read with: how soon it shows a memory, and a picture of it.

    notepad-jax serve --policy runs/quickstart/hf --served-name quickstart
    python -m benchmarks.reading_page [--url http://localhost:8000] [--picture FILE] [--json]

Asks the running server two questions about a document of the starter's little language, through
its page in Chromium, and waits for the answers. `--picture` keeps what the page shows then:
docs/images/reading.png was made so. Expected on two cores of an AMD EPYC, programs compiled and
20,000 tokens: the reading has begun after 0.2 s, memories are there after 0.4, answers after 0.6.
"""

from __future__ import annotations

import argparse
import base64
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from notepad_jax.starter import synthetic
from tests.support.chromium import CHROMIUM, Browser

WIDTH, HEIGHT = 760, 900
# New words or, of a reading that was ahead of its page, a memory without them.
MEMORY = ".text :not(.dim)"
NOTED = f"[...document.querySelectorAll('.course')].every((a) => a.querySelector('{MEMORY}'))"
READ = "document.getElementById('trace').checkVisibility()"
ALL = "document.querySelectorAll('.answer q').length === 2"


def measured(url: str, tokens: int, seed: int, picture: Path | None) -> dict[str, float]:
    """Returns seconds from pressing `Read` until things are shown, and counts of requests."""
    tasks = synthetic.make_tasks(seed, tokens, 2, unanswerable=0.0, two_hop=1.0)
    text = "".join(tasks[0].document.pieces())
    found: dict[str, float] = {"tokens": tokens}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        with Browser(Path(folder), WIDTH, HEIGHT) as browser:
            browser.open(url)
            browser.wait("document.getElementById('model')?.textContent")
            for name, value in (("text", text), ("questions", [task.question for task in tasks])):
                said = value if isinstance(value, str) else "\n".join(value)
                browser.ask(f"document.getElementById('{name}').value = {json.dumps(said)}")
            began = time.perf_counter()
            browser.ask("document.getElementById('ask').requestSubmit()")
            for what, true in (
                ("begun", "document.querySelector('.course')"),
                ("memories", NOTED),
                ("answers", f"{READ} && {ALL}"),
            ):
                browser.wait(true)
                found[f"{what}_shown_seconds"] = time.perf_counter() - began
            if picture is not None:
                picture.write_bytes(shot(browser))
            found["requests"] = len(browser.requests)
            elsewhere = [one for one in browser.requests if not one.startswith(url)]
            found["requests_elsewhere"] = len(elsewhere)
            assert not browser.problems, browser.problems
    return found


def shot(browser: Browser) -> bytes:
    """Returns a picture of the page, as high as what is on it."""
    high = browser.ask(
        "Math.ceil(document.querySelector('#courses').getBoundingClientRect().bottom)"
    )
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": min(high + 24, HEIGHT), "scale": 1}
    told = browser.call("Page.captureScreenshot", format="png", clip=clip)
    return base64.b64decode(told["data"])


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--tokens", type=int, default=20_000, help="of the document")
    parser.add_argument("--seed", type=int, default=0, help="of the document")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="a PNG")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    if CHROMIUM is None:
        parser.error("this needs chromium")
    told = measured(
        arguments.url.rstrip("/") + "/", arguments.tokens, arguments.seed, arguments.picture
    )
    if arguments.json:
        print(json.dumps(told, indent=1))
        return
    for name, value in told.items():
        print(f"{name:>22}  {value:,.3g}" if isinstance(value, float) else f"{name:>22}  {value:,}")


if __name__ == "__main__":
    main()
