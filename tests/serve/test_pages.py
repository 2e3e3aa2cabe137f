"""What browsers are shown: readings and runs under /traces, who may look, and what stays shut."""

import http.client
import os
import re
import threading
import time

import httpx2
import pytest

from notepad_jax.programs import pages
from notepad_jax.serve.browser import page_cache
from notepad_jax.serve.http import sessions
from notepad_jax.serve.readings import routes
from tests.report import made_traces
from tests.serve.fake import DOCUMENT, Arithmetic, running, served, until

KEY = "secret-1"
CLIENT = httpx2.Client(timeout=30)
BEARER = {"Authorization": f"Bearer {KEY}"}
BROWSER = {"Accept": "text/html", "Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate",
           "Sec-Fetch-Dest": "document"}  # fmt: skip
BEGIN = {"file_id": "book", "questions": ["who is ann ?"], "seed": 1, "detach": True}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs, and what must not be reached from there."""
    above = tmp_path_factory.mktemp("above")
    runs = above / "runs"
    for name in ("one", "two <b>&\"' runs#?%2e", "nothing"):
        (runs / name).mkdir(parents=True)
    made_traces.training(runs / "one" / "trajectories.jsonl")
    made_traces.hostile(runs / "two <b>&\"' runs#?%2e" / "readings.jsonl")
    made_traces.training(above / "secret" / "trajectories.jsonl")
    (runs / "out").symlink_to(above / "secret")
    (runs / "circle").symlink_to("circle")
    (runs / "one" / "leads").mkdir()
    (runs / "one" / "leads" / "readings.jsonl").symlink_to(above / "secret" / "trajectories.jsonl")
    (runs / "broken").mkdir()
    (runs / "broken" / "readings.jsonl").write_text("root:x:0:0\n")
    # What was written to last is not told by a folder's date.
    os.utime(runs / "two <b>&\"' runs#?%2e" / "readings.jsonl", (1e9, 1e9))
    os.utime(runs / "one", (1e9, 1e9))
    return runs


@pytest.fixture(scope="module")
def open_url(runs):
    """A server without a key."""
    with running(served(Arithmetic()), views=pages.views(str(runs))) as there:
        CLIENT.put(f"{there}/v1/files/book", content=DOCUMENT)
        yield there


@pytest.fixture(scope="module")
def url(runs):
    """A server with a key."""
    with running(served(Arithmetic()), key=KEY, views=pages.views(str(runs))) as there:
        CLIENT.put(f"{there}/v1/files/book", content=DOCUMENT, headers=BEARER)
        yield there


def read(url: str, headers=None, **more) -> str:
    """The id of a reading that has ended."""
    reply = CLIENT.post(f"{url}/v1/readings", json=BEGIN | more, headers=headers)
    there = f"{url}/v1/readings/{reply.json()['id']}"
    until(lambda: CLIENT.get(there, headers=headers).json()["status"] != "in_progress")
    return reply.json()["id"]


def data_of(page: str) -> str:
    return re.search(r'src="(data-\w+)/index.js"', page)[1]


# ---------------------------------------------------------------- what is shown


def test_readings_and_runs_are_listed_and_open_as_the_page_of_a_trace(open_url):
    id = read(open_url)
    listed = CLIENT.get(f"{open_url}/traces").text
    odd = "/traces/two%20%3Cb%3E%26%22%27%20runs%23%3F%252e/"
    assert re.findall(r'<li><a href="([^"]+)"', listed)[-2:] == ["/traces/one/", odd]
    assert f'href="/traces/{id}/"' in listed and "<b>&" not in listed
    for address, rows in ((f"/traces/{id}/", 1), ("/traces/one/", 2), (odd, 1)):
        page = CLIENT.get(open_url + address)
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        data = CLIENT.get(f"{open_url}{address}{data_of(page.text)}/index.js")
        assert data.headers["content-type"].startswith("text/javascript")
        assert data.text.startswith('trace.part("index",{') and data.text.count('"rows":') == 1
        assert len(re.findall(r"\[0,0,", data.text)) == rows  # file and source of each
        for reply in (page, data):
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert reply.headers["referrer-policy"] == "no-referrer"
            assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
            assert reply.headers["cross-origin-resource-policy"] == "same-origin"
    assert CLIENT.get(f"{open_url}/traces/one").headers["location"] == "/traces/one/"
    home = CLIENT.get(f"{open_url}/")
    assert "connect-src 'self'" in home.text and "https://" not in home.text


NAMES = ["..", "%2e%2e", ".", "out", "circle", "nothing", "secret", "broken", "one%2f..%2f..",
         "..%2fsecret", "%2fetc", "one%00", "%5c..", "%ff", "reading_0", "a" * 3000]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_are_looked_up_and_never_become_paths(name, open_url):
    for address in (f"/traces/{name}/", f"/traces/one/{name}/index.js", f"/traces/one/data/{name}"):
        wire = http.client.HTTPConnection(open_url.removeprefix("http://"), timeout=30)
        wire.request("GET", address)  # as it stands here
        reply = wire.getresponse()
        # A slash too many is taken away, by a way that leads nowhere either.
        assert reply.status in (404, 307) and b"root:x" not in reply.read()
        wire.close()


def test_links_that_lead_out_of_a_run_are_not_followed(open_url):
    page = CLIENT.get(f"{open_url}/traces/one/").text
    index = CLIENT.get(f"{open_url}/traces/one/{data_of(page)}/index.js").text
    assert '"sources":["trajectories"]' in index


def test_a_run_that_has_grown_is_made_again_and_who_looks_at_the_old_page_goes_on(
    tmp_path, monkeypatch
):
    trace = tmp_path / "mine" / "trajectories.jsonl"
    made_traces.training(trace)
    with running(served(Arithmetic()), views=pages.views(str(tmp_path))) as url:

        def look() -> str:
            return data_of(CLIENT.get(f"{url}/traces/mine/").text)

        def count(data: str) -> int:
            reply = CLIENT.get(f"{url}/traces/mine/{data}/index.js")
            return len(re.findall(r"\[0,0,", reply.text)) if reply.is_success else 0

        first = look()
        made_traces.training(trace, groups=2)
        assert look() == first and count(first) == 2  # a page rests for ten seconds
        monkeypatch.setattr(page_cache, "FRESH", 0.0)
        second = look()
        assert (count(first), count(second)) == (2, 6) and look() == second
        made_traces.training(trace)
        third = look()
        assert (count(first), count(second), count(third)) == (0, 6, 8)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "trajectories.jsonl"]


def test_a_page_that_takes_long_says_so_and_blocks_nobody(tmp_path, monkeypatch):
    made_traces.training(tmp_path / "mine" / "trajectories.jsonl")
    monkeypatch.setattr(page_cache, "PATIENCE", 0.1)
    go_on, make = threading.Event(), pages.make_trace

    def slowly(put, title, files, advance, data):
        def and_wait(done, of):
            advance(done, of)
            assert go_on.wait(30)

        make(put, title, files, and_wait, data)

    monkeypatch.setattr(pages, "make_trace", slowly)
    with running(served(Arithmetic()), views=pages.views(str(tmp_path))) as url:
        first = CLIENT.get(f"{url}/traces/mine/")
        assert first.status_code == 202 and '<meta http-equiv="refresh"' in first.text
        assert "1 of 2 readings are done" in first.text
        assert CLIENT.get(f"{url}/version").status_code == 200
        go_on.set()
        until(lambda: CLIENT.get(f"{url}/traces/mine/").status_code == 200)


def test_a_trace_that_cannot_be_read_is_said_and_tried_again_when_it_changed(tmp_path):
    trace = tmp_path / "mine" / "trajectories.jsonl"
    made_traces.training(trace)
    whole = trace.read_bytes()
    trace.write_bytes(whole.replace(b'"chunk": 2', b'"chunk": !', 1))
    with running(served(Arithmetic()), views=pages.views(str(tmp_path))) as url:
        reply = CLIENT.get(f"{url}/traces/mine/")
        assert reply.status_code == 500 and "line 1 of" in reply.text
        trace.write_bytes(whole)
        assert CLIENT.get(f"{url}/traces/mine/").status_code == 200


def test_a_readings_page_has_its_turns_where_they_are_few_and_its_file_is_the_same(
    open_url, monkeypatch
):
    def turns(id: str) -> bool:
        there = f"{open_url}/traces/{id}/"
        index = CLIENT.get(f"{there}{data_of(CLIENT.get(there).text)}/index.js").text
        return ",true," in index  # of the one reading: its turns were kept

    first, few, later = read(open_url), read(open_url, seed=2), read(open_url, seed=3)
    assert turns(first)
    monkeypatch.setattr(routes, "MOST_SHOWN", 10)
    assert not turns(few)
    monkeypatch.undo()
    try:
        CLIENT.put(f"{open_url}/v1/files/book", content="another text")
        refused = CLIENT.get(f"{open_url}/v1/readings/{later}/trace?turns=true")
        assert refused.status_code == 409 and refused.json()["error"]["code"] == "reading_changed"
        assert not turns(later) and turns(first)  # which was made before
    finally:
        CLIENT.put(f"{open_url}/v1/files/book", content=DOCUMENT)


def test_cancel_stops_what_runs_and_leaves_what_has_ended():
    with running(served(Arithmetic(pause=0.02)), views=pages.views(None)) as url:
        CLIENT.put(f"{url}/v1/files/book", content=DOCUMENT)
        id = CLIENT.post(f"{url}/v1/readings", json=BEGIN).json()["id"]
        there = f"{url}/v1/readings/{id}"
        shut = CLIENT.get(f"{url}/traces/{id}/")
        assert shut.status_code == 404 and "has not ended yet" in shut.text
        listed = CLIENT.get(f"{url}/traces").text
        assert f'href="/#reading={id}"' in listed and "--runs FOLDER" in listed
        until(lambda: CLIENT.get(there).json()["usage"]["turns"])
        assert CLIENT.post(f"{there}/cancel").json()["stopping"]
        until(lambda: CLIENT.get(there).json()["status"] == "cancelled")
        assert CLIENT.post(f"{there}/cancel").json()["status"] == "cancelled"
        data = data_of(CLIENT.get(f"{url}/traces/{id}/").text)
        index = CLIENT.get(f"{url}/traces/{id}/{data}/index.js").text
        assert '"no answer"' in index  # what was read until then can be looked at
        assert CLIENT.get(f"{there}/trace").text == ""
        assert CLIENT.delete(there).json()["deleted"]
        for gone in ("", f"{data}/index.js"):
            assert CLIENT.get(f"{url}/traces/{id}/{gone}").status_code == 404


# ---------------------------------------------------------------- who may look


def enter(url: str, key: str = KEY, path: str = "/traces", **headers) -> httpx2.Response:
    about = {"Origin": url, "Sec-Fetch-Site": "same-origin"} | headers
    return httpx2.post(url + path, data={"key": key}, headers=about)


def test_the_key_is_asked_for_once_and_then_a_cookie_opens_pages(url, monkeypatch):
    assert httpx2.get(f"{url}/").status_code == 200  # there is nothing in it
    assert httpx2.get(f"{url}/traces/one/").json()["error"]["code"] == "invalid_api_key"
    form = httpx2.get(f"{url}/traces/one/", headers=BROWSER)
    assert form.status_code == 401 and '<form method="post">' in form.text
    assert "one" not in re.findall(r"<title>(.*)</title>", form.text)[0]
    for wrong in ("", "secret", KEY + "x", "é"):
        reply = enter(url, wrong)
        assert reply.status_code == 401 and "set-cookie" not in reply.headers
    reply = enter(url, path="/traces/two%20runs%0d%0aSet-Cookie:%20a=b/")
    assert reply.headers["location"] == "/traces/two%20runs%0D%0ASet-Cookie%3A%20a%3Db/"
    reply = enter(url, path="/traces/one/")
    assert (reply.status_code, reply.headers["location"]) == (303, "/traces/one/")
    cookie = reply.headers["set-cookie"]
    assert {"HttpOnly", "Path=/traces", "SameSite=strict"} <= set(cookie.split("; "))
    assert KEY not in cookie and "Max-Age" not in cookie and "Secure" not in cookie
    mark = {"Cookie": cookie.split(";")[0]}
    page = httpx2.get(f"{url}/traces/one/", headers=mark)
    data = f"{url}/traces/one/{data_of(page.text)}/index.js"
    assert httpx2.get(data).status_code == 401 and httpx2.get(data, headers=mark).is_success
    assert httpx2.get(f"{url}/traces", headers=BEARER).status_code == 200
    ends, _, total = mark["Cookie"].partition("=")[2].partition(".")
    for forged in (f"{int(ends) + 1}.{total}", f"{ends}.", ".", "x", f".{total}", f"{ends}.é"):
        bad = {"Cookie": f"{cookie.partition('=')[0]}={forged}".encode("latin-1")}
        assert httpx2.get(f"{url}/traces", headers=bad).status_code == 401
    later = time.time() + sessions.LASTS
    monkeypatch.setattr(sessions.time, "time", lambda: later)
    assert httpx2.get(f"{url}/traces", headers=mark).status_code == 401


def test_the_cookie_opens_nothing_else(url):
    """What another site makes a browser send has the cookie at most: forms, scripts, pictures."""
    mark = {"Cookie": enter(url).headers["set-cookie"].split(";")[0]}
    form = mark | {"Content-Type": "text/plain", "Origin": "http://evil.example"}
    asked = '{"file_id": "book", "questions": ["who ?"]}'
    before = CLIENT.get(f"{url}/v1/readings", headers=BEARER).json()
    for method, path in (("POST", "/v1/readings"), ("POST", "/v1/chat/completions"),
                         ("POST", "/v1/files"), ("PUT", "/v1/files/book"), ("GET", "/v1/files"),
                         ("DELETE", "/v1/files/book"), ("GET", "/v1/files/book/content"),
                         ("GET", "/v1/readings"), ("GET", "/metrics"), ("POST", "/"),
                         ("PUT", "/traces"), ("DELETE", "/traces/one/"), ("GET", "/tracesx"),
                         ("GET", "/traces/../v1/files")):  # fmt: skip
        reply = CLIENT.request(method, url + path, content=asked, headers=form)
        assert reply.status_code == 401, (method, path)
    assert CLIENT.get(f"{url}/v1/readings", headers=BEARER).json() == before
    long = CLIENT.post(f"{url}/traces", content=b"key=" + b"x" * 5000)
    assert long.status_code == 413
    assert CLIENT.post(f"{url}/traces", content=b"a=1&" * 900 + b"key=\xff").status_code == 401


def test_the_cookie_ends_with_the_server(url, runs):
    mark = {"Cookie": enter(url).headers["set-cookie"].split(";")[0]}
    with running(served(Arithmetic()), key=KEY, views=pages.views(str(runs))) as other:
        assert httpx2.get(f"{other}/traces", headers=mark).status_code == 401
        with httpx2.Client() as browser:  # which has one jar for all ports of a machine
            for there in (url, other):
                browser.post(f"{there}/traces", data={"key": KEY})
            for there in (url, other):
                assert browser.get(f"{there}/traces").status_code == 200


@pytest.mark.parametrize("keyed", [True, False])
def test_another_sites_page_gets_nothing(keyed, url, open_url):
    """Data are scripts, and a browser would run those of any server in any page."""
    there = url if keyed else open_url
    mark = {"Cookie": enter(url).headers["set-cookie"].split(";")[0]} if keyed else {}
    page = CLIENT.get(f"{there}/traces/one/", headers=mark).text
    data = f"{there}/traces/one/{data_of(page)}/index.js"
    script = {"Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
    for site in ("cross-site", "same-site"):  # same-site: another port of this machine, too
        foreign = mark | script | {"Sec-Fetch-Site": site}
        assert CLIENT.get(data, headers=foreign).status_code == 403
        framed = foreign | {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert CLIENT.get(f"{there}/traces/one/", headers=framed).status_code == 403
        link = mark | BROWSER | {"Sec-Fetch-Site": site}
        assert CLIENT.get(f"{there}/traces/one/", headers=link).status_code == 200
    own = mark | script | {"Sec-Fetch-Site": "same-origin"}
    assert CLIENT.get(data, headers=own).status_code == 200
    if keyed:
        assert enter(url, **{"Sec-Fetch-Site": "cross-site"}).status_code == 403
        for origin in ("http://evil.example", "null", "http://["):  # of an older browser, or worse
            old = httpx2.post(f"{url}/traces", data={"key": KEY}, headers={"Origin": origin})
            assert old.status_code == 403
            assert httpx2.get(f"{url}/", headers={"Origin": origin}).status_code == 403


def test_without_a_key_the_pages_own_origin_passes_and_others_do_not(open_url):
    own = {"Origin": open_url, "Sec-Fetch-Site": "same-origin"}
    begun = CLIENT.post(f"{open_url}/v1/readings", json=BEGIN, headers=own)
    assert begun.status_code == 202
    port = open_url.rpartition(":")[2]
    name = {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"}
    assert CLIENT.post(f"{open_url}/v1/readings", json=BEGIN, headers=name).status_code == 202
    for bad in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"},
                {"Origin": "http://localhost:3000"}, {"Origin": "http://evil.example",
                "Host": "evil.example"}):  # fmt: skip
        for path in ("/", "/traces", "/traces/one/", "/v1/readings"):
            reply = CLIENT.get(open_url + path, headers=bad)
            assert reply.status_code == 403, (bad, path)
    assert CLIENT.post(f"{open_url}/traces", data={"key": "x"}).status_code == 405


def test_a_folder_of_runs_that_is_none_is_said(runs):
    with pytest.raises(ValueError, match=f"is a run itself; .* --runs {runs}"):
        pages.views(str(runs / "one"))
    with pytest.raises(ValueError, match="there is no folder nowhere with runs to show"):
        pages.views("nowhere")
