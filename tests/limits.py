"""A disk without room, for whoever is not root: files that cannot grow beyond some bytes."""

import contextlib
import resource
from pathlib import Path


@contextlib.contextmanager
def largest_file(size: int):
    """Writing beyond `size` bytes of a file fails (EFBIG), in Python and in C++ alike.

    As on a full disk what fits of a write is written. The limit is the process's, and only
    regular files have it.
    """
    old, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit_files(size)
    try:
        yield
    finally:
        limit_files(old)


def limit_files(size: int) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def content(folder: Path) -> dict[str, bytes]:
    """What lies in a folder, all the way down; the lock is nobody's content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
        if path.name != ".lock"
    }
