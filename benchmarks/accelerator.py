"""How much of one accelerator the hot loops use: the GRPO update, decoding, prefill.

    python -m benchmarks.accelerator [--shapes 0.5b 7b] [--parts update decode prefill] [--json]

Random bfloat16 weights at published sizes (configs/models.py), one device, no tokenizer, no
data. Two ceilings are measured first, on the same device in the same run: FLOP/s of a large
bfloat16 matrix product, bytes/s of a plain copy (read plus written). Everything else is given
as a share of one of them, so that a table from another chip, or from a busy one, still
compares. Every time is the median of `--repeats` calls after one that compiles and warms up,
and a call ends when the device has finished.

update   one `update.loss_and_gradient`: rows of a 5,120-token prefix and 3 tails of 512 + 512
         tokens, micro-batches of one row, with and without remat; float32 masters of all weights
         at 0.5b, adapters (rank 16, all matrices) at both sizes. The optimizer's step is not in it.
decode   one launch of 32 tokens a slot at a context of 5,120, temperature 1; every slot with a
         context of its own, and 16 slots to one cached prefix.
prefill  one chunk of 5,024 tokens into the paged cache.

What is counted is what the mathematics needs, whatever the program does (`benchmarks.needs`):
with remat no more than 6/8 of the ceiling can be reached, 4/6 with adapters.

On a CPU only `--shapes toy` is allowed; its shares say nothing about an accelerator.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import needs
from benchmarks.sharing import UPDATE, make_groups
from benchmarks.sharing import policy_config as toy_policy
from configs.models import MODELS
from notepad_jax.engine import launches
from notepad_jax.engine.apart import Apart
from notepad_jax.grpo import update
from notepad_jax.grpo.batch import pack
from notepad_jax.model import attention, lora, parameters, policy
from notepad_jax.model.config import PolicyConfig
from notepad_jax.parallel import mesh as meshes
from notepad_jax.types import Completion, Finish, Prompt, TrainBatch, tokens
from pallas_kernels import Pages, PageTables

PARTS = ("update", "decode", "prefill")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of what is measured: tokens, unless said otherwise."""

    rows: int = 2  # of the update's batch, each a prefix with its tails
    prefix: int = 5120
    members: int = 3  # tails behind a prefix
    tail: int = 512  # of a tail's prompt
    completion: int = 512
    rank: int = 16  # of the adapters
    batches: tuple[int, ...] = (1, 8, 32, 128)  # decode slots
    context: int = 5120  # cached before the first decode step; a multiple of the page
    steps: int = 32  # decoded per slot in a launch
    sharers: int = 16  # slots that read one prefix
    chunk: int = 5024  # prefilled; a multiple of the page
    page: int = 32
    matrix: int = 16384  # rows and columns of the ceiling's product
    copied: int = 2**32  # bytes of the ceiling's copy


