"""Stock clients against the server: openai, curl, and our own (`test_langchain` has its own).

The default tests have a policy that is arithmetic behind them; the slow ones our engine, as
`notepad-jax serve` runs it, and then what HTTP says is what `ask` says.
"""

import asyncio
import concurrent.futures
import http.client
import json
import re
import socket
import subprocess
import time

import httpx2
import openai
import pytest

from notepad_jax import cli
from notepad_jax.reading.endpoint import EndpointCompleter
from notepad_jax.types import Finish, Prompt, SamplingParams, tokens
from tests import chat_models
from tests.serve.fake import NAME, TOKENIZER, Arithmetic, running, served, until
from tests.serve.program import ROOT, SIZES, command, program

WORDS = "the secret code of ann is red"
ASKED = [{"role": "user", "content": "who is ann ?"}]
DOCUMENT = "ann says the secret code of bob is blue . " * 12


@pytest.fixture(scope="module")
def url():
    with running(served(Arithmetic()), key="secret-1") as there:
        yield there


def stock(url: str, kind=openai.OpenAI, **options):
    return kind(base_url=f"{url}/v1", api_key="secret-1", max_retries=0, timeout=60, **options)


def parts(*texts: str) -> list:
    return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]


def test_openais_client_streams_what_it_gets_whole(url):
    with stock(url) as client:
        how = dict(model=NAME, messages=ASKED, seed=4, max_tokens=9, logprobs=True, top_logprobs=2)
        whole = client.chat.completions.create(**how)
        chunks = list(client.chat.completions.create(
            **how, stream=True, stream_options={"include_usage": True}
        ))  # fmt: skip
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == whole.choices[0].message.content != ""
        assert chunks[-1].usage.completion_tokens == len(whole.choices[0].logprobs.content)
        assert [model.id for model in client.models.list()] == [NAME, f"{NAME}:notepad"]
        several = client.completions.create(model=NAME, prompt=[WORDS, "who"], n=2, seed=1)
        assert len(several.choices) == 4
        read = client.chat.completions.create(model=f"{NAME}:notepad", messages=parts(WORDS, "who"))
        assert read.usage.notepad[0]["turns"] == 3
        aloud = how | {"model": f"{NAME}:notepad", "messages": parts(WORDS, "who"), "max_tokens": 4}
        whole = client.chat.completions.create(**aloud).choices[0]
        chunks = [c.choices[0] for c in client.chat.completions.create(**aloud, stream=True)]
        assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
        told = [one for c in chunks if c.logprobs for one in c.logprobs.content]
        assert told == whole.logprobs.content != []
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**how, presence_penalty=0.5)
        assert refused.value.param == "presence_penalty"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_openais_async_client_asks_many_at_once(url):
    async def go():
        async with stock(url, openai.AsyncOpenAI) as client:
            create = client.completions.create
            asked = [create(model=NAME, prompt=WORDS, seed=k) for k in range(8)]
            return await asyncio.gather(*asked)

    texts = [reply.choices[0].text for reply in asyncio.run(go())]
    assert len(texts) == 8 and {len(text.split()) for text in texts} == {7}


def test_our_own_endpoint_completer_reads_through_it(url, monkeypatch):
    monkeypatch.setenv("SERVED", "secret-1")

    async def go():
        async with EndpointCompleter(f"{url}/v1", NAME, TOKENIZER, "SERVED") as completer:
            prompt = Prompt(tokens(), TOKENIZER.encode("who is ann ?"))
            return await completer.complete(prompt, SamplingParams(0.0, 1.0, 8, (2,), 3))

    assert asyncio.run(go()).finish is Finish.LENGTH


# ---------------------------------------------------------------- our engine


@pytest.mark.slow
def test_greedy_reading_by_http_is_ask(chats, tmp_path):
    url, policy = chats
    question = "the code of bob ?"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", timeout=200) as client:
        read = client.chat.completions.create(
            model="chats:notepad", messages=parts(DOCUMENT, question), temperature=0
        )
    (tmp_path / "story.txt").write_text(DOCUMENT)
    done = command("ask", "--config", "chat", "--policy", str(policy),
                   str(tmp_path / "story.txt"), question, "--json", *SIZES)  # fmt: skip
    answer = json.loads(done.stdout)
    assert read.choices[0].message.content == answer["answer"]
    assert read.usage.notepad[0] == {
        "turns": answer["chunks"] + 1, "document_tokens": answer["tokens"]
    }  # fmt: skip


def asks(number: int) -> tuple[str, dict]:
    """What client `number` of 200 asks: one of 40 requests, of four kinds."""
    seed, kind = number % 40, number % 4
    if kind == 0:
        messages = parts(DOCUMENT[: 150 + 10 * (seed % 3)], "who is ann ?")
        about = {"model": "chats:notepad", "messages": messages, "temperature": 1.0}
        return "/v1/chat/completions", about | {"seed": seed}
    about = {"model": "chats", "seed": seed, "max_tokens": 16, "return_token_ids": True}
    if kind == 1:
        return "/v1/completions", about | {"prompt": f"{WORDS} {seed}", "n": 2, "logprobs": 1}
    chat = {"messages": ASKED, "logprobs": True, "top_logprobs": 2, "stream": kind == 3}
    return "/v1/chat/completions", about | chat


