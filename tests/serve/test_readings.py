"""Readings over HTTP: followed, left, cancelled, and taken up again where a server was killed."""

import dataclasses
import errno
import json
import shutil
import socket
import threading
import time
from pathlib import Path

import fakes
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notepad_jax.reading.trace import Trace
from notepad_jax.serve.completions.admission import RequestQueue
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.readings import routes
from notepad_jax.serve.readings.journal import Journal
from notepad_jax.serve.readings.read_ahead import ReadAhead
from notepad_jax.text import chunks
from notepad_jax.types import CompleterFailed, tokens
from tests.serve import fake
from tests.serve.fake import DOCUMENT, NAME, Arithmetic, library, running, served, until
from tests.serve.test_requests import VALUES

ASKED = {"file_id": "book", "questions": ["code of bob ?", "who is ann ?"], "samples": 2, "seed": 5}
CLIENT = httpx2.Client(timeout=30)


@pytest.fixture(scope="module")
def url():
    with library() as (there, _):
        yield there


def begin(url: str, **more) -> str:
    """The address of a detached reading."""
    reply = CLIENT.post(f"{url}/v1/readings", json=ASKED | {"detach": True} | more)
    assert reply.status_code == 202, reply.text
    assert reply.headers["location"] == f"/v1/readings/{reply.json()['id']}"
    return url + reply.headers["location"]


def whole(there: str) -> dict:
    until(lambda: CLIENT.get(there).json()["status"] != "in_progress")
    return CLIENT.get(there).json()


def events(text: str) -> list[tuple]:
    """(id, name, data) of a stream."""
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("id"), fields["event"], json.loads(fields["data"])))
    return found


def answers(card: dict) -> list[str]:
    return [one["answer"] for one in card["readings"]]


def test_a_reading_by_its_events(url):
    there = begin(url)
    card = whole(there)
    assert card["status"] == "completed" and card["error"] is None and len(answers(card)) == 4
    told = events(CLIENT.get(f"{there}/events").text)
    names = [name for _, name, _ in told]
    assert names[-1] == "done" and names.count("answer") == 4
    assert names.count("turn") == card["usage"]["turns"] > 4 * 10
    assert [int(id) for id, _, _ in told if id] == list(range(names.count("turn") + 1))
    for number, one in enumerate(card["readings"]):
        mine = [(name, data) for _, name, data in told if data.get("reading") == number]
        turns = [data for name, data in mine if name == "turn"]
        assert [turn["turn"] for turn in turns] == list(range(len(turns)))
        assert [turn["kind"] for turn in turns] == ["update"] * (len(turns) - 1) + ["answer"]
        assert turns[-1]["of"] == turns[-1]["chunk"] == one["of"] == len(turns) - 1
        assert all(len(turn["token_ids"]) == len(turn["logprobs"]) for turn in turns)
        memories = [data["memory"] for name, data in mine if name == "memory"]
        assert memories and memories[-1] == one["memory"]
        assert [data["answer"] for name, data in mine if name == "answer"] == [one["answer"]]
    assert card["readings"][0]["question"] == card["readings"][1]["question"]
    assert answers(whole(begin(url))) == answers(card)  # a seed is a promise


def test_last_event_id_resumes(url):
    there = begin(url)
    whole(there)
    every = events(CLIENT.get(f"{there}/events").text)
    for seen in (0, 7, len(every)):
        more = CLIENT.get(f"{there}/events", headers={"Last-Event-ID": str(seen)}).text
        place = next((n for n, one in enumerate(every) if one[0] == str(seen)), len(every))
        assert events(more) == every[place + 1 :]
    bad = CLIENT.get(f"{there}/events", headers={"Last-Event-ID": "x"})
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "Last-Event-ID"


