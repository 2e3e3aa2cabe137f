"""Replies by a JSON schema: whom the grammar reaches, and what HTTP makes of it."""

import dataclasses
import importlib.util
import json

import httpx2
import openai
import pytest

from tests.serve.fake import NAME, Arithmetic, running, served
from tests.serve.program import ROOT, program

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["code", "sure"],
    "properties": {"code": {"type": "string", "enum": ["amber", "falcon", "onyx"]},
                   "sure": {"type": "boolean"}},
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}
PARTS = [{"type": "text", "text": text} for text in ("bob is blue . ann is red", "who ?")]
ASKED = {
    "/v1/completions": {"model": NAME, "prompt": "who is ann ?"},
    "/v1/chat/completions": {"model": NAME, "messages": [{"role": "user", "content": "who ?"}]},
    "reading": {"model": f"{NAME}:notepad", "messages": [{"role": "user", "content": PARTS}]},
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Known:
    """A `types.Grammar` that the fake, which draws nothing, never asks."""

    schema: str

    def matcher(self, stop_ids):
        raise AssertionError("nobody draws here")


def known(schema: str) -> Known:
    if "impossible" in schema:
        raise ValueError("the key 'impossible' is not known")
    return Known(schema)


def post(url: str, kind: str, **more) -> httpx2.Response:
    path = kind if kind in ("/v1/completions", "/v1/chat/completions") else "/v1/chat/completions"
    return httpx2.post(url + path, json=ASKED[kind] | more, timeout=60)


@pytest.mark.parametrize("kind", ASKED)
def test_a_schema_reaches_the_answer_and_no_memory(kind):
    streamer = Arithmetic()
    with running(served(streamer, grammar=known)) as url:
        assert post(url, kind, response_format=FORMAT, n=2).status_code == 200
        grammars = [sampling.grammar for _, sampling in streamer.asked]
        answers = [one for one in grammars if one is not None]
        assert answers == [Known(json.dumps(SCHEMA))] * 2
        assert (len(grammars) > 2) is (kind == "reading")  # memories are written as ever
        streamer.asked.clear()
        assert post(url, kind, response_format={"type": "text"}).status_code == 200
        assert not any(sampling.grammar for _, sampling in streamer.asked)


@pytest.mark.parametrize("kind", ASKED)
def test_where_it_is_not_installed_and_where_it_cannot_be_followed_a_line_says_so(kind):
    with running(served(Arithmetic())) as url:
        error = post(url, kind, response_format=FORMAT).json()["error"]
        assert error["param"] == "response_format" and "\n" not in error["message"]
        assert "pip install 'notepad-jax[structured]'" in error["message"]
    with running(served(Arithmetic(), grammar=known)) as url:
        bad = {"type": "json_schema", "json_schema": {"schema": {"impossible": 1}}}
        reply = post(url, kind, response_format=bad)
        assert reply.status_code == 400 and "is not known" in reply.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llguidance") is None, reason="needs llguidance")
def test_a_policy_writes_what_the_schema_allows_streamed_or_not(tmp_path):
    """The starter has never seen JSON."""
    starter = ROOT / "data" / "starter"
    few = {"engine.slots": 4, "engine.max_prompt": 96, "engine.pages": 40, "engine.page_size": 16,
           "engine.row_tokens": 64, "evaluate.chunk_size": 32, "reading.chunk_size": 32,
           "reading.max_memory": 12, "reading.max_answer": 40, "serve.max_completion": 40,
           "serve.warm_up": False}  # fmt: skip
    sizes = [f"--config.{key}={value}" for key, value in few.items()]
    with program(starter, tmp_path, "--served-name", "reader", sizes=sizes) as url:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
            document = "the secret code of Ada is amber . the secret code of Hugo is falcon ."
            parts = [{"type": "text", "text": text} for text in (document, "code of Ada ?")]
            how = dict(
                model="reader:notepad", messages=[{"role": "user", "content": parts}], n=3,
                temperature=1.0, seed=1, response_format=FORMAT, logprobs=True,
            )  # fmt: skip
            whole = client.chat.completions.create(**how)
            for choice in whole.choices:
                assert choice.finish_reason == "stop"
                said = json.loads(choice.message.content)
                assert {*said} == {"code", "sure"} and said["sure"] in (True, False)
                assert all(-1e3 < one.logprob <= 0 for one in choice.logprobs.content)
            texts = [""] * 3
            for chunk in client.chat.completions.create(**how, stream=True):
                for one in chunk.choices:
                    texts[one.index] += one.delta.content or ""
            assert texts == [choice.message.content for choice in whole.choices]
        both = {"model": "reader", "prompt": "the secret code of Ada is", "max_tokens": 40,
                "seed": 2}  # fmt: skip
        plain = httpx2.post(f"{url}/v1/completions", json=both, timeout=60).json()
        bound = both | {"response_format": {"type": "json_object"}}
        said = httpx2.post(f"{url}/v1/completions", json=bound, timeout=60).json()
        assert said["choices"][0]["text"].startswith("{") and plain != said
        again = httpx2.post(f"{url}/v1/completions", json=both, timeout=60).json()
        assert again["choices"] == plain["choices"]
