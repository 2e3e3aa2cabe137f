"""The endpoints for trainers: pause, resume, and update of weights; see `control`.

Above: `app`; below: a `control.Gate`, which a program brings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax.serve.completions.control import Gate
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.http import bodies
from notepad_jax.serve.http.errors import Refusal, bad, shown
from notepad_jax.serve.http.web import answer, body_of

PATHS = ("/pause", "/resume", "/update_weights", "/is_paused", "/weight_info")

Handler = Callable[[Request], Awaitable[Response]]


class Trainers:
    """Handlers of these endpoints, over a gate and the served policy."""

    def __init__(self, gate: Gate, served: Served) -> None:
        self._gate, self._served = gate, served

    def routes(self, handled: Callable[[Handler], Handler]) -> list[Route]:
        """Returns the routes in `PATHS`."""
        posted = (self.pause, self.resume, self.update_weights)
        read = (self.is_paused, self.weight_info)
        return [Route(path, handled(verb), methods=["POST" if verb in posted else "GET"])
                for path, verb in zip(PATHS, (*posted, *read), strict=True)]  # fmt: skip

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "wait")
        if mode not in ("wait", "abort"):
            raise bad("mode", f"mode is {shown(mode)}; use wait or abort")
        if not await self._gate.pause(abort=mode == "abort"):
            raise Refusal(409, "the server was resumed before its turns had ended; pause it again",
                          None, "resumed")  # fmt: skip
        return answer({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._gate.resume()
        return answer({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return answer({"is_paused": self._gate.paused})

    async def weight_info(self, request: Request) -> Response:
        return answer(self._weights())

    async def update_weights(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("folder", "version"))
        version = body.get("version")
        if not isinstance(body.get("folder"), str):
            raise bad("folder", "folder must be a run, as runs/mine@40, or a folder of weights")
        if version is not None and (type(version) is not int or not 0 <= version < 2**31):
            raise bad("version", f"version is {shown(version)}; it must be a whole number")
        try:
            await self._gate.adopt(body["folder"], version)
        except (ValueError, OSError) as error:
            raise bad("folder", f"these weights are not adopted: {error}") from None
        return answer(self._weights())

    def _weights(self) -> dict[str, Any]:
        return {
            "policy_version": self._served.version(),
            "system_fingerprint": self._served.fingerprint(),
        }
