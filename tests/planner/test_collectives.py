"""What devices tell each other: by hand, and out of programs that the TPU compiler partitioned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from notepad_jax.planner.collectives import Collective, collectives
from pallas_kernels import aot
from tests import tpu_compiler

# Asynchronous, in a fusion, in a loop, on a single chip of a pair: all that a compiler does.
MODULE = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%reduced (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0:T(8,128)S(1)} parameter(0)
  %all = f32[8,16]{1,0:T(8,128)S(1)} all-reduce(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="jit(f)/gradient"}
  ROOT %cut = f32[2,16]{1,0} slice(%all), slice={[0:2], [0:16]}
}

%summed (p.1: f32[8,16]) -> f32[8,16] {
  %p.1 = f32[8,16]{1,0} parameter(0)
  ROOT %every = f32[8,16]{1,0} all-reduce(%p.1), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add, metadata={op_name="jit(f)/norm"}
}

%body (state: (s32[], bf16[2,16])) -> (s32[], bf16[2,16]) {
  %state = (s32[], bf16[2,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = bf16[2,16]{1,0} get-tuple-element(%state), index=1
  %begun = (bf16[2,16]{1,0}, bf16[8,16]{1,0}) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(f)/while/body/weights"}
  %ended = bf16[8,16]{1,0} all-gather-done(%begun)
  %moved = bf16[2,16]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %next = (s32[], bf16[2,16]{1,0}) tuple(%i, %moved)
}

%condition (state.1: (s32[], bf16[2,16])) -> pred[] {
  %state.1 = (s32[], bf16[2,16]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x: bf16[2,16], g: f32[8,16]) -> f32[2,16] {
  %x.1 = bf16[2,16]{1,0} parameter(0)
  %g = f32[8,16]{1,0} parameter(1)
  %norm = f32[8,16]{1,0} fusion(%g), kind=kCustom, calls=%summed
  %own = f32[2,16]{1,0} slice(%norm), slice={[0:2], [0:16]}
  %zero = s32[] constant(0)
  %start = (s32[], bf16[2,16]{1,0}) tuple(%zero, %x.1)
  %loop = (s32[], bf16[2,16]{1,0}) while(%start), condition=%condition, body=%body
  ROOT %sum = f32[2,16]{1,0} fusion(%g), kind=kCustom, calls=%reduced
}
"""  # noqa: E501


def test_every_kind_by_hand():
    found = {one.kind: one for one in collectives(MODULE)}
    gather = Collective("all-gather", 8 * 16 * 2, 4, 5)
    assert found["all-gather"] == gather and gather.sent(8) == 5 * 256 * 3 / 4
    reduce = Collective("all-reduce", 8 * 16 * 4, 4, 1)
    assert found["all-reduce"] == reduce and reduce.sent(8) == 2 * 512 * 3 / 4
    # Added up and sliced in one fusion: every device is sent what it keeps, and no more.
    scatter = Collective("reduce-scatter", 8 * 16 * 4, 4, 1)
    assert found["reduce-scatter"] == scatter and scatter.sent(8) == 512 * 3 / 4
    permute = Collective("collective-permute", 2 * 16 * 2, 0, 5)
    assert found["collective-permute"] == permute and permute.sent(2) == 5 * 64
    assert len(found) == 4


@pytest.mark.parametrize(
    "groups, size",
    [
        ("{{0,1},{2,3}}", 2),
        ("[4,8]<=[32]", 8),
        ("[4,8]<=[8,4]T(1,0)", 8),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_2','axis_0'}", 4),
        ("mesh['axis_0'=16,'axis_1'=2]{'axis_0':(2)8,'axis_1'}", 16),
        ("{}", 0),
    ],
)
def test_groups_in_every_spelling(groups, size):
    found = collectives(MODULE.replace("{{0,1,2,3},{4,5,6,7}}", groups))
    assert {one.group for one in found if "reduce" in one.kind} == {size}


def test_equal_exchanges_are_one_line():
    twice = MODULE.replace(
        "%moved =", "%again = bf16[2,16]{1,0} collective-permute(%x)\n  %moved ="
    )
    assert [c.times for c in collectives(twice) if c.kind == "collective-permute"] == [10]


@tpu_compiler.needed
@pytest.mark.parametrize(
    "spec, kind, size",
    [
        (P("x", None), "all-reduce", 512 * 768 * 4),
        (P("x", None), "reduce-scatter", 512 * 768 * 4),
        (P(None, "x"), "all-gather", 512 * 1024 * 2),
    ],
)
def test_what_the_tpu_compiler_partitioned(spec, kind, size):
    """[512, 1024] x [1024, 768]: partial sums are added up, whole or each its own rows, or the
    left operand is gathered.

    The compiler adds up in float32, and sends what the matrix unit takes: bfloat16.
    """
    mesh = jax.sharding.Mesh(np.array(aot.slice_of("v6e:2x2")), ("x",))
    place = lambda shape, s: jax.ShapeDtypeStruct(  # noqa: E731
        shape, jnp.float32, sharding=NamedSharding(mesh, s)
    )
    to = {"all-reduce": P(), "reduce-scatter": P("x"), "all-gather": P(None, "x")}[kind]
    run = jax.jit(jnp.dot, out_shardings=NamedSharding(mesh, to))
    operands = place((512, 1024), P(None, "x")), place((1024, 768), spec)
    found = collectives(run.lower(*operands).compile().as_text())
    assert [(one.kind, one.bytes, one.group, one.times) for one in found] == [(kind, size, 4, 1)]
