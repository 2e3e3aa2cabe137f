"""A suite that is a file of tasks, or a folder of them: which rows are read, at which length.

Every row is read, unless fewer are asked for. Rows are grouped into bands of length: a file
whose rows all say one length (what it was made for) is a band of that length; any other row
belongs to the power of two that it does not exceed. Either way the band of a row is decided by its
file alone, so a measurement that is gone on with, with more tasks or more samples, finds its
readings again. Rows about one text share its document: it is tokenised once, its chunks are
prefilled once, and intervals know that it is one. Above: setup.eval_jobs; below: data.formats.
"""

from __future__ import annotations

import codecs
import collections
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from notepad_jax.data import admission, formats, sources
from notepad_jax.data.admission import Fault, OnFault
from notepad_jax.data.foreign import beam
from notepad_jax.data.rows import Pair, nothing_left
from notepad_jax.tasks.haystack import Count
from notepad_jax.types import Document, Task

OVER = 1.02  # RULER counts the prompt and the answer, too, and a tokenizer differs from another
# What a row may have of a length that was asked for: paragraphs are longer and shorter.
LEAST, MOST = 0.85, 1.12


@dataclasses.dataclass(frozen=True)
class FileSuite:
    """The tasks that were found, and the rows and files without a place among them."""

    tasks: Mapping[int, list[Task]]  # by length, ascending
    rows: int  # of the tasks that were wanted
    elsewhere: int  # of these, rows that have none of the lengths that were asked for
    damaged: Sequence[str]  # files that could not be read and hold none of the wanted tasks


def read(
    path: str,
    lengths: Sequence[int],
    wanted: Sequence[str],
    samples: int,
    count: Count,
    on_row: Callable[[], None] = lambda: None,
    on_fault: OnFault = admission.refuse,
    admit: Callable[[Task], None] = lambda task: None,
) -> FileSuite:
    """Returns the tasks of a file (local or gs://), or of all of a folder, by their length.

    Args:
      lengths: those that are asked for, each of which must have a row; none: all there are.
      wanted: names of tasks, as "ruler/vt" or "vt"; none: all.
      samples: how many are taken of each task and length, the first ones; 0: all.
      count: tells the tokens of documents whose rows name no length.
      on_row: is told of every row that was read.
      on_fault: is told of every row that is left out, whatever its task.
      admit: raises Fault for a task that is left out, too.

    Of a folder, a row without an id is named by its file, from the folder on, and its number.
    Raises ValueError if there is no file, no such task, a length without a row, two tasks of one
    id at one length, and for a damaged file, unless it holds other tasks than those wanted.
    """
    found: dict[int, list[Task]] = {length: [] for length in sorted(lengths)}
    taken: collections.Counter[tuple[str, int]] = collections.Counter()
    known: dict[tuple[int, str], str] = {}
    there: set[int] = set()
    rows = elsewhere = refused = 0
    first_fault: Fault | None = None
    damaged: list[str] = []
    texts = _Texts(count)
    for file in _files(path):
        try:
            chosen, same = _chosen(path, file, wanted, texts, on_row, on_fault)
        except ValueError as problem:
            if not wanted or _tells(file, wanted):
                raise
            damaged.append(str(problem))
            continue
        for task, length in chosen:
            try:
                admit(task)
            except Fault as fault:
                on_fault(fault)
                refused, first_fault = refused + 1, first_fault or fault
                continue
            rows += 1
            band = length if same else power_of_two(length)
            there.add(band)
            at = _nearest(length, lengths) if lengths else band
            if at is None:
                elsewhere += 1
            elif not samples or taken[task.source, at] < samples:
                taken[task.source, at] += 1
                first = known.setdefault((at, task.id), file)
                if first != file:
                    raise ValueError(f"{file} has task {task.id!r}, and so has {first}; rename one")
                found.setdefault(at, []).append(task)
    if not rows and refused:
        raise nothing_left(path, refused, first_fault)
    if not rows:
        told = f"; not read: {damaged[0]}" if damaged else ""
        raise ValueError(f"{path} has no task of {', '.join(wanted)}{told}")
    for length, tasks in found.items():
        if not tasks:
            raise ValueError(
                f"{path} has no document of {length:,} tokens; they have {_some(there)}; leave "
                f"out --lengths to read all"
            )
    read = {length: list(map(texts.shared, tasks)) for length, tasks in sorted(found.items())}
    return FileSuite(read, rows, elsewhere, damaged)


