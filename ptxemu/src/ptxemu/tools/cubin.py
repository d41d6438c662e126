"""What ptxas says about the kernels of a cubin: registers and stack, read from the ELF file itself."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass, replace

_SECTION = struct.Struct("<IIQQQQIIQQ")  # of a 64-bit ELF file
_SYMBOL = struct.Struct("<IBBHQQ")
_SECTION_TABLE = 0x28  # offset of the table's offset in the file's header
_SECTION_COUNTS = 0x3A  # of the size of an entry, their number, and the number of the one with the names
_INFO_SECTION = ".nv.info"


class _Format(enum.IntEnum):
    """How the value of an attribute is stored."""

    SIZED = 4


class _Attribute(enum.IntEnum):
    """Attributes of `.nv.info` whose value is a symbol's number and a quantity."""

    FRAME_BYTES = 0x11
    MIN_STACK_BYTES = 0x12
    REGISTERS = 0x2F


@dataclass(frozen=True)
class Resources:
    """What a thread of a kernel needs. Spilled registers would lie on the stack."""

    registers: int = 0
    stack_bytes: int = 0


def resources(cubin: bytes) -> dict[str, Resources]:
    """The needs of every kernel in a cubin, by its name."""
    sections = _sections(cubin)
    found: dict[str, Resources] = {}
    info = sections[_INFO_SECTION]
    position = 0
    while position < len(info):
        format_, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if format_ != _Format.SIZED:
            continue  # the value was the two bytes in place of a size
        if attribute in tuple(_Attribute):
            symbol, quantity = struct.unpack_from("<II", info, position)
            name = _symbol_name(sections, symbol)
            known = found.setdefault(name, Resources())
            found[name] = _with(known, _Attribute(attribute), quantity)
        position += size
    return {name: needs for name, needs in found.items() if needs.registers}


def _with(known: Resources, attribute: _Attribute, quantity: int) -> Resources:
    if attribute is _Attribute.REGISTERS:
        return replace(known, registers=quantity)
    return replace(known, stack_bytes=max(known.stack_bytes, quantity))


def _sections(cubin: bytes) -> dict[str, bytes]:
    if not cubin.startswith(b"\x7fELF"):
        raise ValueError("a cubin is an ELF file, and this is none")
    (table,) = struct.unpack_from("<Q", cubin, _SECTION_TABLE)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", cubin, _SECTION_COUNTS)
    headers = [_SECTION.unpack_from(cubin, table + index * entry_bytes) for index in range(count)]
    names = _content(cubin, headers[names_index])
    return {_string(names, header[0]): _content(cubin, header) for header in headers}


def _content(cubin: bytes, header: tuple[int, ...]) -> bytes:
    offset, size = header[4], header[5]
    return cubin[offset : offset + size]


def _symbol_name(sections: dict[str, bytes], number: int) -> str:
    name, *_ = _SYMBOL.unpack_from(sections[".symtab"], number * _SYMBOL.size)
    return _string(sections[".strtab"], name)


def _string(table: bytes, start: int) -> str:
    return table[start : table.index(b"\0", start)].decode()
