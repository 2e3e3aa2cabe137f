"""The limits of a reading, in what order it goes over its document, and what becomes the memory.

Every context is bounded by them, however long the document. Above: memory_agent, rounds, and
`setup`, which makes them of a config; below: the template, whose words count too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from notepad_jax.text.prompts import Template
from notepad_jax.types import Tokens

MEMORY_UPDATES = ("overwrite", "overwrite_or_keep", "heads")
ORDERS = ("serial", "parallel", "mixed")
MOST_TOKENS = 2**24  # of a part of a context: sizes are found out by building the longest one


@dataclasses.dataclass(frozen=True)
class Rules:
    """The rules of a reading: its limits, in tokens, its order, and its update of the memory.

    `memory_update` is `overwrite` (the completion becomes the memory), `overwrite_or_keep` (a
    completion that is just the keep marker changes nothing), `heads` (the same, of `heads`
    memories of which the least recently written one is overwritten; all are shown), or a rule of
    the user's, called with the memory, what was written and `max_memory`. `max_memory` and
    `max_answer` count the stop token too.

    A `serial` reading shows each chunk with the memory that the chunk before it left, and begins
    again until it has made `passes` passes. A `parallel` one is made in `passes` rounds (`rounds`),
    and so is a `mixed` one, whose notes are read serially.

    Where a reading `exits`, the template's exit marker in the place of a memory leads to the
    answer at once; `exit_after` turns in a row that left a memory as it was (0: never) do, too.
    With `again`, a further pass is made where the policy asks for it.

    An answer that is cut at `max_answer` goes on in another context, of `answer_chunks` at most,
    which begins with the last `carry` tokens of it and adds `max_answer - carry` at most.
    """

    max_question: int
    chunk_size: int
    max_memory: int  # of what one turn writes; of each head
    max_answer: int
    memory_update: str | Callable[[Tokens, Tokens, int], Tokens]
    answer_chunks: int = 1  # contexts
    carry: int = 0
    chunk_ends: str = "tokens"  # of text.chunks.CHUNK_ENDS
    passes: int = 1  # over the document
    order: str = "serial"  # of ORDERS
    heads: int = 1
    exits: bool = False
    exit_after: int = 0  # turns
    again: bool = False

    def __post_init__(self) -> None:
        for problem in (*_limits(self), *_of_answers(self), *_of_rounds(self)):
            raise ValueError(problem)

    @property
    def keeps(self) -> bool:
        """Whether a policy leaves the memory as it is by writing the template's keep marker."""
        return self.memory_update in ("overwrite_or_keep", "heads")

    @property
    def goes_over(self) -> bool:
        """Whether a reading is more than one turn after another over the document, once."""
        return self.passes > 1 or self.order != "serial"

    @property
    def plain(self) -> bool:
        """Whether a reading is one serial pass with one memory, to the document's end."""
        early = self.exits or self.exit_after > 0
        return not self.goes_over and self.heads == 1 and not early

    def most_memory(self, template: Template) -> int:
        """Returns the tokens of the longest memory that a prompt shows."""
        return self.heads * self.max_memory + (self.heads - 1) * len(template.between)

    def context(self, template: Template) -> int:
        """Returns the tokens of the longest turn, prompt and completion together."""
        memory = self.most_memory(template)
        longest = template.longest_prompt(self.max_question, self.chunk_size, memory)
        return longest + max(self.max_memory, self.max_answer)

    @property
    def longest_answer(self) -> int:
        """The most tokens that all contexts of an answer write."""
        return self.max_answer + (self.answer_chunks - 1) * (self.max_answer - self.carry)

    def within(self, limit: int) -> Rules:
        """Returns the rules with whole answers of at most `limit` tokens, in whole contexts."""
        if limit <= self.max_answer:
            return dataclasses.replace(self, max_answer=limit, answer_chunks=1, carry=0)
        more = min(
            self.answer_chunks - 1, (limit - self.max_answer) // (self.max_answer - self.carry)
        )
        return dataclasses.replace(self, answer_chunks=1 + more, carry=self.carry if more else 0)

    def check(self, template: Template) -> None:
        """Raises ValueError for what `template` cannot serve."""
        if self.keeps and not len(template.keep):
            raise ValueError(
                f"template {template.name} has an empty [keep] section; give it a marker, or set "
                f"reading.memory_update to overwrite"
            )
        two = 2 * self.max_memory + len(template.between)
        if self.order != "serial" and self.chunk_size < two:
            raise ValueError(
                f"reading.chunk_size is {self.chunk_size}, and a {self.order} reading merges what "
                f"its chunks wrote, two at a time or more: that is {two} tokens "
                f"(reading.max_memory is {self.max_memory}); raise the one or lower the other"
            )
        for problem in _of_actions(self, template):
            raise ValueError(problem)


