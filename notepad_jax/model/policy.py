"""The forward pass of the policy: embed, scan over the layers, norm.

One function serves every phase. What differs between training, prefill and decode is only
how queries meet keys, and that is the `attend` argument (see `attention`): it receives the
layer's index, the queries and the new keys and values, and a carry that it may thread from
layer to layer (the paged cache in decoding); whatever it returns as its third value is
stacked over layers (the new keys and values in prefill). Hidden states come out; turning
them into logprobs is `logprobs`' job, on the few positions that need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import pallas_kernels
from notepad_jax.model import lora
from notepad_jax.model.config import PolicyConfig
from notepad_jax.model.layers import DecoderLayer, rms_norm, rope_angles
from notepad_jax.model.matrices import Unstacked, seen
from notepad_jax.model.parameters import Params, specs
from notepad_jax.parallel import shards

# (layer, q_BTNH, k_BTKH, v_BTKH, carry) -> (out_BTNH, carry, per_layer_output)
Attend = Callable[[Array, Array, Array, Array, Any], tuple[Array, Any, Any]]


class Policy(nnx.Module):
    """The decoder as a module around an existing parameter tree; layers stay as they are kept."""

    def __init__(self, config: PolicyConfig, params: Params):
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.layers = nnx.data({name: nnx.Param(leaf) for name, leaf in params["layers"].items()})
        self.whose_BT = nnx.data(params.get(lora.CHOSEN))

    def __call__(
        self,
        tokens_BT: Int[Array, "B T"],
        positions_BT: Int[Array, "B T"],
        attend: Attend,
        carry: Any = (),
        remat: bool = False,
    ) -> tuple[Float[Array, "B T D"], Any, Any, Int[Array, "L B T A"]]:
        """The forward pass; see `forward`."""
        c = self.config
        with jax.named_scope("embed"):
            hidden_BTD = shards.rows(self.embed[...][tokens_BT].astype(c.dtype))
        cos_sin = rope_angles(positions_BT, c.head_size, c.rope_theta, c.rope)

        def body(state: tuple[Array, Any], xs: tuple[Any, Array]) -> tuple[Any, Any]:
            hidden_BTD, carry = state
            params, index = xs
            layer = DecoderLayer(c, _seen(c, params, self.whose_BT))
            normed_BTD = layer.before_attention(hidden_BTD)
            with jax.named_scope("attention"):
                q_BTNH = layer.attention.queries(normed_BTD, cos_sin)
                k_BTKH, v_BTKH = layer.attention.keys_values(normed_BTD, cos_sin)
                out_BTNH, carry, extra = attend(index, q_BTNH, k_BTKH, v_BTKH, carry)
            with jax.named_scope("feed_forward"):
                hidden_BTD, routes_BTA = layer.after_attention(hidden_BTD, out_BTNH)
            return (shards.rows(hidden_BTD), carry), (extra, routes_BTA)

        if remat:
            body = jax.checkpoint(body, policy=pallas_kernels.SAVE_ATTENTION)
        (hidden_BTD, carry), (extras, routes_LBTA) = self._scan(body, (hidden_BTD, carry))
        final_norm = seen(self.final_norm[...], specs(c)["final_norm"].axes, c.dtype)
        hidden_BTD = rms_norm(hidden_BTD, final_norm, c.rms_eps)
        return hidden_BTD, carry, extras, routes_LBTA

    def cache_entries(
        self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"], attend: Attend
    ) -> tuple[Float[Array, "L B T K H"], Float[Array, "L B T K H"]]:
        """Returns only the keys and values that a cache keeps of these tokens.

        The last layer's attention and feed-forward feed nothing that is kept, so they are
        skipped: exact, and for a network of L layers one L-th of the work.
        """
        c = self.config
        hidden_BTD = shards.rows(self.embed[...][tokens_BT].astype(c.dtype))
        cos_sin = rope_angles(positions_BT, c.head_size, c.rope_theta, c.rope)

        def body(hidden_BTD: Array, xs: tuple[Any, Array]) -> tuple[Array, Any]:
            params, index = xs
            layer = DecoderLayer(c, _seen(c, params, self.whose_BT))
            normed_BTD = layer.before_attention(hidden_BTD)
            k_BTKH, v_BTKH = layer.attention.keys_values(normed_BTD, cos_sin)

            def rest(hidden_BTD: Array) -> Array:
                q_BTNH = layer.attention.queries(normed_BTD, cos_sin)
                out_BTNH, _, _ = attend(index, q_BTNH, k_BTKH, v_BTKH, ())
                return shards.rows(layer.after_attention(hidden_BTD, out_BTNH)[0])

            hidden_BTD = jax.lax.cond(index < c.layers - 1, rest, lambda h: h, hidden_BTD)
            return hidden_BTD, (k_BTKH, v_BTKH)

        return self._scan(body, hidden_BTD)[1]

    def _scan(self, body: Callable[[Any, Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
        """`jax.lax.scan` of `body`, which is given (a layer's parameters, its index).

        On GPUs a policy whose matrices lie apart has no loop, for which the host would have to
        launch every product of every layer anew: a program of all layers is one CUDA graph.
        """
        leaves = {name: leaf.get_value() for name, leaf in self.layers.items()}
        apart = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, Unstacked)}
        stacked = {name: leaf for name, leaf in leaves.items() if name not in apart}

        def one(state: Any, xs: tuple[Any, Array]) -> tuple[Any, Any]:
            params, index = xs
            chosen = {name: leaf.of(index) for name, leaf in apart.items()}
            return body(state, (params | chosen, index))

        if not apart or not pallas_kernels.on_gpu():
            return jax.lax.scan(one, state, (stacked, jnp.arange(self.config.layers)))
        results = []
        for index in range(self.config.layers):
            own = {name: leaf.layers[index] for name, leaf in apart.items()}
            own |= jax.tree.map(lambda leaf, index=index: leaf[index], stacked)
            state, result = body(state, (own, jnp.int32(index)))
            results.append(result)
        return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)


def _seen(config: PolicyConfig, layer: Params, whose_BT: Array | None) -> Params:
    """One layer's parameters as activations of `config.dtype` meet them, adapters in place."""
    declared = specs(config)["layers"]
    axes = {name: spec.axes[1:] for name, spec in declared.items()} | lora.axes(declared)
    return lora.beside(
        {
            name: seen(leaf, axes[name], config.dtype) if name in axes else leaf
            for name, leaf in layer.items()  # what has no axes is the adapters' scale, a number
        },
        whose_BT,
    )


def forward(
    config: PolicyConfig,
    params: Params,
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    attend: Attend,
    carry: Any = (),
    remat: bool = False,
) -> tuple[Float[Array, "B T D"], Any, Any, Int[Array, "L B T A"]]:
    """Runs the decoder: (hidden states after the final norm, carry, stacked extras, routes).

    Routes are the experts of every token in every layer (A is 0 if dense); `moe.load` makes load
    statistics of them.
    """
    return Policy(config, params)(tokens_BT, positions_BT, attend, carry, remat)


def output_matrix(config: PolicyConfig, params: Params) -> Float[Array, "D V"]:
    """Returns the matrix that turns hidden states into logits."""
    return params["embed"].T if config.tied_embeddings else params["unembed"]
