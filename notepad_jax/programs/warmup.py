"""`notepad-jax warmup`: trains the starter policy by supervised learning, in minutes on a CPU.

A tiny standard Qwen3 decoder learns the single turns of a forgetful teacher (starter/lessons.py).
Left alone, two layers do not discover in reasonable time how to find a fact among its likes, so for
the length of this program three attention heads are told where to look: a head of the first layer
at the token two places back (in a fact, from the object to the subject), another from the cue to
the subject of the question, and one of the last layer from there to the asked object in the chunk.
This guidance is a term of the loss and leaves no trace in the network. To read a chunk once for all
questions about it, the forward pass here runs chunk and tails as two streams built from the model's
own layers; a test holds it equal to `model.policy.forward`. The result is a Hugging Face folder,
which `import-hf`, `train` and `quickstart` read. Above: commands; below: starter, model,
grpo.optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from notepad_jax.checkpoint.abstract_trees import abstract
from notepad_jax.checkpoint.hf import huggingface
from notepad_jax.checkpoint.training_state import Checkpoints
from notepad_jax.grpo.optimizer import make_optimizer, schedule
from notepad_jax.keys import flat, plain
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.layers import DecoderLayer, rms_norm, rope_angles
from notepad_jax.model.logprobs import logits
from notepad_jax.model.parameters import Params, count, init_params
from notepad_jax.parallel import place
from notepad_jax.setup import configuration, habits
from notepad_jax.setup.config.whole import Starter
from notepad_jax.starter import lessons, mixed_lessons, published, rounds_lessons, vocabulary
from notepad_jax.telemetry.screen import Screen

NEVER = -1e30  # the score of a key that a query must not see
BACK = 2  # places from a fact's object back to its subject
SPOKEN = 8  # no completion begins earlier in a tail (lessons.TAIL is its length)


# ---------------------------------------------------------------- the two streams


def _in_window(size, queries, keys, later=0):
    """Bool [queries, keys]: less than `size` tokens back (0: any), the first query at `later`."""
    back = later + jnp.arange(queries)[:, None] - jnp.arange(keys)
    return (back < size) | (size == 0)


def _tail_attention(q, k, v, k_chunk, v_chunk, sees_BQ, window):
    """Tails [B, Q, T, N, H] over their chunk [B, C, N, H] and themselves, within the window.

    Returns the output and the log attention to the chunk [B, N, Q, T, C] and to the
    tail itself [B, N, Q, T, T].
    """
    scale = q.shape[-1] ** -0.5
    T, C = q.shape[2], k_chunk.shape[1]
    causal_TT = jnp.tril(_in_window(window, T, T))
    sees_BQTC = sees_BQ[:, :, None, None] & _in_window(window, T, C, later=C)
    far = jnp.einsum("bqtnh,bcnh->bnqtc", q, k_chunk) * scale
    far = jnp.where(sees_BQTC[:, None], far, NEVER)
    near = jnp.where(causal_TT, jnp.einsum("bqtnh,bqsnh->bnqts", q, k) * scale, NEVER)
    top = jax.lax.stop_gradient(jnp.maximum(far.max(-1), near.max(-1)))[..., None]
    total = jnp.exp(far - top).sum(-1, keepdims=True) + jnp.exp(near - top).sum(-1, keepdims=True)
    norm = top + jnp.log(total)
    far, near = far - norm, near - norm
    out = jnp.einsum("bnqtc,bcnh->bqtnh", jnp.exp(far), v_chunk)
    return out + jnp.einsum("bnqts,bqsnh->bqtnh", jnp.exp(near), v), far, near


def _chunk_attention(q, k, v, window):
    """A chunk over itself; returns the output and the log attention [B, N, C, C]."""
    causal_CC = jnp.tril(_in_window(window, q.shape[1], q.shape[1]))
    score = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    log_share = jax.nn.log_softmax(jnp.where(causal_CC, score, NEVER))
    return jnp.einsum("bnts,bsnh->btnh", jnp.exp(log_share), v), log_share


@functools.partial(jax.tree_util.register_dataclass, data_fields=["chunk", "far", "near"],
                   meta_fields=[])  # fmt: skip
@dataclasses.dataclass(frozen=True)
class Looks:
    """The log attention weights of the guided layers."""

    chunk: Array  # [B, N, C, C] first layer, chunk to chunk
    near: Array  # [B, N, Q, T, T] first layer, tail to itself
    far: Array  # [B, N, Q, T, C] last layer, tail to chunk


def read_lesson(
    config: PolicyConfig, params: Params, chunk_BC: Array, tail_BQT: Array, sees_BQ: Array
) -> tuple[Array, Looks]:
    """Runs chunks and their tails; returns the tails' final hidden states [B, Q, T, D].

    Equal to `policy.forward` on rows that pack each chunk before its tails; the chunk's
    last hidden states are not needed and not computed.
    """
    c = config
    (B, C), (_, Q, T) = chunk_BC.shape, tail_BQT.shape
    positions_BT = (jnp.where(sees_BQ, C, 0)[:, :, None] + jnp.arange(T)).reshape(B, Q * T)
    chunk_angles = rope_angles(
        jnp.broadcast_to(jnp.arange(C), (B, C)), c.head_size, c.rope_theta, c.rope
    )
    tail_angles = rope_angles(positions_BT, c.head_size, c.rope_theta, c.rope)
    chunk, tail = params["embed"][chunk_BC], params["embed"][tail_BQT.reshape(B, Q * T)]

    def full(heads):  # every query head its own keys and values
        return jnp.repeat(heads, c.heads // c.kv_heads, axis=2)

    def apart(heads):  # [B, Q * T, N, H] -> [B, Q, T, N, H]
        return heads.reshape(B, Q, T, *heads.shape[2:])

    looks = []
    for index, window in enumerate(c.windows or (0,) * c.layers):
        layer = DecoderLayer(c, {name: leaf[index] for name, leaf in params["layers"].items()})
        normed_chunk, normed_tail = layer.before_attention(chunk), layer.before_attention(tail)
        k_chunk, v_chunk = map(full, layer.attention.keys_values(normed_chunk, chunk_angles))
        k, v = (apart(full(x)) for x in layer.attention.keys_values(normed_tail, tail_angles))
        q = apart(layer.attention.queries(normed_tail, tail_angles))
        out, far, near = _tail_attention(q, k, v, k_chunk, v_chunk, sees_BQ, window)
        tail, _ = layer.after_attention(tail, out.reshape(B, Q * T, c.heads, c.head_size))
        looks.append((far, near))
        if index < c.layers - 1:
            q_chunk = layer.attention.queries(normed_chunk, chunk_angles)
            out, within = _chunk_attention(q_chunk, k_chunk, v_chunk, window)
            chunk, _ = layer.after_attention(chunk, out)
            looks[-1] += (within,)
    hidden = rms_norm(tail, params["final_norm"], c.rms_eps).reshape(B, Q, T, -1)
    return hidden, Looks(chunk=looks[0][2], near=looks[0][1], far=looks[-1][0])


# ---------------------------------------------------------------- the loss


def lesson_loss(
    config: PolicyConfig, params: Params, lesson: dict[str, Array], guidance: float
) -> tuple[Array, dict[str, Array]]:
    """Cross-entropy with the teacher's odds, plus `guidance` times the attention loss of the heads.

    Both are nats per token. The numbers returned beside the loss: `loss` (cross-entropy
    alone); `retrieval` and `rest`, the share of words to be found in the chunk, and of all
    others, that the policy ranks first, not counting what the teacher might have said
    instead; `slip`, the probability of saying, in place of a word to be found, what the
    teacher never says. Reinforcement learning is as fast as `slip` is small.
    """
    hidden, looks = read_lesson(
        config, params, lesson["chunk"], lesson["tail"], lesson["sees_chunk"]
    )
    label, other, share, weight, subject_at, object_at = (
        lesson[name][:, :, SPOKEN:]
        for name in ("label", "other", "other_share", "weight", "subject_at", "object_at")
    )
    before = slice(SPOKEN - 1, -1)  # the states that predict them
    logp = jax.nn.log_softmax(logits(config, params, hidden[:, :, before]))

    def at(log_share, ids):
        return jnp.take_along_axis(log_share, jnp.maximum(ids, 0)[..., None], -1)[..., 0]

    def mean(value, mask):
        return jnp.sum(jnp.where(mask, value, 0)) / jnp.maximum(jnp.sum(mask), 1)

    spoken, found = weight > 0, object_at >= 0
    loss = mean(-(1 - share) * at(logp, label) - share * at(logp, other), spoken)
    back = -jnp.diagonal(looks.chunk[:, 0], -BACK, 1, 2).mean()
    subject = mean(-at(looks.near[:, 1 % config.heads, :, before], subject_at), subject_at >= 0)
    thing = mean(-at(looks.far[:, 0, :, before], object_at), found)

    open_to = other != label
    slip = 1 - jnp.exp(at(logp, label)) - jnp.where(open_to, jnp.exp(at(logp, other)), 0)
    excused = jax.nn.one_hot(other, config.vocab_size, dtype=bool) & open_to[..., None]
    right = jnp.argmax(jnp.where(excused, NEVER, logp), -1) == label
    numbers = {
        "loss": loss,
        "misses": back + subject + thing,
        "retrieval": mean(right, found),
        "rest": mean(right, spoken & ~found),
        "slip": mean(slip, found),
    }
    return loss + guidance * (back + subject + thing), numbers


def shaken(params: Params, noise: float, key: Array) -> Params:
    """Returns parameters with Gaussian noise, so that training looks for flat minima.

    Matrices get `noise` times their root mean square, the embedding a quarter of that, norms none.
    The gradient there is that of the noisy network (An 1996).
    """

    def one(path: Any, leaf: Array, key: Array) -> Array:
        name = path[-1].key
        share = 0.0 if name.endswith("norm") else 0.25 if name == "embed" else 1.0
        size = share * noise * jnp.sqrt(jnp.mean(leaf * leaf))
        return leaf + size * jax.random.normal(key, leaf.shape)

    keys = jax.random.split(key, len(jax.tree.leaves(params)))
    keys = jax.tree.unflatten(jax.tree.structure(params), list(keys))
    return jax.tree.map_with_path(one, params, keys)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def train_step(
    config: PolicyConfig,
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: Any,
    lesson: dict[str, Array],
    guidance: float,
    noise: float,
    rate_share: float,
    key: Array,
) -> tuple[Params, Any, dict[str, Array]]:
    gradient, numbers = jax.grad(lesson_loss, argnums=1, has_aux=True)(
        config, shaken(params, noise, key), lesson, guidance
    )
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    updates = jax.tree.map(lambda u: u * rate_share, updates)
    return optax.apply_updates(params, updates), opt_state, numbers


# ---------------------------------------------------------------- the program


def draw_lesson(config: Starter, step: int) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the chunk size and the lesson of a step: a function of seed and step alone."""
    rng = np.random.default_rng([config.seed, step])
    sizes = config.lessons[:1] if step < config.drill_steps else config.lessons
    share = np.array([size.share for size in sizes])
    size = sizes[rng.choice(len(sizes), p=share / share.sum())]
    drawn_as = rng, size.chunks, size.chunk_size, size.tails, config.habits
    if config.rounds:
        return size.chunk_size, vars(rounds_lessons.draw(*drawn_as, size.notes))
    draw = mixed_lessons.draw if config.mixed else lessons.draw
    return size.chunk_size, vars(draw(*drawn_as))


