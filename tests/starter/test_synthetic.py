"""The synthetic language: every sentence eight tokens, every question decidable, any length."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import sentencepiece

from notepad_jax.starter import synthetic, vocabulary


def text_of(task):
    return "".join(task.document.pieces())


def test_words_are_distinct_and_enough():
    assert len(set(vocabulary.WORDS)) == len(vocabulary.WORDS)
    groups = (vocabulary.NAMES, vocabulary.TOWNS, vocabulary.CODES, vocabulary.RULERS)
    assert {len(group) for group in groups} == {synthetic.KINDS}


def test_every_sentence_is_eight_tokens_with_subject_and_object_in_place():
    for text in synthetic.sentences():
        assert len(vocabulary.ids(text)) == synthetic.SENTENCE
    for fact, subject, thing in (
        (synthetic.code_fact("Nora", "amber"), "Nora", "amber"),
        (synthetic.home_fact("Nora", "Selby"), "Nora", "Selby"),
        (synthetic.ruler_fact("Selby", "Isolde"), "Selby", "Isolde"),
    ):
        assert fact.split()[synthetic.SUBJECT] == subject
        assert fact.split()[synthetic.OBJECT] == thing


def test_tokenizer_agrees_with_the_id_table_and_falls_back_to_bytes(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(vocabulary.sentencepiece_model())
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    text = text_of(synthetic.make_tasks(3, 2048, 4)[0])
    assert model.encode(text) == vocabulary.ids(text)
    assert model.decode(model.encode(text)) == text
    foreign = "Ein naïver Satz, <|end|> und ▁ Ende"
    assert model.decode(model.encode(foreign)).split() == foreign.replace("▁", " ").split()
    controls = {vocabulary.ID_OF[name] for name in vocabulary.CONTROLS}
    assert not controls & set(model.encode(" ".join(vocabulary.CONTROLS) + foreign))


@pytest.mark.parametrize("seed", range(8))
def test_documents_tell_exactly_what_the_questions_need(seed):
    tasks = synthetic.make_tasks(seed, 8 * 300, 16, unanswerable=0.4)
    sentences = text_of(tasks[0]).split(" . ")
    assert len(sentences) == 300
    facts = [s.removesuffix(" .").split() for s in sentences]
    about = {}
    for place, s in enumerate(facts):
        if s[:3] in (
            ["the", "secret", "code"],
            ["for", "many", "years"],
            ["the", "proud", "people"],
        ):
            about.setdefault((s[1], s[4]), []).append((place, s[6]))
    for task in tasks:
        assert task.document is tasks[0].document
        name = task.question.split()[2]
        homes, codes = about.get(("many", name), []), about.get(("secret", name), [])
        if task.source == "synthetic/one_hop":
            assert not homes
            assert [thing for _, thing in codes] == [a for a in task.answers if a != "nothing"]
            continue
        assert not codes and len(homes) <= 1
        rulers = about.get(("proud", homes[0][1]), []) if homes else []
        assert [thing for _, thing in rulers] == [a for a in task.answers if a != "nothing"]
        if rulers:
            assert homes[0][0] < rulers[0][0]


def test_shares_and_places_are_as_asked_for():
    tasks = [t for seed in range(200) for t in synthetic.make_tasks(seed, 1024, 8)]
    share = np.mean([t.answers == ("nothing",) for t in tasks])
    assert abs(share - 0.3) < 0.04
    assert abs(np.mean([t.source == "synthetic/two_hop" for t in tasks]) - 0.5) < 0.04
    documents = {id(t.document): t.document for t in tasks}.values()
    places = np.array([p for d in documents for p, _ in d.facts]) / 128
    assert abs(places.mean() - 0.5) < 0.02 and abs(places.std() - 12**-0.5) < 0.02
    chapters = np.mean([text_of(t).count("chapter") for t in tasks[::8]])
    assert abs(chapters - 2) < 0.4


def test_the_same_seed_gives_the_same_text_and_another_seed_another():
    one, same, other = (synthetic.make_tasks(s, 40_000, 4)[0] for s in (5, 5, 6))
    assert text_of(one) == text_of(same) != text_of(other)
    assert text_of(one) == text_of(one)  # pieces() starts again from the beginning
    assert len(text_of(one).split()) == 40_000


def test_a_long_document_streams_in_constant_memory():
    document = synthetic.make_tasks(0, 3_500_000, 16)[0].document
    next(document.pieces())
    tracemalloc.start()
    length = sum(piece.count(" . ") + piece.endswith(" .") for piece in document.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == 437_500
    assert peak < 4e6


def test_impossible_wishes_are_named():
    with pytest.raises(ValueError, match="40 questions.*1 to 36"):
        synthetic.make_tasks(0, 1024, 40)
    with pytest.raises(ValueError, match="facts do not fit into a document of 2 sentences"):
        synthetic.make_tasks(0, 16, 8, unanswerable=0.0)


def test_evidence_is_what_the_needed_facts_say_and_where():
    tasks = synthetic.make_tasks(seed=3, tokens=8_000, questions=20, unanswerable=0.3)
    text = "".join(tasks[0].document.pieces())
    for task in tasks:
        assert len(task.evidence) == (
            0 if task.answers == ("nothing",) else 1 + task.question.startswith("ruler")
        )
        if task.evidence:
            assert task.evidence[-1].text == task.answers[0]
        for fact in task.evidence:  # the sentence that holds it is near the place told
            near = text[int((fact.place - 0.02) * len(text)) :][: int(0.04 * len(text)) + 60]
            assert fact.text in near
