"""Tasks about words that the tiny tokenizer knows, and a reader of them, for these tests."""

import asyncio

from notepad_jax.eval.measure import Item, measure
from notepad_jax.eval.methods import Excerpts
from notepad_jax.reading.loop import Reader
from notepad_jax.reading.sampling import TurnSampling
from notepad_jax.types import Task, TextDocument
from tests import fakes


def task(name: str, words: str, answer: str = "red", **more) -> Task:
    return Task(name, "code of ann ?", TextDocument(words), (answer,), "test", "em", **more)


def items(*tasks: Task, length: int = 4, method: str = "notepad", repeats: int = 1) -> list[Item]:
    return [Item(one, method, length, k) for one in tasks for k in range(repeats)]


def reader(completer, chunk_size: int = 2, at_once: int = 9) -> Reader:
    tokenizer = fakes.tokenizer()
    return Reader(
        completer=completer,
        tokenizer=tokenizer,
        template=fakes.template(),
        rules=fakes.rules(chunk_size),
        sampling=TurnSampling(0.0, 1.0, tuple(tokenizer.stop_ids), 7),
        chunks_of=lambda t: fakes.chunks_of(tokenizer.encode(t.document.text), chunk_size),
        at_once=at_once,
    )


def read(planned, completer, on_progress=lambda progress: None, **more):
    names = ("trace_of", "on_result", "on_failure", "judge")
    how = {name: more.pop(name) for name in names if name in more}
    shown = Excerpts(fakes.tokenizer(), 4)  # tokens that a method of one turn may show
    return asyncio.run(measure(planned, reader(completer, **more), on_progress, shown, **how))
