"""Settings that every test shares: annotations are executed, nothing compiles for long."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

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
