"""Settings that every test shares: annotations are executed, nothing compiles for long."""

import gc
import os
import pathlib
import signal
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Each program is compiled once for all processes of a test run, and for the next run. An entry that
# another process is still writing cannot be unpacked, and jax compiles it again.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A shell starts `make test &` with Ctrl-C ignored, and then nobody below can be interrupted.
signal.signal(signal.SIGINT, signal.default_int_handler)

import jaxtyping  # noqa: E402

# Array annotations of our public functions are checked while the tests run.
jaxtyping.install_import_hook(
    [
        "notepad_jax.model",
        "notepad_jax.engine.launches",
        "notepad_jax.engine.sampler",
        "notepad_jax.grpo.objective",
        "pallas_kernels",
    ],
    "beartype.beartype",
)

# Each compiled program takes some 16 memory maps, and Linux gives a process 65,530 of them
# (vm.max_map_count). At the end of a run of all tests jaxlib asked for one more and died.
MAPS = pathlib.Path("/proc/self/maps")
MAPS_KEPT = 20_000


def pytest_runtest_logreport(report):
    """A failure is told at once: a run that is cut off at its time prints no summary.

    Here the processes that test are silent, and the one that reports them is not.
    """
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)  # a process that died has none
        told = (crash.message if crash else report.longreprtext).strip().splitlines()[:1]
        print(f"\nFAILED {report.nodeid} ({report.when}):", *told, file=sys.stderr, flush=True)


@pytest.fixture(autouse=True, scope="module")
def _programs_of_earlier_files_are_let_go():
    """The programs of the files before are dropped when their memory maps have become many."""
    jax = sys.modules.get("jax")
    if jax and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAPS_KEPT:
        jax.clear_caches()
        gc.collect()
    yield
