"""The executor: runs what the scheduler planned, as jitted launches of a few fixed `shapes`.

`Executor` writes the rows of a round and reads back the samples; slots and pages are in the
contexts that it is given. `Device` owns the paged KV cache and makes the launches. They are handed
to it one after the other and only then waited for, so it never waits for the host's bookkeeping
in between. It is an argument, so that tests run every line of the executor without it.

An engine has a mesh of its own with one row of devices: weights, heads and cache are cut over
"tensor" and nothing else is, so that engines beside each other never wait for one another.

`lowered` is each program that an engine of some settings ever runs, to be compiled without
running it. Above: `service` and `jetstream.engine`; below: `layout`, `tail_rows` and `launches`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from notepad_jax.engine import launches, layout, masks, tail_rows
from notepad_jax.engine.apart import Apart, Placed
from notepad_jax.engine.launches import PrefixArrays, SlotArrays, TailArrays
from notepad_jax.engine.pages import CachedPrefix
from notepad_jax.engine.scheduler import Context
from notepad_jax.engine.settings import EngineSettings
from notepad_jax.engine.shapes import (
    PrefixRow,
    Shape,
    TailRow,
    cover,
    decode_shape,
    prefix_widths,
)
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.parameters import Params
from notepad_jax.parallel import mesh as meshes
from notepad_jax.types import NO_TOKENS, Alternatives, SamplingParams, tokens
from pallas_kernels import Pages, PageTables, cache_head_size, import_lowering


class Sampled(NamedTuple):
    """The tokens and logprobs that one launch sampled for one turn."""

    tokens: list[int]
    logprobs: list[float]
    top: Sequence[Alternatives] = ()  # of each token, if any were asked for

    def ends(self, context: Context) -> bool:
        """Whether the turn ends with these tokens, which the scheduler has not recorded yet."""
        if len(self.tokens) >= context.remaining:
            return True
        return bool(self.tokens) and self.tokens[-1] in context.sampling.stop_ids


class Executes(Protocol):
    """The executor's interface to the service; `replay` and `metered` wrap one."""

    settings: EngineSettings

    def rest(self) -> None: ...

    def weights(self, params: Any) -> Any: ...

    def read(self, params: Any, prefixes: Sequence[CachedPrefix]) -> None: ...

    def start(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]: ...

    def decode(self, params: Any, contexts: Sequence[Context]) -> Sequence[Sampled]: ...


class Launches(Protocol):
    """The device's interface to the executor; tests have one whose keys and values are hashes.

    What comes back of `start_tails` and `generate` is that of `launches`, without the cache, and
    may still be under way. `wanted` is how many likeliest tokens are asked for.
    """

    def rest(self) -> None: ...

    def weights(self, params: Any) -> Any: ...

    def read_prefixes(self, params: Any, row: PrefixArrays) -> None: ...

    def start_tails(self, params: Any, row: TailArrays, wanted: int) -> Sequence[Any]: ...

    def generate(
        self, params: Any, tables: PageTables, slots: SlotArrays, wanted: int
    ) -> Sequence[Any]: ...


class Device:
    """The paged KV cache on an engine's devices, and the launches that read and write it."""

    def __init__(self, config: PolicyConfig, settings: EngineSettings, there: Apart | None = None):
        """On the mesh of `there`, else this process's first device; ValueError for several rows."""
        import_lowering()  # its launches may be lowered in a thread
        self.config, self.settings = config, settings
        self._apart = there or Apart(config, meshes.one())
        self.mesh = self._apart.mesh
        self.pages: Pages | None = self._empty()
        self._masks = masks.Placed(settings, self.mesh)

    def rest(self) -> None:
        """Frees the KV cache until the next launch; what it held is lost."""
        self.pages = None

    def _cache(self) -> Pages:
        return self._empty() if self.pages is None else self.pages

    def _empty(self) -> Pages:
        """A new cache, on its devices from the start: it may be most of their memory."""
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding),
            _abstract_cache(self.config, self.settings, self.mesh),
        )

    def weights(self, params: Params) -> Placed:
        """Returns a policy's parameters as the launches are to be given them."""
        return self._apart.of(params)

    def read_prefixes(self, params: Placed, row: PrefixArrays) -> None:
        with meshes.within(self.mesh):
            self.pages = launches.read_prefixes(self.config, params.prefill, self._cache(), row)

    def start_tails(self, params: Placed, row: TailArrays, wanted: int) -> Sequence[jax.Array]:
        with meshes.within(self.mesh):
            self.pages, *out = launches.start_tails(
                self.config, params.prefill, self._cache(), self._masks.placed(row),
                **_likeliest(self.settings, wanted),
            )  # fmt: skip
        return out

    def generate(
        self, params: Placed, tables: PageTables, slots: SlotArrays, wanted: int
    ) -> Sequence[jax.Array]:
        with meshes.within(self.mesh):
            self.pages, *out = launches.generate(
                self.config, params.decode, self._cache(), tables, self._masks.placed(slots),
                self.settings.steps_per_launch, **_likeliest(self.settings, wanted),
            )  # fmt: skip
        return out

    def insert(self, kv: Any, target_T: np.ndarray) -> None:
        """Writes dense keys and values of one prompt at flat cache indices (JetStream's way)."""
        with meshes.within(self.mesh):
            self.pages = launches.insert_dense(self._cache(), kv, target_T)


