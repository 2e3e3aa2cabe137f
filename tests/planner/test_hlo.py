"""Reading a compiled module: every kind of instruction, counted by hand."""

import jax
import numpy as np
import pytest

from notepad_jax.planner import hlo

MODULE = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[3,8,8]{2,1,0})->f32[8]{0}}

%slice_and_add (p0: f32[3,8,8], p1: s32[], p2: f32[8]) -> (f32[8], bf16[8,8]) {
  %p0 = f32[3,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[8]{0} parameter(2)
  %zero = s32[] constant(0)
  %layer = f32[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,8}
  %flat = f32[8,8]{1,0} bitcast(%layer)
  %low = bf16[8,8]{1,0} convert(%flat)
  %sum = f32[8]{0} add(%p2, %p2)
  ROOT %both = (f32[8]{0}, bf16[8,8]{1,0}) tuple(%sum, %low)
}

%write (a: bf16[100,8], b: bf16[1,8], at: s32[]) -> bf16[100,8] {
  %a = bf16[100,8]{1,0} parameter(0)
  %b = bf16[1,8]{1,0} parameter(1)
  %at = s32[] parameter(2)
  ROOT %new = bf16[100,8]{1,0} dynamic-update-slice(%a, %b, %at, %at)
}

%product (x: bf16[8,8], y: bf16[8,4]) -> f32[8,4] {
  %x = bf16[8,8]{1,0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  ROOT %dot = f32[8,4]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[3,8,8])) -> (s32[], f32[3,8,8]) {
  %state = (s32[], f32[3,8,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = f32[3,8,8]{2,1,0} get-tuple-element(%state), index=1
  %row = f32[8]{0} constant({...})
  %fused = (f32[8]{0}, bf16[8,8]{1,0}) fusion(%stack, %i, %row), kind=kLoop, calls=%slice_and_add, metadata={op_name="jit(f)/while/body/attention/add"}
  ROOT %next = (s32[], f32[3,8,8]{2,1,0}) tuple(%i, %stack)
}

%condition (state.1: (s32[], f32[3,8,8])) -> pred[] {
  %state.1 = (s32[], f32[3,8,8]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (w: f32[3,8,8], cache: bf16[100,8], new: bf16[1,8], y: bf16[8,4]) -> f32[8,4] {
  %w = f32[3,8,8]{2,1,0} parameter(0)
  %cache = bf16[100,8]{1,0} parameter(1)
  %new.1 = bf16[1,8]{1,0} parameter(2)
  %y.1 = bf16[8,4]{1,0} parameter(3)
  %start = s32[] constant(0)
  %carry = (s32[], f32[3,8,8]{2,1,0}) tuple(%start, %w)
  %loop = (s32[], f32[3,8,8]{2,1,0}) while(%carry), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %written = bf16[100,8]{1,0} fusion(%cache, %new.1, %start), kind=kLoop, calls=%write
  %x.1 = bf16[8,8]{1,0} copy(%y.1)
  %gemm = f32[8,4]{1,0} fusion(%x.1, %y.1), kind=kCustom, calls=%product, metadata={op_name="jit(f)/feed_forward/dot_general"}
  ROOT %call = (f32[8,4]{1,0}, s8[4096]{0}) custom-call(%x.1, %y.1), custom_call_target="__cublas$gemm", backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}
}
"""  # noqa: E501


def test_every_kind_of_instruction_by_hand():
    costs = {cost.instruction.name: cost for cost in hlo.instructions(MODULE)}
    assert set(costs) == {"fused", "written", "x.1", "gemm", "call"}
    # In a loop of 3: one layer of the stack, the index, a row; written a row and the layer.
    assert costs["fused"].times == 3
    assert costs["fused"].moved == 3 * (8 * 8 * 4 + 4 + 8 * 4 + 8 * 4 + 8 * 8 * 2)
    # In place: the update is read and written, of the cache nothing else.
    assert costs["written"].moved == 16 + 16 + 4
    assert costs["x.1"].moved == 8 * 8 * 2 + 8 * 4 * 2
    assert costs["gemm"].moved == costs["call"].moved == 8 * 4 * 4 + 8 * 8 * 2 + 8 * 4 * 2
    assert costs["gemm"].flops == costs["call"].flops == 2 * 8 * 4 * 8
    assert costs["fused"].flops == costs["written"].flops == 0
    assert costs["gemm"].wide == costs["call"].wide == 0  # bfloat16 operands
    wide = {c.instruction.name: c.wide for c in hlo.instructions(MODULE.replace("bf16", "f32"))}
    assert wide["gemm"] == wide["call"] == 2 * 8 * 4 * 8


def test_a_loop_of_unknown_length_counts_once():
    open_ended = MODULE.replace('backend_config={"known_trip_count":{"n":"3"}}', "metadata={}")
    times = {cost.instruction.name: cost.times for cost in hlo.instructions(open_ended)}
    assert times["fused"] == 1


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.instructions("%f (p: f32[]) -> f32[] {\n}\n")


def test_a_matrix_product_that_xla_compiled_here_is_found():
    x = jax.ShapeDtypeStruct((64, 32), np.float32)
    program = jax.jit(lambda a, b: a @ b.T).lower(x, x).compile()
    costs = hlo.instructions(program.as_text())
    assert sum(cost.moved for cost in costs) >= (2 * 64 * 32 + 64 * 64) * 4


# As libtpu writes them: products are convolutions, and a loop's length is in its condition.
TPU = """\
%body (state: (s32[], bf16[64,32], bf16[3,32,4,8])) -> (s32[], bf16[64,32], bf16[3,32,4,8]) {
  %state = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[64,32]{1,0:T(8,128)(2,1)} get-tuple-element(%state), index=1
  %w = bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%state), index=2
  %near = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} copy(%x)
  %heads = bf16[64,4,8]{2,0,1:T(8,128)(2,1)} fusion(%near, %w, %i), kind=kOutput, calls=%project
  ROOT %next = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)}) tuple(%i, %x, %w)
}

