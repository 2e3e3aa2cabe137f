"""The comparison of orders: configs, what it counts, its tables, and all of it at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rounds
from notepad_jax.reading.trace import TurnRecord
from notepad_jax.telemetry.identity import write_json


def turn(chunk, kind="update", level=0, round_=0):
    return TurnRecord(chunk, kind, 0, "stop", (), None, (), (5, 2), (), (), level, round_, chunk)


def point(order, who, length, mean):
    return {
        "order": order, "who": who, "length": length, "questions": 4, "kinds": {},
        "accuracy": {"mean": mean, "low": 0.5, "high": 1.0}, "captured": 1.0, "retained": 1.0,
        "wall": 2.0, "cpu": 1.0, "chain": 3.5, "turns": 9.0, "decoded": 1234.0,
    }  # fmt: skip


def test_every_order_is_a_config():
    for name in rounds.ORDERS:
        config = rounds.config_of(name, Path("data/starter"), "seed=1")
        assert config.reading.order == name and config.seed == 1


def test_turns_of_one_level_do_not_wait_for_each_other():
    read = [turn(0), turn(1), turn(2), turn(0, level=1), turn(0, round_=1), turn(0, "answer")]
    assert rounds.chain(read, "parallel") == 4
    assert rounds.chain([turn(0), turn(1), turn(2), turn(3, "answer")], "serial") == 4
    noted = [turn(0), turn(1), turn(2, level=1), turn(3, level=1), turn(4, "answer")]
    assert rounds.chain(noted, "mixed") == 4


def test_tables_are_made_of_what_is_there(tmp_path, capsys):
    for order, who, mean in (("parallel", "0", 1.0), ("parallel", "1", 0.5), ("serial", "0", 1.0)):
        (tmp_path / f"{order}-{who}").mkdir()
        write_json(tmp_path / f"{order}-{who}" / "2k.json", point(order, who, 2048, mean))
    rounds.main(["--out", str(tmp_path), "--tables"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | 2K |" and lines[2].startswith("| serial, seed 0 | 100.0% (")
    assert lines[3].startswith("| parallel, seed 0 | 100.0%") and lines[4].endswith("n 4 |")
    assert lines[-1] == "| parallel | 2K | 3.5 | 9 | 1,234 | 2 | 1 |"


@pytest.mark.slow
def test_all_of_it_at_toy_size_and_what_is_there_is_not_done_again(tmp_path):
    words = ["--out", str(tmp_path), "--orders", "parallel", "--seeds", "0", "--lengths", "2k"]
    words += ["--questions", "4", "--steps", "1", "--warmup-steps", "1"]
    rounds.main(words)
    found = tmp_path / "parallel-0" / "2k.json"
    assert found.is_file() and (tmp_path / "parallel-untrained" / "2k.json").is_file()
    before = found.stat().st_mtime_ns
    rounds.main(words)
    assert found.stat().st_mtime_ns == before
