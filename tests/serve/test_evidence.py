"""Where what an answer says entered the memory: chunk, sentence and bytes, against the document."""

import random
import re

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.serve.readings import evidence as module
from notepad_jax.serve.readings.evidence import Origins, _place, evidence, letters
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.text.tokenizer import open_tokenizer
from notepad_jax.types import TextDocument
from tests.serve.fake import NAME, TOKENIZER, Arithmetic, library, until
from tests.serve.program import ROOT

TOKENIZERS = {"starter": open_tokenizer(ROOT / "data" / "starter"), "bytes": TOKENIZER}


class Chunks(ChunkedDocument):
    def __init__(self, tokenizer, text: str, size: int) -> None:
        super().__init__(tokenizer, document := TextDocument(text), size)
        self.document, self.tokenizer = document, tokenizer

    def letters_before(self, k: int) -> int:
        return sum(letters(self.tokenizer.decode(self[n])) for n in range(k))


def origins(*memories: str) -> Origins:
    found = Origins()
    for chunk, memory in enumerate(memories):
        found.update(chunk, memory)
    return found


@pytest.mark.parametrize("memories, answer, found", [
    (["", "Ada amber"], "amber", ("amber", 1)),
    (["Ada amber", "Ada amber and Hugo falcon", "Hugo falcon Ada amber"], "falcon", ("falcon", 1)),
    (["amber", "nothing", "amber"], "amber", ("amber", 2)),  # it was forgotten, and read again
    (["blue", "Ada blue"], "It is Ada, blue!", ("Ada, blue", 1)),
    (["Ada AMBER"], "amber", ("amber", 0)),
    (["one two three"], "two three four", ("two three", 0)),
    (["one two"], "one and many other words", None),
    (["three two"], "two three", ("three", 0)),  # in one run, the longest
    (["Ada"], "amber", None), ([], "amber", None), (["Ada"], "", None), (["ambers"], "amber", None),
    # Letters of which casefold() makes marks, which are no letters.
    (["Μαΐου"], "15 Μαΐου 1960", ("Μαΐου", 0)), (["İSTANBUL"], "İstanbul", ("İstanbul", 0)),
    (["τον Μαΐου 1960"], "τον Μαΐου 1960 εκεί", ("τον Μαΐου 1960", 0)),
], ids=str)  # fmt: skip
def test_which_chunk_brought_what_an_answer_says(memories, answer, found):
    assert origins(*memories).of(answer) == found


@settings(max_examples=200, deadline=None)
@given(memory=st.text(), answer=st.text(), both=st.text())
def test_what_is_told_is_a_part_of_the_answer_in_any_writing(memory, answer, both):
    found = origins(f"{memory} {both}").of(f"{both} {answer}")
    assert found is None or found[0] in f"{both} {answer}"


TEXT = ("here begins a new chapter of story .\nthe old miller walked toward the bridge . "
        "the secret code of Ada is amber .  the secret code of Hugo is falcon . "
        "amber rain fell softly on the hill .\n")  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("size", [8, 16, 100, 1000])
