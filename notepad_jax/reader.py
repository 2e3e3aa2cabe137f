"""`notepad_jax.Reader`: a policy or an endpoint, kept open to answer questions about documents.

`load` opens a policy on our engine, or a server's endpoint; `read` (awaitable: `aread`) asks one
question about one document. The completer is opened by the first reading and stays open, in a
thread with an event loop of its own: so it works in scripts, in notebooks and in servers alike,
readings that run at the same time share the engine's launches, and a question about a document
that was just read finds its chunks in the cache. `notepad-jax ask` is this and its printing.
Above: commands, and code that imports notepad_jax; below: programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from notepad_jax import functions, waiting
from notepad_jax.programs import ask, ask_progress, file_document, measuring, questions, subjects
from notepad_jax.reading.rules import Rules
from notepad_jax.setup import builders, configuration, process, settings
from notepad_jax.setup.config.whole import Config
from notepad_jax.telemetry.screen import Screen, SilentScreen
from notepad_jax.types import Completer, Document


class Reader:
    """An open policy or endpoint: use as `with Reader.load(...) as reader:`, or `close` it, or let
    it go with the process."""

    def __init__(self, config: Config, screen: Screen | None = None) -> None:
        """Loads what the config names; `load` finds a config. Raises as it does."""
        self._screen = SilentScreen() if screen is None else screen
        configuration.check_use(config, "ask")
        process.prepared(config)
        # A document is read by one engine: the policy's other copies would have nothing to do.
        one = [f"{configuration.FLAG}engine.{name}=1" for name in ("replicas", "per_cpu")]
        config = configuration.changed(config, one)
        self._subject = subjects.named(config, self._screen)
        self._rules = dataclasses.replace(
            builders.rules(config.reading, self._subject.tokenizer),
            chunk_size=config.evaluate.chunk_size,
        )
        self._sampling = measuring.sampling(config, self._subject)
        self._loop = waiting.Loop()
        self._open = _Open(self._subject, self._rules)
        self._end = weakref.finalize(self, _close, self._loop, self._open)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        step: int | str | None = None,
        memory_update: settings.MemoryRule | None = None,
        config: settings.Given = "",
        changes: Mapping[str, Any] | None = None,
        screen: Screen | None = None,
    ) -> Reader:
        """Opens a reader.

        Args:
          source: a run ("runs/mine"), a Hugging Face folder, or the URL of an OpenAI-compatible
            server ("http://localhost:8000/v1").
          step: of a run: a number, or "best"; None takes the newest.
          memory_update: what becomes the memory, instead of what the config says: one of its
            names, or a function (`reading.memory_rules`).
          config: the config that says how to read, a name or a file; "" takes the run's own, and
            for other sources the one that suits them.
          changes: values of that config, as {"evaluate.chunk_size": 2000}.
          screen: where progress is shown; None shows nothing.
        Raises ValueError for what cannot be opened, in one line that says why.
        """
        with contextlib.ExitStack() as stack:
            said = settings.changes_of(changes) | settings.lent(stack, None, memory_update)
            return cls(settings.to_read(source, step, config, said), screen)

    def read(
        self, document: str | os.PathLike[str] | Document, question: str,
        trace: str | os.PathLike[str] | None = None,
        on_progress: Callable[[ask_progress.Progress], None] = lambda now: None,
    ) -> ask.Answer:  # fmt: skip
        """Reads the document and answers the question.

        A text or a path names a UTF-8 text file; for a text in memory give
        `notepad_jax.TextDocument(text)`, or anything with a method `pieces()` that yields text
        from the beginning. The reading, turn by turn, is appended to the file `trace`, of which
        `notepad-jax trace` makes a page. `on_progress` is called, in the reader's thread, when a
        turn begins, with every few tokens that it writes, and when it has ended; it shall return
        soon, and changes no token. Interrupted, the reading ends and the reader is ready for
        another.
        Raises ValueError for a document or a question that cannot be read, CompleterFailed, and
        what `on_progress` raises.
        """
        return self._loop.run(self._reading(document, question, trace, on_progress))

    def read_all(
        self, document: str | os.PathLike[str] | Document, questions: Sequence[str],
        trace: str | os.PathLike[str] | None = None,
    ) -> list[ask.Answer]:  # fmt: skip
        """Reads the document once for several questions; returns their answers in their order.

        Each answer is the one that `read` gives. All are read for at once, and where the template
        has the question behind the chunk, each chunk is prefilled once for all of them. Arguments
        and errors are those of `read`.
        """
        single = isinstance(questions, str) or not isinstance(questions, Iterable)
        questions = [] if single else list(questions)
        if single or not all(isinstance(one, str) for one in questions):
            raise ValueError("questions are a list of texts; for a single one there is read")
        given, where = self._given(document, trace)
        return self._loop.run(
            _read_all(
                self._open, self._subject, self._rules, self._sampling, given, questions,
                self._screen, where,
            )
        )  # fmt: skip

    async def aread(
        self, document: str | os.PathLike[str] | Document, question: str,
        trace: str | os.PathLike[str] | None = None,
        on_progress: Callable[[ask_progress.Progress], None] = lambda now: None,
    ) -> ask.Answer:  # fmt: skip
        """As `read`, for coroutines; several at once share the engine."""
        begun = self._loop.begun(self._reading(document, question, trace, on_progress))
        return await asyncio.wrap_future(begun)

    def close(self) -> None:
        """Ends what still reads and lets the engine go; further readings are refused."""
        self._end()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reading(
        self, document: str | os.PathLike[str] | Document, question: str,
        trace: str | os.PathLike[str] | None, on_progress: Callable[[ask_progress.Progress], None],
    ) -> Any:  # fmt: skip
        if not isinstance(question, str):
            raise ValueError(f"a question is a text, and this is of type {type(question).__name__}")
        called = callable(on_progress) and functions.takes(on_progress, None)
        if not called or functions.is_coroutine(on_progress):
            raise ValueError(
                f"on_progress is {on_progress!r:.80}; give a function of one argument (def, not "
                f"async def)"
            )
        given, where = self._given(document, trace)
        return _read(
            self._open, self._subject, self._rules, self._sampling, given, question,
            self._screen, where, on_progress,
        )  # fmt: skip

    def _given(
        self, document: str | os.PathLike[str] | Document, trace: str | os.PathLike[str] | None
    ) -> tuple[Document, Path | None]:
        if not self._end.alive:
            raise ValueError("this reader was closed; load another one")
        if trace is not None:
            trace = settings.path_of(trace, "the file of a trace")
        if isinstance(document, str | os.PathLike):
            document = file_document.FileDocument(_path(document))
        elif isinstance(document, type) or not isinstance(document, Document):
            raise ValueError(
                f"a document is a path, or has a method pieces() that yields its text; this is of "
                f"type {type(document).__name__}; for a text give notepad_jax.TextDocument(text)"
            )
        return document, None if trace is None else Path(trace)


def _path(document: str | os.PathLike[str]) -> Path:
    """Returns the path of a file that is there; the error for a text says how one is given."""
    path = Path(os.path.expanduser(document))  # which leaves "~5 dollars" as it is
    with contextlib.suppress(OSError, ValueError):  # a name that no file can have
        if path.exists():
            return path
    shown = " ".join(str(document)[:60].split())
    more = "..." if len(str(document)) > 60 else ""
    raise file_document.CannotRead(
        f"there is no file {shown!r}{more}; a text in memory is given as "
        f"notepad_jax.TextDocument(text)"
    )


class _Open:
    """The completer of a reader: opened once, in the reader's loop, by the first reading."""

    def __init__(self, subject: subjects.Subject, rules: Rules) -> None:
        self._subject, self._rules = subject, rules
        self._stack = contextlib.AsyncExitStack()
        self._first = asyncio.Lock()
        self._completer: Completer | None = None

    async def completer(self) -> Completer:
        async with self._first:
            if self._completer is None:
                opened = self._subject.opened(self._rules)
                self._completer = await self._stack.enter_async_context(opened)
        return self._completer

    async def close(self) -> None:
        await self._stack.aclose()


# Neither of these knows the reader, which would never go if its own thread held on to it.


async def _read(opened: _Open, *what: Any) -> ask.Answer:
    return await ask.ask(await opened.completer(), *what)


async def _read_all(opened: _Open, *what: Any) -> list[ask.Answer]:
    return await questions.ask_all(await opened.completer(), *what)


def _close(loop: waiting.Loop, opened: _Open) -> None:
    loop.close(opened.close())
