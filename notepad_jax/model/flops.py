"""Model FLOPs: what a pass over tokens takes in the policy's matrix products, from its sizes.

With N weights that a token is multiplied with, T tokens and A FLOPs of attention, a forward pass is
2 N T + A. Learning is 6 N T + 3 A where the weights learn (each product once there, twice back) and
4 N T + 3 A where adapters beside them do, with 6 for each element of theirs. The unembedding's
weights meet only the positions whose logits are wanted, so they are counted apart; the embedding
is looked up and costs nothing. Attention is of the (query, key) pairs that the mask leaves,
windows of layers not taken off. What is made again (`grpo.remat`), norms, routing and the optimizer
are not in it: that is what model FLOPs means (PaLM, appendix B). Above: `grpo`, the learner, the
planner, whose programs' products are counted here, too, on a device of several.
"""

from __future__ import annotations

from notepad_jax.model.config import PolicyConfig

ATTENTION = 2  # products of a visible pair in a forward pass: a score, and a value
LEARNING = 3  # a product is made once there and twice on the way back


def forward(policy: PolicyConfig, tokens: int, pairs: int, logits: int, adapters: int = 0) -> int:
    """FLOPs of a forward pass.

    Of `tokens` through all layers, whose queries see `pairs` of keys; `logits` positions meet the
    vocabulary. `adapters` is how many elements lie beside the weights of all layers.
    """
    beside = 2 * adapters * tokens + ATTENTION * pair(policy) * pairs
    return int(products(policy, tokens, logits)) + beside


def learning(policy: PolicyConfig, tokens: int, pairs: int, logits: int, adapters: int = 0) -> int:
    """FLOPs of a forward and a backward pass, as `forward`; with `adapters` they alone learn."""
    fixed = int(products(policy, tokens, logits)) if adapters else 0
    return LEARNING * forward(policy, tokens, pairs, logits, adapters) - fixed


def products(policy: PolicyConfig, tokens: int, logits: int, tensor: int = 1) -> float:
    """FLOPs of a forward pass's products with weights, on one of `tensor` devices of a row."""
    unembedding = logits * policy.width * policy.vocab_size / tensor
    return 2 * (tokens * policy.layers * layer(policy, tensor) + unembedding)


def pair(policy: PolicyConfig, tensor: int = 1) -> int:
    """FLOPs of one attention product for one (query, key) pair, in all layers and heads."""
    return 2 * policy.heads // tensor * policy.head_size * policy.layers


def layer(policy: PolicyConfig, tensor: int = 1) -> float:
    """Weights of a layer that a token is multiplied with, on one of `tensor` devices."""
    heads, keys = policy.heads * policy.head_size, policy.kv_heads * policy.head_size
    return policy.width * (2 * heads + 2 * keys) / tensor + 3 * down(policy, tensor)


def down(policy: PolicyConfig, tensor: int = 1) -> float:
    """Weights of the down projection; a token's experts may all be on one device, as shapes say."""
    return policy.width * wide(policy) / (1 if policy.experts else tensor)


def wide(policy: PolicyConfig) -> int:
    """The width of the feed-forward that a token goes through, over all its experts."""
    experts = policy.experts
    return experts.feed_forward * experts.per_token if experts else policy.feed_forward
