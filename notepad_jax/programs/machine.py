"""What a program needs of its process before it begins, however it was called.

Above: cli, `api` and `reader`; below: `compiled` and the kernels.
"""

from __future__ import annotations

import logging

from ml_collections import ConfigDict

import pallas_kernels
from notepad_jax.programs import compiled


def quiet() -> None:
    """orbax and grain talk at every step; what they log as an error they raise as well."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)


def prepared(config: ConfigDict) -> None:
    """Compiled programs are kept, and the kernels are those of the config.

    Raises ValueError for kernels that there are not.
    """
    quiet()
    compiled.keep()
    pallas_kernels.use(config.get("kernels", "auto"))
