"""Health probes: whether the server lives, whether requests are answered at once, its version.

Alive and ready are two probes. An orchestrator ends a server that is not alive, so an engine that
compiles is; a load balancer sends requests elsewhere while one is not ready. Above: `app`.
"""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax import __version__
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.http.errors import Refusal
from notepad_jax.serve.http.web import answer, refused

SOON = 0.5  # seconds in which a probe of /health is answered: most wait for one
PATIENCE = 5.0  # seconds in which the engines' loops have to answer /ready
SILENT = 1800.0  # and /health, in all: no program takes longer to compile


class Health:
    """Handlers of the probes. Remembers since when the engines are to answer the last one."""

    def __init__(self, served: Served) -> None:
        self._served, self._asked = served, time.monotonic()
        self._probe: asyncio.Future[None] | None = None

    def routes(self) -> list[Route]:
        """Returns the routes of the probes."""
        return [
            Route("/health", self.alive),
            Route("/ready", self.ready),
            Route("/version", self.version),
        ]

    async def alive(self, request: Request) -> Response:
        if not await self._answers(SOON) and time.monotonic() - self._asked > SILENT:
            raise _no(f"the engine has not answered for {SILENT:g} s", "not_alive")
        return Response(b"")

    async def ready(self, request: Request) -> Response:
        if missing := self._served.missing():
            raise _no(missing)
        if not await self._answers(PATIENCE):
            raise _no(f"the engine has not answered for {PATIENCE:g} s; it may be compiling")
        return Response(b"")

    async def version(self, request: Request) -> Response:
        return answer({"version": __version__})

    async def _answers(self, seconds: float) -> bool:
        """Says whether all engines answer in time; Refusal if one has failed."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._served.alive())
            self._asked = time.monotonic()
        # It is not cancelled but kept: to cancel it is to wait for the engine, too.
        probe = self._probe
        if not (await asyncio.wait([probe], timeout=seconds))[0]:
            return False
        try:
            probe.result()
        except Exception as error:
            raise _no(refused(error).error["message"], "engine_failed") from error
        return True


def _no(why: str, code: str = "not_ready") -> Refusal:
    return Refusal(503, why, None, code, "server_error")
