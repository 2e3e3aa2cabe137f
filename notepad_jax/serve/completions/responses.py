"""Responses and their stream chunks as JSON, in the shapes of OpenAI's two endpoints.

`Chats` and `Completions` write the same choices in the two ways. Beyond OpenAI's fields: every
choice has its `policy_version`; with `return_token_ids` its `token_ids`, and the prompt's;
`logprobs_mode` says which logprobs these are: of softmax(logits / temperature), before top_p,
what a trainer computes. Pure; above: `app`; below: `choices`.
"""

from __future__ import annotations

import abc
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from notepad_jax.serve.completions.choices import Delta, WholeChoice
from notepad_jax.serve.completions.detokenizer import HALF, token_text
from notepad_jax.serve.completions.prompt_logprobs import TokenScore
from notepad_jax.serve.completions.requests import MEMORIES, How
from notepad_jax.text.tokenizer import Tokenizer
from notepad_jax.types import Alternatives, Tokens

CONTEXT = 8  # tokens before one that decide how its text looks


class Reply(abc.ABC):
    """One request's response, whole or in chunks; see the two kinds below."""

    prefix = ""  # of the id
    kind = ""  # `object`
    chunk_kind = ""

    def __init__(
        self, model: str, fingerprint: str, how: How, tokenizer: Tokenizer,
        prompts: Sequence[Tokens],
    ) -> None:  # fmt: skip
        """`prompts` are those of the choices in order, n choices each; [] for a reading."""
        self.how, self.prompts, self._tokenizer = how, prompts, tokenizer
        self._names = {i: name for name, i in tokenizer.controls.items()}
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        mode = how.logprobs or how.prompt_logprobs is not None
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
            **({"logprobs_mode": "temperature"} if mode else {}),
        }
        self._said: dict[int, list[int]] = {}  # last tokens of each choice
        self._offset: dict[int, int] = {}  # characters of each choice
        self._made = 0
        self._cached: dict[int, int] = {}  # tokens of each choice's prompt
        self._notes: dict[int, dict[str, Any]] = {}

    # ------------------------------------------------------------ whole

    def whole(self, choices: Sequence[WholeChoice]) -> dict[str, Any]:
        """Returns the response of a request that is not streamed."""
        found = []
        for index, one in enumerate(choices):
            delta = Delta(
                index, "".join(one.text), tuple(one.tokens), tuple(one.logprobs), tuple(one.top),
                one.finish, one.version, one.notes, one.cached,
            )  # fmt: skip
            self._count(delta)
            found.append(self._choice(delta, self._message(delta.text)))
        return {"object": self.kind, **self._head, "choices": found, "usage": self.usage(),
                **self._prompt_ids()}  # fmt: skip

    # ------------------------------------------------------------ chunks

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Returns the stream chunk of a delta of a choice, or of how a memory changed."""
        self._count(delta)
        if delta.memory is not None:
            return self._remembered(delta.index, delta.memory)
        return self._chunk([self._choice(delta, self._delta(delta.text))])

    def first(self, index: int) -> dict[str, Any] | None:
        """Returns the chunk that begins a choice, where there is one."""
        return None

    def last(self) -> dict[str, Any]:
        """Returns the chunk with the usage of the whole request."""
        return self._chunk([]) | {"usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage: dict[str, Any] = {}
        if self.how.include_usage or self.how.continuous_usage:
            usage = {"usage": self.usage() if self.how.continuous_usage else None}
        return {"object": self.chunk_kind, **self._head, "choices": choices, **usage}

    def _remembered(self, index: int, memory: Mapping[str, Any]) -> dict[str, Any]:
        if self.how.memories == MEMORIES[0]:
            # Stock clients know chunks without choices: the usage comes in one.
            return self._chunk([]) | {"notepad": {"index": index, **memory}}
        delta = {"reasoning_content": f"{memory['memory']}\n\n"}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice])

    # ------------------------------------------------------------ parts

    def usage(self) -> dict[str, Any]:
        """Returns the usage object: tokens so far; of readings those of all turns."""
        prompt, made = sum(map(len, self.prompts)), self._made
        # The first of a prompt's choices may have had to read it; the others find it.
        cached = (min(self._cached.get(i, 0) for i in range(k * self.how.n, (k + 1) * self.how.n))
                  for k in range(len(self.prompts)))  # fmt: skip
        more: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": sum(cached)}}
        if self._notes:
            prompt, made = (
                sum(notes[name] for notes in self._notes.values())
                for name in ("prompt_tokens", "completion_tokens")
            )
            more = {"notepad": [notes["notepad"] for _, notes in sorted(self._notes.items())]}
        counts = {"prompt_tokens": prompt, "completion_tokens": made}
        return counts | {"total_tokens": prompt + made} | more

    def _count(self, delta: Delta) -> None:
        self._made += len(delta.tokens)
        self._cached[delta.index] = delta.cached
        if delta.notes:
            self._notes[delta.index] = delta.notes

    def _choice(self, delta: Delta, said: dict[str, Any]) -> dict[str, Any]:
        return {
            "index": delta.index,
            **said,
            "logprobs": self._logprobs(delta) if self.how.logprobs else None,
            "finish_reason": delta.finish,
            "policy_version": delta.version,
            **({"token_ids": list(delta.tokens)} if self.how.token_ids else {}),
            **({"notepad": {"evidence": found}} if (found := delta.notes.get("evidence")) else {}),
        }

    def _prompt_ids(self) -> dict[str, Any]:
        return {}

    @abc.abstractmethod
    def _message(self, text: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _delta(self, text: str) -> dict[str, Any]: ...

    @abc.abstractmethod
    def _logprobs(self, delta: Delta) -> dict[str, Any]: ...

    def _text(self, token: int, before: Sequence[int]) -> str:
        if self.how.tokens_as_ids:
            return f"token_id:{token}"
        return token_text(self._tokenizer.decode, before, token, self._names)

    def _befores(self, delta: Delta) -> list[list[int]]:
        """The tokens that stand before each of a delta's."""
        said = self._said.get(delta.index, [])
        every = [*said, *delta.tokens]
        self._said[delta.index] = every[-CONTEXT:]
        return [every[max(0, at - CONTEXT) : at] for at in range(len(said), len(every))]


