"""Tests of reading machine code, and of the limits on what compiled kernels do."""

from dataclasses import replace

import pytest

from triptych.kernels.codegen import gates
from triptych.kernels.codegen.aot import BEFORE, Compiled, Pass
from triptych.kernels.codegen.machine_code import Loop, loads_of, loops_of

CODE = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R20, desc[UR14][R50.64] ;
.L_x_0:
        /*0020*/               @P0 LDG.E.U8 R13, desc[UR14][R16.64] ;
        /*0030*/                   LDG.E R14, desc[UR14][R16.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R4], desc[UR4][R2.64] ;
        /*0050*/                   PRMT R68, R20, 0x4140, R13.reuse ;
        /*0060*/              @!P1 HMMA.16816.F32 R68, R68, R72, RZ ;
        /*0070*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0080*/                   IADD3 R68, P2, R68, UR18, RZ ;
        /*0090*/               @P0 BRA `(.L_x_0) ;
        /*00a0*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*00b0*/              @!P2 BRA `(.L_x_1) ;
        /*00c0*/               @P3 BRA `(.L_x_2) ;
.L_x_2:
        /*00d0*/                   STG.E desc[UR4][R2.64], R4 ;
        /*00e0*/                   EXIT ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3);
"""


def test_innermost_loops_are_found_with_kinds_and_widths() -> None:
    (loop,) = loops_of(CODE)
    assert loop.instructions == 8
    assert loop.loads == {1: 1, 4: 1, 16: 1}
    assert loop.stores == {}
    assert loop.kinds == {"barrier": 1, "convert": 1, "global": 3, "integer": 2, "matrix": 1}
    assert loop.loaded_bytes == 32 * 21
    assert loops_of("") == []
    assert loads_of(CODE) == {1: 1, 4: 1, 16: 2}


BESIDE = """
        /*0000*/              @P5 EXIT ;
.L_x_1:
        /*0010*/                   LDG.E.128 R20, desc[UR14][R50.64] ;
        /*0020*/                   BRA.DIV ~URZ, `(.L_x_3) ;
        /*0030*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
.L_x_2:
        /*0040*/                   HMMA.16816.F32 R68, R68, R72, RZ ;
        /*0050*/              @!P6 CALL.REL.NOINC `(.L_x_4) ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm70_shflsync_bfly) ;
        /*0090*/                   BRA `(.L_x_2) ;
$__internal_0_$__cuda_sm70_shflsync_bfly:
        /*00a0*/                   SHFL.BFLY PT, R4, R5, 0x1, 0x1f ;
        /*00b0*/                   RET.REL.NODEC R4 `(attend_sections) ;
"""
"""A loop that divergent warps leave for a shuffle, as ptxas lays it out for sm_80."""


def test_a_branch_back_into_the_middle_of_a_loop_begins_none() -> None:
    (loop,) = loops_of(BESIDE)
    assert loop.kinds == {"global": 1, "integer": 3, "matrix": 1, "shared": 1}


def test_the_other_spelling_of_a_conditional_branch_is_known() -> None:
    """Since sm_100 a predicate may be an operand."""
    (loop,) = loops_of(CODE.replace("@P0 BRA `", "    BRA P0, `"))
    assert loop.instructions == 8


def row(per_pass: int = 800, tokens: int = 32, spill: int = 0, width: int = 16) -> Compiled:
    loop = Loop(per_pass, {}, {16: 8}, {})
    return Compiled(
        *("attend_sections", "diffkv d128 g4 bf16", "sm_90"),
        registers=128,
        spill_bytes=spill,
        spill_limit=0,
        shared_bytes=0,
        warps=1,
        stages=1,
        loads={width: 8},
        passes=(Pass(loop, 1, "k8v4", tokens),),
    )


def test_limits_are_told_with_what_exceeds_them() -> None:
    assert list(gates.failed_gates([row()])) == []
    told = "attend_sections diffkv d128 g4 bf16 on sm_90"
    assert list(gates.failed_gates([row(per_pass=1600)])) == [
        f"{told} issues 50.0 instructions for a token of k8v4 pages; at most 37.5"
    ]
    assert list(gates.failed_gates([row(width=1)])) == [
        f"{told} loads 1 B a lane; expected 4 or more"
    ]
    assert list(gates.failed_gates([row(spill=8)])) == [
        f"{told} spills 8 B of registers, of 0 allowed"
    ]
    other = replace(row(per_pass=1600), variant="diffkv d128 g1 bf16")
    assert list(gates.failed_gates([other])) == []
    elsewhere = replace(row(width=2), kernel="retire_tokens", passes=())
    assert [one.split(" on ")[1] for one in gates.failed_gates([elsewhere])] == [
        "sm_90 loads 2 B a lane; expected 4 or more"
    ]


def test_a_limit_whose_loop_is_not_found_is_exceeded() -> None:
    (known,) = row().passes
    for passes in (), (replace(known, reads=""),), (known, replace(known, reads="")):
        (told,) = gates.failed_gates([replace(row(), passes=passes)])
        assert told.endswith("has loops other than those that read token counts, lists and pages")
    on_amd = replace(row(), target="gfx942", loads={}, passes=())
    assert list(gates.failed_gates([on_amd])) == []


def test_prefill_is_limited_by_flash_attention() -> None:
    def of(kernel: str, variant: str, target: str, instructions: int) -> Compiled:
        loop = Loop(instructions, {}, {16: 8}, {})
        passes = (Pass(loop, 8, BEFORE, 64, 128),)
        return replace(row(), kernel=kernel, variant=variant, target=target, passes=passes)

    flash = of("flash_attention", "d128 bf16", "sm_90", 336)
    ours = of("attend_chunks", "alone d128 g4 bf16", "sm_90", 368)
    slow = of("attend_chunks", "alone d128 g4 bf16", "sm_90", 600)
    assert list(gates.failed_gates([flash, ours])) == []
    (found,) = gates.over_flash([flash, ours])
    assert str(found).endswith("0.359 instructions for a query and a key, FlashAttention 0.328: "
                               "1.10 times as many, of 1.6 allowed")  # fmt: skip
    (told,) = gates.failed_gates([flash, slow])
    assert "issues 0.586 instructions" in told
    unknown = replace(flash, passes=(replace(flash.passes[0], reads=""),))
    assert "unknown times as many" in next(gates.failed_gates([unknown, ours]))
    elsewhere = [replace(one, target="gfx942") for one in (flash, slow)]
    assert gates.over_flash(elsewhere) == []


def test_a_pass_says_what_a_gpu_could_read_at_most() -> None:
    (one,) = row().passes
    assert one.per_token == 25.0
    assert one.bytes_per_s("sm_90") == pytest.approx(132 * 4 * 1.7e9 * 8 * 16 * 32 / 800)
    assert Pass(one.loop, 1).per_token is None
    assert row().as_json()["narrowest_load"] == 16
