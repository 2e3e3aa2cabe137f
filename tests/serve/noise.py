"""Requests that somebody might send: good ones, changed a little, in all the ways that go wrong.

`request(number)` is the same on every machine. A request is an address, headers and a body as
bytes; most bodies are JSON with some values put in the place of others, some are broken as text,
and some break HTTP itself (`wire`). `tests/serve/test_noise.py` sends them.
"""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import random
from typing import Any

from notepad_jax.serve.completions import control, requests
from notepad_jax.serve.http import bodies
from notepad_jax.serve.readings import routes
from tests.serve.fake import NAME

NOTEPAD = f"{NAME}:notepad"
WORDS = "the secret code of ann is red"
CONTROL = "control-key"
FORM = "multipart/form-data; boundary=b"

_ASKED = [{"role": "user", "content": "who is ann ?"}]
_PARTS = [{"role": "user", "content": [
    {"type": "text", "text": WORDS}, {"type": "file", "file": {"file_id": "book"}},
    {"type": "text", "text": "who ?"}]}]  # fmt: skip
_SAMPLED = {"max_tokens": 5, "seed": 1, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["red"],
            "stream": False, "logprobs": None, "user": "me"}  # fmt: skip
_UPLOAD = {"filename": "x.txt", "bytes": 3, "purpose": "user_data", "mime_type": "text/plain"}

# Address and a good body. Ids are put in by the sender: UPLOAD is one that is under way.
JSONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/v1/chat/completions", {"model": NAME, "messages": _ASKED, **_SAMPLED}),
    ("POST", "/v1/chat/completions", {"model": NAME, "messages": _ASKED * 3, "stream": True,
     "stream_options": {"include_usage": True}, "max_tokens": 3, "return_token_ids": True,
     "logprobs": True, "top_logprobs": 2}),
    ("POST", "/v1/chat/completions", {"model": NOTEPAD, "messages": _PARTS, "seed": 3,
     "notepad": {"chunk_size": 3, "max_memory": 3}}),
    ("POST", "/v1/chat/completions", {"model": NOTEPAD, "messages": _PARTS, "seed": 3,
     "questions": ["who ?", "red ?"]}),
    ("POST", "/v1/chat/completions", {"model": NOTEPAD, "messages": _PARTS, "stream": True,
     "stream_options": {"include_notepad": True}, "notepad": {"as": "chunks"}}),
    ("POST", "/v1/chat/completions", {"model": NOTEPAD, "seed": 3, "messages": [
        {"role": "system", "content": "red"}, {"role": "user", "content": f"{WORDS}\nwho ?"},
        {"role": "assistant", "content": "ann"}, {"role": "user", "content": "who ?"}]}),
    ("POST", "/v1/chat/completions", {"model": NOTEPAD, "messages": [{"role": "user", "content": [
        {"type": "file", "file": {"filename": "b", "file_data": "data:text/plain;base64,cmVk"}},
        {"type": "text", "text": "who ?"}]}],
     "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}}),
    ("POST", "/v1/completions", {"model": NAME, "prompt": WORDS, **_SAMPLED}),
    ("POST", "/v1/completions", {"model": NAME, "prompt": [[20, 21, 22], [23]], "stream": True,
     "logprobs": 2, "max_tokens": 4, "return_tokens_as_token_ids": True}),
    ("POST", "/generate", {"input_ids": [20, 21, 22], "return_logprob": True, "rid": "r",
     "sampling_params": {"max_new_tokens": 4, "n": 2, "temperature": 1.0, "stop": ["x"]}}),
    ("POST", "/generate", {"text": [WORDS, "who"], "sampling_params": {"max_new_tokens": 3}}),
    ("POST", "/tokenize", {"model": NAME, "prompt": WORDS}),
    ("POST", "/tokenize", {"messages": _ASKED}),
    ("POST", "/detokenize", {"tokens": [20, 21, 22]}),
    ("POST", "/v1/readings", {"file_id": "book", "questions": ["who ?", "where ?"], "samples": 2,
     "seed": 5, "detach": True, "max_tokens": 3, "notepad": {"chunk_size": 4}}),
    ("POST", "/v1/readings", {"file_id": "book", "questions": ["who ?"], "temperature": 0.5}),
    ("POST", "/v1/uploads", _UPLOAD),
    ("POST", "/v1/uploads/UPLOAD/complete", {"part_ids": ["part_1"], "md5": "00"}),
    ("POST", "/v1/uploads/UPLOAD/cancel", {}),
    ("POST", "/update_weights", {"folder": "runs/mine@4", "version": 4}),
)  # fmt: skip
NAMES = tuple(dict.fromkeys([
    *requests.CHAT, *requests.COMPLETION, *bodies.ONLY, *bodies.ACCEPTED, *requests.OPTIONS,
    *routes.NAMES, *control._GENERATE, *control._SAMPLING, "filename", "bytes", "purpose",
    "part_ids", "md5", "role", "content", "type", "text", "file", "file_id", "file_data", "as",
    "folder", "version",
    "", "\ud800", "\x00", "__proto__", "a" * 300, "\u202e",
]))  # fmt: skip
TEXTS = (
    "", " ", "\x00", "\x1b[2J", "\r\n\r\n", "data: [DONE]\n\n", "\u2028\u2029\x85", "\u202e",
    "\ufeff", "\ud800", "a\udfffb", "<|im_end|>", "<|im_start|>system", "<s>", "{{ 1 }}", "%s%n{0}",
    "../../x",
    "/etc/passwd", "\U0001f600" * 20, "e\u0301" * 40, "x" * 257, "red " * 90, "who ? " * 3000,
    NAME, NOTEPAD, "book", "user", "assistant", "system", "tool", "text", "file", "chunks",
    "reasoning", "user_data", "null", "NaN", "1", "1e999",
)  # fmt: skip
NUMBERS = (
    0, -0.0, 1, -1, 2, 3, 20, 21, 64, 65, 127, 128, 129, 0.5, 1.5, 1e-9, 1e-320, 1e308, -1e308,
    2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30, 10**400,
)  # fmt: skip
RAW = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "+1", ".5", "1.", "0x10", "'a'",
       "tru", "undefined", "1" * 5000, '"\\ud800"', '"\\u0000"', '"\\x"', '"\n"', "[" * 3000,
       '{"a":' * 3000, "[" * 200 + "]" * 200, "/* */ 1")  # fmt: skip
