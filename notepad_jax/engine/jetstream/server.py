"""JetStream's stock orchestrator and gRPC server over our engine, repaired for its clients.

A request comes to `Orchestrator` in the server's event loop: it is checked, its text becomes ids,
and the stock `Decode` queues it. The stock threads of `Driver` run it through the engine and hand
its tokens back; here they become text again, as they come. What each of the three mends is listed
in `compat`. Importing this module needs google-jetstream, grpcio and prometheus_client, so only
`programs.jetstream` does, when a user asks for it. Below: `engine` and `asked`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from notepad_jax.engine.jetstream import compat
from notepad_jax.engine.jetstream.asked import (
    CompletionLimits,
    JetStreamRequest,
    NoKey,
    Refused,
    checked,
)
from notepad_jax.engine.jetstream.engine import DecodeState, PagedEngine
from notepad_jax.model.parameters import Params
from notepad_jax.types import Tokens

server_lib = compat.load_server()
orchestrator = server_lib.orchestrator
grpc, messages = orchestrator.grpc, orchestrator.jetstream_pb2

THREADS = 4  # of gRPC's executor, where texts become ids; its handlers are coroutines


class EngineFailed(RuntimeError):
    """The engine failed, so no request will be answered any more."""


class TextSoFar(Protocol):
    """An incremental detokenizer: the text of one completion, as its tokens come."""

    def add(self, token: int) -> str: ...

    def rest(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class Codec:
    """A policy's tokenizer: how prompts become ids, and completions text."""

    encode: Callable[[str], Tokens]
    saying: Callable[[], TextSoFar]
    stop_ids: frozenset[int]  # they are told as ids, and are no text


class _OneState:
    """An engine whose decode state is made once."""

    def __init__(self, engine: PagedEngine) -> None:
        self._engine, self._state = engine, engine.init_decode_state()

    def init_decode_state(self) -> DecodeState:
        return self._state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Driver(orchestrator.Driver):
    """The stock driver threads over one engine; a thread's failure is told to every client."""

    def __init__(self, engine: PagedEngine, params: Params) -> None:
        self.failure: EngineFailed | None = None
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # channels that clients listen to
        self._lock = threading.Lock()
        placed = engine.load_params(params)
        super().__init__(
            prefill_engines=[engine], generate_engines=[engine], prefill_params=[placed],
            generate_params=[placed], interleaved_mode=True, jax_padding=False,
        )  # fmt: skip

    @property
    def queued(self) -> int:
        """How many requests wait for their prefill, also those whose client has hung up."""
        return self._prefill_backlog.qsize()

    def place_request_on_prefill_queue(self, request: Any) -> None:
        """Queues a request as the stock driver does; EngineFailed if its threads have ended."""
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._waiting.add(request.return_channel)
        super().place_request_on_prefill_queue(request)

    def abandon(self) -> None:
        """Lets the process end now: the one thread that would keep it is woken."""
        self.live = False
        for backlog in self._detokenize_backlogs:
            with contextlib.suppress(orchestrator.queue.Empty):
                while True:
                    backlog.get_nowait()
            with contextlib.suppress(orchestrator.queue.Full):
                backlog.put_nowait(None)

    def _process_prefill_content(self, request: Any, *_: Any) -> tuple[JetStreamRequest, int]:
        """The prompt as it was asked; a single token of it if the client has hung up."""
        asked, gone = request.prefill_content, request.return_channel.cancelled
        ids = asked.ids[:1] if gone() else asked.ids
        return dataclasses.replace(asked, ids=ids, gone=gone), len(ids)

    def _prefill_thread(self, idx: int) -> None:
        self._told(super()._prefill_thread, idx)

    def _transfer_thread(self, idx: int) -> None:
        self._told(super()._transfer_thread, idx)

    def _generate_thread(self, idx: int) -> None:
        self._told(self._generate, idx)

    def _generate(self, idx: int) -> None:
        """Runs the stock thread, also past its assertion that a slot is taken.

        It has looked for that before, and the thread that detokenizes may free the last slot in
        between: then all are free, nothing is lost, and it begins anew with the same state.
        """
        engine, free = _OneState(self._generate_engines[idx]), self._generate_slots[idx]
        self._generate_engines[idx] = engine
        while True:
            try:
                return super()._generate_thread(idx)
            except AssertionError:
                if free.qsize() < engine.max_concurrent_decodes:
                    raise

    def _detokenize_thread(self, idx: int) -> None:
        self._told(super()._detokenize_thread, idx)

    def _told(self, work: Callable[[int], None], idx: int) -> None:
        """Runs a thread; the stock ones kill the process when they fail."""
        try:
            work(idx)
        except Exception as problem:
            logging.getLogger("jetstream").exception("a thread of JetStream's driver failed")
            with self._lock:
                self.failure = EngineFailed(f"the engine failed: {problem!r}")
                self.live = False
                waiting = list(self._waiting)
            for channel in waiting:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    channel.set_exception(self.failure)


