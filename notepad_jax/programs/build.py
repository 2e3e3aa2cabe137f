"""`notepad-jax build`: builds task files, to evaluate or to train on.

One file per task and length, written through to the end or not at all, so a build that was stopped
goes on with the files that are missing. Each sample is made by itself from its seed and its
document written piece by piece, so a file of 3.5M-token documents needs the memory of one block of
text. With a reader, questions that it answers without any document are left out: it is asked as in
any reading, over a document that has no text. Above: commands; below: tasks.suites, data.files,
`subjects` for the reader, and `unknown`, which asks it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import keys
from notepad_jax.data import files, formats
from notepad_jax.data.admission import Fault, OnFault, RowCounts
from notepad_jax.data.foreign import golongrl
from notepad_jax.data.rows import Pair, nothing_left
from notepad_jax.data.sources import blocks
from notepad_jax.eval.lengths import format_length, parse_length
from notepad_jax.programs import subjects
from notepad_jax.programs.unknown import unknown_numbers
from notepad_jax.scoring import metrics
from notepad_jax.setup import eval_jobs
from notepad_jax.setup.config.whole import Config
from notepad_jax.tasks import suites
from notepad_jax.tasks.recipe import Unreachable
from notepad_jax.telemetry.identity import read_json, settle
from notepad_jax.telemetry.screen import Bar, Screen
from notepad_jax.text import approximate
from notepad_jax.text.tokenizer import counter, open_tokenizer
from notepad_jax.types import Task

SETTINGS = "build.json"
GOLONGRL = "golongrl"
READERS = ("--policy", "--endpoint", "--model")  # options of who is asked what it knows
TOKENS, PARAGRAPHS = "tokens", "paragraphs"


@dataclasses.dataclass(frozen=True)
class Built:
    """The result of a build: the files in its folder, and counts of tasks."""

    folder: Path
    files: tuple[Path, ...]
    written: int  # of the files; the others were there already
    tasks: int  # in the files that were written
    left_out: Mapping[str, int]  # questions, by reason


@dataclasses.dataclass(frozen=True)
class Size:
    """The length of the documents of a file: tokens, or paragraphs."""

    amount: int
    unit: str

    @property
    def name(self) -> str:
        if self.unit == PARAGRAPHS:
            return f"{self.amount}paragraphs"
        short = format_length(self.amount).lower()  # 8,000 and 8,192 are both short for 8K
        return short if parse_length(short) == self.amount else str(self.amount)


def run(
    config: Config, folder: Path, form: str, paragraphs: str | None, rows: str | None,
    drop_known: bool, given: Sequence[str], screen: Screen,
) -> Built:  # fmt: skip
    """Builds what the options of the command ask for; `given` are those of how tasks are made."""
    with _begun(folder):  # what is refused leaves nothing behind
        if form not in files.FORMS:
            raise ValueError(f"there is no form {form!r}; use {' or '.join(files.FORMS)}")
        if (config.evaluate.suite == GOLONGRL) != bool(rows):
            raise ValueError("the suite golongrl is made from --rows FILE, and no other suite is")
        e, converted = config.evaluate, bool(rows) or eval_jobs.is_file(config.evaluate.suite)
        said = {"--lengths": e.lengths, "--samples": e.samples, "--tasks": e.tasks,
                "--paragraphs": paragraphs, "--drop-known": drop_known,
                **dict.fromkeys(given, True)}  # fmt: skip
        if converted and (without := [option for option, value in said.items() if value]):
            raise ValueError(f"rows are converted as they are, all of them: leave out {without[0]}")
        if rows:
            return convert(GOLONGRL, rows, _golongrl, folder, form, screen)
        if eval_jobs.is_file(config.evaluate.suite):
            path = eval_jobs.existing(config.evaluate.suite)
            return convert(Path(path).stem, path, _any, folder, form, screen)
        if paragraphs and config.evaluate.suite != "ruler-qa":
            raise ValueError("--paragraphs is for the suite ruler-qa; give --lengths")
        if paragraphs and "--lengths" in given:
            raise ValueError("--paragraphs stand in the place of --lengths: leave one out")
        if not drop_known and (unread := [option for option in READERS if option in given]):
            raise ValueError(f"{unread[0]} is of --drop-known; say that, too, or leave it out")
        sizes = [Size(length, TOKENS) for length in eval_jobs.lengths_of(config)]
        if paragraphs:
            once = dict.fromkeys(map(_whole, paragraphs.split(",")))
            sizes = [Size(number, PARAGRAPHS) for number in once]
        reader = subjects.named(config, screen) if drop_known else None
        return build(config, folder, form, sizes, reader, screen)


def build(
    config: Config,
    folder: Path,
    form: str,
    sizes: Sequence[Size],
    reader: subjects.Subject | None,
    screen: Screen,
) -> Built:
    """Builds the config's suite in each size, without the questions that `reader` knows.

    A task that a length does not suit is left out there, with a warning. Raises ValueError if
    the folder holds another build, or no task can have any of the lengths.
    """
    e, samples = config.evaluate, eval_jobs.samples_of(config)
    count = approximate.count
    if config.endpoint.tokenizer:
        count = counter(open_tokenizer(config.endpoint.tokenizer, screen.warn))
    sources = suites.SuiteSources(count, **vars(config.sources), warn=screen.warn)
    names = suites.names(e.suite, e.tasks, sources)
    _settle(folder, _settings(config, form, reader))
    left_out: dict[str, int] = {}
    paths: list[Path] = []
    unreachable: dict[str, Unreachable] = {}
    written = tasks = 0
    bar = screen.bar(f"building {e.suite}", len(names) * len(sizes) * samples, "tasks")
    for name in names:
        numbers: Sequence[int] = range(samples)
        missing = [size for size in sizes if not _path(folder, name, size, form).exists()]
        if reader is not None and missing:
            numbers = unknown_numbers(config, folder, name, sources, reader, screen)
            left_out[f"{name}: known to {reader.name}"] = numbers[-1] + 1 - len(numbers)
        for size in sizes:
            paths.append(_path(folder, name, size, form))
            if size not in missing:
                bar.advance(samples)
                continue
            lengths: collections.deque[int] = collections.deque()
            made = _made(config, name, size, numbers, sources, lengths, bar)
            try:
                tasks += files.write(paths[-1], made, iter(lengths.popleft, None))
            except Unreachable as problem:
                unreachable[f"{name} of {size.amount:,} {size.unit}"] = problem
                paths.pop()
                continue
            written += 1
    bar.finish()
    if unreachable and not paths:
        raise next(iter(unreachable.values()))
    for what, problem in unreachable.items():
        screen.warn(f"left out: {problem}")
        left_out[f"{what}: a length that this task cannot have"] = samples
    return Built(folder, tuple(paths), written, tasks, left_out)


def _made(
    config: Config,
    name: str,
    size: Size,
    numbers: Sequence[int],
    sources: suites.SuiteSources,
    lengths: collections.deque[int],
    bar: Bar,
) -> Iterator[Task]:
    """Yields the tasks of a file, having put each one's tokens into `lengths`."""
    e = config.evaluate
    if size.unit == TOKENS:
        tasks = suites.make(e.suite, (name,), size.amount, numbers, config.seed, sources)
    else:
        tasks = suites.make_of_paragraphs(name, size.amount, numbers, config.seed, sources)
    for task in tasks:
        counted = size.unit == PARAGRAPHS
        lengths.append(sum(map(sources.count, task.document.pieces())) if counted else size.amount)
        yield task
        bar.advance()


