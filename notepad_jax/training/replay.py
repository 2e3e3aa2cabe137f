"""Replay of a run with readers: its updates are computed again and compared: `train --replay RUN`.

The weights of a live fleet depend on what came when, and everything that they depend on was written
down: plans, spooled objects, choices. Where a run keeps them (`fleet.keep`), a trainer that is
given them finds every step read, as after a kill, waits for no reader and has to come out with the
same bits. That is all there is to it: what is compared is the newest step of the run. Above:
commands.train; below: train and fleet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from notepad_jax import keys
from notepad_jax.checkpoint.checksums import compare
from notepad_jax.checkpoint.objects import Objects, unsealed
from notepad_jax.checkpoint.steps import place_of, read_meta, steps_in
from notepad_jax.rollout import schedule
from notepad_jax.setup import provenance
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.screen import Screen
from notepad_jax.training import fleet, record, train

GONE = "without it this run is not learnt again"


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of a replay: the same weights, or `replay` had raised."""

    run: str
    steps: int
    checksum: str  # of the weights of the last


def replay(run: Path, folder: Path, screen: Screen) -> Replayed:
    """Learns the steps of a run again, in the new folder `folder`, up to its newest checkpoint.

    Raises ValueError for a run that has not kept what it learnt from, or was trained by other code,
    and HandoffError, naming a leaf, where other weights come out.
    """
    config = record.decided_of(run)  # other pages or another dtype would be other terms
    theirs = place_of(run, config.checkpoint.folder)
    said, kept = (Objects(theirs.parent / name) for name in (fleet.FOLDER, fleet.KEPT))
    there, done = {name: one for one in (said, kept) for name in one.names()}, steps_in(theirs)
    if not config.fleet.on or not done:
        raise ValueError(f"{run} is no run with readers that has saved a step")
    last = done[-1]
    names = _names(there, kept, last, config.fleet.live)
    terms = said.parsed(schedule.TERMS, fleet.terms_of, GONE)
    if terms is None:
        raise ValueError(f"{said.folder}/{schedule.TERMS} is gone; {GONE}")
    _look_at(there, kept, last, config.fleet.live)
    if terms.code != (ours := provenance.commit()):
        raise ValueError(f"{run} was trained by {terms.code}, and this is {ours}; use that code")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".replay-", dir=folder.parent) as place:
        again = _again(config, last, str(Path(place).absolute()))
        ours = place_of(folder, again.checkpoint.folder)
        for name in (schedule.TERMS, *names):
            content = there[name].get(name)
            if content is not None:
                Objects(ours.parent / fleet.FOLDER).put(name, content)
        train.train(again, folder, screen)
        made, was = (read_meta(steps, last) for steps in (ours, theirs))
    compare(was["leaf_checksums"], made["leaf_checksums"], f"step {last} of {run}, learnt again,")
    return Replayed(str(run), last, made["checksum"])


def text(made: Replayed) -> str:
    """Returns what is printed of a replay."""
    return f"{made.steps} steps of {made.run}, learnt again, end with the same weights"


def _again(config: Training, last: int, place: str) -> Training:
    f = config.fleet
    bundles = f.bundles if f.live else f.parts(config.rollout.documents)  # however they were read
    changes = {"fleet.readers": 0, "fleet.apart": True, "fleet.bundles": bundles}
    return keys.changed(config, {**changes, "steps": last, "checkpoint.folder": place})


def _names(there: Mapping[str, Objects], kept: Objects, last: int, live: bool) -> list[str]:
    """Returns what steps learnt from. Raises ValueError where some of a step is gone."""
    for step in range(1, last + 1):
        needed = schedule.CHOICE if live else schedule.PLAN
        if f"{needed}/{step}" not in there:
            raise ValueError(
                f"{kept.folder} has no {needed}/{step}; a run that begins with fleet.keep=true, "
                f"and never anew at an earlier step, keeps what it learnt from"
            )
    return [name for name in there if name.startswith(schedule.LEARNT_FROM)]


def _look_at(there: Mapping[str, Objects], kept: Objects, last: int, live: bool) -> None:
    """Raises ValueError naming what is damaged or gone of that which steps learnt from."""
    needed: dict[str, str | None] = {}  # bundles, and the digest of what was read of each
    for step in range(1, last + 1):
        name = f"{schedule.CHOICE if live else schedule.PLAN}/{step}"
        if live and (choice := there[name].parsed(name, schedule.choice_of, GONE)):
            needed |= choice.read
        if not live and (plan := there[name].parsed(name, schedule.parsed, GONE)):
            needed |= {one.name: None for one in plan.each()}
    for bundle, digest in needed.items():
        place = there.get(name := f"{schedule.SPOOL}/{bundle}", kept)
        found = place.parsed(name, _digest, GONE)
        if found is None:
            raise ValueError(f"{place.folder} has no {name}; {GONE}")
        if digest not in (None, found):
            raise ValueError(f"{place.folder}/{name} is not what was learnt from; {GONE}")


def _digest(content: bytes) -> str:
    """Returns the digest of a spooled bundle, as choices have it; ValueError for a damaged one."""
    unsealed(content)
    return hashlib.sha256(content).hexdigest()
