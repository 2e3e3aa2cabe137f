"""JetStream's Engine interface over our executor, so that its orchestrator can serve it.

`prefill` runs one prompt into dense keys and values, `insert` puts them into a slot's pages,
`generate` decodes all slots with the executor's one decode launch. Nothing is shared between
prompts here; rollouts, evaluation, `ask` and `serve` without `--jetstream` go through `service`
instead. The verbs have no room for a request's own limit and sampling, nor for a client that
hung up: a prompt that comes as `asked.Asked` brings them. Above: `server`; the rough edges of
google-jetstream are in `compat`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine import launches
from notepad_jax.engine.apart import Apart, Placed
from notepad_jax.engine.executor import Device, Executor
from notepad_jax.engine.jetstream import compat
from notepad_jax.engine.jetstream.asked import JetStreamRequest, nobody_leaves
from notepad_jax.engine.pages import PagePool
from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import mesh as meshes
from notepad_jax.parallel import place
from notepad_jax.types import NO_TOKENS, SamplingParams, tokens
from pallas_kernels import import_lowering


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """JetStream's prefill result: the dense keys and values of one whole prompt."""

    kv: tuple[jax.Array, jax.Array]  # [L, 1, T, K, H] each
    tokens: jax.Array  # [T]
    length: int = dataclasses.field(metadata=dict(static=True))
    asked: JetStreamRequest = dataclasses.field(metadata=dict(static=True))


@dataclasses.dataclass
class DecodeState:
    """The paged KV cache and the turn in each slot. The engine's methods change it in place."""

    device: Device
    executor: Executor  # that decodes on it
    pool: PagePool
    slots: list[Context | None]  # an ended turn stays, without pages, until its slot is taken
    gone: list[Callable[[], bool]]  # of each slot: whether its client has hung up


class PagedEngine(compat.Engine):
    """A JetStream `Engine` over a paged KV cache; `sampling` is for prompts of bare token ids."""

    def __init__(
        self,
        config: PolicyConfig,
        settings: EngineSettings,
        sampling: SamplingParams,
        mesh: jax.sharding.Mesh | None = None,
    ):
        import_lowering()  # JetStream prefills and decodes in threads of its own
        self.config, self.settings = config, settings
        self._sampling = sampling
        self._apart = Apart(config, meshes.one() if mesh is None else mesh)

    def load_params(self, params: Params) -> Placed:
        return self._apart.of(params)

    def init_decode_state(self) -> DecodeState:
        device = Device(self.config, self.settings, self._apart)
        executor, pool = Executor(self.settings, device), PagePool(self.settings.pages)
        slots = self.settings.slots
        return DecodeState(device, executor, pool, [None] * slots, [nobody_leaves] * slots)

    def prefill(
        self,
        *,
        params: Placed,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefix:
        """Prefills one prompt, ids or a `JetStreamRequest`; it continues an `existing_prefix`."""
        asked = padded_tokens
        if not isinstance(asked, JetStreamRequest):
            asked = JetStreamRequest(
                tokens(np.asarray(padded_tokens)[:true_length]), self._sampling
            )
        fresh = asked.ids
        kv_before, start, known = None, 0, fresh[:0]
        if existing_prefix is not None:
            kv_before, start = existing_prefix.kv, existing_prefix.length
            known = np.asarray(existing_prefix.tokens)[:start]
        length = start + len(fresh)
        if length > self.settings.max_prompt:
            raise ValueError(
                f"a prompt of {length} tokens exceeds the engine's {self.settings.max_prompt}; "
                f"shorten it or raise engine.max_prompt"
            )
        padded = np.pad(fresh, (0, _bucket(len(fresh)) - len(fresh))).astype(np.int32)
        with meshes.within(self._apart.mesh):
            kv = launches.prefill_dense(self.config, params.prefill, kv_before, start, padded[None])
        return Prefix(kv, jnp.asarray(np.concatenate([known, padded])), length, asked)

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefilled prompt into `slot`, replacing whatever was there."""
        state, s, sampling = decode_state, self.settings, prefix.asked.sampling
        self.free_slot(state, slot)
        prompt = tokens(np.asarray(prefix.tokens)[: prefix.length])
        need = s.pages_for(prefix.length + sampling.max_new_tokens)
        if need > state.pool.free:
            raise RuntimeError(
                f"{need} cache pages are needed and {state.pool.free} of {s.pages} are free; "
                f"raise engine.pages, or lower engine.slots"
            )
        pages = state.pool.allocate(need)
        state.slots[slot] = Context(sampling, NO_TOKENS, prompt, NO_TOKENS, pages=pages)
        state.gone[slot] = prefix.asked.gone
        # The last prompt token is decoded again: its launch samples the first new token.
        at = np.arange(prefix.length - 1)
        target = np.full(prefix.kv[0].shape[2], s.pages * s.page_size, np.int32)
        target[: len(at)] = np.asarray(pages)[at // s.page_size] * s.page_size + at % s.page_size
        state.device.insert(prefix.kv, target)
        return state

    def generate(
        self, params: Placed, decode_state: DecodeState
    ) -> tuple[DecodeState, compat.Results]:
        """Decodes up to `steps_per_launch` tokens in every active slot.

        A turn that has ended, or whose client hung up, gives its pages back; the result of a slot
        that made no token says so, and then the stock orchestrator gives it the next prompt.
        """
        slots, steps = decode_state.slots, self.settings.steps_per_launch
        for i, gone in enumerate(decode_state.gone):
            if slots[i] is not None and gone():
                self.free_slot(decode_state, i)
        active = [i for i, s in enumerate(slots) if s is not None and s.remaining]
        new = np.zeros((len(slots), steps), np.int32)
        logprobs = np.zeros((len(slots), steps), np.float32)
        made = np.zeros(len(slots), np.int32)
        sampled = decode_state.executor.decode(params, [slots[i] for i in active])
        for i, (ids, logps, _) in zip(active, sampled, strict=True):
            made[i] = len(ids)
            new[i, : made[i]], logprobs[i, : made[i]] = ids, logps
            slots[i].tokens += ids
            slots[i].logprobs += logps
            if not slots[i].remaining:
                decode_state.pool.release(slots[i].pages)
                slots[i].pages = ()
        lengths = np.array([0 if s is None else s.made for s in slots], np.int32)
        return decode_state, compat.results(new, logprobs, made, lengths)

    def free_slot(self, state: DecodeState, slot: int) -> None:
        """Empties a slot and releases its pages."""
        if state.slots[slot] is not None:
            state.pool.release(state.slots[slot].pages)
            state.slots[slot], state.gone[slot] = None, nobody_leaves

    def get_prefix_destination_sharding(self) -> Any:
        return place.replicated(self._apart.mesh)

    def get_tokenizer(self) -> Any:
        return compat.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> compat.StockTokenizer:
        return compat.StockTokenizer()

    @property
    def max_concurrent_decodes(self) -> int:
        return self.settings.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.settings.max_prompt

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._apart.mesh

    @property
    def colocated_cpus(self) -> list[Any] | None:
        return None


def _bucket(size: int) -> int:
    """Rounds a prompt's length up to a power of two: it is compiled for each."""
    return 1 << max(3, (size - 1).bit_length())
