"""Statistics of dated messages: counted again from the text, of the right length, unbiased."""

import collections
import datetime
import itertools
import re

import numpy as np
import pytest
import scipy.stats

from notepad_jax.scoring import metrics
from notepad_jax.tasks import haystack, oolong, oolong_lines, recipe, suites
from tests import measures

PROSE = haystack.noise()
_PIECE = re.compile(r"\w+|[^\w\s]")
_LINE = re.compile(r"Date: (\w+ \d+, \d+) \|\| User: (\d+) \|\| Message: (.*[.?])")
# A word or two by which a message of each label is known: the oracle's own idea of labels.
_KNOWN_BY = {
    "food": r"salt|burnt|more of the|tasted|for lunch|and a fork",
    "weather": r"forecast|coat|All week|sky|air was fresh|valley",
    "sport": r"final|train harder|medal|referee|We scored|knee",
    "music": r"scales|solo|out of tune|waltz|orchestra|melody",
    "travel": r"missed|two seats|station late|suitcase|ticket|Passengers",
    "gardening": r"watered|Snails|in April|pruning|dug up|compost",
}


def count(text):
    return len(_PIECE.findall(text))


def make(name, seed, length):
    return oolong.make_task(name, seed, length, PROSE, count)


def text_of(task):
    return "".join(task.document.pieces())


def day_of(text):
    return datetime.datetime.strptime(text, "%b %d, %Y")


def label_of(message):
    (label,) = [label for label, words in _KNOWN_BY.items() if re.search(words, message)]
    return label


def rows(text):
    return [(day_of(d), user, label_of(said)) for d, user, said in _LINE.findall(text)]


def most(values, sign=1):
    """The most frequent value, or with sign -1 the least frequent; none other comes as often."""
    ranked = sorted(collections.Counter(values).items(), key=lambda pair: -sign * pair[1])
    assert len(ranked) == 1 or ranked[0][1] != ranked[1][1]
    return ranked[0][0]


def compared(first, second):
    assert first != second
    return "more common" if first > second else "less common"


def solve(name, question, text):
    """Answers from the question and the text as a patient reader would."""
    told = rows(text)
    labels = [label for _, _, label in told]
    label = (re.search(r"label (\w+)", question) or [""] * 2)[1]
    user = (re.search(r"user (\d+)", question) or [""] * 2)[1]
    own = [row for row in told if row[2] == label]
    if name in ("most_frequent", "least_frequent"):
        return most(labels, 1 if name == "most_frequent" else -1)
    if name == "comparison":
        return compared(labels.count(label), labels.count(re.findall(r"label (\w+)", question)[1]))
    if name == "before_after":
        day = day_of(re.search(r"before (\w+ \d+, \d+)", question)[1])
        return compared(sum(row[0] < day for row in own), sum(row[0] >= day for row in own))
    return {
        "count": lambda: str(len(own)),
        "user": lambda: most(row[1] for row in own),
        "user_count": lambda: str(sum(row[1] == user for row in own)),
        "user_label": lambda: most(row[2] for row in told if row[1] == user),
        "month": lambda: most(f"{row[0]:%B}" for row in own),
        "date": lambda: f"{most(row[0] for row in told):%b %d, %Y}",
    }[name]()


@pytest.mark.parametrize("name", oolong.NAMES)
@pytest.mark.parametrize("length", [2048, 16_384])
def test_who_counts_the_lines_gets_everything_right(name, length):
    for seed in range(6):
        task = make(name, seed, length)
        said = f"Answer: {solve(name, task.question, text_of(task))}"
        assert said == f"Answer: {task.answers[0]}"
        assert metrics.score(said, task.answers, task.metric, task.contract).value == 1.0


@pytest.mark.parametrize("name", oolong.NAMES)
@pytest.mark.parametrize("length", [2048, 4096, 50_000])
def test_lengths_are_met_from_below(name, length):
    for seed in range(2):
        assert 0.98 * length < count(text_of(make(name, seed, length))) <= length


@pytest.mark.parametrize("name", oolong.NAMES)
def test_a_seed_asks_the_same_at_every_length_and_writes_the_same_twice(name):
    short, same, long = make(name, 5, 2048), make(name, 5, 2048), make(name, 5, 32_768)
    assert text_of(short) == text_of(same) != text_of(make(name, 6, 2048))
    assert short.question == long.question
    if short.metric == "oolong_number":
        assert int(long.answers[0]) > int(short.answers[0])
    else:
        assert short.answers == long.answers


