"""Instructions of ``mma.cuh`` and types of ``element.cuh`` in NumPy, on raw bits.

An MMA is put together from the registers of a warp's 32 lanes as the instruction's definition says,
multiplied, and handed back to them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LANES = 32
LANE = np.arange(LANES)
G, T = LANE >> 2, LANE & 3
U32 = np.uint32


def round_tf32(bits: np.ndarray) -> np.ndarray:
    """``cvt.rn.tf32.f32``, as sm_90 and newer round; older ones round ties away from zero."""
    finite = (bits & U32(0x7F800000)) != U32(0x7F800000)
    rounded = (bits + U32(0xFFF) + (bits >> U32(13) & U32(1))) & U32(0xFFFFE000)
    return np.where(finite, rounded, bits).astype(U32)


@dataclass(frozen=True)
class Element:
    """A trait of ``element.cuh``: elements are raw bits, sums float32."""

    storage: type
    widen: Callable[[np.ndarray], np.ndarray]
    narrow: Callable[[np.ndarray], np.ndarray]

    @property
    def size(self) -> int:
        return np.dtype(self.storage).itemsize

    @property
    def one(self) -> int:
        """``Mma<E>::kOne``."""
        return int(self.narrow(np.ones(1, dtype=np.float32))[0])


def _bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(U32) << U32(16)).view(np.float32)


def _f32_to_bf16(values: np.ndarray) -> np.ndarray:
    """``cvt.rn.bf16.f32``: to nearest, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)
    return np.where(np.isnan(values), U32(0x7FFF), rounded).astype(np.uint16)


def _f32_to_f16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(values).astype(np.float16).view(np.uint16)


TRAITS = {
    "F32": Element(
        U32,
        lambda bits: np.ascontiguousarray(bits).view(np.float32),
        lambda values: np.ascontiguousarray(values, dtype=np.float32).view(U32),
    ),
    "F16": Element(
        np.uint16,
        lambda bits: np.ascontiguousarray(bits).view(np.float16).astype(np.float32),
        _f32_to_f16,
    ),
    "BF16": Element(np.uint16, _bf16_to_f32, _f32_to_bf16),
}


def byte_perm(x: np.ndarray, y: np.ndarray, selector: int) -> np.ndarray:
    """``__byte_perm``."""
    both = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    found = np.zeros(both.shape, dtype=np.uint64)
    for byte in range(4):
        chosen = np.uint64(8 * (selector >> 4 * byte & 7))
        found |= (both >> chosen & np.uint64(255)) << np.uint64(8 * byte)
    return found.astype(U32)


def popc(words: np.ndarray) -> np.ndarray:
    return np.bitwise_count(words).astype(np.int64)


def multiply(
    element: Element, rows: list[np.ndarray], q: int, weights: np.ndarray, c: np.ndarray
) -> None:
    """``Mma<E>::multiply``: two rows of B [items, 32, words], weights [stack, words, items, 32].

    ``c`` [items, stack, 32, 4] in place.
    """
    if element.size == 2:
        a = [byte_perm(rows[0][..., q], rows[1][..., q], s) for s in (0x5410, 0x7632)]
    else:
        a = [round_tf32(rows[k][..., 2 * q + m]) for k in range(2) for m in range(2)]
    for s in range(c.shape[1]):
        mma(element, c[:, s], a, list(weights[s]))


def mma(element: Element, c: np.ndarray, a: list[np.ndarray], b: list[np.ndarray]) -> None:
    """One m16n8k8 a warp: registers a, b, c [items, 32(, 4)], c in place."""
    halves = element.size == 2
    left = np.zeros((c.shape[0], 16, 8), dtype=np.float32)
    right = np.zeros((c.shape[0], 8, 8), dtype=np.float32)
    for i, register in enumerate(a):
        m = G + 8 * (i % 2)
        if halves:
            left[:, m, 2 * T], left[:, m, 2 * T + 1] = unpack_halves(element, register)
        else:
            left[:, m, T + 4 * (i // 2)] = element.widen(register)
    for i, register in enumerate(b):
        if halves:
            right[:, 2 * T, G], right[:, 2 * T + 1, G] = unpack_halves(element, register)
        else:
            right[:, T + 4 * i, G] = element.widen(register)
    with np.errstate(invalid="ignore"):
        product = left @ right
    for i in range(4):
        c[..., i] += product[:, G + 8 * (i // 2), 2 * T + i % 2]


def unpack_halves(element: Element, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.ascontiguousarray(words).view(np.uint16).reshape(*words.shape, 2)
    return element.widen(pairs[..., 0]), element.widen(pairs[..., 1])
