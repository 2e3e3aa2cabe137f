"""Streamed multipart/form-data uploads: the file to disk, the few other fields to memory.

Starlette's own forms would write a file twice, and to another disk. Above: `routes`; below:
python-multipart's parser, which only sees one block of the body at a time.
"""

from __future__ import annotations

import dataclasses
import logging

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from notepad_jax.serve.documents.store import Arriving
from notepad_jax.serve.http.errors import Refusal, bad
from notepad_jax.serve.http.web import GONE

MOST_FIELDS = 16
LONGEST = 4096  # bytes of a field, and of a part's headers

# What is wrong with a form is told to the client that sent it, and not to the server's log.
logging.getLogger("python_multipart").setLevel(logging.CRITICAL)


@dataclasses.dataclass
class Form:
    """The fields of a form beside its file. `filename` is None where no file came."""

    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    filename: str | None = None


async def received(request: Request, param: str, into: Arriving) -> Form:
    """Returns a form whose file, the field `param`, was streamed `into`; Refusal for no form."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise bad(param, f"send a form (multipart/form-data) with the file as its field {param}; "
                  f"curl -F {param}=@FILE does")  # fmt: skip
    parts = _Parts(param)
    try:
        parser = MultipartParser(options[b"boundary"], parts.callbacks())
        async for block in request.stream():
            parser.write(block)
            for data in parts.taken():
                await into.add(data)
        parser.finalize()
    except FormParserError as error:
        raise bad(param, f"the form cannot be read: {str(error)[:80]}") from None
    except ClientDisconnect:
        raise Refusal(GONE, "the client hung up") from None
    if not parts.ended:
        raise bad(param, "the form ends in the middle; send it again")
    if parts.form.filename is None:
        raise bad(param, f"the form has no file; send it as the field {param}")
    await into.end()
    return parts.form


async def body(request: Request, into: Arriving) -> None:
    """Streams a request body that is nothing but a file `into`."""
    try:
        async for block in request.stream():
            await into.add(block)
    except ClientDisconnect:
        raise Refusal(GONE, "the client hung up") from None
    await into.end()


def announced(request: Request) -> int:
    """Returns the bytes that a body is to have (Content-Length); 0 where it is not said."""
    said = request.headers.get("content-length", "")
    return int(said[:20]) if said.isascii() and said.isdigit() else 0


class _Parts:
    """Follows the parser from part to part."""

    def __init__(self, param: str) -> None:
        self.form, self.ended, self._param = Form(), False, param
        self._name, self._is_file = "", False
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""
        self._coming: list[bytes] = []  # of the file
        self._text = bytearray()  # of a field

    def callbacks(self) -> dict:
        return {
            "on_part_begin": self._begin, "on_header_field": self._header_field,
            "on_header_value": self._header_value, "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished, "on_part_data": self._data,
            "on_part_end": self._part_end, "on_end": self._end,
        }  # fmt: skip

    def taken(self) -> list[bytes]:
        """Returns the file's bytes that came since."""
        coming, self._coming = self._coming, []
        return coming

    def _begin(self) -> None:
        self._headers, self._text = {}, bytearray()
        if len(self.form.fields) >= MOST_FIELDS:
            raise bad(self._param, f"the form has more than {MOST_FIELDS} fields")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field = self._short(self._field + data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._short(self._value + data[start:end])

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""
        if len(self._headers) > MOST_FIELDS:
            raise bad(self._param, f"a part of the form has more than {MOST_FIELDS} headers")

    def _headers_finished(self) -> None:
        _, said = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = said.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == self._param
        if not self._is_file:
            if b"filename" in said:
                raise bad(self._param, f"the file must be the form's field {self._param}")
            return
        if self.form.filename is not None:
            raise bad(self._param, "the form has two files; send one at a time")
        self.form.filename = said.get(b"filename", b"unnamed").decode("utf-8", "replace")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._coming.append(data[start:end])
        else:
            self._text = self._short(self._text + data[start:end])

    def _part_end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._text.decode("utf-8", "replace")

    def _end(self) -> None:
        self.ended = True

    def _short(self, data: bytes) -> bytes:
        if len(data) > LONGEST:
            raise bad(self._param, f"a field or header of the form has more than {LONGEST} bytes")
        return data
