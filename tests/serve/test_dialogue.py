"""Conversations with NAME:notepad: what ordinary clients send, and what is asked afterwards."""

import base64

import httpx2
import openai
import pytest

from notepad_jax.serve.completions import messages
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.readings import dialogue
from notepad_jax.serve.readings.evidence import Origins
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.types import NO_TOKENS, TextDocument
from tests.serve.fake import NAME, TOKENIZER

WORDS = "ann says the secret code of bob is blue . " * 3
WHO, CODE, OTHER = "who is ann ?", "bob ?", "who is bob ?"
SYSTEM = {"role": "system", "content": "red"}
CLIENT = httpx2.Client(timeout=30)


def texts(*texts: str) -> list:
    return [{"type": "text", "text": text} for text in texts]


def user(content) -> dict:
    return {"role": "user", "content": content}


def assistant(content) -> dict:
    return {"role": "assistant", "content": content}


def ask(url: str, *said: dict, **more) -> httpx2.Response:
    body = {"model": f"{NAME}:notepad", "messages": said, "seed": 3} | more
    return CLIENT.post(f"{url}/v1/chat/completions", json=body)


def answer(reply: httpx2.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["message"]["content"]


# ---------------------------------------------------------------- what is which

UNDERSTOOD = [
    ([user(texts("a", "b", "q"))], (("a", "b"), "q", "q")),
    ([user("q")], ((), "q", "q")),
    ([user("a\nb\nq\n")], (("a\nb",), "q", "q")),  # `llm -f FILE q`
    ([user("\nq")], ((), "\nq", "\nq")),
    ([SYSTEM, user(texts("a", "q"))], (("a",), "red\nq", "red\nq")),
    ([user(texts("a", "q")), assistant("x"), user("r\ns")], (("a",), "q", "r\ns")),
    ([SYSTEM, user("a\nq"), assistant("x"), user(texts("r")), assistant("y"), user("s")],
     (("a",), "red\nq", "red\ns")),
]  # fmt: skip


@pytest.mark.parametrize("said, meant", UNDERSTOOD, ids=range(len(UNDERSTOOD)))
def test_what_a_conversation_means(said, meant):
    found = dialogue.dialogue(messages.messages({"messages": said}))
    assert (found.document, found.reads, found.asks) == meant
    assert found.answer == ("x" if len(said) > 2 else None)


FILE = {"type": "file", "file": {"file_id": "book"}}
REFUSED = [
    ([SYSTEM], "messages", "by turns"),
    ([assistant("x")], "messages", "by turns"),
    ([user("q"), user("r")], "messages", "by turns"),
    ([user("q"), assistant("x")], "messages", "by turns"),
    ([user("q"), SYSTEM, user("r")], "messages", "by turns"),
    ([user([FILE])], "messages[0].content", "has no text"),
    ([SYSTEM, user("q"), assistant("x"), user(texts("d", "r"))], "messages[3].content",
     "begin another conversation"),
    ([user("q"), assistant("x"), user([FILE])], "messages[2].content",
     "begin another conversation"),
]  # fmt: skip


@pytest.mark.parametrize("said, param, why", REFUSED, ids=range(len(REFUSED)))
def test_what_no_reading_answers(said, param, why):
    with pytest.raises(Refusal, match=why) as refused:
        dialogue.dialogue(messages.messages({"messages": said}))
    assert refused.value.status == 400 and refused.value.error["param"] == param


# ---------------------------------------------------------------- what is asked afterwards


def test_what_is_asked_afterwards_is_answered_by_the_memory_and_nothing_is_read_twice(
    url, streamer
):
    first = user(texts(WORDS, WHO))
    begun = len(streamer.asked)
    said = answer(ask(url, first))
    turns = len(streamer.asked) - begun
    assert turns > 3
    asked = streamer.asked[-1][0].tokens.tolist()  # question, memory and cue of the answer
    after = ask(url, first, assistant(said), user(CODE))
    answer(after)
    assert len(streamer.asked) == begun + turns + 1
    assert after.json()["usage"]["notepad"] == [{"turns": 1, "document_tokens": 0}]
    again = streamer.asked[-1][0].tokens.tolist()
    who, code = (TOKENIZER.encode(one).tolist() for one in (WHO, CODE))
    assert again != asked and _without(again, code) == _without(asked, who)
    third = ask(url, first, assistant(f" {said}\n"), user(CODE), assistant("x"), user(OTHER))
    assert answer(third) and len(streamer.asked) == begun + turns + 2


def _without(ids: list, some: list) -> list:
    at = next(k for k in range(len(ids)) if ids[k : k + len(some)] == some)
    return ids[:at] + ids[at + len(some) :]


def test_of_several_answers_the_memory_of_the_one_that_was_chosen_answers_again(url, streamer):
    first = user(texts(WORDS, WHO))
    several = ask(url, first, n=3, seed=8, temperature=1.0).json()["choices"]
    known = {one["message"]["content"]: one for one in several}
    assert len(known) > 1
    begun, seen = len(streamer.asked), set()
    for said in known:
        answer(ask(url, first, assistant(said), user(CODE)))
        seen.add(streamer.asked[-1][0].tokens.tobytes())
    assert len(streamer.asked) == begun + len(known) and len(seen) > 1


def test_what_nobody_remembers_is_read_again_with_its_own_question(url):
    said = [user(texts(WORDS, WHO)), assistant("never said"), user(CODE)]
    first = ask(url, *said)
    assert first.json()["usage"]["notepad"][0]["turns"] > 3
    assert first.json()["usage"]["notepad"][0]["document_tokens"] > 0
    known = ask(url, *said)  # and is remembered from then on
    assert known.json()["usage"]["notepad"][0]["turns"] == 1
    assert answer(known) == answer(first)


OTHERS = {
    "document": [user(texts(f"{WORDS} red", WHO))], "question": [user(texts(WORDS, OTHER))],
    "system": [SYSTEM, user(texts(WORDS, WHO))],
}  # fmt: skip


@pytest.mark.parametrize("changed", OTHERS.values(), ids=OTHERS)
def test_another_document_or_question_is_another_reading(url, changed):
    said = answer(ask(url, user(texts(WORDS, WHO))))
    reply = ask(url, *changed, assistant(said), user(CODE))
    assert reply.json()["usage"]["notepad"][0]["turns"] > 3


def test_another_limit_is_another_reading(url):
    said, limits = answer(ask(url, user(texts(WORDS, WHO)))), {"notepad": {"max_memory": 1}}
    reply = ask(url, user(texts(WORDS, WHO)), assistant(said), user(CODE), **limits)
    assert reply.json()["usage"]["notepad"][0]["turns"] > 3


def test_a_file_that_was_sent_again_under_its_name_is_another_document(url):
    file = {"type": "file", "file": {"file_id": "again"}}
    CLIENT.put(f"{url}/v1/files/again", content=WORDS)
    first = user([file, *texts(WHO)])
    said = answer(ask(url, first))
    known = ask(url, first, assistant(said), user(CODE))
    assert known.json()["usage"]["notepad"][0]["turns"] == 1
    CLIENT.put(f"{url}/v1/files/again", content=WORDS + WORDS)
    again = ask(url, first, assistant(said), user(CODE))
    assert again.json()["usage"]["notepad"][0]["turns"] > 3


def state(document: ChunkedDocument) -> dialogue.Known:
    return dialogue.Known(NO_TOKENS, 0, Origins(), document)


def document(tokens: int) -> ChunkedDocument:
    """Of which so many tokens were read."""
    made = ChunkedDocument(TOKENIZER, TextDocument(""), 8)
    made.tokens_read = tokens
    return made


def test_what_was_used_longest_ago_is_forgotten():
    known, states = dialogue.Memories(most=2), {one: state(document(1)) for one in "abc"}
    for one in "ab":
        known.keep(one, "x", states[one])
    assert known.get("a", " x ") is states["a"]
    known.keep("c", "x", states["c"])
    assert [known.get(one, "x") for one in "abc"] == [states["a"], None, states["c"]]


def test_documents_that_are_remembered_have_a_bound_of_tokens():
    """Their ids lie on the temporary disk. One is counted once, and the last stays in any case."""
    known, shared = dialogue.Memories(tokens=10), document(6)
    for answer in "xyz":
        known.keep("shared", answer, state(shared))
    known.keep("small", "x", state(document(4)))
    assert all(known.get("shared", answer) for answer in "xyz")
    known.keep("large", "x", state(document(99)))
    assert known.get("large", "x") and known.get("small", "x") is None
    assert not any(known.get("shared", answer) for answer in "xyz")
    larger = document(100)
    for answer in "xyz":
        known.keep("larger", answer, state(larger))
    assert all(known.get("larger", answer) for answer in "xyz")


# ---------------------------------------------------------------- what ordinary clients send


def test_a_command_line_that_puts_a_file_before_the_prompt(url):
    """`llm -m reader:notepad -f FILE -s SYSTEM 'who ?'`: one text, streamed, with its usage."""
    body = {
        "model": f"{NAME}:notepad", "stream": True, "stream_options": {"include_usage": True},
        "messages": [SYSTEM, user(f"{WORDS}\n{WHO}")], "seed": 3,
    }  # fmt: skip
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**body))
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert chunks[-1].usage.notepad[0]["turns"] > 3
        plain = body | {"stream": False, "messages": [SYSTEM, user(texts(WORDS, WHO))]}
        del plain["stream_options"]
        assert said == client.chat.completions.create(**plain).choices[0].message.content
        # `llm -c 'code ?'` sends all of it again.
        body["messages"] += [assistant(said), user(CODE)]
        chunks = list(client.chat.completions.create(**body))
        assert chunks[-1].usage.notepad == [{"turns": 1, "document_tokens": 0}]


