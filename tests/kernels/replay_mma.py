"""Instructions of ``mma.cuh`` in NumPy, on registers of all 32 lanes of a warp.

An MMA is put together from its lanes' registers as the instruction's definition says, multiplied,
and handed back to them.
"""

from __future__ import annotations

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


def mma(c: np.ndarray, a: list[np.ndarray], b: list[np.ndarray], halves: bool) -> None:
    """One m16n8k8 a warp: registers a, b, c [items, 32(, 4)], c in place."""
    left = np.zeros((c.shape[0], 16, 8), dtype=np.float32)
    right = np.zeros((c.shape[0], 8, 8), dtype=np.float32)
    for i, register in enumerate(a):
        m = G + 8 * (i % 2)
        if halves:
            left[:, m, 2 * T], left[:, m, 2 * T + 1] = unpack_halves(register)
        else:
            left[:, m, T + 4 * (i // 2)] = register.view(np.float32)
    for i, register in enumerate(b):
        if halves:
            right[:, 2 * T, G], right[:, 2 * T + 1, G] = unpack_halves(register)
        else:
            right[:, T + 4 * i, G] = register.view(np.float32)
    with np.errstate(invalid="ignore"):
        product = left @ right
    for i in range(4):
        c[..., i] += product[:, G + 8 * (i // 2), 2 * T + i % 2]


def unpack_halves(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    pairs = np.ascontiguousarray(words).view(np.float16).reshape(*words.shape, 2)
    return pairs[..., 0].astype(np.float32), pairs[..., 1].astype(np.float32)
