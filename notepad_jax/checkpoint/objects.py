"""A small object store in a folder, on a disk or in a bucket, with atomic put-if-absent.

Programs that share nothing but a folder agree by `put`: of all that ask for a name one gets it,
and what it put stands until it is replaced or removed on purpose. A bucket does that by the
generation of an object, a disk by a link to a file that is written and synced. (tensorstore's
`if_equal` does both, but on a disk not after a kill: what the killed writer left longer than the
next object stays behind it.) An object is whole or not there, also after a SIGKILL; what a killed
writer leaves on a disk has a name that is never listed.
Neighbour above: `fence`; below: `bucket`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import tensorstore as ts
from etils import epath

from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.hf.storage import first_line
from notepad_jax.telemetry.identity import sync_folder

NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
ABSENT = b"\x02"  # tensorstore's generation of what is not there
T = TypeVar("T")
SECONDS = 120.0  # in which a bucket answers, its client's own retries and all


class Objects:
    """The objects under one folder; any number of processes and threads may use it at a time.

    A name has letters, digits, "_", "-", "." (not first) and at most one "/". Everything raises
    OSError, in one line, where the folder or bucket refuses or does not answer in `seconds`, and
    ValueError for what is no name.
    """

    def __init__(self, folder: str | Path | epath.Path, seconds: float = SECONDS) -> None:
        self.folder = bucket.path(folder)
        self._place: _OnDisk | _InBucket = (
            _InBucket(self.folder, seconds) if bucket.is_bucket(folder) else _OnDisk(self.folder)
        )

    def put(self, name: str, content: bytes) -> bool:
        """Stores `content` if nothing has that name; returns whether it did.

        On a disk it is synced by then. Of several at once exactly one stores. A bucket's client
        asks again where an answer was lost, and may then find its own object: a caller that must
        know whose it is puts something of its own into `content`, and reads what is there.
        """
        with self._one_line(_checked(name), "written"):
            return self._place.put(name, content)

    def replace(self, name: str, content: bytes) -> None:
        """Stores `content` under that name, whatever is there."""
        with self._one_line(_checked(name), "written"):
            self._place.replace(name, content)

    def get(self, name: str) -> bytes | None:
        """Returns what has that name, or None."""
        with self._one_line(_checked(name), "read"):
            return self._place.get(name)

    def parsed(self, name: str, parse: Callable[[bytes], T], mend: str) -> T | None:
        """Returns what `parse` makes of what has that name; None where nothing has it.

        Raises ValueError naming the object, and the mend, where `parse` raises it.
        """
        content = self.get(name)
        try:
            return None if content is None else parse(content)
        except ValueError as problem:
            raise ValueError(f"{self.folder}/{name} {problem}; {mend}") from None

    def names(self, under: str = "") -> list[str]:
        """Returns all names, or those that begin with `under` and "/", sorted."""
        with self._one_line(under, "listed"):
            return sorted(filter(NAME.fullmatch, self._place.names(under)))

    def remove(self, name: str) -> None:
        """Deletes what has that name, if anything has."""
        with self._one_line(_checked(name), "removed"):
            self._place.remove(name)

    @contextlib.contextmanager
    def _one_line(self, name: str, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError) as problem:
            said = getattr(problem, "strerror", None) or first_line(problem).replace("\0", "/")
            raise OSError(f"{self.folder}/{name} cannot be {what}: {said}") from None


# What file systems without hard links say: FAT, and buckets that are mounted.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_LINKS_NEEDED = (
    "its file system has no hard links, by which one of two writers is the first; "
    "give a folder on another, or a bucket by its name (gs://...)"
)


class _OnDisk:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, content: bytes) -> bool:
        path = self._folder / name
        with _written(path, content) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as problem:
                without = problem.errno in _NO_LINKS
                raise OSError(problem.errno, _LINKS_NEEDED) if without else problem from None
        sync_folder(path.parent)
        return True

    def replace(self, name: str, content: bytes) -> None:
        path = self._folder / name
        with _written(path, content) as temporary:
            os.replace(temporary, path)
        sync_folder(path.parent)

    def get(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, under: str) -> list[str]:
        return [
            (Path(where) / name).relative_to(self._folder).as_posix()
            for where, _, names in os.walk(self._folder / under)
            for name in names
        ]

    def remove(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class _InBucket:
    def __init__(self, folder: epath.Path, seconds: float) -> None:
        self._kvstore, self._seconds = bucket.kvstore(folder), seconds

    def put(self, name: str, content: bytes) -> bool:
        stamp = self._answer(self._kvstore.write(name, content, if_equal=ABSENT))
        return bool(stamp.generation)

    def replace(self, name: str, content: bytes) -> None:
        self._answer(self._kvstore.write(name, content))

    def get(self, name: str) -> bytes | None:
        found = self._answer(self._kvstore.read(name))
        return bytes(found.value) if found.state == "value" else None

    def names(self, under: str) -> list[str]:
        asked = ts.KvStore.KeyRange(f"{under}/", f"{under}0") if under else ts.KvStore.KeyRange()
        return [key.decode("utf-8", "replace") for key in self._answer(self._kvstore.list(asked))]

    def remove(self, name: str) -> None:
        self._answer(self._kvstore.write(name, None))

    def _answer(self, asked: ts.Future) -> Any:
        try:
            return asked.result(timeout=self._seconds)
        except TimeoutError:
            raise TimeoutError(f"no answer in {self._seconds:g} s") from None


def sealed(value: Any) -> bytes:
    """Returns an object's content: its JSON in one line, and its SHA-256 in a second."""
    line = (json.dumps(value) + "\n").encode()
    return line + hashlib.sha256(line).hexdigest().encode() + b"\n"


def unsealed(content: bytes) -> Any:
    """Returns what was `sealed`. Raises ValueError for anything else."""
    line, _, digest = content.partition(b"\n")
    if hashlib.sha256(line + b"\n").hexdigest().encode() != digest.strip():
        raise ValueError("is cut off, or was changed")
    return json.loads(line)


@contextlib.contextmanager
def _written(path: Path, content: bytes) -> Iterator[Path]:
    """The content in a synced file beside `path`, of a name of its own, that leaves afterwards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _checked(name: str) -> str:
    if NAME.fullmatch(name) is None:
        raise ValueError(
            f"{name!r} is no name of an object: letters, digits, _, - and . (not first), "
            f"and at most one /"
        )
    return name
