"""Reading a compiled module: every kind of instruction, counted by hand."""

import jax
import numpy as np
import pytest

from benchmarks import accelerator, compiled, hlo

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


def test_a_loop_of_unknown_length_runs_as_often_as_its_scope_says():
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    open_ended = MODULE.replace(known, 'metadata={op_name="jit(f)/paged_attention/while"}')
    times = lambda *rounds: next(  # noqa: E731
        cost.times
        for cost in hlo.instructions(open_ended, *rounds)
        if cost.instruction.name == "fused"
    )
    assert times() == times({"elsewhere": 5}) == 1
    assert times({"paged_attention": 2}) == 2


def test_parts_follow_the_named_scopes():
    costs = {cost.instruction.name: compiled.part(cost) for cost in hlo.instructions(MODULE)}
    assert costs["fused"] == "attention" and costs["gemm"] == "feed_forward"
    assert costs["written"] == "other"


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        hlo.instructions("%f (p: f32[]) -> f32[] {\n}\n")


def test_a_matrix_product_that_xla_compiled_here_is_found():
    x = jax.ShapeDtypeStruct((64, 32), np.float32)
    program = jax.jit(lambda a, b: a @ b.T).lower(x, x).compile()
    costs = hlo.instructions(program.as_text())
    assert sum(cost.moved for cost in costs) >= (2 * 64 * 32 + 64 * 64) * 4


def test_programs_hold_what_they_say():
    """Abstract only: nothing of the published size is ever made."""
    shape = accelerator.SHAPES["7b"]
    for name in ("decode-8", "decode-32-shared", "prefill"):
        program = compiled.PROGRAMS[name](shape)
        sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(program.arguments[0])]
        assert sum(sizes) == 2 * 7_615_616_512
    assert (
        compiled.decode_program(shape, 32, 16).moved < compiled.decode_program(shape, 32, 1).moved
    )


def test_the_table_adds_its_parts_up():
    parts = {
        "attention": dict(moved=3e9, flops=1e12, wide=0, floor=1e-3),
        "other": dict(moved=1e9, flops=0, wide=0, floor=2e-3),
    }
    row = dict(program="update", argument_bytes=2e9, further_bytes=1e9, needed_flops=5e11,
               needed_bytes=0, parts=parts)  # fmt: skip
    first, other, attention, total = compiled.lines(row)
    assert "2.0 GB of arguments, 1.0 GB beside; needs at least 0.5 TFLOP" in first
    assert other.split()[0] == "other" and attention.split()[0] == "attention"
    assert total.split() == "in all 4.0 GB 1.0 TFLOP ( 0.0 float32) 3.0 ms at least".split()


def test_wheels_that_are_not_there_are_asked_for(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.argv", ["compiled", "--plugin", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        compiled.main()
    assert stopped.value.code == 2
    assert "jax_plugins/xla_cuda13" in capsys.readouterr().err
