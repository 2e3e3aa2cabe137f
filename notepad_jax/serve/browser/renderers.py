"""The interface of page renderers: values and functions that a program hands to the server.

Pages are made in `report`, which stands on this room's floor, so neither knows the other: a
program brings them together. Above: programs.pages, which makes one; below: `routes`, `page_cache`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

Put = Callable[[str, bytes], None]  # takes a file of a page: its path there, its content
Files = Mapping[Path, str]  # trace files, and what each is called on their page


class MakeTrace(Protocol):
    """The renderer of a page of trace files; its data under `data/`, beside `index.html`."""

    def __call__(
        self, put: Put, title: str, files: Files, advance: Callable[[int, int], None], data: str
    ) -> None:
        """`advance` is called after each reading with how many are done, of how many.

        Raises ValueError for a file that is no trace, naming it.
        """


@dataclasses.dataclass(frozen=True)
class Renderers:
    """The pages of a server, each as bytes or as the function that renders it."""

    reading: bytes  # the page at /
    listing: Callable[[Sequence[Mapping[str, Any]], bool], bytes]  # programs.pages.listing
    notice: Callable[[str, str, bool], bytes]  # title, words, whether to ask again soon
    entry: Callable[[str], bytes]  # asks for the key; says what was wrong with the last
    trace: MakeTrace
    runs: Callable[[], Sequence[str]] | None  # names of what lies in the folder of runs; None: none
    files: Callable[[str], Files]  # of one of them; nothing for a name that is not among them
