"""Questions with their gold paragraphs, and the pool they lie in: read from users' files.

A `Corpus` is what tasks.questions makes documents of. HotpotQA and SQuAD are read as their
authors publish them or in the Hugging Face hub's form, with the facts that a reader must
carry away located in the gold paragraphs. Where nobody has these files, tasks.invented
makes a corpus out of nothing. Below: sources.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax.data import sources


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A distractor or a gold paragraph; the title may be empty."""

    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Fact:
    """Words that a reader must carry away from a gold paragraph."""

    text: str
    paragraph: int  # number in the corpus
    start: int  # character of the paragraph's text


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its answers (any is right) and the paragraphs that hold the evidence."""

    id: str
    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]  # numbers of paragraphs in the corpus
    near: tuple[int, ...]  # paragraphs that came with the question: the hardest distractors
    facts: tuple[Fact, ...]  # those that are known; none for yes-or-no questions


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Questions and the pool of paragraphs, gold ones included."""

    name: str
    questions: Sequence[Question]
    paragraphs: Sequence[Paragraph]
    dropped: Mapping[str, int]  # questions that were left out, by reason


# ---------------------------------------------------------------- HotpotQA


def read_hotpotqa(path: str | Path) -> Corpus:
    """Reads HotpotQA: the published .json, or the hub's form as .jsonl or .parquet.

    One row is parsed at a time, and paragraphs that rows share are kept once: the train
    file of 566 MB costs about its size. Questions whose gold paragraphs are not in their
    context (the fullwiki setting) are dropped and counted. Facts are found in the
    supporting sentences: the answer, or else the title of another gold paragraph, which is
    the bridge; what the question names already is no fact. ValueError names file and row.
    """
    pool = _Pool()
    questions: list[Question] = []
    dropped = {"gold paragraph missing": 0}
    for number, row in sources.rows(path):
        where = f"{path} row {number}"
        context = _context(row, where)
        titles = {title: place for place, (title, _) in reversed(list(enumerate(context)))}
        numbers = [pool.add(title, "".join(sentences).strip()) for title, sentences in context]
        supporting = _supporting(row, where)
        if not supporting or any(title not in titles for title, _ in supporting):
            dropped["gold paragraph missing"] += 1
            continue
        gold = {title: context[titles[title]][1] for title, _ in supporting}
        answer = _string(row, "answer", where)
        text = _string(row, "question", where)
        facts = [
            Fact(found, numbers[titles[title]], start)
            for title, sentences in gold.items()
            for found, start in _known_fact(title, sentences, supporting, answer, gold)
            if not _named(found, text) and answer.lower() not in ("yes", "no")
        ]
        own = tuple(dict.fromkeys(numbers[titles[title]] for title in gold))
        questions.append(
            Question(
                id=_string(row, "_id" if "_id" in row else "id", where),
                text=text,
                answers=(answer,),
                gold=own,
                near=tuple(sorted(set(numbers) - set(own))),
                facts=tuple(facts),
            )
        )
    if not questions:
        raise ValueError(f"{path} has no question with its gold paragraphs; use the distractor set")
    return Corpus(Path(str(path)).stem, questions, pool.paragraphs, dropped)


class _Pool:
    """Paragraphs, each kept once."""

    def __init__(self) -> None:
        self.paragraphs: list[Paragraph] = []
        self._known: dict[Paragraph, int] = {}

    def add(self, title: str, text: str) -> int:
        paragraph = Paragraph(title, text)
        number = self._known.setdefault(paragraph, len(self.paragraphs))
        if number == len(self.paragraphs):
            self.paragraphs.append(paragraph)
        return number


def _known_fact(
    title: str,
    sentences: list[str],
    supporting: list[tuple[str, int]],
    answer: str,
    gold: Mapping[str, Any],
) -> Iterator[tuple[str, int]]:
    """Yields at most one (words, character of the paragraph where they stand)."""
    joined = "".join(sentences)
    lead = len(joined) - len(joined.lstrip())
    others = [other.split(" (")[0] for other in gold if other != title]
    for wanted in (answer, *others):
        for name, place in supporting:
            if name != title or not 0 <= place < len(sentences) or not wanted:
                continue
            at = find_word(wanted, sentences[place])
            if at >= 0:
                yield wanted, max(0, len("".join(sentences[:place])) + at - lead)
                return


def find_word(wanted: str, text: str) -> int:
    """Where `wanted` stands with no letter or digit glued to it, or -1."""
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if not text[max(0, at - 1) : at].isalnum() and not text[end : end + 1].isalnum():
            return at
        at = text.find(wanted, at + 1)
    return -1


def _named(words: str, question: str) -> bool:
    return find_word(words.lower(), question.lower()) >= 0


def _pairs(value: Any, first: str, second: str) -> Any:
    """The hub's form, an object of two lists, as the published one, a list of pairs."""
    if not isinstance(value, dict):
        return value
    a, b = value.get(first), value.get(second)
    lists = isinstance(a, list) and isinstance(b, list) and len(a) == len(b)
    return list(zip(a, b, strict=True)) if lists else None


