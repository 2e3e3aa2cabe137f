"""The accelerator benchmark: what it counts, by hand; that what it runs does that much work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import accelerator, needs
from benchmarks.accelerator import SHAPES, TOY_SIZES
from configs.models import MODELS
from notepad_jax.engine import launches
from notepad_jax.model import parameters

TOY = SHAPES["toy"].config


@pytest.mark.parametrize("name", [name for name, c in MODELS.items() if c.experts is None])
def test_weights_are_the_parameters_but_embeddings_norms_and_biases(name):
    c = MODELS[name]
    biases = (c.heads + 2 * c.kv_heads) * c.head_size if c.attention_bias else 0
    norms = 2 * c.width + (2 * c.head_size if c.qk_norm else 0)
    embeddings = c.vocab_size * c.width * (1 if c.tied_embeddings else 2)
    rest = embeddings + c.layers * (biases + norms) + c.width
    assert needs.layer_weights(c) == parameters.count(c) - rest


def test_pairs_of_a_prefix_with_two_tails_and_padding():
    """docs/kernels.md's drawing: 4 prefix tokens, tails of 3 and 2, one of padding."""
    kv_end = np.array([[9, 9, 9, 9, 7, 7, 7, 9, 9, 10]])
    assert needs.visible_pairs(kv_end) == 10 + (3 * 4 + 6) + (2 * 4 + 3) + 1


def test_work_of_an_update_by_hand():
    """The toy: 9,216 weights a layer, 64 ids of width 32; 2 rows of 32 + 3 x 16 tokens."""
    batch = accelerator.make_batch(TOY, TOY_SIZES)
    assert batch.tokens.shape == (2, 80) and np.count_nonzero(batch.weights) == 2 * 3 * 8
    assert needs.layer_weights(TOY) == 2 * (2 * 32 * 3 * 32 + 3 * 32 * 32)
    pairs = 2 * (32 * 33 // 2 + 3 * (16 * 32 + 16 * 17 // 2))
    assert needs.visible_pairs(batch.kv_end) == pairs
    products = 18_432 * 160 + 64 * 32 * 48
    attention = 12 * 2 * 2 * 32 * pairs
    assert needs.update_flops(TOY, batch, frozen=False) == 6 * products + attention
    assert needs.update_flops(TOY, batch, frozen=True) == 4 * products + attention


def test_a_prefill_leaves_out_what_nothing_reads():
    """One layer of the two whole, k and v of the other; 36 pairs of 8 tokens."""
    whole, keys_values = 9216, 2 * 32 * 32
    expected = 2 * (whole + keys_values) * 8 + 4 * 2 * 32 * 36
    assert needs.prefill_flops(TOY, 8) == expected


def test_bytes_of_a_decode_step_by_hand():
    """Qwen2.5-0.5B: 493,961,216 weights and 6,144 numbers a cached token, two bytes each."""
    config = MODELS["Qwen2.5-0.5B"]
    assert needs.decode_bytes(config, 0) == 2 * 493_961_216
    assert needs.decode_bytes(config, 5120) == 2 * (493_961_216 + 5120 * 6144)


@pytest.mark.parametrize("batch, sharers", [(4, 1), (4, 2)])
def test_every_slot_has_a_context_and_no_page_is_two_slots_own(batch, sharers):
    pages, tables, slots = accelerator.decode_layout(TOY, TOY_SIZES, batch, sharers)
    tables = jax.tree.map(jnp.asarray, tables)
    Z, context = TOY_SIZES.page, TOY_SIZES.context
    assert (np.asarray(tables.shared_lens_B) + slots.private_len == context).all()
    used = np.asarray(tables.whole_BP(Z))[:, : (context + TOY_SIZES.steps - 1) // Z + 1]
    assert used.max() < pages
    shared = context // Z if sharers > 1 else 0
    assert len(np.unique(used[:, :shared])) == batch // sharers * shared
    assert len(np.unique(used[:, shared:])) == used[:, shared:].size


@pytest.mark.slow
def test_a_launch_makes_the_tokens_that_are_counted():
    params = parameters.init_params(TOY, jax.random.key(0), "bfloat16")
    for sharers in (1, 2):
        count, tables, slots = accelerator.decode_layout(TOY, TOY_SIZES, 4, sharers)
        pages = accelerator.cache(TOY, TOY_SIZES, count)
        assert float(abs(pages.data.astype("float32")).mean()) > 0.3  # zeros could run faster
        *_, logprobs, made = launches.generate(TOY, params, pages, tables, slots, TOY_SIZES.steps)
        assert (made == TOY_SIZES.steps).all() and np.isfinite(logprobs).all()


@pytest.mark.slow
def test_all_parts_run_and_the_table_has_a_line_for_each():
    rows = accelerator.measure(SHAPES["toy"], accelerator.PARTS, repeats=1)
    names = [(row["part"], row["name"]) for row in rows]
    assert names == [
        ("update", "adapters"),
        ("update", "adapters, remat"),
        ("update", "full"),
        ("update", "full, remat"),
        ("decode", "4 slots"),
        ("decode", "4 slots, 2 to a prefix"),
        ("prefill", "one chunk"),
    ]
    assert all(row["seconds"] > 0 and accelerator.share(row) > 0 for row in rows)
    assert len(accelerator.table("toy", rows)) == 2 + len(rows)


def test_what_does_not_fit_is_a_line_and_any_other_error_an_error():
    def fail(message):
        raise jax.errors.JaxRuntimeError(message)

    assert accelerator.median_seconds(lambda: fail("RESOURCE_EXHAUSTED: 99 GB"), 3) is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        accelerator.median_seconds(lambda: fail("INTERNAL"), 3)
    row = accelerator.line("update", "full", None, 80, flops=1.0)
    row |= dict(flops_per_second=1e12, bytes_per_second=1e12)
    assert accelerator.table("7b", [row])[-1].endswith("does not fit the device's memory")


def test_share_is_what_is_needed_over_what_was_possible():
    ceiling = dict(flops_per_second=1e12, bytes_per_second=1e9)
    assert accelerator.share(accelerator.line("update", "", 2.0, 1, flops=1e12) | ceiling) == 0.5
    assert accelerator.share(accelerator.line("decode", "", 4.0, 1, moved=1e9) | ceiling) == 0.25


def test_a_cpu_is_refused_the_published_sizes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["accelerator", "--shapes", "7b"])
    with pytest.raises(SystemExit) as stopped:
        accelerator.main()
    assert stopped.value.code == 2
    assert "--shapes toy" in capsys.readouterr().err
