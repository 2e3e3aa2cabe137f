"""HotpotQA, as its authors publish it or in the Hugging Face hub's form, as a corpus.

Above: tasks.suites; below: corpus and sources.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from notepad_jax.data import tables
from notepad_jax.data.foreign.corpus import (
    Corpus,
    GoldFact,
    Pool,
    Question,
    find_word,
    named,
    text_of,
)


def read(path: str | Path) -> Corpus:
    """Reads HotpotQA: the published .json, or the hub's form as .jsonl or .parquet.

    One row is parsed at a time, and paragraphs that rows share are kept once: the train
    file of 566 MB costs about its size. Questions whose gold paragraphs are not in their
    context (the fullwiki setting) are dropped and counted. Facts are found in the
    supporting sentences: the answer, or else the title of another gold paragraph, which is
    the bridge; what the question names already is no fact. ValueError names file and row.
    """
    pool = Pool()
    questions: list[Question] = []
    dropped = {"gold paragraph missing": 0}
    for number, row in tables.rows(path):
        where = f"{path} row {number}"
        context = _context(row, where)
        titles = {title: place for place, (title, _) in reversed(list(enumerate(context)))}
        numbers = [pool.add(title, "".join(sentences).strip()) for title, sentences in context]
        supporting = _supporting(row, where)
        if not supporting or any(title not in titles for title, _ in supporting):
            dropped["gold paragraph missing"] += 1
            continue
        gold = {title: context[titles[title]][1] for title, _ in supporting}
        answer = text_of(row, "answer", where)
        text = text_of(row, "question", where)
        facts = [
            GoldFact(found, numbers[titles[title]], start)
            for title, sentences in gold.items()
            for found, start in _known_fact(title, sentences, supporting, answer, gold)
            if not named(found, text) and answer.lower() not in ("yes", "no")
        ]
        own = tuple(dict.fromkeys(numbers[titles[title]] for title in gold))
        questions.append(
            Question(
                id=text_of(row, "_id" if "_id" in row else "id", where),
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