def heard(reply: httpx2.Response) -> list:
    """All that must not depend on who else asks: of each choice text, ids, logprobs, end."""
    if "event-stream" not in reply.headers["content-type"]:
        said = [[choice] for choice in reply.json()["choices"]]
    else:
        assert reply.text.endswith("data: [DONE]\n\n")
        lines = reply.text.removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        lines = [line for line in lines if not line.startswith(":")]  # still at it, where one waits
        said = [[json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]]
    found = []
    for pieces in said:
        texts = [one.get("text") or (one.get("message") or one.get("delta", {})).get("content", "")
                 for one in pieces]  # fmt: skip
        logprobs = [one["logprobs"] for one in pieces if one.get("logprobs")]
        told = [p for some in logprobs for p in some.get("token_logprobs", ())]
        told += [one["logprob"] for some in logprobs for one in some.get("content", ())]
        ids = [i for one in pieces for i in one.get("token_ids", ())]
        assert len(ids) == len(told)
        found.append(["".join(texts), ids, told, pieces[-1]["finish_reason"]])
    return found


@pytest.mark.slow
def test_200_clients_get_what_each_would_get_alone(chats):
    """On 8 slots, with a queue for 20: who finds it full is told so, and comes again."""
    url, _ = chats
    refused: list[int] = []

    def ask(client: httpx2.Client, number: int) -> list:
        path, body = asks(number)
        while True:
            reply = client.post(url + path, json=body)
            if reply.status_code != 429:
                assert reply.status_code == 200, reply.text
                return heard(reply)
            refused.append(number)
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
            time.sleep(float(reply.headers["retry-after"]) * (1 + number % 7) / 4)

    with httpx2.Client(timeout=300, limits=httpx2.Limits(max_connections=250)) as client:
        alone = [ask(client, number) for number in range(40)]
        assert not refused and len({str(one) for one in alone}) > 35
        with concurrent.futures.ThreadPoolExecutor(200) as clients:
            together = list(clients.map(lambda number: ask(client, number), range(200)))
        assert len(refused) > 100  # it was full
        for number, found in enumerate(together):
            for (text, ids, told, finish), one in zip(found, alone[number % 40], strict=True):
                assert [text, ids, finish] == [one[0], one[1], one[3]], number
                assert told == pytest.approx(one[2], abs=1e-3), number
        again = client.post(f"{url}/v1/chat/completions", json=asks(2)[1]).json()["usage"]
        cached = again["prompt_tokens_details"]["cached_tokens"]
        assert cached == again["prompt_tokens"] - 1  # all that is shared was there
        counted = client.get(f"{url}/metrics").text
        assert "num_requests_running 0.0" in counted and "num_requests_waiting 0.0" in counted
        assert "notepad:request_failed_total 0.0" in counted


@pytest.mark.slow
def test_a_connection_is_kept_for_longer_than_clients_keep_theirs(chats):
    """OpenAI's keeps one for 5 seconds: it must not be told only then that there is none."""
    wire = http.client.HTTPConnection(chats[0].removeprefix("http://"), timeout=30)
    wire.connect()
    there = wire.sock
    for pause in (6.0, 0.0):
        wire.request("GET", "/health")
        assert wire.getresponse().read() == b"" and wire.sock is there  # http.client opens others
        time.sleep(pause)


@pytest.mark.slow
def test_weights_change_between_two_completions(chats, tmp_path):
    """Runs after the others: the server keeps the new ones."""
    url, policy = chats
    other = chat_models.folder(tmp_path / "other", seed=1)
    body = {"model": "chats", "messages": ASKED, "seed": 5, "max_tokens": 12}
    with httpx2.Client(timeout=200) as client:
        post = lambda path, **body: client.post(url + path, json=body)  # noqa: E731
        before = post("/v1/chat/completions", **body).json()
        refused = post("/update_weights", folder=str(ROOT / "data" / "starter"))
        assert refused.status_code == 400 and "another shape" in refused.text
        assert post("/update_weights", folder="no/such").status_code == 400
        assert post("/update_weights", folder=str(other)).json()["policy_version"] == 1
        after = post("/v1/chat/completions", **body).json()
        assert post("/update_weights", folder=str(policy)).json()["policy_version"] == 2
        again = post("/v1/chat/completions", **body).json()
    told = [reply["choices"][0]["message"]["content"] for reply in (before, after, again)]
    assert told[0] == told[2] != told[1]
    versions = [reply["choices"][0]["policy_version"] for reply in (before, after, again)]
    assert versions == [0, 1, 2]
    prints = [reply["system_fingerprint"] for reply in (before, after, again)]
    assert prints[0] == prints[2] != prints[1]


