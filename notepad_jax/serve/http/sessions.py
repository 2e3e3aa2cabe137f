"""Browser sessions at a server that has a key, which a link cannot carry: a signed cookie.

The page at / is public: there is nothing in it, and it sends the key with its own requests. The
pages under /traces ask for the key once, in a form, and give the browser a cookie. That is valid
for twelve hours and this server's life, for looking (GET) under /traces and for nothing else:
what another site makes a browser send to /v1 is refused as before. Above: `web`, whose Door asks
here; beside: `routes`.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from urllib.parse import parse_qs, quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from notepad_jax.serve.http.errors import Refusal

HOME, TRACES = "/", "/traces"
COOKIE = "notepad_traces"  # and the port, which browsers do not tell cookies apart by
LASTS = 12 * 3600  # seconds
LARGEST_FORM = 4096  # bytes
LOOKS = ("GET", "HEAD")
# A page is shown alone: in no other's frame, to no other's script; and no site gets its referrer.
HEADERS = {
    "Content-Security-Policy": "frame-ancestors 'none'; base-uri 'none'; object-src 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}  # fmt: skip


def shown(page: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a page as a response, with the security headers of these pages."""
    return Response(page, status, HEADERS | (headers or {}), "text/html")


def wants_page(request: Request) -> bool:
    """Says whether a request accepts HTML, as a browser's for a page does."""
    return "text/html" in request.headers.get("accept", "")


def cookie(request: Request) -> str:
    """Returns the cookie's name; of two servers of a machine none takes the other's."""
    port = request.headers.get("host", "").rpartition(":")[2]
    return f"{COOKIE}_{port}" if port.isascii() and port.isdigit() else COOKIE


def own(request: Request) -> bool:
    """Says whether a request's Origin, if it has one, is this server's address."""
    origin = request.headers.get("origin")
    return origin is None or origin.rpartition("//")[2] == request.headers.get("host", "")


def foreign(request: Request) -> bool:
    """Says whether a request is cross-site, by the headers that browsers send (Sec-Fetch).

    A link that the user followed is not: what it leads to is shown to the user alone.
    """
    site = request.headers.get("sec-fetch-site")
    if site is None:  # an older browser, or no browser
        return not own(request)
    kind = request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest")
    followed = kind == ("navigate", "document") and request.method in LOOKS
    return site not in ("same-origin", "none") and not followed


class Sessions:
    """Browser sessions, begun with the key. `entry` makes the page that asks for it."""

    def __init__(self, key: str, entry: Callable[[str], bytes]) -> None:
        self._key, self._entry = key, entry
        self._secret = secrets.token_bytes(32)  # so marks end with the server

    def admits(self, request: Request) -> bool:
        """Says whether a request without the key may go on to its page."""
        path, looks = request.scope["path"], request.method in LOOKS
        if path == HOME:
            return looks
        if path != TRACES and not path.startswith(f"{TRACES}/"):
            return False
        if looks:
            return self.knows(request)
        return request.method == "POST"  # `enter` looks at the key

    def knows(self, request: Request) -> bool:
        """Says whether a request has a cookie that is still valid."""
        return self._valid(request.cookies.get(cookie(request), ""))

    def asks(self, request: Request, problem: Refusal) -> Response | None:
        """Returns the form where a browser wanted a page under /traces; None: an error will do."""
        under = request.scope["path"].startswith(TRACES)
        if problem.status != 401 or not under or not wants_page(request):
            return None
        return shown(self._entry(""), 401, problem.headers)

    async def enter(self, request: Request) -> Response:
        """Redirects to the page that was wanted, with a cookie; or the form again, and why."""
        given = await _field(request, "key")
        if not hmac.compare_digest(given.strip().encode(), self._key.encode()):
            return shown(self._entry("the key is wrong" if given else "the key is missing"), 401)
        ends = str(int(time.time()) + LASTS)
        reply = shown(b"", 303, {"Location": quote(request.scope["path"])})
        reply.set_cookie(
            cookie(request), f"{ends}.{self._sum(ends)}", path=TRACES, httponly=True,
            samesite="strict", secure=request.url.scheme == "https",
        )  # fmt: skip
        return reply

    def _valid(self, mark: str) -> bool:
        ends, _, sum_of = mark.partition(".")
        same = hmac.compare_digest(sum_of.encode(), self._sum(ends).encode())
        return same and int(ends) > time.time()

    def _sum(self, ends: str) -> str:
        return hmac.new(self._secret, ends.encode(), hashlib.sha256).hexdigest()


async def _field(request: Request, name: str) -> str:
    """Returns a field of a small form; Refusal (413) for a large one."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_FORM:
                raise Refusal(413, f"a key has at most {LARGEST_FORM} bytes here", name,
                              headers={"Connection": "close"})  # fmt: skip
    except ClientDisconnect:
        return ""
    return parse_qs(body.decode("utf-8", "replace")).get(name, [""])[0]
