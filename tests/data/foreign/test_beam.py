"""BEAM's conversations, by hand: the hub's parquet and the repository's folders."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from notepad_jax.data import formats
from notepad_jax.tasks import file_suite


def turn(number: int) -> list[dict]:
    return [
        {"role": "user", "id": 2 * number, "content": f"Note {number} \U0001f600 ->-> 1,{number}"},
        {"role": "assistant", "id": 2 * number + 1, "content": "Noted. "},
    ]


TOLD = "".join(f"user: Note {n} \U0001f600 ->-> 1,{n}\n\nassistant: Noted.\n\n" for n in range(4))
ASKED = {
    "abstention": [{"question": "Who?", "ideal_response": "It is not said.", "rubric": ["unsaid"]}],
    "summarization": [
        {"question": "All?", "ideal_summary": "Four notes.", "difficulty": "easy"},
        {"question": "Last?", "answer": "Note 3", "rubric": []},
    ],
}
BATCHES = [
    {"batch_number": 1, "turns": [turn(0), turn(1)], "time_anchor": "May-1-2024"},
    {"batch_number": 2, "turns": [turn(2), turn(3)], "time_anchor": None},
]


def hub(path, *asked, chat=None):
    chat = [turn(0) + turn(1), turn(2) + turn(3)] if chat is None else chat
    rows = [
        {"conversation_id": str(n), "chat": chat, "probing_questions": one}
        for n, one in enumerate(asked)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def folder(path, batches=BATCHES):
    (path / "probing_questions").mkdir(parents=True)
    (path / "probing_questions" / "probing_questions.json").write_text(json.dumps(ASKED))
    (path / "chat.json").write_text(json.dumps(batches, indent=2))
    (path / "user_messages.json").write_text(json.dumps([{"batch": 1, "messages": []}]))
    return path


def test_a_row_of_the_hub_is_a_task_for_each_probing_question(tmp_path):
    path, seen = hub(tmp_path / "100K.parquet", repr(ASKED), json.dumps(ASKED)), bytearray()
    tasks = [task for task, _ in formats.read_any(path, seen.extend)]
    assert bytes(seen) == path.read_bytes()
    names = ["abstention-1", "summarization-1", "summarization-2"]
    assert [t.id for t in tasks] == [f"100K.parquet:{r}-{name}" for r in (1, 2) for name in names]
    assert {"".join(task.document.pieces()) for task in tasks} == {TOLD}
    assert tasks[0].document is tasks[2].document and tasks[0].document != tasks[3].document
    assert [task.answers[0] for task in tasks[:3]] == ["It is not said.", "Four notes.", "Note 3"]
    assert (tasks[0].source, tasks[0].metric) == ("beam/abstention", "rouge_l")
    assert tasks[0].extra == {"rubric": ["unsaid"]} and tasks[1].extra == {"difficulty": "easy"}


def test_a_conversation_of_10m_is_its_plans_one_after_the_other(tmp_path):
    chat = [{"plan-1": [turn(0), turn(1)]}, {"plan-2": [turn(2), turn(3)]}]
    path = hub(tmp_path / "10M.parquet", repr(ASKED), chat=chat)  # the hub fills up with nulls
    assert "".join(formats.read_any(path)[0][0].document.pieces()) == TOLD
    plans = [{"plan-1": BATCHES[:1]}, {"plan-2": BATCHES[1:]}]
    found = formats.read_any(folder(tmp_path / "1", plans) / "chat.json")
    assert "".join(found[0][0].document.pieces()) == TOLD


def test_a_folder_of_conversations_is_read_by_their_chats_alone(tmp_path):
    one, two = folder(tmp_path / "1"), folder(tmp_path / "2")
    short = [{"batch_number": 1, "turns": [turn(0)]}]
    (two / "chat_trunecated.json").write_text(json.dumps(short))  # as published: it comes first
    (one / "plan-0").mkdir()
    (one / "plan-0" / "chat.json").write_text(json.dumps(BATCHES))
    found = file_suite.read(str(tmp_path), (), (), 0, len)
    tasks = sorted((task for own in found.tasks.values() for task in own), key=lambda t: t.id)
    assert [t.id for t in tasks][::3] == [
        "1/chat.json:1-abstention-1", "2/chat_trunecated.json:1-abstention-1"
    ]  # fmt: skip
    texts = ["".join(task.document.pieces()) for task in tasks[::3]]
    assert texts == [TOLD, TOLD[: TOLD.index("user: Note 1")]]


def test_a_question_with_a_fault_is_left_out_alone_and_a_bad_row_is_one_line(tmp_path):
    no_gold = {**ASKED, "abstention": [{"question": "Who?"}]}
    left_out = []
    found = formats.read_any(hub(tmp_path / "a.parquet", repr(no_gold)), on_fault=left_out.append)
    assert len(found) == 2 and "row 1 abstention 1 has no gold text" in str(left_out[0])
    for asked, message in (
        ("{", "row 1: 'probing_questions' must be an object, it is '{'"),
        ("{}", "row 1: 'probing_questions' must be an object, it is {}"),
        ("{'a': [3]}", "row 1 a 1 has no text 'question', it is 3"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            formats.read_any(hub(tmp_path / "b.parquet", asked))
        assert "\n" not in str(caught.value)
    silent = [[{"role": "user", "content": " "}]]
    with pytest.raises(ValueError, match="row 1 has no messages with role and content"):
        formats.read_any(hub(tmp_path / "c.parquet", repr(ASKED), chat=silent))


def test_a_chat_without_its_questions_and_a_file_that_lost_rows_are_named(tmp_path):
    (tmp_path / "chat.json").write_text(json.dumps(BATCHES))
    with pytest.raises(ValueError, match=r"probing_questions/probing_questions.json is missing"):
        formats.read_any(tmp_path / "chat.json")
    asked = folder(tmp_path / "1") / "probing_questions" / "probing_questions.json"
    with pytest.raises(ValueError, match="holds BEAM's probing questions; give the chat.json bes"):
        formats.read_any(asked)
    path = hub(tmp_path / "d.parquet", repr(ASKED), repr(ASKED))
    document = formats.read_any(path)[-1][0].document
    hub(path, repr(ASKED))
    with pytest.raises(ValueError, match="changed after it was opened: it has fewer rows"):
        next(document.pieces())
