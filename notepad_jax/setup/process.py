"""Process set-up: what a program needs of its process, however it was called.

Above: cli, `api` and `reader`; below: `compiled` and the kernels.
"""

from __future__ import annotations

import gc
import glob
import logging
from importlib.metadata import entry_points

import jax

import pallas_kernels
from notepad_jax.setup import compiled
from notepad_jax.setup.config.whole import Config, Starter
from pallas_kernels import aot

RARELY = 5_000  # objects more than before: then python looks for garbage; its own rule is 700
CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")  # what a TPU's driver shows


def without_chips() -> None:
    """Limits jax to CPUs where nothing else can be found.

    The extra `[aot]` brings libtpu to compile for TPUs that are not here; asked for chips, it
    prints what it misses in five lines. jax has asked for TPUs by name where it saw one.
    """
    chosen = jax.config.jax_platforms
    if not chosen and not entry_points(group="jax_plugins") and not any(map(glob.glob, CHIPS)):
        jax.config.update("jax_platforms", "cpu")


def quiet() -> None:
    """Silences the logs of orbax and grain; what they log as an error they raise as well."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def prepared(config: Config | Starter | None) -> None:
    """Sets up the process: compilation cache, and the kernels that the config names.

    Python looks for garbage less often: jax does work of its own each time, and that was 4% of
    an evaluation's CPU seconds. A program that has switched it off (0) keeps it so.

    Raises ValueError for kernels that there are not.
    """
    quiet()
    without_chips()
    aot.keep_small_tiles()
    compiled.keep()
    if first := gc.get_threshold()[0]:
        gc.set_threshold(max(first, RARELY))
    pallas_kernels.use(getattr(config, "kernels", "auto"))
