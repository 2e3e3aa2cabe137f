"""A real book as a task file: the questions are sound, and the text is what a reader should see."""

import collections
import json
import re
import shutil

import pytest

from benchmarks import book
from benchmarks.book_questions import QUESTIONS, Fact, Question
from notepad_jax.data import formats
from notepad_jax.scoring import metrics

# As `bible -f` prints them: a verse a line.
PRINTED = """\
Ge1:1 In the beginning was a well.
Ge1:2 And the well was called Esek: {filler}
Ge2:1 Its owner was six and eighty years old;
Ge2:2 he died in {place}.
Exo1:1 The other well was Sitnah.
Le1:1 And that is another book.
"""
# As Project Gutenberg has them: titles, wrapped lines, several verses in a paragraph.
WRAPPED = """\
The First Book of Moses: Called Genesis


1:1 In the beginning
was a well. 1:2 And the well was called Esek:
{filler}

2:1 Its owner was six and eighty years old; 2:2
he died in {place}.




The Second Book of Moses: Called Exodus


1:1 The other well was Sitnah.

The Third Book of Moses: Called Leviticus

1:1 And that is another book.
"""
FILLED = {"filler": "and it was dug. " * 40, "place": "his father\u2019s tent"}
OURS = (
    Question("What was the well called?", ("Esek",), (Fact("Genesis 1:2", "was called Esek:"),)),
    Question(
        "How old was its owner?",
        ("six and eighty",),
        (Fact("Genesis 2:1", "was six and eighty years old;"),),
        number=86,
    ),
    Question(
        "What were the two wells called?",
        ("Esek", "Sitnah"),
        (Fact("Genesis 1:2", "called Esek:"), Fact("Exodus 1:1", "The other well was Sitnah.")),
        all_wanted=True,
    ),
)


@pytest.mark.slow
def test_any_numbering_gives_the_same_prose():
    printed, wrapped = (book.verses(text.format(**FILLED)) for text in (PRINTED, WRAPPED))
    assert printed == wrapped and [verse.name for verse in printed][-2:] == [
        "Genesis 2:2",
        "Exodus 1:1",
    ]
    dug = " ".join(FILLED["filler"].split())
    assert book.prose(printed) == (
        f"Genesis, chapter 1\n\nIn the beginning was a well. And the well was called Esek: {dug}"
        "\n\nGenesis, chapter 2\n\nIts owner was six and eighty years old; he died in his father's "
        "tent.\n\nExodus, chapter 1\n\nThe other well was Sitnah.\n"
    )


def test_a_paragraph_ends_where_a_sentence_does():
    long = "x" * book.PARAGRAPH
    assert list(book._paragraphs(iter([f"{long};", "so.", "Then", "it ended."]))) == [
        f"{long}; so.",
        "Then it ended.",
    ]


def test_rows_are_read_as_they_were_written(tmp_path):
    made = book.tasks(book.verses(PRINTED.format(**FILLED)), OURS)
    path = tmp_path / "book.jsonl"
    book.files.write(path, made, [0] * len(made))
    read = {task.id: task for task, _ in formats.read_any(path)}
    assert set(read) == {"Genesis 1:2", "Genesis 2:1", "Exodus 1:1"}
    owner, wells = read["Genesis 2:1"], read["Exodus 1:1"]
    text = "".join(owner.document.pieces())
    assert text == made[0].document.text
    assert owner.answers == ("six and eighty", "86", "eighty-six", "eighty six")
    assert (owner.metric, owner.contract, wells.metric) == ("sub_em", "auto", "ruler_all")
    (fact,) = owner.evidence
    assert fact.text == "six and eighty"
    assert round(fact.place * len(text)) == text.index("six and eighty")
    assert [one.text for one in wells.evidence] == ["Esek", "Sitnah"]