def printed(block: str) -> str:
    """What a block of the page says that it prints."""
    return "\n".join(re.findall(r"^# => (.*)$", block, re.MULTILINE))


@pytest.mark.slow
def test_the_commands_of_the_servers_page(tmp_path, capsys):
    """Every block does what the page says that it does, over the policy that the page names; the
    page's part about JetStream is tried in tests/programs/test_jetstream.py."""
    page, _ = (ROOT / "docs" / "server.md").read_text(encoding="utf-8").split("\n## Behind Jet")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    # Runs beside one base: tests/programs/test_adapted_policies.py.
    blocks = [(kind, block) for kind, block in blocks if "--adapters" not in block]
    start, *curls = [block for kind, block in blocks if not kind]
    pythons = [block for kind, block in blocks if kind == "python"]
    assert len(blocks) == 1 + len(curls) + len(pythons) and len(curls) == 3
    command, *options = start.split()[:-2]
    assert [command, *options[:2]] == ["notepad-jax", "serve", "--policy"]
    assert start.split()[-2:] == ["--port", "8000"]
    with program(ROOT / options[2], tmp_path, *options[3:], sizes=()) as url:
        replies = [
            subprocess.run(
                ["bash", "-c", curl.replace("http://localhost:8000", url)], cwd=tmp_path,
                capture_output=True, text=True, timeout=200, check=True,
            ).stdout
            for curl in curls
        ]  # fmt: skip
        said = json.loads(replies[0])["choices"][0]["message"]["content"]
        assert said == "amber" and "answers `amber`" in page
        several = [one["message"]["content"] for one in json.loads(replies[1])["choices"]]
        assert several == ["amber", "falcon"] and "in their order: `amber` and `falcon`" in page
        sent, _, begun = replies[2].partition("}{")
        assert '"status":"processed"' in sent
        there = f"{url}/v1/readings/{json.loads('{' + begun)['id']}"
        until(lambda: httpx2.get(there).json()["status"] == "completed", 200)
        answers = [one["answer"] for one in httpx2.get(there).json()["readings"]]
        assert answers == ["amber", "falcon"] and "answers are `amber` and `falcon`" in page
        names: dict = {}
        for python in pythons:
            exec(compile(python.replace("http://localhost:8000", url), "server.md", "exec"), names)
            assert capsys.readouterr().out.rstrip("\n") == printed(python) != ""


@pytest.mark.slow
def test_a_killed_server_goes_on_with_a_reading_and_answers_the_same(tmp_path):
    starter, kept = ROOT / "data" / "starter", ("--files", str(tmp_path / "kept"))
    asked = {"file_id": "book", "questions": ["code of Ada ?", "code of Bob ?"], "samples": 2,
             "seed": 1, "temperature": 1.0, "detach": True}  # fmt: skip
    book = "the secret code of Ada is red . it is cold . the secret code of Bob is blue .\n" * 60

    def whole(there: str) -> dict:
        until(lambda: httpx2.get(there).json()["status"] != "in_progress", 200)
        return httpx2.get(there).json()

    def told(card: dict) -> list:
        return [(one["memory"], one["answer"], one["usage"]) for one in card["readings"]]

    with program(starter, tmp_path, *kept, kill=True) as url:
        httpx2.put(f"{url}/v1/files/book", content=book)

        def begin() -> dict:
            return httpx2.post(f"{url}/v1/readings", json=asked, timeout=60).json()

        first = whole(f"{url}/v1/readings/{begin()['id']}")
        there = f"/v1/readings/{begin()['id']}"
        with httpx2.stream("GET", f"{url}{there}/events", timeout=60) as following:
            pieces = following.iter_text()
            seen = next(pieces)
            while seen.count("id: ") <= 20:
                seen += next(pieces)
        assert httpx2.get(url + there).json()["status"] == "in_progress"
    seen = seen[: seen.rindex("\n\n") + 2]
    with program(starter, tmp_path, *kept) as url:
        again = whole(url + there)
        events = httpx2.get(f"{url}{there}/events").text
    # It went on: what was told before is told again, to the second, and no turn was made twice.
    assert events.startswith(seen) and events.count("event: done") == 1
    assert events.count("event: turn") == again["usage"]["turns"]
    assert again["status"] == first["status"] == "completed" and told(again) == told(first)


@pytest.mark.parametrize(
    "more, said",
    [
        (["--host", "0.0.0.0"], "without a key a server only listens on this machine"),
        (["--port", "70000"], "a port is a number up to 65535"),
        (["--host", "::2"], "without a key a server only listens on this machine"),
        (["--config.policy="], "there is nothing to serve; give --policy FOLDER"),
    ],
    ids=["open", "port", "six", "nobody"],
)
def test_a_server_that_cannot_start_says_why_at_once(more, said, capsys, monkeypatch):
    monkeypatch.delenv("NOTEPAD_API_KEY", raising=False)
    assert cli.main(["serve", "--port", "0", *more]) == 1
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_before_anything_is_read(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert cli.main(["serve", "--port", str(other.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err
