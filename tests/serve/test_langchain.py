"""langchain-openai, as people install it, against the server.

All are slow: only `make test-slow` installs it (the extra `clients`), and where it is absent they
fail, for a client that nobody runs is not supported. The policy is arithmetic. Nothing leaves
this machine: LangChain's tracing is only on where a variable says so, and its tokenizer, tiktoken,
which downloads its words, is not asked for anything.
"""

import asyncio
import importlib
import itertools
import os

import httpx2
import openai
import pytest

from tests.serve.fake import DOCUMENT, NAME, Arithmetic, library, running, served

pytestmark = pytest.mark.slow

KEY = "secret-1"
NOTEPAD = f"{NAME}:notepad"
TALK = [("system", "the secret code"), ("human", "who is ann ?"), ("ai", "red"), ("human", "bob")]
ROLES = {"system": "system", "human": "user", "ai": "assistant"}


@pytest.fixture(scope="module", autouse=True)
def untraced():
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("LANGCHAIN", "LANGSMITH"))]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def url():
    with running(served(Arithmetic()), key=KEY) as there:
        httpx2.put(f"{there}/v1/files/book", content=DOCUMENT, headers=authorised())
        yield there


@pytest.fixture(scope="module")
def run():
    """One loop for all: LangChain shares a client's connections between its objects."""
    with asyncio.Runner() as runner:
        yield runner.run


def authorised() -> dict:
    return {"Authorization": f"Bearer {KEY}"}


def chat(url: str, model: str = NAME, **options):
    try:
        stock = importlib.import_module("langchain_openai")
    except ModuleNotFoundError as missing:
        pytest.fail(f"{missing}; make test-slow installs it: pip install -c constraints.txt "
                    f"-e '.[clients]'")  # fmt: skip
    about = dict(base_url=f"{url}/v1", api_key=KEY, model=model, seed=4, max_retries=0, timeout=60)
    return stock.ChatOpenAI(**about | options)


def plain(url: str, model: str = NAME, **body) -> dict:
    """What the server says to a client without any library."""
    reply = httpx2.post(f"{url}/v1/chat/completions", json={"model": model, "seed": 4} | body,
                        headers=authorised())  # fmt: skip
    return reply.raise_for_status().json()


def asked(file: bool = True) -> list:
    document = {"type": "file", "file": {"file_id": "book"}}
    document = document if file else {"type": "text", "text": DOCUMENT}
    content = [document, {"type": "text", "text": "who ?"}]
    return [{"role": "user", "content": content}]


def counted(said) -> tuple:
    usage = said.usage_metadata
    return usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]


def test_a_conversation_whole_and_streamed(url):
    messages = [{"role": ROLES[who], "content": text} for who, text in TALK]
    true = plain(url, messages=messages, max_tokens=9)
    client = chat(url, max_completion_tokens=9, stream_usage=True)
    whole = client.invoke(TALK)
    assert whole.content == true["choices"][0]["message"]["content"] != ""
    usage = true["usage"]
    assert counted(whole) == (usage["prompt_tokens"], 9, usage["prompt_tokens"] + 9)
    assert whole.usage_metadata["input_token_details"]["cache_read"] > 0
    told = whole.response_metadata
    assert told["finish_reason"] == "length" and told["model_name"] == NAME
    assert told["system_fingerprint"] == "np-7" and told["id"].startswith("chatcmpl-")
    chunks = list(client.stream(TALK))
    assert len([chunk for chunk in chunks if chunk.content]) > 2
    streamed = sum(chunks[1:], chunks[0])
    assert streamed.content == whole.content and counted(streamed) == counted(whole)
    assert streamed.response_metadata["finish_reason"] == "length"
    # What it said goes on being a message, as an agent keeps it.
    assert client.invoke([*TALK, whole, ("human", "and bob ?")]).content


def test_async_and_batches_say_the_same(url, run):
    client = chat(url, max_completion_tokens=7)

    async def go() -> tuple:
        streamed = "".join([chunk.content async for chunk in client.astream(TALK)])
        many = await client.abatch([TALK, "who is ann ?"] * 6)
        return (await client.ainvoke(TALK)).content, streamed, [one.content for one in many]

    whole, streamed, many = run(go())
    assert whole == streamed == client.invoke(TALK).content != ""
    assert many == [whole, client.invoke("who is ann ?").content] * 6
    assert [one.content for one in client.batch([TALK] * 3)] == [whole] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_one_a_token(url, stream):
    client = chat(url, max_completion_tokens=6).bind(logprobs=True, top_logprobs=2)
    if stream:
        chunks = list(client.stream(TALK))
        said = sum(chunks[1:], chunks[0])
    else:
        said = client.invoke(TALK)
    content = said.response_metadata["logprobs"]["content"]
    assert [one["logprob"] for one in content] == [-n / 8 for n in range(1, 7)]
    assert "".join(one["token"] for one in content) == said.content
    assert all(len(one["top_logprobs"]) == 2 for one in content)