def test_a_reading_that_is_not_detached_is_its_events_and_ends_with_them():
    with library(streamer=Arithmetic(pause=0.02)) as (url, streamer):
        body = json.dumps(ASKED).encode()
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as wire:
            wire.sendall(b"POST /v1/readings HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                         b"%d\r\n\r\n" % len(body) + body)  # fmt: skip
            until(lambda: b"event: turn" in wire.recv(1 << 16))
            assert streamer.seats == 1
        until(lambda: streamer.running + streamer.seats == 0)
        (card,) = CLIENT.get(f"{url}/v1/readings").json()["data"]
        until(lambda: CLIENT.get(f"{url}/v1/readings").json()["data"][0]["status"] == "cancelled")
        assert "notepad:num_requests_running 0.0" in CLIENT.get(f"{url}/metrics").text
        short = CLIENT.post(f"{url}/v1/readings", json=ASKED | {"samples": 1})
        assert events(short.text)[-1][1] == "done"
        assert short.headers["location"] != f"/v1/readings/{card['id']}"


def test_metrics_count_all_turns_of_readings_however_they_are_asked():
    content = [{"type": "file", "file": {"file_id": "book"}}, {"type": "text", "text": "who ?"}]
    chat = {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": content}], "n": 2}

    def counted(url: str) -> list[float]:
        lines = dict(
            line.rsplit(" ", 1) for line in CLIENT.get(f"{url}/metrics").text.split("\n")[:-1]
        )
        names = ("prompt_tokens_total", "generation_tokens_total")
        ended = [
            float(n) for name, n in lines.items() if name.startswith("notepad:request_success_t")
        ]
        return [float(lines[f"notepad:{name}"]) for name in names] + [sum(ended)]

    with library() as (url, _):
        usage = CLIENT.post(f"{url}/v1/chat/completions", json=chat).json()["usage"]
        assert counted(url) == [usage["prompt_tokens"], usage["completion_tokens"], 2]
        more = whole(begin(url))["usage"]
        both = [usage[name] + more[name] for name in ("prompt_tokens", "completion_tokens")]
        assert counted(url) == [*both, 2 + 4] and more["turns"] > 4


def test_delete_cancels_at_the_next_turn_and_then_removes():
    with library(streamer=Arithmetic(pause=0.02)) as (url, streamer):
        there = begin(url)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 2)
        assert CLIENT.delete(there).json()["stopping"]
        card = whole(there)
        assert card["status"] == "cancelled" and None in answers(card)
        assert events(CLIENT.get(f"{there}/events").text)[-1][1] == "done"
        until(lambda: streamer.seats == 0)
        assert CLIENT.delete(there).json()["deleted"]
        assert CLIENT.get(there).status_code == 404


def test_the_trace_is_one_as_archives_write_it(url, tmp_path):
    there = begin(url)
    card = whole(there)
    for query, kept in (("", False), ("?turns=true", True)):
        (tmp_path / "trace.jsonl").write_bytes(CLIENT.get(f"{there}/trace{query}").content)
        with Trace(tmp_path / "trace.jsonl") as trace:
            found = [trace.whole(number) for number in range(len(trace))]
        assert [one.reading["answer"] for one in found] == answers(card)
        assert [one.memories[-1].memory for one in found] == [
            one["memory"] for one in card["readings"]
        ]
        assert [len(one.turns) for one in found] == [
            kept * one["usage"]["turns"] for one in card["readings"]
        ]
    sizes = [sum(len(turn.shared) + len(turn.tail) for turn in one.turns) for one in found]
    assert sizes == [one["usage"]["prompt_tokens"] for one in card["readings"]]


# ---------------------------------------------------------------- killed


def test_a_server_that_comes_back_goes_on_and_answers_the_same(tmp_path):
    with library(tmp_path / "whole") as (url, streamer):
        card = whole(begin(url))
        turns = len(streamer.asked)
    with library(tmp_path / "killed", Arithmetic(pause=0.02)) as (url, streamer):
        there = begin(url)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 9)
        shutil.copytree(tmp_path / "killed", tmp_path / "left")  # as a kill leaves it
        made = len(streamer.asked)
    journal = next((tmp_path / "left" / "readings").glob("*/journal.jsonl"))
    with journal.open("ab") as file:
        file.write(b'[["turn", {"rea')
    for name in ("left", "killed"):  # killed, and stopped
        with library(tmp_path / name, text=None) as (url, streamer):
            again = whole(url + there.removeprefix(there.split("/v1")[0]))
            assert answers(again) == answers(card) and again["status"] == "completed"
            assert len(streamer.asked) < turns - 5 and made < turns
            assert again["usage"] == card["usage"]
            told = events(CLIENT.get(f"{url}/v1/readings/{again['id']}/events").text)
            assert [int(id) for id, _, _ in told if id] == list(range(turns + 1))


