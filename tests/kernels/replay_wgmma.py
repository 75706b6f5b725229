"""The copy engine, barriers and WGMMA operands of ``wgmma.cuh`` in NumPy, from their definitions.

Two definitions meet in shared memory. The engine writes a box row by row, 128 bytes each, and puts
16-byte chunk j of row r where chunk ``j ^ (r mod 8)`` would be. WGMMA finds an element by the
canonical layouts of the PTX ISA (in elements of 16 bits, T = 8 of them a chunk),

    K-major   ((8, m), (T, 2)) : ((8T, SBO), (1, T))
    MN-major  ((T, 8, m), (8, k)) : ((1, T, LBO), (8T, SBO))

from the descriptor's start on, and then exchanges bits 4-6 of the address by XOR with bits 7-9.
Rows of 64 bytes, of FP8, have a swizzle of that width: chunk ``j ^ (r / 2 mod 4)``, bits 4-5 and
7-8. TF32 has that of 16 bits, with half as many elements a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from sparsetile.jit import tensor_map
from sparsetile.jit.tensor_map import MAP_WORDS, TensorMap
from tests.kernels.replay import Array, Machine

ITEM = 2  # bytes of an element; FP8's is 1, TF32's 4
SWIZZLE = 128  # bytes of a row in the swizzle
ATOM = 1024
CHUNK = 16
RUBBISH = 0xFFFF  # NaN in all types


@dataclass(frozen=True)
class Matrix:
    """What a tensor map says."""

    pointer: int
    dtype: torch.dtype
    shape: tuple[int, int]
    row_bytes: int
    box: tuple[int, int]


class Maps:
    """Stands for ``encode_matrix``: a map's first word is the number of its matrix here."""

    def __init__(self) -> None:
        self.known: list[Matrix] = []

    def encode(
        self,
        pointer: int,
        dtype: torch.dtype,
        shape: tuple[int, int],
        row_bytes: int,
        box: tuple[int, int],
    ) -> TensorMap:
        tensor_map._check(pointer, row_bytes, shape[1], box, dtype.itemsize)
        assert min(shape) > 0, "the driver refuses an empty matrix"
        self.known.append(Matrix(pointer, dtype, shape, row_bytes, box))
        return (len(self.known), *[7] * (MAP_WORDS - 1))

    def matrix(self, words: list[int]) -> Matrix:
        assert words[1:] == [7] * (MAP_WORDS - 1), "a map is whole"
        return self.known[words[0] - 1]


