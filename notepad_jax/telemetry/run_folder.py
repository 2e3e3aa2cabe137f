"""The folder of a run: made once, locked by one process, and removed if the start fails.

Training, evaluation and the quick start write into a folder that they opened here, called from the
command line and from Python alike. A folder is begun by making it, which only one of two starts
can; it is held by a lock on the file `.lock`, which names the holder. The lock is the kernel's
(flock): it ends with its process, however that ends, so a crash leaves nothing locked, and what
the file says is read only while a process holds it. Children that are started as programs do not
inherit it; forked ones would.

How far a lock reaches is the file system's business: all processes of a machine on a local disk;
all machines on NFS and on Lustre mounted with `flock`; the processes of each machine alone where
a mount keeps locks to itself (`nolock`, `local_lock`, `localflock`, buckets through FUSE). A file
system without locks is refused. Above: the programs and cli.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

LOCK = ".lock"
GIVEN = "given"  # a folder for what a program gave a run: rows as task files
NAME_BYTES = 255  # of one name, in the usual file systems

# What the caller holds already: `quickstart` trains in its own folder. A context variable and
# not a global one, so that another thread is another holder and meets the lock.
_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


# Folders that blocks which still run have begun. By objects: paths are compared in Python, and
# among them a list that other threads change meanwhile misses one.
_begun_here: dict[object, Path] = {}


class Exists(ValueError):
    """The folder that a run should begin in is there already."""


@contextlib.contextmanager
def opened(folder: Path, resume: bool) -> Iterator[Path]:
    """Locks `folder` for the block: makes it, or with `resume` takes the one that is there.

    If the block fails before a step or a line of metrics or readings is on disk, a folder that
    was made here is removed again, with the parents that were made for it; one that was there
    never is. Where the caller holds `folder` already the block is a part of that.

    Raises Exists for a folder to begin in that exists, whatever it holds, and ValueError for one
    to resume that does not, that another process holds, or that cannot be locked.
    """
    if folder.resolve() in _held.get():
        yield folder
    elif not resume:
        with _begun(folder):
            yield folder
    elif folder.is_dir():
        with _locked(folder):
            yield folder
    else:
        raise ValueError(f"there is no run {folder} to resume; see the folder {folder.parent}/")


@contextlib.contextmanager
def numbered(folder: Path) -> Iterator[Path]:
    """As `opened` for a new run, in the first of runs/train, runs/train-2, ... that is free."""
    with contextlib.ExitStack() as stack:
        for number in itertools.count(1):
            name = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
            with contextlib.suppress(Exists):
                stack.enter_context(opened(name, resume=False))
                break
        yield name


def plain_name(name: str) -> str:
    """Returns `name` if it can only be the name of a folder right in runs/; else ValueError."""
    size = len(name.encode("utf-8", "surrogateescape"))
    if not name or name[0] in ".-" or set(name) & set("/\\") or not name.isprintable():
        shown = ascii(name if len(name) < 64 else name[:60] + "...")
        raise ValueError(
            f"{shown} is no name for a run; use letters, digits, '-', '_' and '.', and begin with "
            "a letter or digit"
        )
    if size > NAME_BYTES:
        raise ValueError(f"the name of a run has at most {NAME_BYTES} bytes, and this has {size}")
    return name


# ---------------------------------------------------------------- begun, and removed


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[None]:
    # Listed before anything is made: whenever Ctrl-C comes, nothing that we made is forgotten.
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    mine = object()
    _begun_here[mine] = folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
        except FileExistsError:
            made.clear()
            raise Exists(
                f"{folder} exists; choose another name (--name), or go on with it (--resume)"
            ) from None
        with _locked(folder):
            yield
    except BaseException:
        if folder in made:
            _remove(folder, made)
        raise
    finally:
        del _begun_here[mine]


def abandon() -> None:
    """Removes what starts made that have come to nothing: their process ends right now."""
    for folder in list(_begun_here.values()):
        if folder.is_dir() and not _came_to_something(folder):
            shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                folder.parent.rmdir()  # an empty one


def _remove(folder: Path, made: Iterable[Path]) -> None:
    """Removes what a failed start made, unless the run can go on or another process holds it."""
    with contextlib.suppress(OSError, ValueError), _locked(folder):
        if not _came_to_something(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()  # an empty one


def _came_to_something(folder: Path) -> bool:
    """Whether a checkpoint or a line of anything is on disk, with which a run can go on."""
    steps = (path for path in folder.glob("checkpoints/*") if path.name.isdecimal())
    found = (path for path in folder.rglob("*.jsonl") if path.parent != folder / GIVEN)
    lines = (path for path in found if path.stat().st_size)
    return any(steps) or any(lines)


# ---------------------------------------------------------------- held


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / LOCK).open("a+b", buffering=0) as file:
        _lock(folder, file.fileno())
        token = _held.set(_held.get() | {folder.resolve()})
        try:
            yield
        finally:
            _held.reset(token)


def _lock(folder: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 1000, 0).decode("utf-8", "replace").strip()
        raise ValueError(
            f"{folder} is in use by {holder or 'another process'}; wait for it, or stop it"
        ) from None
    except OSError as problem:
        (folder / LOCK).unlink(missing_ok=True)  # of no use there
        raise ValueError(
            f"{folder} cannot be locked ({problem.strerror}), so two processes could damage it; "
            "runs/ may be a link to another disk"
        ) from None
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
            with contextlib.suppress(OSError):  # a full disk is no reason: no program needs it
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
            return
    raise ValueError(f"{folder} was just removed by a start that failed; begin it anew")
