"""The endpoint completer against a real HTTP server in the same loop, and its failures."""

import asyncio
import contextlib
import dataclasses
import datetime
import email.utils
import json
import re
import socket
import time

import numpy as np
import pytest

from notepad_jax.reading import endpoint, memory_agent
from notepad_jax.reading.endpoint import EndpointCompleter, EndpointProblem, bare_turn
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.chunks import ChunkStream
from notepad_jax.text.prompts import Template
from notepad_jax.types import Finish, Prompt, SamplingParams, TextDocument, TurnKind, tokens
from tests import fakes

KEY = "sk-topsecret-0123456789"
TOKENIZER = ApproximateTokenizer()
SAMPLING = SamplingParams(0.7, 0.95, 20, TOKENIZER.stop_ids, seed=2**40 + 5)


@pytest.fixture(autouse=True)
def no_proxies_and_no_keys(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "openai_api_key"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


# ------------------------------------------------------------------------------ the server


@dataclasses.dataclass(frozen=True)
class Request:
    path: str
    headers: dict[str, str]
    body: dict


def good(content="red", finish="stop", **message):
    choice = {"message": {"content": content, **message}, "finish_reason": finish}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


def error(status, message="no", **more):
    return status, {"error": {"message": message, **more}}


@contextlib.contextmanager
def closing(writer):
    try:
        yield
    finally:
        writer.close()


class Server:
    """Answers each request by a function of it: (status, JSON or bytes[, header lines])."""

    def __init__(self, answer):
        self._answer = answer
        self.requests: list[Request] = []
        self.running = self.most = 0
        self.url = ""

    async def __aenter__(self):
        self._connections: set[asyncio.Task] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(self, *failure):
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports say goodbye in the next round of the loop

    def _accept(self, reader, writer):
        self._connections.add(asyncio.create_task(self._serve(reader, writer)))

    async def _serve(self, reader, writer):
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), closing(writer):
            while not reader.at_eof():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split(" ")[1]
                headers = dict(re.findall(r"^([\w-]+): (.*)\r$", head.lower(), re.MULTILINE))
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                headers |= dict(re.findall(r"^(Authorization): (.*)\r$", head, re.MULTILINE))
                await self._reply(writer, Request(path, headers, json.loads(raw or "{}")))

    async def _reply(self, writer, request):
        self.requests.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            said = self._answer(request)
            status, body, *lines = await said if asyncio.iscoroutine(said) else said
        finally:
            self.running -= 1
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        more = "".join(f"{line}\r\n" for line in lines)
        head = f"HTTP/1.1 {status} Any\r\nContent-Length: {len(data)}\r\n{more}\r\n"
        writer.write(head.encode() + data)
        await writer.drain()


def in_turn(*answers):
    """Gives the answers one after the other, the last one for ever."""
    left = list(answers)
    return lambda request: left.pop(0) if len(left) > 1 else left[0]


def prompt(text="who?"):
    return Prompt(shared=tokens(), tail=TOKENIZER.encode(text))


def run(answer, use=None, sampling=SAMPLING, **options):
    """Starts a server and a completer; returns (what `use` returns, server, completer).

    Without `use`, one prompt is completed. Fails if a task of theirs outlives them.
    """

    async def main():
        before = asyncio.all_tasks()
        async with Server(answer) as server:
            options.setdefault("first_pause", 0.001)
            options.setdefault("model", "m")
            options.setdefault("tokenizer", TOKENIZER)
            async with EndpointCompleter(server.url, **options) as completer:
                one = completer.complete(prompt(), sampling) if use is None else use(completer)
                result = await one
        return result, server, completer, asyncio.all_tasks() - before

    result, server, completer, left = asyncio.run(main())
    assert not left and completer._client.is_closed
    return result, server, completer


def problem(answer, **options):
    """Runs one completion that has to fail; returns (message, server, stats)."""

    async def use(completer):
        with pytest.raises(EndpointProblem) as caught:
            await completer.complete(prompt(), SAMPLING)
        return str(caught.value)

    message, server, completer = run(answer, use, **options)
    assert message.isprintable() and completer.stats.failed == 1
    return message, server, completer.stats


# ------------------------------------------------------------------------------ good replies


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


