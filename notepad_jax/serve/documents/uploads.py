"""Uploads: a large file in parts, which may come side by side, in any order, and again.

They live as long as the server and at most an hour: half an upload is nothing. Above:
`routes`; below: `store`, which takes the parts' bytes and, when they are complete, the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from notepad_jax.serve.documents.refusals import too_large
from notepad_jax.serve.documents.store import BLOCK, LARGEST, Arriving, Files, StoredFile, in_thread
from notepad_jax.serve.http.errors import Refusal, bad, shown

LARGEST_PART = 64 << 20  # bytes
LIFETIME = 3600  # seconds
MOST = 256  # uploads that are known; of those that have ended the oldest make room
ENDED = ("completed", "cancelled")
MOST_PARTS = 8192  # of one upload


@dataclasses.dataclass
class Upload:
    """One upload. `file` is there when it is complete."""

    id: str
    filename: str
    bytes: int  # that all parts have together
    purpose: str
    created_at: int
    status: str = "pending"
    parts: dict[str, Arriving] = dataclasses.field(default_factory=dict)
    file: StoredFile | None = None

    def card(self) -> dict[str, Any]:
        """Returns OpenAI's upload object."""
        file = {"file": self.file.card()} if self.file else {}
        return {
            "id": self.id, "object": "upload", "bytes": self.bytes, "purpose": self.purpose,
            "filename": self.filename, "created_at": self.created_at, "status": self.status,
            "expires_at": self.created_at + LIFETIME,
        } | file  # fmt: skip

    def end(self, status: str) -> None:
        """Drops the parts."""
        self.status = status
        for part in self.parts.values():
            part.close()
        self.parts.clear()


class Uploads:
    """The uploads under way, by id."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._known: dict[str, Upload] = {}

    def begin(self, filename: str, size: int, purpose: str) -> Upload:
        """Returns a new upload; Refusal where it is too large, or too many are under way."""
        self.expire()
        if size > LARGEST:
            raise too_large(LARGEST)
        if len(self._known) >= MOST:
            ended = next((one for one in self._known.values() if one.status in ENDED), None)
            if ended is None:
                raise Refusal(
                    429, f"{MOST} uploads are under way; complete or cancel those that are not "
                    f"needed, or wait until they are an hour old", None, "rate_limit_exceeded",
                    "rate_limit_error", {"Retry-After": "60"},
                )  # fmt: skip
            del self._known[ended.id]
        id = f"upload_{secrets.token_hex(12)}"
        one = self._known[id] = Upload(id, filename, size, purpose, int(time.time()))
        return one

    def get(self, id: str, pending: bool = True) -> Upload:
        """Returns an upload; Refusal if there is none, or it is not `pending`: 409 for a while."""
        one = self._known.get(id)
        if one is None or one.created_at + LIFETIME <= time.time():
            message = f"there is no upload {shown(id)}, or it is over an hour old; begin it again"
            raise Refusal(404, message, "upload_id", "upload_not_found")
        if pending and one.status == "completing":
            raise Refusal(
                409, f"the upload {id} is being put together; ask again later", "upload_id",
                "upload_completing", headers={"Retry-After": "1"},
            )  # fmt: skip
        if pending and one.status != "pending":
            raise bad("upload_id", f"the upload {id} is {one.status}; begin another")
        return one

    def add(self, upload: Upload, coming: Arriving) -> dict[str, Any]:
        """Keeps a part that has come, all of it; returns OpenAI's part object."""
        self.get(upload.id)  # it may have ended meanwhile
        if len(upload.parts) >= MOST_PARTS:
            raise bad("data", f"an upload has at most {MOST_PARTS} parts; use larger ones")
        total = sum(part.size for part in upload.parts.values()) + coming.size
        if total > LARGEST:
            raise too_large(LARGEST)
        id = f"part_{secrets.token_hex(12)}"
        upload.parts[id] = coming
        return {"id": id, "object": "upload.part", "created_at": int(time.time()),
                "upload_id": upload.id}  # fmt: skip

    async def complete(self, upload: Upload, ids: Sequence[str], md5: str | None) -> Upload:
        """Joins the parts in their order into a file; repeated, it returns the same upload.

        Refusal for parts that there are not, another size or sum than was said.
        """
        if upload.status == "completed":
            return upload  # its reply was lost
        self.get(upload.id)
        for id in ids:
            if id not in upload.parts:
                raise bad("part_ids", f"there is no part {shown(id)} in the upload {upload.id}")
        if len(set(ids)) != len(ids):
            raise bad("part_ids", "a part is named twice")
        size = sum(upload.parts[id].size for id in ids)
        if size != upload.bytes:
            raise bad("part_ids", f"the parts have {size:,} bytes, and the upload was to have "
                      f"{upload.bytes:,}")  # fmt: skip
        upload.status = "completing"
        try:
            found = hashlib.md5(usedforsecurity=False)
            with contextlib.closing(self._files.arriving(said=size)) as whole:
                for id in ids:
                    async for block in _blocks(upload.parts[id]):
                        found.update(block)
                        await whole.add(block)
                await whole.end()
                if md5 is not None and md5.lower() != found.hexdigest():
                    raise bad("md5", f"the file's MD5 is {found.hexdigest()}, not {shown(md5)}")
                upload.file = await self._files.keep(whole, upload.filename, purpose=upload.purpose)
        except BaseException:
            upload.status = "pending"
            raise
        upload.end("completed")
        return upload

    def expire(self) -> None:
        """Drops what is an hour old, but what is being put together."""
        for old in [*self._known.values()]:
            if old.created_at + LIFETIME <= time.time() and old.status != "completing":
                old.end("expired")
                del self._known[old.id]

    def close(self) -> None:
        """Drops all that is under way."""
        for one in self._known.values():
            one.end("cancelled")


async def _blocks(part: Arriving) -> AsyncIterator[bytes]:
    with part.path.open("rb", buffering=0) as file:
        while block := await in_thread(file.read, BLOCK):
            yield block
