"""Config sections of a starter's training: policy, initial and lessons."""

from __future__ import annotations

import dataclasses

from notepad_jax.keys import POSITIVE, SHARE, also, key, whole


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyKeys:
    """Section policy: sizes of the decoder."""

    width: int = key(
        "sizes",
        "of the decoder. At least 2 layers; heads a multiple of kv_heads; an even head size",
        whole(1),
    )
    layers: int = also(whole(1))
    heads: int = also(whole(1))
    kv_heads: int = also(whole(1))
    head_size: int = also(whole(1))
    feed_forward: int = also(whole(1))
    rope_theta: float = key(
        "numbers",
        "base of the rotary angles; epsilon of RMSNorm",
        POSITIVE,
    )
    rms_eps: float = also(POSITIVE)
    qk_norm: bool = key(
        "true, false",
        "Qwen3 norms queries and keys; Qwen2 has biases on q, k, v; tied: the output matrix is "
        "the embedding",
    )
    attention_bias: bool = also()
    tied_embeddings: bool = also()


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitialKeys:
    """Section initial: first weights."""

    embed: float = key(
        "factors",
        "on the usual initial values of the embedding, and of what attention and feed-forward "
        "add. Loud words and quiet branches learn several times faster",
        POSITIVE,
    )
    branches: float = also(POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LessonKeys:
    """Section lessons: kinds of steps, in a list that a file changes, and no command line."""

    chunks: int = key("chunks", "of a step of this kind", whole(1))
    chunk_size: int = key("tokens", "of each", whole(1))
    tails: int = key("questions", "for each chunk", whole(1))
    share: float = key("share", "how often this kind is drawn", SHARE)
    notes: bool = key(
        "true or false",
        "with `rounds`: these chunks are notes side by side, of an odd number of tokens",
    )