def power_of_two(length: int) -> int:
    """Returns the least power of two that a document does not exceed, by 2% at most."""
    band = 1
    while band * OVER < length:
        band *= 2
    return band


@dataclasses.dataclass(frozen=True)
class RecordDocument:
    """The text of a record, decoded whenever it is read: a file of them is not held in memory."""

    records: Sequence[Pair] = dataclasses.field(repr=False)
    number: int  # from 0

    def pieces(self) -> Iterator[str]:
        return self.records[self.number][0].document.pieces()


class _Texts:
    """The documents of files by what they say: the first with a text stands for all."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._stands: dict[bytes, Document] = {}
        self._standing: set[int] = set()  # ids of these
        self._tokens: dict[int, int] = {}  # by the same

    def shared(self, task: Task) -> Task:
        """Returns the task over the document that stands for its own."""
        if id(task.document) in self._standing:  # of some formats it has a hundred questions
            return task
        said = hashlib.blake2b(digest_size=16)
        for piece in task.document.pieces():
            said.update(piece.encode("utf-8", "surrogatepass"))
        stands = self._stands.setdefault(said.digest(), task.document)
        self._standing.add(id(stands))
        return dataclasses.replace(task, document=stands)

    def measured(self, task: Task) -> Pair:
        """Returns the task as `shared`, and its tokens: each text is counted once."""
        task = self.shared(task)
        if id(task.document) not in self._tokens:
            self._tokens[id(task.document)] = sum(map(self._count, task.document.pieces()))
        return task, self._tokens[id(task.document)]


def _chosen(
    folder: str, file: str, wanted: Sequence[str], texts: _Texts, on_row: Callable[[], None],
    on_fault: OnFault,
) -> tuple[list[Pair], bool]:  # fmt: skip
    """Returns the wanted tasks of a file, measured, and whether all its rows say one length."""
    name = "" if file == folder else str(Path(file).relative_to(folder))
    pairs = formats.read_any(file, name=name, on_fault=on_fault)
    said: set[int] = set()
    chosen: list[Pair] = []
    for number in range(len(pairs)):
        task, length = pairs[number]
        said.add(length)
        if not wanted or {task.source, task.source.rpartition("/")[2]} & set(wanted):
            if not isinstance(pairs, list):
                task = dataclasses.replace(task, document=RecordDocument(pairs, number))
            chosen.append((task, length) if length else texts.measured(task))
        on_row()
    return chosen, len(said) == 1 and 0 not in said


def _files(path: str) -> list[str]:
    if sources.is_remote(path) or not Path(path).is_dir():
        return [path]
    there = sorted(file for file in Path(path).rglob("*") if not file.is_dir())
    found = [file for file in there if file.suffix[1:].lower() in formats.FORMS]
    # RULER's scripts write what was predicted beside `data`, in rows of the same columns.
    found = [file for file in found if file.parent.name != "pred" and not _of_no_rows(file)]
    found = [file for file in found if not beam.is_beside(file)]
    if not found:
        raise ValueError(f"{path} holds no files of tasks ({', '.join(formats.FORMS)})")
    return list(map(str, found))


def _of_no_rows(file: Path) -> bool:
    """Whether a .json is something else, such as settings: no list that begins with an object."""
    if file.suffix.lower() != ".json":
        return False
    begins = next(sources.blocks(file, size=256), b"").removeprefix(codecs.BOM_UTF8)
    return not b"".join(begins.split()).startswith(b"[{")


def _nearest(length: int, lengths: Sequence[int]) -> int | None:
    near = [n for n in lengths if LEAST * n <= length <= MOST * n]
    return min(near, key=lambda n: max(n / length, length / n), default=None)


def _tells(file: str, wanted: Sequence[str]) -> bool:
    """Whether a file that cannot be read is named after a task that is wanted."""
    names = [name.rpartition("/")[2] for name in wanted]
    told = (Path(file).stem, Path(file).parent.name)
    return any(part == name or part.startswith(f"{name}-") for part in told for name in names)


def _some(lengths: set[int]) -> str:
    ordered = [f"{length:,}" for length in sorted(lengths)]
    return ", ".join(ordered if len(ordered) < 7 else [*ordered[:3], "...", *ordered[-3:]])
