"""The store of uploaded files, in a folder of the operator's: streamed to disk, and from it.

A file has an id, a name that only people read, and its bytes, which lie under a name of our own:
nothing that a client writes is ever a path. While it comes it is a `.part`; it becomes a file in
one step, when all of it is there, and what a killed server left half is swept when the folder is
opened. Bytes are looked at on their way in, so that a request that names a file that is no text is
refused at once. Above: `routes` (endpoints), `chat_model` and `jobs`; beside: `uploads`, and
`roots`, where documents lie that were not uploaded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

from notepad_jax.serve.documents.refusals import disk, full, no_file, too_large
from notepad_jax.serve.documents.roots import DocumentRoots, is_address
from notepad_jax.serve.http.decoding import Decoding, FileText, NotText, unreadable
from notepad_jax.serve.http.errors import Refusal, bad, shown
from notepad_jax.telemetry.identity import sync, write_all

LARGEST = 8 << 30  # bytes of a file
BLOCK = 1 << 20  # bytes that are written, and read, at a time
LONGEST_NAME = 200  # characters
PURPOSES = ("user_data", "assistants")  # clients name either; all files are documents
OURS = "file-"  # ids that the server gives begin so
_CARD = re.compile(r"[0-9a-f]{32}\.json")
_SPACES = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000]")  # of all writings
_MADE = re.compile(r"[0-9a-f]{32}\.(json|data|part)")  # names that we give

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A stored file, complete. `flaw` says why its bytes are no text; None: they are."""

    id: str
    filename: str
    bytes: int
    created_at: int  # seconds since 1970
    digest: str  # of the bytes
    data: str  # the name under which they lie
    flaw: str | None
    purpose: str = PURPOSES[0]

    def card(self) -> dict[str, Any]:
        """Returns OpenAI's file object."""
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "filename": self.filename, "purpose": self.purpose, "status": "processed",
            "status_details": self.flaw,
        }  # fmt: skip


class Arriving:
    """An upload on its way to disk, block by block; `Files.arriving` makes it."""

    def __init__(self, path: Path, most: int = LARGEST) -> None:
        """`most`: bytes that there may be."""
        self.path, self.size, self.flaw = path, 0, None
        self._most, self._held = most, bytearray()
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.blake2b(digest_size=16)
        self._decoding = Decoding()

    async def add(self, block: bytes) -> None:
        """Takes the next bytes. Refusal: 413 where there are too many, 507 for a full disk."""
        if self.size + len(self._held) + len(block) > self._most:
            raise too_large(self._most)
        self._held += block
        if len(self._held) >= BLOCK:
            await self._flush()

    async def end(self) -> None:
        """Writes what is left; nothing can be added then."""
        await self._flush(final=True)
        self._file.close()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file, and removes it if it was not renamed."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    async def _flush(self, final: bool = False) -> None:
        data, self._held = bytes(self._held), bytearray()
        await in_thread(self._write, data, final)

    def _write(self, data: bytes, final: bool) -> None:
        with disk():
            write_all(self._file, data)
        self._digest.update(data)
        if self.flaw is None:
            self.flaw = self._problem(data, final)
        self.size += len(data)

    def _problem(self, data: bytes, final: bool) -> str | None:
        try:
            self._decoding.add(data, final)
        except NotText as why:
            return str(why)
        return None


