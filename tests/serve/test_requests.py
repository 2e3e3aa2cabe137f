"""Requests that are checked before they cost anything: the table of bad ones, and noise."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notepad_jax.serve.completions import requests
from notepad_jax.serve.http import bodies
from notepad_jax.serve.http.errors import Refusal

HELLO = [{"role": "user", "content": "who is ann ?"}]
CHAT = {"model": "m", "messages": HELLO}
TEXT = {"model": "m", "prompt": "who is"}

BAD_OF_BOTH = [
    ({"model": None}, "model"), ({"model": 3}, "model"), ({"temperature": -1}, "temperature"),
    ({"temperature": 1e-9}, "temperature"), ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"), ({"temperature": 10**400}, "temperature"),
    ({"top_p": 0}, "top_p"), ({"top_p": 1.5}, "top_p"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"), ({"max_tokens": 2**31}, "max_tokens"), ({"n": 0}, "n"),
    ({"n": 129}, "n"), ({"seed": 2**63}, "seed"), ({"seed": "1"}, "seed"), ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"), ({"stop": [1]}, "stop"), ({"stop": {}}, "stop"),
    ({"stop_token_ids": False}, "stop_token_ids"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream": 1}, "stream"), ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"top_k": 40}, "top_k"), ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"tools": [{}]}, "tools"),
    ({"response_format": {"type": "xml"}}, "response_format"), ({"best_of": 2}, "best_of"),
    ({"response_format": "json"}, "response_format"), ({"response_format": []}, "response_format"),
    ({"response_format": {"type": []}}, "response_format"),
    ({"response_format": {"type": "text", "x": 1}}, "response_format.x"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
     "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "x": 1}}},
     "response_format.json_schema.x"),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"schema": {"title": "x" * 70_000}}}},
     "response_format.json_schema.schema"),
    ({"echo": True}, "echo"), ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"ignore_eos": 0}, "ignore_eos"), ({"temprature": 1}, "temprature"), ({"": 1}, ""),
]  # fmt: skip
BAD_OF_CHATS = [
    ({"messages": None}, "messages"), ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"), ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": [], "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"), ({"logprobs": 3}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"), ({"prompt": "x"}, "prompt"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
]  # fmt: skip
BAD_OF_COMPLETIONS = [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": 3}, "prompt"),
    ({"prompt": [1.5]}, "prompt"), ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [[-1]]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"), ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"), ({"messages": HELLO}, "messages"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"), ({"prompt_logprobs": True}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
]  # fmt: skip


def refusal(read, body) -> Refusal:
    with pytest.raises(Refusal) as refused:
        read(bodies.parsed(json.dumps(body).encode()))
    assert refused.value.status == 400
    assert refused.value.error["type"] == "invalid_request_error"
    assert "\n" not in str(refused.value) and 10 < len(str(refused.value)) < 400
    return refused.value


@pytest.mark.parametrize("changed, param", BAD_OF_BOTH + BAD_OF_CHATS, ids=str)
def test_a_bad_chat_is_refused_by_the_name_of_its_parameter(changed, param):
    assert refusal(requests.chat, CHAT | changed).error["param"] == param


def test_prompts_that_are_too_many_are_counted():
    for one in ("a", [5]):
        said = str(refusal(requests.completion, TEXT | {"prompt": [one] * 129}))
        assert said == "there are 129 prompts and may be 128"


@pytest.mark.parametrize("changed, param", BAD_OF_BOTH + BAD_OF_COMPLETIONS, ids=str)
def test_a_bad_completion_is_refused_by_the_name_of_its_parameter(changed, param):
    assert refusal(requests.completion, TEXT | changed).error["param"] == param


def test_what_the_sampler_says_of_a_number_is_told_whole():
    said = refusal(requests.chat, CHAT | {"temperature": -1}).error["message"]
    assert said.endswith("or at least 0.0001 and at most 10000")


def test_what_was_sent_is_repeated_and_a_long_name_is_cut_with_dots():
    said = refusal(requests.chat, CHAT | {"model": 3}).error["message"]
    assert said == "model is 3 and has to be a text; /v1/models lists those that are served"
    said = refusal(requests.chat, CHAT | {"x" * 999: 3}).error["message"]
    assert "xx... here; leave it out" in said and len(said) < 300


@pytest.mark.parametrize(
    "raw, said",
    [
        (b"", "not JSON"), (b"{", "not JSON"), (b"\xff{}", "not JSON"), (b"[]", "no object"),
        (b'{"n": NaN}', "NaN"), (b"[" * 100_000, "nested"),
        (b'{"n": 1' + b"0" * 5000 + b"}", "JSON"),
    ],
    ids=str,
)  # fmt: skip
def test_a_body_that_is_no_object_is_refused(raw, said):
    with pytest.raises(Refusal, match=said):
        bodies.parsed(raw)


def test_what_asks_for_nothing_is_taken():
    nothing = {name: only[0] for name, only in bodies.ONLY.items() if only}
    accepted = {"user": "me", "top_k": -1, "presence_penalty": 0.0, "suffix": None, "audio": None}
    assert requests.chat(CHAT | nothing | accepted) == requests.chat(CHAT)
    assert requests.completion(TEXT | nothing | accepted) == requests.completion(TEXT)


def test_a_reply_can_be_sent_back_as_it_came():
    said = {"role": "assistant", "content": "red", "refusal": None, "tool_calls": [], "audio": None}
    messages = requests.chat(CHAT | {"messages": [*HELLO, said, *HELLO]}).messages
    assert [m.text for m in messages] == ["who is ann ?", "red", "who is ann ?"]


def test_a_reply_may_be_asked_for_by_a_schema():
    schema = {"name": "code", "strict": True, "schema": {"type": "string"}}
    wanted = {"response_format": {"type": "json_schema", "json_schema": schema}}
    assert requests.chat(CHAT | wanted).how.schema == '{"type": "string"}'
    assert requests.completion(TEXT | wanted).how.schema == '{"type": "string"}'
    plain = {"response_format": {"type": "json_object"}}
    assert requests.chat(CHAT | plain).how.schema == '{"type": "object"}'
    assert requests.chat(CHAT | {"response_format": {"type": "text"}}) == requests.chat(CHAT)


def test_a_message_may_have_a_name():
    (message,) = requests.chat(CHAT | {"messages": [HELLO[0] | {"name": "ann"}]}).messages
    assert message == requests.chat(CHAT).messages[0]


def test_choices_have_noise_of_their_own_and_a_request_always_the_same():
    how = requests.chat(CHAT | {"seed": -5, "n": 4}).how
    seeds = [how.seed_of(k, 99) for k in range(4)]
    assert len(set(seeds)) == 4 and seeds == [how.seed_of(k, 11) for k in range(4)]
    unseeded = requests.chat(CHAT).how
    assert unseeded.seed_of(0, 99) != unseeded.seed_of(0, 11)


def test_lone_surrogates_become_question_marks():
    assert requests.completion(TEXT | {"prompt": "a\ud800b"}).prompts == ("a?b",)


NAMES = st.sampled_from(
    [*requests.CHAT, *requests.COMPLETION, *bodies.ONLY, *bodies.ACCEPTED, "what"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5) | st.sampled_from(["user", "text", "file", "who is ann ?", "/etc/passwd", "gs://b/x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "file", "file_id", "include_usage"])
        | st.text(max_size=3),
        inner, max_size=3,
    ),
    max_leaves=5,
)  # fmt: skip
BASES = st.sampled_from([{}, CHAT, CHAT | {"model": "m:notepad"}, TEXT])
BODIES = st.builds(lambda base, more: base | more, BASES,
                   st.dictionaries(NAMES, VALUES, max_size=4))  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(body=BODIES)
def test_noise_is_read_or_refused(body):
    for read in (requests.chat, requests.completion):
        try:
            read(bodies.parsed(json.dumps(body).encode()))
        except Refusal as refused:
            assert refused.status == 400
            json.dumps(refused.error)
