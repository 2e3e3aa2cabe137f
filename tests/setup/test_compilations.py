"""Nothing is compiled twice: not within a run, and not by a machine's second run.

Two processes, as a user starts them, share a cache folder that was empty before. Both ask,
evaluate, train, and train on; they count what jax was asked to compile and what it found.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import pytest

from notepad_jax.starter.synthetic import make_tasks

pytestmark = pytest.mark.slow  # two processes that compile everything
ROOT = Path(__file__).parents[2]
PROGRAM = """
import collections, json, logging, sys
import jax
from notepad_jax import cli

events, programs = collections.Counter(), []

class Compiling(logging.Handler):
    def emit(self, record):
        if record.msg.startswith("Compiling %s with global shapes"):
            programs.append([str(argument) for argument in record.args[:2]])

logger = logging.getLogger("jax")
logger.handlers, logger.propagate = [Compiling()], False
jax.config.update("jax_log_compiles", True)
jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))
codes = [cli.main(words) for words in json.loads(sys.argv[1])]
json.dump({"codes": codes, "events": events, "programs": programs}, open(sys.argv[2], "w"))
"""
SMALL = (
    f"--config.policy={ROOT / 'data' / 'starter'}",
    "--config.data.tokens=512",
    "--config.data.questions=2",
    "--config.rollout.documents=2",
    "--config.rollout.group_size=4",
    "--config.engine.slots=16",
    "--config.engine.pages=128",
    "--config.grpo.row_length=512",
    "--config.grpo.micro_batch_rows=1",
    "--config.optimizer.kind=adamw",
    "--config.evaluate.lengths=512",
    "--config.evaluate.chunk_size=512",
    "--config.evaluate.questions=2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the first and the second process of a user counted."""
    home = tmp_path_factory.mktemp("home")
    task = make_tasks(5, tokens=1024, questions=1, unanswerable=0.0, two_hop=0.0)[0]
    (home / "story.txt").write_text("".join(task.document.pieces()))
    return [_counted(home, task.question, f"run{number}") for number in (1, 2)]


def _counted(home: Path, question: str, name: str) -> dict:
    commands = [
        ["ask", str(home / "story.txt"), question],
        ["eval", "--name", f"{name}-eval"],
        ["train", "--name", name, "--config.steps=1"],
        ["train", "--name", name, "--resume", "--config.steps=2"],
    ]
    commands = [[*words, "--json", *SMALL] for words in commands]
    inherited = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    own = {
        "XDG_CACHE_HOME": str(home / "caches"),
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # the same programs in a fraction of the time
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), str(home / f"{name}.json")],
        cwd=home, env=inherited | own, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    counted = json.loads((home / f"{name}.json").read_text())
    assert counted["codes"] == [0, 0, 0, 0], done.stderr[-3000:]
    assert list((home / "caches" / "notepad_jax" / "xla").glob("*-cache"))
    return counted


def asked_and_found(counted: dict) -> tuple[int, int]:
    events = counted["events"]
    return tuple(
        events.get(f"/jax/compilation_cache/{name}", 0)
        for name in ("compile_requests_use_cache", "cache_hits")
    )


def test_the_second_run_on_a_machine_compiles_nothing(runs):
    (asked, found), (again, found_again) = map(asked_and_found, runs)
    assert asked > 20 and found == 0
    assert again == found_again == asked


def test_no_program_is_compiled_twice_in_a_run(runs):
    """The same function over arrays of the same shapes. Of jax's own small programs some differ
    in what is not an array (the shape to broadcast to), so they are left out."""
    programs = [(name, shapes) for name, shapes in runs[0]["programs"] if not _of_jax(name)]
    assert {"jit(generate)", "jit(_apply)"} <= {name for name, _ in programs}
    assert [program for program, times in Counter(programs).items() if times > 1] == []


def _of_jax(name: str) -> bool:
    plain = name.removeprefix("jit(").removesuffix(")")
    return hasattr(jax.lax, plain) or hasattr(jax.numpy, plain)