def test_a_journal_is_read_once_for_all_its_readings(tmp_path, monkeypatch):
    """When it is taken up again, and for its trace, once to see how far each is, and once more."""
    with library(tmp_path, Arithmetic(pause=0.01)) as (url, _):
        there = begin(url, samples=8)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 32)
    parsed, line = [], Journal._line
    monkeypatch.setattr(Journal, "_line", lambda *about: parsed.append(about[2]) or line(*about))
    with library(tmp_path, text=None) as (url, streamer):
        path = url + there[there.index("/v1") :]
        until(lambda: streamer.asked)
        assert len(parsed) < 3 * len(set(parsed))
        lines = whole(path)["usage"]["turns"]
        parsed.clear()
        assert CLIENT.get(f"{path}/trace?turns=true").status_code == 200
        assert len(parsed) == 2 * lines


def test_readings_that_wait_for_a_place_count_as_no_request_and_keep_nobody_waiting(
    tmp_path, monkeypatch
):
    with running(served(Arithmetic(slots=1, pause=0.02)), folder=tmp_path) as url:
        CLIENT.put(f"{url}/v1/files/book", content=DOCUMENT)
        paths = [begin(url, questions=["who ?"], samples=1).removeprefix(url) for _ in range(3)]
    threads, lines = [], Journal.lines
    monkeypatch.setattr(
        Journal, "lines", lambda *about: threads.append(threading.current_thread()) or lines(*about)
    )
    streamer, refused = Arithmetic(slots=1, pause=30), []
    admitted = RequestQueue.admitted

    def counted(*about):
        refused.append(len(about))
        return admitted(*about)

    monkeypatch.setattr(RequestQueue, "admitted", counted)
    with running(served(streamer), waiting=0, folder=tmp_path) as url:
        until(lambda: streamer.running and len(refused) > 3)  # two are refused again and again
        assert [CLIENT.get(url + path).json()["status"] for path in paths] == ["in_progress"] * 3
        assert "request_refused_total 0.0" in CLIENT.get(f"{url}/metrics").text
        assert CLIENT.post(f"{url}/v1/readings", json=ASKED).status_code == 429
        assert "request_refused_total 1.0" in CLIENT.get(f"{url}/metrics").text
    assert {one.name.split("_")[0] for one in threads} == {"asyncio"}  # not in the event loop's


def test_what_is_no_reading_of_ours_is_left_where_it_lies(tmp_path, caplog):
    folder = tmp_path / "readings"
    notes, half, strange = (folder / name for name in ("notes", f"reading_{'0' * 24}",
                                                       f"reading_{'1' * 24}"))  # fmt: skip
    for one in (notes, half, strange):
        one.mkdir(parents=True)
    (notes / "mine.txt").write_text("mine")
    (strange / "asked.json").write_text('{"questions": [], "of": "another version"}')
    with library(tmp_path, text=None) as (url, _):
        assert CLIENT.get(f"{url}/v1/readings").json()["data"] == []
    assert (notes / "mine.txt").exists() and (strange / "asked.json").exists()
    assert not half.exists() and "reading_1111" in caplog.text


def test_turns_that_trainers_give_up_are_made_again(url):
    streamer = Arithmetic(pause=0.05)  # so long that the abort finds turns under way
    with running(served(streamer), trainers=lambda *_: None) as other:
        CLIENT.put(f"{other}/v1/files/book", content=DOCUMENT)
        there = begin(other)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 5)
        for _ in range(3):  # one may come just between two turns
            CLIENT.post(f"{other}/pause?mode=abort")
            CLIENT.post(f"{other}/resume")
            time.sleep(0.02)
        CLIENT.post(f"{other}/pause?mode=abort")
        before = CLIENT.get(there).json()
        time.sleep(0.3)
        assert CLIENT.get(there).json() == before and before["status"] == "in_progress"
        CLIENT.post(f"{other}/resume")
        card = whole(there)
    assert answers(card) == answers(whole(begin(url)))
    assert card["usage"]["turns"] < len(streamer.asked)  # those that were given up, too


def test_a_reading_whose_file_is_another_now_says_so(tmp_path):
    with library(tmp_path, Arithmetic(pause=0.05)) as (url, _):
        there = begin(url)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 1)
        CLIENT.put(f"{url}/v1/files/book", content="something else")
    with library(tmp_path, text=None) as (url, _):
        card = whole(url + there[there.index("/v1") :])
        assert card["status"] == "failed" and card["error"]["code"] == "reading_changed"
        (short,) = CLIENT.get(f"{url}/v1/readings").json()["data"]
        assert short.items() <= card.items()


