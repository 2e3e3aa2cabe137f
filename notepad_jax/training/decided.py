"""Settings that a run left to its machine (dtypes, pages of the KV cache), kept for `--resume`.

A config says "" and 0 of them, and every machine has its own answer. A run has one: other pages are
other batches, and another dtype rounds otherwise, so a run that goes on with other ones does not
repeat bit by bit. So the answers of its beginning lie in machine.json beside the run's config.json,
which keeps what was asked; commands that read with the run later (`ask`, `eval`) take the config's,
and so what suits their own machine. Above: train; below: planner.memory and planner.machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from notepad_jax import keys
from notepad_jax.parallel import hosts
from notepad_jax.planner import machine, memory
from notepad_jax.setup import builders, sizes
from notepad_jax.setup.config.whole import Training
from notepad_jax.telemetry.identity import read_json, write_json
from notepad_jax.telemetry.screen import Screen

FILE = "machine.json"
DTYPE, CACHE, PAGES = "dtype", "engine.cache_dtype", "engine.pages"


def kept(
    config: Training, folder: Path, words: builders.Words, resume: bool, screen: Screen,
    see: machine.Look = machine.look,
) -> Training:  # fmt: skip
    """Returns the config with what the machine decides, as the run in `folder` began with it.

    A new run decides here and writes it down; one that goes on keeps it, but for what its config
    says by now. Raises ValueError for what does not fit, and for a file that is damaged.
    """
    path = folder / FILE
    found = hosts.broadcast(lambda: read(path) if resume else {})
    here = {DTYPE: words.config.dtype, CACHE: config.engine.cache_dtype or words.config.dtype}
    asked = {DTYPE: config.dtype, CACHE: config.engine.cache_dtype}
    other = [key for key in here if not asked[key] and found.get(key, here[key]) != here[key]]
    if other:
        ways = " ".join(f"--config.{key}={here[key]}" for key in other)
        screen.say(
            f"this run began with {' and '.join(f'{key}={found[key]}' for key in other)} and goes "
            f"on so; what suits this machine is {ways}"
        )
    config = filled(config, found)
    words = builders.words(config.policy, config.dtype, builders.to_learn(config))
    config = fitted(config, words, screen, see)
    ours = {
        DTYPE: words.config.dtype,
        CACHE: config.engine.cache_dtype or words.config.dtype,
        PAGES: config.engine.pages,
    }
    # The engines of all hosts are alike, whatever is free on each.
    ours = hosts.broadcast(lambda: ours)
    if hosts.first() and not found:
        write_json(path, ours)
    return filled(config, ours)


def fitted(
    config: Training, words: builders.Words, screen: Screen, see: machine.Look = machine.look
) -> Training:
    """Returns a training config with cache pages that fit memory; ValueError where nothing does."""
    template = builders.template(config.reading, words)
    rules = builders.rules(config.reading, words.tokenizer)
    settled = sizes.settled(config, template, rules)
    fitting = memory.to_train(settled, words, template, rules, screen.say, see)
    return filled(config, {PAGES: fitting.engine.pages})


def read(path: Path) -> dict[str, Any]:
    """Returns what a run had decided; {} for one that was stopped before it had."""
    return read_json(path, "remove it, and the machine decides anew") if path.is_file() else {}


def filled(config: Training, found: dict[str, Any]) -> Training:
    """Returns the config, with values of `found` where it says nothing."""
    here = {DTYPE: config.dtype, CACHE: config.engine.cache_dtype, PAGES: config.engine.pages}
    return keys.changed(config, {key: said or found.get(key, said) for key, said in here.items()})