%project (p0: bf16[64,32], p1: bf16[3,32,4,8], p2: s32[]) -> bf16[64,4,8] {
  %p0 = bf16[64,32]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %p1 = bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %p2 = s32[]{:T(128)} parameter(2)
  %one = bf16[4,32,8]{2,1,0:T(8,128)(2,1)} fusion(%p1, %p2), kind=kLoop, calls=%layer
  %three = bf16[64,32,1]{1,0,2:T(8,128)(2,1)} bitcast(%p0)
  ROOT %product = bf16[64,4,8]{2,0,1:T(8,128)(2,1)} convolution(%three, %one), window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_0io->b0f
}

%layer (q0: bf16[3,32,4,8], q1: s32[]) -> bf16[4,32,8] {
  %q0 = bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %q1 = s32[]{:T(128)} parameter(1)
  %cut = bf16[1,32,4,8]{3,2,1,0:T(8,128)(2,1)} dynamic-slice(%q0, %q1), dynamic_slice_sizes={1,32,4,8}
  ROOT %turned = bf16[4,32,8]{2,1,0:T(8,128)(2,1)} bitcast(%cut)
}

%condition (state.1: (s32[], bf16[64,32], bf16[3,32,4,8])) -> pred[] {
  %layers = s32[]{:T(128)} constant(3)
  %state.1 = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %at = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%at, %layers), direction=LT
}

ENTRY %main (x: bf16[64,32], w: bf16[3,32,4,8]) -> bf16[64,32] {
  %x.1 = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %w.1 = bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)}) tuple(%zero, %x.1, %w.1)
  %loop = (s32[]{:T(128)}, bf16[64,32]{1,0:T(8,128)(2,1)}, bf16[3,32,4,8]{3,2,1,0:T(8,128)(2,1)}) while(%start), condition=%condition, body=%body
  %declared = f32[64]{0:T(128)} custom-call(%x.1), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x","cost_estimate":{"flops":"700","transcendentals":"1","bytes_accessed":"90"}}}
  %silent = f32[64]{0:T(128)} custom-call(%x.1), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"x"}}
  ROOT %out = bf16[64,32]{1,0:T(8,128)(2,1)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_tpus_products_loops_and_memory_by_hand():
    costs = {cost.instruction.name: cost for cost in hlo.instructions(TPU)}
    # 64 rows, 32 inputs, 4 heads of 8: the window slides, but each head meets one place.
    assert costs["heads"].flops == 3 * 2 * 64 * 32 * 4 * 8
    # A layer of the weights out of a fusion in the fusion; what lies in VMEM is no traffic.
    assert costs["heads"].moved == 3 * (32 * 4 * 8 * 2 + 4 + 64 * 4 * 8 * 2)
    assert costs["near"].moved == 3 * 64 * 32 * 2
    assert (costs["declared"].moved, costs["declared"].flops) == (90, 700)
    assert (costs["silent"].moved, costs["silent"].flops) == (0, 0)


def test_a_loop_that_the_compiler_unrolled_counts_in_larger_steps():
    unrolled = TPU.replace("constant(3)", "constant(9)").replace(
        "  ROOT %next = (s32[]{:T(128)}, bf16[64,32]",
        "  %four = s32[]{:T(128)} constant(4)\n  %later = s32[]{:T(128)} add(%i, %four)\n"
        "  ROOT %next = (s32[]{:T(128)}, bf16[64,32]",
    ).replace("tuple(%i, %x, %w)", "tuple(%later, %x, %w)")  # fmt: skip
    costs = {cost.instruction.name: cost for cost in hlo.instructions(unrolled)}
    assert costs["heads"].times == 3  # 0, 4, 8


@pytest.mark.parametrize(
    "window, left, right, labels, out, meets",
    [
        ("", "8,16", "16,4", "bf_io->bf", "8,4", 8 * 16 * 4),
        # A real window: 10 places, 3 taps, the two at the edges meet one less.
        ("window={size=3 pad=1_1}", "8,16,10", "3,16,4", "bf0_0io->b0f", "8,10,4", 8 * 16 * 4 * 28),
        ("window={size=2 stride=2}", "8,16,10", "2,16,4", "bf0_0io->b0f", "8,5,4", 8 * 16 * 4 * 10),
        # Named in another order than the window counts: 4 meet one place, 2 are summed.
        ("window={size=4x2 pad=3_3x0_0 rhs_reversal=1x0}", "64,2,16,1", "2,16,4,8",
         "b1f0_1i0o->b0f1", "64,4,8,1", 64 * 2 * 16 * 4 * 8),
        # The gradient of a strided one: every other place is empty, and meets nothing.
        ("window={size=2 pad=1_1 lhs_dilate=2}", "8,4,5", "2,4,16", "bf0_0io->b0f", "8,10,16",
         8 * 4 * 16 * 10),
    ],
)  # fmt: skip
def test_pairs_that_meet_in_a_convolution(window, left, right, labels, out, meets):
    between = ", " + window if window else ""
    text = (
        "ENTRY %main (a: bf16[1], b: bf16[1]) -> bf16[1] {\n"
        f"  %a = bf16[{left}] parameter(0)\n  %b = bf16[{right}] parameter(1)\n"
        f"  ROOT %c = bf16[{out}] convolution(%a, %b){between}, dim_labels={labels}\n}}\n"
    )
    (cost,) = hlo.instructions(text)
    assert cost.flops == 2 * meets and cost.wide == 0
