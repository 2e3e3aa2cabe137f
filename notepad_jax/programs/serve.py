"""The HTTP server: a policy on our engine behind OpenAI's API, until it is stopped.

The address is taken first and the weights are read then, so that a wrong port costs no minutes.
The engines run in threads of their own; this one answers HTTP. Above: commands; below: builders,
and `serve`, the room, whose application is only imported when it is needed: starlette and
uvicorn are an extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from notepad_jax import waiting
from notepad_jax.engine.engines import Engines
from notepad_jax.engine.service import EngineService
from notepad_jax.engine.settings import STOP_IDS, EngineSettings
from notepad_jax.model.config import PolicyConfig
from notepad_jax.planner import memory
from notepad_jax.programs import beside, measuring, pages, subjects, warm_up
from notepad_jax.programs.access import (
    CONTROL_KEY,
    Address,
    bounded,
    bracketed,
    key_of,
    pages_of,
    taken,
    web,
)
from notepad_jax.programs.beside import Beside, fingerprint_of
from notepad_jax.reading.rules import Rules
from notepad_jax.serve.completions.conversations import Conversations
from notepad_jax.serve.completions.model_card import Served
from notepad_jax.setup import builders, policies, stopping
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen, SilentScreen
from notepad_jax.text import chat
from notepad_jax.text.prompts import Template
from notepad_jax.types import MOST_TOP_LOGPROBS, PolicySnapshot

FAREWELL = 5  # seconds that replies have to end when the server is stopped


@dataclasses.dataclass(frozen=True)
class ServerRun:
    """What was served, when the server has ended."""

    name: str
    url: str


def run(config: Config, address: Address, name: str | None, screen: Screen) -> ServerRun:
    """Serves until Ctrl-C or SIGTERM, which end replies under way within seconds.

    Raises ValueError for an address that cannot be taken, or not without a key, and for a policy
    that cannot be served.
    """
    if address.adapters and address.trainers:
        raise ValueError("--rl changes the weights of one policy; leave --adapters out")
    app, admission, store, roots, connections, log = web()
    limits = bounded(config, connections, screen)
    key = key_of(address, address.key_variable)
    control_key = key_of(address, CONTROL_KEY) if address.trainers else None
    origins = pages_of(config.serve.cors, key)
    folder = Path(address.files) if address.files else None
    views, named = pages.views(address.runs), roots.DocumentRoots(address.documents)
    with taken(address) as place, store.Files(folder, named) as kept:
        url = f"http://{bracketed(address.host)}:{place.getsockname()[1]}/v1"
        if not config.policy:
            raise ValueError("there is nothing to serve; give --policy FOLDER")
        found = policies.resolved(config.policy, lambda line: None, ())
        name = name or served_name(found.name)
        others = beside.named(config, address.adapters, name)
        where = builders.to_read(config.engine)
        words = builders.words(config.policy, config.dtype, where)
        config = fitted(config, words, screen, others)  # before any weight
        policy = builders.load_policy(config.policy, config.dtype, where, screen.warn)
        weights = ServedWeights(config, policy, screen)
        programs = warm_up.Programs(screen)
        policy, others = beside.adapted(config, policy, others, screen)
        engines, served = opened(config, policy, name, weights, others, programs)
        gate = app.Gate(lambda *what: weights.adopted(engines, *what)) if address.trainers else None
        queue = admission.RequestQueue(served.slots, config.serve.queue, config.serve.queue_tokens)
        asgi = app.App(
            served, queue, key, gate, control_key, kept, views, limits.body_bytes, origins
        ).asgi
        server = connections.Server(asgi, limits, queue.counts.dropped.inc, FAREWELL)
        log.limit_rate()

        server.capture_signals = contextlib.nullcontext  # they come to `stop`
        stop = stopping.Stop()
        # What uvicorn raises when it is stopped, twice even, is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda record: stop.number is None)

        async def until_the_end() -> None:
            async with engines:
                place.listen()  # clients that connect from now on are answered
                said = f"a page to read with: {url.removesuffix('v1')}; Ctrl-C ends"
                models = [id for one in (served, *served.beside) for id in one.ids]
                screen.say(f"serving {' and '.join(models)} at {url} ({said})")
                with stop.patiently(), programs.compiling():
                    await _served(server, place, stop)

        with stop.watching():
            waiting.run(until_the_end())
        stop.check("")
    return ServerRun(served.name, url)


async def _served(server: Any, place: socket.socket, stop: stopping.Stop) -> None:
    """Serves until a signal; then lets every reply end, or be told that it does not."""
    serving = asyncio.ensure_future(server.serve([place]))
    noticed = asyncio.ensure_future(stop.noticed.wait())
    await asyncio.wait((serving, noticed), return_when=asyncio.FIRST_COMPLETED)
    noticed.cancel()
    server.should_exit = True
    await serving
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:  # uvicorn cancels them, and does not wait
        await asyncio.wait(others, timeout=FAREWELL)


def served_name(policy: str) -> str:
    """Returns a policy's model id: the name as the user wrote it; of an absolute path, the end."""
    path = Path(policy)
    return path.name if path.is_absolute() else path.as_posix()


