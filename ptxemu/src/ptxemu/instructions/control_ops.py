"""Emitters of branches, exits and traps."""

from __future__ import annotations

from ptxemu.isa.parser import Instruction
from ptxemu.isa.translate import EXITED, Control, Effect, Modifiers, Translator, emits


@emits("bra")
def _bra(t: Translator, i: Instruction, m: Modifiers) -> Control:
    m.flag("uni")
    target = t.block_of[i.target]
    if i.predicate is None:
        return Control(f"return {target}")
    following = t.next_block
    predicate = t.source(i.predicate, "pred")
    return Control(
        f"p = {predicate}\nif p is True: return {target}\nif p is False: return {following}\n"
        f"s.at = {t.at}\nreturn diverge(s, p, {target}, {following})"
    )


@emits("ret", "exit")
def _exit(t: Translator, i: Instruction, m: Modifiers) -> Control:
    m.flag("uni")
    return Control(f"return {EXITED}")


@emits("trap")
def _trap(t: Translator, i: Instruction, m: Modifiers) -> Control:
    return Control(f"s.at = {t.at}\ns.trap()")


@emits("nanosleep")
def _nanosleep(t: Translator, i: Instruction, m: Modifiers) -> Effect:
    m.need("u32")
    return Effect((), "s.spin()")
