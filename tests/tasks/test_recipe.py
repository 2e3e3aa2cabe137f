"""Documents as recipes: written in blocks, facts in their places, sized in one pass."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.tasks import haystack, recipe
from notepad_jax.tasks.recipe import Fact, RecipeDocument, WrittenUnits


def words(text):
    return len(text.split())


def numbered(start, stop):
    return [f"u{i}" for i in range(start, stop)]


def text_of(document):
    return "".join(document.pieces())


@settings(max_examples=60, deadline=None)
@given(
    size=st.one_of(st.integers(0, 20), st.integers(1020, 1030), st.integers(2044, 2052)),
    shares=st.lists(st.floats(0, 1), max_size=6),
    closing=st.integers(0, 3),
)
def test_blocks_and_facts_come_together_as_in_a_list(size, shares, closing):
    end = tuple(f"end{i}" for i in range(closing))
    slots = sorted(int(share * (size + closing)) for share in shares)
    facts = tuple((slot, f"fact{i}") for i, slot in enumerate(slots))
    expected = []
    for number, unit in enumerate([*numbered(0, size), *end, None]):
        expected += [text for slot, text in facts if slot == number]
        expected += [unit] if unit else []
    document = RecipeDocument(WrittenUnits(numbered, size), facts, end)
    assert text_of(document) == " ".join(expected)
    assert text_of(document) == text_of(document)  # starts again from the beginning
    assert document.characters(size + closing) == sum(
        1 + len(unit) for unit in [*numbered(0, size), *end]
    )


def test_a_rotation_goes_round_from_its_opening():
    straw = haystack.Haystack(("A.", "Bb.", "Ccc."), "straw")
    widths = haystack.measured(straw, words).characters
    rotation = recipe.Rotation(straw, opening=2, size=7, widths=widths)
    seven = ["Ccc.", "A.", "Bb.", "Ccc.", "A.", "Bb.", "Ccc."]
    assert rotation.units(0, 7) == seven
    assert rotation.units(3, 6) == seven[3:6]
    for stop in range(8):
        assert rotation.characters(stop) == sum(1 + len(unit) for unit in seven[:stop])


def test_places_are_exact_to_the_character():
    facts = [Fact(0.99, "The last.", "last"), Fact(0.0, "The first."), Fact(0.5, "Half.", "half")]
    document, evidence = recipe.hide("t", facts, haystack.noise(), 0.4, 3000, words)
    text = text_of(document)
    assert text.startswith("The first. ")
    assert [found.text for found in evidence] == ["half", "last"]  # in the document's order
    assert evidence[0].place == text.index("Half.") / len(text)
    assert evidence[1].place == text.index("The last.") / len(text)


def test_the_last_gap_is_closed_with_what_fits_best():
    straw = haystack.Haystack(("One two three four five.", "One two three."), "straw")
    # 13 tokens: 5 + 5 = 10 and 3 left; 12: 2 left, too few for anything here.
    assert recipe.closing(straw, 13, words) == (
        ("One two three four five.", "One two three four five.", "One two three."),
        0,
    )
    assert recipe.closing(straw, 12, words)[1] == 2


def test_fitting_takes_as_many_units_as_there_is_room_for():
    # Unit i has 1 + (i % 3) words: three units take 6.
    def write(start, stop):
        return [" ".join("w" * (1 + i % 3)) for i in range(start, stop)]

    for room in (0, 1, 5, 6, 511, 512, 513, 6000):
        fitted, left = recipe.fitting(write, room, words)
        used = sum(1 + i % 3 for i in range(fitted))
        assert used + left == room
        assert left < 1 + fitted % 3


@settings(max_examples=60, deadline=None)
@given(length=st.integers(300, 5000), opening=st.floats(0, 0.999), facts=st.integers(0, 8))
def test_lengths_are_met_from_below(length, opening, facts):
    told = [Fact(i / 8, f"Fact number {i} is told.") for i in range(facts)]
    for document, _ in (
        recipe.hide("t", told, haystack.noise(), opening, length, words),
        recipe.hide_among("t", told, numbered, length, words),
    ):
        assert 0.98 * length < words(text_of(document)) <= length


def test_lengths_that_cannot_be_met_are_named():
    fact = [Fact(0.5, "This one fact has seven words altogether.")]
    with pytest.raises(
        ValueError, match="some/task cannot be 8 tokens long: its facts alone take 9"
    ):
        recipe.hide("some/task", fact, haystack.noise(), 0.0, 8, words)
    with pytest.raises(ValueError, match="cannot be 40 tokens long: its parts come to 3[0-9], and"):
        recipe.hide("some/task", fact, haystack.noise(), 0.0, 40, words)
    with pytest.raises(ValueError, match="seed of a sample is -1"):
        recipe.sample("some/task", -1, 4096, haystack.noise(), words)
    with pytest.raises(ValueError, match="some/task cannot be 0 tokens long"):
        recipe.sample("some/task", 1, 0, haystack.noise(), words)


@pytest.mark.slow
def test_a_long_document_is_sized_without_its_text_and_streams_in_constant_memory():
    facts = [Fact(i / 16, f"Fact number {i} is told.", str(i)) for i in range(16)]
    prose = haystack.stdlib_prose()
    asked: list[str] = []

    def counted(text):
        asked.append(text)
        return words(text)

    recipe.hide("t", facts, prose, 0.7, 4096, counted)  # haystacks are measured once
    asked.clear()
    tracemalloc.start()
    document, evidence = recipe.hide("t", facts, prose, 0.7, 3_500_000, counted)
    sized = sum(map(len, asked))
    tokens = sum(words(piece) for piece in document.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.98 * 3_500_000 < tokens <= 3_500_000
    assert len(evidence) == 16
    assert sized < 10_000  # characters; the document has fourteen million
    assert peak < 2e6