class Orchestrator(orchestrator.LLMOrchestrator):
    """The stock gRPC service behind checks: a refused request gets a gRPC status that says why."""

    def __init__(self, driver: Driver, words: Codec, limits: CompletionLimits, most: int) -> None:
        """`most` requests may be under way, waiting ones included."""
        super().__init__(driver)
        self._words, self._limits, self._most = words, limits, most
        self.under_way = 0

    async def Decode(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yields a completion as it is made: ids, and of a text also the text."""
        if max(self.under_way, self._driver.queued) >= self._most:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the server is busy; come again later"
            )
        self.under_way += 1
        try:
            asked = await self._checked(request, context)
            saying = None
            if request.WhichOneof("content") == "text_content":
                saying = self._words.saying()
            async for response in super().Decode(asked, context):
                if sample := self._sample(response, saying):
                    yield sample
            rest = saying.rest() if saying else ""
            if rest:
                yield _response(rest, ())
        except EngineFailed as problem:
            await context.abort(grpc.StatusCode.INTERNAL, str(problem))
        except concurrent.futures.CancelledError:
            return  # the client hung up, and the stock channel says so in a way of its own
        finally:
            self.under_way -= 1

    async def _checked(self, request: Any, context: Any) -> JetStreamRequest:
        try:
            return await asyncio.to_thread(
                checked, request, context.invocation_metadata(), self._words.encode, self._limits
            )
        except NoKey as problem:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(problem))
        except Refused as problem:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def _get_prefill_content(self, request: JetStreamRequest) -> tuple[JetStreamRequest, bool]:
        """What the stock `Decode` queues; to it every prompt is one of token ids."""
        return request, True

    def _sample(self, response: Any, saying: TextSoFar | None) -> Any:
        """A launch's tokens with their text, if it is wanted; None where there are none."""
        ids = response.stream_content.samples[0].token_ids
        if not ids:
            return None
        if saying is None:
            return response
        said = [saying.add(i) for i in ids if i not in self._words.stop_ids]
        return _response("".join(said), ids)


def _response(text: str, ids: Any) -> Any:
    content = messages.DecodeResponse.StreamContent
    sample = content.Sample(text=text, token_ids=ids)
    return messages.DecodeResponse(stream_content=content(samples=[sample]))


class StockServer(server_lib.JetStreamServer):
    """The stock server at one address. `start` it, and `stop` or `abandon` it."""

    def __init__(
        self,
        driver: Driver,
        words: Codec,
        limits: CompletionLimits,
        most: int,
        host: str,
        port: int,
    ) -> None:
        """At `host`, a numeric address. ValueError where another server listens already."""

        def served(driver: Driver) -> Orchestrator:
            self.orchestrator = Orchestrator(driver, words, limits, most)
            return self.orchestrator

        host = f"[{host}]" if ":" in host else host
        try:
            with compat.built_with(server_lib, host, served):
                super().__init__(driver, THREADS, port, grpc.insecure_server_credentials())
        except RuntimeError as problem:
            self.abandon()
            raise ValueError(
                f"cannot listen at {host}:{port} ({problem}); choose another --port or --host"
            ) from None

    def stop(self, farewell: float = 0.0) -> None:
        """Ends: replies under way have `farewell` seconds, and then threads and loop end.

        The stock one ends its threads first, and clients wait for what no thread makes.
        """
        closing = self._grpc_server.stop(farewell)
        asyncio.run_coroutine_threadsafe(closing, self._loop).result()
        self._driver.stop()
        self._end_loop()

    def abandon(self) -> None:
        """Ends at once what would keep the process, whatever runs; also after `stop`."""
        self._driver.abandon()
        self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._executor.shutdown(wait=False)