def test_a_system_message_stands_before_the_question(url, streamer):
    answer(ask(url, SYSTEM, user(texts(WORDS, WHO))))
    ids = TOKENIZER.encode(f"{SYSTEM['content']}\n{WHO}").tolist()
    asked = [prompt.tokens.tolist() for prompt, _ in streamer.asked[-3:]]
    assert all(ids == _found(one, ids) for one in asked)
    long = ask(url, {"role": "system", "content": WORDS * 9}, user(texts(WORDS, WHO)))
    assert long.status_code == 400 and "leave the system message out" in long.text


def _found(ids: list, some: list) -> list | None:
    return next((some for k in range(len(ids)) if ids[k : k + len(some)] == some), None)


def test_a_name_changes_nothing(url):
    plain = user(texts(WORDS, WHO))
    assert answer(ask(url, plain | {"name": "ann"})) == answer(ask(url, plain))


def inline(data: object, name: object = "book.txt") -> dict:
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def encoded(raw: bytes, head: str = "data:text/plain;base64,") -> str:
    return head + base64.b64encode(raw).decode()


def test_a_file_may_come_with_the_message_before_or_behind_the_question(url):
    wanted = answer(ask(url, user(texts(WORDS, WHO))))
    for head in ("data:text/plain;base64,", "data:;base64,", ""):
        part = inline(encoded(WORDS.encode(), head))
        assert answer(ask(url, user([part, *texts(WHO)]))) == wanted
        assert answer(ask(url, user([*texts(WHO), part]))) == wanted  # as `llm -a` sends them
    said = [user([part, *texts(WHO)]), assistant(wanted), user(CODE)]
    assert ask(url, *said).json()["usage"]["notepad"][0]["turns"] == 1