# ---------------------------------------------------------------- the policy


def opened(
    config: Config, policy: builders.LoadedPolicy, name: str, weights: ServedWeights,
    others: Sequence[Beside] = (), programs: warm_up.Programs | None = None,
) -> tuple[Engines, Served]:  # fmt: skip
    """Returns engines that are not running yet, and the policy as the server sees it.

    `others` have their adapters among the policy's parameters, in order behind its own;
    `programs` is told what may be compiled before a request asks for it.
    """
    programs = programs or warm_up.Programs(SilentScreen())
    subject, rules = subjects.engine(config, policy, SilentScreen()), rules_of(config, policy)
    sizes = engine_settings(config, policy.config, rules, subject.template)
    for one in others:
        template = builders.template(one.config.reading, one.policy)
        theirs = rules_of(one.config, one.policy)
        sizes = larger(sizes, engine_settings(one.config, policy.config, theirs, template))
    grammars = schemas(policy)
    if grammars is not None:
        sizes = dataclasses.replace(sizes, mask_words=-(-policy.config.vocab_size // 32))
    snapshot = PolicySnapshot(0, policy.params)
    made = builders.service(
        config.engine, policy, rules, subject.template, snapshot, settings=sizes
    )
    if config.serve.warm_up:
        programs.plan(config.engine, policy, sizes)
    if isinstance(made, EngineService):
        made = Engines([made], builders.engines_mesh(config.engine))

    async def answers(number: int, service: EngineService) -> None:
        service.check_alive()

    async def alive() -> None:
        await made.each(answers)

    served = Served(
        name=name,
        tokenizer=policy.tokenizer,
        conversations=conversations(policy),
        template=subject.template,
        rules=rules,
        sampling=measuring.sampling(config, subject),
        seat=functools.partial(made.seat, adapters=1 if others else 0),
        alive=alive,
        missing=programs.missing,
        grammar=None if grammars is None else grammars.json,
        version=lambda: made.version,
        fingerprint=lambda: weights.fingerprint,
        slots=sizes.slots * made.count,
        max_prompt=sizes.max_prompt,
        max_completion=sizes.max_new_tokens,
        most_stops=STOP_IDS,
    )

    def its(number: int, one: Beside) -> Served:
        its_own = subjects.engine(one.config, one.policy, SilentScreen())
        return dataclasses.replace(
            served, name=one.name, tokenizer=one.policy.tokenizer,
            conversations=conversations(one.policy), template=its_own.template,
            rules=rules_of(one.config, one.policy),
            sampling=measuring.sampling(one.config, its_own),
            seat=functools.partial(made.seat, adapters=number), fingerprint=lambda: one.fingerprint,
        )  # fmt: skip

    every = tuple(its(number, one) for number, one in enumerate(others, 2))
    return made, dataclasses.replace(served, beside=every)


def rules_of(config: Config, policy: builders.LoadedPolicy | builders.Words) -> Rules:
    """Returns the rules of the server's readings, with the chunks of an evaluation.

    ValueError for one in rounds: what is read here is watched, chunk by chunk, as it comes in.
    """
    rules = builders.rules(config.reading, policy.tokenizer)
    if rules.goes_over:
        raise ValueError(
            f"reading.order is {rules.order} with {rules.passes} passes, and a server reads "
            "serially, once: uploads are read as they arrive; use --config.reading.order=serial "
            "--config.reading.passes=1"
        )
    return dataclasses.replace(rules, chunk_size=config.evaluate.chunk_size)


def larger(sizes: EngineSettings, others: EngineSettings) -> EngineSettings:
    """Returns the sizes of an engine that is large enough for both."""
    names = ("max_prompt", "max_new_tokens", "pages", "row_tokens")
    most = {name: max(getattr(sizes, name), getattr(others, name)) for name in names}
    return dataclasses.replace(sizes, **most)


def schemas(policy: builders.LoadedPolicy) -> Any | None:
    """Returns the compiler of JSON schemas for a policy's tokenizer; None: it is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    return importlib.import_module("notepad_jax.text.grammar").Grammars(policy.tokenizer)


def conversations(policy: builders.LoadedPolicy) -> Conversations | None:
    """Returns the conversations of the model's own chat template; None if it has none."""
    if not chat.has_template(policy.folder):
        return None
    return Conversations(chat.ChatTemplate.read(policy.folder), policy.tokenizer)


def engine_settings(
    config: Config, policy: PolicyConfig, rules: Rules, template: Template
) -> EngineSettings:
    """Returns the engine sizes of a reading, with room for the other requests of a server.

    A prompt of any client is a prefix, so that all its choices share it: the cache holds the
    longest one beside a completion.
    """
    turn = builders.engine_settings(config.engine, policy, rules, template)
    prompt = max(config.serve.max_prompt, turn.max_prompt)
    completion = max(config.serve.max_completion, turn.max_new_tokens)
    whole = turn.pages_for(prompt) + turn.pages_for(turn.page_size + 1 + completion)
    return dataclasses.replace(
        turn,
        max_prompt=prompt,
        max_new_tokens=completion,
        pages=max(turn.pages, whole),
        row_tokens=max(turn.row_tokens, turn.page_size + completion),  # also where it is scored
        top_logprobs=MOST_TOP_LOGPROBS,
    )


def fitted(
    config: Config, words: builders.Words, screen: Screen, others: Sequence[Beside] = ()
) -> Config:
    """Returns the config with pages that fit the machine; ValueError where nothing does.

    The engines are to be large enough for the readings of `others`, policies on the same base.
    """
    template, rules = builders.template(config.reading, words), rules_of(config, words)
    sizes = engine_settings(config, words.config, rules, template)
    for one in others:
        own = builders.template(one.config.reading, words)
        theirs = rules_of(one.config, words)
        sizes = larger(sizes, engine_settings(one.config, words.config, theirs, own))
    adapters = [one.adapters for one in others if one.adapters]
    return memory.to_read(config, words, template, rules, screen.say, sizes, others=adapters)


class ServedWeights:
    """The weights that are served, and their update."""

    def __init__(self, config: Config, policy: builders.LoadedPolicy, screen: Screen) -> None:
        self._config, self._policy, self._screen = config, policy.config, screen
        self.fingerprint = fingerprint_of(policy)
        self._one = asyncio.Lock()

    async def adopted(self, engines: Engines, name: str, version: int | None) -> None:
        """Returns once new turns start on the weights of `name`, which are read meanwhile.

        Raises ValueError for weights of another policy, or that are not what was written there.
        """
        async with self._one:
            where = builders.to_read(self._config.engine)
            policy = await asyncio.to_thread(
                builders.load_policy, name, self._config.dtype, where, self._screen.warn
            )
            if policy.config != self._policy:
                raise ValueError(f"{name} has another shape than the policy that is served")
            fingerprint = await asyncio.to_thread(fingerprint_of, policy)
            version = engines.version + 1 if version is None else version
            await engines.adopt(PolicySnapshot(version, policy.params))
            self.fingerprint = fingerprint
