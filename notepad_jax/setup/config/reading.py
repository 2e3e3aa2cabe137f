"""Config sections reading, data and tasks: how documents are read and made."""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import SHARE, key, whole, words
from notepad_jax.reading.memory_rules import OwnRule
from notepad_jax.reading.rules import MEMORY_UPDATES, ORDERS, Rules
from notepad_jax.setup import curriculum
from notepad_jax.text.chunks import CHUNK_ENDS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingKeys:
    """Section reading: how a document is read."""

    template: str = key(
        "name or file",
        "`question_last` (the starter's), `chunk_first`, `memory_first`, `document_first` (for "
        "chat models, question after the chunk: all questions about a document share its chunks), "
        "`document_first_actions` (the same, with `[exit]` and `[again]`), "
        "or a template file of your own (format: `notepad_jax/text/prompts.py`). Decides the "
        "prompt, and how much a group shares. A policy must be trained with the template it is "
        "used with",
    )
    chat: str = key(
        "`model`, `file`",
        "for templates with a `[chat]` section: put turns into the chat template that lies beside "
        "the weights, if there is one (`model`), or into the section's own markers (`file`; for "
        "base models, which ship chat templates too)",
        words("model", "file"),
    )
    max_question: int = key(
        "tokens",
        "a longer question is refused, with both numbers; of `tasks.files` and of a suite that is "
        "a file, it is left out and counted",
    )
    chunk_size: int = key(
        "tokens",
        "per turn in training, and in evaluation at the training length. Larger: fewer turns, "
        "longer contexts",
    )
    chunk_ends: str = key(
        "`tokens`, `sentence`",
        "`tokens`: a chunk has `reading.chunk_size` tokens, and a fact may be torn in two (at 512 "
        "tokens a chunk one sentence in twenty). `sentence`: it ends with the last sentence that "
        "ends in its second half, so no fact is torn, and documents have a few more chunks",
        words(*CHUNK_ENDS),
    )
    max_memory: int = key(
        "tokens",
        "limit of an update turn's completion, stop token included, and so of the memory (with "
        "`reading.heads`, of each). A memory that is cut there is used as it is, and counted "
        "(`rollout/truncated_memories`)",
    )
    max_answer: int = key(
        "tokens",
        "the same for an answer's context (`rollout/truncated_answers`)",
    )
    answer_chunks: int = key(
        "contexts",
        "that an answer may take. 1: what is cut at `reading.max_answer` is the answer. Above 1, "
        "an answer that is cut goes on in another context, which forgets all but question, memory "
        "and the last `reading.carry` tokens; at most max_answer + (answer_chunks - 1) x "
        "(max_answer - carry) tokens in all. Only an answer whose last context is cut counts as "
        "truncated. [Delethink](algorithms.md#long-answers-in-chunks)",
    )
    carry: int = key(
        "tokens",
        "of an answer that the next context begins with, as they were written; they count towards "
        "its `reading.max_answer`, so less than that. 0 with one context, at least 1 with more",
    )
    memory_update: str = key(
        "text",
        "`overwrite`: the completion becomes the memory. `overwrite_or_keep`: a completion that "
        "is just the template's `[keep]` marker leaves it as it was. `heads`: the same, with "
        "`reading.heads` memories. `module:function`: [a rule of yours]"
        "(python.md#your-own-memory-rule)",
    )
    heads: int = key(
        "memories",
        "that a reading has, of `reading.max_memory` tokens each. All are shown, the newest first; "
        "what a turn writes takes the place of the one that was written longest ago. So a turn "
        "that forgets something does not lose it at once; prompts are longer. Above 1 with "
        "`reading.memory_update=heads`, else 1",
    )
    order: str = key(
        "`serial`, `parallel`, `mixed`",
        "`serial`: a chunk is read with the memory that the one before it left. `parallel`: all "
        "chunks are read with the same memory, at once; what they note is read as a short "
        "document, until one note is left, which is the memory. For time: the longest chain of "
        "turns is the number of levels instead of the number of chunks. `mixed`: that document of "
        "notes is read serially. "
        "[Reading in rounds](evaluation.md#reading-in-rounds)",
        words(*ORDERS),
    )
    passes: int = key(
        "passes",
        "over the document at most, or rounds with `parallel` and `mixed`; the first that leaves "
        "the memory as it was is the last",
    )
    again: bool = key(
        "true, false",
        "whether a further pass, of `reading.passes` at most, is made only where the policy asks "
        "for it: after the last chunk it reads the template's `[end]`, and writes the `[again]` "
        "marker or, as after any chunk, a memory",
    )
    exits: bool = key(
        "true, false",
        "whether a turn that writes just the template's `[exit]` marker leads to the answer, "
        "whatever is left to read. `document_first_actions` has the marker, and says so to chat "
        "models",
    )
    exit_after: int = key(
        "turns, 0: never",
        "in a row that left a memory as it was, after which the answer follows: for policies that "
        "were not taught to exit. `python -m benchmarks.exits` [says what it costs]"
        "(evaluation.md#leaving-early)",
        whole(0),
    )

    def __post_init__(self) -> None:
        self.rules()

    def rules(self, own: OwnRule | None = None) -> Rules:
        """Returns the limits of a reading; `own` is a memory rule of the user's, if it is known."""
        named = MEMORY_UPDATES[0] if ":" in self.memory_update else self.memory_update
        return Rules(
            max_question=self.max_question,
            chunk_size=self.chunk_size,
            max_memory=self.max_memory,
            max_answer=self.max_answer,
            memory_update=own or named,
            answer_chunks=self.answer_chunks,
            carry=self.carry,
            chunk_ends=self.chunk_ends,
            passes=self.passes,
            order=self.order,
            heads=self.heads,
            again=self.again,
            exits=self.exits,
            exit_after=self.exit_after,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataKeys:
    """Section data: synthetic documents."""

    tokens: int = key(
        "tokens",
        'of a training document; this is "the training length" in the report. Sentences have 8 '
        "tokens",
        whole(1),
    )
    questions: int = key(
        "1 to 36",
        "about each document. With `question_last` and `document_first` they all share its chunks",
        whole(1),
    )
    kinds: tuple[str, ...] = key(
        "list of kinds",
        "of questions; empty: the quick start's two. Some of `exact`, `list`, `count` and "
        "`order`, each with a reward of its own (`em`, `set_f1`, `numeric`, `pairwise`; "
        "`notepad_jax/starter/mixed.py`), for which the policy of `configs/starter_mix.py` is "
        "made",
    )
    unanswerable: float = key(
        "probability",
        "of a question without an answer in the document; the right answer is `nothing`. Near 0, "
        "reinforcement learning teaches guessing",
        SHARE,
    )
    two_hop: float = key(
        "probability",
        "of a question that needs two facts, the first earlier in the document; 0 with "
        "`data.kinds`",
        SHARE,
    )
    distractor_share: float = key(
        "probability",
        "of a sentence to be a fact about somebody nobody asks about",
        SHARE,
    )
    chapter_rate: float = key(
        "probability",
        "of a sentence to begin a new chapter, where the starter drops its notes",
        SHARE,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskKeys:
    """Section tasks: tasks from files or stories, and their rewards."""

    files: tuple[str, ...] = key(
        "list of files",
        "task files to train on instead of generated documents "
        "([data/README.md](../data/README.md)). A sample is one task. Sources take turns whatever "
        "their sizes. Tasks whose question has more than `reading.max_question` tokens are left "
        "out, said and counted (`data/questions_left_out`). Rows with a fault are left out, too, "
        "said by reason and kept in `rows.json` ([which](../data/README.md#which-rows-are-read)). "
        "On resume the files must hold the same bytes, wherever they lie; `train --resume "
        "--mended` accepts rows that were mended where they stand",
    )
    stories: tuple[str, ...] = key(
        "list of tasks",
        "instead of files: [stories](evaluation.md#stories) of these RULER and memory tasks, "
        "`data.questions` of them in each document of `data.tokens` tokens of English prose. "
        "Every story has a script of good notes, which `rollout.teacher=script` teaches",
    )
    min_tokens: int = key(
        "tokens, 0: all alike",
        "of a document of stories: lengths are drawn from here to `data.tokens`, evenly by their "
        "logarithm. A policy that was taught one length says `none` of shorter texts",
        whole(0),
        default=0,
    )
    weights: tuple[str, ...] = key(
        "list of SOURCE=NUMBER",
        "how often a source has its turn; a source that is not named has 1, one of weight 0 is "
        "left out. A source is a row's `source`; of an `.array_record`, the file's name",
    )
    max_tokens: int = key(
        "tokens, 0: no limit",
        "of a file's document; a longer one loses its middle, which is said once and counted "
        "(`data/truncated_documents`, `data/truncated_tokens`). Generated documents are as long "
        "as `data.tokens` says",
        whole(0),
    )
    curriculum: tuple[str, ...] = key(
        "list of CHUNKS@STEP",
        "`4@0,8@50`: documents of at most 4 chunks of `reading.chunk_size`, and of 8 when 50 "
        "steps are done (0 chunks: no limit). A file's document is cut as by `tasks.max_tokens`, "
        "a generated one is made shorter; which questions are drawn when does not change. Each "
        "stage is said, and logged as `data/max_chunks`. Empty: all of every document",
    )
    retire_at: float = key(
        "0: off; mean reward",
        "a file's task whose readings have so far earned at least this on average is drawn no "
        "more (of 0 and 1 rewards, a pass rate; 0.9 is published). Its draws are passed over and "
        "counted (`groups/passed_retired`, `tasks/retired`). Of no source more than half retires; "
        "a line says when more would. Part of a checkpoint; generated documents are never drawn "
        "twice",
        SHARE,
    )
    balanced: bool = key(
        "true, false",
        "a batch has equal numbers of each source of the files: what is missing of one is drawn "
        "of that one, draws of the others are passed over meanwhile (`groups/passed_no_room`). A "
        "source of which too few groups were informative within `rollout.max_rounds` leaves its "
        "room empty. `rollout.documents` must be a multiple of the sources, and `tasks.weights` "
        "equal",
    )
    reward: str = key(
        "metric",
        "instead of each task's own; empty: its own. `memagent` is the training reward of the "
        "published memory agents to the letter, `boxed` a saner reading of it; `published` takes "
        "what GoLongRL published under each task's own "
        "([differences](evaluation.md#published-metrics-and-ours)). `module:function` or "
        "`file.py:function` is [a reward of yours](python.md#your-own-reward), called in a "
        "process of its own; several by weight, as `my_rewards:early=0.9,em=0.1`. Held-out rows "
        "are judged by it, too",
    )
    memory_reward: str = key(
        "as `tasks.reward`; empty: none",
        "what each memory on the way is worth, from 0 to 1, by a metric or a function that "
        "returns a number for each; or `recall_gain`, what its turn added to the facts that it was "
        "shown, or lost of them. Its turn learns from it, beside what the answer was worth "
        "([how](algorithms.md#rewards-of-memories))",
    )

    def __post_init__(self) -> None:
        curriculum.parsed(self.curriculum)
        if self.files and self.stories:
            raise ValueError(
                "tasks.files and tasks.stories both say what is read; leave one of them empty "
                "(--config.tasks.stories=)"
            )
