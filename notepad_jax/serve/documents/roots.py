"""Documents by address: files and objects that lie where clients may name them.

The operator allows folders and buckets; an address is a path or a URL below one of them, and a
document where it leads there. What leads anywhere else (`..`, a link out of the folder, another
folder whose name begins with the same letters) gets the reply of what is not there: no client sees
what else this machine has. A file is opened step by step without following a link, so a link that
is put in its way meanwhile leads nowhere. A document is known by size, time and place of its
bytes, or by the bucket's generation, and a reading that meets another one ends. Above: `store`;
below: data.objects and `decoding`.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from notepad_jax.data.objects import BucketListing, Changed
from notepad_jax.data.sources import is_remote
from notepad_jax.serve.http.decoding import Decoding, FileText, NotText, unreadable
from notepad_jax.serve.http.errors import Refusal, shown
from notepad_jax.text.token_blocks import well_formed

BUCKETS = ("gs://", "s3://", "memory://")  # the last lasts as long as this process
BLOCK = 1 << 16  # bytes that are read of a file at a time
LONGEST = 4096  # characters of an address

log = logging.getLogger("notepad_jax.serve")


def is_address(id: str) -> bool:
    """Whether an id is an address, and no file's that was sent: those have no slash."""
    return "/" in id


class DocumentRoots:
    """The allowed folders and buckets. Raises ValueError for one that cannot be allowed."""

    def __init__(self, allowed: Sequence[str] = ()) -> None:
        self._all = [_Bucket(one) if is_remote(one) else _Folder(one) for one in allowed]

    def document(self, address: str, param: str) -> FileText:
        """Returns a document to be read; Refusal, which names `param`, if there is none there."""
        address = well_formed(address)
        plain = len(address) <= LONGEST and "\0" not in address
        if plain and not {".", ".."}.intersection(address.split("/")):
            for place in self._all:
                found = place.find(address)
                if found is None:
                    continue
                text, first = found
                try:
                    Decoding().add(first)
                except NotText as why:
                    raise unreadable(address, str(why), param) from None
                return text
        raise Refusal(
            404, f"there is no document {shown(address)} that clients may name; they lie below "
            f"what the operator allows (notepad-jax serve --documents)", param,
            "document_not_found",
        )  # fmt: skip


def changed(address: str) -> Refusal:
    """Returns the Refusal (409) for a document that is not what it was."""
    return Refusal(
        409, f"the document {shown(address)} was changed or removed while it was read; begin the "
        f"reading again", "file_id", "document_changed",
    )  # fmt: skip


class _Folder:
    """A folder of this machine, with everything below it."""

    def __init__(self, folder: str) -> None:
        self._root = os.path.realpath(folder)
        if not folder or not os.path.isdir(self._root):
            raise ValueError(f"--documents {folder!r} is no folder; give one that is there")
        self._names = (Path(folder).absolute().parts, Path(self._root).parts)

    def find(self, address: str) -> tuple[FileText, bytes] | None:
        found = self._opened(address)
        if found is None:
            return None
        file, seen = found
        with os.fdopen(file, "rb", buffering=0) as opened:
            first = opened.read(BLOCK)
        blocks = functools.partial(self._blocks, address, seen)
        return FileText(address, seen, blocks), first

    def _blocks(self, address: str, seen: str) -> Iterator[bytes]:
        found = self._opened(address)
        if found is None:
            raise changed(address)
        with os.fdopen(found[0], "rb", buffering=0) as file:
            more = True
            while more:
                block = file.read(BLOCK)
                state = os.fstat(file.fileno())
                if _seen(state) != seen or not state.st_nlink:
                    raise changed(address)
                more = bool(block)
                if more:
                    yield block

    def _opened(self, address: str) -> tuple[int, str] | None:
        """A descriptor of the file at an address, and what it is known by."""
        parts = PurePosixPath(address).parts
        for name in self._names:
            if parts[: len(name)] == name and len(parts) > len(name):
                real = Path(os.path.realpath(Path(self._root, *parts[len(name) :])))
                if real != Path(self._root) and real.is_relative_to(self._root):
                    return _file(self._root, real.relative_to(self._root).parts)
        return None


def _file(root: str, parts: Sequence[str]) -> tuple[int, str] | None:
    """Opens a regular file below a folder, following no link; None if there is none to be read."""
    step = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        at = os.open(root, step)
        try:
            for part in parts[:-1]:
                below = os.open(part, step, dir_fd=at)
                os.close(at)
                at = below
            # To open a pipe would be to wait for its other end.
            file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        finally:
            os.close(at)
    except OSError:
        return None
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode):
        os.close(file)
        return None
    return file, _seen(state)


def _seen(state: os.stat_result) -> str:
    return f"{state.st_ino}:{state.st_size}:{state.st_mtime_ns}"


class _Bucket:
    """All objects of a bucket whose names begin alike."""

    def __init__(self, url: str) -> None:
        if not url.startswith(BUCKETS):
            raise ValueError(f"--documents {url} is no folder and no bucket; use gs:// or s3://")
        try:
            self._objects = BucketListing(url)
        except ValueError as problem:
            raise ValueError(f"--documents {problem}") from None

    def find(self, address: str) -> tuple[FileText, bytes] | None:
        below = f"{self._objects.url}/"
        key = address.removeprefix(below)
        if not address.startswith(below) or not key:
            return None
        try:
            found = self._objects.look(key)
        except ValueError as problem:
            raise _unreachable(address, problem) from None
        if found is None:
            return None
        generation, first = found
        blocks = functools.partial(self._blocks, address, key, generation)
        return FileText(address, generation, blocks), first

    def _blocks(self, address: str, key: str, generation: str) -> Iterator[bytes]:
        try:
            yield from self._objects.blocks(key, generation)
        except Changed:
            raise changed(address) from None
        except ValueError as problem:
            raise _unreachable(address, problem) from None


def _unreachable(address: str, problem: Exception) -> Refusal:
    log.error("a document could not be read: %s", problem)
    return Refusal(
        502, f"the document {shown(address)} cannot be read now; the server's log says why",
        "file_id", "document_unreachable", "server_error",
    )  # fmt: skip
