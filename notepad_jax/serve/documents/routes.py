"""The endpoints of files and uploads, in OpenAI's shapes, and `PUT` for curl -T.

Above: `app`; below: `multipart` (what comes), `store` and `uploads` (what is kept).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax.serve.documents import multipart, uploads
from notepad_jax.serve.documents.store import LARGEST, PURPOSES, Files, name_of, put_name
from notepad_jax.serve.documents.uploads import Uploads
from notepad_jax.serve.http import bodies
from notepad_jax.serve.http.errors import bad, plain, shown
from notepad_jax.serve.http.web import OpenFile, answer, body_of

MOST_LISTED = 10_000
FRAME = 64 << 10  # bytes that a form may have beside its file

Handler = Callable[..., Awaitable[Response]]


class FileRoutes:
    """Handlers of the endpoints of files and uploads."""

    def __init__(self, files: Files) -> None:
        self.files, self.uploads = files, Uploads(files)

    def routes(self) -> list[Route]:
        """Returns the routes of these endpoints."""

        def route(path: str, method: str, handler: Handler) -> Route:
            return Route(path, handler, methods=[method])

        upload = "/v1/uploads/{id}"
        return [
            route("/v1/files", "GET", self.list),
            route("/v1/files", "POST", self.post),
            route("/v1/files/{id}/content", "GET", self.content),
            route("/v1/files/{id}", "GET", self.one),
            route("/v1/files/{id}", "DELETE", self.delete),
            route("/v1/files/{name:path}", "PUT", self.put),
            route("/v1/uploads", "POST", self.begin),
            route(f"{upload}/parts", "POST", self.part),
            route(f"{upload}/complete", "POST", self.complete),
            route(f"{upload}/cancel", "POST", self.cancel),
        ]

    # ------------------------------------------------------------ files

    async def post(self, request: Request) -> Response:
        said = multipart.announced(request)
        with contextlib.closing(self.files.arriving(LARGEST, max(said - FRAME, 0))) as coming:
            form = await multipart.received(request, "file", coming)
            for name in form.fields:
                if name != "purpose":
                    name = plain(name)
                    raise bad(name, f"{name} is not supported; leave it out")
            purpose = _purpose(form.fields.get("purpose"))
            name = name_of(form.filename or "", "file")
            stored = await self.files.keep(coming, name, purpose=purpose)
        return answer(stored.card())

    async def put(self, request: Request) -> Response:
        name = put_name(request.path_params["name"])
        if "content-range" in request.headers:
            raise bad("Content-Range", "a part of a file is not taken; send all of it")
        with contextlib.closing(
            self.files.arriving(LARGEST, multipart.announced(request))
        ) as coming:
            await multipart.body(request, coming)
            return answer((await self.files.keep(coming, name, name)).card())

    async def list(self, request: Request) -> Response:
        query = request.query_params
        for name in query:
            if name not in ("purpose", "limit", "order", "after"):
                name = plain(name)
                raise bad(name, f"there is no parameter {name} here; leave it out")
        order, limit = query.get("order", "desc"), query.get("limit", str(MOST_LISTED))
        if order not in ("asc", "desc"):
            raise bad("order", f"order is {shown(order)}; use asc or desc")
        whole = limit.isascii() and limit.isdigit() and len(limit) < 9
        if not whole or not 1 <= int(limit) <= MOST_LISTED:
            raise bad("limit", f"limit is {shown(limit)}; it must be from 1 to {MOST_LISTED}")
        found, purpose = self.files.all(), query.get("purpose")
        if purpose is not None:
            found = [one for one in found if one.purpose == purpose]
        found = found[::-1] if order == "asc" else found
        if "after" in query:
            last = self.files.get(query["after"])
            found = found[found.index(last) + 1 :] if last in found else []
        page = [one.card() for one in found[: int(limit)]]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return answer({"object": "list", "data": page, "has_more": len(found) > len(page)} | ends)

    async def one(self, request: Request) -> Response:
        return answer(self.files.get(request.path_params["id"]).card())

    async def delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        self.files.delete(id)
        return answer({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request) -> Response:
        # To be saved and not to be shown: it may be an HTML page with scripts.
        headers = {"X-Content-Type-Options": "nosniff", "Content-Security-Policy": "sandbox"}
        stored = self.files.get(request.path_params["id"])
        file = self.files.path(stored.id).open("rb")
        return OpenFile(file, "application/octet-stream", headers, stored.filename)

    # ------------------------------------------------------------ uploads

    async def begin(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("filename", "purpose", "bytes", "mime_type"))
        purpose = _purpose(body.get("purpose"))
        size = bodies.whole(body, "bytes", 0, 2**63)
        if size is None:
            raise bad("bytes", "bytes is missing; say how long the file will be")
        name = name_of(bodies.text(body, "filename", "say what the file is called"), "filename")
        upload = self.uploads.begin(name, size, purpose)
        # Its parts are dropped in time, also if no other request comes.
        asyncio.get_running_loop().call_later(uploads.LIFETIME + 1, self.uploads.expire)
        return answer(upload.card())

    async def part(self, request: Request) -> Response:
        upload = self.uploads.get(request.path_params["id"])
        said = max(multipart.announced(request) - FRAME, 0)
        coming = self.files.arriving(uploads.LARGEST_PART, said)
        try:
            await multipart.received(request, "data", coming)
            return answer(self.uploads.add(upload, coming))
        except BaseException:
            coming.close()
            raise

    async def complete(self, request: Request) -> Response:
        upload = self.uploads.get(request.path_params["id"], pending=False)
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("part_ids", "md5"))
        ids = body.get("part_ids")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise bad("part_ids", "part_ids must be the list of the parts' ids, in their order")
        md5 = None if body.get("md5") is None else bodies.text(body, "md5", "leave it out")
        return answer((await self.uploads.complete(upload, ids, md5)).card())

    async def cancel(self, request: Request) -> Response:
        upload = self.uploads.get(request.path_params["id"])
        upload.end("cancelled")
        return answer(upload.card())


def _purpose(purpose: Any) -> str:
    if purpose not in PURPOSES:
        what = "is missing" if purpose is None else f"is {shown(purpose)}"
        raise bad("purpose", f"purpose {what}; files are documents here: use {PURPOSES[0]}")
    return purpose
