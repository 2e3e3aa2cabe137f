"""Chats that read a file: memories in their streams, and equal ones that run once."""

import json
import socket
import threading
import time

import httpx2
import openai
import pytest

from notepad_jax.serve.readings import single_flight
from tests.serve import fake
from tests.serve.fake import DOCUMENT, NAME, Arithmetic, library, until

CLIENT = httpx2.Client(timeout=30)


@pytest.fixture(scope="module")
def url():
    with library() as (there, _):
        yield there


def body(**more) -> dict:
    content = [{"type": "file", "file": {"file_id": "book"}}, {"type": "text", "text": "who ?"}]
    return {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": content}],
            "seed": 3} | more  # fmt: skip


def test_openais_client_survives_chunks_of_the_notepad(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        create = client.chat.completions.create
        plain = create(**body()).choices[0].message.content
        options = {"include_notepad": True, "include_usage": True}
        chunks = list(create(**body(stream=True, stream_options=options)))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == plain != ""
        told = [c.model_extra["notepad"] for c in chunks if "notepad" in c.model_extra]
        places = [one["chunk"] for one in told]  # of changes
        assert places == sorted(set(places)) and len(places) > 9
        assert told[-1]["of"] is not None and set(told[0]) == {
            "index", "chunk", "of", "memory", "tokens", "seconds"
        }  # fmt: skip
        turns = chunks[-1].usage.model_extra["notepad"][0]["turns"]
        assert turns == told[-1]["of"] + 1
        silent = list(create(**body(stream=True)))
        assert not any("notepad" in chunk.model_extra for chunk in silent)
        aloud = list(create(**body(stream=True), extra_body={"notepad": {"as": "reasoning"}}))
        thoughts = [getattr(c.choices[0].delta, "reasoning_content", None) for c in aloud]
        assert [t.strip() for t in thoughts if t] == [one["memory"] for one in told]
        lower = create(**body(), extra_body={"notepad": {"chunk_size": 2}})
        assert lower.usage.model_extra["notepad"][0]["turns"] > 1.8 * turns


@pytest.mark.parametrize("more, param", [
    ({"notepad": {"chunk_size": 99}}, "notepad.chunk_size"), ({"notepad": []}, "notepad"),
    ({"notepad": {"x": 1}}, "notepad.x"), ({"notepad": {"as": "chunks"}}, "notepad.as"),
    ({"notepad": {"as": 1}, "stream": True}, "notepad.as"),
    ({"model": NAME, "notepad": {"chunk_size": 1}}, "notepad"),
], ids=str)  # fmt: skip
def test_notepads_that_are_refused(more, param, url):
    reply = CLIENT.post(f"{url}/v1/chat/completions", json=body(**more))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def posted(url: str, replies: list, headers=None, **more) -> threading.Thread:
    def post():
        path = f"{url}/v1/chat/completions"
        reply = httpx2.post(path, json=body(**more), headers=headers, timeout=30)
        replies.append(reply.json()["choices"][0]["message"]["content"])

    thread = threading.Thread(target=post)
    thread.start()
    return thread


@pytest.mark.parametrize("headers, more, runs", [
    (None, {}, 1), (None, {"seed": None, "temperature": 1.0}, 3),
    ({"Idempotency-Key": "k"}, {"seed": None, "temperature": 1.0}, 1),
], ids=["seed", "chance", "key"])  # fmt: skip
def test_equal_readings_run_once_where_their_answers_must_be_equal(headers, more, runs):
    with library(streamer=Arithmetic(pause=0.03)) as (url, streamer):
        replies: list = []
        threads = [posted(url, replies, headers, **more) for _ in range(3)]
        until(lambda: streamer.seats == runs)
        time.sleep(0.1)
        assert streamer.seats == runs
        for thread in threads:
            thread.join(30)
        assert len(replies) == 3 and (runs == 3 or len(set(replies)) == 1)


@pytest.mark.parametrize("changed", ["file", "weights"])
def test_equal_readings_of_another_file_or_by_other_weights_are_others(changed, monkeypatch):
    streamer, replies = Arithmetic(pause=0.03), []
    with library(streamer=streamer) as (url, _):
        threads = [posted(url, replies)]
        until(lambda: streamer.asked)
        if changed == "file":
            CLIENT.put(f"{url}/v1/files/book", content="red " * 40)
        monkeypatch.setattr(fake, "FINGERPRINT", "np-7" if changed == "file" else "np-8")
        threads += [posted(url, replies) for _ in range(2)]
        until(lambda: streamer.seats == 2)
        for thread in threads:
            thread.join(30)
    assert len(set(replies)) == (2 if changed == "file" else 1)  # these weights answer alike


@pytest.mark.parametrize("pause", [0.04, 0.1], ids=["ended", "runs"])
def test_a_client_that_asks_again_finds_its_reading(pause):
    """It hears nothing for 0.2 s, hangs up, and comes again after a second at most."""
    streamer = Arithmetic(pause=pause)
    with library(streamer=streamer, text=DOCUMENT[:45]) as (url, _):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="E", max_retries=9, timeout=0.4) as client:
            reply = client.chat.completions.create(**body(seed=None, temperature=1.0))
        assert len(streamer.asked) == reply.usage.model_extra["notepad"][0]["turns"]
        assert streamer.seats == 0


def test_a_client_that_does_not_come_again_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(single_flight, "GRACE", 0.5)
    with library(streamer=Arithmetic(pause=0.05)) as (url, streamer):
        with socket.create_connection(url.removeprefix("http://").split(":")) as line:
            asked = json.dumps(body())
            head = f"{single_flight.RETRIES}: 0\r\nContent-Length: {len(asked)}\r\n\r\n"
            first = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            line.sendall(f"{first}{head}{asked}".encode())
            until(lambda: streamer.asked)
        assert streamer.seats == 1
        until(lambda: streamer.seats == 0)
        assert len(streamer.asked) < 15
