"""`notepad-jax serve` as people start it: a process of its own, small sizes, real weights."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.serve.fake import until

ROOT = Path(__file__).parents[2]
SIZES = (
    "--config.engine.slots=8", "--config.engine.pages=96", "--config.engine.page_size=16",
    "--config.engine.row_tokens=0", "--config.reading.chunk_size=48",
    "--config.evaluate.chunk_size=48", "--config.reading.max_question=24",
    "--config.reading.max_memory=12", "--config.reading.max_answer=12",
)  # fmt: skip
QUIET = "--config.serve.warm_up=False"  # what is compiled beside the first answers slows them


@contextlib.contextmanager
def program(policy: Path, folder: Path, *more: str, kill: bool = False, sizes=SIZES):
    """`notepad-jax serve`, and its address; ended by Ctrl-C, or killed.

    What it says is in `folder / "said"`.
    """
    words = [
        "-m",
        "notepad_jax",
        "serve",
        "--policy",
        str(policy),
        "--port",
        "0",
        *more,
        QUIET,
        *sizes,
    ]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    with (folder / "said").open("w+") as said:
        # A shell may have had Ctrl-C ignored here, and what is ignored is inherited.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        running = subprocess.Popen([sys.executable, *words], env=environment, stderr=said,
                                   stdout=said, cwd=ROOT)  # fmt: skip
        signal.signal(signal.SIGINT, before)
        try:
            told = folder / "said"
            until(lambda: "/v1 (" in told.read_text() or running.poll() is not None, 240)
            found = re.search(r"(http://\S+)/v1 \(", told.read_text())
            assert found, told.read_text()
            yield found[1]
            if kill:
                return
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 130
            assert told.read_text().splitlines()[-1] == "notepad-jax: stopped"
        finally:
            running.kill()
            running.wait(60)


def command(*words: str) -> subprocess.CompletedProcess:
    """`notepad-jax`, with everything that it said."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-m", "notepad_jax", *words], cwd=ROOT, timeout=300,
                          env=environment, capture_output=True, text=True)  # fmt: skip
