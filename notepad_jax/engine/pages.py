"""Who owns which page: reference counts, and the prefixes that prompts share.

`PagePool` hands out page numbers and counts their users. `PrefixCache` remembers which
prompt prefixes are already in the cache, so that the G members of a group (and all
questions about a document, where the template allows it) pay for a chunk once. Prefixes are
keyed by policy version: the keys of another policy are never read. A prefix that nobody
uses stays until its pages are needed, oldest first.

Host bookkeeping only; the arrays themselves are `pallas_kernels.Pages`.
"""

from __future__ import annotations

import collections
import dataclasses

from notepad_jax.types import Tokens


class OutOfPages(RuntimeError):
    """The cache is full; the caller should wait for running turns to end."""

    def __init__(self, wanted: int, free: int, total: int):
        super().__init__(
            f"{wanted} cache pages are needed and {free} of {total} are free; "
            f"raise engine.pages, or lower engine.slots or the chunk size"
        )


class PagePool:
    """Page numbers 0..total-1 with reference counts; lowest free number first."""

    def __init__(self, total: int):
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Returns `count` pages with one user each, or raises OutOfPages and takes none."""
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.total)
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: tuple[int, ...]) -> None:
        """Adds a user to every page."""
        for page in pages:
            if not self._users[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._users[page] += 1

    def release(self, pages: tuple[int, ...]) -> None:
        """Takes a user from every page; a page without users is free again."""
        for page in reversed(pages):
            if not self._users[page]:
                raise ValueError(f"page {page} is already free")
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

    def users(self, page: int) -> int:
        return self._users[page]


@dataclasses.dataclass(eq=False)
class CachedPrefix:
    """A prompt prefix whose keys and values are in the cache."""

    key: tuple[int, bytes]
    pages: tuple[int, ...]
    length: int  # tokens
    users: int = 0  # requests that may still read it


class PrefixCache:
    """Prefixes by (policy version, tokens), least recently used first."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool = pool
        self._page_size = page_size
        self._entries: collections.OrderedDict[tuple[int, bytes], CachedPrefix] = (
            collections.OrderedDict()
        )

    def __len__(self) -> int:
        return len(self._entries)

    @staticmethod
    def key(version: int, prefix: Tokens) -> tuple[int, bytes]:
        return version, prefix.tobytes()

    def find(self, key: tuple[int, bytes]) -> CachedPrefix | None:
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def add(self, key: tuple[int, bytes], length: int) -> CachedPrefix:
        """Allocates pages for a prefix of `length` tokens, evicting unused prefixes if needed."""
        count = -(-length // self._page_size)
        self.make_room(count)
        entry = CachedPrefix(key, self._pool.allocate(count), length)
        self._entries[key] = entry
        return entry

    def make_room(self, count: int) -> None:
        """Evicts unused prefixes, oldest first, until `count` pages are free or none is left."""
        for entry in self.unused():
            if self._pool.free >= count:
                return
            self.remove(entry)

    def unused(self) -> list[CachedPrefix]:
        """Prefixes that nobody reads now: their pages can be had."""
        return [entry for entry in self._entries.values() if not entry.users]

    @property
    def room(self) -> int:
        """Pages that can be had: free ones, and those of prefixes that nobody reads."""
        return self._pool.free + sum(len(entry.pages) for entry in self.unused())

    def remove(self, entry: CachedPrefix) -> None:
        del self._entries[entry.key]
        self._pool.release(entry.pages)

    def drop_unused(self) -> None:
        """Forgets every prefix without users (after a new policy was adopted: all of them)."""
        for entry in self.unused():
            self.remove(entry)