def _of_actions(rules: Rules, template: Template) -> Iterator[str]:
    wanted = ["exit"] * rules.exits + ["again", "end"] * rules.again
    for name in wanted:
        if not len(getattr(template, name)):
            yield (
                f"reading.{'exits' if name == 'exit' else 'again'} is true, and template "
                f"{template.name} has no [{name}] section; give it one, or take a template that "
                f"has one (document_first_actions)"
            )
    if rules.again and len(template.end) > rules.chunk_size:
        yield (
            f"section [end] of template {template.name} has {len(template.end)} tokens and is read "
            f"as a chunk; reading.chunk_size is {rules.chunk_size}"
        )


def _limits(rules: Rules) -> Iterator[str]:
    for name in ("max_question", "chunk_size", "max_memory", "max_answer"):
        if not 1 <= (said := getattr(rules, name)) <= MOST_TOKENS:
            yield f"{name} is {said}; it must be at least 1 token and at most {MOST_TOKENS}"


def _of_answers(rules: Rules) -> Iterator[str]:
    if rules.answer_chunks < 1:
        yield f"answer_chunks is {rules.answer_chunks}; an answer takes at least 1 context"
    if rules.answer_chunks == 1 and rules.carry:
        yield (
            f"carry is {rules.carry}, but an answer has one context (answer_chunks is 1), and "
            f"nothing is carried over; set carry to 0, or answer_chunks to 2 or more"
        )
    if rules.answer_chunks > 1 and not 1 <= rules.carry < rules.max_answer:
        yield (
            f"carry is {rules.carry}, but a context of the answer (max_answer is "
            f"{rules.max_answer}) begins with what is carried over and goes on from there; "
            f"with answer_chunks above 1, use at least 1 and less than max_answer"
        )


def _of_rounds(rules: Rules) -> Iterator[str]:
    own = callable(rules.memory_update)
    if not own and rules.memory_update not in MEMORY_UPDATES:
        yield (
            f"memory_update is {rules.memory_update!r}; use one of {', '.join(MEMORY_UPDATES)}, "
            f"or a function of yours, as module:function"
        )
    if rules.order not in ORDERS:
        yield f"order is {rules.order!r}; use one of {', '.join(ORDERS)}"
    if rules.passes < 1:
        yield f"passes is {rules.passes}; a document is read at least once"
    several = rules.memory_update == "heads"
    if rules.heads < 1 or several != (rules.heads > 1):
        yield (
            f"heads is {rules.heads} and memory_update is {rules.memory_update!r}; memory_update "
            f"'heads' takes 2 or more, and any other one"
        )
    if rules.order != "serial" and (own or several):
        yield (
            f"order is {rules.order!r}, where what the chunks wrote is merged by the policy, and "
            f"memory_update is {'a rule of yours' if own else repr('heads')}, which takes one "
            "chunk after another; use overwrite or overwrite_or_keep, or order 'serial'"
        )
    if rules.exit_after < 0:
        yield f"exit_after is {rules.exit_after}; it must be at least 1 turn, or 0 for never"
    if rules.order != "serial" and (rules.exits or rules.exit_after):
        yield (
            f"order is {rules.order!r}, where all chunks are under way at once, and "
            f"{'exits is true' if rules.exits else f'exit_after is {rules.exit_after}'}; only a "
            "serial reading can end early"
        )
    if rules.again and rules.passes == 1:
        yield "again is true and passes is 1, so there is no pass to ask for; raise passes"