def _golongrl(rows: str, on_fault: OnFault) -> Iterator[Pair]:
    return ((task, 0) for task in golongrl.read(rows, on_fault))


def _any(rows: str, on_fault: OnFault) -> Iterator[Pair]:
    return iter(formats.read_any(rows, on_fault=on_fault))


def convert(
    name: str, rows: str, read: Callable[[str, OnFault], Iterator[Pair]], folder: Path,
    form: str, screen: Screen,
) -> Built:  # fmt: skip
    """Writes the tasks made of the rows of a file to the task file `name`.

    Left out and counted by their reasons are rows with a fault, and those whose own gold answer
    would score nothing (a broken table, a formula that cannot be read): no policy could earn their
    reward. Raises ValueError where no row is left.
    """
    digest = hashlib.sha256()
    for block in blocks(rows):
        digest.update(block)
    said = {"suite": name, "rows": rows, "form": form, "sha256 of rows": digest.hexdigest()}
    _settle(folder, said)
    path = folder / f"{name}.{form}"
    if path.exists():
        return Built(folder, (path,), 0, 0, {})
    bar = screen.bar(f"converting {rows}", None, "tasks")
    admission = RowCounts()
    lengths: collections.deque[int] = collections.deque()

    def earnable() -> Iterator[Task]:
        kept = 0
        for task, length in read(rows, admission.leave_out):
            try:
                metrics.check_gold(task.answers, task.metric)
            except ValueError as problem:
                why = f"gold answers that {task.metric} gives nothing for"
                admission.leave_out(Fault(f"{task.id}: {problem}", why))
                continue
            lengths.append(length)
            yield task
            kept += 1
            bar.advance()
        if not kept:
            first = [Fault(one.first) for one in admission.left_out[:1]]
            raise nothing_left(rows, admission.count, *(first or [None]))

    count = files.write(path, earnable(), iter(lengths.popleft, None))
    bar.finish()
    for line in admission.lines(count):
        screen.warn(line)
    return Built(folder, (path,), 1, count, {one.why: one.count for one in admission.left_out})


