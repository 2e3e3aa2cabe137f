"""Warm-up of a server: the programs of its engines, compiled in a thread while it serves.

A request that comes before all of them are there is served, too, and waits for those it needs. A
program is compiled by what `jit` itself looks up: what is compiled here is not compiled again.
Above: `serve`; below: engine.executor, which says what an engine runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.sharding import Mesh, NamedSharding

from notepad_jax.engine import executor
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.engine.shapes import Shape, shapes
from notepad_jax.parallel import mesh as meshes
from notepad_jax.setup import builders
from notepad_jax.setup.config.engine import EngineKeys
from notepad_jax.telemetry.screen import Screen


class Programs:
    """The programs to be compiled; owns the thread that compiles them, and says how far it is."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._left: list[Callable[[], object]] = []
        self._count, self._stopped, self._failure = 0, threading.Event(), ""

    def plan(
        self, engine: EngineKeys, policy: builders.LoadedPolicy, settings: EngineSettings
    ) -> None:
        """Notes all programs of the engines, on each row of devices that they run on."""
        there = builders.engines_mesh(engine)
        rows = [meshes.row(there, row) for row in range(there.shape["fsdp"])]

        def one(shape: Shape, row: Mesh) -> Callable[[], object]:
            params = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(row, x.sharding.spec)
                ),
                policy.params,
            )
            lowered = functools.partial(executor.lowered, policy.config, settings, params)
            return lambda: lowered(shape, row).compile()

        self.plan_these([one(shape, row) for shape in shapes(settings) for row in rows])

    def plan_these(self, programs: Sequence[Callable[[], object]]) -> None:
        """Notes what compiles one program each, in this order."""
        self._left, self._count = [*programs], len(programs)

    def missing(self) -> str:
        """Returns what requests may still have to wait for; "" if nothing is left."""
        if self._failure or not self._left:
            return self._failure
        return f"{self._count - len(self._left)} of {self._count} programs are compiled"

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compiles while the body runs; at its end the program that was begun is waited for."""
        thread = threading.Thread(target=self._compile, name="warm-up")
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join()

    def _compile(self) -> None:
        began = time.monotonic()
        while self._left and not self._stopped.is_set():
            try:
                self._left[0]()
            except Exception as error:
                self._failure = f"a program of the engine cannot be compiled: {error}"
                self._screen.warn(self._failure.splitlines()[0])
                return
            del self._left[0]
        if self._count and not self._left:
            seconds = time.monotonic() - began
            self._screen.say(f"ready: all {self._count} programs are compiled ({seconds:.0f} s)")
