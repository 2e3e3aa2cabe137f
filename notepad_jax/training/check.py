"""`notepad-jax check RUN`: is everything in a run's folder as it was written?

Settings are compared with history.jsonl, lines with their digests and with one another, every byte
of every checkpoint with its manifest, the base of adapters with what the steps name, the turns of
a rollout under way with theirs. Nothing is changed. What is wrong is a `Finding`, with what to do;
the command ends with exit code 1 then. A training run, a quick start and an evaluation all are
folders of which a part is there. TensorBoard's events and pages are made of the rest, and are not
looked at. Above: commands; below: record, checkpoint, engine.journal, eval.readings,
rollout.archive.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import keys
from notepad_jax.checkpoint import best, commit, manifest, steps
from notepad_jax.engine import journal
from notepad_jax.eval import readings
from notepad_jax.rollout import archive
from notepad_jax.telemetry import lines, run_folder
from notepad_jax.telemetry.identity import read_sealed
from notepad_jax.telemetry.metrics import CONFIG, LEDGER, METRICS, TIMINGS
from notepad_jax.telemetry.screen import Screen, SilentScreen
from notepad_jax.training import decided, partial_rollout, record
from notepad_jax.training.validation import SCORE

BY_STEP = (METRICS, LEDGER, TIMINGS)
JSONS = (CONFIG, decided.FILE, readings.IDENTITY, "report.json", "sinks.json")
TAKE_OUT = "take the line out: the run goes on without it"
FROM_A_COPY = "bring the file back from a copy; without one, what it said there is lost"
SAY_AGAIN = "say --config again, with all that was changed, and --resume goes on"
AGAIN = "--resume goes on from the newest good step, and makes the later ones again"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A file or line of a run's folder that is not as it was written."""

    where: str  # within the run's folder, or the whole path of what lies elsewhere
    problem: str
    mend: str


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of a check: what was looked at, and what is wrong."""

    folder: str
    files: int  # of settings and lines
    lines: int
    old_lines: int  # of an earlier version, without a digest
    steps: tuple[int, ...]  # of checkpoints
    bytes: int  # of checkpoints
    damaged: tuple[Finding, ...]
    notes: tuple[str, ...]  # what is no damage: a line that a kill cut


class _Check:
    """One check of a folder."""

    def __init__(self, folder: Path, screen: Screen) -> None:
        self.folder, self.screen = folder, screen
        self.damaged: list[Finding] = []
        self.notes: list[str] = []
        self.files = self.lines = self.old = self.bytes = 0
        self.last = 0  # step of which there is a line
        self.counted = False  # whether how many readings a step left follows from the settings
        self.metrics: list[dict[str, Any]] = []
        self.ledger: list[dict[str, Any]] = []

    def wrong(self, where: Path | str, problem: str, mend: str) -> None:
        """Takes down a finding."""
        name = str(where).removeprefix(f"{self.folder}/")
        self.damaged.append(Finding(name, problem, mend))

    # ------------------------------------------------------------ settings

    def settings(self) -> Mapping[str, Any]:
        """Returns the run's settings by key, those of history.jsonl where there is one."""
        said = {name: self._json(self.folder / name) for name in JSONS}
        for path in self.folder.rglob(readings.IDENTITY):
            if path.parent != self.folder:
                self._json(path)
        try:
            known = record.read(self.folder)
        except ValueError:  # as `by_step` says
            known = record.History(None, (), {})
        config, machine = said[CONFIG], said[decided.FILE]
        if known.begun is None:
            return keys.flat(config or {})
        self.counted = not any(key.startswith("rollout.") for one in known.changes
                               for key in one.changed)  # fmt: skip
        ways = "write it as it was; --resume goes on with what stands there"
        self._same(CONFIG, keys.flat(config or {}), known.now, ways, config)
        self._same(decided.FILE, machine or {}, known.machine, ways, machine)
        return known.now

    def _json(self, path: Path) -> dict[str, Any] | None:
        """Returns what a file holds; {} where it is not there, None where it is damaged."""
        if not path.is_file():
            return {}
        self.files += 1
        try:
            return read_sealed(path, "")
        except ValueError as problem:
            said = str(problem).removeprefix(f"{path} ").rstrip("; ")
            self.wrong(path, said, SAY_AGAIN if path.name == CONFIG else FROM_A_COPY)
            return None

    def _same(
        self, name: str, said: Mapping[str, Any], known: Mapping[str, Any], mend: str,
        found: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        if known and found == {}:
            self.wrong(
                self.folder / name, "is missing", SAY_AGAIN if name == CONFIG else FROM_A_COPY
            )
        for key in sorted({*said, *known}) if found else ():
            if said.get(key) != known.get(key):
                problem = f"{key} is {said.get(key)!r}, and the run has {known.get(key)!r}"
                self.wrong(self.folder / name, problem, mend)

    # ------------------------------------------------------------ lines

    def by_step(self) -> None:
        """Looks through what has a line a step."""
        every = {name: list(self._lines(name)) for name in (*BY_STEP, record.FILE)}
        self.metrics, self.ledger = every[METRICS], every[LEDGER]
        if self.metrics and not self.old and "config" not in next(iter(every[record.FILE]), {}):
            self.wrong(self.folder / record.FILE, "does not say how the run began", FROM_A_COPY)
        counted = {
            name: Counter(found["step"] for found in every[name] if _is_step(name, found))
            for name in BY_STEP
        }
        last = max((max(there) for there in counted.values() if there), default=0)
        for name, there in counted.items():
            order = [found["step"] for found in every[name]]
            if order != sorted(order):
                self.wrong(self.folder / name, "its lines are not in their order", FROM_A_COPY)
            twice = [step for step, count in there.items() if count > 1]
            missing = [step for step in range(1, last + 1) if step not in there]
            for problem, of in (("are missing", missing), ("are there more than once", twice)):
                if of:
                    said = f"the lines of steps {_listed(of)} {problem}"
                    self.wrong(self.folder / name, said, FROM_A_COPY)
        self.last = last

    def _lines(self, name: str) -> Iterator[dict[str, Any]]:
        path, number = self.folder / name, 0
        self.files += path.is_file()
        for number, line, found in lines.lines(path):
            self.lines += 1
            if found is None or not isinstance(found.get("step"), int):
                self.wrong(path, f"line {number} is damaged", TAKE_OUT)
            else:
                self.old += lines.FIELD.encode() not in line[-lines.LONGEST :]
                yield found
        self._cut(path)

    def _cut(self, path: Path) -> None:
        if path.is_file() and (size := path.stat().st_size):
            with path.open("rb") as file:
                file.seek(size - 1)
                if file.read() != b"\n":
                    name = path.relative_to(self.folder)
                    self.notes.append(f"the last line of {name} is cut off; --resume cuts it back")

    def traces(self, settings: Mapping[str, Any]) -> None:
        """Looks through the readings of rollouts and evaluations."""
        left = Counter[int]()  # readings of a step
        for path in sorted(
            path for name in (archive.FILE, readings.READINGS) for path in self.folder.rglob(name)
        ):
            self.files += 1
            bar = self.screen.bar(f"checking {path.name}", None, "readings")
            shift = 0
            for number, line, found in lines.lines(path):
                bar.advance()
                self.lines += 1
                if found is None or "reading" not in found:
                    self.wrong(path, f"line {number} is damaged", FROM_A_COPY)
                    continue
                if path == self.folder / archive.FILE:
                    left[found["reading"].get("step")] += 1
                has, place = lines.place_of(line)
                self.old += not has
                if place is not None and place != number - 1 + shift:
                    said = f"before line {number} lines are missing, or do not belong there"
                    self.wrong(path, said, FROM_A_COPY)
                    shift = place - (number - 1)
            bar.finish()
            self._cut(path)
        for line in self.ledger if self.counted else ():
            learnt = len(line.get("trained", ())) + len(line.get("skipped", ()))
            groups, found = min(learnt, settings["rollout.archive"]), left[line["step"]]
            # One that a teacher made is a group of one.
            if found not in (groups, groups * settings["rollout.group_size"]):
                said = f"has {found} readings of {groups} groups of step {line['step']}"
                self.wrong(self.folder / archive.FILE, said, FROM_A_COPY)

    def turns(self) -> None:
        """Looks through the turns of a rollout under way."""
        pattern = partial_rollout.FILE.replace(".jsonl", "*.jsonl")
        for path in sorted(self.folder.glob(pattern)):
            self.files += 1
            try:
                journal.read(path)
                if journal.is_torn(path):
                    self.notes.append(
                        f"the last turns in {path.name} are cut off; --resume makes them anew"
                    )
            except ValueError as problem:
                said = str(problem).removeprefix(f"{path} ")
                self.wrong(path, said, "remove it: the rollout is made anew, and the same")

    # ------------------------------------------------------------ checkpoints

    def checkpoints(self, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """Reads all bytes of all steps; returns the steps."""
        where = steps.place_of(self.folder, str(settings.get("checkpoint.folder") or ""))
        shown = self.folder / steps.CHECKPOINTS
        shown = shown if not settings.get("checkpoint.folder") else where
        there = steps.steps_in(where)
        base = steps.steps_in(where / steps.BASE)
        screen = self.screen if there or base else SilentScreen()  # an evaluation has none
        bar = screen.bar("checking checkpoints", len(there) + len(base), "steps")
        named: dict[str, int] = {}
        for step in there:
            if found := manifest.damage(files := commit.place(where, step)):
                left = len(there) > 1
                mend = AGAIN if left else "there is no other step: bring it back from a copy"
                self.wrong(shown / str(step), found, mend)
            else:
                self.bytes += manifest.size(files)
                if (name := steps.read_meta(where, step).get(steps.BASE)) is not None:
                    named[name] = step
            bar.advance()
        self._base(where, shown, base, named)
        bar.advance(len(base))
        bar.finish()
        self._beside(where, shown, there, settings)
        return tuple(there)

    def _base(self, where: Any, shown: Any, base: list[int], named: Mapping[str, int]) -> None:
        place, mend = shown / steps.BASE, "--resume saves it again, from the policy it began with"
        if named and not base:
            self.wrong(place, "is missing, and the steps beside it hold adapters alone", mend)
        for step in base:
            if found := manifest.damage(files := commit.place(where / steps.BASE, step)):
                self.wrong(place / str(step), found, mend)
                continue
            self.bytes += manifest.size(files)
            is_named = steps.read_meta(where / steps.BASE, step)["checksum"]
            for name in named:
                if name != is_named:
                    said = f"is {is_named}, and step {named[name]} belongs on {name}"
                    self.wrong(place / str(step), said, mend)

    def _beside(
        self, where: Any, shown: Any, there: list[int], settings: Mapping[str, Any]
    ) -> None:
        if (where / best.NAME).exists():
            self.files += 1
            marked, said = best.read(where), ""
            scores = {one["step"]: one[SCORE] for one in self.metrics if SCORE in one}
            if marked is None:
                said = "is damaged"
            elif there and marked.step not in there:
                said = f"names step {marked.step}, which is not there"
            elif scores and scores.get(marked.step) != marked.score:
                said = f"says {marked.score} of step {marked.step}, and {METRICS} "
                said += f"{scores.get(marked.step, 'nothing')}"
            if said:
                mend = "remove it; a run that goes on marks its best step anew"
                self.wrong(shown / best.NAME, said, mend)
        if settings.get("checkpoint.folder") and there and record.beside(where) is None:
            mend = "--resume writes it again, as long as the run's folder is there"
            self.wrong(shown / record.BESIDE, "is missing, or damaged", mend)
        if there and self.last and max(there) > self.last:
            said = f"ends at step {self.last}, and step {max(there)} is saved"
            self.wrong(self.folder / METRICS, said, FROM_A_COPY)
        if self.last and not there:
            self.wrong(shown, f"has no step, and {METRICS} ends at {self.last}", "bring them back")


def run(folder: Path, screen: Screen) -> Checked:
    """Checks a run's folder. Raises ValueError for what is no run's."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name that of a run, runs/NAME")
    known = (*JSONS, *BY_STEP, record.FILE, run_folder.LOCK, steps.CHECKPOINTS, readings.READINGS)
    if not any((folder / name).exists() for name in known):
        raise ValueError(f"{folder} is no run's folder: it has neither {CONFIG} nor {METRICS}")
    check = _Check(folder, screen)
    settings = check.settings()
    check.by_step()
    check.traces(settings)
    check.turns()
    saved = check.checkpoints(settings)
    return Checked(
        str(folder), check.files, check.lines, check.old, saved, check.bytes,
        tuple(check.damaged), tuple(check.notes),
    )  # fmt: skip


def text(checked: Checked) -> str:
    """Returns what the command prints."""
    kept = f"steps {_listed(checked.steps)}, {checked.bytes / 1e6:,.1f} MB" if checked.steps else ""
    looked = f"{checked.files} files, {checked.lines:,} lines" + (f", {kept}" if kept else "")
    told = [f"{checked.folder}: {looked}"]
    told += [f"damaged: {one.where}: {one.problem}; {one.mend}" for one in checked.damaged]
    told += [f"note: {one}" for one in checked.notes]
    if checked.old_lines:
        told.append(f"note: {checked.old_lines:,} lines are of an earlier version, without digests")
    if not checked.damaged:
        told.append("everything is as it was written")
    return "\n".join(told)


def _is_step(name: str, found: Mapping[str, Any]) -> bool:
    """Whether a line is a step's own: validations have lines of metrics beside those."""
    return name != METRICS or not any(key.startswith("validation/") for key in found)


def _listed(numbers: Sequence[int]) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