@pytest.mark.parametrize(
    ("words", "answer", "said"),
    [
        ("was called Sitnah", "Sitnah", "does not say 'was called Sitnah'"),
        ("well was called Esek", "Sitnah", "'Sitnah' does not stand in"),
        ("well", "well", "'well' stands elsewhere, too"),
    ],
)
def test_a_fact_that_is_not_there_is_named(words, answer, said):
    wrong = Question("?", (answer,), (Fact("Genesis 1:2", words),))
    with pytest.raises(ValueError, match=f"Genesis 1:2.*{said}"):
        book.tasks(book.verses(PRINTED.format(**FILLED)), [wrong])


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, []),
        (17, ["17", "seventeen"]),
        (70, ["70", "seventy"]),
        (430, ["430", "four hundred and thirty", "four hundred thirty"]),
        (
            137,
            [
                *("137", "one hundred and thirty-seven", "one hundred thirty-seven"),
                *("one hundred and thirty seven", "one hundred thirty seven"),
            ],
        ),
        (
            603550,
            [
                "603550",
                "six hundred and three thousand five hundred and fifty",
                "six hundred three thousand five hundred fifty",
            ],
        ),
    ],
)
def test_numbers_as_people_write_them(number, said):
    assert list(book.spellings(number)) == said


def test_an_answer_in_figures_or_in_old_words_is_right():
    (aged,) = (one for one in QUESTIONS if one.number == 175)
    answers = (*aged.answers, *book.spellings(175))
    for said in (
        "He lived an hundred threescore and fifteen years.",
        "one hundred and seventy-five",
        "175 years",
    ):
        assert metrics.METRICS["sub_em"](said, answers) == 1
    assert metrics.METRICS["sub_em"]("an hundred and seventy years", answers) == 0


def test_questions_are_well_formed():
    assert len(QUESTIONS) == 40
    assert len({one.facts[-1].where for one in QUESTIONS}) == 40  # their ids
    books = collections.Counter(one.facts[-1].where.split()[0] for one in QUESTIONS)
    assert set(books) == set(book.BOOKS) and min(books.values()) >= 15
    for one in QUESTIONS:
        assert one.question.endswith("?") and one.facts and one.answers
        said = " ".join(fact.words for fact in one.facts)
        for answer in one.answers if one.all_wanted else one.answers[:1]:
            asked, stands = metrics.normalise(one.question), metrics.normalise(said)
            assert metrics.stands_in(metrics.normalise(answer), stands)
            assert not metrics.stands_in(metrics.normalise(answer), asked), one.question
        assert not (one.all_wanted and one.number)


def test_without_the_package_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match="apt-get install bible-kjv, or .*--text FILE"):
        book.main([str(tmp_path / "book.jsonl")])


def test_a_text_that_is_another_is_refused_in_a_line(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PRINTED.format(**FILLED))
    with pytest.raises(SystemExit, match=r"text\.txt has 5 verses .* not 2,746"):
        book.main([str(tmp_path / "book.jsonl"), "--text", str(text)])
    with pytest.raises(SystemExit, match=r"none\.txt cannot be read"):
        book.main([str(tmp_path / "book.jsonl"), "--text", str(tmp_path / "none.txt")])


@pytest.mark.skipif(shutil.which(book.PROGRAM) is None, reason="needs Debian's bible-kjv")
def test_the_book_answers_every_question_in_one_place(tmp_path, capsys):
    path = tmp_path / "book.jsonl"
    book.main([str(path)])
    assert "40 questions about 368,587 characters" in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    text = rows[0]["document"]
    assert {row["document"] for row in rows} == {text}
    assert not re.search(r"\d", re.sub(r", chapter \d+\n", "", text))  # no verse is numbered
    for one in QUESTIONS:  # the facts once more, of the text that a reader sees
        assert [text.count(fact.words) for fact in one.facts] == [1] * len(one.facts)
    end = metrics.normalise(text[-600:])  # what `recent-only` shows of it answers nothing
    for row in rows:
        assert not any(metrics.stands_in(metrics.normalise(gold), end) for gold in row["answers"])
        metrics.check_gold(row["answers"], row["metric"])
        for words, place in row["evidence"]:
            assert text[round(place * len(text)) :].startswith(words)
    places = [row["evidence"][-1][1] for row in rows]
    ordered = [0.0, *sorted(places), 1.0]
    assert max(after - before for before, after in zip(ordered, ordered[1:], strict=False)) < 0.06
    for first in (10, 20):  # however few are taken, every fifth of the book has its share
        fifths = collections.Counter(int(place * 5) for place in places[:first])
        assert min(fifths[k] for k in range(5)) >= first // 10, fifths
