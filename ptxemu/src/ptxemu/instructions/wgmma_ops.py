"""Emitters and handlers of wgmma (sm_90a).

wgmma is an operation of a warpgroup: it is performed once all four warps have issued it, and a group is complete for
one of them when it is complete for all. Accumulation is that of `matrix.multiply_accumulate`, as for tcgen05.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import is_
from typing import Any

import numpy as np

from ptxemu.errors import DivergenceError, RaceError, UnsupportedInstruction
from ptxemu.instructions.barrier_ops import nothing
from ptxemu.instructions.tensor_operands import Operand, mac_counter, uniform_operand
from ptxemu.isa import values
from ptxemu.isa.parser import Instruction, Vector
from ptxemu.isa.translate import PENDING, Blocking, Effect, Modifiers, Translator, aligned, emits, tuple_source
from ptxemu.isa.values import FULL_MASK, LANES, PENDING_BITS, Value
from ptxemu.machine.async_queue import Operation
from ptxemu.machine.races import ORDERED, Pipe
from ptxemu.machine.state import Strand, Wait
from ptxemu.models import matrix
from ptxemu.models.matrix import Major

WARPS = 4  # in a warpgroup
ROWS = 64  # of A and D


@dataclass(frozen=True)
class _Form:
    """What the four warps must agree on."""

    a: int | None  # descriptor; None if A is in registers
    b: int
    accumulate: bool
    negate: tuple[bool, bool]
    majors: tuple[Major, Major]
    n: int
    dtype: str


@dataclass
class Product:
    """One wgmma of a warpgroup. `result` backs the destination registers of all warps; it is filled when performed."""

    form: _Form
    result: np.ndarray
    registers: list[tuple[np.ndarray, ...]]
    accumulators: list[tuple[Value, ...] | None] = field(default_factory=lambda: [None] * WARPS)
    a: list[tuple[Value, ...] | None] = field(default_factory=lambda: [None] * WARPS)
    strands: list[Strand] = field(default_factory=list)
    operation: Operation | None = None  # once all warps have issued it
    matrix: np.ndarray | None = None  # D, once performed


class Warpgroup:
    """The wgmmas of a warpgroup that not all of its warps have issued, and its latest results."""

    RECENT = 16

    def __init__(self) -> None:
        self.issued = [0] * WARPS
        self.incomplete: dict[int, Product] = {}
        self.recent: dict[int, Product] = {}

    def next(self, warp: int, form: _Form) -> Product:
        """The product that `warp` issues now: its k-th wgmma belongs with the k-th of the others."""
        number = self.issued[warp]
        self.issued[warp] += 1
        product = self.incomplete.get(number)
        if product is None:
            result = np.full((form.n // 2, WARPS * LANES), PENDING_BITS, np.uint32)
            registers = [tuple(result[:, LANES * w : LANES * (w + 1)]) for w in range(WARPS)]
            product = self.incomplete[number] = Product(form, result, registers)
        if len(product.strands) == WARPS - 1:
            del self.incomplete[number]
        return product

    def remember(self, product: Product) -> None:
        """Keeps D in matrix form, so that a chain need not take fragments apart."""
        while len(self.recent) >= self.RECENT:
            self.recent.pop(next(iter(self.recent)))
        self.recent[id(product.registers[0][0])] = product

    def accumulator(self, product: Product) -> np.ndarray:
        """What the four warps hold in their accumulator registers, [64, N]."""
        known = self.recent.pop(id(product.accumulators[0][0]), None)
        if known is not None and all(map(_same, known.registers, product.accumulators)):
            return known.matrix
        rows = zip(*product.accumulators, strict=True)
        fragment = np.stack([np.concatenate([values.as_lanes(value, 32) for value in row]) for row in rows])
        return matrix.accumulator_from_fragment(fragment.view(np.float32))


def _same(registers: tuple[Value, ...], others: tuple[Value, ...]) -> bool:
    return all(map(is_, registers, others))


def wgmma(
    strand: Strand,
    accumulators: tuple[Value, ...],
    a: Value | tuple[Value, ...],
    b: Value,
    scale_d: Value,
    negate: tuple[bool, bool],
    majors: tuple[Major, Major],
    n: int,
    dtype: str,
    unfenced: bool,
) -> tuple[np.ndarray, ...]:
    """wgmma.mma_async: the new accumulator registers, which are filled when the operation is performed."""
    warp = strand.warp
    if unfenced and warp.launch.races:
        raise strand.error(RaceError, "wgmma.mma_async on accumulators that no wgmma.fence has covered")
    if strand.mask != FULL_MASK:
        raise strand.error(DivergenceError, "wgmma by a warp of which not all lanes take part")
    from_registers = isinstance(a, tuple)
    form = _Form(
        None if from_registers else uniform_operand(strand, a, "the descriptor of A"),
        uniform_operand(strand, b, "the descriptor of B"),
        bool(uniform_operand(strand, scale_d, "scale-d")),
        negate,
        majors,
        n,
        dtype,
    )
    group = warp.cta.warpgroups.setdefault(warp.index // WARPS, Warpgroup())
    position = warp.index % WARPS
    product = group.next(position, form)
    if product.form != form:
        raise strand.error(DivergenceError, "the warps of a warpgroup issue different wgmmas")
    product.accumulators[position] = accumulators
    product.a[position] = a if from_registers else None
    product.strands.append(strand)
    if len(product.strands) == WARPS:
        _submit(strand, group, product)
    warp.wgmma_open.append(product)
    return product.registers[position]


def _submit(strand: Strand, group: Warpgroup, product: Product) -> None:
    """All warps have issued the product: checks it and queues it."""
    warp, form = strand.warp, product.form
    cta, launch = warp.cta, warp.launch
    operand_a = None if form.a is None else Operand(cta, form.a, False, form.majors[0], ROWS)
    operand_b = Operand(cta, form.b, False, form.majors[1], form.n)
    if launch.races:
        leader = cta.warps[warp.index // WARPS * WARPS]
        access = strand.pipe_access(Pipe.MMA, warp.issued[Pipe.MMA] + 1, asynchronous=True)
        access.agent = leader.pipes[Pipe.MMA]
        # Any of the warps may read any part: only what all of them know may be relied on.
        access.knows = np.minimum.reduce([other.warp.clock for other in product.strands])
        for operand in filter(None, (operand_a, operand_b)):
            operand.check_race(strand, access)
    count = mac_counter(strand, [operand_a] if operand_a else [], [operand_b], ROWS, form.n)

    def run() -> None:
        count()
        if operand_a is None:
            rows = zip(*product.a, strict=True)
            fragment = np.stack([np.concatenate([values.as_lanes(value, 32) for value in row]) for row in rows])
            left = matrix.operand_values(matrix.a_from_fragment(fragment), form.dtype, form.negate[0])
        else:
            left = operand_a.values(form.dtype, form.negate[0])
        before = group.accumulator(product) if form.accumulate else None
        product.matrix = matrix.multiply_accumulate(before, left, operand_b.values(form.dtype, form.negate[1]))
        product.result.view(np.float32)[...] = matrix.accumulator_to_fragment(product.matrix)
        product.accumulators = []
        group.remember(product)

    product.operation = launch.queue.submit(("wgmma", id(group)), run, strand.location())


def wgmma_commit(strand: Strand) -> None:
    warp = strand.warp
    warp.issued[Pipe.MMA] += 1
    warp.wgmma_groups.append((warp.issued[Pipe.MMA], warp.wgmma_open))
    warp.wgmma_open = []


class WarpgroupWait(Wait):
    """Other warps of the warpgroup have not issued the wgmmas that this one waits for."""

    def __init__(self, products: list[Product]):
        self.products = products

    def ready(self) -> bool:
        return all(product.operation is not None for product in self.products)

    def describe(self) -> str:
        return "the other warps of its warpgroup, which have not issued the same wgmmas"


def wgmma_wait(strand: Strand, pending: int) -> Any:
    """wgmma.wait_group: the newest `pending` groups may be unfinished."""
    warp = strand.warp
    groups = list(warp.wgmma_groups)[: max(len(warp.wgmma_groups) - pending, 0)]
    products = [product for _, members in groups for product in members]
    if any(product.operation is None for product in products):
        strand.wait = WarpgroupWait(products)
        return PENDING
    strand.wait = None
    leader = warp.cta.warps[warp.index // WARPS * WARPS]
    for product in products:
        warp.launch.queue.finish(product.operation)
    for number, _ in groups:
        warp.wgmma_groups.popleft()
        row = warp.clock[ORDERED]
        row[leader.pipes[Pipe.MMA]] = max(int(row[leader.pipes[Pipe.MMA]]), number)
    return None


@emits("wgmma.mma_async")
def _emit_wgmma(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    aligned(m)
    dtype, shape = m.rest[-1], m.rest[0]
    if m.rest[1:] != ["f32", dtype, dtype] or dtype not in ("bf16", "f16") or not shape.endswith("k16"):
        raise UnsupportedInstruction(f"wgmma.{'.'.join(m.rest)} is not modelled")
    m.rest.clear()
    n = int(shape[len("m64n") : -len("k16")])
    matrix.check_wgmma_shape(n)
    target, a, b, scale_d, *rest = i.operands
    from_registers = isinstance(a, Vector)
    scales = [operand.value for operand in rest[:2]]
    transposes = [operand.value for operand in rest[2:]]
    majors = [Major(value) for value in ([0, *transposes] if from_registers else transposes)]
    if len(majors) != 2 or any(scale not in (1, -1) for scale in scales):
        raise UnsupportedInstruction("wgmma with these immediates is not modelled")
    left = tuple_source(t, a) if from_registers else t.source(a, "u64")
    call = (
        f"{t.bind(wgmma, 'wgmma')}(s, {tuple_source(t, target)}, {left}, {t.source(b, 'u64')}, "
        f"{t.source(scale_d, 'pred')}, "
        f"{tuple(scale == -1 for scale in scales)}, {t.bind(tuple(majors), 'majors')}, {n}, {dtype!r}, "
        f"{t.at in t.unfenced_wgmma})"
    )
    return Effect((target,), call)


@emits("wgmma.fence")
def _emit_fence(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    aligned(m)
    return Effect((), f"{t.bind(nothing, 'nothing')}()")


@emits("wgmma.commit_group")
def _emit_commit(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    aligned(m)
    return Effect((), f"{t.bind(wgmma_commit, 'wgmma_commit')}(s)")


@emits("wgmma.wait_group", blocking=True)
def _emit_wait(t: Translator, i: Instruction, m: Modifiers) -> Blocking:
    aligned(m)
    return Blocking((), f"{t.bind(wgmma_wait, 'wgmma_wait')}(s, {i.operands[0].value})")
