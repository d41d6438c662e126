"""PTX text to kernels: scopes, registers, labels, source lines, and what is not PTX."""

import pytest

from core_helpers import kernel, per_thread, run
from ptxemu import LaunchError, PtxSyntaxError, launch, unsupported_instructions
from ptxemu.isa.parser import Address, Immediate, Pair, Register, Vector, parse


def instructions(body: str):
    return parse(kernel(body)).kernels["k"].instructions


def test_operands():
    (instruction, *_) = instructions("ld.shared.v2.b32 {%r1, %r2}, [%r3+-8];")
    assert instruction.parts == ("ld", "shared", "v2", "b32")
    vector, address = instruction.operands
    assert isinstance(vector, Vector)
    assert [register.name for register in vector.items] == ["%r1", "%r2"]
    assert isinstance(address, Address)
    assert address.offset == -8
    assert address.base.name == "%r3"


def test_tensor_map_address_keeps_its_coordinates():
    text = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1+64], "
        "[%rd1, {%r2, %r3}], [%r4];"
    )
    target, source, barrier = instructions(text)[0].operands
    assert (target.offset, barrier.offset) == (64, 0)
    assert [register.name for register in source.coordinates] == ["%r2", "%r3"]


def test_pairs_and_literals():
    first, second, *_ = instructions("elect.sync %r1|%p1, -1; mov.b32 %r2, 0f3F800000;")
    assert isinstance(first.operands[0], Pair)
    assert first.operands[1] == Immediate(-1)
    assert second.operands[1].value == 0x3F800000


def test_registers_of_inner_blocks_are_their_own():
    body = """
    mov.b32 %r0, 1;
    { .reg .b32 %r0; mov.b32 %r0, 7; }
    { .reg .pred p; setp.ne.b32 p, 1, 0; @p add.s32 %r0, %r0, 1; }
    """
    assert (per_thread(body) == 2).all()


def test_labels_of_inner_blocks_are_their_own():
    body = """
    mov.b32 %r0, 0;
    { bra DONE; add.s32 %r0, %r0, 1; DONE: }
    { bra DONE; add.s32 %r0, %r0, 2; DONE: }
    add.s32 %r0, %r0, 4;
    """
    assert (per_thread(body) == 4).all()


def test_vector_registers():
    body = (
        "{ .reg .v4 .s32 v; mov.s32 v.x, 1; mov.s32 v.y, 2; mov.s32 v.z, 3; mov.s32 v.w, 4; "
        "mad.lo.s32 %r0, v.y, v.z, v.w; }"
    )
    assert (per_thread(body) == 10).all()


def test_source_lines():
    module = parse(kernel(".loc 1 42 7\nadd.s32 %r1, %r2, %r3;") + '.file 1 "/a/kernel.py"\n')
    assert module.kernels["k"].instructions[0].source == "1:42"
    module = parse('.file 1 "/a/kernel.py"\n' + kernel(".loc 1 42 7\nadd.s32 %r1, %r2, %r3;"))
    assert module.kernels["k"].instructions[0].source == "/a/kernel.py:42"


def test_lines_are_those_of_the_text():
    text = kernel("\n\n    trap;")
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if "trap" in line)
    assert parse(text).kernels["k"].instructions[0].line == line


def test_parameters_are_laid_out_by_alignment():
    parameters = parse(kernel("", (".u32 a", ".align 64 .b8 b[128]", ".u64 c"))).kernels["k"].parameters
    assert [(p.offset, p.size) for p in parameters] == [(0, 4), (64, 128), (192, 8)]


def test_comments_and_pragmas():
    assert (per_thread('.pragma "nounroll"; /* mov.b32 %r0, 1; */ mov.b32 %r0, 5; // mov.b32 %r0, 2;') == 5).all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.s32 %x1, %r1, %r2;", "register %x1 is not declared"),
        ("bra NOWHERE;", "unknown label NOWHERE"),
        ("L: L: add.s32 %r1, %r2, %r3;", "defined twice"),
        ("add.s32 %r1, %r2, %r999;", "register %r999 is not declared"),
        ("add.s32 %r1, %r2, ?;", "cannot parse the operand"),
    ],
)
def test_errors_name_the_line(body: str, message: str):
    text = kernel(body)
    (line,) = (number for number, line in enumerate(text.splitlines(), 1) if body in line)
    with pytest.raises(PtxSyntaxError, match=message) as caught:
        parse(text)
    assert caught.value.location.ptx_line == line


def test_unknown_opcodes_and_modifiers_are_reported_when_reached():
    text = kernel("add.funny.s32 %r1, %r2, %r3;\n    frobnicate.b32 %r1, %r2;")
    found = unsupported_instructions(text)
    assert ["funny" in found[0], "frobnicate" in found[1]] == [True, True]
    with pytest.raises(Exception, match=r"modifier \.funny is not modelled") as caught:
        run(text, [0])
    assert caught.value.location.ptx_text == "add.funny.s32 %r1, %r2, %r3"


def test_unreached_unknown_opcodes_are_listed():
    report = run(kernel("bra END; frobnicate.b32 %r1, %r2; END:"), [0])
    assert len(report.unsupported) == 1


def test_kernels_are_chosen_by_name():
    with pytest.raises(LaunchError, match="no kernel 'other'; the text has k"):
        launch(kernel(""), "other", 1, 32, 1, 0, [0])


def test_register_names_resolve_in_the_innermost_block():
    register = instructions("{ .reg .b64 %r1; mov.b64 %r1, 3; }")[0].operands[0]
    assert isinstance(register, Register)
    assert register.bits == 64
