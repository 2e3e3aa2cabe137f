"""What an evaluation reads: tasks that do not fit a length, limits of an answer."""

from types import SimpleNamespace

import pytest

from notepad_jax.programs import evaluate
from notepad_jax.setup import configuration, eval_jobs
from notepad_jax.telemetry.screen import SilentScreen
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.tokenizer import counter


class Told(SilentScreen):
    """Keeps what nobody may miss."""

    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


def config_of(*words):
    words = (f"--config.evaluate.{word}" for word in ("suite=ruler", "samples=1", *words))
    return configuration.load("ruler", ["--config.sources.text=noise", *words])


def tasks_of(config, *lengths):
    screen, count = Told(), counter(ApproximateTokenizer())
    return eval_jobs.tasks_of(config, list(lengths), count, screen), screen.warnings


def test_a_task_that_does_not_fit_a_length_does_not_stop_the_others():
    tasks, warnings = tasks_of(config_of("tasks=cwe,vt"), 260, 1024)
    assert {n: [task.source for task in some] for n, some in tasks.items()} == {
        260: ["ruler/vt"],
        1024: ["ruler/vt", "ruler/cwe"],
    }
    (told,) = warnings
    assert told.startswith("left out: ruler/cwe cannot be 260 tokens long: 10 words 6 times each")


def test_a_length_that_suits_no_task_is_left_out_with_its_tasks():
    tasks, warnings = tasks_of(config_of("tasks=cwe,vt"), 10, 1024)
    assert list(tasks) == [1024] and len(warnings) == 2


def test_a_task_is_refused_when_it_is_made_and_not_after_all_are():
    made = []

    def admit(task):
        made.append(task.source)
        if len(made) == 2:
            raise ValueError("the question is too long")

    config, screen = config_of("tasks=cwe,vt", "samples=1000"), Told()
    with pytest.raises(ValueError, match="too long"):
        eval_jobs.tasks_of(config, [1024], counter(ApproximateTokenizer()), screen, admit)
    assert len(made) == 2


def test_a_report_says_which_length_lacks_which_task():
    def gaps(*there):
        return evaluate._gaps([SimpleNamespace(source=s, length=n) for s, n in there])

    assert gaps(("a", 1024), ("b", 1024), ("a", 2048), ("b", 2048)) == ""
    assert gaps(("a", 260), ("a", 1024), ("b", 1024)) == (
        " Not every task has every length: 260 is without b."
    )
    many = gaps(("b", 9), *(("a", n) for n in range(1, 9)))
    assert many.endswith("3 is without b; 4 is without b; and 5 more lengths.")


def test_answers_end_at_rulers_limits_where_that_is_wanted():
    def limits(*words):
        config = config_of("tasks=vt,cwe,qa_2,niah_single_1", *words)
        (job,) = eval_jobs.jobs(config, tasks_of(config, 1024)[0])
        return {item.task.source.partition("/")[2]: item.max_answer for item in job.items}

    assert set(limits().values()) == {None}
    assert limits("ruler_limits=True") == {"vt": 30, "cwe": 120, "qa_2": 32, "niah_single_1": 128}
