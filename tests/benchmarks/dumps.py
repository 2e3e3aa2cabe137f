"""A compiler's dump small enough to count by hand, for the tests of what is read out of dumps."""

from pathlib import Path

# One loop. Scalar work with a DMA and a branch (1 + 1 + 1 + 4 delay slots), a hot block of two
# bundles, of which one goes over two lines, and a block that only stores.
BUNDLES = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1 = smov 0 }
   0x1 LB: > { %s2 = sadd.s32 1, %s1 }
   0x2   : > { %5 = dma.hbm_to_vmem [thread:$0]  %s2, /*size_in_granules=*/4096 }
   0x3   : > { %6 = sbr.rel (%p1) target = $region4 }
   0x4   : > { %s3 = sadd.s32 1, %s2 }
   0x5   : > {}
   0x6   : > {}
   0x7   : > {}
   0x8   : > { %v1 = vmatmul.bf16.gmra.mxu0 %v0  ;;  %v2 = vmatmul.bf16.vlgmr.msra.gmra.mxu1 %v0 }
   0x9   : > { %v3 = vmatmul.mubr.f32.gmra.mxu0 %v0  ;;  %v4 = vadd.f32 %v1, %v2 /* window:
second_minor_factor: 1 */ ;; %9 = vst [vmem:#allocation2_spill] %v4 }
   0xa PF: > { %10 = vst [vmem:%s1] %v4 } /* Start/End empty region 4 */
   0xb   : > { %11 = vst [vmem:%s2] %v4 }
   0xc   :  { %12 = sfence }
"""
UTILISATION = """\
== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0
0 0 0 0 0 0 0 0 0 0
2 0 0 0 0 0 0 0 0 0
1 0 1 0 0 3 2 1 1 0
0 0 0 0 0 0 0 1 0 0
0 0 0 0 0 0 0 1 0 0
0 0 0 0 0 0 0 0 0 0
"""


def dump(directory: Path, name: str = "jvp_kernel_.3", bundles: str = BUNDLES) -> None:
    stem = directory / f"1795-{name}"
    Path(f"{stem}-03-final_bundles.txt").write_text(bundles)
    Path(f"{stem}-02-schedule-analysis_final_bundles.txt").write_text("not a list of bundles")
    table = Path(f"{stem}-01-final_hlo-static-per-bundle-utilization.txt")
    table.write_text(UTILISATION)
