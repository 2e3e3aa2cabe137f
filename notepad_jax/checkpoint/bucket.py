"""Paths in a bucket (gs://...) over tensorstore, for orbax and for this room.

Arrays go through tensorstore anyway; what orbax writes beside them (JSON, markers) goes through
etils' paths, which ask fsspec for a file system. The usual one for buckets brings a second client
with its own dependencies and credentials, so `path` registers this one: the same tensorstore
driver, which knows a TPU host's service account. (Where TensorFlow is installed, etils goes
through that instead.) A bucket has objects, whole or not there at all, and no folders: a folder is
what some object's name begins with, making one does nothing, and there is no renaming.
Neighbour above: `commit`, which says what a step is there.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import tensorstore as ts
from etils import epath

SCHEME = "gs://"


def is_bucket(folder: Any) -> bool:
    """Whether `folder`, a path or its text, lies in a bucket."""
    return str(folder).startswith(SCHEME)


def path(folder: str | Path | epath.Path) -> Path | epath.Path:
    """Returns the place `folder`, absolute on a disk, to be used like a pathlib.Path.

    Raises ValueError for a URL that is not a bucket's.
    """
    if not is_bucket(folder):
        if "://" in str(folder):
            raise ValueError(f"{folder}: checkpoints lie on a disk or in a bucket, {SCHEME}...")
        return in_utf8(Path(folder).absolute())
    fsspec.register_implementation("gcs", FileSystem, clobber=True)
    return epath.Path(folder)


def in_utf8(folder: Path) -> Path:
    """Returns a folder; raises ValueError for a path that is no UTF-8: tensorstore opens none."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the path {ascii(str(folder))} is not UTF-8, by which weights are read and written; "
            f"rename its folders, or work in another"
        ) from None
    return folder


def on_disk(folder: Path) -> dict[str, str]:
    """Returns tensorstore's spec of a local folder; raises as `in_utf8` does."""
    return {"driver": "file", "path": f"{in_utf8(folder.resolve())}/"}  # .. is refused there


def kvstore(folder: str | Path | epath.Path) -> ts.KvStore:
    """Opens all that lies under `folder`, in a bucket or on a disk, by names relative to it."""
    place = path(folder)
    if is_bucket(folder):
        return ts.KvStore.open(f"{place}/").result()
    return ts.KvStore.open(on_disk(place)).result()


def names(folder: str | Path | epath.Path) -> list[str]:
    """Returns the names of all objects under `folder`, relative to it, sorted."""
    return sorted(key.decode("utf-8", "replace") for key in kvstore(folder).list().result())


def remove(folder: str | Path | epath.Path) -> None:
    """Deletes all objects under `folder`."""
    kvstore(folder).delete_range(ts.KvStore.KeyRange()).result()


class NewObject(io.BytesIO):
    """A new object: it is there, whole, once this is closed without a problem."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def close(self) -> None:
        if self.closed:
            return
        content = self.getvalue()
        super().close()  # before it can fail: the garbage collector closes it once more
        with _refused(self._url, "written"):
            _at(self._url).write("", content).result()

    def __exit__(self, kind: Any, problem: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            super().close()


class FileSystem(fsspec.AbstractFileSystem):
    """The file system of fsspec over tensorstore's buckets; what etils' paths ask of one."""

    protocol = "gs"
    cachable = False

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BytesIO:
        if mode == "rb":
            with _refused(path, "read"):
                found = _at(path).read("").result()
            if found.state != "value":
                raise FileNotFoundError(f"there is no {SCHEME}{path}")
            return io.BytesIO(found.value)
        if mode == "wb":
            return NewObject(path)
        raise ValueError(f"{SCHEME}{path} cannot be opened with mode {mode!r}: objects are whole")

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with _refused(path, "read"):
            if "/" in path and _at(path).read("", byte_range=slice(0, 0)).result().state == "value":
                return {"name": path, "size": None, "type": "file"}
            if names(SCHEME + path):
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(f"there is no {SCHEME}{path}")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        kinds: dict[str, str] = {}
        for name in names(SCHEME + path):
            first, below, _ = name.partition("/")
            kinds[first] = "directory" if below else kinds.get(first, "file")
        if not kinds:
            return [self.info(path)] if detail else [self.info(path)["name"]]
        found = [{"name": f"{path}/{n}", "size": None, "type": k} for n, k in kinds.items()]
        return found if detail else [entry["name"] for entry in found]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        pass

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        path = self._strip_protocol(path)
        self.info(path)  # FileNotFoundError
        _at(path).write("", None).result()
        if recursive:
            remove(SCHEME + path)


@contextlib.contextmanager
def _refused(path: str, what: str) -> Iterator[None]:
    """Raises OSError, in one line, for what tensorstore says of a bucket that refuses."""
    try:
        yield
    except ValueError as problem:
        said = str(problem).splitlines()[0]
        raise OSError(f"{SCHEME}{path} cannot be {what}: {said}") from None


def _at(path: str) -> ts.KvStore:
    """Opens one object, by the empty name."""
    return ts.KvStore.open(f"{SCHEME}{path}").result()
