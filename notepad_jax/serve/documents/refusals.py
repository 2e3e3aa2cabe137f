"""Why a file is not taken or not given: as clients are told."""

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
    """A 507."""
    return Refusal(
        507, f"the server's disk has no room for this ({why}); delete files that are not needed",
        None, "insufficient_storage", "server_error", {"Connection": "close"},
    )  # fmt: skip


def no_file(id: str) -> Refusal:
    """A 404."""
    message = f"there is no file {shown(id)}; /v1/files lists those that are here"
    return Refusal(404, message, "file_id", "file_not_found")


def too_large(most: int) -> Refusal:
    """A 413."""
    size = f"{most >> 30} GB" if most >= 1 << 30 else f"{most >> 20} MB"
    return Refusal(413, f"more than {size} are not taken", None, "request_too_large",
                   headers={"Connection": "close"})  # fmt: skip
