"""The loop that `train` goes round, without a device: sampled, packed, learnt from, gone on with.

Rollouts, agent, engine, journal and packing are the real ones. Keys and values are hashes
(`tests.slots`), so a token that was shown anything but its context is another one; and what
learns is a hash of the packed batch, so a run that goes on from one other bit is another run.
"""

import asyncio
import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import signal
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax import waiting
from notepad_jax.engine.metered import Metered
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.grpo import algorithm
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.rollout import dynamic_sampling, local, rewards
from notepad_jax.rollout.ledger import Ledger
from notepad_jax.setup import stopping
from notepad_jax.setup.task_stream import TaskStream
from notepad_jax.training import rollouts
from notepad_jax.training.partial_rollout import FILE, UnderWay
from notepad_jax.training.rollouts import Rollouts
from notepad_jax.types import PolicySnapshot, Task, TextDocument, TrainBatch
from tests import fakes, slots
from tests.grpo.test_algorithm import having, never

SAYS = tuple(fakes.tokenizer().encode("red red red red blue blue ann").tolist())


def two_questions(ordinal: int) -> tuple[Task, Task]:
    """Of a document that two draws have alike, of one chunk and a half, or of three."""
    document = TextDocument("the code of ann is red . bob says " * (1 + ordinal // 2 % 2))
    asked = (("who ?", "blue"), ("the secret code ?", "red"))
    return tuple(
        Task(f"{ordinal}{k}", question, document, (answer,), f"kind {k}", "sub_em")
        for k, (question, answer) in enumerate(asked)
    )


RECORDS = types.SimpleNamespace(
    at=two_questions, identity={"seed": 0}, check=lambda saved, mended: None
)


@dataclasses.dataclass(frozen=True)
class How:
    """The settings that a completion must not depend on, and those of answers."""

    answer_chunks: int = 1
    carry: int = 0
    stops: tuple[int, ...] = (2,)
    drafts: bool = True
    share: bool = True
    page_size: int = 4
    slots: int = 4
    steps: int = 2
    more_pages: int = 20  # than the longest turn needs
    local: int = 0
    staleness: int = 1
    give_back: bool = False  # cache and weights, while something else has the memory
    unsound: bool = False  # every other update is not finite, and skipped

    @property
    def says(self) -> tuple[int, ...]:
        return SAYS + 2 * self.stops[:1] + self.stops[1:]

    def rules(self) -> Rules:
        several = {"answer_chunks": self.answer_chunks, "carry": self.carry}
        return Rules(4, 8, 5, 4, "overwrite", **several)

    def engine(self, rules: Rules) -> EngineSettings:
        r, answer = rules, max(rules.max_memory, rules.max_answer)
        sizes = r.max_question, r.chunk_size, r.max_memory, r.carry
        longest = fakes.template().longest_prompt(*sizes)
        return EngineSettings(
            slots=self.slots, page_size=self.page_size,
            pages=-(-(longest + answer) // self.page_size) + self.more_pages, max_prompt=longest,
            max_new_tokens=answer, steps_per_launch=self.steps, row_tokens=longest + answer,
        )  # fmt: skip


class Right:
    """A completer whose completions are those of no cache; counts what was tried."""

    def __init__(self, service: EngineService, how: How) -> None:
        self.policies: dict[int, slots.HashPolicy] = {}
        self.tried: collections.Counter[str] = collections.Counter()
        self._service, self._how = service, how

    async def complete(self, prompt, sampling):
        completion = await self._service.complete(prompt, sampling)
        policy = self.policies[completion.policy_version]
        assert slots.is_right(completion, policy, prompt, sampling), (prompt, sampling, completion)
        shared = len(prompt.shared) if self._how.share else 0
        if len(prompt.tail) == 1 and shared >= self._how.page_size:
            self.tried["one token"] += 1
            self.tried["one token, and the page is full"] += (shared + 1) % self._how.page_size == 0
        if prompt.begun:
            self.tried["goes on"] += 1
        return completion


class Loop:
    """A process of a run: what is on disk, and what it does until it is stopped."""

    def __init__(
        self, how: How, folder: Path, stop_at: int, kill_at: int = -1, keep_turns: int = 0
    ):
        self.how, self.folder, self.stop, self.made = how, folder, stopping.Stop(), 0
        self.says, self.batches = [], []
        rules = how.rules()
        identity = json.loads(json.dumps(dataclasses.asdict(how)))
        self.begun = UnderWay(folder, identity, self.stop, self.says.append, keep_turns)

        def launched(number: int) -> None:
            self.made = number + 1
            if number == kill_at:
                raise RuntimeError("killed")
            if number == stop_at:
                self.stop.number = signal.SIGTERM
                self.stop.noticed.set()

        watched = slots.Watched(slots.executor(how.engine(rules)), launched)
        self.service = EngineService(
            self.begun.around(Metered(watched, lambda *told: None)), PolicySnapshot(-1, None),
            share_prefixes=how.share, use_drafts=how.drafts,
        )  # fmt: skip
        self.right = Right(self.service, how)
        stream, tokenizer = TaskStream(RECORDS, 2, 0, None), fakes.tokenizer()
        self.rollouts = Rollouts(
            stream=stream,
            reader=Reader(
                self.right, tokenizer, dataclasses.replace(fakes.template(), stop_ids=how.stops),
                rules, TurnSampling(1.0, 1.0, how.stops, 0),
                stream.documents(tokenizer, rules.chunk_size, rules.chunk_ends),
            ),
            scoring=rewards.PLAIN,
            probe=rewards.PLAIN,
            wanted=dynamic_sampling.Wanted(1, 2, 3, how.staleness),
            group_size=3,
            seed=5,
            max_failed_share=0.0,
            local=local.LocalSamples(how.local, 1.0, 0.5),
        )  # fmt: skip

    async def run(self, steps: int) -> None:
        """Goes on to step `steps`, a line of account.jsonl each; raises Stopped."""
        step, number, ledger = 0, 0, Ledger()
        saved, lines = self.folder / "saved.json", self.folder / "account.jsonl"
        if saved.exists():
            found = json.loads(saved.read_text())
            step, number, ledger = found["step"], found["number"], self.rollouts.restored(found)
        if lines.exists():
            lines.write_text("".join(lines.read_text().splitlines(True)[:step]))
        self.begun.take_up(step)
        self.service.start_with(self._policy(step, number))
        async with self.service:
            while step < steps:
                before, version = ledger, self.service.version
                rollout, metrics = await self.begun.rolled(
                    step + 1, version, before.next, self.rollouts.step(before, version)
                )
                if self.how.give_back:
                    self.service.rest(weights=True)
                counts = dataclasses.asdict(self.service.take_stats())
                del counts["prefill_seconds"], counts["decode_seconds"]
                self.right.tried["accepted drafts"] += counts["draft_tokens"]
                batches, _ = algorithm.batches(*having(), rollout.batch, never, never, version)
                self.batches += batches
                for batch in batches:
                    check_seen(batch, self.right.policies[version])
                then = functools.reduce(learnt, batches, number)
                if skipped := self.how.unsound and then % 2 == 1:
                    rollout = dynamic_sampling.without_update(rollout, before)
                step, ledger = step + 1, rollout.ledger
                account = {"step": step, "learnt": then, **rollouts.account(before, rollout)}
                with lines.open("a") as file:
                    file.write(json.dumps({**account, **metrics, **counts}) + "\n")
                if not skipped:
                    number = then
                    kept = {"step": step, "number": number, **self.rollouts.saved(ledger)}
                    saved.write_text(json.dumps(kept))
                    await self.service.adopt(self._policy(step, number), drain=True)
                    self.begun.done(step)
                elif self.how.give_back:
                    await self.service.adopt(self._policy(version, number))

    def _policy(self, version: int, number: int) -> PolicySnapshot:
        self.right.policies[version] = slots.HashPolicy(number, self.how.says)
        return PolicySnapshot(version, self.right.policies[version])


def learnt(number: int, batch: TrainBatch) -> int:
    """The number of the policy after an update: another for every other bit of the batch."""
    digest = hashlib.sha256(str(number).encode())
    for field in dataclasses.fields(batch):
        digest.update(np.asarray(getattr(batch, field.name)).tobytes())
    return int(digest.hexdigest()[:12], 16)


def check_seen(batch: TrainBatch, policy: slots.HashPolicy) -> None:
    """What is learnt from is shown, in its row, what it was shown when it was sampled.

    Of tokens that `policy` sampled; those of groups that waited have another's.
    """
    for r, on_T in enumerate((batch.weights > 0) & (batch.age == 0)):
        keys_T = policy.row_keys(batch.tokens[r], batch.positions[r], batch.kv_end[r])
        for at in np.flatnonzero(on_T).tolist():
            logprob = policy.logprob(int(keys_T[at - 1]), int(batch.tokens[r, at]), 1.0)
            assert slots.coarse([logprob]) == slots.coarse([batch.behaviour_logprobs[r, at]])


def go(how: How, folder: Path, steps: int = 2, stop_at: int = -1) -> Loop:
    """One process of a run: to its end, or to a launch at which it is told to stop."""
    folder.mkdir(exist_ok=True)
    loop = Loop(how, folder, stop_at)

    async def limited() -> None:
        async with asyncio.timeout(60):
            await loop.run(steps)

    try:
        waiting.run(limited())
    except stopping.Stopped:
        assert loop.made > stop_at >= 0
    return loop


# ---------------------------------------------------------------- what no setting of speed changes


ANSWERS = ((1, 0), (2, 1), (4, 3))


@pytest.mark.parametrize("stops", [(2,), (2, 7)])
@pytest.mark.parametrize(("answer_chunks", "carry"), ANSWERS)
def test_whatever_runs_how_fast_the_same_is_learnt_from(answer_chunks, carry, stops, tmp_path):
    tried: collections.Counter[str] = collections.Counter()
    learnt_from = set()
    fast = itertools.product((True, False), (True, False), (4, 8), (2, 9), (1, 3))
    for number, (drafts, share, page_size, at_once, steps) in enumerate(fast):
        how = How(answer_chunks, carry, stops, drafts, share, page_size, at_once,
                  steps, more_pages=number % 7)  # fmt: skip
        loop = go(how, tmp_path / str(number), 1)
        assert len(loop.batches) == 1
        learnt_from |= {learnt(0, coarsened(batch)) for batch in loop.batches}
        tried.update(loop.right.tried)
    assert len(learnt_from) == 1
    assert min(tried.values()) >= 12 and len(tried) == (4 if answer_chunks > 1 else 1)


def coarsened(batch: TrainBatch) -> TrainBatch:
    """The batch with what the contexts decide of its logprobs."""
    there = {
        name: np.reshape(slots.coarse(getattr(batch, name).ravel()), batch.tokens.shape)
        for name in ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs")
    }
    return dataclasses.replace(batch, **there)


# ---------------------------------------------------------------- stopped and gone on with


def account(folder: Path) -> list[str]:
    return (folder / "account.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_an_answer_in_contexts_stopped_at_any_launch_goes_on_to_the_same_bits(tmp_path):
    how = How(answer_chunks=3, carry=2, slots=3, page_size=4, more_pages=4)
    whole = go(how, tmp_path / "whole", 1)
    kept = set()
    for launch in range(whole.made):
        folder = tmp_path / str(launch)
        go(how, folder, 1, launch)
        assert not (folder / "account.jsonl").exists() and (folder / FILE).exists()
        again = go(how, folder, 1)
        assert account(folder) == account(tmp_path / "whole"), launch
        assert not (folder / FILE).exists()
        (said,) = again.says
        assert (
            said == f"step 1 goes on with the {again.begun.replays.replayed} turns that had ended"
        )
        kept.add(again.begun.replays.replayed)
    assert len(kept) > 10


@st.composite
def hows(draw) -> How:
    answer_chunks, carry = draw(st.sampled_from(ANSWERS))
    flip = st.booleans()
    return How(
        answer_chunks, carry, draw(st.sampled_from([(2,), (2, 7)])), draw(flip), draw(flip),
        page_size=draw(st.sampled_from([1, 2, 4, 8])), slots=draw(st.integers(1, 9)),
        steps=draw(st.integers(1, 4)), more_pages=draw(st.integers(0, 30)),
        local=draw(st.sampled_from([0, 2])), staleness=draw(st.integers(0, 1)),
        give_back=draw(flip), unsound=draw(flip),
    )  # fmt: skip


@given(how=hows(), stops=st.lists(st.integers(0, 40), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_any_run_stopped_now_and_then_is_the_run_that_was_not(tmp_path_factory, how, stops):
    folder = tmp_path_factory.mktemp("runs")
    go(how, folder / "whole")
    for launch in stops:
        go(how, folder / "run", stop_at=launch)
    again = go(how, folder / "run")
    assert account(folder / "run") == account(folder / "whole")
    assert all("goes on with the" in line for line in again.says)
