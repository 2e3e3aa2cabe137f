"""The history of a run's settings: its config, and every change of it on `--resume`.

`history.jsonl` in the run's folder is only ever appended to: its first line has the config that the
run began with, and every `--resume` that changes one adds what it was and what it is by now.
config.json has the present alone; what it should say follows from here. Where a run's steps lie
elsewhere (`checkpoint.folder`), its settings lie beside them, too (`run.json`): so the steps alone
say which run they are of, and can be gone on with, also when the run's folder is gone. Above:
train, run_log, outcome, check, audit, replay, fleet_reader and cli.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notepad_jax import keys
from notepad_jax.checkpoint import bucket
from notepad_jax.checkpoint.steps import BESIDE, Folder, is_copy, place_of, steps_in
from notepad_jax.eval.readings import READINGS
from notepad_jax.parallel import hosts
from notepad_jax.report import origin
from notepad_jax.setup import configuration, provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry import lines
from notepad_jax.telemetry.identity import read_sealed, write_json, write_sealed
from notepad_jax.telemetry.metrics import CONFIG, METRICS, read_metrics
from notepad_jax.training import decided

FILE = "history.jsonl"
GONE = None  # the value of a key that there is no more, or was not yet: no setting is None


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of settings when a run was resumed."""

    step: int  # done by then
    date: str
    commit: str  # of the code
    changed: Mapping[str, tuple[Any, Any]]  # key: what it was, what it is from then on


@dataclasses.dataclass(frozen=True)
class History:
    """The settings of a run and their changes; a run of an earlier version has no beginning.

    A change of nothing is where a run went back to a step before another change.
    """

    begun: Mapping[str, Any] | None  # by key
    changes: tuple[Change, ...]
    machine: Mapping[str, Any]  # what the machine decided of them (`decided`)

    @property
    def now(self) -> Mapping[str, Any] | None:
        """The settings after all changes."""
        if self.begun is None:
            return None
        after = {key: new for one in self.changes for key, (_, new) in one.changed.items()}
        return {key: value for key, value in {**self.begun, **after}.items() if value is not GONE}

    def at(self, version: int, key: str, now: Any) -> Any:
        """A setting as it was when `version` read; `now` where nothing says."""
        first = next((one.changed[key][0] for one in self.changes if key in one.changed), now)
        value = (self.begun or {}).get(key, first)
        since = [(0, value)]
        for one in self.changes:  # in the order of time: a run may go back to a step
            value = one.changed.get(key, (None, value))[1]
            since = [(step, was) for step, was in since if step < one.step] + [(one.step, value)]
        return next((was for step, was in reversed(since) if step <= version), first)


def config_of(folder: Path) -> Training:
    """Returns the config in a run's folder; a key that came later is as it is there.

    Raises ValueError for a folder that is no training run's.
    """
    said = read_sealed(folder / CONFIG, "name the folder of a training run, runs/NAME")
    return configuration.load("quickstart", saved=said)


def decided_of(folder: Path) -> Training:
    """Returns the config in a run's folder, with what its machine decided (`decided`)."""
    return decided.filled(config_of(folder), decided.read(folder / decided.FILE))


def begin(folder: Path, config: Training) -> None:
    """Writes down what a run begins with; from here on it can be gone on with."""
    if hosts.first() and not (folder / FILE).exists():
        said = {"config": _flat(config), "machine": decided.read(folder / decided.FILE)}
        _append(folder, {"step": 0, **_here(), **said})


def change(folder: Path, step: int, config: Training, said: Mapping[str, Any]) -> None:
    """Records the settings that differ by now, after `step` steps; `said` is what config.json said.

    The first process does this.
    """
    history, now = read(folder), _flat(config)
    before = keys.flat(said) if history.now is None else history.now
    changed = {
        key: [before.get(key, GONE), now.get(key, GONE)]
        for key in sorted({*before, *now})
        if before.get(key, GONE) != now.get(key, GONE)
    }
    went_back = any(step < one.step for one in history.changes)  # `at` has to know
    if (changed or went_back) and before:
        _append(folder, {"step": step, **_here(), "changed": changed})


def saved(folder: Path) -> Mapping[str, Any]:
    """Returns what the run's config.json says; {} where it is lost: it is said again then."""
    try:
        return read_sealed(folder / CONFIG, "")
    except ValueError:
        return {}


