"""Tensor-core operands in shared memory: gathering, race checks, and how much of them is not fill."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ptxemu.errors import DescriptorError
from ptxemu.isa import values
from ptxemu.isa.values import Value
from ptxemu.machine.memory import CHUNK, UNKNOWN_SWIZZLE, WORD
from ptxemu.machine.races import Access
from ptxemu.machine.state import Cta, Strand
from ptxemu.models import matrix
from ptxemu.models.matrix import K_STEP, Major, SharedDescriptor
from ptxemu.models.tensor_map import Swizzle

_WORDS_PER_CHUNK = CHUNK // WORD
_CHUNK_WORDS = np.arange(_WORDS_PER_CHUNK)
_ELEMENTS_PER_CHUNK = 8
_CACHED_OPERANDS = 64


@lru_cache(maxsize=8192)
def decode_descriptor(bits: int, blackwell: bool) -> SharedDescriptor:
    return SharedDescriptor.from_tcgen05(bits) if blackwell else SharedDescriptor.from_wgmma(bits)


@lru_cache(maxsize=8192)
def _chunks(bits: int, blackwell: bool, major: Major, rows: int, shared_bytes: int) -> np.ndarray:
    """The chunks of an operand: [rows, 2] if K-major, [16, rows / 8] if MN-major."""
    return matrix.operand_chunks(decode_descriptor(bits, blackwell), major, rows, shared_bytes=shared_bytes)


@lru_cache(maxsize=8192)
def _chunk_words(bits: int, blackwell: bool, major: Major, rows: int, shared_bytes: int) -> np.ndarray:
    chunks = _chunks(bits, blackwell, major, rows, shared_bytes)
    return (chunks.reshape(-1, 1) * _WORDS_PER_CHUNK + _CHUNK_WORDS).reshape(-1)


class Operand:
    """K = 16 columns of a matrix in the shared memory of one CTA."""

    def __init__(self, cta: Cta, descriptor: int, blackwell: bool, major: Major, rows: int):
        self.cta, self.major, self.rows = cta, major, rows
        self.key = (descriptor, blackwell, major, rows, cta.shared.size)

    def check_race(self, strand: Strand, access: Access | None) -> None:
        if access is not None:
            conflict = self.cta.shared_shadow.read(_chunk_words(*self.key), access)
            strand.race(conflict, "the tensor core's read of shared memory")

    def values(self, dtype: str, negate: bool) -> np.ndarray:
        """float64 values [rows, 16]; cached until the CTA's shared memory changes."""
        shared = self.cta.shared
        cache = self.cta.operand_cache
        key = (*self.key, dtype, negate)
        found = cache.get(key)
        if found is not None and found[0] == shared.version:
            return found[1]
        chunks = _chunks(*self.key)
        self.cta.cluster.launch.guard(shared.require_written, chunks, CHUNK, "the tensor core's read")
        self._check_swizzle(shared.swizzles[chunks])
        bits = shared.chunks[chunks].view(np.uint16)
        result = matrix.operand_values(bits if self.major is Major.K else bits.T, dtype, negate)
        if len(cache) > _CACHED_OPERANDS:
            cache.clear()
        cache[key] = (shared.version, result)
        return result

    def _check_swizzle(self, written: np.ndarray) -> None:
        """The descriptor must undo the swizzle by which a tensor map's copy laid the operand out, if one did."""
        swizzle = decode_descriptor(*self.key[:2]).swizzle
        if (written == swizzle).all():
            return
        wrong = (written != swizzle) & (written != UNKNOWN_SWIZZLE)
        if wrong.any():
            found = Swizzle(int(written[wrong][0]))
            raise DescriptorError(
                f"the descriptor of an operand says swizzle {swizzle.name}; a tensor map with swizzle {found.name} "
                "has written it"
            )

    def reader(self, dtype: str, negate: bool) -> Callable[[], np.ndarray]:
        return lambda: self.values(dtype, negate)

    def useful(self) -> np.ndarray:
        """For each k, how many rows hold something else than fill, as far as chunks of 16 bytes tell."""
        flags = self.cta.shared.useful_chunks[_chunks(*self.key)]
        if self.major is Major.K:
            return flags.sum(axis=0).repeat(_ELEMENTS_PER_CHUNK)
        return flags.sum(axis=1) * _ELEMENTS_PER_CHUNK


def mac_counter(strand: Strand, a: list[Operand], b: list[Operand], m: int, n: int) -> Callable[[], None]:
    counts = strand.warp.launch.counts

    def count() -> None:
        counts.macs_issued += m * n * K_STEP
        rows = sum(operand.useful() for operand in a) if a else np.full(K_STEP, m)
        counts.macs_useful += int((rows * sum(operand.useful() for operand in b)).sum())

    counts.bytes["shared to tensor core"] += sum(operand.rows * K_STEP * 2 for operand in (*a, *b))
    return count


def uniform_operand(strand: Strand, value: Value, what: str) -> int:
    shared = values.uniform(value, strand.mask)
    if shared is None:
        raise strand.error(DescriptorError, f"{what} differs between lanes")
    return shared