def box_places(to: int, rows: int, columns: int, item: int = ITEM) -> np.ndarray:
    """Where the engine puts element (r, c) of a box that goes to ``to``: byte addresses."""
    width = SWIZZLE // 2 if item == 1 else SWIZZLE
    assert to % (8 * width) == 0, "the swizzle begins at a multiple of its atom"
    assert columns * item == width, "rows of the box are rows of the swizzle"
    r, c = np.arange(rows)[:, None], np.arange(columns)
    chunk, inside = np.divmod(c * item, CHUNK)
    return to + r * width + (chunk ^ (r // 2 % 4 if item == 1 else r % 8)) * CHUNK + inside


@dataclass(frozen=True)
class Descriptor:
    """The fields of a matrix descriptor."""

    start: int
    leading: int
    stride: int
    swizzle: int

    @classmethod
    def of(cls, word: int) -> Descriptor:
        """Bits 0-13, 16-29, 32-45 in units of 16 bytes, 62-63."""
        fields = (word >> shift & 0x3FFF for shift in (0, 16, 32))
        start, leading, stride = (16 * field for field in fields)
        return cls(start, leading, stride, word >> 62)

    def _swizzled(self, at: np.ndarray) -> np.ndarray:
        assert self.swizzle in (1, 2), "the swizzle of 128 bytes, or of 64"
        return at ^ (at >> 7 & (7 if self.swizzle == 1 else 3)) << 4

    def k_major(self, m: np.ndarray, k: np.ndarray, item: int | None = None) -> np.ndarray:
        """Byte address of element (m, k) of 32 bytes of k; FP8 in the swizzle of 64 bytes."""
        width, usual = (SWIZZLE, ITEM) if self.swizzle == 1 else (SWIZZLE // 2, 1)
        item = item or usual
        return self._swizzled(self.start + m % 8 * width + m // 8 * self.stride + k * item)

    def mn_major(self, k: np.ndarray, n: np.ndarray) -> np.ndarray:
        """Byte address of element (k, n)."""
        along_n = n % 64 * ITEM + n // 64 * self.leading
        return self._swizzled(self.start + along_n + k % 8 * SWIZZLE + k // 8 * self.stride)


def descriptor(address: int, leading: int, stride: int, row_bytes: int = SWIZZLE) -> int:
    """``wg::descriptor``."""
    swizzle = {128: 1, 64: 2}[row_bytes]
    return (address & 0x3FFFF) >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | swizzle << 62


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.pending = arrivals
        self.bytes = 0
        self.phase = 0

    def _settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier was made for"
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals

    def arrive(self) -> None:
        self.pending -= 1
        self._settle()

    def expect(self, count: int) -> None:
        self.bytes += count
        self.arrive()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._settle()

    def wait(self, parity: int) -> Iterator[None]:
        """``try_wait.parity``: until the phase of that parity has ended."""
        while self.phase % 2 == parity:
            yield


class Leaving:
    """The boxes that one thread has stored: how many the engine has still to read."""

    def __init__(self) -> None:
        self.boxes = 0

    def wait_read(self) -> Iterator[None]:
        """``cp.async.bulk.wait_group.read 0``."""
        while self.boxes:
            yield


class Shared:
    """Shared memory of a block, and copies that are on their way to it or from it."""

    def __init__(self, machine: Machine, maps: Maps, base: int, size: int) -> None:
        self.machine, self.maps = machine, maps
        self.base, self.size = base, size
        self.data = np.full(base + size, RUBBISH, dtype=np.uint16)  # by address / 2
        self.views = {1: self.data.view(np.uint8), 2: self.data, 4: self.data.view(np.uint32)}
        self.unseen = np.zeros(base + size, dtype=bool)  # written, but not for the engine yet
        self.coming: list[Callable[[], None]] = []
        self.leaving: list[Callable[[], None]] = []

    def copy_box(self, to: int, words: list[int], column: int, row: int, barrier: Barrier) -> None:
        """Rubbish until it lands, at some time; then the box, zeros outside of the matrix."""
        matrix = self.maps.matrix(words)
        rows, columns = matrix.box
        item = matrix.dtype.itemsize
        places = box_places(to, rows, columns, item)
        assert self.base <= places.min() and places.max() < self.base + self.size, "outside"
        r, c = row + np.arange(rows)[:, None], column + np.arange(columns)
        inside = (r < matrix.shape[0]) & (c < matrix.shape[1])
        memory = self.views[item]
        kind = memory.dtype
        source = self.machine.array(matrix.pointer, kind)
        at = np.where(inside, r * (matrix.row_bytes // item) + c, 0)
        found = np.where(inside, source.load(at)[..., 0], 0).astype(kind)
        memory[places // item] = np.iinfo(kind).max  # NaN in all types

        def land() -> None:
            memory[places // item] = found
            barrier.complete(places.size * item)

        self.coming.append(land)

    def read(self, addresses: np.ndarray, item: int = ITEM) -> np.ndarray:
        assert self.base <= addresses.min() and addresses.max() < self.base + self.size, "outside"
        return self.views[item][addresses // item]

    def store_matrices(self, addresses: np.ndarray, word: np.ndarray) -> None:
        """``stmatrix.x4`` of a warp: ``addresses`` [32], ``word`` [32, 4].

        Row r of matrix i, words i of lanes 4 r to 4 r + 3, goes to the address of lane 8 i + r.
        """
        assert not (addresses % CHUNK).any(), "misaligned"
        assert self.base <= addresses.min() and addresses.max() < self.base + self.size, "outside"
        rows = np.ascontiguousarray(word.reshape(8, 4, 4).transpose(2, 0, 1)).reshape(32, 4)
        for phase in addresses.reshape(4, 8):
            assert len({*(phase % SWIZZLE)}) == 8, "rows of a matrix meet in a bank"
        places = addresses[:, None] // ITEM + np.arange(CHUNK // ITEM)
        self.data[places] = rows.view(np.uint16)
        self.unseen[places] = True

    def fence(self, begin: int, size: int) -> None:
        """``fence.proxy.async`` of the threads that wrote there."""
        self.unseen[begin // ITEM : (begin + size) // ITEM] = False

    def store_box(
        self, words: list[int], column: int, row: int, begin: int, c: Array, who: Leaving
    ) -> None:
        """A box to ``c``, the map's matrix; read at some time, and not to change until then."""
        matrix = self.maps.matrix(words)
        assert matrix.pointer == c.address
        rows, columns = matrix.box
        places = box_places(begin, rows, columns) // ITEM
        assert not self.unseen[places].any(), "written, but not for the engine"
        r, at = row + np.arange(rows)[:, None], column + np.arange(columns)
        whole = -(-matrix.shape[1] * ITEM // CHUNK) * CHUNK // ITEM  # 16 bytes at least are stored
        inside = (r < matrix.shape[0]) & (at < whole)
        before = self.data[places]
        who.boxes += 1

        def leave() -> None:
            assert np.array_equal(self.data[places], before), "overwritten on its way out"
            to = (r * (matrix.row_bytes // ITEM) + at)[inside]
            c.store(to, before[inside][:, None])
            who.boxes -= 1

        self.leaving.append(leave)
