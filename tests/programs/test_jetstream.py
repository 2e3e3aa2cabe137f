"""`serve --jetstream`: how it starts and refuses to, and what it says, beside `serve`."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import httpx2
import pytest
from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

from notepad_jax import cli
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.programs import jetstream
from tests import chat_models

ROOT = Path(__file__).parents[2]
STARTER = ROOT / "data" / "starter"


@pytest.mark.parametrize(
    "more, said",
    [
        (["--host", "0.0.0.0"], "without a key a server only listens on this machine"),
        (["--port", "70000"], "a port is a number up to 65535"),
        (["--config.policy="], "there is nothing to serve; give --policy FOLDER"),
        (["--rl"], "--rl is of OpenAI's API"),
        (["--files", "kept"], "--files is of OpenAI's API"),
        (["--config.engine.replicas=2"], "JetStream has one engine"),
        (["--policy", "no/such"], "there is no folder no/such"),
    ],
    ids=["open", "port", "nobody", "rl", "files", "replicas", "policy"],
)
def test_a_server_that_cannot_start_says_why_at_once(more, said, capsys, monkeypatch):
    monkeypatch.delenv("NOTEPAD_API_KEY", raising=False)
    assert cli.main(["serve", "--jetstream", "--port", "0", *more]) == 1
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_anything_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert cli.main(["serve", "--jetstream", "--port", port]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_there_are_as_many_slots_as_the_cache_has_whole_contexts():
    """100 + 28 tokens are 8 pages of 16: 50 pages hold 6 of them."""
    sizes = dict(page_size=16, max_prompt=100, max_new_tokens=28, steps_per_launch=4)
    settings = EngineSettings(slots=64, pages=50, row_tokens=64, top_logprobs=20, **sizes)
    assert jetstream.alone(settings).slots == 6
    assert jetstream.alone(EngineSettings(slots=3, pages=50, row_tokens=64, **sizes)).slots == 3


# ---------------------------------------------------------------- the program


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing, mend",
    [
        ("grpc", "needs grpc, which is not installed; pip install 'notepad-jax[jetstream]'"),
        ("jetstream", "pip install --no-deps google-jetstream"),
    ],
)
def test_what_is_not_installed_is_one_line(missing, mend, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ImportError('none', name='{missing}')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "notepad_jax", "serve", "--jetstream", "--port", "0"], timeout=200,
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and mend in done.stderr
    assert len(done.stderr.splitlines()) == 1


@contextlib.contextmanager
def program(policy: Path, folder: Path, *more: str, times: int = 1):
    """`notepad-jax serve`, and where it listens; ended by Ctrl-C, so many times."""
    words = ["-m", "notepad_jax", "serve", "--policy", str(policy), "--port", "0", *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    told = folder / "said"
    with told.open("w+") as said:
        # A shell may have had Ctrl-C ignored here, and what is ignored is inherited.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        running = subprocess.Popen(
            [sys.executable, *words], env=environment, stderr=said, stdout=said, cwd=ROOT
        )
        signal.signal(signal.SIGINT, before)
        try:
            until(lambda: "Ctrl-C ends" in told.read_text() or running.poll() is not None)
            found = re.search(r" at (\S+) (by|\()", told.read_text())
            assert found, told.read_text()
            yield found[1]
            for _ in range(times):
                running.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert running.wait(60) == 130
            assert "Traceback" not in told.read_text()
            assert told.read_text().splitlines()[-1] == "notepad-jax: stopped"
        finally:
            running.kill()
            running.wait(60)


def until(so) -> None:
    end = time.monotonic() + 240
    while not so():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def call(stub, prompt: str, limit: int, **metadata):
    content = jetstream_pb2.DecodeRequest.TextContent(text=prompt)
    request = jetstream_pb2.DecodeRequest(text_content=content, max_tokens=limit)
    given = [(name, str(value)) for name, value in metadata.items()]
    return stub.Decode(request, metadata=given, timeout=200)


def said(stub, prompt: str, limit: int, **metadata) -> tuple[str, list[int]]:
    samples = [r.stream_content.samples[0] for r in call(stub, prompt, limit, **metadata)]
    return "".join(s.text for s in samples), [i for s in samples for i in s.token_ids]


PROMPTS = ["the secret code of bob is", "ann says: caf\u00e9 \u65e5\u672c\u8a9e", "b", "who ? " * 9]


@pytest.mark.slow
def test_it_says_what_serve_says_and_outlives_its_clients(tmp_path):
    """A chat model of random weights, whose tokens are bytes and halves of characters."""
    policy = chat_models.folder(tmp_path / "chats")
    sizes = [
        "--config", "chat", "--config.reading.chunk_size=48", "--config.evaluate.chunk_size=48",
        "--config.reading.max_question=24", "--config.reading.max_memory=12",
        "--config.reading.max_answer=12", "--config.engine.row_tokens=0",
        "--config.engine.slots=4", "--config.engine.page_size=16", "--config.engine.pages=192",
        "--config.serve.max_completion=512", "--config.serve.max_prompt=128",
    ]  # fmt: skip
    asked = [(p, how) for p in PROMPTS for how in ({"temperature": 0}, {"seed": 5})]
    with program(policy, tmp_path, "--served-name", "chats", *sizes) as url:
        exact = []
        for prompt, how in asked:
            body = {"model": "chats", "prompt": prompt, "max_tokens": 24, "return_token_ids": True}
            reply = httpx2.post(f"{url}/completions", json=body | how, timeout=200).json()
            exact.append((reply["choices"][0]["text"], reply["choices"][0]["token_ids"]))
    with program(policy, tmp_path, "--jetstream", *sizes, times=2) as place:
        with grpc.insecure_channel(place) as channel:
            stub = jetstream_pb2_grpc.OrchestratorStub(channel)
            found: list = [None] * len(asked)

            def ask(n: int) -> None:
                found[n] = said(stub, asked[n][0], 24, **asked[n][1])

            leaving = [call(stub, "b", 512, temperature=0) for _ in range(6)]
            next(leaving[0])
            threads = [threading.Thread(target=ask, args=(n,)) for n in range(len(asked))]
            for thread in threads:
                thread.start()
            for one in leaving:
                one.cancel()
            for thread in threads:
                thread.join(240)
            assert found == exact
            with pytest.raises(grpc.RpcError, match="the most here is"):
                said(stub, "who ? " * 400, 24)
            last = call(stub, "b", 512, temperature=0)
            next(last)  # and Ctrl-C comes, and again


@pytest.mark.slow
def test_the_commands_of_its_section_of_the_servers_page(tmp_path, capsys):
    _, section = (ROOT / "docs" / "server.md").read_text(encoding="utf-8").split("\n## Behind Jet")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    (commands,) = [block.splitlines() for kind, block in blocks if not kind]
    (python,) = [block for kind, block in blocks if kind == "python"]
    pinned = re.search(r"^google-jetstream==\S+", (ROOT / "constraints.txt").read_text(), re.M)
    assert commands[1] == f"pip install --no-deps {pinned[0]}"
    assert commands[2].startswith("notepad-jax serve --policy") and "--jetstream" in commands[2]
    with program(STARTER, tmp_path, "--jetstream") as place:
        exec(compile(python.replace("localhost:9000", place), "server.md", "exec"), {})
    said = re.findall(r"^# => (.*)$", python, re.MULTILINE)
    assert [capsys.readouterr().out] == said != []