def _context(row: Mapping[str, Any], where: str) -> list[tuple[str, list[str]]]:
    """[(title, sentences)] from either published form."""
    context = _pairs(row.get("context"), "title", "sentences")
    ok = isinstance(context, list) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], list)
        and all(isinstance(sentence, str) for sentence in pair[1])
        for pair in context
    )
    if not ok:
        raise ValueError(f"{where}: 'context' must be a list of [title, [sentence, ...]]")
    return [(title, sentences) for title, sentences in context if "".join(sentences).strip()]


def _supporting(row: Mapping[str, Any], where: str) -> list[tuple[str, int]]:
    """[(title, sentence number)] from either published form."""
    facts = _pairs(row.get("supporting_facts"), "title", "sent_id")
    ok = isinstance(facts, list) and all(
        isinstance(fact, list | tuple)
        and len(fact) == 2
        and isinstance(fact[0], str)
        and type(fact[1]) is int
        for fact in facts
    )
    if not ok:
        raise ValueError(f"{where}: 'supporting_facts' must be a list of [title, sentence number]")
    return [(title, place) for title, place in facts]


def _string(row: Mapping[str, Any], name: str, where: str) -> str:
    if name not in row:
        raise ValueError(f"{where} has no column {name!r}; it has {sources.columns_of(row)}")
    if not isinstance(row[name], str) or not row[name].strip():
        raise ValueError(f"{where}: {name!r} must be a text, it is {row[name]!r:.80}")
    return row[name]


# ---------------------------------------------------------------- SQuAD


def read_squad(path: str | Path) -> Corpus:
    """Reads SQuAD 1.1 or 2: the published .json, or the hub's rows as .jsonl or .parquet.

    Unanswerable questions are dropped and counted. Paragraphs have no titles, as in RULER.
    Raises ValueError naming file and row (of the published form: article and question).
    """
    pool = _Pool()
    questions: list[Question] = []
    articles: dict[str, dict[int, None]] = {}  # paragraphs by article, each once, in order
    places: list[str] = []  # the article of each question
    dropped = {"unanswerable": 0}
    published = str(path).lower().endswith(".json")
    for where, row in _squad_articles(path) if published else _squad_rows(path):
        answers = _squad_answers(row, where)
        context = _string(row, "context", where)
        number = pool.add("", context.strip())
        article = articles.setdefault(str(row.get("title") or number), {})
        article[number] = None
        if not answers:
            dropped["unanswerable"] += 1
            continue
        lead = len(context) - len(context.lstrip())
        text = _string(row, "question", where)
        known = [answer for answer in answers if not _named(answer[0], text)][:1]
        questions.append(
            Question(
                id=_string(row, "id", where),
                text=text.strip(),
                answers=tuple(dict.fromkeys(answer for answer, _ in answers)),
                gold=(number,),
                near=(),  # the rest of the article, once all of it is known
                facts=tuple(Fact(found, number, max(0, at - lead)) for found, at in known),
            )
        )
        places.append(str(row.get("title") or number))
    if not questions:
        raise ValueError(f"{path} has no answerable question; use the train or dev file")
    questions = [
        dataclasses.replace(q, near=tuple(n for n in articles[place] if n not in q.gold))
        for q, place in zip(questions, places, strict=True)
    ]
    return Corpus(Path(str(path)).stem, questions, pool.paragraphs, dropped)


def _squad_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in sources.rows(path):
        yield f"{path} row {number}", row


def _squad_articles(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Flattens data / paragraphs / qas to rows (context, id, question, answers)."""
    raw = sources.read(path)
    data = sources.parse(raw, path, 1, 0)
    articles = data.get("data") if isinstance(data, dict) else None
    if not isinstance(articles, list):
        raise ValueError(f"{path} is no SQuAD file: it has no list under 'data'")
    for number, article in enumerate(articles, start=1):
        where = f"{path} article {number}"
        for paragraph in _list_of_objects(article, "paragraphs", where):
            for qa in _list_of_objects(paragraph, "qas", where):
                yield (
                    f"{where} question {str(qa.get('id'))[:40]!r}",
                    {**qa, "context": paragraph.get("context"), "title": f"article {number}"},
                )


def _list_of_objects(value: Any, name: str, where: str) -> list[dict[str, Any]]:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"{where}: {name!r} must be a list of objects, it is {found!r:.80}")
    return found


def _squad_answers(row: Mapping[str, Any], where: str) -> list[tuple[str, int]]:
    """[(answer, character where it stands)]; none for an unanswerable question."""
    answers = row.get("answers")
    if isinstance(answers, dict):  # the hub's columns
        texts, starts = answers.get("text"), answers.get("answer_start")
        lists = isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts)
        answers = (
            [{"text": t, "answer_start": s} for t, s in zip(texts, starts, strict=True)]
            if lists
            else None
        )
    ok = isinstance(answers, list) and all(
        isinstance(answer, dict)
        and isinstance(answer.get("text"), str)
        and type(answer.get("answer_start")) is int
        for answer in answers
    )
    if not ok:
        raise ValueError(
            f"{where}: 'answers' must be a list of texts with 'answer_start', it is "
            f"{json.dumps(row.get('answers'), default=str)[:80]}"
        )
    if row.get("is_impossible"):
        return []
    return [(answer["text"], answer["answer_start"]) for answer in answers if answer["text"]]