def text(built: Built) -> str:
    """Returns what the command prints at the end."""
    there = len(built.files) - built.written
    lines = [f"{built.folder}: {built.tasks:,} tasks in {built.written} files"]
    lines[0] += f" ({there} were there already)" if there else ""
    lines += [f"left out: {n:,} ({reason})" for reason, n in built.left_out.items()]
    return "\n".join(lines)


def _path(folder: Path, name: str, size: Size, form: str) -> Path:
    return folder / f"{name}-{size.name}.{form}"


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{text!r} is no number of paragraphs; write --paragraphs 50,200")
    return int(text)


def _settings(config: Config, form: str, reader: subjects.Subject | None) -> dict[str, Any]:
    """What the files of a folder have in common; tasks and lengths may be added later."""
    e = config.evaluate
    return {
        "suite": e.suite,
        "samples": eval_jobs.samples_of(config),
        "seed": config.seed,
        "form": form,
        "tokenizer": config.endpoint.tokenizer,
        "sources": keys.plain(config.sources),
        "unknown_to": [reader.name, e.repeats, e.temperature, e.top_p] if reader else [],
    }


def _settle(folder: Path, settings: Mapping[str, Any]) -> None:
    """What a folder is built from; one that holds no file yet may be begun anew."""
    path, mend = folder / SETTINGS, "choose another --out"
    if path.is_file() and not _has_files(folder):
        if read_json(path, mend).keys() == settings.keys():  # else it is a user's own
            path.unlink()
    settle(folder / SETTINGS, settings, mend)


@contextlib.contextmanager
def _begun(folder: Path) -> Iterator[None]:
    """If the block fails before a file is there, what it began is removed again."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    there = (folder / SETTINGS).exists()
    try:
        yield
    except BaseException:
        if not there and not _has_files(folder):
            with contextlib.suppress(OSError):
                (folder / SETTINGS).unlink()
                for path in made:
                    path.rmdir()  # an empty one
        raise


def _has_files(folder: Path) -> bool:
    patterns = ("unknown-*.json", *(f"*.{form}" for form in files.FORMS))
    return any(path for pattern in patterns for path in folder.glob(pattern))
