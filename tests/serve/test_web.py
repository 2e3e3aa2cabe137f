"""The door: probes, pages of other sites, and what HTTP does to a reply before anybody reads it."""

import asyncio
import contextlib
import re
import threading
import time
from types import SimpleNamespace

import h11
import httpx2
import pytest

from notepad_jax import cli
from notepad_jax.programs import warm_up
from notepad_jax.serve import health
from notepad_jax.serve.http.web import Door
from notepad_jax.types import CompleterFailed
from tests.serve.fake import Arithmetic, running, served, until
from tests.serve.program import ROOT, program

SITE = "https://chat.example.org"


@pytest.mark.parametrize("key", [None, "secret-1"], ids=["routes", "door"])
def test_a_reply_to_what_turned_out_to_be_no_http_is_dropped(key):
    """The head was good and the body is not: uvicorn has said so, and takes no other reply."""
    said, come = [], [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message):
        said.append(message["status"])
        raise h11.LocalProtocolError("can't handle event type Response when state=MUST_CLOSE")

    async def receive():
        return come.pop(0)

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    asyncio.run(Door(app, key, key, ())(scope, receive, send))
    assert said == [401 if key else 200] and not come  # it stayed until the line was closed


# ---------------------------------------------------------------- alive and ready


def probed(url: str, path: str) -> tuple[int, str]:
    reply = httpx2.get(url + path, timeout=20)
    return reply.status_code, reply.json()["error"]["message"] if reply.content else ""


def test_a_server_is_alive_before_it_is_ready_and_needs_no_key_to_say_so():
    missing = ["3 of 8 programs are compiled"]
    policy = served(Arithmetic(), missing=lambda: missing[0])
    with running(policy, key="secret-1") as url:
        assert probed(url, "/health") == (200, "")
        assert probed(url, "/ready") == (503, missing[0])
        missing[0] = ""
        assert probed(url, "/ready") == (200, "")


def test_an_engine_that_is_silent_is_alive_for_a_while_and_not_ready(monkeypatch):
    """It may be compiling: who ends a server that compiles never gets one that is ready."""
    monkeypatch.setattr(health, "SOON", 0.01)
    monkeypatch.setattr(health, "PATIENCE", 0.01)

    async def never():
        await asyncio.sleep(60)

    with running(served(Arithmetic(), alive=never)) as url:
        assert probed(url, "/health") == (200, "")
        assert "may be compiling" in probed(url, "/ready")[1]
        monkeypatch.setattr(health, "SILENT", 0.0)
        assert "has not answered" in probed(url, "/health")[1]


def test_an_engine_that_nobody_asked_is_not_silent(monkeypatch):
    """The first probe after half an hour may meet a launch."""
    monkeypatch.setattr(health, "SOON", 0.01)
    silent = []

    async def alive():
        await asyncio.sleep(60 if silent else 0)

    with running(served(Arithmetic(), alive=alive)) as url:
        assert probed(url, "/health") == (200, "")
        silent.append(1)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
        monkeypatch.setattr(health, "time", clock)
        assert probed(url, "/health") == (200, "")
        monkeypatch.setattr(health, "SILENT", 0.0)
        assert "has not answered" in probed(url, "/health")[1]


def test_a_probe_does_not_wait_for_an_engine_that_compiles(monkeypatch):
    """Who cancels what such an engine was asked waits for it all the same."""
    monkeypatch.setattr(health, "SOON", 0.01)
    monkeypatch.setattr(health, "PATIENCE", 0.01)
    compiled, asked = threading.Event(), []

    async def alive():
        asked.append(1)
        while not compiled.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    with running(served(Arithmetic(), alive=alive)) as url:
        try:
            for _ in range(2):
                assert httpx2.get(f"{url}/health", timeout=5).status_code == 200
            assert httpx2.get(f"{url}/ready", timeout=5).status_code == 503
            assert len(asked) == 1
        finally:
            compiled.set()
        until(lambda: httpx2.get(f"{url}/ready").status_code == 200)


def test_an_engine_that_failed_is_neither():
    streamer = Arithmetic()
    streamer.broken = CompleterFailed("the device is on fire")
    with running(served(streamer)) as url:
        assert probed(url, "/health") == probed(url, "/ready") == (503, "the device is on fire")


def test_a_program_that_cannot_be_compiled_is_said_and_the_server_is_never_ready():
    said, compiled = [], []
    programs = warm_up.Programs(SimpleNamespace(warn=said.append, say=said.append))
    programs.plan_these([lambda: compiled.append(1), lambda: 1 / 0, lambda: compiled.append(3)])
    assert programs.missing() == "0 of 3 programs are compiled"
    with programs.compiling():
        until(lambda: said)
    assert compiled == [1] and said == [programs.missing()] and "division by zero" in said[0]