class Executor:
    """Runs prefill and decode of contexts on `device`; `seen` counts the launches of each shape."""

    def __init__(self, settings: EngineSettings, device: Launches):
        self.settings, self.device = settings, device
        self.seen: dict[Shape, int] = {}
        self._plans = tail_rows.RowPlans(settings)

    def rest(self) -> None:
        """Frees the KV cache until the next launch; what it held is lost."""
        self.device.rest()

    def weights(self, params: Any) -> Any:
        """Returns a policy's parameters as the launches are to be given them."""
        return self.device.weights(params)

    def read(self, params: Any, prefixes: Sequence[CachedPrefix]) -> None:
        """Prefills shared prefixes into their pages."""
        Z = self.settings.page_size
        lengths = [len(prefix.pages) * Z for prefix in prefixes]
        for width, chosen in cover(lengths, prefix_widths(self.settings)):
            row = layout.prefix_row(self.settings, [prefixes[i] for i in chosen], width)
            self._count(PrefixRow(width))
            self.device.read_prefixes(params, row)

    def start(self, params: Any, contexts: Sequence[Context]) -> list[Sampled]:
        """Prefills the tails of admitted turns, verifying drafts: at least a token for each.

        But for turns whose tail is one token (`tail_rows.decoded`): they get none, `decode` begins
        with it. A row of tails has one prefix, and would be a launch for each of them.
        """
        waiting = []
        for group in layout.by_prefix(contexts):
            for plan in self._plans.of([contexts[b] for b in group]):
                members = [group[i] for i in plan.members]
                theirs = [contexts[b] for b in members]
                row = tail_rows.tail_row(self.settings, plan, theirs)
                self._count(TailRow(plan.rows.tokens.shape[1]))
                out = self.device.start_tails(params, row, _wanted(theirs))
                waiting.append((members, plan, out))
        sampled = [Sampled([], [])] * len(contexts)
        for members, plan, out in waiting:
            new_X, logps_X, *more = jax.device_get(out)
            following = more.pop() if more else logps_X
            new, logps = new_X.tolist(), logps_X.tolist()
            for b, span, draft in zip(members, plan.spans, plan.drafts, strict=True):
                sampling = contexts[b].sampling
                n = tail_rows.accepted(new[span], draft, sampling)
                taken = slice(span.start, span.start + n)
                drawn = new[taken], logps[taken]
                if sampling.scored:
                    drawn = draft, following[taken].tolist()
                sampled[b] = _sampled(contexts[b], *drawn, *(x[taken] for x in more))
        return sampled

    def decode(self, params: Any, contexts: Sequence[Context]) -> list[Sampled]:
        """Decodes up to `steps_per_launch` tokens in every slot."""
        if not contexts:
            return []
        shape = decode_shape(self.settings, tuple(map(len, layout.by_prefix(contexts))))
        tables = layout.decode_tables(self.settings, contexts, shape)
        slots = layout.slot_arrays(self.settings, contexts, shape.slots)
        self._count(shape)
        out = self.device.generate(params, tables, slots, _wanted(contexts))
        new, logps, made, *likeliest = jax.device_get(out)
        return [
            _sampled(
                context, new[b, :n].tolist(), logps[b, :n].tolist(), *(x[b, :n] for x in likeliest)
            )
            for b, (context, n) in enumerate(zip(contexts, made.tolist(), strict=False))
        ]

    def _count(self, shape: Shape) -> None:
        self.seen[shape] = self.seen.get(shape, 0) + 1