def check_steps(folder: Path, where: Folder) -> None:
    """Raises ValueError where a run would go on from `where` with less than it has done.

    Its newest step lies where its settings say, and not in `where`; or it is gone.
    """
    said, ours = saved(folder).get("checkpoint", {}), steps_in(where)
    before = said.get("folder", "")
    there = place_of(folder, before)
    # What was copied from a bucket is gone on with where that may be out of reach.
    known = there == where or (bucket.is_bucket(there) and is_copy(where))
    if not known and (theirs := steps_in(there))[-1:] > ours[-1:]:
        raise ValueError(
            f"step {theirs[-1]} of the run lies in {there}, and {where} "
            f"{f'ends at step {ours[-1]}' if ours else 'has no steps'}: go on there "
            f"(--config.checkpoint.folder={shlex.quote(before)}), or bring its steps along first"
        )
    done = next((line["step"] for line in reversed(read_metrics(folder))), 0)
    if done and not ours:
        raise ValueError(
            f"{folder / METRICS} ends at step {done}, and {where} has no steps to go on from: "
            f"bring them back, or begin another run (--name)"
        )
    if ours and done > ours[-1] + 2 * said.get("every", done):  # a killed run is no further ahead
        raise ValueError(
            f"{folder / METRICS} ends at step {done}, and {where} at step {ours[-1]}: bring the "
            f"later steps back, or say --step {ours[-1]} to go on from there"
        )


def read(folder: Path) -> History:
    """Returns what history.jsonl says. Raises ValueError naming a line that is damaged."""
    begun, changes, machine = None, [], {}
    for number, _, found in lines.lines(folder / FILE):
        try:
            if "config" in found:
                begun, machine = dict(found["config"]), dict(found["machine"])
                continue
            changed = {key: (was, now) for key, (was, now) in found["changed"].items()}
            changes.append(Change(found["step"], found["at"], found["code"], changed))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise ValueError(
                f"line {number} of {folder / FILE} is damaged, which says what the run was asked "
                f"to do; take it out: the run goes on without it"
            ) from None
    return History(begun, tuple(changes), machine)


def shown(folder: Path) -> list[origin.SettingsChange]:
    """Returns the changes as a page has them."""

    def told(value: Any) -> str:
        return "(no such key)" if value is GONE else json.dumps(value)

    return [
        origin.SettingsChange(
            one.step, one.date, one.commit,
            [(key, told(was), told(now)) for key, (was, now) in one.changed.items()],
        )
        for one in read(folder).changes
        if one.changed
    ]  # fmt: skip


def _append(folder: Path, values: Mapping[str, Any]) -> None:
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    cut = whole[whole.rfind(b"\n") + 1 :]  # by a kill
    with path.open("r+b" if whole else "wb") as file:
        file.seek(len(whole) - len(cut))
        file.truncate()
        file.write(lines.sealed(values))


def _here() -> dict[str, str]:
    now = datetime.datetime.now(datetime.UTC)
    return {"at": f"{now:%Y-%m-%d %H:%M} UTC", "code": provenance.commit()}


def _flat(config: Training) -> dict[str, Any]:
    return json.loads(json.dumps(keys.flat(keys.plain(config)), default=str))


# ---------------------------------------------------------------- beside steps that lie elsewhere


def put_beside(folder: Path, config: Training) -> None:
    """Writes the run's settings beside its steps, if those lie elsewhere."""
    if not config.checkpoint.folder or not hosts.first():
        return
    content = {CONFIG: keys.plain(config), decided.FILE: decided.read(folder / decided.FILE)}
    where = place_of(folder, config.checkpoint.folder)
    where.mkdir(parents=True, exist_ok=True)
    (where / BESIDE).write_text(json.dumps(content, indent=1, default=str) + "\n")


def beside(where: Folder) -> dict[str, Any] | None:
    """Returns what lies beside the steps in `where`; None where it is missing, or damaged."""
    try:
        content = json.loads((where / BESIDE).read_text())
        return {name: dict(content[name]) for name in (CONFIG, decided.FILE)}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def how_to_go_on(elsewhere: str, where: Folder) -> str:
    """Says how to go on with the run whose steps lie in `where`; nothing where it is impossible."""
    if elsewhere and beside(where) is not None:
        return f"go on with it (--resume --config.checkpoint.folder={shlex.quote(elsewhere)}), "
    return ""


def bring_back(folder: Path, elsewhere: str) -> None:
    """Makes the folder of a run that goes on and is not there, from what lies beside its steps.

    Raises ValueError where no steps are there, or nothing beside them, and for an evaluation's.
    """
    if (folder / READINGS).exists():
        raise ValueError(
            f"{folder} is an evaluation's, which `eval --name {folder.name} --resume` goes on "
            "with; train under another --name"
        )
    if folder.is_dir():
        return
    if not elsewhere:
        raise ValueError(
            f"there is no run {folder} to resume; see the folder {folder.parent}/, or say where "
            f"its checkpoints lie, if that is elsewhere (--config.checkpoint.folder)"
        )
    where = place_of(folder, elsewhere)
    if not steps_in(where):
        raise ValueError(f"there is no run {folder} to resume, and {where} has no steps of it")
    found = beside(where)
    if found is None:
        raise ValueError(
            f"there is no run {folder} to resume; {where} has steps of one, but not its settings "
            f"({BESIDE}): bring back the run's folder, or begin another run"
        )
    for name, content in found.items():
        if content:
            write = write_sealed if name == CONFIG else write_json
            write(folder / name, content)
