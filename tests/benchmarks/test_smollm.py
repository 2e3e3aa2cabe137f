"""The curve of the published model: what is read, and the tables made of readings on disk."""

import dataclasses
import math
from pathlib import Path

import pytest

from benchmarks import free_questions, marks, smollm
from notepad_jax.eval.measure import Result
from notepad_jax.eval.readings import READINGS, told
from notepad_jax.reading.trace import Spool, TraceFile
from notepad_jax.setup import configuration
from notepad_jax.tasks import comprehension, stories
from notepad_jax.types import Finish

ROOT = Path(__file__).parents[2]

GAINED = "<!-- smollm-gained: begin -->\n<!-- smollm-gained: end -->\n"


def result(task, number, length, correct):
    return Result(
        task_id=f"{task}-{number}", source=f"stories/{task}", method="notepad", length=length,
        repeat=0, question="?", gold=("a",), metric="em", answer="a", correct=correct, problem="",
        scores={}, finish=Finish.STOP, failed=False, turns=3, tokens=length, recall=None, lost="",
        began=0.0, seconds=1.0, changes=0, document=f"{task}-{number}",
    )  # fmt: skip


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """The readings of two readers: single needles 3 of 4 at 1K and one counting question wrong."""
    monkeypatch.setattr(smollm, "RUNS", tmp_path)
    for name, scores in (("imitation", (1, 1, 1, 0)), ("GRPO, two cores, seed 1", (1, 1, 1, 1))):
        smollm.folder(name).mkdir()
        with TraceFile(smollm.folder(name) / READINGS) as file:
            for n, correct in enumerate(scores):
                file.add(told(result("niah_single_2", n, 1024, float(correct))), Spool(), None)
            file.add(told(result("counting", 0, 1024, 0.0)), Spool(), None)
    return tmp_path


def test_every_task_belongs_to_one_kind():
    """But free questions, which most readers were not taught (benchmarks.free_questions)."""
    known = [task for tasks in smollm.KINDS.values() for task in tasks]
    assert sorted([*known, comprehension.NAME]) == sorted(stories.NAMES)


@pytest.mark.parametrize(
    ("folder", "together", "count"),
    [
        (free_questions.TEXTS, False, 40),
        (free_questions.TEXTS, True, 40),
        (free_questions.TEXTS / "unseen", False, 20),
    ],
)
def test_free_questions_are_answered_by_their_texts(folder, together, count):
    found = list(free_questions.tasks(folder, together))
    assert len(found) == len({task.id for task in found}) == count
    for task in found:
        text = "".join(task.document.pieces()).casefold()
        assert any(answer.casefold() in text for answer in task.answers), task.question
        assert "? " not in text  # no question is a part of it


def test_how_it_reads_is_a_config_of_the_suites():
    config = configuration.load("ruler", smollm._how_it_reads())
    assert config.reading.template == "document_first" and config.evaluate.temperature == 0


def test_tables_are_made_of_what_was_read(runs):
    text = smollm.page([point for name in smollm.READERS for point in smollm.points_of(name)])
    needles = text[text.index("**single needles**") :].splitlines()
    assert needles[2] == "| | 1K |"
    assert needles[4].startswith("| imitation | 75.0% (") and needles[4].endswith("n 4 |")
    assert needles[5].startswith("| GRPO, two cores, seed 1 | 100.0% (")
    assert "| imitation | 60.0% (" in text and "n 5 |" in text


def test_a_place_on_a_page(runs, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"a\n<!-- smollm: begin -->\nold\n<!-- smollm: end -->\nb\n{GAINED}b\n")
    (tmp_path / "images").mkdir()
    smollm.main(["--tables", "--page", str(page)])
    text = page.read_text()
    assert text.startswith("a\n<!--") and text.endswith("-->\nb\n") and "old" not in text
    assert "75.0%" in text and "75.0%" in capsys.readouterr().out
    assert "**GRPO, two cores, seed 1**\n\n| | 1K |\n" in text  # what it gained
    assert "| single needles | +25.0 (" in text and "n 4: 1 better, 0 worse |" in text
    assert (tmp_path / smollm.PICTURE).read_text().count("imitation")
    with pytest.raises(ValueError, match="has no place for results"):
        marks.put(page, "other", "")


def test_what_was_measured_elsewhere_stays_until_it_is_measured_anew(runs, tmp_path, capsys):
    page, kept = tmp_path / "page.md", tmp_path / smollm.MEASURED
    page.write_text(f"<!-- smollm: begin -->\n<!-- smollm: end -->\n{GAINED}")
    (tmp_path / "images").mkdir()
    smollm.main(["--tables", "--page", str(page)])
    whole, lines = page.read_text(), kept.read_text()
    for name in ("imitation", "GRPO, two cores, seed 1"):  # as on a machine that has read nothing
        (smollm.folder(name) / READINGS).unlink()
    smollm.main(["--tables", "--page", str(page)])
    assert (page.read_text(), kept.read_text()) == (whole, lines)
    with TraceFile(smollm.folder("imitation") / READINGS) as file:
        file.add(told(result("niah_single_2", 0, 1024, 1.0)), Spool(), None)
        file.add(told(result("niah_single_2", 0, 2048, 0.0)), Spool(), None)
    smollm.main(["--tables", "--page", str(page)])
    assert "| imitation | 75.0%" in page.read_text()  # four questions are more than one
    with TraceFile(smollm.folder("imitation") / READINGS) as file:
        for n in range(1, 6):
            file.add(told(result("niah_single_2", n, 1024, 1.0)), Spool(), None)
    smollm.main(["--tables", "--page", str(page)])
    needles = page.read_text()
    needles = needles[needles.index("**single needles**") :].splitlines()
    assert needles[2] == "| | 1K | 2K |"
    assert "100.0%" in needles[4] and "n 6 | 0.0%" in needles[4]  # not 75% of four any more
    assert needles[5].startswith("| GRPO, two cores, seed 1 | 100.0%") and needles[5].endswith(
        "n 4 | - |"
    )


def test_nothing_read_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm, "RUNS", tmp_path)
    with pytest.raises(SystemExit, match="nothing was read yet"):
        smollm.main(["--tables"])


def test_the_page_of_results_has_its_place():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert 0 < text.index("<!-- smollm: begin -->") < text.index("<!-- smollm: end -->")
    assert "python -m benchmarks.smollm --page docs/results.md" in text


def test_what_was_gained_is_told_question_by_question_and_over_documents():
    old = [result("vt", n, 1024, score) for n, score in enumerate((0.0, 0.5, 1.0, 1.0))]
    new = [result("vt", n, 1024, score) for n, score in enumerate((1.0, 1.0, 0.5, 1.0))]
    everything, kind = smollm.gains(old, new[::-1])
    assert (everything.kind, kind.kind) == (smollm.ALL, "variable tracking")
    assert (kind.questions, kind.mean, kind.better, kind.worse) == (4, 0.25, 2, 1)
    # Differences 1, .5, -.5, 0, apart from their mean by .75, .25, -.75, -.25: 4/3 x 1.25 / 16.
    assert kind.high - kind.mean == pytest.approx(1.96 * (4 / 3 * 1.25 / 16) ** 0.5)
    one = [dataclasses.replace(r, document="the same") for r in old]
    (_, together) = smollm.gains(one, new)
    assert together.high == math.inf  # of one document nobody can tell
    row = smollm.gain_table([everything, kind]).splitlines()[3]
    assert row.startswith("| variable tracking | +25.0 (-") and row.endswith("2 better, 1 worse |")
