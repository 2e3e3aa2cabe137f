"""notepad_jax: reinforcement learning that teaches a language model to read without limit.

    import notepad_jax as nj

    reader = nj.Reader.load("runs/mine", step="best")   # a run, a Hugging Face folder, a server
    reading = reader.read("book.txt", "who ?")          # awaitable twin: aread
    nj.score(reading.answer, ["Paris"], metric="boxed")
    nj.train("chat", dataset=rows, reward=my_reward, validation=held_out)

docs/python.md shows all of it. A name is imported when it is first asked for: importing the package
costs nothing, and does not import jax.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from notepad_jax.api import Trained, evaluate, export_hf, train
    from notepad_jax.programs.ask import Answer, Memory
    from notepad_jax.programs.ask_progress import Progress
    from notepad_jax.reader import Reader
    from notepad_jax.reading.memory_rules import Note
    from notepad_jax.scoring.own_calls import reward
    from notepad_jax.scoring.reading_record import MemoryRecord, ReadingRecord
    from notepad_jax.scoring.score import score
    from notepad_jax.training.callbacks import Stop
    from notepad_jax.types import Task, TextDocument

__version__ = "0.1.0"

_HOMES = {
    "Reader": "notepad_jax.reader",
    "Answer": "notepad_jax.programs.ask",
    "Memory": "notepad_jax.programs.ask",
    "Progress": "notepad_jax.programs.ask_progress",
    "train": "notepad_jax.api",
    "Trained": "notepad_jax.api",
    "evaluate": "notepad_jax.api",
    "export_hf": "notepad_jax.api",
    "reward": "notepad_jax.scoring.own_calls",
    "ReadingRecord": "notepad_jax.scoring.reading_record",
    "MemoryRecord": "notepad_jax.scoring.reading_record",
    "score": "notepad_jax.scoring.score",
    "Stop": "notepad_jax.training.callbacks",
    "Note": "notepad_jax.reading.memory_rules",
    "Task": "notepad_jax.types",
    "TextDocument": "notepad_jax.types",
}
__all__ = [
    "Answer",
    "Memory",
    "MemoryRecord",
    "Note",
    "Progress",
    "Reader",
    "ReadingRecord",
    "Stop",
    "Task",
    "TextDocument",
    "Trained",
    "evaluate",
    "export_hf",
    "reward",
    "score",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
