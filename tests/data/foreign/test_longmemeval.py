"""LongMemEval's rows, by hand: sessions in the order of their dates, evidence where it is said."""

import json

import pytest

from notepad_jax.data import formats, sources
from notepad_jax.setup.eval_jobs import judged_by_a_model

DATES = ["2023/05/21 (Sun) 10:00", "2023/05/20 (Sat) 02:21"]
SESSIONS = [
    [{"role": "user", "content": "I moved the kayak to Bergen.", "has_answer": True}],
    [{"role": "user", "content": "Hello \U0001f600"}, {"role": "assistant", "content": "Bergen?"}],
]
TOLD = (
    "Session 1, 2023/05/20 (Sat) 02:21\n\nuser: Hello \U0001f600\n\nassistant: Bergen?\n\n"
    "Session 2, 2023/05/21 (Sun) 10:00\n\nuser: I moved the kayak to Bergen.\n\n"
)


def row(**changes) -> dict:
    good = {
        "question_id": "q1", "question_type": "single-session-user",
        "question": "Where is my kayak?", "answer": "Bergen",
        "question_date": "2023/06/01 (Thu) 09:00", "haystack_session_ids": ["a", "b"],
        "haystack_dates": DATES, "haystack_sessions": SESSIONS, "answer_session_ids": ["a"],
    }  # fmt: skip
    return {name: value for name, value in {**good, **changes}.items() if value is not ...}


def written(path, rows):
    lines = path.suffix == ".jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows, indent=1))
    return path


@pytest.mark.parametrize("name", ["longmemeval_s.json", "longmemeval_s.jsonl"])
def test_sessions_are_told_by_date_and_evidence_stands_where_it_was_said(tmp_path, name):
    path = written(tmp_path / name, [row(), row(question_id="q2", answer=3)])
    seen = bytearray()
    (one, length), (two, _) = formats.read_any(path, seen.extend)
    assert bytes(seen) == path.read_bytes()
    assert [*one.document.pieces()] == [
        TOLD[: TOLD.index("Session 2")],
        TOLD[TOLD.index("Ses", 9) :],
    ]
    assert (one.id, one.source, length) == (
        "longmemeval_s/q1", "longmemeval/single-session-user", 0,
    )  # fmt: skip
    assert one.question == "Today is 2023/06/01 (Thu) 09:00. Where is my kayak?"
    (fact,) = one.evidence
    assert TOLD[round(fact.place * len(TOLD)) :].startswith("Bergen.") and fact.text == "Bergen"
    assert (one.metric, two.answers, two.evidence) == ("sub_em", ("3",), ())


def test_what_only_a_model_can_judge_is_a_source_of_its_own_and_said(tmp_path):
    rows = [row(question_id="q1_abs"), row(question_type="single-session-preference")]
    tasks = [task for task, _ in formats.read_any(written(tmp_path / "m.json", rows))]
    assert [(task.source, task.metric) for task in tasks] == [
        ("longmemeval/abstention", "rouge_l"),
        ("longmemeval/single-session-preference", "rouge_l"),
    ]
    (line,) = judged_by_a_model((task.source, task.metric) for task in tasks)
    assert line.startswith("LongMemEval is judged by a model as published, and here by rouge_l")
    assert judged_by_a_model([("ruler/vt", "ruler_all")]) == []


def test_a_file_that_changed_is_named_when_its_text_is_read(tmp_path):
    path = written(tmp_path / "s.json", [row()])
    ((task, _),) = formats.read_any(path)
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(ValueError, match=r"s.json changed after it was opened: bytes \d+ to"):
        next(task.document.pieces())


@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_rows_lie_at_the_same_bytes_in_whatever_blocks_they_come(tmp_path, monkeypatch, block):
    path = written(tmp_path / "s.json", [row(), row(question_id="q2")])
    monkeypatch.setattr(sources.blocks, "__defaults__", (0, None, block, None))
    texts = ["".join(task.document.pieces()) for task, _ in formats.read_any(path)]
    assert texts == [TOLD, TOLD]


def test_a_file_cut_short_and_one_of_answers_are_refused_in_one_line(tmp_path):
    path = written(tmp_path / "s.json", [row(), row(question_id="q2")])
    whole = path.read_bytes()
    for cut in range(600, len(whole), 97):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"s\.json") as caught:
            formats.read_any(path)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    said = written(tmp_path / "said.jsonl", [{"question_id": "q1", "hypothesis": "Bergen"}])
    with pytest.raises(ValueError, match="holds answers to LongMemEval's questions; give longm"):
        formats.read_any(said)


@pytest.mark.parametrize("form", ["json", "jsonl"])
def test_a_column_that_stands_twice_leaves_its_row_out(tmp_path, form):
    """It refused a file of lines, and of an array nobody was told: the last one counted."""
    path = written(tmp_path / f"s.{form}", [row(question_id="q2"), row(), row(question_id="q3")])
    path.write_text(path.read_text().replace('"q2"', '"q2", "answer": 1', 1))
    told = []
    tasks = formats.read_any(path, on_fault=told.append)
    assert [task.id for task, _ in tasks] == ["s/q1", "s/q3"]
    assert [str(fault) for fault in told] == [f"{path} row 1 has two columns 'answer'; keep one"]


BAD = [
    (row(haystack_dates=DATES[:1]), "has 2 sessions and 1 dates; give each one"),
    (
        row(haystack_sessions=[["hello"], []]),
        "'haystack_sessions' must be a list of lists of turns",
    ),
    (row(haystack_sessions=[[], []]), "has no word in its sessions; remove the row"),
    (row(haystack_dates="today"), "'haystack_dates' must be a list of texts, it is 'today'"),
    (row(answer=None), "'answer' must be a text or a number, it is None"),
    (row(question=" "), "has no text under 'question'; it has question_id, "),
    (row(question_id="q0"), "has the id 't/q0' of row 1; ids must differ"),
]


@pytest.mark.parametrize("bad, message", BAD)
def test_a_bad_row_is_one_line_with_file_and_number(tmp_path, bad, message):
    path = written(tmp_path / "t.json", [row(question_id="q0"), bad])
    with pytest.raises(ValueError, match=f"t.json row 2.*{message}") as caught:
        formats.read_any(path)
    assert "\n" not in str(caught.value)
