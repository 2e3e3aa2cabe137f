"""Several questions about one document in one request: a choice each, and the document once."""

import asyncio
import json
import re

import httpx2
import openai
import pytest

from notepad_jax.engine.service import EngineService
from notepad_jax.serve.completions import requests
from notepad_jax.serve.completions.choices import together
from notepad_jax.serve.documents.store import Files
from notepad_jax.serve.readings import chat_model
from tests import fakes, slots
from tests.programs.test_questions import ASKED, SAYS, SETTINGS, STORY
from tests.serve.fake import NAME, TOKENIZER, Arithmetic, served

MODEL = f"{NAME}:notepad"
CLIENT = httpx2.Client(timeout=30)


def body(**more):
    return {"model": MODEL, "messages": [{"role": "user", "content": STORY}], "seed": 3} | more


def ask(url, **more):
    return CLIENT.post(f"{url}/v1/chat/completions", json=body(**more))


def alone(url, question, index):
    """The answer to one question in a request of its own, with the noise of choice `index`."""
    parts = [{"type": "text", "text": text} for text in (STORY, question)]
    said = {"messages": [{"role": "user", "content": parts}], "n": len(ASKED)}
    return ask(url, **said).json()["choices"][index]["message"]["content"]


def test_each_choice_answers_a_question_as_if_it_were_alone(url):
    reply = ask(url, questions=ASKED).json()
    answers = [one["message"]["content"] for one in reply["choices"]]
    assert [one["index"] for one in reply["choices"]] == [0, 1, 2]
    assert answers == [alone(url, question, k) for k, question in enumerate(ASKED)]
    notes = reply["usage"]["notepad"]
    assert [one["document_tokens"] for one in notes] == [len(TOKENIZER.encode(STORY))] * 3
    assert reply["usage"]["prompt_tokens"] > 3 * len(TOKENIZER.encode(STORY))


def test_a_stock_client_sends_them_and_hears_them_by_choice(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY")
    about = body()
    whole = client.chat.completions.create(**about, extra_body={"questions": ASKED})
    heard = [""] * 3
    stream = client.chat.completions.create(
        **about, extra_body={"questions": ASKED}, stream=True
    )  # fmt: skip
    for chunk in stream:
        for one in chunk.choices:
            heard[one.index] += one.delta.content or ""
    assert heard == [one.message.content for one in whole.choices]


def test_each_is_asked_on_as_any_other(url, streamer):
    reply = ask(url, questions=ASKED).json()
    parts = [{"type": "text", "text": text} for text in (STORY, ASKED[1])]
    answer = reply["choices"][1]["message"]["content"]
    said = [
        {"role": "user", "content": parts}, {"role": "assistant", "content": answer},
        {"role": "user", "content": "bob ?"},
    ]  # fmt: skip
    after = ask(url, messages=said).json()
    assert after["usage"]["notepad"] == [{"turns": 1, "document_tokens": 0}]


def test_a_system_message_stands_before_each_and_files_are_documents(url):
    system = {"role": "system", "content": "red"}
    CLIENT.put(f"{url}/v1/files/story", content=STORY.encode())
    file = [{"type": "file", "file": {"file_id": "story"}}]
    user = {"role": "user", "content": file}
    reply = ask(url, messages=[system, user], questions=["who ?"]).json()
    parts = [*file, {"type": "text", "text": "who ?"}]
    same = ask(url, messages=[system, {"role": "user", "content": parts}]).json()
    assert reply["choices"][0]["message"] == same["choices"][0]["message"]


USER = {"role": "user", "content": "who ?"}
REFUSED = [
    (dict(questions=[]), "questions", "a list of at least one text"),
    (dict(questions="who ?"), "questions", "a list of at least one text"),
    (dict(questions=["who ?", 3]), "questions", "a list of at least one text"),
    (dict(questions=["who ?"] * 129), "questions", "there are 129 questions and may be 128"),
    (dict(questions=["who ?", ""]), "questions[1]", "the question is empty"),
    (dict(questions=["who ?", "\n\t"]), "questions[1]", "the question is empty"),
    (dict(questions=["who ?", "red " * 99]), "questions[1]", "ask a shorter one"),
    (dict(questions=["who ?"], n=2), "n", "n is 2, and with questions there is one choice for"),
    (dict(questions=["who ?"], model=NAME), "questions", "takes no questions; .*:notepad does"),
    (dict(questions=["who ?"], messages=[USER, {"role": "assistant", "content": "x"}, USER]),
     "messages", "or ask in messages and leave questions out"),
]  # fmt: skip


@pytest.mark.parametrize("more, param, why", REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_asked(url, streamer, more, param, why):
    before = len(streamer.asked)
    reply = ask(url, **more)
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param
    message = reply.json()["error"]["message"]
    assert re.search(why, message) and "\n" not in message
    assert len(streamer.asked) == before


# ---------------------------------------------------------------- what it costs


def made(asked):
    """Returns the replies of an engine, and how many tokens of shared prefixes it prefilled."""
    policy = served(
        Arithmetic(), rules=fakes.rules(16), template=fakes.template("question_last")
    )  # fmt: skip
    request = requests.chat(json.loads(json.dumps(body(questions=asked))))

    async def run():
        files = Files()
        questions = chat_model.asked(policy, files, chat_model.Memories(), request)
        async with EngineService(slots.executor(SETTINGS), slots.snapshot(3, SAYS)) as service:
            courses = [
                chat_model.reading(service, policy, question, request.how.seed_of(k, 0), k)
                for k, question in enumerate(questions)
            ]
            said = [delta async for delta in together(courses)]
            return said, service.stats.prefix_tokens

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("count", [1, 8, 64])
def test_the_document_is_prefilled_once_for_all_questions(count):
    said, prefilled = made([ASKED[k % 3] for k in range(count)])
    assert {delta.index for delta in said if delta.finish} == set(range(count))
    assert prefilled == len(TOKENIZER.encode(STORY))
