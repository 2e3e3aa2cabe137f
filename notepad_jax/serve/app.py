"""The ASGI application: the server's routes, each from a request body to a response.

    uvicorn -> Door (key) -> route -> requests (checked) -> RequestQueue -> choices -> responses

A request is checked as far as it can be before it costs anything, and takes a seat at one engine,
where all its choices share the prompt. Everything of one request runs in one coroutine, which is
cancelled when its client hangs up. Above: programs.serve, which brings the policy; below: the
rest of this room. `NAME:notepad` is handed to `chat_model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from notepad_jax.serve.browser.renderers import Renderers
from notepad_jax.serve.browser.routes import PageRoutes
from notepad_jax.serve.completions import prompt_logprobs, requests
from notepad_jax.serve.completions.admission import RequestQueue, Spent
from notepad_jax.serve.completions.choices import Delta, WholeChoice, choice, together
from notepad_jax.serve.completions.control import PATHS, Gate, Generated, Trainers, generation
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.serve.completions.messages import Message, messages
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.serve.completions.requests import Chat, Continue
from notepad_jax.serve.completions.responses import Chats, Completions, Reply
from notepad_jax.serve.documents.routes import FileRoutes
from notepad_jax.serve.documents.store import Files
from notepad_jax.serve.health import Health
from notepad_jax.serve.http import bodies, web
from notepad_jax.serve.http.connections import ConnectionLimits
from notepad_jax.serve.http.errors import Refusal, bad
from notepad_jax.serve.http.log import request_id
from notepad_jax.serve.http.sessions import Sessions
from notepad_jax.serve.http.web import GONE, Door, Events, answer, body_of, event, refused, told
from notepad_jax.serve.readings import chat_model, dialogue
from notepad_jax.serve.readings.jobs import ReadingJobs
from notepad_jax.serve.readings.routes import ReadingRoutes
from notepad_jax.serve.readings.single_flight import SingleFlight, likeness
from notepad_jax.text.token_blocks import well_formed
from notepad_jax.types import Prompt, Streamer, Tokens, tokens

USUAL = 16  # tokens of a completion without a limit, as OpenAI has it; chats have all there are

Courses = Callable[[Streamer], Sequence[AsyncGenerator[Delta]]]


class App:
    """The server's application, with the queue in front of a policy; `asgi` is what uvicorn runs.

    With a gate trainers are served, too; `control_key` is theirs. `files`: where documents are
    kept; without, they end with the application. `views`: what browsers are shown, if anything.
    `body_bytes`: of all bodies in memory that are not complete. Web pages of `origins` may ask.
    """

    def __init__(
        self, served: Served, queue: RequestQueue, key: str | None, gate: Gate | None = None,
        control_key: str | None = None, files: Files | None = None, views: Renderers | None = None,
        body_bytes: int = ConnectionLimits.body_bytes, origins: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.served, self.queue, self.gate = served, queue, gate
        self.files = files or Files()
        self._joined, self._memories = SingleFlight(), dialogue.Memories()
        self.readings = ReadingJobs(served, self.files, queue, lambda: self._seat(served))
        self._documents = FileRoutes(self.files)
        readers = ReadingRoutes(served, self.files, self.readings)
        routes = [
            *Health(served).routes(),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            *self._documents.routes(),
            *readers.routes(),
        ]
        sessions = Sessions(key, views.entry) if key and views else None
        self._pages = None
        if views is not None:
            self._pages = PageRoutes(views, self.readings, readers.write_page_trace, sessions)
            routes += self._pages.routes()
        if gate is not None:
            routes.append(Route("/generate", self.generate, methods=["POST"]))
            routes += Trainers(gate, served).routes()
        handled = told(self._count)
        routes = [Route(r.path, handled(r.endpoint), methods=r.methods) for r in routes]
        handlers = {HTTPException: _not_there}
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._life)
        app.state.bodies = web.Bodies(body_bytes)
        self.asgi = Door(app, key, control_key or key, PATHS, sessions, origins)

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncGenerator[None]:
        web.have_threads()
        await self.readings.open()
        yield
        await self.readings.close()
        self._documents.uploads.close()
        if self._pages is not None:
            await self._pages.close()

    def _seat(self, served: Served) -> contextlib.AbstractContextManager[Streamer]:
        seat = served.seat
        return seat() if self.gate is None else self.gate.seat(seat)

    def _count(self, status: int) -> None:
        counts = self.queue.counts
        known = {GONE: counts.gone, 429: counts.refused}
        if counter := counts.failed if status >= 500 else known.get(status):
            counter.inc()

    # ------------------------------------------------------------ about the server

    async def metrics(self, request: Request) -> Response:
        return Response(self.queue.counts.text(), media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        every = (self.served, *self.served.beside)
        return answer({"object": "list", "data": [one.card(m) for one in every for m in one.ids]})

    async def model(self, request: Request) -> Response:
        model = request.path_params["model"]
        return answer(self.served.named(model).card(model))

    # ------------------------------------------------------------ words and ids

    async def tokenize(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("model", "prompt", "messages"))
        served = self._named(body)
        if "messages" in body:
            ids = await self._conversation(served, messages(body))
        elif isinstance(body.get("prompt"), str):
            ids = await asyncio.to_thread(served.tokenizer.encode, well_formed(body["prompt"]))
        else:
            raise bad("prompt", "give prompt, a text, or messages")
        longest = served.max_prompt + served.max_completion
        return answer({"count": len(ids), "max_model_len": longest, "tokens": ids.tolist()})

    async def detokenize(self, request: Request) -> Response:
        body = bodies.parsed(await body_of(request))
        bodies.check_names(body, ("model", "tokens"))
        served = self._named(body)
        ids = served.known(requests.token_ids(body.get("tokens"), "tokens"), "tokens")
        text = await asyncio.to_thread(served.tokenizer.decode, ids.tolist())
        return answer({"prompt": text})

    def _named(self, body: bodies.Body) -> Served:
        """Returns the policy that a body names, or the first; Refusal if there is none."""
        if body.get("model") is None:
            return self.served
        return self.served.named(bodies.text(body, "model", requests.LISTED))

    # ------------------------------------------------------------ completions

    async def chat(self, request: Request) -> Response:
        body = await body_of(request)
        chat = requests.chat(bodies.parsed(body))
        served = self.served.named(chat.model)
        if served.resolved(chat.model):
            return await self._reading(request, served, chat, body)
        if chat.limits or chat.how.memories:
            raise bad("notepad", f"{chat.model} has no notepad; {served.ids[1]} has")
        if chat.questions:
            raise bad("questions", f"{chat.model} takes no questions; {served.ids[1]} does")
        ids = await self._conversation(served, chat.messages)
        stops = served.conversations.stop_ids
        return await self._continued(request, Chats, chat, [ids], stops, "messages")

    async def completions(self, request: Request) -> Response:
        given = requests.completion(bodies.parsed(await body_of(request)))
        if self.served.resolved(given.model):
            mend = f"POST /v1/chat/completions, or use {self.served.named(given.model).name}"
            raise bad("model", f"{given.model} reads documents, as a chat does; {mend}")
        return await self._texts(request, Completions, given)

    async def _texts(self, request: Request, kind: type[Completions], given: Continue) -> Response:
        prompts = []
        for prompt in given.prompts:
            if isinstance(prompt, str):
                prompts.append(await asyncio.to_thread(self.served.tokenizer.encode, prompt))
            else:
                prompts.append(self.served.known(prompt, "prompt"))
        stops = self.served.tokenizer.stop_ids
        return await self._continued(request, kind, given, prompts, stops, "prompt")

    async def _conversation(self, served: Served, messages: Sequence[Message]) -> Tokens:
        if served.conversations is None:
            raise bad(
                "messages", f"{served.name} has no chat template, so it takes no messages; "
                f"use /v1/completions, or {served.ids[1]} for a document and a question",
            )  # fmt: skip
        return await served.conversations.tokens(messages)

    async def _continued(
        self, request: Request, kind: type[Reply], given: Chat | Continue,
        prompts: Sequence[Tokens], usual_stops: Sequence[int], param: str,
    ) -> Response:  # fmt: skip
        served, how = self.served.named(given.model), given.how
        for ids in prompts:
            if not len(ids):
                raise bad(param, "a prompt is empty; there is nothing to continue")
            if len(ids) > served.max_prompt:
                raise bad(
                    param, f"a prompt has {len(ids):,} tokens and may have {served.max_prompt:,}; "
                    f"{served.ids[1]} reads documents of any length", "context_length_exceeded",
                )  # fmt: skip
        usual = USUAL if isinstance(given, Continue) else served.max_completion
        limit = how.max_tokens or min(usual, served.max_completion)
        if limit > served.max_completion:
            raise bad("max_tokens", f"max_tokens is {limit} and may be {served.max_completion}")
        stops = served.stops(usual_stops, how.stop_token_ids)
        otherwise = secrets.randbits(62)
        grammar = await asyncio.to_thread(served.grammar_of, how.schema)

        def courses(seat: Streamer) -> list[AsyncGenerator[Delta]]:
            made = []
            for index in range(len(prompts) * how.n):
                ids = prompts[index // how.n]
                seed = how.seed_of(index, otherwise)
                params = how.sampling(limit, stops, seed, grammar)
                prompt = Prompt(tokens(ids[:-1].copy()), tokens(ids[-1:].copy()))
                saying = Saying(served.tokenizer.decode, how.stop)
                made.append(choice(seat, prompt, params, saying, index))
            for number, ids in enumerate(prompts[:scores]):
                tell = functools.partial(reply.scores.__setitem__, number)
                about = params.temperature, how.prompt_logprobs, served.max_completion
                made.append(prompt_logprobs.course(seat, ids, *about, tell))
            return made

        reply = kind(given.model, served.fingerprint(), how, served.tokenizer, prompts)
        count, size = len(prompts) * how.n, how.n * sum(len(ids) + limit for ids in prompts)
        scores = len(prompts) if how.prompt_logprobs is not None else 0
        size += sum(map(len, prompts[:scores]))
        deltas = self._made(served, courses, reply, self.queue.admitted(count + scores, size))
        return await self._answered(request, reply, deltas, count)

    async def _reading(self, request: Request, served: Served, chat: Chat, body: bytes) -> Response:
        about = served, self.files, self._memories, chat
        questions = await asyncio.to_thread(chat_model.asked, *about)
        otherwise = secrets.randbits(62)

        def courses(seat: Streamer) -> list[AsyncGenerator[Delta]]:
            seeds = [chat.how.seed_of(index, otherwise) for index in range(len(questions))]
            return [
                chat_model.reading(seat, served, question, seed, index, watched)
                for index, (question, seed) in enumerate(zip(questions, seeds, strict=True))
            ]

        count, watched = len(questions), chat.how.memories is not None
        reply = Chats(chat.model, served.fingerprint(), chat.how, served.tokenizer, [])
        size = count * (served.max_prompt + served.max_completion)
        certain = chat.how.seed is not None or not questions[0].sampling.temperature
        now = [served.fingerprint(), *questions[0].chunks.document.digests]
        deltas = self._joined.follow(
            likeness(request, body, now, chat.how.stream, certain),
            lambda: self._made(served, courses, reply, self.queue.admitted(count, size)),
        )
        return await self._answered(request, reply, deltas, count)

    async def generate(self, request: Request) -> Response:
        given = generation(bodies.parsed(await body_of(request)), self.served.name)
        return await self._texts(request, Generated, given)

    # ------------------------------------------------------------ replies

    async def _answered(
        self, request: Request, reply: Reply, deltas: AsyncGenerator[Delta | None], count: int
    ) -> Response:
        """Returns the response of a request's choices, streamed or whole; see `_made`."""
        await anext(deltas)  # refused or admitted
        headers = {"X-Request-Id": request_id(request)}
        if reply.how.stream:
            return Events(self._events(reply, deltas, count), deltas, headers)
        choices = [WholeChoice() for _ in range(count)]

        async def every() -> None:
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    choices[delta.index].add(delta)

        async def body() -> dict[str, Any]:
            await every()
            return reply.whole(choices)

        whole = await web.unless_gone(request, body())
        return Response(b"", GONE) if whole is None else answer(whole, headers=headers)

    async def _made(
        self, served: Served, courses: Courses, reply: Reply,
        place: contextlib.AbstractContextManager[None],
    ) -> AsyncGenerator[Delta | None]:  # fmt: skip
        """Yields None when the request was admitted, then the deltas of its choices."""
        counts, began, first = self.queue.counts, time.monotonic(), True
        spent = Spent(counts)
        with place, self._seat(served) as seat:
            counts.prompt_tokens.inc(sum(map(len, reply.prompts)))
            yield None
            async with contextlib.aclosing(together(courses(seat))) as deltas:
                async for delta in deltas:
                    if first and delta.memory is None:
                        counts.first.observe(time.monotonic() - began)
                        first = False
                    spent.take(delta.index, len(delta.tokens), delta.notes)
                    if delta.finish:
                        counts.ended.labels(delta.finish).inc()
                    yield delta
            counts.whole.observe(time.monotonic() - began)

    async def _events(
        self, reply: Reply, deltas: AsyncGenerator[Delta], count: int
    ) -> AsyncGenerator[bytes]:
        """Yields a reply as server-sent events; an error in the middle is the last of them."""
        async with contextlib.aclosing(deltas):
            for first in filter(None, map(reply.first, range(count))):
                yield event(first)
            try:
                async for delta in deltas:
                    yield event(reply.chunk(delta))
            except Exception as error:
                refusal = refused(error)
                self._count(refusal.status)
                yield event({"error": refusal.error})
                return
            except (GeneratorExit, asyncio.CancelledError):
                self._count(GONE)
                raise
        if reply.how.include_usage:
            yield event(reply.last())
        yield event("[DONE]")


async def _not_there(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    refusal = Refusal(error.status_code, message)
    return answer({"error": refusal.error}, refusal.status, dict(error.headers or {}))
