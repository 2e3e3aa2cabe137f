"""NAME:notepad: a conversation as a document and a question, read by the memory agent.

The last text part of the last message is the question; the parts before it are the document, in
their order, of any length that fits a body. The agent is that of `ask`, evaluation and training.
Above: `app`; below: reading.memory_agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Iterator

from notepad_jax.reading import memory_agent
from notepad_jax.reading.memory_agent import Rules, TurnSampling
from notepad_jax.serve.asked import Chat
from notepad_jax.serve.choices import REASONS, Delta
from notepad_jax.serve.refusal import bad
from notepad_jax.serve.served import Served
from notepad_jax.text.chunks import ChunkedDocument
from notepad_jax.types import Chunks, Completer, Completion, Finish, Tokens, TurnKind

FORM = (
    'send the document and the question as two parts of one message: "content": '
    '[{"type": "text", "text": DOCUMENT}, {"type": "text", "text": QUESTION}]'
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """A document in memory, in parts."""

    texts: tuple[str, ...]

    def pieces(self) -> Iterator[str]:
        yield from self.texts


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a document, as all choices of a request share it."""

    tokens: Tokens
    chunks: Chunks  # empty: there is no document
    rules: Rules
    sampling: TurnSampling  # its seed is each choice's


def asked(served: Served, request: Chat) -> Question:
    """Returns what a request asks; Refusal for what a reading has no way to do."""
    how, rules = request.how, served.rules
    for name in ("logprobs", "stop", "stop_token_ids"):
        if getattr(how, name):
            raise bad(name, f"a reading has no {name}; the model {served.name} has", "unsupported")
    if len(request.messages) != 1 or request.messages[0].role != "user":
        raise bad("messages", "a reading takes one message, of the user's; leave the others out")
    *document, question = request.messages[0].parts
    ids = served.tokenizer.encode(question)
    if not len(ids):
        raise bad("messages", "the question, the last part of the message, is empty")
    if len(ids) > rules.max_question:
        mend = "ask a shorter one" if document else FORM
        raise bad(
            "messages", f"the question has {len(ids):,} tokens and may have {rules.max_question:,};"
            f" {mend}", "context_length_exceeded",
        )  # fmt: skip
    if (how.max_tokens or 0) > rules.longest_answer:
        raise bad(
            "max_tokens", f"max_tokens is {how.max_tokens} and an answer may have "
            f"{rules.longest_answer} tokens",
        )  # fmt: skip
    chunks: Chunks = ()
    if document:
        chunks = ChunkedDocument(served.tokenizer, Parts(tuple(document)), rules.chunk_size)
    usual = served.sampling
    sampling = dataclasses.replace(
        usual,
        temperature=usual.temperature if how.temperature is None else how.temperature,
        top_p=usual.top_p if how.top_p is None else how.top_p,
    )
    rules = rules.within(how.max_tokens or rules.longest_answer)
    return Question(ids, chunks, rules, sampling)


async def reading(
    completer: Completer, served: Served, question: Question, seed: int, index: int
) -> AsyncGenerator[Delta]:
    """Yields the answer of one reading, whole; tokens of all its turns are in `notes`."""
    sampling = dataclasses.replace(question.sampling, seed=seed)
    state = memory_agent.start(question.tokens, question.chunks)
    said: list[Completion] = []  # of the answer, a context each
    prompt_tokens = completion_tokens = turns = 0
    course = memory_agent.read(completer, served.template, question.rules, state, sampling)
    async for turn, state in course:  # noqa: B007 - the last one has the answer
        turns += 1
        prompt_tokens += len(turn.prompt.tokens)
        completion_tokens += len(turn.completion.tokens)
        if turn.kind is TurnKind.ANSWER:
            said.append(turn.completion)
    completion, read = turn.completion, getattr(question.chunks, "tokens_read", 0)
    aborted = completion.finish is Finish.CANCELLED
    yield Delta(
        index,
        "" if aborted else served.tokenizer.decode(memory_agent.answered(state)),
        tuple(token for one in said for token in one.tokens.tolist()),
        tuple(float(logprob) for one in said for logprob in one.behaviour_logprobs),
        (),
        REASONS[completion.finish],
        completion.policy_version,
        {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "notepad": {"turns": turns, "document_tokens": read},
        },
    )
