"""What is told of programs compiled for a GPU that is not here."""

import jax
import pytest

import pallas_kernels
from benchmarks import accelerator, compiled
from notepad_jax.parallel import place
from notepad_jax.planner import hlo

MODULE = """\
ENTRY %main (x: bf16[8,8], y: bf16[8,4]) -> f32[8,4] {
  %x = bf16[8,8]{1,0} parameter(0)
  %y = bf16[8,4]{1,0} parameter(1)
  %fused = bf16[8,8]{1,0} copy(%x), metadata={op_name="jit(f)/while/body/attention/add"}
  %written = bf16[8,8]{1,0} copy(%fused)
  ROOT %gemm = f32[8,4]{1,0} dot(%written, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/feed_forward/dot_general"}
}
"""  # noqa: E501


def test_parts_follow_the_named_scopes():
    costs = {cost.instruction.name: compiled.part(cost) for cost in hlo.instructions(MODULE)}
    assert costs["fused"] == "attention" and costs["gemm"] == "feed_forward"
    assert costs["written"] == "other"


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


@pytest.mark.parametrize(
    "name, backend", [("decode-8", "triton"), ("prefill", "triton"), ("update", "xla")]
)
def test_programs_are_lowered_without_the_gpus_compiler(name, backend):
    """Attention is kernels of Triton's; an update is lowered for its devices, CPUs here."""
    with pallas_kernels.using(backend):
        program = compiled.PROGRAMS[name](accelerator.SHAPES["toy"])
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place.first_device()),
            program.arguments,
        )
        text = program.lowered(*placed).as_text()
    assert ("gpu.triton" in text) == (backend == "triton")


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
