"""The jnp kernels against mathematics without blocks, pages or tricks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from dense import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels import (
    Pages,
    PageTables,
    packed_attention,
    packed_schedule,
    paged_attention,
    reference,
    token_logprob,
)

ROWS, KEYS, HEAD = 2, 200, 8  # two blocks of 128 an axis, the second one ragged


def kv_ends(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([layouts.kv_end(rng, KEYS) for _ in range(ROWS)]).astype(np.int32)


def blocked(q, k, v, kv_end):
    like = dict(head_size=q.shape[-1], dtype=q.dtype)
    return packed_attention(q, k, v, packed_schedule(kv_end, q.shape[1], **like))


@functools.partial(jax.jit, static_argnames="attention")
def results_and_gradients(attention, q, k, v, kv_end, d_out, d_lse):
    (out, lse), backward = jax.vjp(lambda *qkv: attention(*qkv, kv_end), q, k, v)
    return out, lse, *backward((d_out, d_lse))


def assert_blocked_is_dense(kv_end, queries, heads, kv_heads):
    rng = np.random.default_rng(queries + heads)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    B, S = kv_end.shape
    arguments = (
        draw(B, queries, heads, HEAD), 3 * draw(B, S, kv_heads, HEAD), draw(B, S, kv_heads, HEAD),
        kv_end, draw(B, queries, heads, HEAD), draw(B, queries, heads),
    )  # fmt: skip
    got = results_and_gradients(blocked, *arguments)
    want = results_and_gradients(dense_attention, *arguments)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4, err_msg=name)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_blocked_attention_is_dense_attention_for_any_packing(seed):
    assert_blocked_is_dense(kv_ends(seed), KEYS, 4, 1)


@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 7, 1), (72, 2, 2), (KEYS, 8, 1)])
def test_every_ratio_of_heads_and_fewer_queries_than_keys(queries, heads, kv_heads):
    """The queries are the row's last; every one of them sees at least itself."""
    for seed in range(3):
        assert_blocked_is_dense(kv_ends(seed), queries, heads, kv_heads)


