"""Register operations against Python's integers and NumPy's floats; uniform values and lanes must agree."""

import math
import random

import numpy as np
import pytest

from core_helpers import kernel, per_thread, run

EDGES = [0, 1, 2, 5, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x8000, 0x12345678]


def s32(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def truncated_division(a: int, b: int) -> int:
    return int(math.copysign(abs(a) // abs(b), a * b)) if a else 0


def prmt(a: int, b: int) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    return int.from_bytes([source[7], source[0], source[5], source[2]], "little")


INTEGER = {
    "add.s32 %r0, %r10, %r11": lambda a, b: a + b,
    "sub.s32 %r0, %r10, %r11": lambda a, b: a - b,
    "mul.lo.s32 %r0, %r10, %r11": lambda a, b: a * b,
    "mul.hi.s32 %r0, %r10, %r11": lambda a, b: s32(a) * s32(b) >> 32,
    "mul.hi.u32 %r0, %r10, %r11": lambda a, b: a * b >> 32,
    "mad.lo.s32 %r0, %r10, %r11, 7": lambda a, b: a * b + 7,
    "mad.hi.u32 %r0, %r10, %r11, -1": lambda a, b: (a * b >> 32) - 1,
    "min.s32 %r0, %r10, %r11": lambda a, b: min(s32(a), s32(b)),
    "max.u32 %r0, %r10, %r11": max,
    "and.b32 %r0, %r10, %r11": lambda a, b: a & b,
    "or.b32 %r0, %r10, %r11": lambda a, b: a | b,
    "xor.b32 %r0, %r10, %r11": lambda a, b: a ^ b,
    "not.b32 %r0, %r10": lambda a, b: ~a,
    "neg.s32 %r0, %r10": lambda a, b: -a,
    "abs.s32 %r0, %r10": lambda a, b: abs(s32(a)),
    "shl.b32 %r0, %r10, %r11": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 %r0, %r10, %r11": lambda a, b: a >> b if b < 32 else 0,
    "shr.s32 %r0, %r10, %r11": lambda a, b: s32(a) >> min(b, 31),
    "shl.b32 %r0, %r10, 5": lambda a, b: a << 5,
    "shr.s32 %r0, %r10, 40": lambda a, b: s32(a) >> 31,
    "div.s32 %r0, %r10, %r11": lambda a, b: truncated_division(s32(a), s32(b)) if b else -1,
    "rem.s32 %r0, %r10, %r11": lambda a, b: s32(a) - s32(b) * truncated_division(s32(a), s32(b)) if b else a,
    "div.u32 %r0, %r10, %r11": lambda a, b: a // b if b else -1,
    "rem.u32 %r0, %r10, %r11": lambda a, b: a % b if b else a,
    "popc.b32 %r0, %r10": lambda a, b: bin(a).count("1"),
    "clz.b32 %r0, %r10": lambda a, b: 32 - a.bit_length(),
    "brev.b32 %r0, %r10": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "bfind.u32 %r0, %r10": lambda a, b: a.bit_length() - 1,
    "bfe.u32 %r0, %r10, 4, 9": lambda a, b: a >> 4 & 0x1FF,
    "bfe.s32 %r0, %r10, 4, 9": lambda a, b: ((a >> 4 & 0x1FF) ^ 0x100) - 0x100,
    "bfi.b32 %r0, %r10, %r11, 8, 12": lambda a, b: b & ~(0xFFF << 8) | (a & 0xFFF) << 8,
    "prmt.b32 %r0, %r10, %r11, 0x2507": prmt,
    "lop3.b32 %r0, %r10, %r11, 0x0F0F0F0F, 0x96": lambda a, b: a ^ b ^ 0x0F0F0F0F,
    "shf.l.wrap.b32 %r0, %r10, %r11, 12": lambda a, b: (b << 32 | a) << 12 >> 32,
    "shf.r.clamp.b32 %r0, %r10, %r11, 40": lambda a, b: b,
    "mul.wide.s32 %rd9, %r10, %r11; shr.u64 %rd9, %rd9, 16; cvt.u32.u64 %r0, %rd9": lambda a, b: s32(a) * s32(b) >> 16,
    "mad.wide.u32 %rd9, %r10, %r11, 3; shr.u64 %rd9, %rd9, 32; cvt.u32.u64 %r0, %rd9": lambda a, b: a * b + 3 >> 32,
    "cvt.s64.s32 %rd9, %r10; mul.hi.s64 %rd9, %rd9, 0x123456789ABCDEF; cvt.u32.u64 %r0, %rd9": (
        lambda a, b: s32(a) * 0x123456789ABCDEF >> 64
    ),
    "setp.lt.s32 %p2, %r10, %r11; selp.b32 %r0, 3, 9, %p2": lambda a, b: 3 if s32(a) < s32(b) else 9,
    "setp.hs.u32 %p2, %r10, %r11; selp.b32 %r0, 3, 9, %p2": lambda a, b: 3 if a >= b else 9,
    "setp.gt.u32 %p3, %r10, 99; setp.eq.and.b32 %p2, %r10, %r11, %p3; selp.b32 %r0, 1, 0, %p2": (
        lambda a, b: int(a == b and a > 99)
    ),
    "setp.lt.s32 %p2|%p3, %r10, %r11; selp.b32 %r0, 1, 0, %p3": lambda a, b: int(s32(a) >= s32(b)),
    "cvt.s32.s8 %r0, %r10": lambda a, b: ((a & 0xFF) ^ 0x80) - 0x80,
    "cvt.u32.u8 %r0, %r10": lambda a, b: a & 0xFF,
    "cvt.u16.u32 %rs1, %r10; cvt.s32.s16 %r0, %rs1": lambda a, b: ((a & 0xFFFF) ^ 0x8000) - 0x8000,
    "mov.b32 {%rs1, %rs2}, %r10; mov.b32 %r0, {%rs2, %rs1}": lambda a, b: a >> 16 | (a & 0xFFFF) << 16,
    "mov.b64 %rd9, {%r10, %r11}; mov.b64 {%r5, %r6}, %rd9; sub.s32 %r0, %r6, %r5": lambda a, b: b - a,
    "@!%p9 bra SKIP; SKIP: mov.b32 %r0, %r10": lambda a, b: a,
}


def operands() -> tuple[np.ndarray, np.ndarray]:
    generator = random.Random(0)
    pairs = [(a, b) for a in EDGES for b in EDGES] + [
        (generator.getrandbits(32), generator.getrandbits(generator.choice((3, 5, 16, 32)))) for _ in range(60)
    ]
    pairs = (pairs * 32)[: -(-len(pairs) // 32) * 32]
    a, b = (np.array(column, np.uint32) for column in zip(*pairs, strict=True))
    return a, b


def launch_binary(text: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The instruction on each pair, one thread per pair."""
    body = f"""
    ld.param.b64 %rd0, [out]; ld.param.b64 %rd3, [pa]; ld.param.b64 %rd4, [pb];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 32, %r1; mul.wide.u32 %rd2, %r3, 4;
    add.s64 %rd1, %rd0, %rd2; add.s64 %rd5, %rd3, %rd2; add.s64 %rd6, %rd4, %rd2;
    ld.global.b32 %r10, [%rd5]; ld.global.b32 %r11, [%rd6];
    setp.eq.b32 %p9, 1, 1;
    {text};
    st.global.b32 [%rd1], %r0;
    """
    out = np.zeros_like(a)
    run(kernel(body, (".u64 out", ".u64 pa", ".u64 pb")), [out, a, b], grid=a.size // 32)
    return out


@pytest.mark.parametrize("text", INTEGER)
def test_integer_operations(text: str):
    a, b = operands()
    expected = [INTEGER[text](x, y) & 0xFFFFFFFF for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(launch_binary(text, a, b), np.array(expected, np.uint32))


@pytest.mark.parametrize("text", INTEGER)
def test_uniform_values_agree_with_lanes(text: str):
    """The same operation on values that stay Python ints."""
    a, b = operands()
    for x, y in zip(a[::17].tolist(), b[::17].tolist(), strict=True):
        body = f"ld.param.b32 %r10, [a0]; ld.param.b32 %r11, [a1]; setp.eq.b32 %p9, 1, 1; {text};"
        expected = INTEGER[text](x, y) & 0xFFFFFFFF
        np.testing.assert_array_equal(per_thread(body, extra_args=[x, y]), np.full(32, expected, np.uint32))


@pytest.mark.parametrize("text", INTEGER)
@pytest.mark.parametrize("uniform", ["%r10", "%r11"])
def test_uniform_values_and_lanes_mix(text: str, uniform: str):
    """One operand that stays a Python int, one that differs between lanes."""
    other = {"%r10": "%r11", "%r11": "%r10"}[uniform]
    body = f"ld.param.b32 {uniform}, [a0]; ld.param.b32 %r12, [a1]; setp.eq.b32 %p9, 1, 1;"
    body += f"mul.lo.u32 {other}, %r1, 0x9E3779B1; xor.b32 {other}, {other}, %r12; {text};"
    lanes = np.arange(32, dtype=np.uint32) * np.uint32(0x9E3779B1)
    for value, mask in zip(EDGES, reversed(EDGES), strict=True):
        varying = (lanes ^ np.uint32(mask)).tolist()
        pairs = [(value, lane) if uniform == "%r10" else (lane, value) for lane in varying]
        expected = [INTEGER[text](x, y) & 0xFFFFFFFF for x, y in pairs]
        np.testing.assert_array_equal(per_thread(body, extra_args=[value, mask]), np.array(expected, np.uint32))


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_lanes_are_added_to_a_uniform_product(kind: str):
    body = f"ld.param.b32 %r10, [a0]; ld.param.b32 %r11, [a1]; mad.lo.{kind} %r0, %r10, %r11, %r1;"
    for x in EDGES:
        for y in EDGES:
            expected = [(x * y + lane) & 0xFFFFFFFF for lane in range(32)]
            np.testing.assert_array_equal(per_thread(body, extra_args=[x, y]), np.array(expected, np.uint32))


FLOAT = {
    "add.f32 %r0, %r10, %r11": lambda a, b: a + b,
    "sub.rn.f32 %r0, %r10, %r11": lambda a, b: a - b,
    "mul.f32 %r0, %r10, %r11": lambda a, b: a * b,
    "div.rn.f32 %r0, %r10, %r11": lambda a, b: a / b,
    "fma.rn.f32 %r0, %r10, %r11, 0f3F800000": (
        lambda a, b: (a.astype(np.longdouble) * b.astype(np.longdouble) + 1).astype(np.float32)
    ),
    "neg.f32 %r0, %r10": lambda a, b: -a,
    "abs.f32 %r0, %r10": lambda a, b: np.abs(a),
    "max.f32 %r0, %r10, %r11": np.maximum,
    "sqrt.rn.f32 %r5, %r11; mov.b32 %r0, %r5": lambda a, b: np.sqrt(b),
    "setp.lt.f32 %p2, %r10, %r11; selp.f32 %r0, %r10, %r11, %p2": lambda a, b: np.where(a < b, a, b),
    "mov.b64 %rd9, {%r10, %r11}; mul.f32x2 %rd9, %rd9, %rd9; mov.b64 {%r5, %r6}, %rd9; add.f32 %r0, %r5, %r6": (
        lambda a, b: a * a + b * b
    ),
}


@pytest.mark.parametrize("text", FLOAT)
def test_float_operations(text: str):
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(64).astype(np.float32) for _ in range(2))
    b = np.abs(b)
    out = launch_binary(text, a.view(np.uint32), b.view(np.uint32))
    np.testing.assert_array_equal(out.view(np.float32), FLOAT[text](a, b).astype(np.float32))


def test_bf16_conversion_order():
    """cvt.rn.bf16x2 puts its first source into the high half."""
    a, b = np.full(32, 1.5, np.float32), np.full(32, -2.0, np.float32)
    out = launch_binary("cvt.rn.bf16x2.f32 %r0, %r10, %r11", a.view(np.uint32), b.view(np.uint32))
    assert (out == 0x3FC0C000).all()


def test_many_equal_operations_become_one_call():
    """Long runs of independent operations are batched; the results stay those of single instructions."""
    terms = range(40)
    body = "cvt.rn.f32.u32 %r9, %r1;\n"
    body += "".join(f"fma.rn.f32 %r{100 + n}, %r9, 0f3F000000, 0f{np.float32(n).view(np.uint32):08X};\n" for n in terms)
    body += "".join(f"mul.f32 %r{200 + n}, %r{100 + n}, %r{100 + (n * 7) % 40};\n" for n in terms)
    body += "mov.b32 %r0, 0f00000000;\n" + "".join(f"add.f32 %r0, %r0, %r{200 + n};\n" for n in terms)
    lanes = np.arange(32, dtype=np.float32)
    values = [lanes * np.float32(0.5) + np.float32(n) for n in terms]
    expected = np.zeros(32, np.float32)
    for n in terms:
        expected = expected + values[n] * values[(n * 7) % 40]
    np.testing.assert_array_equal(per_thread(body).view(np.float32), expected)


def test_reordering_keeps_reads_before_later_writes():
    """Moves run before what may be batched, but not before the readers of what they overwrite."""
    body = "cvt.rn.f32.u32 %r5, %r1; add.f32 %r6, %r5, 0f3F800000; add.f32 %r7, %r5, 0f40000000; mov.b32 %r5, 0;"
    body += "add.f32 %r6, %r6, %r7; add.f32 %r0, %r6, %r5;"
    np.testing.assert_array_equal(per_thread(body).view(np.float32), 2 * np.arange(32, dtype=np.float32) + 3)


def test_reordering_keeps_the_order_of_memory_accesses():
    """The store waits for a sum; the load behind it must not overtake it."""
    body = """
    cvt.rn.f32.u32 %r5, %r1; add.f32 %r6, %r5, 0f3F800000; add.f32 %r7, %r6, 0f3F800000; st.global.b32 [%rd1], %r7;
    ld.global.b32 %r8, [%rd1]; add.f32 %r0, %r8, 0f3F800000;
    """
    np.testing.assert_array_equal(per_thread(body).view(np.float32), np.arange(32, dtype=np.float32) + 3)


def test_registers_that_were_never_written_hold_nan():
    assert np.isnan(per_thread("mov.b32 %r0, %r77;").view(np.float32)).all()
