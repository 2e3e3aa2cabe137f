"""The measurement of an evaluation: many readings concurrently, each scored and kept small.

`measure` watches the loop that training reads in, too (`reading.loop`). Of a reading it
returns its answer, its scores and what became of the evidence; every memory goes to a
trace as it is written, so nothing held here grows with the length of a document or with
how often a policy rewrites its memory. Neighbours: methods (how a document is shown) and
recall (where an answer was lost) below, `readings` (results on disk) beside, the
programs above.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from notepad_jax.data.admission import LONG, Fault
from notepad_jax.eval import methods
from notepad_jax.reading import memory_agent, turn_credit
from notepad_jax.reading.loop import Job, Reader, ReadingEnd, read_all
from notepad_jax.reading.sampling import hashed_seed
from notepad_jax.reading.trace import MemoryChange
from notepad_jax.scoring import extraction, metrics
from notepad_jax.scoring.reading_record import ReadingRecord, Recorder
from notepad_jax.scoring.recall import Recall
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Finish, Status, Task, Tokens, Turn, TurnKind

TWO_WAY = "sub_em_two_way"  # for comparison with published figures only
REPORTED = ("em", "normalised_em", "token_f1", "sub_em", TWO_WAY)  # beside a task's own metric


@dataclasses.dataclass(frozen=True)
class Item:
    """One reading to be made."""

    task: Task
    method: str  # of methods.METHODS
    length: int  # the length asked for, tokens
    repeat: int  # 0-based; repeats of a question differ in their noise alone
    max_answer: int | None = None  # tokens of all its contexts; None: as the reader's rules say
    document: str = ""  # its name among the items; "": no other item has it

    @property
    def key(self) -> Key:
        return (self.method, self.length, self.task.id, self.repeat)


Key = tuple[str, int, str, int]


@dataclasses.dataclass(frozen=True)
class Result:
    """One reading, scored; small, whatever was read. Its memories are in its trace."""

    task_id: str
    source: str
    method: str
    length: int
    repeat: int
    question: str
    gold: tuple[str, ...]
    metric: str  # the task's own; it says whether one gold answer is wanted or all
    answer: str
    correct: float  # by the task's own metric, or the reward that judged it, in [0, 1]
    problem: str  # why a reading failed or an answer could not be scored; empty if neither
    scores: Mapping[str, float]  # by every metric of REPORTED
    finish: Finish  # of the last answer turn; CANCELLED where there is no answer
    failed: bool  # the completer failed: counts as wrong, and going on makes it again
    turns: int
    tokens: int  # document tokens shown to the policy
    recall: float | None  # share of the evidence in the last memory
    lost: str  # recall.Recall.fate
    began: float  # wall clock, seconds since 1970
    seconds: float  # wall time of this reading, which shares the machine with others
    changes: int  # times that the memory changed
    document: str = ""  # as its item's
    answer_turns: int = 1  # of `turns`, those of the answer
    evidence: tuple[str, ...] = ()  # the words of each fact that recall looks for
    captured: float | None = None  # share of the evidence that was ever written
    actions: Mapping[str, int] = dataclasses.field(default_factory=dict)  # update turns by Action

    @property
    def key(self) -> Key:
        return (self.method, self.length, self.task_id, self.repeat)


# What an answer is worth in the place of the task's metric, from 0 to 1; may take its time.
Judge = Callable[[Task, ReadingRecord], Coroutine[Any, Any, float]]


class TraceWriter(Protocol):
    """Records one reading: its memories as they change, and its turns (`readings.OpenTrace`)."""

    def add(self, change: MemoryChange) -> None: ...

    def turn(self, turn: Turn) -> None: ...


REFRESH = 0.1  # seconds


class EvalProgress(NamedTuple):
    """The progress of a measurement; reported every `REFRESH` seconds and after every reading."""

    turns: int  # over all readings
    done: int  # readings
    total: int  # readings
    correct: float  # sum over finished readings
    ended: int = 0  # of `turns`, those of finished readings


async def measure(
    items: Sequence[Item],
    reader: Reader,
    on_progress: Callable[[EvalProgress], None] = lambda progress: None,
    excerpts: methods.Excerpts | None = None,
    trace_of: Callable[[Item], TraceWriter] | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    on_failure: Callable[[Exception], None] = lambda failure: None,
    judge: Judge | None = None,
) -> list[Result]:
    """Makes all readings, `reader.at_once` at a time; results come in the order of items.

    The noise of a reading depends on `reader.sampling.seed` and its item alone, so neither the
    order nor `at_once` changes an answer. `excerpts` is for the methods of one turn.
    `on_result` is called as each reading ends, and has been judged: by its task's metric, or by
    `judge`, while others are read. A reading that fails counts as wrong and says why; `on_failure`
    is told. A completer that is broken itself ends everything
    (CompleterFailed). What is wrong with the items themselves is raised before anything is
    read (`check`).
    """
    check(items, reader.tokenizer, reader.rules.max_question)
    now, due = EvalProgress(0, 0, len(items), 0.0), 0.0

    def turned() -> None:
        nonlocal now, due
        now = EvalProgress(now.turns + 1, now.done, now.total, now.correct, now.ended)
        if time.perf_counter() >= due:  # to show a turn takes as long as to plan one
            due = time.perf_counter() + REFRESH
            on_progress(now)

    def watch(index: int) -> _Course:
        item = items[index]
        trace = trace_of(item) if trace_of else None
        left = functools.partial(turn_credit.left, reader.rules)
        recorder = Recorder(item.task, reader.tokenizer.decode, left) if judge else None
        notes = reader.rules.order != "serial"
        return _Course(item, reader.tokenizer, trace, turned, recorder, notes)

    async def judged(index: int, course: _Course, end: ReadingEnd) -> None:
        if judge is not None and end.finish is not Finish.CANCELLED:
            course.worth = await judge(items[index].task, course.record(end))

    def ended(index: int, course: _Course, end: ReadingEnd) -> Result:
        nonlocal now
        if _broke(end):
            on_failure(end.failure)
        result = course.result(end)
        on_result(result)
        correct, ended_turns = now.correct + result.correct, now.ended + result.turns
        now = EvalProgress(now.turns, now.done + 1, now.total, correct, ended_turns)
        on_progress(now)
        return result

    jobs = [_job(item, reader.sampling.seed, excerpts) for item in items]
    return await read_all(jobs, reader, watch, ended, judged)


def _job(item: Item, seed: int, excerpts: methods.Excerpts | None) -> Job:
    own = hashed_seed("eval", seed, item.method, item.length, item.task.id, item.repeat)
    if item.method == methods.NOTEPAD:
        return Job(item.task, own, max_answer=item.max_answer, length=item.length)
    if excerpts is None:
        raise ValueError(f"{item.method} shows an excerpt, and nobody said how long it may be")
    document, method = item.task.document, item.method
    return Job(item.task, own, lambda: excerpts(document, method)[0], item.max_answer)


def _broke(end: ReadingEnd) -> bool:
    """Whether a reading failed; a document that does not fit is a result of its method."""
    return end.failure is not None and not isinstance(end.failure, methods.TooLong)


def check(items: Sequence[Item], tokenizer: Tokenizer, max_question: int) -> None:
    """Validates the items before any of them is read.

    Raises ValueError for two of one name, an unknown metric or contract, a question over the
    limit, and evidence without words.
    """
    seen: set[Key] = set()
    for item in items:
        if item.key in seen:
            raise ValueError(
                f"two tasks of length {item.length} are called {item.task.id!r}; ids are unique"
            )
        seen.add(item.key)
    for task in {id(item.task): item.task for item in items}.values():
        check_task(task, tokenizer, max_question)


def check_task(task: Task, tokenizer: Tokenizer, max_question: int) -> None:
    """Validates a task alone, as `check` does; a Fault of a question over the limit."""
    try:
        metrics.score("", task.answers, task.metric, task.contract)
        Recall(task.evidence)
    except ValueError as error:
        raise ValueError(f"task {task.id!r}: {error}") from error
    try:
        memory_agent.question_of(task, tokenizer, max_question)
    except ValueError as error:
        raise Fault(str(error), LONG) from error


class _Course:
    """Watches one reading: what its memory went through, and what came of it."""

    def __init__(
        self, item: Item, tokenizer: Tokenizer, trace: TraceWriter | None,
        turned: Callable[[], None],
        recorder: Recorder | None = None, notes: bool = False,
    ) -> None:  # fmt: skip
        self.worth: float | None = None  # of the answer, where a judge scores it
        self._recorder = recorder  # for the judge: all memories, which are kept for it alone
        self._notes = notes  # whether turns write what is no memory yet
        self._item, self._tokenizer, self._trace, self._turned = item, tokenizer, trace, turned
        self._clock, self._began = time.time(), time.perf_counter()
        self._recall = Recall(item.task.evidence if item.method == methods.NOTEPAD else ())
        self._memory = b""  # that of the last turn
        self._turns = self._answers = self._changes = 0
        self._did: Counter[str] = Counter()

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def turn(self, turn: Turn, memory: Tokens) -> None:
        self._turns += 1
        if turn.kind is TurnKind.ANSWER:
            self._answers += 1
        else:
            self._did[turn.action.value] += 1
        if self._trace is not None:
            self._trace.turn(turn)
        if self._recorder is not None:
            self._recorder.turn(turn, memory)
        if self._notes and turn.kind is TurnKind.UPDATE:
            self._recall.note(self._tokenizer.decode(memory_agent.written(turn.completion)))
        if memory.tobytes() != self._memory:  # of one dtype, always
            self._memory = memory.tobytes()
            text = self._tokenizer.decode(memory)
            self._changes += 1
            self._recall.see(text)
            if self._trace is not None:
                self._trace.add(
                    MemoryChange(turn.chunk, text, len(memory), self._seconds, self._recall.final)
                )
        self._turned()

    def record(self, end: ReadingEnd) -> ReadingRecord:
        """Returns the reading as a judge sees it."""
        status = Status.ANSWERED if end.finish is Finish.STOP else Status.TRUNCATED
        return self._recorder.record(self._item.repeat, end.answer, status.value, end.chunks)

    def result(self, end: ReadingEnd) -> Result:
        """Scores the answer, unless it is judged."""
        item, task, answered = self._item, self._item.task, end.finish is not Finish.CANCELLED
        score = metrics.score(end.answer, task.answers, task.metric, task.contract, task.question)
        correct = score.value if answered else 0.0
        if self.worth is not None:
            correct, score = self.worth, metrics.Score(self.worth, "")
        return Result(
            task_id=task.id,
            source=task.source,
            method=item.method,
            length=item.length,
            repeat=item.repeat,
            question=task.question,
            gold=task.answers,
            metric=task.metric,
            answer=end.answer,
            correct=correct,
            problem=_problem(end) or (score.problem if answered else ""),
            scores={
                name: _reported(name, end.answer, task) if answered else 0.0 for name in REPORTED
            },
            finish=end.finish,
            failed=_broke(end),
            turns=self._turns,
            tokens=end.tokens,
            recall=self._recall.final,
            lost=self._recall.fate(correct == 1.0) if answered else "",
            began=self._clock,
            seconds=self._seconds,
            changes=self._changes,
            document=item.document,
            answer_turns=self._answers,
            evidence=tuple(fact.text for fact in task.evidence),
            captured=self._recall.captured,
            actions=dict(self._did),
        )


def _reported(name: str, answer: str, task: Task) -> float:
    """The worth of an answer by a metric of REPORTED.

    RULER's own scores look at all of an answer; these at what stands in its box. Where a sign
    may be left out, published evaluations count nothing without one.
    """
    contract = {"plain": "auto", "auto": "signed" if name == TWO_WAY else "auto"}
    said = extraction.extract(answer, contract.get(task.contract, task.contract)).answer
    return metrics.METRICS[name](said or "", task.answers)


def _problem(end: ReadingEnd) -> str:
    if end.failure is None:
        return ""
    return f"{type(end.failure).__name__}: {end.failure}" if _broke(end) else str(end.failure)
