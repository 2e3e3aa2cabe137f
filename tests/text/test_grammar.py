"""Grammars over tokenizers: whatever is drawn under a mask is what the schema allows."""

import json
import random
import sys

import fakes
import numpy as np
import pytest

pytest.importorskip("llguidance")

from notepad_jax.text.grammar import Grammars  # noqa: E402
from notepad_jax.text.pieces import token_bytes  # noqa: E402
from notepad_jax.text.tokenizer import open_tokenizer  # noqa: E402
from tests import chat_models  # noqa: E402
from tests.serve.program import ROOT  # noqa: E402

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["code", "n", "who"],
    "properties": {
        "code": {"type": "string", "enum": ["amber", "falcon é 日本"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "who": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = chat_models.folder(tmp_path_factory.mktemp("bpe") / "chats")
    return {
        "starter": open_tokenizer(ROOT / "data" / "starter"), "sentencepiece": fakes.tokenizer(),
        "bpe": open_tokenizer(folder),
    }  # fmt: skip


def ids_of(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("name", ["starter", "sentencepiece", "bpe"])
def test_what_each_token_writes_is_what_the_tokenizer_decodes(name, tokenizers):
    tokenizer, text = tokenizers[name], 'x {"a": "b é 日本 🙂"}\n 12'
    written = token_bytes(tokenizer)
    assert b"".join(written[i] for i in tokenizer.encode(text)).decode().split() == text.split()
    assert all(not written[i] for i in tokenizer.controls.values())


@pytest.mark.parametrize("name", ["starter", "sentencepiece", "bpe"])
def test_what_is_drawn_at_random_is_what_the_schema_allows(name, tokenizers):
    tokenizer, rng = tokenizers[name], random.Random(1)
    grammar, stops = Grammars(tokenizer).json(json.dumps(SCHEMA)), tokenizer.stop_ids
    for _ in range(5):
        matcher, made = grammar.matcher(stops), []
        while not made or made[-1] not in stops:
            allowed = ids_of(matcher.allowed())
            assert allowed and not {*allowed} & ({*tokenizer.controls.values()} - {*stops})
            made.append(rng.choice(allowed))
            matcher.take(made[-1])
            assert len(made) < 500
        said = json.loads(tokenizer.decode(made))
        assert said["code"] in SCHEMA["properties"]["code"]["enum"] and 0 <= said["n"] <= 99
        assert len(said["who"]) <= 2 and {*said} == {"code", "n", "who"}


def test_a_completion_may_end_where_its_text_is_whole_and_only_there(tokenizers):
    tokenizer = tokenizers["starter"]
    whole, stops = '{"n": 1}', (2, 5)
    schema = {"type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    matcher = Grammars(tokenizer).json(json.dumps(schema)).matcher(stops)
    written, text = token_bytes(tokenizer), whole.encode()
    while text:
        allowed = ids_of(matcher.allowed())
        assert not {*allowed} & {*stops}
        token = next(i for i in allowed if written[i] and text.startswith(written[i]))
        matcher.take(token)
        text = text[len(written[token]) :]
    assert ids_of(matcher.allowed()) == [*stops]
    matcher.take(5)
    assert ids_of(matcher.allowed()) == [*stops]


def test_turns_do_not_disturb_each_other_and_equal_schemas_are_one(tokenizers):
    grammars = Grammars(tokenizers["starter"])
    grammar = grammars.json(json.dumps(SCHEMA))
    assert grammars.json(json.dumps(SCHEMA)) is grammar
    first, other = grammar.matcher((2,)), grammar.matcher((2,))
    before = ids_of(other.allowed())
    for _ in range(4):
        first.take(ids_of(first.allowed())[0])
    assert ids_of(other.allowed()) == before != ids_of(first.allowed())


@pytest.mark.parametrize("schema", [
    {"type": "objekt"}, {"$ref": "http://localhost/x"}, {"not": {"type": "string"}},
    {"type": "object", "patternProperties": {"(": {}}}, {"type": "string", "format": "nope"},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
], ids=str)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_said_in_a_line(schema, tokenizers):
    with pytest.raises(ValueError) as refused:
        Grammars(tokenizers["starter"]).json(json.dumps(schema))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_it_brings_no_torch():
    assert "torch" not in sys.modules
