"""Documents by address: read where they lie, never outside of what is allowed, never two in one."""

import json
import os
import tracemalloc
from pathlib import Path

import httpx2
import pytest
import tensorstore as ts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from notepad_jax import cli
from notepad_jax.data.objects import CONTEXT, BucketListing
from notepad_jax.serve.documents.roots import DocumentRoots
from notepad_jax.serve.http.errors import Refusal
from tests.serve.fake import DOCUMENT, NAME, Arithmetic, library, until
from tests.serve.test_readings import ASKED, whole

CLIENT = httpx2.Client(timeout=30)
BUCKET = "memory://bucket/books"
SECRET = "a secret of the house"


@pytest.fixture()
def store():
    found = ts.KvStore.open("memory://bucket/", context=CONTEXT).result()
    found.write("books/b.txt", DOCUMENT.encode()).result()
    found.write("books2/b.txt", SECRET.encode()).result()
    yield found
    found.delete_range(ts.KvStore.KeyRange()).result()


@pytest.fixture()
def books(tmp_path):
    """A folder with a book, a link to it, and links, pipes and folders that lead nowhere."""
    folder = tmp_path / "books"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_text(DOCUMENT)
    (folder / "deep" / "b.txt").write_text(DOCUMENT)
    (folder / "same").symlink_to("deep/../b.txt")
    (tmp_path / "books2").mkdir()
    (tmp_path / "books2" / "b.txt").write_text(SECRET)
    (folder / "out").symlink_to(tmp_path / "books2" / "b.txt")
    (folder / "away").symlink_to(tmp_path / "books2")
    (folder / "round").symlink_to("round")
    (folder / "locked").write_text(SECRET)
    (folder / "locked").chmod(0o000)
    os.mkfifo(folder / "pipe")
    (tmp_path / "entry").symlink_to(folder)
    return folder


@pytest.fixture()
def url(books, store):
    with library(documents=[str(books), BUCKET]) as (there, _):
        yield there


def ask(url: str, id: str, **more) -> httpx2.Response:
    content = [{"type": "file", "file": {"file_id": id}}, {"type": "text", "text": "who ?"}]
    body = {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": content}],
            "seed": 3}  # fmt: skip
    return CLIENT.post(f"{url}/v1/chat/completions", content=json.dumps(body | more).encode())


def answers(card: dict) -> list[str]:
    return [one["answer"] for one in card["readings"]]


def detached(url: str, id: str) -> str:
    reply = CLIENT.post(f"{url}/v1/readings", json=ASKED | {"file_id": id, "detach": True})
    assert reply.status_code == 202, reply.text
    return url + reply.headers["location"]


def test_a_document_by_address_is_read_as_one_that_was_sent(url, books):
    sent = ask(url, "book").json()["choices"][0]["message"]
    for id in (f"{books}/b.txt", f"{books}//deep/b.txt", f"{books}/same", f"{BUCKET}/b.txt"):
        assert ask(url, id).json()["choices"][0]["message"] == sent
    card = whole(detached(url, "book"))
    for id in (f"{books}/b.txt", f"{BUCKET}/b.txt"):
        other = whole(detached(url, id))
        assert answers(other) == answers(card) and other["file_id"] == id


def test_a_folder_is_known_by_the_name_that_was_allowed_and_by_its_own(books, tmp_path):
    places = DocumentRoots([str(tmp_path / "entry")])
    for name in ("entry", "books"):
        found = places.document(str(tmp_path / name / "b.txt"), "file_id")
        assert "".join(found.pieces()) == DOCUMENT


def test_what_clients_may_not_name_is_as_what_is_not_there(url, books, tmp_path):
    elsewhere = str(tmp_path / "books2" / "b.txt")
    named = [
        elsewhere, f"{books}/../books2/b.txt", f"{books}/deep/../b.txt", f"{books}/./b.txt",
        f"{books}/out", f"{books}/away/b.txt", f"{books}/round", f"{books}/pipe", f"{books}/deep",
        str(books), f"{books}/", f"{books}/none", f"/{books}/b.txt",
        f"file://{books}/b.txt", "books/b.txt", "./b.txt", "~/b.txt", "/etc/passwd", "/",
        f"{books}/\0", f"{books}/{'x' * 9000}", f"{books}/\ud800", f"{tmp_path}/entry/b.txt",
        "gs://bucket/books/b.txt", "memory://bucket/books2/b.txt", "memory://bucket/b.txt",
        f"{BUCKET}", f"{BUCKET}/", f"{BUCKET}/none", f"{BUCKET}/../books2/b.txt",
        f"{BUCKET}/%2e%2e/books2/b.txt", f"{BUCKET}/b.txt|zip:x", "http://localhost/x",
    ]  # fmt: skip
    if os.geteuid():
        named.append(f"{books}/locked")
    told = set()
    for id in named:
        replies = [ask(url, id), CLIENT.post(
            f"{url}/v1/readings", content=json.dumps(ASKED | {"file_id": id}).encode()
        )]  # fmt: skip
        for reply in replies:
            error = reply.json()["error"]
            assert reply.status_code == 404, (id, error)
            message = error["message"]
            assert "there is no document '" in message and SECRET not in message
            told.add((message.rpartition("that clients may name")[2], error["code"]))
    assert len(told) == 1
    assert CLIENT.delete(f"{url}/v1/files/{books}/b.txt").status_code in (404, 405)
    assert (books / "b.txt").read_text() == DOCUMENT


