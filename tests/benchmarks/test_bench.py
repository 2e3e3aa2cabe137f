"""`make bench`: what it keeps of a benchmark's numbers, and what it says has moved."""

import json

import pytest

from benchmarks import bench, floor


def test_numbers_are_found_wherever_they_stand():
    told = {
        "ours": {"step": 2, "compared": True},
        "decode 1": {"ours/theirs": [0.5, 0.25, 1.0]},
        "points": [{"length": "32k", "seconds": 3.0}, {"length": "1m", "seconds": 9.0}],
    }
    assert dict(bench.flat(told)) == {
        "ours, step": 2.0, "decode 1, ours/theirs": 0.5, "points, 32k, seconds": 3.0,
        "points, 1m, seconds": 9.0,
    }  # fmt: skip


def test_what_moved_is_said_and_what_is_new_has_no_past():
    _, _, *rows = bench.table({"a": 1.05, "b": 3.0, "c": 2.0}, {"a": 1.0, "b": 4.0})
    assert rows == ["| a | 1 | 1.05 | |", "| b | 4 | 3 | x0.75 |", "| c | | 2 | |"]


def test_the_newest_of_this_processor_is_what_is_compared(tmp_path, monkeypatch):
    record = tmp_path / "more" / "bench.jsonl"
    assert bench.newest(record) == {}
    bench.keep(record, "turn", {"us": 9.0})
    bench.keep(record, "turn", {"us": 7.0})
    monkeypatch.setattr(bench.provenance, "cpu", lambda: "another")
    bench.keep(record, "turn", {"us": 1.0})
    monkeypatch.undo()
    assert bench.newest(record)["turn"]["figures"] == {"us": 7.0}


def test_a_page_has_the_newest_of_each_part_with_the_last_words_across(tmp_path):
    record, page = tmp_path / "bench.jsonl", tmp_path / "page.md"
    page.write_text("above\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nbelow\n")
    bench.keep(record, "turn", {"microseconds_a_turn": 70.0})
    bench.keep(record, "step", {"ours, rollout": 0.5, "ours, first": 9.0, "a peer, rollout": 0.25})
    bench.main(["--only=", f"--record={record}", f"--page={page}"])
    lines = [line for line in page.read_text().splitlines() if line[:4] not in ("", "<!--", "|---")]
    assert (lines[0], lines[-1]) == ("above", "below")
    assert lines[1:3] == ["| goal | at most | measured |", "| python, us a turn | 50 | 70 |"]
    assert lines[3].startswith("**step** (") and lines[7].startswith("**turn** (")
    assert lines[4:7] == [
        "| | rollout | first |", "| ours | 0.5 | 9 |", "| a peer | 0.25 |  |",
    ]  # fmt: skip
    assert lines[8:10] == ["| | microseconds a turn |", "|  | 70 |"]


def test_a_goal_is_a_figure_or_one_over_another_and_bold_where_it_is_reached():
    figures = {"ours, step ratio": 0.4, "ours, first": 9.0, f"{bench.PEER}, first": 10.0}
    rows = list(bench.goals({"step": {"figures": figures}}))
    assert rows[2:] == [
        "| a GRPO step, over google-tunix's | 0.4 | **0.4** |",
        "| the first one, with compiling | 0.8 | 0.9 |", "",
    ]  # fmt: skip
    assert {part for part, *_ in bench.GOALS.values()} <= bench.PARTS.keys()


@pytest.mark.slow
def test_a_part_runs_and_one_that_fails_says_why(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)
    small = bench.Part(("packing", "--groups=2", "--members=2", "--chunks=1", "--steps=2"))
    wrong = bench.Part(("packing", "--groups=none"), peer=("no_such_package",))
    monkeypatch.setattr(bench, "PARTS", {"small": small, "wrong": wrong, "left": bench.Part(
        ("packing",), needs=tmp_path / "nothing")})  # fmt: skip
    record = tmp_path / "bench.jsonl"
    bench.main(["--only=small,left", f"--record={record}"])
    said = capsys.readouterr()
    assert "| packed_tokens |" in said.out and "left: left out, there is no" in said.err
    (line,) = map(json.loads, record.read_text().splitlines())
    assert line["part"] == "small" and line["figures"]["packed_tokens"] > 0
    with pytest.raises(SystemExit, match=r"benchmarks.packing ended with 2: [\s\S]*'none'"):
        bench.main(["--only=wrong", f"--record={record}"])
    with pytest.raises(SystemExit, match="there is no part 'fast'; there are small, wrong"):
        bench.main(["--only=fast", f"--record={record}"])


def test_the_floor_counts_what_was_multiplied(monkeypatch):
    monkeypatch.setattr(floor, "rate", lambda work: work() is None or 1e3)
    found = floor.measure({"some": (16, 32)}, [2], 1024)
    assert found == {"some, 2 rows, GFLOP/s": pytest.approx(2e-9 * 2 * 16 * 32 * 1e3),
                     "memory, GB/s": pytest.approx(1024e-6)}  # fmt: skip


def test_every_part_is_a_benchmark_that_prints_json():
    for part in bench.PARTS.values():
        text = (bench.ROOT / "benchmarks" / f"{part.words[0]}.py").read_text()
        assert '"--json"' in text and ('"--peer"' in text or not part.peer)