# ------------------------------------------------------------------------------ asked again


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 529])
def test_a_busy_server_is_asked_again(status):
    completion, server, completer = run(in_turn(error(status), (status, b"busy"), good()))
    assert TOKENIZER.decode(completion.tokens) == "red"
    assert server.requests[0] == server.requests[2]  # the very same request
    assert (completer.stats.retries, completer.stats.failed) == (2, 0)


def test_tries_end():
    message, server, stats = problem(lambda request: error(503, "over loaded"), tries=3)
    assert len(server.requests) == 3 and stats.retries == 2
    assert "status 503: over loaded (3 tries); check --endpoint" in message


def test_retry_after_is_honoured():
    start = time.monotonic()
    run(in_turn((429, b"", "Retry-After: 0.25"), good()))
    assert time.monotonic() - start >= 0.25


def test_pauses_grow_are_drawn_from_the_seed_and_are_capped():
    # 0.5 s doubled: 0.5, 1, 2, ...; each is shortened by up to half.
    pauses = [endpoint._pause(0.5, n, seed=3, retry_after="") for n in range(5)]
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))
    assert pauses == [endpoint._pause(0.5, n, seed=3, retry_after="") for n in range(5)]
    assert len({endpoint._pause(0.5, 0, seed, "") for seed in range(20)}) == 20
    assert endpoint._pause(0.5, 0, 3, "7") == 7.0
    assert endpoint._pause(0.5, 3, 3, "1") == pauses[3]  # longer than asked for
    assert endpoint._pause(0.5, 0, 3, "86400") == endpoint._pause(0.5, 30, 3, "") == 60.0
    for unreadable in ("soon", "-1", "nan", "1e9", "9" * 5000, "Mon, 99 Foo 2026"):
        assert endpoint._pause(0.5, 0, 3, unreadable) == pauses[0]
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 28 < endpoint._pause(0.5, 0, 3, email.utils.format_datetime(soon, usegmt=True)) <= 30


def test_an_unreachable_server_is_named():
    with socket.socket() as taken:  # a port where nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"

        async def main():
            options = {"tries": 3, "first_pause": 0.001}
            async with EndpointCompleter(url, "m", TOKENIZER, **options) as completer:
                with pytest.raises(
                    EndpointProblem, match=r"ConnectError.*\(3 tries\); check --end"
                ):
                    await completer.complete(prompt(), SAMPLING)
                return completer.stats

        stats = asyncio.run(main())
    assert (stats.requests, stats.retries, stats.failed) == (1, 2, 1)


def test_a_server_that_hangs_up_is_asked_again():
    async def main():
        calls = 0

        async def rude(reader, writer):
            nonlocal calls
            calls += 1
            with closing(writer):
                await reader.readuntil(b"\r\n\r\n")

        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        options = {"tries": 2, "first_pause": 0.001}
        async with server, EndpointCompleter(url, "m", TOKENIZER, **options) as completer:
            with pytest.raises(EndpointProblem, match=r"\(2 tries\)"):
                await completer.complete(prompt(), SAMPLING)
        return calls

    assert asyncio.run(main()) == 2


def test_a_server_that_falls_silent_is_given_up():
    async def silent(request):
        await asyncio.sleep(0.5)
        return good()

    message, server, stats = problem(silent, timeout=0.05, tries=2)
    assert "no answer within 0.05 s (2 tries)" in message and len(server.requests) == 2


def test_a_server_that_drips_is_given_up():
    async def main():
        async def drip(reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            with contextlib.suppress(OSError), closing(writer):
                for _ in range(100):
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        start = time.monotonic()
        options = {"tries": 1, "timeout": 0.2}
        async with server, EndpointCompleter(url, "m", TOKENIZER, **options) as completer:
            with pytest.raises(EndpointProblem, match="no answer within 0.2 s"):
                await completer.complete(prompt(), SAMPLING)
        return time.monotonic() - start

    assert asyncio.run(main()) < 1.5


# ------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("status", "mend"),
    [
        (400, "check --model, and that a turn fits its context"),
        (401, "check the key in the environment variable OPENAI_API_KEY, which is not set"),
        (403, "check the key in the environment variable OPENAI_API_KEY"),
        (404, "check --endpoint (it often ends in /v1) and --model"),
        (307, "check --endpoint"),
    ],
)
def test_a_refusal_is_final_and_says_what_to_check(status, mend):
    message, server, stats = problem(lambda request: error(status, "not for you"))
    assert len(server.requests) == 1 and stats.retries == 0
    assert f"/v1/chat/completions: status {status}: not for you; {mend}" in message


