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


@pytest.fixture(autouse=True, scope="module")
def _programs_of_earlier_files_are_let_go():
    """The programs of the files before are dropped when their memory maps have become many."""
    jax = sys.modules.get("jax")
    if jax and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAPS_KEPT:
        jax.clear_caches()
        gc.collect()
    yield