def test_a_server_that_allows_nothing_has_no_documents_by_address(books):
    with library() as (url, _):
        assert ask(url, f"{books}/b.txt").json()["error"]["code"] == "document_not_found"


NAMES = st.sampled_from(["", ".", "..", "books", "books2", "b.txt", "deep", "same", "out", "away",
                         "round", "entry", "\0", "none"])  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(NAMES, max_size=6), inside=st.booleans())
def test_no_address_leads_outside(books, tmp_path, parts, inside):
    root = books if inside else tmp_path
    try:
        found = DocumentRoots([str(books)]).document(f"{root}/" + "/".join(parts), "file_id")
    except Refusal as refused:
        assert refused.status == 404
    else:
        assert "".join(found.pieces()) == DOCUMENT


def test_a_link_that_is_put_in_the_way_meanwhile_leads_nowhere(books, tmp_path):
    found = DocumentRoots([str(books)]).document(f"{books}/deep/b.txt", "file_id")
    (books / "deep" / "b.txt").unlink()
    (books / "deep").rmdir()
    (books / "deep").symlink_to(tmp_path / "books2")
    with pytest.raises(Refusal, match="was changed or removed while it was read"):
        list(found.pieces())


@pytest.mark.parametrize("data", [b"\xff\xfe", b"%PDF\0", b"the \xe2\x82"], ids=str)
def test_what_is_no_text_is_said(url, books, store, data):
    (books / "odd").write_bytes(data)
    store.write("books/odd", data).result()
    for id in (f"{books}/odd", f"{BUCKET}/odd"):
        reply = ask(url, id, stream=True)
        assert "convert it to UTF-8 text first" in reply.text and "byte" in reply.text


# ---------------------------------------------------------------- not what it was


def altered(id: str, store, how: str, text: str = DOCUMENT) -> None:
    if id.startswith("memory://"):
        data = {"grown": text + "more", "replaced": text, "removed": None}[how]
        store.write("books/b.txt", data if data is None else data.encode()).result()
    elif how == "grown":
        with open(id, "a") as file:
            file.write("more")
    elif how == "replaced":
        Path(f"{id}.new").write_text(text)
        os.replace(f"{id}.new", id)
    else:
        os.unlink(id)


@pytest.mark.parametrize("how", ["grown", "replaced", "removed"])
def test_a_document_that_changes_while_it_is_read_is_never_two_in_one(books, store, how):
    long = DOCUMENT * 10_000  # 2.5 MB: more than is read ahead
    (books / "b.txt").write_text(long)
    store.write("books/b.txt", long.encode()).result()
    places = DocumentRoots([str(books), BUCKET])
    for id in (f"{books}/b.txt", f"{BUCKET}/b.txt"):
        pieces = places.document(id, "file_id").pieces()
        got = next(pieces)
        altered(id, store, how, long)
        with pytest.raises(Refusal, match="was changed or removed while it was read") as told:
            for piece in pieces:
                got += piece
        assert told.value.status == 409 and long.startswith(got)


@pytest.mark.parametrize("id", ["{books}/b.txt", BUCKET + "/b.txt"])
@pytest.mark.parametrize("how", ["same", "grown", "removed"])
def test_a_reading_goes_on_after_a_restart_if_its_document_is_the_same(
    id, how, books, store, tmp_path
):
    id, about = id.format(books=books), {"documents": [str(books), BUCKET], "text": None}
    kept = tmp_path / "kept"
    with library(kept, Arithmetic(pause=0.01), **about) as (url, streamer):
        there = detached(url, id)
        until(lambda: CLIENT.get(there).json()["usage"]["turns"] > 3)
    if how != "same":
        altered(id, store, how)
    with library(kept, **about) as (url, streamer):
        card = whole(url + there[there.index("/v1") :])
        if how == "same":
            assert card["status"] == "completed"
            assert len(streamer.asked) < card["usage"]["turns"]
            assert answers(card) == answers(whole(detached(url, id)))
        else:
            code = {"grown": "reading_changed", "removed": "document_not_found"}[how]
            assert (card["status"], card["error"]["code"]) == ("failed", code)


def test_a_bucket_that_does_not_answer_is_the_servers_trouble(url, monkeypatch):
    def lost(*_):
        raise ValueError("gs://b cannot be read: 10.0.0.7 refused the key abc")

    monkeypatch.setattr(BucketListing, "look", lost)
    reply = ask(url, f"{BUCKET}/b.txt")
    assert reply.status_code == 502 and "10.0.0.7" not in reply.text


def test_a_large_document_costs_no_memory(tmp_path, store):
    block = (DOCUMENT * 4200).encode()[: 1 << 20]
    with (tmp_path / "large").open("wb") as file:
        for _ in range(24):
            file.write(block)
    store.write("books/large", block * 24).result()
    places = DocumentRoots([str(tmp_path), BUCKET])
    for id in (f"{tmp_path}/large", f"{BUCKET}/large"):
        found = places.document(id, "file_id")
        tracemalloc.start()
        assert sum(map(len, found.pieces())) == 24 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


@pytest.mark.parametrize("prefix, said", [
    ("no/such", "'no/such' is no folder"), ("", "'' is no folder"), ("gs://b", "cannot be opened"),
    ("file:///tmp", "no bucket; use gs:// or s3://"), ("http://x", "no bucket; use gs:// or s3://"),
])  # fmt: skip
def test_a_prefix_that_cannot_be_allowed_is_said_before_anything_is_read(prefix, said, capsys):
    assert cli.main(["serve", "--port", "0", "--documents", prefix]) == 1
    assert said in capsys.readouterr().err