def test_an_empty_account_is_not_asked_again():
    message, server, _ = problem(lambda request: error(429, "no", code="insufficient_quota"))
    assert len(server.requests) == 1 and "status 429" in message


def test_the_key_goes_into_the_header_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("NOTEPAD_API_KEY", KEY + "\n")
    bad = error(401, f"wrong key {KEY}")
    message, server, _ = problem(lambda request: bad, key_variable="NOTEPAD_API_KEY")
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"
    assert KEY not in message and "wrong key ***" in message and "NOTEPAD_API_KEY" in message
    _, _, completer = run(lambda request: good(), key_variable="NOTEPAD_API_KEY")
    assert KEY not in repr(completer) and KEY not in repr(completer.stats)


def test_the_usual_variable_is_used_without_being_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    _, server, _ = run(lambda request: good())
    assert server.requests[0].headers["Authorization"] == f"Bearer {KEY}"


def test_a_variable_that_is_named_must_hold_a_key(monkeypatch):
    with pytest.raises(ValueError, match="variable MY_KEY is not set"):
        EndpointCompleter("http://h/v1", "m", TOKENIZER, key_variable="MY_KEY")
    for key in ("sk-1\nX-Header:2", "sk-1 2", "sk-1\x7f", "sk-1é"):
        monkeypatch.setenv("MY_KEY", key)
        with pytest.raises(ValueError, match="MY_KEY holds no API key") as caught:
            EndpointCompleter("http://h/v1", "m", TOKENIZER, key_variable="MY_KEY")
        assert "sk-1" not in str(caught.value)


NO_ADDRESSES = ["", "localhost:8000", "ftp://h/v1", "http://", "http://h:x/v1", "http://h:65536"]


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="no endpoint"):
        EndpointCompleter(url, "m", TOKENIZER)


@pytest.mark.parametrize("url", ["http://a:hidden@h/v1", "a:hidden@h", "http://h/v1?key=hidden"])
def test_secrets_in_an_address_are_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match="give the plain base") as caught:
        EndpointCompleter(url, "m", TOKENIZER)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("numbers", [{"at_once": 0}, {"tries": 0}])
def test_limits_are_checked(numbers):
    with pytest.raises(ValueError, match="is 0; an endpoint needs at least 1"):
        EndpointCompleter("http://h/v1", "m", TOKENIZER, **numbers)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>Welcome</html>", "not a JSON object: <html>Welcome</html>; check that --end"),
        (b'{"choices": [{"mess', "not a JSON object"),
        (b"", "not a JSON object: (empty)"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe\x00{", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b'{"a":' * 100_000, "not a JSON object"),
        (b"1" * 10_000, "not a JSON object"),
        (b"{}", "no choices[0].message.content"),
        (b'{"choices": []}', "no choices[0].message.content"),
        (b'{"choices": [7]}', "no choices[0].message.content"),
        (b'{"choices": [{"message": "red"}]}', "no choices[0].message.content"),
        (b'{"choices": [{"message": {"content": [1]}}]}', "no choices[0].message.content"),
        (b'{"error": {"message": "no such model"}}', "no such model; check --model"),
    ],
)
def test_garbage_is_one_line(body, said):
    message, server, _ = problem(lambda request: (200, body))
    assert said in message and len(server.requests) == 1 and len(message) < 500


def test_the_servers_words_are_shortened_and_tamed():
    message, *_ = problem(lambda request: error(400, "\x1b[31mred\n\x00" + "x" * 5_000))
    assert "status 400: [31mred x" in message and "xxx...; check" in message
    assert len(message) < 400


def test_a_flood_is_cut_off(monkeypatch):
    monkeypatch.setattr(endpoint, "MAX_REPLY", 1 << 20)
    message, *_ = problem(lambda request: good("x" * (1 << 21)))
    assert "more than 1 MB" in message


# ------------------------------------------------------------------------------ dialects

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

    assert asyncio.run(main())._client.is_closed


# ------------------------------------------------------------------------------ the agent


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
    rules = memory_agent.Rules(64, 70, 40, 40, "overwrite")
    sampling = memory_agent.TurnSampling(0.0, 1.0, template.stop_ids, seed=1)
    state = memory_agent.start(
        TOKENIZER.encode("Where does Ann live?"),
        ChunkStream(TOKENIZER, TextDocument(text), rules.chunk_size),
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