KINDS = (None, "", "application/json", "application/x-www-form-urlencoded", "text/plain", FORM,
         "application/json; charset=utf-16", "multipart/form-data", "\xff", "a" * 500)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Request:
    """One request. `wire`: it is sent as it stands, for it breaks HTTP, and may get no reply."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    wire: bytes | None = None


def request(number: int) -> Request:
    """Returns the request of a number."""
    draw = random.Random(number)
    kind = draw.random()
    if kind < 0.12:
        return _file(draw)
    if kind < 0.18:
        return _address(draw)
    method, path, good = draw.choice(JSONS)
    body = _text(draw, _mutated(draw, copy.deepcopy(good)))
    headers = [("Content-Type", "application/json")]
    if path == "/update_weights" and draw.random() < 0.5:
        headers.append(("Authorization", f"Bearer {CONTROL}"))
    if draw.random() < 0.1:
        said = draw.choice(KINDS)
        headers[0:1] = [] if said is None else [("Content-Type", said)]
    if draw.random() < 0.05:
        headers.append(("Idempotency-Key", draw.choice(["k", "\xff", "x" * 200])))
        headers.append(("x-stainless-retry-count", draw.choice(["0", "1", "x", "-1"])))
    made = Request(method, path, tuple(headers), body)
    return _broken(draw, made) if draw.random() < 0.08 else made


# ---------------------------------------------------------------- JSON


def _mutated(draw: random.Random, body: Any) -> Any:
    for _ in range(draw.choice((0, 0, 0, 0, 1, 1, 1, 1, 2, 3))):
        body = _changed(draw, body)
    return body


def _changed(draw: random.Random, value: Any) -> Any:
    """Returns a value with a change somewhere in it: the deeper there is something, the deeper."""
    inside = isinstance(value, dict | list) and len(value) and draw.random() < 0.85
    if not inside:
        return _other(draw, value)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        how = draw.random()
        if how < 0.6:
            value[at] = _changed(draw, value[at])
        elif how < 0.75:
            del value[at]
        elif how < 0.9:
            value.insert(at, _value(draw))
        else:
            value *= draw.choice((2, 9, 40))
        return value
    name, how = draw.choice(list(value)), draw.random()
    if how < 0.6:
        value[name] = _changed(draw, value[name])
    elif how < 0.7:
        del value[name]
    elif how < 0.9:
        value[draw.choice(NAMES)] = _value(draw)
    else:
        value[draw.choice(NAMES)] = value.pop(name)
    return value


def _other(draw: random.Random, value: Any) -> Any:
    how = draw.random()
    if how < 0.08:
        return [value]
    if how < 0.12:
        return {draw.choice(NAMES): value}
    if how < 0.2 and isinstance(value, str):
        return value + draw.choice(TEXTS)
    return _value(draw)


def _value(draw: random.Random, depth: int = 0) -> Any:
    how = draw.random()
    if how < 0.15:
        return draw.choice((None, True, False))
    if how < 0.45:
        return draw.choice(NUMBERS)
    if how < 0.75:
        return draw.choice(TEXTS)
    if how < 0.8:
        return f"RAW{draw.randrange(len(RAW))}WAR"
    if depth > 3:
        return []
    inner = [_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if how < 0.9:
        return inner
    return {draw.choice(NAMES): one for one in inner}


def _text(draw: random.Random, body: Any) -> bytes:
    """Writes a body, in one of the ways that people do, or break."""
    text = json.dumps(body, ensure_ascii=draw.random() < 0.5)
    for number, raw in enumerate(RAW):
        text = text.replace(f'"RAW{number}WAR"', raw)
    how, data = draw.random(), text.encode("utf-8", "surrogatepass")
    if how < 0.88:
        return data
    at = draw.randrange(len(data) + 1)
    ways = (
        lambda: data[:at],
        lambda: data + draw.choice((b"}", b"\0", b"{}", b"\n\n", data)),
        lambda: data[:at] + draw.randbytes(draw.randrange(1, 9)) + data[at:],
        lambda: data[:at] + draw.randbytes(1) + data[at + 1 :],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode("utf-16", "surrogatepass"),
        lambda: gzip.compress(data, mtime=0),
        lambda: data[:1] + b'"model":1,"stream":"x",' + data[1:],  # names that come twice
        lambda: data[:-1] + b',"seed":{},"seed":1}',
        lambda: b" " * 10_000 + data,
        lambda: draw.randbytes(draw.randrange(200)),
        lambda: b"",
    )
    return draw.choice(ways)()


# ---------------------------------------------------------------- files, addresses


def _file(draw: random.Random) -> Request:
    """A file by PUT, by a form, or as a part of an upload."""
    data = draw.choice((b"", b"red", b"\0\1", b"\xff\xfe", "caf\u00e9 \U0001f600\u2028".encode(),
                        WORDS.encode() * 200, draw.randbytes(5000)))  # fmt: skip
    if draw.random() < 0.3:
        name = draw.choice(("a", "b%20c", "..%2f..%2fx", "%00", "%e2%80%ae", "x" * 300, "file-1",
                            "%ff", "a/b", "%5c", ".", "%2e%2e", "%f0%9f%98%80"))  # fmt: skip
        return Request("PUT", f"/v1/files/{name}", (), data)
    field, path = draw.choice((("file", "/v1/files"), ("data", "/v1/uploads/UPLOAD/parts")))
    name = draw.choice(("a.txt", "", "../../x", "\u202e.txt", 'a"b', "a\\", "x" * 500, "\0"))
    parts = [(f'name="{field}"; filename="{name}"', data)]
    if field == "file":
        purpose = draw.choice((b"user_data", b"user_data", b"batch", b"\xff", b"x" * 5000))
        parts.append(('name="purpose"', purpose))
    for _ in range(draw.choice((0, 0, 0, 1, 20))):
        parts.append(draw.choice((parts[0], ('name="more"', b"x"), ("", b""), ('name="', b"x"))))
    draw.shuffle(parts)
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data; " + about.encode() + b"\r\n\r\n" + said + b"\r\n"
        for about, said in parts
    ) + b"--b--\r\n"  # fmt: skip
    if draw.random() < 0.4:
        at = draw.randrange(len(body) + 1)
        body = draw.choice((body[:at], body[:at] + draw.randbytes(3) + body[at:], b"",
                            body.replace(b"\r\n", b"\n"), body + draw.randbytes(9),
                            body.replace(b"form-data", b"x" * 5000)))  # fmt: skip
    kind = FORM if draw.random() < 0.85 else draw.choice((
        "multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=c",
        f"multipart/form-data; boundary={'b' * 300}", "multipart/mixed; boundary=b", "text/plain",
        'multipart/form-data; boundary="b', "multipart/form-data; boundary=\xff",
    ))  # fmt: skip
    return Request("POST", path, (("Content-Type", kind),), body)


def _address(draw: random.Random) -> Request:
    """What is read, deleted, or not there, by ids and queries that are none."""
    id = draw.choice(("x", "%00", "..%2f..%2fetc%2fpasswd", "%ff", "x" * 2000, "file-0", "%F0%9F",
                      "reading_000000000000000000000000", "%E2%80%AE"))  # fmt: skip
    of = draw.choice(("files", "readings"))
    method, path = draw.choice((
        ("GET", f"/v1/{of}/{id}"), ("DELETE", f"/v1/{of}/{id}"),
        ("GET", f"/v1/files/{id}/content"), ("GET", f"/v1/readings/{id}/events"),
        ("GET", f"/v1/readings/{id}/trace?turns={id}"),
        ("GET", f"/v1/files?limit={id}"), ("GET", f"/v1/files?after={id}&order={id}&{id}=1"),
        ("GET", f"/v1/files?limit={'9' * 5000}"), ("GET", f"/v1/models/{id}"), ("GET", f"/{id}"),
        ("POST", f"/v1/uploads/{id}/cancel"), ("POST", "/pause"), ("POST", "/resume"),
        ("POST", f"/pause?mode={id}"), ("PATCH", "/v1/files"), ("OPTIONS", "*"), ("TRACE", "/"),
        ("GET", "/v1/chat/completions"), ("HEAD", "/metrics"), ("POST", "//v1//completions"),
    ))  # fmt: skip
    headers = [("Last-Event-ID", draw.choice(("0", "-1", "9" * 40, "\xff", "\u00b2", "x" * 99)))]
    if draw.random() < 0.3:
        headers += [("Range", draw.choice(("bytes=0-1", "bytes=9-1", "bytes=-5", "x" * 99)))]
    return Request(method, path, tuple(headers), b"")


# ---------------------------------------------------------------- HTTP itself


def _broken(draw: random.Random, made: Request) -> Request:
    """The same request, as a client writes it that has HTTP wrong, or hangs up."""
    line = f"{made.method} {made.path} HTTP/1.1\r\n".encode()
    host, body = b"Host: localhost\r\n", made.body
    more = b"".join(f"{k}: {v}\r\n".encode("latin-1") for k, v in made.headers)
    size = len(body)
    head = line + host + more

    def chunked(*parts: bytes) -> bytes:
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(parts)

    whole = b"%x\r\n%s\r\n" % (size, body) if size else b""
    cut = draw.randrange(size + 1)
    ways = (
        chunked(whole, b"0\r\n\r\n"), chunked(whole), chunked(b"-1\r\n", body),
        chunked(b"zz\r\n", body, b"\r\n0\r\n\r\n"), chunked(b"f" * 30 + b"\r\n", body),
        chunked(b"5;a=b\r\n", body[:5], b"\r\n0\r\nX: y\r\n\r\n"),
        head + b"Content-Length: %d\r\n\r\n%s" % (size + 9, body),  # and hangs up
        head + b"Content-Length: %d\r\n\r\n%s" % (cut, body),  # what is left begins the next
        head + b"Content-Length: -1\r\n\r\n" + body, head + b"Content-Length: x\r\n\r\n" + body,
        head + b"Content-Length: %s\r\n\r\n%s" % (b"9" * 40, body),
        head + b"Content-Length: %s\r\n\r\n%s" % (b"9" * 5000, body),
        head + b"Content-Length: %d\r\nContent-Length: 3\r\n\r\n%s" % (size, body),
        head + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n%s" % (size, whole),
        head + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s" % (size, body),
        head + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n%s" % (size, body),
        head + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: %d\r\n\r\n%s"
        % (size, body),
        line + more + b"Content-Length: %d\r\n\r\n%s" % (size, body),  # no Host
        head + b"X: %s\r\nContent-Length: %d\r\n\r\n%s" % (b"y" * 70_000, size, body),
        head + b"X\r\n: y\r\n\r\n" + body, head[: draw.randrange(len(head))], draw.randbytes(300),
        line.replace(b"HTTP/1.1", b"HTTP/9") + host + b"\r\n", body, b"\r\n" * 50,
        b"\x16\x03\x01\x02\x00" + draw.randbytes(200),  # TLS
    )  # fmt: skip
    return dataclasses.replace(made, wire=draw.choice(ways))
