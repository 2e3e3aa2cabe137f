"""The endpoint completer against a real HTTP server in the same loop."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from notepad_jax.reading import endpoint, memory_agent
from notepad_jax.reading.connection import EndpointProblem
from notepad_jax.reading.endpoint import EndpointCompleter, bare_turn
from notepad_jax.reading.rules import Rules
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.text.prompts import Template
from notepad_jax.types import Finish, Prompt, SamplingParams, TextDocument, TurnKind, tokens
from tests import fakes
from tests.reading.http_server import (
    SAMPLING,
    TOKENIZER,
    Request,
    Server,
    error,
    good,
    prompt,
    run,
)


def test_a_prompt_goes_out_as_one_user_message_and_the_reply_comes_back_as_tokens():
    completion, server, completer = run(lambda request: good("It is red."))
    (request,) = server.requests
    assert request.path == "/v1/chat/completions" and "Authorization" not in request.headers
    assert request.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "who?"}],
        "temperature": 0.7,
        "top_p": 0.95,
        "max_tokens": 20,
        "n": 1,
        "stream": False,
        "seed": 5,  # the lower 31 bits of 2**40 + 5
    }
    assert completion.finish is Finish.STOP and completion.policy_version == 0
    assert completion.tokens.tolist() == [*TOKENIZER.encode("It is red."), TOKENIZER.stop_ids[0]]
    assert np.isnan(completion.behaviour_logprobs).all()
    assert completion.behaviour_logprobs.shape == completion.tokens.shape
    assert completion.behaviour_logprobs.dtype == np.float32
    assert completer.stats == endpoint.Stats(requests=1, prompt_tokens=7, completion_tokens=2)


def test_a_cut_reply_has_no_stop_token():
    completion, *_ = run(lambda request: good("It is", "length"))
    assert completion.finish is Finish.LENGTH
    assert completion.tokens.tolist() == TOKENIZER.encode("It is").tolist()


@pytest.mark.parametrize(
    ("words", "finish", "kept", "expected", "trimmed"),
    [
        (3, "stop", 4, Finish.STOP, 0),  # three words and the stop token: just the limit
        (4, "stop", 4, Finish.LENGTH, 1),  # no room for the stop token
        (4, "length", 4, Finish.LENGTH, 0),
        (9, "length", 4, Finish.LENGTH, 1),
        (100_000, "stop", 4, Finish.LENGTH, 1),
    ],
)
def test_no_completion_outgrows_the_limit(words, finish, kept, expected, trimmed):
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=4)
    completion, _, completer = run(lambda request: good(" word" * words, finish), None, sampling)
    assert (len(completion.tokens), completion.finish) == (kept, expected)
    assert len(completion.behaviour_logprobs) == kept
    assert completer.stats.trimmed == trimmed


@pytest.mark.parametrize("content", [None, ""])
def test_a_reply_without_text_is_an_empty_completion(content):
    answer = good(content, reasoning_content="red, I think")
    completion, _, completer = run(lambda request: answer)
    assert completion.tokens.tolist() == [TOKENIZER.stop_ids[0]]
    assert (completion.finish, completer.stats.empty) == (Finish.STOP, 1)


def test_reasoning_and_strange_usage_are_ignored():
    status, body = good("red", reasoning_content="green or red?", tool_calls=None)
    body["usage"] = {"prompt_tokens": -5, "completion_tokens": "many"}
    completion, _, completer = run(lambda request: (status, body))
    assert TOKENIZER.decode(completion.tokens) == "red"
    assert (completer.stats.prompt_tokens, completer.stats.completion_tokens) == (0, 0)


def test_any_text_goes_there_and_back():
    text = "\ud800 \x00 \u2028 <|im_end|> \U0001f600 \\boxed{é}"

    def echo(request):
        return good(request.body["messages"][0]["content"])

    completion, *_ = run(echo, lambda completer: completer.complete(prompt(text), SAMPLING))
    assert TOKENIZER.decode(completion.tokens) == text.replace("\ud800", "?")


def test_a_real_tokenizer_works_too():
    tokenizer = fakes.tokenizer()
    sampling = SamplingParams(0.0, 1.0, 9, (), seed=0)

    async def use(completer):
        asked = Prompt(tokens(), tokenizer.encode("who is ann ?"))
        return await completer.complete(asked, sampling)

    completion, server, _ = run(lambda request: good("ann is red"), use, tokenizer=tokenizer)
    assert server.requests[0].body["messages"][0]["content"] == "who is ann ?"
    expected = [*tokenizer.encode("ann is red"), tokenizer.stop_ids[0]]
    assert completion.tokens.tolist() == expected


def test_no_more_requests_run_at_once_than_allowed():
    async def slowly(request):
        await asyncio.sleep(0.01)
        return good()

    async def use(completer):
        return await asyncio.gather(*(completer.complete(prompt(), SAMPLING) for _ in range(12)))

    completions, server, completer = run(slowly, use, at_once=3)
    assert len(completions) == 12 and server.most == 3
    assert completer.stats.requests == 12


@pytest.mark.parametrize("numbers", [{"at_once": 0}, {"tries": 0}])
def test_limits_are_checked(numbers):
    with pytest.raises(ValueError, match="is 0; an endpoint needs at least 1"):
        EndpointCompleter("http://h/v1", "m", TOKENIZER, **numbers)


# ------------------------------------------------------------------------------ models


def test_models_are_listed_and_the_only_one_is_taken():
    def answer(request):
        if request.path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "qwen"}, {"name": "?"}, 3]}
        return good()

    async def use(completer):
        await completer.complete(prompt(), SAMPLING)
        return await completer.models()

    found, server, completer = run(answer, use, model="")
    assert found == ["qwen"] and completer.model == "qwen"
    assert [r.path for r in server.requests] == ["/v1/models", "/v1/chat/completions", "/v1/models"]
    assert server.requests[1].body["model"] == "qwen"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ((200, {"data": []}), "the server has no model; choose one with --model"),
        ((200, {"data": [{"id": "a"}, {"id": "b\n"}]}), "the server has 2 models: a, b; choose"),
        ((200, {"models": []}), "the reply lists no models"),
        (error(404), "status 404"),
    ],
)
def test_a_model_that_cannot_be_guessed_must_be_named(reply, said):
    async def main():
        async with Server(lambda request: reply) as server:
            completer = EndpointCompleter(server.url, "", TOKENIZER)
            with pytest.raises(EndpointProblem, match=re.escape(said)):
                await completer.__aenter__()
            return completer

    assert asyncio.run(main())._connection._client.is_closed


# ------------------------------------------------------------------------------ the memory agent


def test_cancelling_frees_the_slot_and_leaves_nothing_behind():
    async def slow_once(request):
        await asyncio.sleep(0.3 if len(server_seen) == 0 else 0)
        server_seen.append(request)
        return good()

    server_seen: list[Request] = []

    async def use(completer):
        task = asyncio.create_task(completer.complete(prompt(), SAMPLING))
        await asyncio.sleep(0.05)
        before = asyncio.all_tasks() - {task}
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() <= before and completer.stats.failed == 0
        server_seen.append(None)
        return await completer.complete(prompt(), SAMPLING)

    completion, *_ = run(slow_once, use, at_once=1)
    assert completion.finish is Finish.STOP


def notes(request):
    """A server that is good at this: it keeps every sentence about Ann, and answers from them."""
    said = request.body["messages"][0]["content"]
    note = re.search(r"<note>\n(.*?)\n</note>", said, re.DOTALL).group(1)
    kept = re.findall(r"Ann [^.]*\.", note)
    piece = re.search(r"<piece>\n(.*?)\n</piece>", said, re.DOTALL)
    if piece is None:
        return good(r"\boxed{" + kept[-1].split()[-1].rstrip(".") + "}")
    return good(" ".join([*kept, *re.findall(r"Ann [^.]*\.", piece.group(1))]))


def test_the_memory_agent_reads_a_document_through_an_endpoint():
    filler = "The rain fell on the hills. "  # 7 pieces
    text = filler * 20 + "Ann lives in Oslo. " + filler * 30 + "Ann moved to Bergen. " + filler * 9
    template = Template.load("chunk_first", TOKENIZER, bare_turn(TOKENIZER))
    rules = Rules(64, 70, 40, 40, "overwrite")
    sampling = TurnSampling(0.0, 1.0, template.stop_ids, seed=1)
    state = memory_agent.start(
        TOKENIZER.encode("Where does Ann live?"),
        ChunkedDocument(TOKENIZER, TextDocument(text), rules.chunk_size),
    )

    async def use(completer):
        reading = memory_agent.read(completer, template, rules, state, sampling)
        return [pair async for pair in reading]

    pairs, server, completer = run(notes, use)
    # 59 sentences of 7 pieces, 2 of 5, the space at the end: 424 pieces, 7 chunks of up to 70.
    assert len(TOKENIZER.encode(text)) == 424
    assert len(pairs) == 7 + 1 == len(server.requests) == completer.stats.requests
    assert pairs[-1][0].kind is TurnKind.ANSWER
    memories = [TOKENIZER.decode(after.memory_tokens) for _, after in pairs]
    assert memories[0] == "" and memories[-1] == "Ann lives in Oslo. Ann moved to Bergen."
    assert TOKENIZER.decode(memory_agent.written(pairs[-1][0].completion)) == r"\boxed{Bergen}"
    said = [r.body["messages"][0]["content"] for r in server.requests]
    assert "(the note is still empty)" in said[1]
    pieces = [re.search(r"<piece>\n(.*?)\n</piece>", s, re.DOTALL) for s in said[:-1]]
    assert "".join(piece.group(1) for piece in pieces) == text
    assert len({r.body["seed"] for r in server.requests}) == len(server.requests)
