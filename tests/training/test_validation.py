"""Validation while training: what it reads, what it marks, and that the training never notices."""

import asyncio
import dataclasses
import json
import signal

import pytest

from notepad_jax import functions
from notepad_jax.checkpoint import best
from notepad_jax.checkpoint.best import Best
from notepad_jax.parallel import hosts
from notepad_jax.rollout import rewards
from notepad_jax.setup import configuration, policies
from notepad_jax.setup.stopping import Stop, Stopped
from notepad_jax.telemetry.metrics import METRICS
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text.tokenizer import open_tokenizer
from notepad_jax.training import train, validation
from notepad_jax.training.validation import SCORE, Validation
from tests import fakes
from tests.eval.reading import items, reader, task
from tests.runs import SMALL, run
from tests.support import same_run

SUITE = (
    "--config.validation.every=2",
    "--config.validation.suite=synthetic",
    "--config.validation.lengths=512,1k",
    "--config.validation.samples=4",
)


# ---------------------------------------------------------------- when, and what follows


def found(*scores: float, every: int = 1, patience: int = 0) -> Validation:
    made = Validation(every, 100, patience)
    for step, score in enumerate(scores):
        made.add(step * every, {SCORE: score})
    return made


def test_the_best_step_is_the_earliest_of_the_highest():
    assert found().best is None
    assert found(0.5, 0.75, 0.25, 0.75, every=10).best == Best(10, 0.75)
    assert found(0.5, 0.5).without_better == 1


def test_patience_counts_validations_since_the_best():
    assert not found(0.5, 0.4, 0.3).exhausted
    assert not found(0.5, 0.4, patience=2).exhausted
    ended = found(0.5, 0.4, 0.5, patience=2)
    assert ended.exhausted
    assert ended.ending.startswith("step 2 is the last: 2 validations brought nothing better than")
    assert not found(0.5, 0.4, 0.6, patience=2).exhausted


def test_every_nth_step_is_due_and_the_first_and_the_last():
    made = Validation(4, 10, 0)
    assert [step for step in range(11) if made.due(step)] == [0, 4, 8, 10]
    assert not any(map(Validation(0, 10, 0).due, range(11)))


def test_what_the_lines_say_is_known(tmp_path):
    lines = [{"step": 2, "reward": 0.5}, {"step": 2, SCORE: 0.25, f"{SCORE}_2K": 0.25}]
    assert validation.told(lines, 2) == {SCORE: 0.25, f"{SCORE}_2K": 0.25}
    assert validation.told(lines[:1], 2) is None and validation.told(lines, 3) is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "is 2, and nothing says on what; name one of validation.split"),
        (("suite=ruler", "split=0.1"), "suite and validation.split says on what; name one"),
        (("split=0.1",), "holds out a share of tasks.files, which is empty"),
        (("split=0.1", "split_by=rows"), "split_by is 'rows'; use documents or questions"),
        (("suite=rulr",), "is 'rulr'; use one of synthetic, ruler, ruler-qa, memory"),
        (("files=nowhere.jsonl",), "there is no task file nowhere.jsonl"),
        (("suite=synthetic",), "validation.lengths is empty; name lengths"),
        (("suite=synthetic", "lengths=long"), "'long' is no length"),
        (("suite=synthetic", "lengths=1k", "repeats=2"), "2 repeats at temperature 0"),
    ],
)
def test_settings_that_cannot_work_are_one_line_before_anything_is_loaded(tmp_path, words, says):
    words = [f"--config.validation.{word}" for word in ("every=2", *words)]
    with pytest.raises(ValueError, match=says) as refused:
        train.check(configuration.load("quickstart", [*SMALL, *words]), tmp_path, False, None)
    assert "\n" not in str(refused.value)


def test_a_suite_that_a_policy_cannot_be_asked_is_refused_by_its_first_task():
    class Counts(SilentScreen):
        made = 0

        def advance(self, amount=1, **shown):
            self.made += amount

    words = ("every=2", "suite=ruler", "lengths=4k", "samples=3")
    config = configuration.load("quickstart", [f"--config.validation.{word}" for word in words])
    screen, tokenizer = Counts(), open_tokenizer("data/starter")
    with pytest.raises(ValueError, match=r"tokens and the limit is 8"):
        validation.items(config, None, tokenizer, screen)
    assert screen.made == 0


# ---------------------------------------------------------------- one validation


def measuring(temperature: float = 0.0) -> Validation:
    """Five questions at two lengths, read by somebody who writes down each chunk's first word."""
    tasks = [task(name, f"{name} is blue of red", name) for name in ("red", "green", "blue")]
    read_at = [*items(*tasks, length=512), *items(*tasks[:2], length=2048)]
    made = reader(fakes.first_of_chunk())
    sampling = dataclasses.replace(made.sampling, temperature=temperature)
    return Validation(1, 9, 0, read_at, dataclasses.replace(made, sampling=sampling))


def by_length(reading):
    """Worth more the later its question; of each reading, not of a metric."""
    return 0.5 + len(reading.memories) / 16


