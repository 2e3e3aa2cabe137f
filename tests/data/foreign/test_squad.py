"""SQuAD in all the forms it comes in; what is wrong with it is named."""

import json

import pytest

from notepad_jax.data.foreign import squad

CONTEXT = " The Orde rises near Kirkwall and was bridged in 1893."
ANSWERS = [{"text": "1893", "answer_start": 49}, {"text": "in 1893", "answer_start": 46}]
ANSWERS = [*ANSWERS, ANSWERS[0]]  # several people were asked
SQUAD = {
    "version": "2.0",
    "data": [
        {
            "title": "Orde",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {"id": "1", "question": "When was it bridged? ", "answers": ANSWERS},
                        {"id": "2", "question": "By whom?", "answers": [], "is_impossible": True},
                    ],
                },
                {"context": "Herons wade.", "qas": []},
            ],
        },
        {
            "title": "Otter",
            "paragraphs": [
                {
                    "context": "Otters swim.",
                    "qas": [
                        {
                            "id": "3",
                            "question": "Who can swim?",
                            "answers": [{"text": "Otters", "answer_start": 0}],
                        }
                    ],
                }
            ],
        },
    ],
}


def test_squad_answers_and_places(tmp_path):
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(SQUAD))
    found = squad.read(path)
    first, second = found.questions
    assert found.dropped == {"unanswerable": 1}
    assert first.answers == ("1893", "in 1893") and first.text == "When was it bridged?"
    (fact,) = first.facts
    assert found.paragraphs[fact.paragraph].text[fact.start :] == "1893."
    assert second.id == "3" and found.paragraphs[second.gold[0]].text == "Otters swim."


def test_the_forms_of_squad_are_one(tmp_path):
    rows = []
    for article in SQUAD["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                texts = [answer["text"] for answer in qa["answers"]]
                starts = [answer["answer_start"] for answer in qa["answers"]]
                answers = {"text": texts, "answer_start": starts}
                row = {"id": qa["id"], "question": qa["question"], "answers": answers}
                rows.append({**row, "title": article["title"], "context": paragraph["context"]})
    (tmp_path / "s.json").write_text(json.dumps(SQUAD))
    (tmp_path / "s.jsonl").write_text("\n".join(map(json.dumps, rows)))
    published, hub = (squad.read(tmp_path / f"s.{x}") for x in ("json", "jsonl"))
    # A paragraph nobody asks about is in the published form only.
    assert [(q.id, q.text, q.answers) for q in published.questions] == [
        (q.id, q.text, q.answers) for q in hub.questions
    ]
    assert published.dropped == hub.dropped


@pytest.mark.parametrize(
    "content, message",
    [
        ("[]", "no SQuAD file"),
        ('{"data": [{"paragraphs": 3}]}', "article 1: 'paragraphs' must be a list"),
        ('{"data": [{"paragraphs": [{"context": "x"}]}]}', "article 1: 'qas' must be a list"),
        (json.dumps(SQUAD).replace('"answer_start": 49', '"start": 49'), "article 1 question '1'"),
        (json.dumps(SQUAD)[:-9], "is not JSON"),
        ('{"data": []}', "has no answerable question"),
    ],
)
def test_a_bad_squad_is_named(tmp_path, content, message):
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"s.json.*{message}") as caught:
        squad.read(path)
    assert "\n" not in str(caught.value)
