"""The continuous-batching scheduler: which turns run when, and on which pages of the KV cache.

A turn is admitted, strictly in the order of asking, when its slot, all the private pages it
can ever need and its prefix's pages can be had together; otherwise it waits, and so do those
behind it. What is admitted therefore always ends, its pages come back, and the first in the
queue gets in at the latest when no other turn is left: too few pages make turns wait, never
fail. A prefix is held by its users from the moment one of them is admitted, so it is never
evicted under them.

Pure host code: no arrays, no futures, no clock. The same calls give the same plan. `service`
asks for a plan, has `executor` run it, and writes down here what came out. Below: `pages`.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

from notepad_jax import packing
from notepad_jax.engine.pages import CachedPrefix, PagePool, PrefixCache
from notepad_jax.engine.settings import STOP_IDS, EngineSettings
from notepad_jax.types import (
    NO_TOKENS,
    Alternatives,
    Finish,
    Matcher,
    Prompt,
    SamplingParams,
    Tokens,
)


class PromptTooLong(ValueError):
    """A prompt or completion does not fit the engine's limits."""


class Stage(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"  # has a slot and pages
    ENDED = "ended"
    CANCELLED = "cancelled"


@dataclasses.dataclass(eq=False)
class Context:
    """The state of one turn, from its request to its last token, and its pages in the KV cache.

    In the cache are the prefix (shared pages) and, in private pages, the copied part of the
    prefix's last page (`ragged`), the tail and all sampled tokens but the newest.
    """

    sampling: SamplingParams
    shared: Tokens  # what of the prompt is read through the prefix cache; may be empty
    tail: Tokens  # the rest of the prompt
    draft: Tokens
    shares: bool = False  # whether what its tail begins with is computed once for all that do
    stage: Stage = Stage.WAITING
    version: int = -1  # of the policy; given at admission
    prefix: CachedPrefix | None = None
    cached: int = 0  # prompt tokens that were there already, or are read for another turn
    ragged: int = 0  # tokens of the prefix's last, partly filled page: copied into a private one
    pages: tuple[int, ...] = ()
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    top: list[Alternatives] = dataclasses.field(default_factory=list)  # if any are asked for
    matcher: Matcher | None = None  # what its grammar allows next

    @property
    def made(self) -> int:
        return len(self.tokens)

    @property
    def newest(self) -> int:
        """The token that is not in the cache yet."""
        return self.tokens[-1] if self.tokens else int(self.tail[-1])

    @property
    def private_len(self) -> int:
        """Private tokens in the cache once the tail was prefilled."""
        return self.ragged + len(self.tail) + self.made - 1

    @property
    def position(self) -> int:
        """RoPE's position of the newest token."""
        before = self.prefix.length if self.prefix is not None else 0
        return before + len(self.tail) + self.made - 1

    @property
    def pairs(self) -> int:
        """(query, key) pairs that attention met in the tail and in what was sampled."""
        own = len(self.tail) + self.made - 1
        return own * (self.position - own) + packing.triangle(own)

    @property
    def remaining(self) -> int:
        """Tokens that may still be sampled; 0 after a stop token."""
        if self.tokens and self.tokens[-1] in self.sampling.stop_ids:
            return 0
        return self.sampling.max_new_tokens - self.made

    @property
    def finish(self) -> Finish:
        stopped = self.tokens and self.tokens[-1] in self.sampling.stop_ids
        return Finish.STOP if stopped else Finish.LENGTH


@dataclasses.dataclass(frozen=True)
class Admission:
    """What a round prefills: prefixes to read, then turns to start, all of one policy version."""

    version: int
    prefixes: tuple[CachedPrefix, ...]
    contexts: tuple[Context, ...]
    saved: int  # prompt tokens that were cached already, or are read for another turn


class Scheduler:
    """The scheduler of one engine: owns the queue, the slots and the page numbers."""

    def __init__(
        self,
        settings: EngineSettings,
        version: int,
        *,
        share_prefixes: bool = True,
        use_drafts: bool = True,
    ):
        self.settings = settings
        self.version = version  # of the turns that start from now on
        self.pool = PagePool(settings.pages)
        self.prefixes = PrefixCache(self.pool, settings.page_size)
        self.running: list[Context] = []  # in order of admission
        self._waiting: collections.deque[Context] = collections.deque()
        self._share, self._drafts = share_prefixes, use_drafts

    @property
    def idle(self) -> bool:
        return not self.running and not self._waiting

    @property
    def resident(self) -> set[int]:
        """Policy versions that turns run on, and the one that new turns start on."""
        return {self.version} | {context.version for context in self.running}

    # ------------------------------------------------------------ what callers ask for

    def submit(self, prompt: Prompt, sampling: SamplingParams) -> Context:
        """Queues a turn. Raises ValueError for one that would not fit if it were alone."""
        self._check_lengths(prompt, sampling)
        shared, need = self._shared(prompt, sampling)
        tail = prompt.tail if len(shared) else prompt.tokens
        room = self.settings.row_tokens - len(tail)
        if room < 0:
            raise PromptTooLong(
                f"a prompt's private part has {len(tail)} tokens and a packed row holds "
                f"{self.settings.row_tokens}; raise engine.row_tokens"
                + (f", or engine.pages to {need} to share the rest" if need else "")
            )
        # A draft is a hint: what of it does not fit is left out.
        likely, most = prompt.draft, min(room, sampling.max_new_tokens)
        likely = likely if len(likely) <= most else likely[:most]
        if sampling.scored and not 0 < len(likely) == len(prompt.draft) == sampling.max_new_tokens:
            raise PromptTooLong(
                f"{len(prompt.draft)} tokens are to be scored, max_new_tokens is "
                f"{sampling.max_new_tokens}, a packed row has room for {room}; score less at once"
            )
        draft = likely if self._drafts or sampling.scored else NO_TOKENS
        matcher = None
        if sampling.grammar is not None:  # the host says what may follow each token: one at a time
            draft, matcher = NO_TOKENS, sampling.grammar.matcher(sampling.stop_ids)
        # Of what is scored, each token's successor is looked up in the row: it stands alone.
        shares = self._share and not sampling.scored
        context = Context(sampling, shared, tail, draft, shares, matcher=matcher)
        self._waiting.append(context)
        return context

    def cancel(self, context: Context) -> None:
        """Takes a turn out wherever it is; one that has ended stays as it is."""
        if context.stage is Stage.WAITING:
            self._waiting.remove(context)
            context.stage = Stage.CANCELLED
        elif context.stage is Stage.RUNNING:
            self._release(context, Stage.CANCELLED)

    def may_adopt(self, version: int) -> bool:
        """Whether at most two versions would be resident if new turns started on `version`."""
        return len({context.version for context in self.running} - {version}) <= 1

    def adopt(self, version: int) -> None:
        """New turns start on `version` from now on; running ones end on theirs."""
        assert self.may_adopt(version), "a third version of the weights would be resident"
        self.version = version
        self.prefixes.keep_version(version)

    def forget(self) -> None:
        """Evicts every prefix; for when their pages are lost, which must not be in use."""
        if not self.idle:
            raise RuntimeError("the engine cannot rest while turns run or wait; let them end")
        self.prefixes.make_room(self.settings.pages)

    # ------------------------------------------------------------ a round

    def admit(self) -> Admission:
        """Gives slots and pages to waiting turns, in order, as far as there are any."""
        admitted: list[Context] = []
        new: list[CachedPrefix] = []
        saved = 0
        while self._waiting and len(self.running) < self.settings.slots:
            found = len(new)
            if not self._place(self._waiting[0], new):
                break
            admitted.append(self._waiting.popleft())
            if len(new) == found:
                saved += len(admitted[-1].shared)
        assert self.running or not self._waiting, "nobody runs and yet somebody waits"
        return Admission(self.version, tuple(new), tuple(admitted), saved)

    def record(
        self, context: Context, tokens: list[int], logprobs: list[float],
        top: Sequence[Alternatives] = (),
    ) -> None:  # fmt: skip
        """Writes down what was sampled for a running turn; one that has ended is released."""
        assert context.stage is Stage.RUNNING, f"tokens for a turn that is {context.stage.value}"
        if context.matcher is not None:
            for token in tokens:
                context.matcher.take(token)
        context.tokens += tokens
        context.logprobs += logprobs
        context.top += top
        if not context.remaining:
            self._release(context, Stage.ENDED)

    # ------------------------------------------------------------ inside

    def _check_lengths(self, prompt: Prompt, sampling: SamplingParams) -> None:
        s, length = self.settings, len(prompt.shared) + len(prompt.tail)
        if length > s.max_prompt:
            raise PromptTooLong(
                f"a prompt of {length} tokens exceeds the engine's {s.max_prompt}; "
                f"lower the chunk, question or memory limit, or raise engine.max_prompt"
            )
        if sampling.max_new_tokens > s.max_new_tokens:
            raise PromptTooLong(
                f"max_new_tokens is {sampling.max_new_tokens} and the engine allows "
                f"{s.max_new_tokens}; raise engine.max_new_tokens"
            )
        if len(sampling.stop_ids) > STOP_IDS:
            raise ValueError(
                f"{len(sampling.stop_ids)} stop ids are given and the engine looks for at most "
                f"{STOP_IDS}; leave some out"
            )
        if sampling.top_logprobs > s.top_logprobs:
            raise ValueError(
                f"top_logprobs is {sampling.top_logprobs} and this engine tells of "
                f"{s.top_logprobs}; it was built for fewer"
            )
        if sampling.grammar is not None and not s.mask_words:
            raise ValueError("this engine was built without masks, which a grammar needs")
        if sampling.scored and not s.top_logprobs:
            raise ValueError("this engine was built to sample, and scores nothing that is given")

    def _shared(self, prompt: Prompt, sampling: SamplingParams) -> tuple[Tokens, int]:
        """What of a prompt goes through the prefix cache; if too few pages forbid it, how many.

        Nothing that does not fill a page: that costs less to read again than to share. And
        nothing if the page in which a prefix ends, which is had twice, is one too many.
        """
        s, shared = self.settings, prompt.shared
        if not self._share or len(shared) < s.page_size:
            return NO_TOKENS, 0
        private = len(shared) % s.page_size + len(prompt.tail) + sampling.max_new_tokens
        need = s.pages_for(len(shared)) + s.pages_for(private)
        return (shared, 0) if need <= s.pages else (NO_TOKENS, need)

    def _place(self, context: Context, new: list[CachedPrefix]) -> bool:
        """Takes everything a turn needs, or nothing. New prefixes are noted in `new`."""
        s, shared, prefix, wanted = self.settings, context.shared, None, 0
        context.ragged = len(shared) % s.page_size
        private = s.pages_for(context.ragged + len(context.tail) + context.sampling.max_new_tokens)
        if len(shared):
            prefix = self.prefixes.find(self.version, context.sampling.adapters, shared)
            wanted = s.pages_for(len(shared)) if prefix is None else 0
        held = len(prefix.pages) if prefix is not None and not prefix.users else 0
        if wanted + private > self.pool.free + self.prefixes.unused - held:
            return False
        if wanted:
            prefix = self.prefixes.add(self.version, context.sampling.adapters, shared)
            new.append(prefix)
        elif prefix is not None:
            self.prefixes.use(prefix)
            context.cached = len(shared)
        self.prefixes.make_room(private)
        context.pages = self.pool.allocate(private)
        context.prefix, context.version, context.stage = prefix, self.version, Stage.RUNNING
        self.running.append(context)
        return True

    def _release(self, context: Context, stage: Stage) -> None:
        self.running.remove(context)
        self.pool.release(context.pages)
        context.stage, context.pages = stage, ()
        if context.prefix is not None:
            self.prefixes.leave(context.prefix)
            if context.prefix.version != self.version and not context.prefix.users:
                self.prefixes.remove(context.prefix)