@pytest.mark.parametrize(
    ("queries", "size"), [(1, 8), (104, 104), (128, 128), (130, 72), (416, 104), (1152, 128)]
)
def test_queries_are_cut_into_equal_blocks(queries, size):
    """All of a block is computed: 416 queries in blocks of 128 would pay for 512."""
    kv_end = jnp.full((1, 1152), 1152)
    with pallas_kernels.using("reference"):
        blocks = pallas_kernels.packed_schedule(kv_end, queries, head_size=32, dtype=jnp.float32)
    assert (blocks.q_size, blocks.k_size) == (size, 128)
    assert blocks.q_start.shape == (-(-queries // size),)


def test_a_row_of_padding_sees_only_itself():
    ends = np.tile(np.arange(1, KEYS + 1, dtype=np.int32), (ROWS, 1))
    assert_blocked_is_dense(ends, KEYS, 4, 1)


def test_heads_that_cannot_be_shared_are_refused():
    q, k = jnp.zeros((1, 8, 3, 4)), jnp.zeros((1, 8, 2, 4))
    with pytest.raises(ValueError, match="3 query heads .* 2 kv heads"):
        blocked(q, k, k, jnp.full((1, 8), 8))


# ---------------------------------------------------------------- paged attention

Z, K, N, H, LAYERS, PAGES = 8, 2, 6, 8, 2, 24


def paged_case():
    """Five slots: three share a prefix of two pages, one has one of its own, one has none.

    Every page that no slot reads, and every place beyond a length, holds NaN.
    """
    rng = np.random.default_rng(0)
    lens = np.array([0, 3, 5, 7, 9], np.int32)  # private tokens before the new one
    shared = np.array([[1, 2, 0], [7, 8, 9], [0, 0, 0]], np.int32)  # two rows and an empty one
    shared_lens = np.array([2 * Z, 3 * Z, 0], np.int32)
    members = np.array([[0, 1, 2], [3, 3, 3], [4, 4, 4]], np.int32)
    place = np.array([0, 1, 2, 3, 6], np.int32)
    private = np.array([[10, 0, 0], [11, 0, 0], [12, 13, 0], [14, 15, 0], [16, 17, 18]], np.int32)
    data = np.full((LAYERS * PAGES, 2, K, Z, H), np.nan, np.float32)
    for pages, lengths in ((shared, shared_lens), (private, lens)):
        for row, length in zip(pages, lengths, strict=True):
            for t in range(length):
                for layer in range(LAYERS):
                    data[layer * PAGES + row[t // Z], :, :, t % Z] = rng.normal(size=(2, K, H))
    kv_lens = np.array([2 * Z, 2 * Z, 2 * Z, 3 * Z, 0], np.int32) + lens + 1
    q, k, v = (rng.normal(size=(5, heads, H)).astype(np.float32) for heads in (N, K, K))
    tables = PageTables(shared, shared_lens, members, place, private)
    rows = [0, 0, 0, 1, 2]
    contexts = [(shared[rows[b]], shared_lens[rows[b]], private[b], lens[b]) for b in range(5)]
    return data, tables, kv_lens, (q, k, v), contexts


@pytest.mark.parametrize("block", [512, Z, 1], ids=["whole", "page by page", "less than a page"])
def test_paged_attention_sees_shared_and_private_tokens_and_itself(block):
    data, tables, kv_lens, (q, k, v), contexts = paged_case()
    layer = 1
    attend = jax.jit(
        functools.partial(reference.paged_attention, attend=reference.in_blocks(2, block))
    )
    out, _ = attend(q, k, v, Pages(jnp.asarray(data), PAGES), jnp.int32(layer), tables, kv_lens)
    for b, (shared, shared_len, private, length) in enumerate(contexts):
        tokens = [data[layer * PAGES + shared[t // Z], :, :, t % Z] for t in range(shared_len)]
        tokens += [data[layer * PAGES + private[t // Z], :, :, t % Z] for t in range(length)]
        keys, values = np.stack([*tokens, np.stack([k[b], v[b]])]).transpose(1, 2, 0, 3)
        for n in range(N):
            scores = keys[n * K // N] @ q[b, n] / np.sqrt(H)
            weights = np.exp(scores - scores.max())
            want = weights @ values[n * K // N] / weights.sum()
            np.testing.assert_allclose(out[b, n], want, atol=1e-5)


def test_what_a_slot_gets_does_not_depend_on_who_is_beside_it():
    data, tables, kv_lens, (q, k, v), _ = paged_case()
    attend = jax.jit(functools.partial(reference.paged_attention, attend=reference.in_blocks(2, Z)))

    def out(lens):
        return attend(q, k, v, Pages(jnp.asarray(data), PAGES), jnp.int32(0), tables, lens)[0]

    together = out(kv_lens)
    for b in range(5):
        alone = out(np.where(np.arange(5) == b, kv_lens, 0))
        assert np.asarray(alone[b]).tobytes() == np.asarray(together[b]).tobytes()
        assert not np.delete(alone, b, axis=0).any()


def test_paged_attention_writes_the_new_token_and_nothing_else():
    data, tables, kv_lens, (q, k, v), contexts = paged_case()
    kv_lens[4] = 0  # this slot is idle
    attend = jax.jit(paged_attention)
    out, pages = attend(q, k, v, Pages(jnp.asarray(data), PAGES), jnp.int32(0), tables, kv_lens)
    want = data.copy()
    for b, (_, _, private, length) in enumerate(contexts[:4]):
        want[private[length // Z], :, :, length % Z] = np.stack([k[b], v[b]])
    assert not out[4].any()
    assert np.asarray(pages.data).tobytes() == want.tobytes()  # NaN included


def test_a_gpu_waits_for_no_loop_where_one_round_covers_the_tables():
    """How often a loop runs would be in the data: its host would wait twice a layer and token."""
    data, tables, kv_lens, (q, k, v), _ = paged_case()  # where nothing was written there is NaN
    kv_lens[4] = 0
    arguments = q, k, v, Pages(jnp.asarray(data), PAGES), jnp.int32(0), tables, kv_lens
    want, _ = jax.jit(paged_attention)(*arguments)
    with pallas_kernels.using("xla"):
        attend = jax.jit(lambda *a: paged_attention(*a))
        assert "while" not in attend.lower(*arguments).as_text()
        got, _ = attend(*arguments)
    np.testing.assert_allclose(got, want, atol=1e-6)
    with pallas_kernels.using("xla"):
        wide = dataclasses.replace(
            tables, private_BQ=np.tile(tables.private_BQ, (1, 1 + 2048 // Z))
        )
        text = jax.jit(lambda *a: paged_attention(*a)).lower(*arguments[:-2], wide, kv_lens)
    assert text.as_text().count("while") > 0


# ---------------------------------------------------------------- token logprobs

D, V, VALID = 6, 11, 9


@pytest.mark.parametrize("count, temperature", [(1, 1.0), (4, 0.7), (5, 1.0), (8, 0.7), (9, 1.0)])
def test_token_logprob_is_log_softmax_with_its_gradient(count, temperature):
    rng = np.random.default_rng(count)
    x, w = rng.normal(size=(count, D)).astype(np.float32), rng.normal(size=(D, V)).astype("f")
    labels = jnp.asarray(rng.integers(0, VALID, count), jnp.int32)
    weights = rng.normal(size=(3, count)).astype(np.float32)

    def ours(x, w):
        found = reference.token_logprob(
            x, w, labels, temperature=temperature, valid_vocab=VALID, block=4
        )
        return sum(jnp.vdot(a, b) for a, b in zip(found, weights, strict=True)), found

    def plain(x, w):
        logits = (x @ w)[:, :VALID] / temperature
        logp = jax.nn.log_softmax(logits)
        entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        found = logp[jnp.arange(count), labels], jax.nn.logsumexp(logits, axis=-1), entropy
        return sum(jnp.vdot(a, b) for a, b in zip(found, weights, strict=True)), found

    got, want = (jax.jit(jax.grad(f, (0, 1), has_aux=True))(x, w) for f in (ours, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), got, want)


def test_token_logprob_of_huge_logits_is_finite():
    x, w = jnp.array([[3e4], [-3e4]]), jnp.array([[1.0, -1.0, 0.5, 9.0]])
    label = jnp.array([1, 1])
    found = token_logprob(x, w, label, temperature=0.5, valid_vocab=3)
    np.testing.assert_allclose(found[0], [-1.2e5, 0.0])
    np.testing.assert_allclose(found[2], [0.0, 0.0], atol=1e-3)


def test_token_logprob_refuses_a_greedy_temperature():
    x = jnp.zeros((1, 2))
    with pytest.raises(ValueError, match="temperature is 0"):
        token_logprob(x, x.T, jnp.zeros(1, jnp.int32), temperature=0.0, valid_vocab=1)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [H, 128])
def test_decoding_over_shared_prefixes_is_the_same_on_every_backend(lanes):
    """With a cache of the head's width, and of the width that TPUs want."""
    data, tables, kv_lens, (q, k, v), _ = paged_case()
    kv_lens[4] = 0
    data = np.nan_to_num(data) if lanes == H else np.nan_to_num(
        np.pad(data, ((0, 0),) * 4 + ((0, lanes - H),))
    )  # fmt: skip
    attend = jax.jit(paged_attention)
    cache = lambda: Pages(jnp.asarray(data), PAGES)  # noqa: E731
    want, written = attend(q, k, v, cache(), jnp.int32(1), tables, kv_lens)
    starts = jnp.arange(6, dtype=jnp.int32)
    ragged = functools.partial(paged_attention, cu_q_lens_B1=starts, decode=2)
    for backend, function in (
        ("reference", ragged),
        ("xla", paged_attention),
        ("interpret", paged_attention),
        ("interpret", ragged),
    ):
        with pallas_kernels.using(backend):
            out, pages = jax.jit(lambda *a, f=function: f(*a))(
                q, k, v, cache(), jnp.int32(1), tables, kv_lens
            )
        np.testing.assert_allclose(out, want, atol=1e-5)
        assert np.asarray(pages.data).tobytes() == np.asarray(written.data).tobytes()
