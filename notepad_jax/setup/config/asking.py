"""Config sections evaluate, validation, endpoint and sources: what is asked, and what reads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from notepad_jax.eval.lengths import parse_length
from notepad_jax.eval.methods import METHODS
from notepad_jax.keys import POSITIVE, SHARE, also, key, whole, words
from notepad_jax.reading.rules import MOST_TOKENS
from notepad_jax.starter import mixed
from notepad_jax.tasks.suites import SUITES
from notepad_jax.types import SamplingParams


class Lengths:
    """A check of lengths that are texts, as 8k or 3.5m; "" is none."""

    def problem(self, value: str | tuple[str, ...]) -> str | None:
        for word in (value,) if isinstance(value, str) else value:
            try:
                parse_length(word) if word else None
            except ValueError as problem:
                return f"has {word!r}: {problem}"
        return None


LENGTHS = Lengths()

_MADE_HERE = ", ".join(f"`{name}`" for name in SUITES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeKeys:
    """Section evaluate.data: documents of the suite `synthetic`."""

    kinds: tuple[str, ...] = key(
        "as `data.*`",
        "of the documents of the suite `synthetic`, as `data.*` says of those that are trained "
        "on: what is measured stays the same however training is made harder",
        words(*mixed.OF_NAME),
    )
    unanswerable: float = also(SHARE)
    two_hop: float = also(SHARE)
    distractor_share: float = also(SHARE)
    chapter_rate: float = also(SHARE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateKeys:
    """Section evaluate: how readers are measured, whatever they are asked."""

    usual_lengths: ClassVar[tuple[str, ...]] = ()
    usual_samples: ClassVar[int] = 0
    ruler_limits: ClassVar[bool] = False
    train_length: ClassVar[str] = ""

    methods: tuple[str, ...] = key(
        "list",
        "`notepad`, `full-context`, `truncate-middle`, `recent-only`: how a document is shown",
        words(*METHODS),
    )
    repeats: int = key(
        "readings",
        "of each question. More than one needs a temperature above 0",
        whole(1),
    )
    context: int = key(
        "tokens",
        "of a document that a method without a memory may show in its one turn; the engine is "
        "made large enough for it",
        whole(1, MOST_TOKENS),
    )
    at_once: int = key(
        "readings",
        "under way together, at least one of each engine. More fill the engine's slots better and "
        "hold more chunks in memory",
        whole(1),
    )
    archive_turns: int = key(
        "readings",
        "the first of each method and length, kept token by token in `readings.jsonl`: the exact "
        "prompts, what was sampled and its logprobs, for `notepad-jax trace`. Such a reading "
        "costs some 6 bytes a document token; 0 keeps the memories alone",
        whole(0),
    )
    reward: str = key(
        "as `tasks.reward`",
        "by which answers are judged; empty: each task's metric",
    )
    chunk_size: int = key(
        "tokens",
        "at every length above `data.tokens`; up to there, `reading.chunk_size`. `ask` always "
        "uses this one",
        whole(1, MOST_TOKENS),
    )
    temperature: float = key(
        "0, or 1e-4 to 1e4; (0, 1]",
        "of sampling; temperature 0 is greedy, and then top_p has no effect",
    )
    top_p: float = also()

    def __post_init__(self) -> None:
        SamplingParams(self.temperature, self.top_p, 1, (), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticKeys(EvaluateKeys):
    """Section evaluate of a training config: questions in the starter's language."""

    suite: str = key(
        "`synthetic`",
        "what is asked; the other suites need `--config ruler` ([evaluation.md](evaluation.md))",
    )
    lengths: tuple[str, ...] = key(
        "list of lengths",
        "measured after training, and by `eval` unless it is given `--lengths`",
        LENGTHS,
    )
    lengths_before: tuple[str, ...] = key(
        "list of lengths",
        "measured before training",
        LENGTHS,
    )
    questions: int = key(
        "questions",
        "per length below `1m`. 256 give a 95% interval of about +-6 points at 50%, less near 100%",
        whole(1),
    )
    questions_per_document: int = key(
        "1 to 36",
        "they share the document's chunks; lowered to one for every 256 tokens of a short document",
        whole(1),
    )
    questions_longest: int = key(
        "questions",
        "the same two, at `1m` tokens and beyond",
        whole(1),
    )
    questions_per_longest: int = also(whole(1))
    data: MadeKeys


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteKeys(EvaluateKeys):
    """Section evaluate of a config for suites: what these ask."""

    suite: str = key(
        "text",
        f"{_MADE_HERE}, or a task file or a folder of them. `--suite`",
    )
    tasks: tuple[str, ...] = key(
        "list",
        "some of the suite's tasks; empty: all. `--tasks`",
    )
    lengths: tuple[str, ...] = key(
        "list of lengths",
        "that are read; empty: those of `evaluate.usual_lengths`, and of a file or folder of "
        "tasks all that it has. `--lengths`",
        LENGTHS,
    )
    usual_lengths: tuple[str, ...] = key(
        "list of lengths",
        "of suites that are made here, where no others are asked for: the published ones",
        LENGTHS,
    )
    samples: int = key(
        "questions",
        "per task and length; 0: `evaluate.usual_samples`, and of a file all. `--samples`",
        whole(0),
    )
    usual_samples: int = key(
        "questions",
        "per task and length of suites that are made here, where no others are asked for",
        whole(1),
    )
    ruler_limits: bool = key(
        "true or false",
        "true: answers to RULER's tasks, ours and NVIDIA's files, end at RULER's limits (128 "
        "tokens niah, 30 vt, 120 cwe, 50 fwe, 32 qa), or at what `reading.max_answer` and "
        "`reading.answer_chunks` allow where that is less. Its models are given the first words "
        "of the answer; a template that asks for thinking and a box needs more",
    )
    train_length: str = key(
        "length",
        "of the policy; losses are counted from the longest measured length that is not above it. "
        "Empty: not known. `--train-length`",
        LENGTHS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationKeys:
    """Section validation: held-out tasks."""

    every: int = key(
        "steps",
        "between validations; such a step is saved, whatever `checkpoint.every` says. 0: none",
        whole(0),
    )
    suite: str = key(
        "name",
        f"`synthetic`, {_MADE_HERE}: documents made for it, of `validation.lengths`, with other "
        "questions than `eval` asks. One of suite, files and split must be named",
    )
    tasks: tuple[str, ...] = key(
        "words",
        "some of the suite's tasks; empty: all",
    )
    lengths: tuple[str, ...] = key(
        "texts",
        "of the suite's documents: the training length and longer ones, so that the curves show "
        "what happens beyond it",
        LENGTHS,
    )
    files: tuple[str, ...] = key(
        "paths",
        "task files of their own, in any form that `tasks.files` takes. Documents are read whole, "
        "and grouped by the power of two that holds them",
    )
    split: float = key(
        "share",
        "of the documents of `tasks.files` that is held out, with all questions about them: never "
        "drawn, and read here. Which ones follows from the hash of their text alone, so twins, "
        "rows of two sources and questions about one document stay on one side; a row that asks "
        "the same of another document is withheld ([more](../data/README.md#which-rows-are-read))",
        SHARE,
    )
    split_by: str = key(
        "`documents`, `questions`",
        "of what `validation.split` is a share. `questions` is for few documents: equal ones stay "
        "together, and a line says how many of those held out are about documents that are drawn",
    )
    samples: int = key(
        "questions",
        "of each task and length, of each file, or of each source",
        whole(1),
    )
    repeats: int = key(
        "readings",
        "of each question; more than one needs a temperature",
        whole(1),
    )
    temperature: float = key(
        "as in `evaluate`",
        "0 reads greedily. The noise of a reading is the same in every validation",
    )
    top_p: float = also()
    patience: int = key(
        "validations",
        "that may bring no better score than the best; then the run ends. 0: it never ends early",
        whole(0),
    )

    def __post_init__(self) -> None:
        SamplingParams(self.temperature, self.top_p, 1, (), 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointKeys:
    """Section endpoint: a server that reads."""

    url: str = key(
        "URL",
        "of an OpenAI-compatible server, such as `http://localhost:8000/v1`; not empty: it reads "
        "instead of `policy`. `--endpoint`",
    )
    model: str = key(
        "text",
        "its model; empty: the only one that it has. `--model`",
    )
    tokenizer: str = key(
        "folder",
        "with the tokenizer that counts chunks and lengths; empty: a stand-in that cuts words and "
        "their parts. Of `build`, too. `--tokenizer`",
    )
    key_variable: str = key(
        "name",
        "of the environment variable with the key; empty: `OPENAI_API_KEY`, if it is set",
    )
    at_once: int = key(
        "requests",
        "under way together",
    )
    timeout: float = key(
        "seconds",
        "for one try of a request",
        POSITIVE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceKeys:
    """Section sources: what suites are made of."""

    text: str = key(
        "`stdlib`, `noise`, file or folder",
        "the haystack. `--text`",
    )
    hotpotqa: str = key(
        "file or `gs://` URL",
        "questions; empty: built-in ones where a suite allows it. `--hotpotqa`, `--squad`",
    )
    squad: str = also()
