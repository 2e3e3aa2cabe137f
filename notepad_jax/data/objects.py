"""Objects of a bucket below one prefix: a listing, and their bytes as they were when seen.

A name below the prefix is a key and nothing else: no part of it is ever read as a URL. A block is
asked for while the one before it is used, so a reader seldom waits. An object is known by
its generation, which the bucket changes with every write, and every block is compared with it.
Above: serve.documents.roots; beside: `sources`, for files that a user names on his own machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorstore as ts

from notepad_jax.data.sources import BLOCK, first_line

CONTEXT = ts.Context()  # connections, and how many there may be, of all buckets together


class Changed(ValueError):
    """The error for an object that is not what it was, or not there any more."""


class BucketListing:
    """All objects whose names begin with a URL and a slash; raises ValueError for no bucket's."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._store = ts.KvStore.open(f"{self.url}/", context=CONTEXT).result()
        except (ValueError, OSError) as problem:
            raise ValueError(f"{url} cannot be opened: {first_line(problem)}") from None

    def look(self, key: str, size: int = BLOCK) -> tuple[str, bytes] | None:
        """Returns an object's generation and its first block, of at most `size` bytes; None: no
        such object. Raises ValueError if the bucket cannot be asked."""
        found = self._answered(self._ask(key, 0, size)) or self._answered(self._ask(key, 0, None))
        if found is None:
            return "empty", b""
        if found.state != "value":
            return None
        return found.stamp.generation.hex(), bytes(found.value)

    def blocks(self, key: str, generation: str, size: int = BLOCK) -> Iterator[bytes]:
        """Yields the bytes of an object that `look` has seen, in blocks of at most `size`.

        Raises Changed as soon as it is another, ValueError if the bucket cannot be asked.
        """
        at, coming = 0, self._ask(key, 0, size)
        while (found := self._answered(coming)) is not None:
            self._check(found, key, generation)
            at += size
            coming = self._ask(key, at, at + size)
            yield bytes(found.value)
        rest = self._answered(self._ask(key, at, None))  # fewer than `size` are left
        if rest is None and at:  # none is, or it is shorter than it was
            first = self._answered(self._ask(key, 0, 1))
            self._check(first, key, generation)
        if rest is not None:
            self._check(rest, key, generation)
            if rest.value:
                yield bytes(rest.value)

    def _ask(self, key: str, start: int, end: int | None) -> Any:
        return self._store.read(key, byte_range=slice(start, end))

    def _answered(self, coming: Any) -> Any:
        """Waits for a range; None where the object ends before it does."""
        try:
            return coming.result()
        except (ValueError, OSError) as problem:
            if "OUT_OF_RANGE" in str(problem):
                return None
            raise ValueError(f"{self.url} cannot be read: {first_line(problem)}") from None

    def _check(self, found: Any, key: str, generation: str) -> None:
        gone = found is None or found.state != "value"
        if gone or found.stamp.generation.hex() != generation:
            raise Changed(f"{self.url}/{key} is not what it was when it was first seen")
