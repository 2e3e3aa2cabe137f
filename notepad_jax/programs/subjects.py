"""The subject of an evaluation: our engine over a policy, or an OpenAI-compatible endpoint.

Both are a completer behind the same memory agent, with the tokenizer that counts and the template
that asks. Above: evaluate, build and quickstart; below: setup.builders and reading.endpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping

from notepad_jax import waiting
from notepad_jax.engine.metered import Metered
from notepad_jax.eval import methods
from notepad_jax.planner import memory
from notepad_jax.reading.endpoint import EndpointCompleter, bare_turn
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import builders, task_stream
from notepad_jax.setup.config.whole import Config
from notepad_jax.setup.eval_jobs import SYNTHETIC
from notepad_jax.telemetry.screen import Screen
from notepad_jax.text.approximate import ApproximateTokenizer
from notepad_jax.text.prompts import Template
from notepad_jax.text.tokenizer import Tokenizer, open_tokenizer
from notepad_jax.types import Completer, PolicySnapshot


@dataclasses.dataclass(frozen=True)
class Subject:
    """A reader under test. `opened` gives a completer for readings within the limits of `rules`."""

    name: str
    tokenizer: Tokenizer
    template: Template
    opened: Callable[[Rules], contextlib.AbstractAsyncContextManager[Completer]]
    # Config keys of what it computes in, with what they came to; {}: not known here.
    dtypes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    policy: builders.LoadedPolicy | None = None  # that our engine reads with


def engine(config: Config, policy: builders.LoadedPolicy, screen: Screen) -> Subject:
    """Returns the subject of our engine over a policy; `screen` is told of its work."""
    template = builders.template(config.reading, policy)
    snapshot = PolicySnapshot(0, policy.params)
    return Subject(
        name=policy.name,
        tokenizer=policy.tokenizer,
        template=template,
        opened=lambda rules: builders.service(
            config.engine,
            policy,
            rules,
            template,
            snapshot,
            lambda executor: Metered(executor, screen.work),
        ),
        dtypes={
            "dtype": policy.config.dtype,
            "engine.cache_dtype": config.engine.cache_dtype or policy.config.dtype,
        },
        policy=policy,
    )


def endpoint(config: Config, screen: Screen) -> Subject:
    """Returns the subject of an OpenAI-compatible server, with turn markers of its own."""
    e = config.endpoint
    tokenizer = open_tokenizer(e.tokenizer, screen.warn) if e.tokenizer else ApproximateTokenizer()

    @contextlib.asynccontextmanager
    async def opened(rules: Rules) -> AsyncIterator[Completer]:
        async with EndpointCompleter(
            e.url, e.model, tokenizer, e.key_variable or None, e.at_once, e.timeout
        ) as completer:
            try:
                yield completer
            finally:
                told = dataclasses.asdict(completer.stats).items()
                screen.say("endpoint: " + ", ".join(f"{n:,} {what}" for what, n in told if n))

    async def model() -> str:
        async with EndpointCompleter(e.url, e.model, tokenizer, e.key_variable or None) as found:
            return found.model

    return Subject(
        name=f"{e.model or waiting.run(model())} at {e.url}",
        tokenizer=tokenizer,
        template=Template.load(config.reading.template, tokenizer, bare_turn(tokenizer)),
        opened=opened,
    )


def named(config: Config, screen: Screen, suite: str = "") -> Subject:
    """Returns the reader that the config names.

    Raises ValueError if it names none, or one that cannot know the `suite` it will be asked.
    """
    if config.by_endpoint:
        return endpoint(config, screen)
    if not config.policy:
        raise ValueError("there is nobody to read; give --policy FOLDER or --endpoint URL")
    where = builders.to_read(config.engine)
    words = builders.words(
        config.policy, config.dtype, where
    )  # what cannot be is said before loading
    if suite == SYNTHETIC and not task_stream.knows_starter(words.tokenizer):
        raise ValueError(
            f"the suite synthetic is in the starter's language, whose words {config.policy} does "
            f"not have; choose another --suite"
        )
    template = builders.template(config.reading, words)
    config = memory.to_read(config, words, template, _longest(config), screen.say)
    policy = builders.load_policy(config.policy, config.dtype, where, screen.warn)
    return engine(config, policy, screen)


def _longest(config: Config) -> Rules:
    """The limits of the longest readings that the config may ask for."""
    e, reading = config.evaluate, builders.rules(config.reading)
    chunks = {reading.chunk_size, e.chunk_size}
    if set(e.methods) - {methods.NOTEPAD}:
        chunks.add(e.context)
    return dataclasses.replace(reading, chunk_size=max(chunks))
