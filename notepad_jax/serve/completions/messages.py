"""Messages of a conversation: a role each, and content parts, which are texts and files.

Checked as everything of a body is. Above: `requests`; `conversations` and `chat_model` say what a
conversation and a reading make of them.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

from notepad_jax.serve.http.decoding import Decoding, FileText, NotText, unreadable
from notepad_jax.serve.http.errors import bad, plain, shown
from notepad_jax.text.token_blocks import well_formed

ROLES = ("system", "developer", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class FilePart:
    """A content part that is a file: one that was uploaded, or comes with the message."""

    id: str
    where: str  # in the body
    text: FileText | None = None  # what came with the message


@dataclasses.dataclass(frozen=True)
class Message:
    role: str
    parts: tuple[str | FilePart, ...]  # in order

    @property
    def text(self) -> str:
        """All parts, joined; Refusal if one is a file."""
        for part in self.parts:
            if isinstance(part, FilePart):
                mend = "send its text, or use the model that ends in :notepad"
                raise bad(
                    part.where, f"{part.where} is a file, and only readings take files; {mend}"
                )
        return "".join(self.parts)


def messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """Returns the messages of a request body; Refusal for what is not text."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise bad("messages", "messages must be a list of at least one message")
    return tuple(_message(one, f"messages[{number}]") for number, one in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise bad(where, f"{where} is {shown(value)}; a message is an object")
    role = value.get("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"{where}.role is {shown(role)}; use one of {', '.join(ROLES)}")
    for name, said in value.items():
        # What clients send back of an earlier reply, or leave empty; and a name, which tells
        # people of one role apart, and which the templates of models do not know.
        if name in ("role", "content") or said in (None, "", []):
            continue
        if name == "name" and isinstance(said, str):
            continue
        name = f"{where}.{plain(name)}"
        raise bad(name, f"{name} is not supported; a message has a role and texts as content")
    return Message(role, _parts(value.get("content"), f"{where}.content"))


def _parts(content: Any, where: str) -> tuple[str | FilePart, ...]:
    if isinstance(content, str):
        return (well_formed(content),)
    if not isinstance(content, list) or not content:
        raise bad(where, f"{where} is {shown(content)}; it must be a text, or a list of text parts")
    return tuple(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: Any, where: str) -> str | FilePart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return well_formed(part["text"])
    if kind == "file":
        return _file(part.get("file"), where)
    what = f"a part of type {shown(kind)}" if kind != "text" else "a part without its text"
    raise bad(where, f"{where} is {what}; only texts and files are read")


def _file(file: Any, where: str) -> FilePart:
    given = file if isinstance(file, dict) else {}
    if given.get("file_data") is not None:
        return _inline(given, f"{where}.file.file_data")
    id = given.get("file_id")
    if not isinstance(id, str):
        raise bad(f"{where}.file.file_id", f'{where} has no file_id; use {{"type": "file", '
                  f'"file": {{"file_id": ID}}}}')  # fmt: skip
    return FilePart(well_formed(id), f"{where}.file.file_id")


def _inline(file: Mapping[str, Any], where: str) -> FilePart:
    """A file whose bytes come with the message: base64, as a data URL or without its head."""
    name, data = file.get("filename"), file["file_data"]
    name = well_formed(name) if isinstance(name, str) and name else "file_data"
    if not isinstance(data, str):
        raise bad(where, f"{where} is {shown(data)}; it must be a text, base64")
    head, comma, rest = data.partition(",")
    if comma and not (head.startswith("data:") and head.endswith(";base64")):
        raise bad(where, f"{where} begins with {shown(head)}; use data:text/plain;base64,")
    try:
        raw = base64.b64decode(rest if comma else data, validate=True)
    except (binascii.Error, ValueError):
        raise bad(where, f"{where} is not base64; or send the file to /v1/files") from None
    try:
        Decoding().add(raw, final=True)
    except NotText as why:
        raise unreadable(name, str(why), where) from None
    digest = hashlib.blake2b(raw, digest_size=16).hexdigest()
    return FilePart(name, where, FileText(name, digest, lambda: iter((raw,))))
