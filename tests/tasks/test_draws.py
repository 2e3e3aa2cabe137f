"""Drawing without repetition and without storing: permutations, names, numbers, identifiers."""

from __future__ import annotations

import itertools
import re
import uuid

import numpy as np
import pytest
import scipy.stats

from notepad_jax.tasks import draws
from notepad_jax.tasks.draws import SampleDraws, Shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 1000, 65_537, draws.NAME_COUNT])
def test_a_shuffle_is_a_permutation_and_any_part_of_it_can_be_had(size):
    shuffle = Shuffle((3, 1), size)
    whole = shuffle.at(np.arange(size))
    assert (np.sort(whole) == np.arange(size)).all()
    middle = np.arange(size // 3, size // 2)
    assert (shuffle.at(middle) == whole[middle]).all()


def test_shuffles_of_other_seeds_are_others_and_one_past_the_end_is_refused():
    one, same, other = (Shuffle((seed,), 1000).at(np.arange(1000)) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one == other).sum() < 10  # one place in a thousand agrees by chance
    with pytest.raises(draws.Exhausted, match="only 1,000 different"):
        Shuffle((1,), 1000).at(np.array([1000]))


@pytest.mark.slow
def test_every_item_goes_anywhere():
    # Over 1,000 seeds: where the first item of 20 goes, and whether neighbours stay neighbours.
    sent = np.array([Shuffle((seed, 9), 20).at(np.arange(20)) for seed in range(1000)])
    for item in (0, 7, 19):
        counts = np.bincount(sent[:, item], minlength=20)
        assert scipy.stats.chisquare(counts).pvalue > 1e-3
    steps = np.bincount((sent[:, 1] - sent[:, 0]) % 20, minlength=20)[1:]
    assert scipy.stats.chisquare(steps).pvalue > 1e-3
    stuck = np.where(sent == 0, 1, sent)  # a shuffle that sends nothing to 0 is found out
    assert scipy.stats.chisquare(np.bincount(stuck[:, 0], minlength=20)).pvalue < 1e-6


def test_the_words_of_names_are_distinct_and_as_many_as_is_said():
    words = (*draws.QUALITIES, *draws.MATERIALS, *draws.THINGS)
    assert len(set(words)) == len(words) == 64 + 96 + 96
    assert draws.NAME_COUNT == 64 * 96 * 96 == 589_824
    assert all(word.isalpha() and word.islower() for word in words)


def test_the_list_of_words_is_of_single_words_and_none_is_coined():
    assert len(draws.WORDS) == len(set(draws.WORDS)) == 6718
    assert list(draws.WORDS) == sorted(draws.WORDS)
    assert all(re.fullmatch("[a-z]{4,12}", word) for word in draws.WORDS)
    c, v = f"[{draws.CONSONANTS}]", f"[{draws.VOWELS}]"
    coined = re.compile(f"{c}{v}{c}{v}{c}(?:{'|'.join(draws.ENDINGS)})")
    assert not any(map(coined.fullmatch, draws.WORDS))
    drawn = SampleDraws((1,)).words(np.arange(7000))
    assert set(drawn[:6718]) == set(draws.WORDS) and all(map(coined.fullmatch, drawn[6718:]))
    mixed = np.array([6900, 3, 6718, 0, 3])  # any indices, in any order
    assert SampleDraws((1,)).words(mixed) == [drawn[i] for i in mixed]


def test_coined_words_are_as_many_as_their_letters_allow():
    coined = {draws._coin(number) for number in range(0, 1_166_400, 41)}
    assert len(coined) == -(-1_166_400 // 41)
    with pytest.raises(draws.Exhausted, match="only 1,166,400 different"):
        SampleDraws((1,)).words(np.array([6718 + 1_166_400]))


def test_nothing_is_drawn_twice():
    drawn, many = SampleDraws((5, 6)), np.arange(20_000)
    for texts in (
        drawn.names(many),
        drawn.numbers(many),
        drawn.uuids(many),
        drawn.people(many[:2304]),
        drawn.coded(many, 6),
        drawn.words(many),
    ):
        assert len(set(texts)) == len(texts)
    assert {len(number) for number in drawn.numbers(many)} == {7}
    assert {len(word) for word in drawn.coded(many, 5)} == {5}
    with pytest.raises(draws.Exhausted, match="2,304"):
        drawn.people(np.array([2304]))


def test_uuids_are_what_the_standard_library_calls_random_ones():
    for text in SampleDraws((1, 2)).uuids(np.arange(500)):
        parsed = uuid.UUID(text)
        assert str(parsed) == text
        assert parsed.version == 4 and parsed.variant == uuid.RFC_4122


def test_digits_of_uuids_are_uniform():
    texts = SampleDraws((1, 3)).uuids(np.arange(5000))
    free = "".join(text.replace("-", "")[:12] for text in texts)  # digits without a meaning
    counts = np.array([free.count(digit) for digit in "0123456789abcdef"])
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


def test_one_by_one_leaves_out_what_is_to_be_avoided_and_keeps_the_order():
    drawn = SampleDraws((4,))
    hundred = drawn.names(np.arange(100))
    held = set(hundred[::3])
    found = list(itertools.islice(draws.one_by_one(drawn.names, held.__contains__), 66))
    assert found == [name for name in hundred if name not in held]
