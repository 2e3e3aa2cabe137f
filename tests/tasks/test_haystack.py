"""Haystacks: real sentences, exact sizes, a user's files read strictly."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.starter import vocabulary
from notepad_jax.tasks import haystack
from tests import measures

_PIECE = re.compile(r"\w+|[^\w\s]")


def words(text):
    return len(text.split())


def pieces(text):
    return len(_PIECE.findall(text))


def test_the_standard_library_is_prose_and_not_code():
    prose = haystack.stdlib_prose()
    assert len(prose.sentences) > 5000
    assert len(set(prose.sentences)) == len(prose.sentences)
    text = " ".join(prose.sentences)
    letters = sum(character.isalpha() or character == " " for character in text)
    assert letters / len(text) > 0.95  # prose, not code
    assert not re.search(r"_|>>>|\n", text)
    assert text.count(" the ") > 5000


def test_the_same_library_gives_the_same_sentences_in_the_same_order(monkeypatch):
    part = str(Path(sysconfig.get_path("stdlib"), "email"))
    monkeypatch.setattr(haystack.sysconfig, "get_path", lambda name: part)
    monkeypatch.setattr(haystack, "PROSE_SENTENCES", 100)
    one, same = (haystack.stdlib_prose.__wrapped__().sentences for _ in range(2))
    assert one == same
    assert set(one) <= set(haystack.stdlib_prose().sentences)


def test_a_library_without_sources_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(haystack.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match="0 documented sentences.*give text files instead"):
        haystack.stdlib_prose.__wrapped__()


def test_sizes_are_prefix_sums_of_sentences_with_the_space_before_them():
    straw = haystack.Haystack(("One two.", "Three.", "Four five six."), "straw")
    measures = haystack.measured(straw, words)
    assert measures.tokens.tolist() == [0, 2, 3, 6, 8, 9, 12]  # two rounds
    assert measures.characters.tolist() == [0, 9, 16, 31, 40, 47, 62]
    assert measures.shortest_first.tolist() == [1, 0, 2]
    assert measures.sorted_tokens.tolist() == [1, 2, 3]
    assert haystack.measured(straw, words) is measures  # counted once


@pytest.mark.parametrize("count", [words, pieces, len])
def test_counters_that_cut_at_spaces_pass(count):
    haystack.check_additive(count)
    prose = haystack.stdlib_prose().sentences[:300]
    assert abs(sum(count(" " + s) for s in prose) - count(" ".join(prose))) <= 1


def test_real_tokenizers_are_additive_over_sentences(tmp_path):
    prose = haystack.stdlib_prose().sentences
    (tmp_path / "tokenizer.model").write_bytes(vocabulary.sentencepiece_model())
    unigram = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    bpe = measures.bpe(prose[::4], 1500)
    for count in (bpe, lambda text: len(unigram.encode(text))):
        haystack.check_additive(count)
        part = prose[100:200]
        assert abs(sum(count(" " + s) for s in part) - count(" ".join(part))) <= 1


@pytest.mark.parametrize(
    "count", [lambda text: len(text) // 4, lambda text: words(text) + 2, lambda text: 0]
)
def test_counters_that_do_not_add_up_are_refused(count):
    with pytest.raises(ValueError, match="token counter finds .* cuts at spaces"):
        haystack.check_additive(count)


def test_a_sentence_without_tokens_is_named():
    straw = haystack.Haystack(("One two.", "…"), "straw")
    with pytest.raises(ValueError, match="finds no tokens in '…' of the haystack 'straw'"):
        haystack.measured(straw, lambda text: len(re.findall(r"[A-Za-z.]+", text)))


def test_what_a_haystack_holds_it_holds_as_whole_words():
    straw = haystack.Haystack(
        ("Nora Selby paid 4821930 crowns.", "A quiet-copper-lantern hung there.", "Nora went."),
        "straw",
    )
    for text in ("4821930", "quiet-copper-lantern", "Nora Selby", "NORA", "paid 4821930 crowns"):
        assert straw.holds(text), text
    for text in ("482193", "copper-lantern", "Selby Nora", "lanterns", "there Nora", "went. A", ""):
        assert not straw.holds(text), text


def test_text_files_are_read_in_the_order_of_their_names(tmp_path):
    (tmp_path / "tests").mkdir()  # a user's folder is never skipped for its name
    (tmp_path / "b.txt").write_text("Second file. It has  two\nsentences.\n\nAnd a heading\n")
    (tmp_path / "a.md").write_text("First file.")
    (tmp_path / "tests" / "c.txt").write_text('Third? "Yes," he said. fourth stays.')
    (tmp_path / "picture.png").write_bytes(b"\xff\x00")
    found = haystack.text_files([tmp_path]).sentences
    assert found == (
        "First file.",
        "Second file.",
        "It has two sentences.",
        "And a heading",
        "Third?",
        '"Yes," he said. fourth stays.',
    )
    assert haystack.text_files([tmp_path / "b.txt", tmp_path / "a.md"]).sentences[-1] == found[0]
    assert haystack.text_files([f"file://{tmp_path}/a.md"]).sentences == ("First file.",)
    with pytest.raises(ValueError, match=f"file://{tmp_path}/none.txt is missing"):
        haystack.text_files([f"file://{tmp_path}/none.txt"])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=3000).filter(str.strip))
def test_no_character_of_a_text_is_lost_but_white_space(tmp_path_factory, text):
    file = tmp_path_factory.mktemp("texts") / "any.txt"
    file.write_bytes(text.encode("utf-8", "ignore"))
    read = file.read_bytes().decode()
    if not read.strip():
        return
    found = haystack.text_files([file]).sentences
    assert "".join("".join(s.split()) for s in found) == "".join(read.split())
    assert max(map(len, found)) <= haystack.LONGEST


def test_a_text_without_spaces_or_stops_is_cut(tmp_path):
    (tmp_path / "endless.txt").write_text("x" * 1_000_000 + " " + "word " * 100_000)
    found = haystack.text_files([tmp_path]).sentences
    assert max(map(len, found)) == haystack.LONGEST
    assert all(s.split() and set(s.split()) == {"word"} for s in found[2500:])
    assert np.sum([len(s.replace(" ", "")) for s in found]) == 1_400_000


def test_mistakes_in_text_files_are_one_line_that_names_the_file(tmp_path, monkeypatch):
    (tmp_path / "latin.txt").write_bytes("Zwölf Boxkämpfer".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n\n ")
    (tmp_path / "folder").mkdir()
    (tmp_path / "large.txt").write_text("Word. " * 100)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "broken.txt").symlink_to(tmp_path / "nowhere")
    for name, message in (
        ("latin.txt", r"latin.txt is not UTF-8 at byte 2; convert it"),
        ("empty.txt", r"empty.txt is empty"),
        ("folder", r"folder holds no text files; .*\.md, \.rst, \.txt"),
        ("links", r"broken.txt cannot be read: No such file"),
        ("missing.txt", r"missing.txt is not a file"),
    ):
        with pytest.raises(ValueError, match=message) as problem:
            haystack.text_files([tmp_path / name])
        assert "\n" not in str(problem.value)
    monkeypatch.setattr(haystack, "LARGEST", 500)
    with pytest.raises(ValueError, match="as far as .*large.txt, hold more than 500 bytes"):
        haystack.text_files([tmp_path / "large.txt"])
