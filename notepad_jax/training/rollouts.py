"""The rollouts of a training run: what a step draws, reads and counts.

Where a run has several processes, each has an engine and reads its share of a round's draws,
dealt by the lengths of documents; then all tell all what came of them. So every process goes on
from the same groups, in the same order, and the account is the same everywhere. Only what was
said travels: prompts are made again from the task (`serialization`).

Above: run, which learns from it, and a fleet's reader; below: task_stream and rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from notepad_jax.parallel import hosts
from notepad_jax.reading import shares
from notepad_jax.reading.loop import Reader
from notepad_jax.rollout import (
    collector,
    dynamic_sampling,
    imitation,
    local,
    serialization,
    task_sampler,
)
from notepad_jax.rollout.dynamic_sampling import Rollout, Wanted
from notepad_jax.rollout.groups import GroupStats, ages, mixture
from notepad_jax.rollout.ledger import PASSED, Ledger, Outcome, Place
from notepad_jax.rollout.rewards import Scoring
from notepad_jax.rollout.task_sampler import Drawn, Stream
from notepad_jax.setup import task_stream
from notepad_jax.setup.lengths import Length
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.text.chunks import Documents
from notepad_jax.types import Chunks, Draw, Group, Task


class Apart(Protocol):
    """Separate readers that sample a step's draws (`fleet.Fleet`)."""

    live: bool  # a reading goes on by newer versions of the policy

    async def drawn(self, step: int, ledger: Ledger) -> Drawn | None:
        """Returns which draws `step` learns from, when they are read; None: the next ones."""

    async def read(self, step: int, ordinals: Sequence[int]) -> Sequence[Mapping[str, Any]]:
        """Returns the groups and failures of bundles of these draws, as `serialization.tell`."""