def _wanted(contexts: Sequence[Context]) -> int:
    return max((context.sampling.top_logprobs for context in contexts), default=0)


def _likeliest(settings: EngineSettings, wanted: int = 0) -> dict[str, Any]:
    """How many of the likeliest tokens a launch tells of; nothing for an engine that never does."""
    most = settings.top_logprobs
    return {"wanted": np.int32(wanted), "most": most} if most else {}


def _sampled(
    context: Context, new: list[int], logps: list[float], *likeliest: np.ndarray
) -> Sampled:
    wanted = context.sampling.top_logprobs
    if not all(map(math.isfinite, logps)):
        raise FloatingPointError(
            "a sampled token's logprob is not finite: the weights or the logits they give are "
            "not; look at the last training steps, or at the folder the weights came from"
        )
    if not wanted:
        return Sampled(new, logps)
    ids, theirs = (x[:, :wanted].tolist() for x in likeliest)
    top = [
        tuple((i, p) for i, p in zip(*pair, strict=True) if p > -math.inf)  # there is no such token
        for pair in zip(ids, theirs, strict=True)
    ]
    return Sampled(new, logps, top)


# ---------------------------------------------------------------- ahead of time


def lowered(
    config: PolicyConfig,
    settings: EngineSettings,
    params: Params,
    shape: Shape,
    mesh: Mesh | None = None,
) -> jax.stages.Lowered:
    """The lowered program of one of `shapes`, not compiled yet.

    `params` may be abstract (`jax.ShapeDtypeStruct` leaves, with their shardings). With a
    persistent compilation cache the engine that comes later compiles nothing.
    """
    mesh = meshes.one() if mesh is None else mesh
    launch, arguments = arguments_of(config, settings, params, shape, mesh)
    with meshes.within(mesh):
        more = {} if isinstance(shape, PrefixRow) else _likeliest(settings)
        return launch.lower(*arguments, **more)


def arguments_of(
    config: PolicyConfig,
    settings: EngineSettings,
    params: Params,
    shape: Shape,
    mesh: Mesh,
) -> tuple[Any, tuple]:
    """The jitted launch of a shape and its arguments as abstract arrays."""
    placed, cache = Apart(config, mesh).of(params), _abstract_cache(config, settings, mesh)
    before = config, placed.prefill, cache
    if isinstance(shape, PrefixRow):
        return launches.read_prefixes, (*before, layout.prefix_row(settings, [], shape.tokens))
    if isinstance(shape, TailRow):
        nothing = SamplingParams(0.0, 1.0, 1, (), 0)
        nobody = Context(nothing, NO_TOKENS, tokens([0]), NO_TOKENS, pages=(0,))
        plan = tail_rows.row_plan(settings, [nobody], [0], shape.tokens, [0])
        row = tail_rows.tail_row(settings, plan, [nobody])
        return launches.start_tails, (*before, masks.abstract(settings, mesh, row))
    tables = layout.decode_tables(settings, [], shape)
    slots = masks.abstract(settings, mesh, layout.slot_arrays(settings, [], shape.slots))
    return launches.generate, (
        config, placed.decode, cache, tables, slots, settings.steps_per_launch,
    )  # fmt: skip


def cache_bytes(config: PolicyConfig, settings: EngineSettings, mesh: Mesh) -> int:
    """Bytes of the paged cache on each device of `mesh`."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(_abstract_cache(config, settings, mesh))
    )


def _empty_cache(config: PolicyConfig, settings: EngineSettings) -> Pages:
    size = cache_head_size(config.head_size)
    return Pages.zeros(
        config.layers, settings.pages, config.kv_heads, settings.page_size, size,
        settings.cache_dtype,
    )  # fmt: skip


def _abstract_cache(config: PolicyConfig, settings: EngineSettings, mesh: Mesh) -> Pages:
    """The cache's shapes and places: on a mesh, each device has the heads that it computes."""
    if mesh.shape["fsdp"] != 1:
        raise ValueError(
            f"an engine's mesh has one row of devices, not {mesh.shape['fsdp']}; give each "
            f"row an engine of its own"
        )
    pages = jax.eval_shape(functools.partial(_empty_cache, config, settings))
    axes = (None, None, "kv_heads", None, None)
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=meshes.sharding(mesh, axes, x.shape, meshes.SERVING)
        ),
        pages,
    )
