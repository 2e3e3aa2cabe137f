"""A user's memory rule sees text and ids, and what it returns is the memory, or one line."""

import dataclasses
import functools

import numpy as np
import pytest

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_rules import OwnRule, RuleFailed
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.types import tokens
from tests import fakes


def rule(function):
    return OwnRule("mine:rule", function, fakes.tokenizer())


def applied(function, memory="ann", written="red", limit=6):
    encode = fakes.tokenizer().encode
    return rule(function)(encode(memory), encode(written), limit)


def noted(ids):
    """A rule that returns a note of its own."""
    return lambda memory, written: dataclasses.replace(written, tokens=ids)


def test_a_note_goes_through_as_the_ids_that_it_is():
    odd = tokens([300, 259, 259])  # such as no text encodes to
    another = noted([*odd])
    for returned in (lambda m, w: w, lambda m, w: w.tokens, lambda m, w: list(w.tokens), another):
        np.testing.assert_array_equal(rule(returned)(tokens(), odd, 6), odd)
    assert len(applied(lambda memory, written: "")) == 0


def test_a_text_is_encoded_and_never_a_special_token():
    text = fakes.tokenizer().decode(applied(lambda m, w: f"{m.text} {w}"))
    assert text == "ann red"
    ids = applied(lambda m, w: "<|end|>", limit=60)
    assert fakes.tokenizer().controls["<|end|>"] not in ids


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda m, w: {}[0], "raised KeyError: 0"),
        (lambda m, w: None, "returned None; return a note, a text, or token ids from 0 to"),
        (lambda m, w: [0.5], "returned .0.5.; return a note"),
        (lambda m, w: [10**6], "returned .1000000.; return a note"),
        (lambda m, w: [[1], [2, 3]], "returned .*; return a note"),
        (noted(tokens([10**6, 5])), "returned Note.*1000000.*; return a note"),
        (noted(tokens([-3])), "returned Note.*-3.*; return a note"),
        (noted(None), "returned Note.*None.*; return a note"),
        (lambda m, w: "ann " * 9, r"returned 9 tokens, .* at most 6 \(reading.max_memory\); cut"),
    ],
)
def test_what_cannot_be_a_memory_is_one_line(function, says):
    with pytest.raises(RuleFailed, match=f"the memory rule mine:rule {says}"):
        applied(function)


def test_the_agent_goes_by_it_in_a_reading_and_when_that_is_played_again():
    keep_both = rule(lambda memory, written: f"{memory} {written}".strip())
    rules = dataclasses.replace(fakes.rules(), memory_update=keep_both)
    template, tokenizer = fakes.template(), fakes.tokenizer()
    stop = tokenizer.stop_ids[0]
    state = memory_agent.start(tokenizer.encode("who ?"), [tokenizer.encode("ann")] * 2)
    turns = []
    for word in ("red", "blue"):
        sampling = TurnSampling(0.0, 1.0, template.stop_ids, 0)
        kind, prompt = memory_agent.prompt(rules, template, state)
        said = fakes.completion(
            [*tokenizer.encode(word), stop], sampling.params(rules, kind, state.next_chunk)
        )
        turns.append(memory_agent.turn_of(rules, template, state, prompt, said))
        state = memory_agent.advance(rules, template, state, turns[-1])
    assert tokenizer.decode(state.memory_tokens) == "red blue"
    again = memory_agent.memories(rules, template, turns)
    assert list(map(tokenizer.decode, again)) == ["red", "red blue"]


def test_it_is_shown_by_its_name_alone():
    """As identities on disk have it, which the next process compares."""
    rules = dataclasses.replace(fakes.rules(), memory_update=rule(lambda memory, written: ""))
    assert "memory_update=OwnRule(name='mine:rule')" in repr(rules)


def test_names_that_are_no_rule():
    with pytest.raises(ValueError, match="or a function of yours, as module:function"):
        dataclasses.replace(fakes.rules(), memory_update="blend")
    partial = functools.partial(lambda extra, memory, written: extra, "ann")
    assert len(applied(partial)) == 1
