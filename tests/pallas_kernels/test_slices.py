"""Names of slices, with and without a compiler for them."""

import pytest

from notepad_jax.planner import chips
from pallas_kernels import aot
from tests import tpu_compiler


@pytest.mark.parametrize(
    "name, says",
    [
        ("v9:2x2", "'v9:2x2' names no TPU that is known here.*v5e, v6e, v5p, tpu7x"),
        ("v5p", "there is no slice 'v5p'; v5p comes as 1x1x1, 2x2x1, "),
        ("v5p:3x3x3", "there is no slice 'v5p:3x3x3'.*or three sides that are multiples of 4"),
        ("v5p:32x32x32", "there is no slice 'v5p:32x32x32'"),
        ("v5p:2x4", "there is no slice"),
        ("v6e:4x4x4", "there is no slice 'v6e:4x4x4'; v6e comes as .*16x16$"),
        ("v5e:0x4", "there is no slice"),
        ("", "names no TPU"),
    ],
)
def test_a_slice_that_does_not_exist_is_one_line(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        aot.slice_of(name)
    assert "\n" not in str(raised.value)


def test_without_libtpu_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    aot.slice_of.cache_clear()
    with pytest.raises(aot.MissingCompiler, match=r"pip install 'notepad-jax\[aot\]'"):
        aot.slice_of("v5p:2x2x1")


def test_every_chip_has_its_figures() -> None:
    assert set(chips.CHIPS) == set(aot.SLICES) == set(aot.TOPOLOGIES)
    v5p = chips.CHIPS["v5p"]
    assert (v5p.cores * v5p.peak_flops, v5p.cores * v5p.hbm_bytes) == (459e12, 2765e9)


@tpu_compiler.needed
@pytest.mark.parametrize(
    "name, devices",
    [("v5e:8x8", 4), ("v6e:2x4", 8), ("v5e:1x1", 1), ("v5p:4x4x4", 4), ("tpu7x:2x2x2", 8)],
)
def test_a_host_is_a_slice_of_its_own_that_counts_from_0(name: str, devices: int) -> None:
    own = aot.host_of(name)
    assert sorted(device.id for device in own) == list(range(devices))
    assert {device.process_index for device in own} == {0}