def test_rows_are_judged_as_the_run_rewards_and_a_suite_by_its_own_metrics():
    """By a function, and by several by weight, as by a metric's name; scores say which it was."""
    with functions.lending([by_length]) as (name,):
        for said, of_suite, score in (
            (name, False, 0.5 + 3 / 16),
            (f"{name}=1,em=1", False, (0.5 + 3 / 16 + 2 / 5) / 2),
            (name, True, 2 / 5),
            ("em", False, 2 / 5),
        ):
            beside = ("suite=synthetic", "lengths=1k") if of_suite else ("files=mine.jsonl",)
            words = [f"--config.validation.{word}" for word in ("every=1", *beside)]
            words.append(f"--config.tasks.reward={said}")
            plain = measuring()
            made = validation.opened(
                configuration.load("quickstart", [*SMALL, *words]),
                plain.items, plain.reader, rewards.of(said),
            )  # fmt: skip
            made.reader = plain.reader  # by hand-made chunks
            metrics = asyncio.run(made.measure(4, Stop(), SilentScreen()))
            assert metrics[SCORE] == pytest.approx(score)
            own = said != "em" and not of_suite
            assert (made.digest() != plain.digest()) == own


def test_every_engine_validates_with_all_of_its_slots():
    words = [*SMALL, "--config.validation.every=1", "--config.engine.slots=16"]
    for engines in (1, 3):
        config = configuration.load("quickstart", [*words, f"--config.engine.per_cpu={engines}"])
        assert validation.opened(config, (), measuring().reader).reader.at_once == 16 * engines


def test_a_validation_is_the_share_of_questions_right_by_length_and_over_all():
    metrics = asyncio.run(measuring().measure(4, Stop(), SilentScreen()))
    by_length = metrics[f"{SCORE}_512"], metrics[f"{SCORE}_2K"]
    assert by_length == (1 / 3, 1 / 2) and metrics[SCORE] == pytest.approx(2 / 5)
    assert (metrics["validation/questions"], metrics["validation/unanswered"]) == (5, 0)


def test_several_processes_read_a_share_each_and_find_the_same(monkeypatch):
    whole, said = asyncio.run(measuring().measure(4, Stop(), SilentScreen())), []
    monkeypatch.setattr(hosts, "count", lambda: 2)

    def one_of_two(index, gather):
        monkeypatch.setattr(hosts, "index", lambda: index)
        monkeypatch.setattr(hosts, "gather", gather)
        made = measuring()
        return asyncio.run(made.measure(4, Stop(), SilentScreen())), made.reader.completer.calls

    def alone(told):
        said.append(told)
        return [told]

    calls = [len(one_of_two(index, alone)[1]) for index in (0, 1)]
    assert min(calls) > 0  # nobody reads everything
    nobody = b'{"value": null}'  # stops
    parts = [told for told in said if told != nobody]
    for index in (0, 1):
        gathered = one_of_two(index, lambda told: parts if told != nobody else [told] * 2)[0]
        assert gathered == whole


def test_other_tasks_or_another_sampling_begin_a_new_curve():
    first, same, other = measuring(), measuring(), measuring(temperature=0.5)
    first.add(0, {SCORE: 0.5})
    assert same.restored(first.saved(), SilentScreen()) and same.found == first.found
    assert not other.restored(first.saved(), SilentScreen()) and other.begun_anew
    assert Validation(0, 9, 0).saved() == {}


# ---------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("validated") / "run"
    run(folder, *SUITE)
    return folder


@pytest.mark.slow
def test_a_run_that_validates_trains_as_one_that_does_not(validated, uninterrupted):
    lines = [json.loads(line) for line in (validated / METRICS).open()]
    plain = [line for line in lines if SCORE not in line]
    assert plain == [json.loads(line) for line in (uninterrupted / METRICS).open()]
    read = [line for line in lines if SCORE in line]
    assert [line["step"] for line in read] == [0, 2, 4]
    for line in read:
        assert line["validation/questions"] == 8
        mean = (line[f"{SCORE}_512"] + line[f"{SCORE}_1K"]) / 2
        assert line[SCORE] == pytest.approx(mean)
    marked = max(read, key=lambda line: (line[SCORE], -line["step"]))
    others = same_run.differences(uninterrupted, validated)
    steps = sorted({"3", "4", str(marked["step"])})
    assert [one for one in others if METRICS not in one and "/data: " not in one] == [
        f"checkpoints: ['3', '4'] are now {[*steps, 'best.json']}"
    ]
    assert best.read(validated / "checkpoints") == Best(marked["step"], marked[SCORE])
    assert policies.resolved(f"{validated}@best").step == marked["step"]


@pytest.mark.slow
def test_killed_around_a_validation_it_is_the_run_that_was_not(validated, tmp_path, monkeypatch):
    """Stopped in the one of step 2; then killed when its line is written and nothing else."""
    folder, measure, mark = tmp_path / "run", validation.measure, best.mark

    async def interrupted(items, reader, on_progress, **how):
        if reader.completer.version == 2:
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)
        return await measure(items, reader, on_progress, **how)

    def killed(checkpoints, one):
        if one is not None and len(steps_of(folder)) == 4:  # two steps and two validations
            raise MemoryError
        mark(checkpoints, one)

    def steps_of(run_folder):
        return [json.loads(line)["step"] for line in (run_folder / METRICS).open()]

    monkeypatch.setattr(validation, "measure", interrupted)
    with pytest.raises(Stopped, match="in the validation of step 2, which is made again"):
        run(folder, *SUITE)
    monkeypatch.setattr(validation, "measure", measure)
    monkeypatch.setattr(best, "mark", killed)
    with pytest.raises(MemoryError):
        run(folder, *SUITE, resume=True)
    monkeypatch.setattr(best, "mark", mark)
    run(folder, *SUITE, resume=True)
    assert same_run.differences(validated, folder) == []
