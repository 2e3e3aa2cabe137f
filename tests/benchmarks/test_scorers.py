"""The comparison with published scorers, run on stand-ins for their files."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import scorers

DISAGREES = """
import no_such_package
TASK_LABELS = {f"qa{k}": () for k in range(1, 14)}
def preprocess_output(output):
    return output
def compare_answers(target, output, question, task_labels):
    from notepad_jax.scoring import long_context
    known = [*long_context.LABELS.values()]
    gold = set(target.lower().split(","))
    known = next(one for one in known if gold <= set(one))
    return not long_context.babilong(known, output, [target], question)
"""
NODES = """
_FINAL_ANSWER_RE = re.compile("x")
def _parse_node_list(response: str) -> Tuple[List[str], bool]:
    from notepad_jax.scoring import long_context
    try:
        return long_context._listed(response), False
    except Exception:
        return [], True
def _f1_score(predicted, expected, parse_failed):
    return 0.0 if parse_failed else float(predicted == expected)
"""


NESTED = """
import no_such_package
class Judge:
    def _evaluate_response(self, said: NoSuchType, gold_answers=None):
        return any(gold in said for gold in gold_answers)
def outer():
    def grade(response, answer, prefix) -> NoSuchType:
        if not response.startswith(prefix):
            return 0
        whole = SequenceMatcher(None, response[len(prefix):], answer[len(prefix):])
        return whole.ratio()
"""


def compared(capsys, *arguments):
    code = scorers.main([*map(str, arguments), "--answers", "200"])
    return code, json.loads(capsys.readouterr().out)


def test_a_published_file_that_disagrees_is_found_to_differ(tmp_path, capsys):
    file = tmp_path / "metrics.py"
    file.write_text(DISAGREES)
    code, found = compared(capsys, "--babilong", file)
    assert code == 1 and len(found["babilong"]["differ"]) > 150
    assert 0 < found["babilong"]["worth something"] < 200


def test_partial_answers_are_found_to_differ(tmp_path, capsys):
    file = tmp_path / "app.py"
    file.write_text(NODES)
    code, found = compared(capsys, "--graphwalks", file)
    assert code == 1  # half of a list is worth something by ours
    said = [said for _, _, said in found["graphwalks"]["differ"]]
    assert said and all("Final Answer:" in one for one in said)


@pytest.mark.slow
def test_what_stands_in_a_class_or_a_function_is_found_and_agrees(tmp_path, capsys):
    file = tmp_path / "nested.py"
    file.write_text(NESTED)
    code, found = compared(capsys, "--nolima", file, "--mrcr", file)
    assert code == 0 and found["mrcr"]["differ as meant"] > 5
    for name, meant in (("nolima", 0), ("mrcr", 100)):
        assert found[name]["differ as meant"] <= meant
        assert 20 < found[name]["worth something"] < 180


def test_a_package_that_is_not_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "dateutil.parser", None)
    with pytest.raises(SystemExit):
        scorers.main(["--oolong", str(tmp_path / "eval_helpers.py")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("eval_helpers.py reads dates with python-dateutil; install it")


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1", "defines no TASK_LABELS"), (None, "No such file"), ("def f(:", "invalid syntax")],
)
def test_a_file_of_another_kind_is_one_line(tmp_path, capsys, text, message):
    file = tmp_path / "metrics.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        scorers.main(["--babilong", str(file)])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_something_must_be_given(capsys):
    with pytest.raises(SystemExit):
        scorers.main([])
    assert "with one of --babilong, --graphwalks, --mrcr" in capsys.readouterr().err
