"""Settings that every test shares: annotations are executed, nothing compiles for long."""

import os
import pathlib

ROOT = pathlib.Path(__file__).parents[1]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The processes of a test run, and those that tests start, compile each program once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

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
