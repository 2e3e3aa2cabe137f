"""What windows save, at toy size: the same readings in fewer rounds; and its table of learning."""

import json

import pytest

from benchmarks import window

SIZES = ["--windows=1,4", "--lengths=64,2k", "--steps=4", "--documents=2", "--readings=2"]


@pytest.mark.slow
def test_the_same_turns_take_fewer_rounds_in_windows(tmp_path, capsys):
    window.main([f"--out={tmp_path}", *SIZES])
    _, _, *rows = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    (_, _, one, _, turns, *_), (_, _, four, share, same, *_) = cells
    assert int(four) < int(one) and float(share) < 1 and turns == same


def test_the_table_of_learning_by_hand(tmp_path, monkeypatch):
    monkeypatch.setattr(window, "WAYS", {"window of 4": ()})
    for seed, after in ((0, 0.75), (1, 1.0)):
        folder = window.run_of(tmp_path, "window of 4", seed)
        folder.mkdir(parents=True)
        lines = [{"step": 0, "validation/score_2K": 0.5, "validation/score_8K": 0.25}]
        lines += [{"step": step, "reward": step / 10, window.AGE: step % 2} for step in range(1, 7)]
        lines += [{"step": 6, "validation/score_2K": after, "validation/score_8K": 0.5}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        (folder / window.ENDED).write_text("12.5")
    _, _, first, second = window.learnt(tmp_path, [0, 1])
    assert first == ("| window of 4 | 0 | 0.55 | 50.0%, 75.0% | 25.0%, 50.0% | 0.50 (1) | 12.5 |")
    assert second.startswith("| window of 4 | 1 | 0.55 | 50.0%, 100.0% |")


@pytest.mark.slow
def test_windows_and_readers_apart_learn_together(tmp_path, capsys, monkeypatch):
    way = "both, window of 4"
    monkeypatch.setattr(window, "WAYS", {way: window.WAYS[way]})
    words = ["--lengths=512,1k", "--steps=8", "--documents=2", "--readings=4", "--learn=0-0"]
    monkeypatch.setattr(window, "LEARNING", (*window.LEARNING, "validation.samples=4"))
    window.main([f"--out={tmp_path}", *words])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == [f"| {way}"]
