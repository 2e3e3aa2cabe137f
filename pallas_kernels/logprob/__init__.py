"""Logprob, logsumexp and entropy of every token, from hidden states, without any [T, V] array.

The TPU kernels behind `token_logprob`; `reference.logprob` is the plain-jnp twin and the
oracle. The forward keeps a block of tokens in VMEM and streams the weights past it once, with
an online softmax; the backward takes a cotangent for each token and each of the three outputs
and computes the logits again, block by block.

The softmax runs lane by lane. A register holds 8 tokens x 128 vocabulary entries, and reducing
over those 128 lanes at every step would cost more than the softmax itself. So entry v belongs
to lane v % 128, every (token, lane) keeps a running peak, sum and weighted sum of its own, and
the 128 partial answers of a token are merged once, after the kernel, by the formula that also
merges the shards of a vocabulary split over a mesh axis.

The backward is two kernels because its two results accumulate along different axes: dx of a
token block sums over the vocabulary, dw of a vocabulary block over the tokens. Each kernel
keeps its accumulator in VMEM and computes the logits for itself: 8 instead of 6 units of
matrix work, but nothing is written to HBM more than once.
"""

from pallas_kernels.logprob.call import token_logprob
from pallas_kernels.logprob.sizes import Sizes, fit_sizes

__all__ = ["Sizes", "fit_sizes", "token_logprob"]
