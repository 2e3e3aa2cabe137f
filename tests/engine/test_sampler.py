"""The nucleus: what stays of a distribution, alone and in company."""

import jax
import jax.numpy as jnp
import numpy as np

from notepad_jax.engine import sampler


def kept(logits, top_p) -> np.ndarray:
    logits, top_p = jnp.asarray(logits, jnp.float32), jnp.asarray(top_p, jnp.float32)
    return np.isfinite(jax.jit(sampler._nucleus)(logits, top_p))


def test_the_likeliest_that_reach_top_p_together_stay_and_equals_stay_together():
    shares = np.log([0.4, 0.1, 0.25, 0.25])
    top_ps = [1e-30, 0.39, 0.41, 0.66, 0.89, 0.91, 1.0]
    expected = ["1000", "1000", "1011", "1011", "1011", "1111", "1111"]
    found = kept([shares] * len(top_ps), top_ps)
    assert ["".join(str(int(x)) for x in row) for row in found] == expected


def test_the_nucleus_is_what_sorting_finds():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 501)).astype(np.float32) * 3
    logits[:, ::7] = np.round(logits[:, ::7])  # equals
    logits[0], logits[1, 1:] = 0.0, -np.inf
    top_p = np.array([0.5, 0.5, 0.1, 0.3, 0.9, 0.99], np.float32)
    share = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    likelier = np.where(share[:, None, :] > share[:, :, None], share[:, None, :], 0).sum(-1)
    assert (kept(logits, top_p) == ((likelier < top_p[:, None]) & np.isfinite(logits))).all()


def test_who_wants_the_whole_distribution_has_it_whoever_shares_the_launch():
    # The sum of so many likelier ones is rounded to 1 before the last is reached.
    logits = np.concatenate([np.zeros(64), np.full(1000, -20.0)])[None]
    logits = np.repeat(logits, 2, axis=0)
    found = kept(logits, [1.0, 0.999])
    assert found[0].all() and found[1].sum() == 64


def test_the_likeliest_come_in_order_equals_by_id_and_with_the_samplers_logprobs():
    logits = jnp.log(jnp.asarray([[0.1, 0.4, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]], jnp.float32))
    ids, logps = jax.jit(sampler.likeliest, static_argnums=3)(logits, jnp.array([0.5, 0]), 3, 4)
    squares = np.array([0.4, 0.25, 0.25]) ** 2 / (0.01 + 0.16 + 2 * 0.0625)
    assert ids[0, :3].tolist() == [1, 2, 3]
    np.testing.assert_allclose(np.exp(logps[0, :3]), squares, rtol=1e-6)
    assert ids[1, 0] == 0 and logps[1].tolist()[:3] == [0, -np.inf, -np.inf]