def test_a_reading_that_other_weights_began_says_so(tmp_path, monkeypatch):
    with library(tmp_path, Arithmetic(pause=0.05)) as (url, _):
        there = begin(url)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 1)
    monkeypatch.setattr(fake, "FINGERPRINT", "np-8")
    with library(tmp_path, text=None) as (url, _):
        card = whole(url + there[there.index("/v1") :])
        assert card["status"] == "failed" and card["error"]["code"] == "reading_changed"


def asked_of(folder) -> Path:
    """The file of what the reading in a server's folder was asked."""
    (found,) = (folder / "readings").glob("*/asked.json")
    return found


def stopped(folder, pause: float = 0.02, **policy) -> str:
    """The path of a reading that a server began in a folder, and did not end."""
    with running(served(Arithmetic(pause=pause), **policy), folder=folder) as url:
        CLIENT.put(f"{url}/v1/files/book", content=DOCUMENT)
        there = begin(url)
        if pause < 1:
            until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 1)
    return there.removeprefix(url)


def test_the_weights_of_the_first_turn_are_those_that_go_on(tmp_path, monkeypatch):
    there = stopped(tmp_path, pause=30)  # before its first turn had ended
    monkeypatch.setattr(fake, "FINGERPRINT", "np-8")
    with library(tmp_path, Arithmetic(pause=0.02), text=None) as (url, _):
        until(lambda: CLIENT.get(url + there).json()["usage"]["turns"] > 1)
    assert json.loads(asked_of(tmp_path).read_text())["identity"]["weights"] == "np-8"
    shutil.copytree(tmp_path, tmp_path / "again")
    with library(tmp_path / "again", text=None) as (url, _):
        assert whole(url + there)["status"] == "completed"
    monkeypatch.setattr(fake, "FINGERPRINT", "np-7")
    with library(tmp_path, text=None) as (url, _):
        assert whole(url + there)["error"]["code"] == "reading_changed"


def test_a_reading_goes_on_with_the_sampling_that_it_began_with(tmp_path):
    usual = served(Arithmetic()).sampling
    there = stopped(tmp_path, sampling=dataclasses.replace(usual, temperature=0.5, top_p=0.9))
    with library(tmp_path, text=None) as (url, streamer):
        assert whole(url + there)["status"] == "completed"
    assert {(how.temperature, how.top_p) for _, how in streamer.asked} == {(0.5, 0.9)}


def test_a_template_of_the_same_name_is_another_by_its_words(tmp_path):
    there, asked = stopped(tmp_path), asked_of(tmp_path)
    other = dataclasses.replace(fakes.template(), no_memory=tokens([300]))
    old = json.loads(asked.read_text())
    old["identity"].pop("template_digest", None)  # as older servers wrote it
    for name, status in (("new", "failed"), ("old", "completed")):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "files", folder / "files")
        shutil.copytree(tmp_path / "readings", folder / "readings")
        if name == "old":
            asked_of(folder).write_text(json.dumps(old))
        with running(served(Arithmetic(), template=other), folder=folder) as url:
            assert whole(url + there)["status"] == status


def test_a_reading_whose_engine_failed_goes_on_with_the_next_server(tmp_path):
    with library(tmp_path / "whole") as (url, _):
        card = whole(begin(url))
    with library(tmp_path / "broken", Arithmetic(pause=0.02)) as (url, streamer):
        there = begin(url)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 1)
        streamer.broken = CompleterFailed("the device is on fire")
        failed = whole(there)
        assert failed["status"] == "failed" and "on fire" in failed["error"]["message"]
        last = events(CLIENT.get(f"{there}/events").text)[-1]
        assert last[:2] == (None, "done") and last[2]["error"] == failed["error"]
    with library(tmp_path / "broken", text=None) as (url, _):
        again = whole(url + there[there.index("/v1") :])
        assert again["status"] == "completed" and answers(again) == answers(card)


def full(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("status", [502, 507])
def test_a_disk_or_a_bucket_that_comes_back_ends_no_detached_reading(tmp_path, status):
    def lost(*_):
        raise Refusal(status, "nothing comes from there now")

    with library(tmp_path) as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadAhead, "__getitem__", lost)
        there = begin(url)
        other = begin(url)
        assert whole(there)["status"] == whole(other)["status"] == "failed"
        CLIENT.post(f"{other}/cancel")
        assert whole(other)["status"] == "cancelled"
    with library(tmp_path, text=None) as (url, _):
        assert whole(url + there[there.index("/v1") :])["status"] == "completed"
        assert whole(url + other[other.index("/v1") :])["status"] == "cancelled"