@pytest.mark.slow  # its cache of compiled programs is empty
def test_programs_are_compiled_at_the_start_and_then_no_request_compiles(tmp_path, monkeypatch):
    """Those that the server's cache of compiled programs gets are all there when it is ready."""
    cache = tmp_path / "cache"
    few = {"engine.slots": 1, "engine.max_prompt": 48, "engine.pages": 9, "engine.page_size": 16,
           "engine.row_tokens": 0, "evaluate.chunk_size": 16, "reading.chunk_size": 16,
           "reading.max_question": 8, "reading.max_memory": 4, "reading.max_answer": 4,
           "serve.warm_up": True}  # fmt: skip
    sizes = [f"--config.{key}={value}" for key, value in few.items()]
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with program(ROOT / "data" / "starter", tmp_path, sizes=sizes) as url:
        until(lambda: httpx2.get(f"{url}/ready", timeout=60).status_code == 200, 200)
        ready = re.search(r"ready: all (\d+) programs", (tmp_path / "said").read_text())
        assert ready
        parts = [{"type": "text", "text": one} for one in ("Ada is amber . " * 30, "who ?")]
        asked = {"model": "starter:notepad", "messages": [{"role": "user", "content": parts}]}
        name = httpx2.get(f"{url}/v1/models").json()["data"][1]["id"]
        before = sorted(cache.rglob("*-cache"))
        reply = httpx2.post(f"{url}/v1/chat/completions", json=asked | {"model": name}, timeout=60)
        assert reply.status_code == 200 and len(before) >= int(ready[1])
        assert sorted(cache.rglob("*-cache")) == before


# ---------------------------------------------------------------- pages of other sites

PREFLIGHT = {"Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip


@pytest.mark.parametrize("key", [None, "secret-1"], ids=["nokey", "key"])
def test_no_page_of_another_site_may_ask_unless_it_is_named(key):
    shown = {"Authorization": "Bearer secret-1"} if key else {}
    with running(served(Arithmetic()), key=key) as url:
        reply = httpx2.get(f"{url}/v1/models", headers={"Origin": SITE, **shown})
        assert "access-control-allow-origin" not in reply.headers
        asked = httpx2.options(f"{url}/v1/models", headers={"Origin": SITE, **PREFLIGHT})
        assert asked.status_code == (401 if key else 403)
    with running(served(Arithmetic()), key=key, origins=(SITE,)) as url:
        asked = httpx2.options(f"{url}/v1/models", headers={"Origin": SITE, **PREFLIGHT})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == SITE
        assert "authorization" in asked.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in asked.headers
        reply = httpx2.get(f"{url}/v1/models", headers={"Origin": SITE, **shown})
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == SITE
        for other in ("https://evil.example", f"{SITE}.evil.example", "null"):
            reply = httpx2.get(f"{url}/v1/models", headers={"Origin": other, **shown})
            assert "access-control-allow-origin" not in reply.headers
            assert reply.status_code == (200 if key else 403)  # browsers keep it from the page
            asked = httpx2.options(f"{url}/v1/models", headers={"Origin": other, **PREFLIGHT})
            assert asked.status_code in (400, 401, 403)


def test_a_page_that_may_ask_reads_why_it_was_refused():
    with running(served(Arithmetic()), key="secret-1", origins=(SITE,)) as url:
        reply = httpx2.get(f"{url}/v1/models", headers={"Origin": SITE})
        assert reply.status_code == 401 and reply.headers["connection"] == "close"
        assert reply.headers["access-control-allow-origin"] == SITE
        asked = httpx2.options(f"{url}/v1/models", headers={"Origin": SITE, **PREFLIGHT})
        assert asked.headers["connection"] == "close"  # who has not shown the key may not wait


@pytest.mark.parametrize("origins, said", [
    ("*", "without a key every web page could ask"),
    ("chat.example.org", "an origin is a scheme and a host"),
    ("https://chat.example.org/", "an origin is a scheme and a host"),
])  # fmt: skip
def test_what_is_no_origin_is_said_at_once(origins, said, capsys, monkeypatch):
    monkeypatch.delenv("NOTEPAD_API_KEY", raising=False)
    assert cli.main(["serve", "--port", "0", f"--config.serve.cors={origins}"]) == 1
    assert said in capsys.readouterr().err