@pytest.mark.parametrize("name", ["count", "user_count"])
def test_a_number_is_known_at_the_last_line_that_counts(name):
    task = make(name, 2, 8192)
    text, (known,) = text_of(task), task.evidence
    at = round(known.place * (len(text) - 1))  # of the space before the line
    assert text[at:].startswith(" \nDate: ") and known.text == task.answers[0]
    before, rest = text[:at], text[at:].lstrip().partition("\n")
    assert solve(name, task.question, before + " \n" + rest[0]) == task.answers[0]
    assert int(solve(name, task.question, before)) == int(task.answers[0]) - 1


def test_what_is_left_open_is_drawn_evenly_and_lines_are_shuffled():
    lines, _ = oolong_lines.fitted(
        recipe.sample("oolong/x", 3, 100_000, PROSE, count), [oolong_lines.Cell((2,)),
        oolong_lines.Cell((4,))], np.array([0.5, 0.5]),
    )  # fmt: skip
    days, users, labels, words = lines.drawn(np.arange(lines.size))
    assert set(labels) == {2, 4}
    for drawn in (days, users, words):
        assert scipy.stats.chisquare(np.bincount(drawn)).pvalue > 1e-4
    assert len(set(zip(days.tolist(), users.tolist(), words.tolist(), strict=True))) > 2000
    told = [label for _, _, label in rows("".join(lines.write(0, lines.size)))]
    halves = collections.Counter(told[: lines.size // 2])
    assert abs(halves["sport"] - halves["travel"]) < 5 * lines.size**0.5


@pytest.mark.parametrize("shares", [(0.4, 0.35, 0.25), (0.05, 0.05, 0.9), (1 / 3, 1 / 3, 1 / 3)])
def test_sizes_are_shares_to_the_nearest_line(shares):
    sample = recipe.sample("oolong/x", 0, 1500, PROSE, count)
    cells = [oolong_lines.Cell((k,)) for k in range(3)]
    lines, _ = oolong_lines.fitted(sample, cells, np.array(shares))
    assert lines.size > 50 and np.abs(lines.sizes - lines.size * np.array(shares)).max() < 1
    assert sorted(lines.sizes, reverse=shares[0] >= shares[2]) == lines.sizes.tolist()


@pytest.mark.slow
def test_answers_are_no_guessing_game():
    def answers(name):
        return collections.Counter(make(name, seed, 2048).answers[0] for seed in range(120))

    assert abs(answers("comparison")["more common"] - 60) < 28
    assert abs(answers("before_after")["more common"] - 60) < 28
    labels, months = answers("most_frequent"), answers("month")
    assert len(labels) == 6 and max(labels.values()) < 42
    assert len(months) == 12 and max(months.values()) < 30
    assert len(answers("count")) > 20


def test_labels_have_as_many_messages_and_every_one_says_its_label():
    sizes = {len(messages) for messages in oolong_lines.MESSAGES}
    assert sizes == {72}
    for label, messages in zip(oolong_lines.LABELS, oolong_lines.MESSAGES, strict=True):
        assert {label_of(said) for said in messages} == {label}


@pytest.mark.parametrize("name", oolong.NAMES)
def test_lengths_hold_for_bpe(name):
    tokens = measures.bpe([text_of(make(oolong.NAMES[0], 0, 8192)), *PROSE.sentences], 900)
    for seed in range(2):
        text = text_of(oolong.make_task(name, seed, 8192, PROSE, tokens))
        assert 0.98 * 8192 < tokens(text) <= 8192


def test_a_long_document_is_written_in_constant_memory():
    task = make(oolong.NAMES[2], 0, 1_000_000)
    for_one_piece = max(len(piece) for piece in itertools.islice(task.document.pieces(), 3))
    characters, peak = measures.written(task.document)
    assert characters > 2_000_000 and peak < 20 * for_one_piece


def test_what_cannot_be_made_is_said():
    with pytest.raises(recipe.Unreachable, match="oolong/month cannot be 200 .* no clear winner"):
        make("month", 0, 200)
    with pytest.raises(recipe.Unreachable, match="no room for a message"):
        make("count", 0, 20)
    with pytest.raises(ValueError, match="OOLONG has no generated task 'x'; there are most_freq"):
        make("x", 0, 2000)
    with pytest.raises(ValueError, match="suite oolong has no task 'x'"):
        suites.names("oolong", ["x"], suites.SuiteSources(count))