class ReadingsFailed(ValueError):
    """More readings of a step failed than the config lets pass."""


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """A run's rollouts: draws and reads; its state is in the ledgers it is given and returns."""

    stream: TaskStream
    reader: Reader
    scoring: Scoring
    probe: Scoring  # of an answer alone, as from a memory that was written again
    wanted: Wanted
    group_size: int
    seed: int
    max_failed_share: float
    local: local.LocalSamples
    shaped: bool = False  # by the lengths of turns
    retire_at: float = 0.0  # pass rate at which a task is drawn no more; 0: none is
    teacher: imitation.Teacher | None = None  # that writes the turns; None: the policy itself
    length: Length = lambda ordinal: 0
    apart: Apart | None = None  # readers of a step's draws; None: they are read here

    async def step(self, ledger: Ledger, version: int) -> tuple[Rollout, dict[str, float]]:
        """Returns the rollout that policy `version` learns from, and its metrics.

        Raises ReadingsFailed where more of the groups failed than `max_failed_share`.
        """
        chunks = self.chunks(version)
        stage = self._stage(chunks)
        documents = self._documents(stage)
        homes = {} if self.local.samples else None  # only local turns come back
        reader = dataclasses.replace(self.reader, chunks_of=_held(documents), homes=homes)
        readers: dict[int, int] = {}  # of this step's draws: which process read it
        read: list[Group] = []

        async def collect(ordinals: Sequence[int]) -> tuple[list[Group], list[collector.Failed]]:
            if self.apart is None:
                draws = self._dealt(stage, ordinals)
                readers.update((one, k) for k, own in enumerate(draws) for one in own)
                groups, failed = await self._read(stage, reader, draws[hosts.index()], version)
            else:
                told = await self.apart.read(version + 1, ordinals)
                groups, failed = self._told(stage, reader, told)
            read.extend(groups)
            return groups, failed

        chosen = await self.apart.drawn(version + 1, ledger) if self.apart else None
        rollout = await dynamic_sampling.collect_informative(
            ledger, collect, self.wanted, version, self._stream(ledger), chosen
        )
        self._check(rollout)
        if self.retire_at:
            rollout = self._with_rates(rollout, read)
        asked_for = self._asked_for(chunks, rollout) | ages(rollout.batch, version)
        if self.apart and self.apart.live:
            asked_for |= mixture(rollout.batch, version)
        if self.local.samples:
            rollout, counted = await self._with_local(reader, rollout, readers)
            asked_for |= counted
        return rollout, rollout.stats.metrics() | asked_for | {
            "data/draws": rollout.ledger.next,
            "data/questions_left_out": self.stream.left_out,
            "data/truncated_documents": documents.truncated_documents,
            "data/truncated_tokens": documents.truncated_tokens,
        }

    async def _with_local(
        self, reader: Reader, rollout: Rollout, readers: Mapping[int, int]
    ) -> tuple[Rollout, dict[str, float]]:
        """Returns the rollout with local turns of some of its groups, and their metrics.

        Several processes choose the same turns; each samples those of the draws that it read,
        whose chunks its engine may still have, and of the groups that waited, its share.
        """
        chosen = local.choose(rollout.batch, self.local.share, self.seed)
        count = hosts.count()
        theirs: list[list[local.ChosenTurn]] = [[] for _ in range(count)]
        for one in chosen:
            ordinal = one.group.ordinal
            theirs[readers.get(ordinal, ordinal % count)].append(one)
        own = theirs[hosts.index()]
        sets = await local.write_again(own, reader, self.local.samples, self.seed, self.probe)
        made = {one.group.place: found for one, found in zip(own, sets, strict=True)}
        if count > 1:
            every = hosts.all_gather(lambda: serialization.tell_local(sets))
            for turns, said in zip(theirs, every, strict=True):
                found = serialization.told_local(said, turns)
                made |= {one.group.place: each for one, each in zip(turns, found, strict=True)}
        batch, stats = local.joined(rollout.batch, made)
        return dataclasses.replace(rollout, batch=batch), stats.metrics()

    def chunks(self, version: int) -> int:
        """Returns the chunks that documents for policy `version` to learn from have at most."""
        return self.stream.curriculum.at(version)

    def draws(self, ledger: Ledger, first: int, out: Sequence[int]) -> Drawn:
        """Returns what a step reads of `out` and from ordinal `first` on, where no group waits."""
        rooms = self.wanted.rooms
        counts = {kind: self.wanted.draws(room, GroupStats()) for kind, room in rooms.items()}
        return task_sampler.draw(first, counts, self._stream(ledger), self.stream.questions, out)

    def bundles(self, chunks: int, ordinals: Sequence[int], parts: int) -> list[list[int]]:
        """Returns the draws of each of several readers, in order, by the lengths of documents.

        Where there are parts enough each has a draw of its own, the longest first.
        """
        lengths = self._lengths(self._stage(chunks), ordinals)
        if parts >= len(ordinals):
            return [[one] for one in sorted(ordinals, key=lambda one: -lengths[one])]
        dealt = shares.deal(list(lengths.values()), parts)
        return [sorted(ordinals[k] for k in own) for own in dealt]

    async def read(
        self, chunks: int, ordinals: Sequence[int], version: int
    ) -> tuple[list[Group], list[collector.Failed]]:
        """Reads draws alone, as policy `version`; documents have at most so many chunks."""
        stage = self._stage(chunks)
        reader = dataclasses.replace(self.reader, chunks_of=_held(self._documents(stage)))
        return await self._read(stage, reader, self._lengths(stage, ordinals), version)

    def _stage(self, chunks: int) -> TaskStream:
        return self.stream.stage(chunks, self.reader.rules.chunk_size)

    def _stream(self, ledger: Ledger) -> Stream:
        records = self.stream.records
        retired = ledger.rates.retired if self.retire_at else frozenset()
        return Stream(
            kind=lambda ordinal: records.key(ordinal)[0],
            retired=lambda ordinal: bool(retired) and records.key(ordinal) in retired,
        )

    def _with_rates(self, rollout: Rollout, read: Sequence[Group]) -> Rollout:
        """Returns the rollout with what its readings say of their tasks in the ledger."""
        records = self.stream.records
        keyed = [(records.key(group.ordinal), group) for group in read]
        rates = rollout.ledger.rates.after(keyed, self.retire_at, records.tasks)
        return dataclasses.replace(rollout, ledger=dataclasses.replace(rollout.ledger, rates=rates))

    def _asked_for(self, chunks: int, rollout: Rollout) -> dict[str, float]:
        """Returns the metrics of what is off in other runs."""
        found: dict[str, float] = {}
        passed = {name: len(rollout.settled.get(name, ())) for name in PASSED}
        if self.stream.curriculum.stages:
            found[task_stream.MOST_CHUNKS] = chunks
        if self.shaped:
            found["rollout/overlong"] = rollout.stats.overlong
        if self.wanted.kinds:
            found["groups/passed_no_room"] = passed[Outcome.NO_ROOM]
        if self.retire_at:
            found["groups/passed_retired"] = passed[Outcome.RETIRED]
            found["tasks/retired"] = len(rollout.ledger.rates.retired)
        return found

    def _documents(self, stage: TaskStream) -> Documents:
        rules = self.reader.rules
        return stage.documents(self.reader.tokenizer, rules.chunk_size, rules.chunk_ends)

    def _dealt(self, stage: TaskStream, ordinals: Sequence[int]) -> list[dict[int, int]]:
        """Returns the draws of each process, with the lengths of their documents.

        The first process looks, for all: what it cannot read another might, and one account is
        needed of which process reads what.
        """
        told = hosts.broadcast(lambda: list(self._lengths(stage, ordinals).values()))
        return [{ordinals[k]: told[k] for k in own} for own in shares.deal(told, hosts.count())]

    def _lengths(self, stage: TaskStream, ordinals: Sequence[int]) -> dict[int, int]:
        return {one: self._length(stage, one) for one in ordinals}

    def _length(self, stage: TaskStream, ordinal: int) -> int:
        """Returns the tokens, about, that are read of a draw's document; 0: unknown."""
        try:
            length = self.length(ordinal)
        except ValueError:  # its reading fails as well, and is counted under its name
            return 0
        return min(length, stage.max_document or length)

    async def _read(
        self, stage: TaskStream, reader: Reader, own: Mapping[int, int], version: int
    ) -> tuple[list[Group], list[collector.Failed]]:
        draws = [
            Draw(ordinal, stage.records.at(ordinal), stage.chunks, own[ordinal])
            for ordinal in sorted(own)
        ]
        if self.teacher:
            read = await imitation.collect(draws, reader, self.teacher, version, self.scoring)
        else:
            read = await collector.collect(draws, reader, self.group_size, self.seed, self.scoring)
        if hosts.count() == 1:
            return read
        every = hosts.all_gather(lambda: serialization.tell(*read))
        others = every[: hosts.index()] + every[hosts.index() + 1 :]
        return self._told(stage, reader, others, *read)

    def _told(
        self,
        stage: TaskStream,
        reader: Reader,
        others: Sequence[Mapping[str, Any]],
        groups: Sequence[Group] = (),
        failed: Sequence[collector.Failed] = (),
    ) -> tuple[list[Group], list[collector.Failed]]:
        """Returns what others read, and what was read here, in the order of the draws."""
        draws = functools.cache(lambda ordinal: stage.records.at(ordinal))

        def task_at(place: Place, chunks: int) -> tuple[Task, Reader]:
            return draws(place[0])[place[1]], reader  # all of one stage

        told = [serialization.told(said, task_at) for said in others]
        found = [*groups, *(one for each, _ in told for one in each)]
        lost = [*failed, *(one for _, each in told for one in each)]
        return sorted(found, key=_place), sorted(lost, key=_place)

    def _check(self, rollout: Rollout) -> None:
        failed, sampled = rollout.failed, rollout.stats.groups_sampled
        if failed and len(failed) > self.max_failed_share * sampled:
            raise ReadingsFailed(
                f"readings failed in {len(failed)} of the {sampled} groups of a step "
                f"(rollout.max_failed_share is {self.max_failed_share}); the first: {failed[0]}"
            ) from failed[0].failure

    def saved(self, ledger: Ledger) -> dict[str, Any]:
        """Returns what a checkpoint keeps: the ledger, and which stream's it is."""
        return {
            "stream": dict(self.stream.records.identity),
            "ledger": serialization.encode(ledger),
        }

    def restored(self, saved: Mapping[str, Any], mended: bool = False) -> Ledger:
        """Returns the ledger that was saved; ValueError if it is another stream's.

        With `mended` rows of its files may have other words by now (`Records.check`).
        """
        records = self.stream.records
        records.check(saved["stream"], mended)

        @functools.cache
        def stage(chunks: int) -> tuple[TaskStream, Reader]:
            of = self._stage(chunks)
            return of, dataclasses.replace(self.reader, chunks_of=self._documents(of))

        def again(place: Place, chunks: int) -> tuple[Task, Reader]:
            (ordinal, question), (of, reader) = place, stage(chunks)
            return of.records.at(ordinal)[question], reader

        return serialization.decode(saved["ledger"], again)


def account(before: Ledger, rollout: Rollout) -> dict[str, Any]:
    """Returns a step's line of ledger.jsonl: what was drawn, and what became of what."""
    out = {"out": list(rollout.ledger.out)} if before.out or rollout.ledger.out else {}
    return {
        "drawn": [before.next, rollout.ledger.next],  # the second is the next step's first
        **out,  # of those before it, what readers have not ended
        **{outcome.value: places for outcome, places in rollout.settled.items()},
        "waiting": [one.group.place for one in rollout.ledger.waiting],
    }


def _place(one: Group | collector.Failed) -> Place:
    return one.place


def _held(documents: Callable[[Task], Chunks]) -> Callable[[Task], Chunks]:
    """Holds on to all chunks: a document drawn again in a step is not tokenised again."""
    held: list[Chunks] = []

    def chunks_of(task: Task) -> Chunks:
        held.append(documents(task))
        return held[-1]

    return chunks_of
