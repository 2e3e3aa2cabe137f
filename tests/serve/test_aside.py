"""What takes long is done aside: who answers everybody waits for no text and no disk."""

import json
import os
import threading

import httpx2
import pytest

from notepad_jax.serve.documents import store
from tests.serve.fake import NAME, TOKENIZER, library, until

CLIENT = httpx2.Client(timeout=30)
LONG = "ann says the code of bob is blue . " * 300
FILE = {"type": "file", "file": {"file_id": "book"}}
QUESTION = {"type": "text", "text": "who ?"}


@pytest.fixture()
def noted(monkeypatch):
    """The names of the threads that encoded or decoded much, or read a file."""
    names: list[str] = []

    def note() -> None:
        names.append(threading.current_thread().name)

    kind, blocks = type(TOKENIZER), store._blocks
    encode, decode = kind.encode, kind.decode

    def encoded(self, text):
        if len(text) > 5000:
            note()
        return encode(self, text)

    def decoded(self, ids):
        if len(ids) > 5000:
            note()
        return decode(self, ids)

    def read(*about):
        for block in blocks(*about):
            note()
            yield block

    monkeypatch.setattr(kind, "encode", encoded)
    monkeypatch.setattr(kind, "decode", decoded)
    monkeypatch.setattr(store, "_blocks", read)
    return names


def test_long_texts_and_files_are_read_by_threads_of_their_own(noted):
    long = {"role": "user", "content": LONG}
    with library(text=LONG) as (url, _):
        for path, body in [
            ("/v1/chat/completions", {"model": NAME, "messages": [long]}),
            ("/v1/completions", {"model": NAME, "prompt": LONG}),
            ("/tokenize", {"messages": [long]}), ("/tokenize", {"prompt": LONG}),
            ("/detokenize", {"tokens": [300] * 6000}),
            ("/v1/chat/completions", {"model": f"{NAME}:notepad", "seed": 1, "messages": [
                {"role": "user", "content": [FILE, QUESTION]}]}),
            ("/v1/readings", {"file_id": "book", "questions": ["who ?", "bob ?"], "detach": True}),
        ]:  # fmt: skip
            noted.clear()
            reply = CLIENT.post(url + path, content=json.dumps(body).encode())
            assert reply.status_code in (200, 202, 400)
            until(lambda: noted)
            assert all(name.startswith("asyncio_") for name in noted), (path, noted)


def test_who_waits_for_a_disk_takes_nobodys_thread(monkeypatch):
    blocks, waiting, awake = store._blocks, [], threading.Event()

    def read(*about):
        waiting.append(about)
        awake.wait(60)
        yield from blocks(*about)

    monkeypatch.setattr(store, "_blocks", read)
    for name in ("cpu_count", "process_cpu_count"):  # few threads, if asyncio may choose
        monkeypatch.setattr(os, name, lambda: 1, raising=False)
    asked = {"file_id": "book", "questions": ["who ?"], "detach": True}
    with library() as (url, _):
        there = [url + CLIENT.post(f"{url}/v1/readings", json=asked).headers["location"]
                 for _ in range(9)]  # fmt: skip
        try:
            until(lambda: len(waiting) == 9, 20)
            text = {"model": NAME, "prompt": "ann says", "max_tokens": 2}
            assert CLIENT.post(f"{url}/v1/completions", json=text).status_code == 200
        finally:
            awake.set()
        until(lambda: all(CLIENT.get(one).json()["status"] == "completed" for one in there))
