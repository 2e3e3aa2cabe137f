"""What leaving early costs is counted on the same questions, and only of those that were right."""

import dataclasses

import pytest

from benchmarks import exits
from notepad_jax.eval.readings import READINGS, told
from notepad_jax.eval.summary import wilson_interval
from notepad_jax.reading.trace import Spool, TraceFile
from tests.benchmarks.test_smollm import result

TO_THE_END, EARLY = (1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 1.0, 1.0)


def readings(scores, tokens):
    made = [result("vt", n, 1024, score) for n, score in enumerate(scores)]
    return [dataclasses.replace(one, tokens=tokens) for one in made]


def test_what_is_lost_is_a_share_of_what_was_right_to_the_end():
    (cost,) = exits.costs(2, readings(TO_THE_END, 1000), readings(EARLY, 250))
    assert (cost.length, cost.after, cost.won, cost.read) == (1024, 2, 1, 0.25)
    assert cost.right.mean == 0.75 and cost.lost.mean == 1 / 3
    assert (cost.lost.low, cost.lost.high) == wilson_interval(1, 3)


def test_other_questions_are_not_compared():
    with pytest.raises(KeyError):
        exits.costs(2, readings(TO_THE_END[:2], 1000), readings(EARLY, 250))


def test_runs_are_read_again_and_told_with_the_whole_reading_last(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(exits, "RUNS", tmp_path)
    monkeypatch.setattr(exits, "_read", lambda said, after: asked.append((after, said.eval)))
    for name, scores, tokens in (("exits-0", TO_THE_END, 1000), ("exits-2", EARLY, 250)):
        (tmp_path / name).mkdir()
        with TraceFile(tmp_path / name / READINGS) as file:
            for one in readings(scores, tokens):
                file.add(told(one), Spool(), None)
    exits.main(["--policy", "p", "--exit-after", "2", "--", "--suite", "synthetic"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert asked == [(0, ["--suite", "synthetic"]), (2, ["--suite", "synthetic"])]
    assert rows[0].startswith("| 1K | 2 | 25.0% | 75.0% (") and rows[0].endswith("| 1 |")
    assert rows[1].startswith("| 1K | to the end | 100.0% | 75.0% (")