def initial_params(policy: PolicyConfig, seed: int, embed: float, branches: float) -> Params:
    """Random parameters, with embeddings `embed` times and branch outputs `branches` times usual.

    Loud words and quiet branches: what a token is survives the first layer, so that the
    second can carry it over. With the usual values learning takes several times longer.
    """
    params = init_params(policy, jax.random.key(seed))
    layers = params["layers"]
    quiet = {name: layers[name] * branches for name in ("o", "down")}
    return {**params, "embed": params["embed"] * embed, "layers": {**layers, **quiet}}


def run(config: Starter, screen: Screen) -> dict[str, float]:
    """Trains the starter and writes its folder; returns the last numbers by chunk size.

    With `config.checkpoints` set, a run that was killed goes on from its last checkpoint.
    """
    policy = PolicyConfig(
        **vars(config.policy),
        vocab_size=len(vocabulary.PIECES),
        valid_vocab=len(vocabulary.PIECES),
        windows=(config.first_window,) + (0,) * (config.policy.layers - 1),
    )
    if policy.layers < 2:
        raise ValueError(f"policy.layers is {policy.layers}; finding a fact takes at least 2")
    said = habits.of_config(plain(configuration.load(config.reads_as)))
    if not said:
        raise ValueError(f"reads_as={config.reads_as} has no section reading; try quickstart")
    optimizer, rate = make_optimizer(config.optimizer), schedule(config.optimizer)
    params = initial_params(policy, config.seed, **vars(config.initial))
    opt_state = place.commit(optimizer.init(params))
    first = 0
    if config.checkpoints:
        saved = _restore(config, params, opt_state, screen)
        first, params, opt_state = saved or (0, params, opt_state)
    screen.say(f"warmup: {count(policy):,} parameters, steps {first} to {config.steps}")
    bar = screen.bar("warmup", config.steps, "steps")
    bar.advance(first)
    last: dict[str, float] = {}
    began = time.monotonic()
    for step in range(first, config.steps):
        chunk_size, lesson = draw_lesson(config, step)
        params, opt_state, numbers = train_step(
            policy, optimizer, params, opt_state, lesson, config.guidance, config.noise,
            float(rate(step)), jax.random.fold_in(jax.random.key(config.seed), step),
        )  # fmt: skip
        numbers = {name: float(x) for name, x in numbers.items()}  # device to host
        if not math.isfinite(numbers["loss"]):
            raise ValueError(
                f"the loss of step {step + 1} is {numbers['loss']}; nothing was written over "
                f"{config.folder}: lower optimizer.learning_rate"
            )
        last |= {f"{name}@{chunk_size}": x for name, x in numbers.items()}
        bar.advance(1, loss=numbers["loss"], retrieval=numbers["retrieval"], chunk=chunk_size)
        if config.checkpoints and (step + 1) % config.checkpoint_every == 0:
            checkpoints = Checkpoints(config.checkpoints, keep=1)
            checkpoints.save(step + 1, params, opt_state, {}, _identity(config))
    bar.finish()
    folder = Path(config.folder)
    _write(policy, params, folder, published.files() | habits.files(said, folder, screen.warn))
    screen.say(f"wrote {folder} after {time.monotonic() - began:.0f} s")
    return last


