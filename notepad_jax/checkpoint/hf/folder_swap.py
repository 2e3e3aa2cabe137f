"""Atomic folder replacement: a folder appears, or replaces an older one, by one rename.

`new_folder` gives a temporary sibling to write into. If all goes well it becomes the target
in one step; whatever stops the block, the target is what it was, and what a kill leaves
behind is hidden and swept up by the next call. Only exported policies and adapters are ever
replaced. Neighbours above: `writing`, and the programs that fill a folder with a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from notepad_jax.checkpoint.hf.storage import ADAPTER_CONFIG, CONFIG, StoreProblem
from notepad_jax.telemetry.identity import sync_folder


@contextlib.contextmanager
def new_folder(
    target: str | Path, needed_bytes: int = 0, overwrite: bool = False
) -> Iterator[Path]:
    """A context with a temporary folder that becomes `target` by one rename if it succeeds.

    Whatever stops the block, `target` is what it was. An exception leaves nothing behind; a
    kill leaves a hidden sibling, which the next call for this target removes. Raises
    StoreProblem for a target that is not empty (with `overwrite`: that is no export), too
    little space, or a folder that cannot be written.
    """
    folder = Path(target).absolute()
    _refuse_target(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        free = shutil.disk_usage(folder.parent).free
        if free < needed_bytes:
            raise StoreProblem(_full(folder, needed_bytes, free))
        mark = f".{folder.name}.{socket.gethostname()}.{os.getpid()}."
        temporary = Path(tempfile.mkdtemp(prefix=mark, dir=folder.parent))
    except OSError as problem:
        raise StoreProblem(f"{folder} cannot be written: {problem}") from None
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's are private
        sync_folder(temporary)
        _refuse_target(folder, overwrite)  # another process may have been faster
        _take_name(temporary, folder)
    except Exception as problem:
        # Libraries that write with C++ wrap the errno into a message.
        full = isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(problem):
            free = shutil.disk_usage(folder.parent).free
            raise StoreProblem(_full(folder, needed_bytes, free)) from None
        if isinstance(problem, OSError):
            raise StoreProblem(f"{folder} cannot be written: {problem}") from None
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _refuse_target(folder: Path, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise StoreProblem(f"{folder} exists and is no folder; choose another destination")
    if not any(folder.iterdir()):
        return
    if not overwrite:
        raise StoreProblem(f"{folder} is not empty; choose another folder, or --overwrite")
    if not _is_export(folder):
        raise StoreProblem(
            f"{folder} holds something that is no exported policy; choose another folder"
        )


def _is_export(folder: Path) -> bool:
    """Whether its config is a model's or adapters': a run has one, too, and is never replaced."""
    return _says(folder / CONFIG, "model_type") or _says(folder / ADAPTER_CONFIG, "peft_type")


def _says(config: Path, key: str) -> bool:
    try:
        return key in json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _full(folder: Path, needed: int, free: int) -> str:
    needs = f"needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free"
    return f"{folder}: the disk is full: it {needs}; nothing was written"


def _take_name(temporary: Path, folder: Path) -> None:
    """Renames `temporary` to `folder`; what was there is left under the temporary name."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(temporary, folder)  # an empty folder may be replaced
    elif not _exchange(temporary, folder):
        # Without an exchanging rename there is a moment in which the name is free.
        old = temporary.with_name(temporary.name + ".old")
        os.rename(folder, old)
        try:
            os.rename(temporary, folder)
        except OSError:
            os.rename(old, folder)
            raise
        shutil.rmtree(old, ignore_errors=True)
    sync_folder(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step (renameat2, Linux); False where that cannot be done."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        call = libc.renameat2
    except AttributeError:
        return False
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(swap)) == 0


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed exports to `folder` left, if their process was on this host."""
    mark = f".{folder.name}.{socket.gethostname()}."
    for path in folder.parent.iterdir():
        found = re.fullmatch(re.escape(mark) + r"(\d+)\.[^.]+", path.name)
        if found and not _alive(int(found.group(1))):
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
