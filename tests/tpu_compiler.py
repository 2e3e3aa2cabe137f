"""The marks of tests that compile for TPUs: slow, since `make test` does not install libtpu."""

from collections.abc import Callable

import pytest

from pallas_kernels import aot

# Of a whole file: `pytestmark = tpu_compiler.MARKS`. Skipped and not slow, no CI would run them.
MARKS = [
    pytest.mark.slow,
    pytest.mark.skipif(aot.missing_compiler() != "", reason=aot.missing_compiler()),
]


def needed(test: Callable) -> Callable:
    """Marks a test that needs libtpu."""
    for mark in MARKS:
        test = mark(test)
    return test