_FREE = ("steps", "folder", "reads_as", "checkpoints", "checkpoint_every")  # no step depends on it


def _identity(config: Starter) -> dict[str, Any]:
    """Returns what all steps of a folder of checkpoints have in common."""
    said = flat(plain(config))
    return {name: value for name, value in said.items() if name not in _FREE}


def _restore(
    config: Starter, params: Params, opt_state: Any, screen: Screen
) -> tuple[int, Params, Any] | None:
    """Returns what was saved, if anything was; ValueError where that was trained otherwise."""
    checkpoints = Checkpoints(config.checkpoints, keep=1)
    if not checkpoints.steps():
        return None
    saved = checkpoints.restore(abstract(params), abstract(opt_state), screen.warn)
    for name, ours in _identity(config).items():
        if (theirs := saved.meta.get(name, ours)) != ours:  # an earlier version saved the seed
            raise ValueError(
                f"{config.checkpoints} was made with {name} = {theirs!r}, and now it is {ours!r}; "
                f"choose another folder for checkpoints"
            )
    return saved.step, saved.params, saved.opt


def _write(policy: PolicyConfig, params: Params, folder: Path, beside: dict[str, bytes]) -> None:
    """Writes the Hugging Face folder, keeping its README."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    readme = folder / "README.md"
    kept = {readme.name: readme.read_bytes()} if readme.exists() else {}
    huggingface.export_params(policy, params, folder, beside | kept)