TOY_SIZES = Sizes(
    prefix=32, tail=8, completion=8, rank=2, batches=(4,), context=32, steps=4, sharers=2,
    chunk=64, page=16, matrix=64, copied=2**16,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """A policy, and whether its whole tree is trained too, or only adapters."""

    config: PolicyConfig
    full: bool
    sizes: Sizes


SHAPES = {
    "0.5b": Shape(MODELS["Qwen2.5-0.5B"], True, Sizes()),
    "7b": Shape(MODELS["Qwen2.5-7B-Instruct"], False, Sizes()),
    "toy": Shape(
        dataclasses.replace(toy_policy(32, 2, 2, 1, 64), dtype="bfloat16"), True, TOY_SIZES
    ),
}


# ---------------------------------------------------------------- how it is timed


def median_seconds(work: Callable[[], Any], repeats: int) -> float | None:
    """Median of `repeats` calls after one that warms up; None if device memory runs out."""
    try:
        jax.block_until_ready(work())
        taken = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(work())
            taken.append(time.perf_counter() - begin)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None
    return statistics.median(taken)


def ceilings(sizes: Sizes, repeats: int) -> dict[str, float]:
    """FLOP/s of a bfloat16 product and bytes/s (read plus written) of a copy, random values."""
    n = sizes.matrix
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    words = jax.random.bits(jax.random.key(2), (sizes.copied // 4,), jnp.uint32)
    flip = jax.jit(lambda x: x ^ 1)  # a plain copy could be answered with the same buffer
    found = {
        "flops_per_second": 2 * n**3 / median_seconds(lambda: product(a, b), repeats),
        "bytes_per_second": 2 * sizes.copied / median_seconds(lambda: flip(words), repeats),
    }
    for array in (a, b, words):
        array.delete()
    return found


# ---------------------------------------------------------------- the three parts


def make_batch(config: PolicyConfig, sizes: Sizes) -> TrainBatch:
    """Random rows without padding: a prefix and the tails of its group."""
    rng = np.random.default_rng(0)
    draw = lambda n: tokens(rng.integers(0, config.valid_vocab, n))  # noqa: E731
    told = np.full(sizes.completion, -np.log(config.valid_vocab), np.float32)
    prompts, completions = [], []
    for _ in range(sizes.rows):
        prefix = draw(sizes.prefix)
        prompts.append([Prompt(prefix, draw(sizes.tail)) for _ in range(sizes.members)])
        for _ in range(sizes.members):
            completions.append(Completion(draw(sizes.completion), told, Finish.LENGTH, 0))
    row = sizes.prefix + sizes.members * (sizes.tail + sizes.completion)
    return pack(*make_groups(prompts, completions, 0), row_length=row).batch


def measure_update(
    shape: Shape, params: Any, ceiling: dict[str, float], repeats: int
) -> list[dict[str, Any]]:
    config, sizes = shape.config, shape.sizes
    batch = make_batch(config, sizes)
    adapters = lora.Lora(sizes.rank, float(sizes.rank), lora.TARGETS)
    frozen, trained = lora.partition(config, params, adapters, jax.random.key(1))
    ways = {"adapters": (trained, frozen)}
    if shape.full:
        ways["full"] = jax.tree.map(lambda x: x.astype(jnp.float32), params), {}
    rows = []
    for way, (masters, frozen) in ways.items():
        flops = needs.update_flops(config, batch, frozen=bool(frozen))
        for remat in (False, True):
            settings = dataclasses.replace(UPDATE, micro_batch_rows=1, remat=remat)

            def work(settings=settings, masters=masters, frozen=frozen) -> Any:
                return update.loss_and_gradient(config, settings, masters, frozen, batch)

            seconds = median_seconds(work, repeats)
            name = f"{way}, remat" if remat else way
            rows.append(line("update", name, seconds, batch.tokens.size, flops=flops) | ceiling)
    return rows


def decode_layout(
    config: PolicyConfig, sizes: Sizes, batch: int, sharers: int
) -> tuple[int, PageTables, launches.SlotArrays]:
    """Pages of a layer, and `batch` slots in the middle of a context: rows of `sharers` slots.

    With one sharer a row, nothing is shared: all pages are the slot's own.
    """
    Z, rows = sizes.page, batch // sharers
    shared = sizes.context if sharers > 1 else 0
    own = sizes.context - shared
    P, Q = shared // Z, -(-(own + sizes.steps) // Z)
    slot_B = np.arange(batch, dtype=np.int32)
    tables = PageTables(
        shared_RP=np.arange(rows * P, dtype=np.int32).reshape(rows, P),
        shared_lens_R=np.full(rows, shared, np.int32),
        members_RM=slot_B.reshape(rows, sharers),
        place_B=slot_B,
        private_BQ=rows * P + np.arange(batch * Q, dtype=np.int32).reshape(batch, Q),
    )
    every = lambda value, dtype=np.int32: np.full(batch, value, dtype)  # noqa: E731
    seeds_B2 = np.stack([np.zeros_like(slot_B), slot_B], 1).astype(np.uint32)
    draws = launches.Draws(every(1, np.float32), every(1, np.float32), seeds_B2, every(0))
    slots = launches.SlotArrays(
        token=slot_B, position=every(sizes.context), private_len=every(own),
        remaining=every(sizes.steps), stop_ids=np.full((batch, 1), -1, np.int32), draws=draws,
        adapters=every(0),
        copies=launches.Copies(every(0), every(0), every(0), np.int32(0)),
    )  # fmt: skip
    return rows * P + batch * Q, tables, slots


def cache(config: PolicyConfig, sizes: Sizes, count: int) -> Pages:
    """`count` pages a layer, random: zeros can be faster than real values."""
    size = pallas_kernels.cache_head_size(config.head_size)
    shape = (config.layers * count, 2, config.kv_heads, sizes.page, size)
    fill = jax.jit(lambda key: jax.random.uniform(key, shape, jnp.bfloat16, -1, 1))
    return Pages(fill(jax.random.key(3)), count)


def measure_decode(
    shape: Shape, params: Any, ceiling: dict[str, float], repeats: int
) -> list[dict[str, Any]]:
    config, sizes = shape.config, shape.sizes
    params = Apart(config, meshes.one()).of(params).decode
    rows = []
    for batch in sizes.batches:
        for sharers in (1, sizes.sharers):
            if batch % sharers:
                continue
            count, tables, slots = decode_layout(config, sizes, batch, sharers)
            held = cache(config, sizes, count)

            def work() -> Any:
                nonlocal held  # the cache is donated; the same tokens are written again
                held, *out = launches.generate(config, params, held, tables, slots, sizes.steps)  # noqa: B023
                return out

            seconds = median_seconds(work, repeats)
            # The new tokens are read too: after s steps there are s of them, on average half.
            cached = batch // sharers * sizes.context + batch * (sizes.steps + 1) / 2
            moved = sizes.steps * needs.decode_bytes(config, cached)
            name = f"{batch} slots" + (f", {sharers} to a prefix" if sharers > 1 else "")
            made = batch * sizes.steps
            rows.append(line("decode", name, seconds, made, moved=moved) | ceiling)
            del held
    return rows


@functools.partial(jax.jit, static_argnames="config", donate_argnames="pages")
def prefill(
    config: PolicyConfig, params: Any, pages: Pages, ids_1T: np.ndarray, table_1P: np.ndarray
) -> Pages:
    """One prefix into whole pages, as the engine reads it."""
    T = ids_1T.shape[1]
    attend = attention.packed(config, jnp.full((1, T), T, jnp.int32))
    k, v = policy.Policy(config, params).cache_entries(ids_1T, jnp.arange(T)[None], attend)
    return pages.write_pages(k, v, table_1P)


def measure_prefill(
    shape: Shape, params: Any, ceiling: dict[str, float], repeats: int
) -> list[dict[str, Any]]:
    config, sizes = shape.config, shape.sizes
    count = sizes.chunk // sizes.page
    held = cache(config, sizes, count)
    ids = np.random.default_rng(0).integers(0, config.valid_vocab, (1, sizes.chunk), np.int32)
    table_1P = np.arange(count, dtype=np.int32)[None]

    def work() -> Any:
        nonlocal held  # donated
        held = prefill(config, params, held, ids, table_1P)
        return held

    seconds = median_seconds(work, repeats)
    flops = needs.prefill_flops(config, sizes.chunk)
    return [line("prefill", "one chunk", seconds, sizes.chunk, flops=flops) | ceiling]


MEASURES = {"update": measure_update, "decode": measure_decode, "prefill": measure_prefill}


def line(
    part: str, name: str, seconds: float | None, count: int, *, flops: float = 0, moved: float = 0
) -> dict[str, Any]:
    """One measurement: `count` tokens, `flops` or `moved` bytes, `seconds` (None: no memory)."""
    return dict(part=part, name=name, seconds=seconds, tokens=count, flops=flops, bytes=moved)


def share(row: dict[str, Any]) -> float:
    """What the row needs over what the device could have done in the time."""
    could = row["flops_per_second"] if row["flops"] else row["bytes_per_second"]
    return (row["flops"] or row["bytes"]) / row["seconds"] / could


def measure(shape: Shape, parts: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """Runs the parts at one shape; weights are made once."""
    if shape.config.experts is not None:
        raise ValueError("a mixture of experts is not counted here; use a dense policy")
    ceiling = ceilings(shape.sizes, repeats)
    params = parameters.init_params(shape.config, jax.random.key(0), "bfloat16")
    return [row for part in parts for row in MEASURES[part](shape, params, ceiling, repeats)]


def table(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """The rows as lines of text."""
    flops, copied = rows[0]["flops_per_second"], rows[0]["bytes_per_second"]
    lines = [
        f"{name}: ceilings of this run {flops / 1e12:.4g} TFLOP/s, {copied / 1e12:.4g} TB/s",
        f"{'':8}{'':26}{'ms':>10}{'tokens/s':>12}{'':>17}{'share':>8}",
    ]
    for row in rows:
        begin = f"{row['part']:8}{row['name']:26}"
        if row["seconds"] is None:
            lines.append(begin + "   does not fit the device's memory")
            continue
        amount, unit = (row["flops"], "TFLOP/s") if row["flops"] else (row["bytes"], "TB/s")
        lines.append(
            f"{begin}{1e3 * row['seconds']:10.2f}{row['tokens'] / row['seconds']:12.0f}"
            f"{amount / row['seconds'] / 1e12:9.3g} {unit:7}{share(row):8.1%}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5b", "7b"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kernels", choices=pallas_kernels.BACKENDS, default="auto")
    parser.add_argument("--repeats", type=int, default=5, help="calls after the first")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if jax.default_backend() == "cpu" and set(options.shapes) != {"toy"}:
        parser.error(
            f"--shapes {' '.join(options.shapes)} on a CPU would take hours; there is no "
            "accelerator here, use --shapes toy to see that everything runs"
        )
    pallas_kernels.use(options.kernels)
    device = jax.devices()[0]
    found = {name: measure(SHAPES[name], options.parts, options.repeats) for name in options.shapes}
    if options.json:
        versions = dict(device=device.device_kind, jax=jax.__version__)
        print(json.dumps(versions | {"kernels": pallas_kernels.backend(), "rows": found}, indent=2))
        return
    print(f"{device.device_kind}, jax {jax.__version__}, kernels {pallas_kernels.backend()}")
    for name, rows in found.items():
        print("\n".join(table(name, rows)))


if __name__ == "__main__":
    main()
