"""How many tokens' logits are held at once: by bytes on CPUs, 1,024 on GPUs."""

import pytest

import pallas_kernels
from pallas_kernels import dispatch


@pytest.mark.parametrize("vocabulary", [512, 32_768, 49_152, 151_936, 10**6])
def test_a_cpu_holds_no_more_than_it_may(vocabulary):
    with pallas_kernels.using("reference"):
        block = dispatch.logprob_block(vocabulary)
        assert block == min(1024, max(64, 2**27 // (4 * vocabulary)))
        assert block in (64, 1024) or 4 * vocabulary * block <= 2**27 < 4 * vocabulary * (block + 1)
    with pallas_kernels.using("xla"):
        assert dispatch.logprob_block(vocabulary) == 1024
