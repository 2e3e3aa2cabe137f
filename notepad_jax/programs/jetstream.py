"""The gRPC server: a policy behind JetStream's stock orchestrator, until it is stopped.

`serve --jetstream` is for users with JetStream clients; what it lacks of `serve` stands in
docs/server.md. The address is taken first and the weights are read then. Above: commands; below:
`builders`, `access` (addresses, keys) and `serve` (sizes), whose words hold here, and
`engine.jetstream`, which is only imported when it is needed: google-jetstream and grpcio are no
dependencies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from notepad_jax import keys, waiting
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.programs import access, serve
from notepad_jax.reading.sampling import hashed_seed
from notepad_jax.serve.completions.detokenizer import Saying
from notepad_jax.setup import builders, stopping
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen
from notepad_jax.types import SamplingParams

LAST_LAUNCH = 1  # seconds that the engine has to end what it runs, when all replies have ended


def run(
    config: Config, address: access.Address, name: str | None, screen: Screen
) -> serve.ServerRun:
    """Serves until Ctrl-C or SIGTERM, which end replies under way within seconds.

    Raises ValueError for an address that cannot be taken, or not without a key, for a policy that
    cannot be served, and where JetStream is not installed.
    """
    options = {"rl": address.trainers, "files": address.files, "runs": address.runs,
               "documents": address.documents, "adapters": address.adapters}  # fmt: skip
    for option, given in options.items():
        if given:
            raise ValueError(
                f"--{option} is of OpenAI's API, and --jetstream has another; leave one of them out"
            )
    room = _room()
    key = access.key_of(address, address.key_variable)
    if config.engine.replicas > 1:
        raise ValueError(
            f"engine.replicas is {config.engine.replicas}, and JetStream has one engine; leave "
            f"it at 1, or serve without --jetstream"
        )
    config = keys.changed(config, {"engine.replicas": 1})  # not as many as fit
    with access.taken(address) as place:
        host, port = place.getsockname()[:2]
        if not config.policy:
            raise ValueError("there is nothing to serve; give --policy FOLDER")
        where = builders.to_read(config.engine)
        words = builders.words(config.policy, config.dtype, where)
        config = serve.fitted(config, words, screen)  # before any weight
        template = builders.template(config.reading, words)
        policy = builders.load_policy(config.policy, config.dtype, where, screen.warn)
        rules = serve.rules_of(config, policy)
        settings = alone(serve.engine_settings(config, policy.config, rules, template))
    # The stock server opens a socket of its own; nothing listened there, so the address is free.
    server = _opened(room, config, policy, settings, key, host, port)
    name = name or serve.served_name(policy.name)
    where = f"{access.bracketed(host)}:{port}"
    try:
        server.start()
        screen.say(
            f"serving {name} at {where} by JetStream's gRPC, {settings.slots} at a time, up to "
            f"{settings.max_prompt} + {settings.max_new_tokens} tokens each (Ctrl-C ends)"
        )
        _until_the_end(server)
    finally:
        server.abandon()  # whatever still runs, as a program that is being compiled
    return serve.ServerRun(name, where)


def _room() -> types.ModuleType:
    try:
        return importlib.import_module("notepad_jax.engine.jetstream.server")
    except ImportError as problem:
        raise ValueError(str(problem)) from None


def alone(settings: EngineSettings) -> EngineSettings:
    """The sizes of an engine that shares nothing: as many slots as the cache has whole contexts.

    JetStream inserts a prompt as soon as a slot is free, and then there must be pages for it.
    """
    context = settings.pages_for(settings.max_prompt + settings.max_new_tokens)
    slots = min(settings.slots, settings.pages // context)
    return dataclasses.replace(settings, slots=slots, top_logprobs=0)


def _opened(
    room: types.ModuleType, config: Config, policy: builders.LoadedPolicy,
    settings: EngineSettings, key: str | None, host: str, port: int,
) -> Any:  # fmt: skip
    """Returns the server, listening but not started."""
    tokenizer = policy.tokenizer
    usual = SamplingParams(1.0, 1.0, settings.max_new_tokens, tokenizer.stop_ids, 0)
    engine = room.PagedEngine(policy.config, settings, usual, builders.engines_mesh(config.engine))
    limits = room.CompletionLimits(
        vocabulary=tokenizer.vocab_size,
        max_prompt=settings.max_prompt,
        max_completion=settings.max_new_tokens,
        stop_ids=tokenizer.stop_ids,
        seed_of=lambda seed: hashed_seed("choice", seed, 0),  # as over HTTP
        key=key,
    )
    saying = functools.partial(Saying, tokenizer.decode)
    words = room.Codec(tokenizer.encode, saying, frozenset(tokenizer.stop_ids))
    most = settings.slots + config.serve.queue
    return room.StockServer(room.Driver(engine, policy.params), words, limits, most, host, port)


def _until_the_end(server: Any) -> None:
    """Waits for a signal, then lets replies end; raises Stopped, at once when another comes."""
    stop = stopping.Stop()

    async def waited() -> None:
        with stop.patiently():
            await stop.noticed.wait()
            ending = _begun(lambda: server.stop(serve.FAREWELL))
            latest = time.monotonic() + serve.FAREWELL + LAST_LAUNCH
            while ending.is_alive() and time.monotonic() < latest:
                await asyncio.sleep(0.05)

    with stop.watching():
        waiting.run(waited())
    stop.check("")


def _begun(work: Callable[[], None]) -> threading.Thread:
    """Returns a daemon thread, which no exit waits for."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