class Chats(Reply):
    """The responses of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk([choice]) | (self._prompt_ids() if index == 0 else {})

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _prompt_ids(self) -> dict[str, Any]:
        ids = self.how.token_ids and len(self.prompts)
        return {"prompt_token_ids": self.prompts[0].tolist()} if ids else {}

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        tops = delta.top or ((),) * len(delta.tokens)
        every = zip(delta.tokens, delta.logprobs, tops, self._befores(delta), strict=True)
        content = [
            self._one(token, logprob, before)
            | {"top_logprobs": [self._one(other, p, before) for other, p in top]}
            for token, logprob, top, before in every
        ]
        return {"content": content, "refusal": None}

    def _one(self, token: int, logprob: float, before: Sequence[int]) -> dict[str, Any]:
        text = self._text(token, before)
        known = HALF not in text
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()] if known else None}


class Completions(Reply):
    """The responses of /v1/completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}

    _delta = _message

    def _choice(self, delta: Delta, said: dict[str, Any]) -> dict[str, Any]:
        choice = super()._choice(delta, said)
        if self.how.token_ids and delta.index not in self._told:
            self._told.add(delta.index)
            choice["prompt_token_ids"] = self.prompts[delta.index // self.how.n].tolist()
        if self.how.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._scored(delta.index // self.how.n)
        return choice

    def _scored(self, number: int) -> list[dict[str, Any] | None] | None:
        """As vLLM tells them: nothing of the first token; then it, and the likeliest, by id."""
        scores, ids = self.scores.get(number), self.prompts[number].tolist()
        if scores is None:
            return None
        found: list[dict[str, Any] | None] = [None]
        for place, score in enumerate(scores, 1):
            before = ids[max(0, place - CONTEXT) : place]
            ranks = {token: rank for rank, (token, _) in enumerate(score.top, 1)}
            both = {score.token: score.logprob} | {i: p for i, p in score.top if i != score.token}
            found.append({
                str(i): {"logprob": p, "rank": ranks.get(i), "decoded_token": self._text(i, before)}
                for i, p in both.items()
            })  # fmt: skip
        return found

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._told: set[int] = set()  # choices whose prompt's ids were sent
        self.scores: dict[
            int, list[TokenScore] | None
        ] = {}  # of each prompt, where they are asked for

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        befores, tops = self._befores(delta), delta.top
        texts = [self._text(*one) for one in zip(delta.tokens, befores, strict=True)]
        at = self._offset.get(delta.index, 0)
        offsets = []
        for text in texts:
            offsets.append(at)
            at += len(text)
        self._offset[delta.index] = at
        both = zip(tops, befores, strict=True) if tops else ()
        top = [self._likeliest(some, before) for some, before in both] or None
        return {"tokens": texts, "token_logprobs": list(delta.logprobs), "top_logprobs": top,
                "text_offset": offsets}  # fmt: skip

    def _likeliest(self, top: Alternatives, before: Sequence[int]) -> dict[str, float]:
        """Logprobs by text, the likeliest first, as which of two equal texts is told, too."""
        found: dict[str, float] = {}
        for token, logprob in top:
            found.setdefault(self._text(token, before), logprob)
        return found
