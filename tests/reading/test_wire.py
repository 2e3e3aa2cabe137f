"""Servers speak dialects; one is learnt from the first refusal, and kept."""

import pytest

from notepad_jax.types import Prompt, tokens
from tests.reading.http_server import SAMPLING, TOKENIZER, error, good, problem, prompt, run

NEW_LIMIT = error(
    400,
    "Unsupported parameter: 'max_tokens' is not supported with this model. "
    "Use 'max_completion_tokens' instead.",
    param="max_tokens",
)


def particular(request):
    """Wants the newer name of the limit, and no seed, as pydantic says it."""
    if "max_tokens" in request.body:
        return NEW_LIMIT
    if "seed" in request.body:
        extra = {"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs ..."}
        return 422, {"detail": [extra]}
    return good()


def test_a_servers_dialect_is_learnt_once():
    async def use(completer):
        return [await completer.complete(prompt(), SAMPLING) for _ in range(3)]

    completions, server, completer = run(particular, use)
    assert [TOKENIZER.decode(c.tokens) for c in completions] == ["red"] * 3
    named = {"max_tokens", "max_completion_tokens", "seed"}
    asked = [sorted(named & request.body.keys()) for request in server.requests]
    learnt = ["max_completion_tokens"]
    assert asked == [["max_tokens", "seed"], [*learnt, "seed"], learnt, learnt, learnt]
    assert server.requests[-1].body["max_completion_tokens"] == 20
    assert (completer.stats.unseeded, completer.stats.retries) == (3, 0)


def test_a_server_that_refuses_both_names_is_not_asked_for_ever():
    message, server, _ = problem(lambda request: NEW_LIMIT)
    assert len(server.requests) == 2 and "Unsupported parameter" in message


def test_a_prompt_that_is_too_long_is_no_question_of_dialect():
    said = "'max_tokens' or 'max_completion_tokens' is too large: 1024. The context has 512 tokens"
    message, server, _ = problem(lambda request: error(400, said))
    assert len(server.requests) == 1 and "chunk_size" in message


def going_on():
    asked, begun = TOKENIZER.encode("who?"), TOKENIZER.encode(" It is")
    return Prompt(tokens(), tokens([*asked, *begun]), begun=len(begun))


def test_a_reply_that_goes_on_is_sent_as_the_beginning_of_it():
    completion, server, _ = run(
        lambda request: good(" red."), lambda completer: completer.complete(going_on(), SAMPLING)
    )
    (request,) = server.requests
    assert request.body["messages"] == [
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": " It is"},
    ]
    assert request.body["continue_final_message"] is True
    assert request.body["add_generation_prompt"] is False
    assert TOKENIZER.decode(completion.tokens) == " red."


@pytest.mark.parametrize(
    "refusal",
    [
        error(400, "Unrecognized request argument supplied: continue_final_message"),
        (422, {"detail": [{"type": "extra_forbidden", "loc": ["body", "add_generation_prompt"]}]}),
        error(400, "Assistant response prefill is incompatible with enable_thinking."),
    ],
)
def test_a_server_that_does_not_go_on_with_a_reply_says_so_once_with_the_mend(refusal):
    message, server, stats = problem(lambda request: refusal, going_on())
    assert len(server.requests) == 1 == stats.failed
    assert message.endswith("--config.reading.answer_chunks=1 --config.reading.carry=0")
    assert "does not go on with a reply" in message
    # Of a prompt that begins no reply these words are about something else.
    message, _, _ = problem(lambda request: refusal)
    assert "answer_chunks" not in message