def test_the_sentence_and_its_bytes_stand_in_the_document(name, size):
    """The same sentence stands in it often: it is the chunk's."""
    tokenizer, text = TOKENIZERS[name], "é \u2028 " + TEXT * 9
    chunks = Chunks(tokenizer, text, size)
    sentence, whole = "the secret code of Hugo is falcon .", text.encode()
    wanted = whole.index(sentence.encode(), len(whole) // 2)
    before = len(tokenizer.encode(whole[:wanted].decode()))
    chunk = before // size
    memories = ["nothing"] * chunk + ["Hugo falcon"]
    told = evidence(origins(*memories), chunks, tokenizer.decode, "code of Hugo ?", "falcon")
    assert (told["text"], told["chunk"]) == ("falcon", chunk)
    if told["sentence"] == sentence:  # no chunk's end tore it
        first, last = told["bytes"]
        assert whole[first:last].decode() == sentence
        inside = len(tokenizer.encode(whole[:first].decode())) // size
        assert inside == chunk
    else:
        assert size < 100


def test_the_sentence_is_the_one_that_says_most_of_what_is_asked():
    tokenizer = TOKENIZERS["starter"]
    chunks = Chunks(tokenizer, TEXT, 1000)
    told = evidence(origins("Ada amber"), chunks, tokenizer.decode, "code of Ada ?", "amber")
    assert told["sentence"] == "the secret code of Ada is amber ."
    told = evidence(origins("rain amber"), chunks, tokenizer.decode, "what rain ?", "amber")
    assert told["sentence"] == "amber rain fell softly on the hill ."
    first, last = told["bytes"]
    assert TEXT.encode()[first:last].decode() == told["sentence"]


def test_what_no_sentence_of_the_chunk_says_has_a_chunk_alone():
    """A memory that adds up, or draws a conclusion."""
    tokenizer = TOKENIZERS["starter"]
    chunks = Chunks(tokenizer, TEXT, 1000)
    told = evidence(origins("Ada indigo"), chunks, tokenizer.decode, "code of Ada ?", "indigo")
    assert told == {"text": "indigo", "chunk": 0, "sentence": None, "bytes": None}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), size=st.integers(4, 300), name=st.sampled_from([*TOKENIZERS])
)
def test_bytes_that_are_told_are_the_sentence(seed, size, name):
    rng, tokenizer = random.Random(seed), TOKENIZERS[name]
    words = [*TEXT.split(), "é", "日本", "🙂", "\n", "x.y", "Ada!"]
    text = "".join(rng.choice(words) + rng.choice((" ", " ", "  ", "\n", ". ")) for _ in range(300))
    chunks = Chunks(tokenizer, text, size)
    total = -(-len(tokenizer.encode(text)) // size)
    chunk = rng.randrange(total)
    said = rng.choice(tokenizer.decode(chunks[chunk]).split() or ["Ada"])
    told = evidence(origins(*[""] * chunk, said), chunks, tokenizer.decode, "", said)
    if told and told["bytes"]:
        first, last = told["bytes"]
        assert text.encode()[first:last].decode().split() == told["sentence"].split()


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab \n", max_size=60), before=st.integers(0, 40),
    words=st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=3),
)  # fmt: skip
def test_a_place_is_the_nearest_of_all_matches(text, before, words):
    pattern = re.compile(r"\s+".join(words))
    found = min(
        pattern.finditer(text), default=None,
        key=lambda found: abs(letters(text[: found.start()]) - before),
    )  # fmt: skip
    wanted = None if found is None else [*found.span()]
    assert _place(iter([text]), before, words) == wanted


def test_a_sentence_that_stands_in_a_text_often_costs_one_look_at_it(monkeypatch):
    looked = []
    monkeypatch.setattr(
        module, "letters", lambda text: looked.append(len(text)) or len("".join(text.split()))
    )
    text = "yes . " * 2000
    assert _place(iter([text]), 4000, ["yes", "."]) == [6000, 6005]
    assert sum(looked) < 4 * len(text)


# ---------------------------------------------------------------- over HTTP


def test_answers_and_readings_tell_where_their_evidence_entered(tmp_path):
    """The fake's memories are words of its prompts, and so are its answers."""
    text = "ann says the secret code of bob is blue . " * 6
    with library(tmp_path, Arithmetic(), text) as (url, _):
        parts = [{"type": "file", "file": {"file_id": "book"}}, {"type": "text", "text": "blue ?"}]
        body = {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": parts}]}
        post = f"{url}/v1/chat/completions"
        found = []
        for seed in range(12):
            whole = httpx2.post(post, json=body | {"seed": seed}, timeout=30).json()["choices"][0]
            if evidence := whole.get("notepad", {}).get("evidence"):
                found.append(evidence)
                assert evidence["text"] in whole["message"]["content"]
                if evidence["bytes"]:
                    first, last = evidence["bytes"]
                    assert text.encode()[first:last].decode() == evidence["sentence"]
                stream = httpx2.post(post, json=body | {"seed": seed, "stream": True}, timeout=30)
                assert stream.text.count('"evidence":') == 1  # with its last chunk
        assert any(one["bytes"] for one in found)
        asked = {"file_id": "book", "questions": ["blue ?"], "samples": 12, "seed": 1,
                 "detach": True}  # fmt: skip
        there = url + httpx2.post(f"{url}/v1/readings", json=asked).headers["location"]
        until(lambda: httpx2.get(there).json()["status"] == "completed")
        told = [one["evidence"] for one in httpx2.get(there).json()["readings"]]
        assert any(told)
        assert all(set(one) == {"text", "chunk", "sentence", "bytes"} for one in told if one)


def test_a_reading_that_was_stopped_knows_where_its_memory_came_from(tmp_path):
    asked = {"file_id": "book", "questions": ["blue ?"], "samples": 6, "seed": 1, "detach": True}

    def told(there: str) -> list:
        until(lambda: httpx2.get(there).json()["status"] == "completed")
        return [one["evidence"] for one in httpx2.get(there).json()["readings"]]

    def begun(url: str) -> str:
        return httpx2.post(f"{url}/v1/readings", json=asked).headers["location"]

    with library(tmp_path / "whole") as (url, _):
        whole = told(url + begun(url))
    with library(tmp_path / "cut", Arithmetic(pause=0.02)) as (url, streamer):
        there = begun(url)
        until(lambda: len(streamer.asked) > 20)
    with library(tmp_path / "cut", text=None) as (url, _):
        assert told(url + there) == whole and any(whole)
