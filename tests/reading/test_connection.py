"""A server that is busy, silent or rude is asked again; one that refuses is named in a line."""

import asyncio
import contextlib
import datetime
import email.utils
import json
import socket
import time

import pytest

from notepad_jax.reading import connection
from notepad_jax.reading.connection import EndpointProblem, pause
from notepad_jax.reading.endpoint import EndpointCompleter
from tests.reading.http_server import (
    SAMPLING,
    TOKENIZER,
    closing,
    error,
    good,
    in_turn,
    problem,
    prompt,
    run,
)

KEY = "sk-topsecret-0123456789"


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


@pytest.mark.parametrize(
    "half",
    [b'{"choices": [{"mess', b"", b"upstream reset", b'{"choices": []}', b'{"choices": null}'],
)
def test_a_reply_that_lost_its_end_or_its_choices_is_asked_for_again(half):
    completion, server, completer = run(in_turn((200, half), (200, half), good()))
    assert TOKENIZER.decode(completion.tokens) == "red" and len(server.requests) == 3
    assert (completer.stats.retries, completer.stats.failed) == (2, 0)
    message, server, _ = problem(lambda request: (200, half), tries=2)
    assert len(server.requests) == 2 and ("(2 tries)" in message or "choices" in message)


def test_retry_after_is_honoured():
    start = time.monotonic()
    run(in_turn((429, b"", "Retry-After: 0.25"), good()))
    assert time.monotonic() - start >= 0.25


def test_pauses_grow_are_drawn_from_the_seed_and_are_capped():
    # 0.5 s doubled: 0.5, 1, 2, ...; each is shortened by up to half.
    pauses = [pause(0.5, n, seed=3, retry_after="") for n in range(5)]
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))
    assert pauses == [pause(0.5, n, seed=3, retry_after="") for n in range(5)]
    assert len({pause(0.5, 0, seed, "") for seed in range(20)}) == 20
    assert pause(0.5, 0, 3, "7") == 7.0
    assert pause(0.5, 3, 3, "1") == pauses[3]  # longer than asked for
    assert pause(0.5, 0, 3, "86400") == pause(0.5, 30, 3, "") == 60.0
    for unreadable in ("soon", "-1", "nan", "1e9", "9" * 5000, "Mon, 99 Foo 2026"):
        assert pause(0.5, 0, 3, unreadable) == pauses[0]
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 28 < pause(0.5, 0, 3, email.utils.format_datetime(soon, usegmt=True)) <= 30


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
        await asyncio.Event().wait()

    # A busy machine may not even have read a request in so short a time: the client's count.
    message, _, stats = problem(silent, timeout=0.25, tries=2)
    assert "no answer within 0.25 s (2 tries)" in message
    assert (stats.retries, stats.failed) == (1, 1)


def test_a_server_that_drips_is_given_up():
    async def main():
        async def drip(reader, writer):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            with contextlib.suppress(OSError), closing(writer):
                while True:  # for ever, if nobody hangs up
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        options = {"tries": 1, "timeout": 0.2}
        async with server, EndpointCompleter(url, "m", TOKENIZER, **options) as completer:
            with pytest.raises(EndpointProblem, match="no answer within 0.2 s"):
                await completer.complete(prompt(), SAMPLING)

    asyncio.run(main())


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


def test_a_reply_that_repeats_the_key_is_blackened(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    escaped = json.dumps(good(f"my key is {KEY}!")[1]).replace("topsecret", "\\u0074opsecret")
    for reply in (good(f"my key is {KEY}!"), (200, escaped.encode())):
        completion, *_ = run(lambda request, reply=reply: reply)
        assert TOKENIZER.decode(completion.tokens) == "my key is ***!"
    deep = b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}"
    assert "choices" in problem(lambda request: (200, deep))[0]
    monkeypatch.setenv("OPENAI_API_KEY", "EMPTY")  # what people say to a server that wants none
    completion, *_ = run(lambda request: good("the box is EMPTY"))
    assert TOKENIZER.decode(completion.tokens) == "the box is EMPTY"


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
    message, *_ = problem(lambda request: (200, body), tries=2)
    assert said in message and len(message) < 500


@pytest.mark.parametrize("body", [b"<html>Welcome</html>", b"[1]", b"{}", b'{"error": "none"}'])
def test_what_is_whole_and_no_answer_is_not_asked_for_again(body):
    _, server, stats = problem(lambda request: (200, body))
    assert len(server.requests) == 1 and stats.retries == 0


def test_the_servers_words_are_shortened_and_tamed():
    message, *_ = problem(lambda request: error(400, "\x1b[31mred\n\x00" + "x" * 5_000))
    assert "status 400: [31mred x" in message and "xxx...; check" in message
    assert len(message) < 400


def test_a_flood_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection, "MAX_REPLY", 1 << 20)
    message, *_ = problem(lambda request: good("x" * (1 << 21)))
    assert "more than 1 MB" in message
