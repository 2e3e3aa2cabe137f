"""HotpotQA in all the forms it comes in; what is wrong with it is named."""

import json
import tracemalloc

import pytest

from notepad_jax.data.foreign import hotpotqa

BRIDGE = {
    "_id": "b1",
    "question": "Who founded the press that printed The Salt Road?",
    "answer": "Nora Lind",
    "context": [
        ["Heron (bird)", ["Herons wade.", " They eat fish."]],
        [
            "The Salt Road",
            [" The Salt Road is a novel.", " It was printed by Quill Press in 1931."],
        ],
        ["Quill Press", ["Quill Press is a printer.", " It was founded by Nora Lind."]],
    ],
    "supporting_facts": [["The Salt Road", 1], ["Quill Press", 1], ["Quill Press", 99]],
}
YES_NO = {
    "_id": "y1",
    "question": "Are herons and otters both birds?",
    "answer": "no",
    "context": [
        ["Heron (bird)", ["Herons wade.", " They eat fish."]],
        ["Otter", ["Otters swim."]],
    ],
    "supporting_facts": [["Heron (bird)", 0], ["Otter", 0]],
}
COMPARED = {  # the answer stands in the question: carrying it away proves nothing
    "_id": "c1",
    "question": "Which is older, Quill Press or Heron House?",
    "answer": "Quill Press",
    "context": [["Quill Press", ["Quill Press dates from 1880."]], ["Heron House", ["1901."]]],
    "supporting_facts": [["Quill Press", 0], ["Heron House", 0]],
}
FULLWIKI = {**BRIDGE, "_id": "f1", "context": BRIDGE["context"][:2]}


def hub(row: dict) -> dict:
    """A row in the form of the Hugging Face hub."""
    return {
        "id": row["_id"],
        "question": row["question"],
        "answer": row["answer"],
        "context": {
            "title": [title for title, _ in row["context"]],
            "sentences": [sentences for _, sentences in row["context"]],
        },
        "supporting_facts": {
            "title": [title for title, _ in row["supporting_facts"]],
            "sent_id": [place for _, place in row["supporting_facts"]],
        },
    }


def test_hotpotqa_gold_and_facts_are_found(tmp_path):
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([BRIDGE, YES_NO, COMPARED, FULLWIKI]))
    found = hotpotqa.read(path)
    assert found.name == "hotpot" and found.dropped == {"gold paragraph missing": 1}
    bridge, yes_no, compared = found.questions
    texts = [found.paragraphs[number].text for number in bridge.gold]
    assert texts == [
        "The Salt Road is a novel. It was printed by Quill Press in 1931.",
        "Quill Press is a printer. It was founded by Nora Lind.",
    ]
    # The bridge, then the answer, each where it stands in its paragraph's supporting sentence.
    assert [fact.text for fact in bridge.facts] == ["Quill Press", "Nora Lind"]
    assert [fact.start for fact in bridge.facts] == [44, 44]
    for fact in bridge.facts:
        text = found.paragraphs[fact.paragraph].text
        assert text[fact.start :].startswith(fact.text)
    assert yes_no.facts == compared.facts == ()
    # The heron is in two contexts and once in the pool; so is Quill Press in its two versions.
    titles = [paragraph.title for paragraph in found.paragraphs]
    assert sorted(titles) == [
        "Heron (bird)", "Heron House", "Otter", "Quill Press", "Quill Press", "The Salt Road",
    ]  # fmt: skip


def test_the_forms_of_hotpotqa_are_one(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [BRIDGE, YES_NO, COMPARED]
    (tmp_path / "h.json").write_text(json.dumps(rows))
    (tmp_path / "h.jsonl").write_text("\n".join(json.dumps(hub(row)) for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(list(map(hub, rows))), tmp_path / "h.parquet")
    first, *others = (hotpotqa.read(tmp_path / f"h.{x}") for x in ("json", "jsonl", "parquet"))
    remote = hotpotqa.read(f"file://{tmp_path}/h.json")
    for other in (*others, remote):
        assert other.questions == first.questions and other.paragraphs == first.paragraphs


@pytest.mark.slow
def test_a_large_hotpotqa_costs_its_paragraphs_and_not_its_rows(tmp_path):
    # 3,000 rows over 20 paragraphs of 2 KB: 61 MB of JSON, 40 KB of text.
    shared = [[f"Title {k}", [f"Paragraph {k}. " + "word " * 400]] for k in range(20)]
    facts = [["Title 3", 0], ["Title 4", 0]]
    with open(tmp_path / "h.json", "w") as file:
        for k in range(3000):
            row = {"_id": str(k), "question": "q?", "answer": "Paragraph 3", "context": shared[:10]}
            file.write(("[" if not k else ",") + json.dumps({**row, "supporting_facts": facts}))
        file.write("]")
    size = (tmp_path / "h.json").stat().st_size
    tracemalloc.start()
    found = hotpotqa.read(tmp_path / "h.json")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.questions) == 3000 and len(found.paragraphs) == 10
    assert size > 55 << 20 and peak < 8 << 20


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": ...}, "has no column 'answer'"),
        ({"answer": ""}, "'answer' must be a text"),
        ({"question": 3}, "'question' must be a text, it is 3"),
        ({"context": ...}, "'context' must be a list of"),
        ({"context": [["Title", "text"]]}, "'context' must be a list of"),
        ({"context": {"title": ["a"], "sentences": []}}, "'context' must be a list of"),
        ({"supporting_facts": [["Title"]]}, "'supporting_facts' must be a list of"),
        ({"supporting_facts": {"title": ["a"]}}, "'supporting_facts' must be a list of"),
        ({"_id": 5}, "'_id' must be a text"),
    ],
)
def test_a_bad_hotpotqa_row_is_named(tmp_path, change, message):
    row = {name: value for name, value in {**BRIDGE, **change}.items() if value is not ...}
    path = tmp_path / "h.json"
    path.write_text(json.dumps([BRIDGE, row]))
    with pytest.raises(ValueError, match=f"h.json row 2.*{message}") as caught:
        hotpotqa.read(path)
    assert "\n" not in str(caught.value)


def test_a_hotpotqa_without_gold_is_refused(tmp_path):
    (tmp_path / "h.json").write_text(json.dumps([FULLWIKI]))
    with pytest.raises(ValueError, match="use the distractor set"):
        hotpotqa.read(tmp_path / "h.json")