def test_a_full_temporary_disk_is_a_507(url, monkeypatch):
    there = begin(url)
    whole(there)
    monkeypatch.setattr(chunks, "IN_MEMORY", 8)
    monkeypatch.setattr(chunks._Written, "_to_file", full)
    content = [{"type": "file", "file": {"file_id": "book"}}, {"type": "text", "text": "who ?"}]
    chat = {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": content}]}
    reply = CLIENT.post(f"{url}/v1/chat/completions", json=chat)
    assert reply.status_code == 507 and "set TMPDIR" in reply.json()["error"]["message"]
    assert CLIENT.get(f"{there}/trace?turns=true").status_code == 507
    assert whole(begin(url))["error"]["code"] == "insufficient_storage"
    monkeypatch.setattr(routes.Spool, "add", full)
    assert CLIENT.get(f"{there}/trace").status_code == 507


def test_the_head_of_events_is_all_of_it():
    with library(streamer=Arithmetic(pause=30)) as (url, _):
        path = begin(url).removeprefix(url)
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 10) as wire:
            wire.sendall(f"HEAD {path}/events HTTP/1.1\r\nHost: localhost\r\n"
                         f"Connection: close\r\n\r\n".encode())  # fmt: skip
            said = b"".join(iter(lambda: wire.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"\r\n\r\n")


def test_a_broken_engine_ends_a_reading_in_words():
    with library(streamer=Arithmetic(pause=0.02)) as (url, streamer):
        there = begin(url)
        until(lambda: streamer.running)
        streamer.broken = RuntimeError("secrets")
        card = whole(there)
        assert card["status"] == "failed" and "secrets" not in json.dumps(card)
        assert events(CLIENT.get(f"{there}/events").text)[-1][2]["error"] == card["error"]


BAD = [
    ({"file_id": None}, "file_id"), ({"file_id": "nobody"}, "file_id"),
    ({"questions": None}, "questions"), ({"questions": []}, "questions"),
    ({"questions": [1]}, "questions"), ({"questions": ["who ?", ""]}, "questions[1]"),
    ({"questions": ["who is ann ? " * 90]}, "questions[0]"), ({"samples": 0}, "samples"),
    ({"samples": 100}, "questions"), ({"seed": "x"}, "seed"), ({"detach": 1}, "detach"),
    ({"model": NAME}, "model"), ({"notepad": {"chunk_size": 10**6}}, "notepad.chunk_size"),
    ({"notepad": {"as": "reasoning"}}, "notepad.as"), ({"stream": True}, "stream"),
    ({"temperature": -1}, "temperature"), ({"max_tokens": 10**6}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize("changed, param", BAD, ids=range(len(BAD)))
def test_readings_that_are_refused(changed, param, url):
    reply = CLIENT.post(f"{url}/v1/readings", json=ASKED | changed)
    assert reply.json()["error"]["param"] == param
    assert reply.status_code == (404 if changed == {"file_id": "nobody"} else 400)


READING = st.fixed_dictionaries(
    {}, optional={name: VALUES for name in (*routes.NAMES, "bytes", "filename", "purpose")}
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=READING)
def test_noise_never_makes_readings_or_uploads_fail(url, body):
    upload = {"filename": "x", "bytes": 1, "purpose": "user_data"}
    for path, base in (("readings", ASKED | {"detach": True}), ("uploads", upload)):
        reply = CLIENT.post(f"{url}/v1/{path}", content=json.dumps(base | body).encode())
        assert reply.status_code < 500 and b"Traceback" not in reply.content


def test_what_a_hostile_reader_sends_stays_within_its_event(url):
    text = "who ?\n\nevent: done\r\ndata: [DONE]\r\r<|end|>\x1b[2J<script>\u2028"
    CLIENT.put(f"{url}/v1/files/hostile", content=text)
    question = "who\n\n\r\0 ?"
    there = begin(url, file_id="hostile", questions=[question], samples=1)
    card = whole(there)
    told = events(CLIENT.get(f"{there}/events").text)
    assert [name for _, name, _ in told].count("done") == 1
    (answer,) = [data for _, name, data in told if name == "answer"]
    assert answer["question"] == card["readings"][0]["question"] == question
    memories = "".join(data["memory"] for _, name, data in told if name == "memory")
    assert "\n\n\r\0" in memories