def test_stop_strings_are_the_servers(url):
    client = chat(url, max_completion_tokens=20)
    text = client.invoke("who is ann ?").content
    word = text.split()[3]
    cut = client.invoke("who is ann ?", stop=[word])
    assert cut.content == text[: text.index(word)] and word not in cut.content
    assert cut.response_metadata["finish_reason"] == "stop"


@pytest.mark.parametrize("file", [True, False], ids=["file", "inline"])
def test_a_document_is_read_and_its_memories_break_nothing(url, file, run):
    messages = asked(file)
    true = plain(url, NOTEPAD, messages=messages)
    answer = true["choices"][0]["message"]["content"]
    whole = chat(url, NOTEPAD).invoke(messages)
    assert whole.content == answer != ""
    assert counted(whole)[:2] == (
        true["usage"]["prompt_tokens"], true["usage"]["completion_tokens"]
    )  # fmt: skip
    told = whole.response_metadata["token_usage"]["notepad"]
    assert told == true["usage"]["notepad"] and told[0]["turns"] > 10
    ways = [
        {}, {"stream_usage": True}, {"extra_body": {"notepad": {"as": "chunks"}}},
        {"model_kwargs": {"stream_options": {"include_notepad": True, "include_usage": True}}},
        {"extra_body": {"notepad": {"as": "reasoning"}}},
    ]  # fmt: skip
    for way in ways:
        chunks = list(chat(url, NOTEPAD, **way).stream(messages))
        assert "".join(chunk.content for chunk in chunks) == answer, way
        streamed = sum(chunks[1:], chunks[0])
        assert streamed.response_metadata["finish_reason"] == true["choices"][0]["finish_reason"]
        if "stream_usage" in way or "model_kwargs" in way:
            assert counted(streamed) == counted(whole)

    async def go() -> str:
        client = chat(url, NOTEPAD, **ways[2])
        return "".join([chunk.content async for chunk in client.astream(messages)])

    assert run(go()) == answer


def test_what_is_not_supported_is_said_by_name(url):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    schema = {"title": "Answer", "type": "object", "properties": {"code": {"type": "string"}}}
    client = chat(url)
    by_schema = "response_format"  # which this server would write where llguidance is
    refused = {
        "tools": client.bind_tools([tool]),
        "response_format": client.with_structured_output(schema, method="json_schema"),
        "presence_penalty": chat(url, presence_penalty=0.5),
    }
    for param, asking in refused.items():
        with pytest.raises(openai.BadRequestError) as error:
            asking.invoke("who ?")
        assert error.value.param == param
        assert ("llguidance" if param == by_schema else "not supported") in error.value.message
    with pytest.raises(openai.NotFoundError):
        chat(url, "gpt-4").invoke("who ?")
    with pytest.raises(openai.AuthenticationError):
        chat(url, api_key="wrong").invoke("who ?")


def test_impatient_clients_that_ask_again_find_the_reading_that_they_began(monkeypatch):
    """Nothing is heard for 0.4 s, it hangs up and comes again, as often as it takes."""
    drawn = itertools.count(1)  # by the server, for requests without a seed: some answer nothing
    monkeypatch.setattr("notepad_jax.serve.app.secrets.randbits", lambda bits: next(drawn))
    streamer = Arithmetic(pause=0.1)
    with library(streamer=streamer, text=DOCUMENT[:60]) as (url, _):
        client = chat(url, NOTEPAD, timeout=0.4, max_retries=9, temperature=1.0, seed=None)
        said = client.invoke(asked())
        (told,) = said.response_metadata["token_usage"]["notepad"]
        assert len(streamer.asked) == told["turns"] > 4  # of 0.1 s at least
        assert said.content and streamer.seats == 0


def test_a_server_that_is_busy_is_asked_again():
    """One slot, no queue: three at a time; those who get a 429 come back when it says."""
    with running(served(Arithmetic(slots=1, pause=0.05)), waiting=0, key=KEY) as url:
        client = chat(url, max_completion_tokens=4, max_retries=6)
        true = plain(url, messages=[{"role": "user", "content": "who ?"}], max_tokens=4)
        many = client.batch(["who ?"] * 3)
    assert [one.content for one in many] == [true["choices"][0]["message"]["content"]] * 3