class Files:
    """The store of files; owns a folder, which no other server may use meanwhile; use as `with`.

    Without one it is temporary. `places` has documents that were not uploaded. Raises ValueError
    for a folder that cannot be used, or that another server has.
    """

    def __init__(self, folder: Path | None = None, places: DocumentRoots | None = None) -> None:
        self._places = places or DocumentRoots()
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="notepad_files_")
        self.folder = folder or Path(self._temporary.name)
        self._files = self.folder / "files"
        try:
            self._files.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = (self.folder / "lock").open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._known = {one.id: one for one in self._found()}
            self._sweep()
        except BlockingIOError:
            self._lock.close()
            raise ValueError(
                f"another server keeps its files in {folder}; give this one another --files"
            ) from None
        except OSError as error:
            raise ValueError(
                f"files cannot be kept in {folder} ({error.strerror}); give another --files"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _found(self) -> Iterator[StoredFile]:
        for path in self._files.iterdir():
            if not _CARD.fullmatch(path.name):
                continue
            try:
                one = StoredFile(**json.loads(path.read_text("utf-8")))
                if self._data(one).stat().st_size == one.bytes:
                    yield one
            except (FileNotFoundError, ValueError, TypeError):
                continue  # it is swept

    def _sweep(self) -> None:
        """Removes what this server made and did not end; what others put there stays."""
        wanted = {one.data for one in self._known.values()}
        wanted |= {self._card(one.id).name for one in self._known.values()}
        for path in self._files.iterdir():
            if _MADE.fullmatch(path.name) and path.name not in wanted:
                path.unlink()

    # ------------------------------------------------------------ what is there

    def all(self) -> list[StoredFile]:
        """Returns every file, the newest first."""
        return sorted(self._known.values(), key=lambda one: (-one.created_at, one.id))

    def get(self, id: str) -> StoredFile:
        """Returns a file by its id, or the name that it was put under; else Refusal (404)."""
        try:
            return self._known[id]
        except KeyError:
            raise no_file(id) from None

    def document(self, id: str, param: str) -> FileText:
        """Returns a file to be read, by its id, or where it lies elsewhere by its address; Refusal,
        which names `param`, if it is no text."""
        if is_address(id):
            return self._places.document(id, param)
        try:
            one = self.get(id)
        except Refusal as refusal:
            refusal.error["param"] = param
            raise
        if one.flaw is not None:
            raise unreadable(id, one.flaw, param)
        return FileText(id, one.digest, functools.partial(_blocks, id, self._data(one)))

    def path(self, id: str) -> Path:
        """Returns where a file's bytes lie."""
        return self._data(self.get(id))

    def delete(self, id: str) -> None:
        """Deletes a file; a reader that has it open reads it to its end."""
        one = self.get(id)
        del self._known[id]
        self._card(id).unlink(missing_ok=True)
        self._data(one).unlink(missing_ok=True)

    # ------------------------------------------------------------ what comes

    def arriving(self, most: int = LARGEST, said: int = 0) -> Arriving:
        """Returns a new upload, to be closed; one that was not `keep`t is removed then.

        `said`: bytes that are announced; Refusal (413, 507) if they will not do.
        """
        if said > most:
            raise too_large(most)
        with disk():
            free = shutil.disk_usage(self._files).free
            if said > free:
                raise full(f"{said:,} bytes are announced and {free:,} are free")
            return Arriving(self._files / f"{secrets.token_hex(16)}.part", most)

    async def keep(
        self, coming: Arriving, filename: str, id: str | None = None, purpose: str = PURPOSES[0]
    ) -> StoredFile:
        """Stores a complete upload as a file, under `id` or one of the server's own.

        Another one that had the id is gone then.
        """
        id = id or OURS + secrets.token_hex(12)
        one = StoredFile(
            id, filename, coming.size, int(time.time()), coming.digest,
            f"{secrets.token_hex(16)}.data", coming.flaw, purpose,
        )  # fmt: skip
        beside = self._files / f"{secrets.token_hex(16)}.part"
        try:
            # The disk is waited for in a thread; names are given at once, with no task in between.
            await in_thread(_on_disk, coming.path, beside, one)
            with disk():
                os.rename(coming.path, self._data(one))
                os.replace(beside, self._card(id))
        except BaseException:
            beside.unlink(missing_ok=True)
            self._data(one).unlink(missing_ok=True)
            raise
        before, self._known[id] = self._known.get(id), one
        if before is not None:
            self._data(before).unlink(missing_ok=True)
        return one

    def _data(self, one: StoredFile) -> Path:
        return self._files / one.data

    def _card(self, id: str) -> Path:
        return self._files / f"{hashlib.blake2b(id.encode(), digest_size=16).hexdigest()}.json"


def _blocks(id: str, path: Path) -> Iterator[bytes]:
    """Yields a file's bytes; Refusal if it was deleted in the meantime."""
    try:
        file = path.open("rb", buffering=0)
    except FileNotFoundError:
        raise no_file(id) from None
    with file:
        while block := file.read(1 << 16):
            yield block


# ---------------------------------------------------------------- names


def name_of(text: str, param: str) -> str:
    """Returns a file's name without the folders before it; Refusal for one that is none."""
    name = text.replace("\\", "/").rpartition("/")[2]
    plain = _SPACES.sub(" ", name)  # Python takes no other for printable
    if not plain.isprintable() or not 0 < len(name) <= LONGEST_NAME or name in (".", ".."):
        raise bad(
            param, f"{shown(text)} is no name of a file; use 1 to {LONGEST_NAME} printable "
            f"characters"
        )  # fmt: skip
    return name


def put_name(text: str) -> str:
    """Returns the name that a file is put under, which is its id; else Refusal."""
    if name_of(text, "name") != text:
        raise bad("name", f"{shown(text)} is a path; a file's name has no / or \\")
    if text.startswith(OURS):
        raise bad("name", f"names that begin with {OURS} are the server's own; use another")
    return text


# ---------------------------------------------------------------- the disk


def _on_disk(data: Path, card: Path, one: StoredFile) -> None:
    """Writes the card of a file that has come; both are on the disk then, under any name."""
    with disk():
        card.write_text(json.dumps(dataclasses.asdict(one)), "utf-8")
        sync(data)
        sync(card)


async def in_thread(work: Callable[..., T], *about: Any) -> T:
    """As asyncio.to_thread; but a cancelled caller goes on only when the thread has ended."""
    running = asyncio.ensure_future(asyncio.to_thread(work, *about))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        # Nobody waits for its exception any more; unseen, asyncio would say it on stderr.
        running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        await asyncio.wait([running])
        raise