@pytest.mark.parametrize("data, why", [
    (encoded(b"%PDF-1.7\0", "data:application/pdf;base64,"), "binary"),
    (encoded("é".encode("latin-1")), "not UTF-8"),
    ("data:text/plain,words", "use data:text/plain;base64,"),
    ("no base64!", "not base64"),
    (encoded(b"abc")[:-1] + "!", "not base64"),
    (3, "it must be a text"),
])  # fmt: skip
def test_an_inline_file_that_is_no_text_is_refused(url, data, why):
    reply = ask(url, user([inline(data), *texts(WHO)]))
    error = reply.json()["error"]
    assert reply.status_code == 400 and why in error["message"]
    assert error["param"] == "messages[0].content[0].file.file_data"


def test_files_for_assistants_are_documents_too(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="EMPTY", max_retries=0) as client:
        sent = client.files.create(file=("book.txt", WORDS.encode()), purpose="assistants")
        assert sent.purpose == "assistants" and sent.status == "processed"
        listed = [one.id for one in client.files.list(purpose="assistants")]
        assert listed == [sent.id]
        assert sent.id not in [one.id for one in client.files.list(purpose="user_data")]
        part = {"type": "file", "file": {"file_id": sent.id}}
        wanted = answer(ask(url, user(texts(WORDS, WHO))))
        assert answer(ask(url, user([part, *texts(WHO)]))) == wanted
        upload = client.uploads.create(
            filename="b", bytes=4, mime_type="text/plain", purpose="assistants"
        )
        assert upload.purpose == "assistants"
