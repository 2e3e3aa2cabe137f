"""curl against the server: files, forms, streams that are seen as they come, and taken up again."""

import json
import shutil
import subprocess

import pytest

from tests.serve.fake import DOCUMENT, NAME, Arithmetic, library, running, served, until
from tests.serve.test_readings import events

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")

NOTEPAD = f"{NAME}:notepad"
FOLLOW = ("curl", "-sSN", "--noproxy", "*", "--max-time", "60")


def curl(*words: str, status: int = 200, stdin: bytes | None = None) -> str:
    """What curl prints; the status that it sees must be this one."""
    done = subprocess.run(
        ["curl", "-sS", "--noproxy", "*", "-w", "\n%{http_code}", *words], timeout=60,
        capture_output=True, input=stdin,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    said, _, code = done.stdout.decode().rpartition("\n")
    assert int(code) == status, said
    return said


def read(url: str, file_id: str) -> str:
    """The answer of a reading of a file, by a JSON body on standard input."""
    parts = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": "who ?"}]
    body = {"model": NOTEPAD, "messages": [{"role": "user", "content": parts}], "seed": 1}
    said = curl("-d", "@-", f"{url}/v1/chat/completions", stdin=json.dumps(body).encode())
    return json.loads(said)["choices"][0]["message"]["content"]


def test_a_file_comes_by_put_by_a_pipe_and_by_a_form(tmp_path):
    book = tmp_path / "a book.txt"
    book.write_text(DOCUMENT)
    with library(text=None) as (url, _):
        put = json.loads(curl("-T", str(book), f"{url}/v1/files/a%20book.txt"))
        assert put["id"] == put["filename"] == "a book.txt" and put["bytes"] == len(DOCUMENT)
        piped = json.loads(curl("-T", "-", f"{url}/v1/files/piped", stdin=DOCUMENT.encode()))
        assert piped["bytes"] == len(DOCUMENT)  # in chunks: its length was not announced
        named = json.loads(curl("-T", str(book), f"{url}/v1/files/"))  # curl adds the name
        assert named["id"] == "a book.txt"
        form = ("-F", "purpose=user_data", "-F", f"file=@{book}", f"{url}/v1/files")
        posted = json.loads(curl(*form))
        assert posted["filename"] == "a book.txt" and posted["id"].startswith("file-")
        assert curl(f"{url}/v1/files/{posted['id']}/content") == DOCUMENT
        answers = {read(url, id) for id in ("a book.txt", "piped", posted["id"])}
        assert len(answers) == 1 and answers != {""}
        error = json.loads(curl("-F", f"file=@{book}", f"{url}/v1/files", status=400))["error"]
        assert error["param"] == "purpose" and "use user_data" in error["message"]
        curl("-X", "DELETE", f"{url}/v1/files/piped")
        curl(f"{url}/v1/files/piped", status=404)


def test_a_key_stands_in_a_header():
    with running(served(Arithmetic()), key="secret-1") as url:
        assert "API key is missing" in curl(f"{url}/v1/models", status=401)
        assert NAME in curl("-H", "Authorization: Bearer secret-1", f"{url}/v1/models")


def test_a_stream_is_seen_as_it_comes():
    """With -N the first words are there while the others are still being made."""
    body = {"model": NAME, "prompt": "red blue " * 40, "max_tokens": 60, "seed": 1, "stream": True}
    with running(served(Arithmetic(pause=0.1))) as url:
        words = [*FOLLOW, "-d", json.dumps(body), f"{url}/v1/completions"]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as asking:
            try:
                first = asking.stdout.readline()
                assert asking.poll() is None  # 60 tokens take three seconds
                assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"]
            finally:
                asking.kill()


def test_events_are_taken_up_where_a_connection_broke(tmp_path):
    asked = {"file_id": "book", "questions": ["who is ann ?"], "seed": 5, "detach": True}
    with library(streamer=Arithmetic(pause=0.01)) as (url, _):
        card = json.loads(curl("-d", json.dumps(asked), f"{url}/v1/readings", status=202))
        there = f"{url}/v1/readings/{card['id']}"
        seen = tmp_path / "seen"
        with seen.open("wb") as file:
            words = [*FOLLOW, f"{there}/events"]
            with subprocess.Popen(words, stdout=file) as following:
                try:
                    until(lambda: seen.read_bytes().count(b"id: ") > 3)
                finally:
                    following.kill()
        whole = seen.read_text()
        before = events(whole[: whole.rindex("\n\n") + 2])  # an event that was cut is none
        last = [id for id, _, _ in before if id][-1]
        before = before[: 1 + max(n for n, one in enumerate(before) if one[0] == last)]
        after = events(curl("-N", "-H", f"Last-Event-ID: {last}", f"{there}/events"))
        assert after[-1][1] == "done" and after[-1][2]["status"] == "completed"
        assert before + after == events(curl("-N", f"{there}/events"))
