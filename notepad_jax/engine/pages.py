"""Page allocation of the KV cache: the pool of page numbers, and the cache of shared prefixes.

`PrefixCache` remembers which prompt prefixes are in the cache, so that the G members of a
group (and all questions about a document, where the template allows it) pay for a chunk
once. Prefixes are keyed by policy version and adapters: the keys of another policy are never
read. A prefix with users stays; one without stays until its pages are needed, and the least
recently used goes first.

Host bookkeeping only; the arrays themselves are `pallas_kernels.Pages`. Above: `scheduler`,
which never asks for more than there is.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

from notepad_jax.types import Tokens

Key = tuple[int, int, bytes]  # policy version, which of its adapters, the tokens' bytes


class PagePool:
    """An allocator of page numbers 0..total-1, each free or had by one owner."""

    def __init__(self, total: int):
        self._free = list(range(total - 1, -1, -1))
        self._taken = bytearray(total)

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Returns `count` page numbers; the caller has seen that so many are free."""
        assert count <= len(self._free), f"{count} pages of {len(self._free)} free ones"
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._taken[page] = 1
        return pages

    def release(self, pages: tuple[int, ...]) -> None:
        """Takes pages back. Raises ValueError for one that is free already."""
        for page in reversed(pages):
            if not self._taken[page]:
                raise ValueError(f"page {page} is already free")
            self._taken[page] = 0
            self._free.append(page)


@dataclasses.dataclass(eq=False)
class CachedPrefix:
    """A prompt prefix whose keys and values are in the cache, or will be in this round."""

    key: Key
    pages: tuple[int, ...]
    asked: Tokens  # the array of the first turn that asked: most later turns have the same
    users: int = 0  # turns that may still read it

    @property
    def version(self) -> int:
        return self.key[0]

    @property
    def adapters(self) -> int:
        return self.key[1]

    @property
    def tokens(self) -> Tokens:
        return np.frombuffer(self.key[2], np.int32)

    @property
    def length(self) -> int:
        return len(self.asked)


class PrefixCache:
    """A prefix cache by (policy version, adapters, tokens), least recently used first."""

    def __init__(self, pool: PagePool, page_size: int):
        self._pool = pool
        self._page_size = page_size
        self._entries: collections.OrderedDict[Key, CachedPrefix] = collections.OrderedDict()
        self._of_array: dict[int, CachedPrefix] = {}  # by the id of `asked`, which is alive
        self.unused = 0  # pages of prefixes without users: they can be had

    def __iter__(self) -> Iterator[CachedPrefix]:
        return iter(self._entries.values())

    @staticmethod
    def _key(version: int, adapters: int, prefix: Tokens) -> Key:
        return version, adapters, prefix.tobytes()

    def find(self, version: int, adapters: int, prefix: Tokens) -> CachedPrefix | None:
        """Returns a prefix's entry; its bytes are looked at where its array is a new one."""
        entry = self._of_array.get(id(prefix))
        if entry is not None and entry.key[:2] == (version, adapters):
            return entry
        return self._entries.get(self._key(version, adapters, prefix))

    def add(self, version: int, adapters: int, prefix: Tokens) -> CachedPrefix:
        """Gives a new prefix its pages and its first user, evicting unused ones.

        `prefix` is read-only, as token ids are (`types.tokens`).
        """
        count = -(-len(prefix) // self._page_size)
        self.make_room(count)
        key = self._key(version, adapters, prefix)
        entry = CachedPrefix(key, self._pool.allocate(count), prefix, users=1)
        self._entries[key] = self._of_array[id(prefix)] = entry
        return entry

    def use(self, entry: CachedPrefix) -> None:
        """Adds a user; the entry is the most recently used one now."""
        self.unused -= 0 if entry.users else len(entry.pages)
        entry.users += 1
        self._entries.move_to_end(entry.key)

    def leave(self, entry: CachedPrefix) -> None:
        """Takes a user away; without any, the prefix stays until its pages are needed."""
        assert entry.users > 0, "a prefix is left by more turns than used it"
        entry.users -= 1
        self.unused += 0 if entry.users else len(entry.pages)

    def make_room(self, count: int) -> None:
        """Evicts prefixes without users, oldest first, until `count` pages are free."""
        if self._pool.free >= count:
            return
        for entry in [e for e in self if not e.users]:
            self.remove(entry)
            if self._pool.free >= count:
                return

    def remove(self, entry: CachedPrefix) -> None:
        assert not entry.users, "a prefix is evicted under a turn that reads it"
        del self._entries[entry.key]
        if self._of_array.get(id(entry.asked)) is entry:  # and not another version's
            del self._of_array[id(entry.asked)]
        self.unused -= len(entry.pages)
        self._pool.release(entry.pages)

    def keep_version(self, version: int) -> None:
        """Evicts unused prefixes of other versions: no new turn will want them."""
        for entry in [e for e in self if not e.users and e.version != version]:
            self.remove(entry)
