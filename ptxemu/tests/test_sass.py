"""Machine code: its basic blocks, how often they are executed, and the pipes of its instructions."""

from __future__ import annotations

import pytest

from ptxemu.tools import sass
from ptxemu.tools.sass import Pipe

# A loop, in which a branch that the PTX has became conditional instructions, and a division whose slow path is a call.
# Line 5 is the loop's, line 6 that of the branch, and line 7 of the division.
LISTING = """
    .section    .text.kernel,"ax",@progbits
kernel:
.text.kernel:
    //## File ".nv_debug_ptx_txt", line 2
        /*0000*/                   S2R R1, SR_TID.X ;
        /*0010*/                   MOV R2, 0x1 ;
        /*0020*/                   MOV R3, 0x1 ;
        /*0030*/              @P0 BRA `(.L_x_9) ;
    //## File ".nv_debug_ptx_txt", line 5
        /*0040*/                   IADD3 R4, PT, PT, R3, 0x1, RZ ;
        /*0050*/                   IADD3 R5, PT, PT, R3, 0x2, RZ ;
.L_x_1:
        /*0060*/                   FADD R6, R6, R5 ;
        /*0070*/                   FADD R7, R7, R5 ;
    //## File ".nv_debug_ptx_txt", line 6
        /*0080*/              @!P1 STG.E desc[UR4][R8.64], R6 ;
        /*0090*/              @!P1 FMUL R6, R6, 2 ;
    //## File ".nv_debug_ptx_txt", line 7
        /*00a0*/                   MUFU.RCP R9, R7 ;
        /*00b0*/                   FCHK P2, R6, R7 ;
        /*00c0*/             @!P2 BRA `(.L_x_2) ;
        /*00d0*/                   MOV R10, 0xf0 ;
        /*00e0*/                   CALL.REL.NOINC `(.L_x_5) ;
.L_x_2:
        /*00f0*/                   FFMA R11, R6, R9, RZ ;
    //## File ".nv_debug_ptx_txt", line 5
        /*0100*/                   BRA.U UP0, `(.L_x_1) ;
    //## File ".nv_debug_ptx_txt", line 2
.L_x_9:
        /*0110*/                   LDTM.x16 R16, tmem[UR4] ;
        /*0120*/                   EXIT ;
    //## File ".nv_debug_ptx_txt", line 7
.L_x_5:
        /*0130*/                   FADD R11, R11, R11 ;
        /*0140*/                   RET.REL.NODEC R10 `(kernel) ;
"""
EXECUTED = {2: 4, 5: 40, 6: 3, 7: 40}


def test_blocks() -> None:
    code = sass.blocks(LISTING)
    assert [len(block.instructions) for block in code] == [4, 2, 7, 2, 2, 2, 2]
    assert [block.before for block in code] == [set(), {0}, {1, 4}, {2}, {2, 3}, {0, 4}, set()]
    assert [block.instructions[0].opcode for block in code[4:]] == ["FFMA", "LDTM.x16", "FADD"]


def test_executions() -> None:
    """Neither what was moved out of the loop, nor what became conditional in it, nor the slow path deceives."""
    assert sass.executions(sass.blocks(LISTING), EXECUTED) == [4, 4, 40, 0, 40, 4, 0]


def test_blocks_that_are_never_entered() -> None:
    assert sass.executions(sass.blocks(LISTING), {2: 4}) == [4, 0, 0, 0, 0, 4, 0]


def test_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "disassemble", lambda cubin: LISTING)
    issued = sass.executed_opcodes(b"", EXECUTED)
    assert issued["FADD"] == 80
    assert issued["STG.E"] == issued["FMUL"] == issued["MUFU.RCP"] == 40
    assert issued["LDTM.x16"] == 4
    assert "CALL.REL.NOINC" not in issued


def test_listings_that_are_not_one_kernel() -> None:
    with pytest.raises(ValueError, match="2 kernels"):
        sass.blocks(LISTING + LISTING)
    with pytest.raises(ValueError, match="no instruction"):
        sass.blocks("")


@pytest.mark.parametrize(
    ("opcode", "pipe"),
    [
        ("FFMA2", Pipe.FMA),
        ("IMAD.MOV.U32", Pipe.FMA),
        ("F2FP.BF16.F32.PACK_AB", Pipe.ALU),
        ("MUFU.EX2", Pipe.XU),
        ("LDG.E.128", Pipe.LSU),
        ("LDTM.x16", Pipe.TENSOR_MEMORY),
        ("UTMALDG.2D", Pipe.ASYNC),
        ("UIADD3.64", Pipe.UNIFORM),
    ],
)
def test_pipes(opcode: str, pipe: Pipe) -> None:
    assert sass.pipe_of(opcode) is pipe


def test_unknown_opcodes_are_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"XYZ\.F32"):
        sass.pipe_of("XYZ.F32")
