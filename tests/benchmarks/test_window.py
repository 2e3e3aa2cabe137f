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


def test_the_table_of_learning_by_hand(tmp_path):
    for seed, after in ((0, 0.75), (1, 1.0)):
        folder = tmp_path / f"window-4-{seed}"
        folder.mkdir()
        lines = [{"step": 0, "validation/score_2K": 0.5, "validation/score_8K": 0.25}]
        lines += [{"step": step, "reward": step / 10} for step in range(1, 7)]
        lines += [{"step": 6, "validation/score_2K": after, "validation/score_8K": 0.5}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    _, _, first, second = window.learnt(tmp_path, [4], [0, 1])
    assert first == "| 4 | 0 | 0.55 | 50.0%, 75.0% | 25.0%, 50.0% |"
    assert second.startswith("| 4 | 1 | 0.55 | 50.0%, 100.0% |")
