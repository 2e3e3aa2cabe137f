"""SQuAD, as its authors publish it or in the Hugging Face hub's form, as a corpus.

Above: tasks.suites; below: corpus and sources.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.data import sources, tables
from notepad_jax.data.foreign.corpus import Corpus, GoldFact, Pool, Question, named, text_of


def read(path: str | Path) -> Corpus:
    """Reads SQuAD 1.1 or 2: the published .json, or the hub's rows as .jsonl or .parquet.

    Unanswerable questions are dropped and counted. Paragraphs have no titles, as in RULER.
    Raises ValueError naming file and row (of the published form: article and question).
    """
    pool = Pool()
    questions: list[Question] = []
    articles: dict[str, dict[int, None]] = {}  # paragraphs by article, each once, in order
    places: list[str] = []  # the article of each question
    dropped = {"unanswerable": 0}
    published = str(path).lower().endswith(".json")
    for where, row in _articles(path) if published else _rows(path):
        answers = _answers(row, where)
        context = text_of(row, "context", where)
        number = pool.add("", context.strip())
        article = articles.setdefault(str(row.get("title") or number), {})
        article[number] = None
        if not answers:
            dropped["unanswerable"] += 1
            continue
        lead = len(context) - len(context.lstrip())
        text = text_of(row, "question", where)
        known = [answer for answer in answers if not named(answer[0], text)][:1]
        questions.append(
            Question(
                id=text_of(row, "id", where),
                text=text.strip(),
                answers=tuple(dict.fromkeys(answer for answer, _ in answers)),
                gold=(number,),
                near=(),  # the rest of the article, once all of it is known
                facts=tuple(GoldFact(found, number, max(0, at - lead)) for found, at in known),
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


def _rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, row in tables.rows(path):
        yield f"{path} row {number}", row


def _articles(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
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


def _answers(row: Mapping[str, Any], where: str) -> list[tuple[str, int]]:
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
