"""Error responses about files: a full disk, one that is not there, one that is too large."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from notepad_jax.serve.http.errors import Refusal, shown

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def disk() -> Iterator[None]:
    """Turns the error of a full disk into a Refusal."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise full(error.strerror) from None


def full(why: str) -> Refusal:
    """Returns the Refusal (507) for a full disk."""
    return Refusal(
        507, f"the server's disk has no room for this ({why}); delete files that are not needed",
        None, "insufficient_storage", "server_error", {"Connection": "close"},
    )  # fmt: skip


def no_file(id: str) -> Refusal:
    """Returns the Refusal (404) for a file that is not there."""
    message = f"there is no file {shown(id)}; /v1/files lists those that are here"
    return Refusal(404, message, "file_id", "file_not_found")


def too_large(most: int) -> Refusal:
    """Returns the Refusal (413) for a file of more than `most` bytes."""
    size = f"{most >> 30} GB" if most >= 1 << 30 else f"{most >> 20} MB"
    return Refusal(413, f"more than {size} are not taken", None, "request_too_large",
                   headers={"Connection": "close"})  # fmt: skip
